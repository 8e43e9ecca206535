#include "transfer/engine.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

namespace gas {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

struct Task {
  Engine::Ticket ticket;
  int64_t lane;
  Job job;
  By by = By::kAnyone;
  bool detached = false;
  int64_t next = 0;     // First item that no thread has taken.
  int64_t running = 0;  // Pieces under way.
  std::exception_ptr error = nullptr;

  bool ended() const { return next >= job.size && running == 0; }
};

}  // namespace

// Everything is guarded by one mutex, which is never held while a job runs.
struct Engine::State : std::enable_shared_from_this<Engine::State> {
  std::mutex mutex;
  std::condition_variable work, progress;
  std::list<Task> tasks;                                  // Unfinished, in order of submission.
  std::unordered_map<Ticket, std::exception_ptr> failed;  // Ended with an error, not yet seen.
  std::deque<std::exception_ptr> unseen;                  // Errors of detached jobs.
  std::vector<std::thread> workers;
  int threads;
  int64_t capacity;
  Ticket last = 0;
  steady_clock::duration busy{0};  // Of all pieces that ended.
  bool closing = false, closed = false;
  pid_t process = getpid();

  using Lock = std::unique_lock<std::mutex>;
  using Place = std::list<Task>::iterator;

  // The first task with something for `me` to take whose lane has nothing unfinished before it; of
  // one lane only where `lane` is given.
  Place runnable(const int64_t* lane, By me) {
    const By others = me == By::kWorkers ? By::kWaiters : By::kWorkers;
    std::vector<int64_t> busy;
    for (Place it = tasks.begin(); it != tasks.end(); ++it) {
      if (lane && it->lane != *lane) continue;
      if (std::find(busy.begin(), busy.end(), it->lane) != busy.end()) continue;
      if (it->next < it->job.size && it->by != others) return it;
      busy.push_back(it->lane);
    }
    return tasks.end();
  }

  // Takes a piece of a task, runs it without the lock, and ends the task if it was the last piece.
  // Destroy the job's references without the lock: one may be the last reference to an object.
  void run_piece(Lock& lock, Place task, int64_t items, int helpers) {
    const int64_t begin = task->next;
    const int64_t end = std::min(task->job.size, begin + std::max(items, task->job.grain));
    task->next = end;
    ++task->running;
    std::exception_ptr error;
    lock.unlock();
    const auto start = steady_clock::now();
    try {
      task->job.run(begin, end, helpers);
    } catch (...) {
      error = std::current_exception();
    }
    const auto spent = steady_clock::now() - start;
    lock.lock();
    busy += spent;
    --task->running;
    if (error) {
      if (!task->error) task->error = error;
      task->next = task->job.size;  // Skip the rest of a failed job.
    }
    if (task->ended()) {
      std::list<Task> ended = end_task(task);
      lock.unlock();
      ended.clear();
      lock.lock();
    }
  }

  // Takes a task off the queue; the caller destroys it.
  std::list<Task> end_task(Place task) {
    if (task->error) {
      if (task->detached) {
        unseen.push_back(task->error);
      } else {
        failed[task->ticket] = task->error;
      }
    }
    std::list<Task> ended;
    ended.splice(ended.begin(), tasks, task);
    work.notify_all();  // The lane's next job may start.
    progress.notify_all();
    return ended;
  }

  void run_worker() {
    Lock lock(mutex);
    while (true) {
      const Place task = runnable(nullptr, By::kWorkers);
      if (task != tasks.end()) {
        run_piece(lock, task, 0, 1);
      } else if (closing && tasks.empty()) {
        return;
      } else {
        work.wait(lock);
      }
    }
  }

  // Helps until `over()` or the time is up; returns over().
  template <typename Over>
  bool help(Lock& lock, const int64_t* lane, int helpers, milliseconds most, const Over& over) {
    const auto deadline = steady_clock::now() + most;
    while (!over()) {
      const Place task = runnable(lane, By::kWaiters);
      if (task != tasks.end()) {
        run_piece(lock, task, task->job.size - task->next, helpers);
      } else if (progress.wait_until(lock, deadline) == std::cv_status::timeout) {
        return over();
      }
    }
    return true;
  }

  Place find(Ticket ticket) {
    return std::find_if(tasks.begin(), tasks.end(),
                        [&](const Task& task) { return task.ticket == ticket; });
  }

  void throw_unseen() {
    if (unseen.empty()) return;
    const std::exception_ptr error = unseen.front();
    unseen.pop_front();
    std::rethrow_exception(error);
  }

  void start_workers() {
    if (!workers.empty()) return;
    workers.reserve(threads);
    for (int i = 0; i < threads; ++i) {
      try {
        workers.emplace_back([self = shared_from_this()] { self->run_worker(); });
      } catch (const std::system_error&) {
        if (workers.empty()) throw;
        break;  // The system has no thread left: those that started do the work.
      }
    }
  }
};

Engine::Engine(int threads, int64_t capacity) : state_(std::make_shared<State>()) {
  state_->threads = std::max(0, threads);
  state_->capacity = std::max<int64_t>(1, capacity);
}

Engine::~Engine() {
  if (getpid() != state_->process) {  // Threads and lock are the parent's: keep the state forever.
    new std::shared_ptr<State>(state_);  // NOLINT(bugprone-unhandled-exception-at-new)
    return;
  }
  try {
    close();
  } catch (...) {  // NOLINT(bugprone-empty-catch): no thread is left to report it to.
  }
}

Engine::State& Engine::state() {
  if (getpid() != state_->process) {
    throw std::runtime_error("this transfer engine belongs to the process it was forked from");
  }
  return *state_;
}

Engine::Ticket Engine::submit(int64_t lane, Job job, By by, bool detached) {
  if (state().threads == 0) by = By::kAnyone;
  State& s = state();
  State::Lock lock(s.mutex);
  s.throw_unseen();
  const auto full = [&] { return static_cast<int64_t>(s.tasks.size()) >= s.capacity; };
  while (full() && !s.closing) {
    const State::Place task = s.runnable(nullptr, By::kWaiters);
    if (task != s.tasks.end()) {
      s.run_piece(lock, task, 0, 1);
    } else {
      s.progress.wait(lock);
    }
  }
  if (s.closing) throw std::runtime_error("this transfer engine has been closed");
  if (by != By::kWaiters) s.start_workers();
  const Ticket ticket = ++s.last;
  s.tasks.push_back(Task{ticket, lane, std::move(job), by, detached});
  std::list<Task> ended;
  if (s.tasks.back().ended()) {  // Nothing to do.
    ended = s.end_task(std::prev(s.tasks.end()));
  } else {
    s.work.notify_all();
  }
  lock.unlock();
  return ticket;
}

bool Engine::wait(Ticket ticket, int threads, milliseconds most) {
  State& s = state();
  State::Lock lock(s.mutex);
  s.throw_unseen();
  State::Place task = s.find(ticket);
  if (task != s.tasks.end()) {
    const int64_t lane = task->lane;
    const auto over = [&] { return s.find(ticket) == s.tasks.end(); };
    if (!s.help(lock, &lane, threads, most, over)) return false;
  }
  const auto failure = s.failed.find(ticket);
  if (failure != s.failed.end()) {
    const std::exception_ptr error = failure->second;
    s.failed.erase(failure);
    std::rethrow_exception(error);
  }
  s.throw_unseen();
  return true;
}

bool Engine::wait_lane(int64_t lane, int threads, milliseconds most) {
  State& s = state();
  State::Lock lock(s.mutex);
  Ticket last = 0;
  for (const Task& task : s.tasks) {
    if (task.lane == lane) last = task.ticket;
  }
  const auto over = [&] { return last == 0 || s.find(last) == s.tasks.end(); };
  if (!s.help(lock, &lane, threads, most, over)) return false;
  s.throw_unseen();
  return true;
}

bool Engine::done(Ticket ticket) {
  State& s = state();
  State::Lock lock(s.mutex);
  return s.find(ticket) == s.tasks.end();
}

std::chrono::nanoseconds Engine::busy() {
  State& s = state();
  State::Lock lock(s.mutex);
  return s.busy;
}

void Engine::cancel(const Ticket* tickets, int64_t count) {
  State& s = state();
  std::list<Task> ended;  // Destroyed after the lock, like the errors.
  std::vector<std::exception_ptr> errors;
  State::Lock lock(s.mutex);
  for (int64_t i = 0; i < count; ++i) {
    const State::Place task = s.find(tickets[i]);
    if (task == s.tasks.end()) continue;
    task->next = task->job.size;
    if (task->ended()) ended.splice(ended.end(), s.end_task(task));
  }
  for (int64_t i = 0; i < count; ++i) {
    s.progress.wait(lock, [&] { return s.find(tickets[i]) == s.tasks.end(); });
    const auto failure = s.failed.find(tickets[i]);
    if (failure == s.failed.end()) continue;
    errors.push_back(failure->second);
    s.failed.erase(failure);
  }
}

void Engine::close() {
  State& s = state();
  std::vector<std::thread> workers;
  std::list<Task> ended;
  {
    State::Lock lock(s.mutex);
    s.closing = true;
    for (auto it = s.tasks.begin(); it != s.tasks.end();) {
      const State::Place task = it++;
      if (task->detached) continue;
      task->next = task->job.size;
      if (task->ended()) ended.splice(ended.end(), s.end_task(task));
    }
    const auto none = [&] { return s.tasks.empty(); };
    if (s.workers.empty()) s.help(lock, nullptr, 1, std::chrono::hours(1), none);
    workers.swap(s.workers);
    s.work.notify_all();
    s.progress.notify_all();
  }
  // A job may hold the last reference to the owner of its engine, and then closes it from a worker,
  // which can't wait for itself.
  const bool inside = std::any_of(workers.begin(), workers.end(), [](const std::thread& worker) {
    return worker.get_id() == std::this_thread::get_id();
  });
  for (std::thread& worker : workers) inside ? worker.detach() : worker.join();
  std::unordered_map<Ticket, std::exception_ptr> failed;
  State::Lock lock(s.mutex);
  failed.swap(s.failed);
  s.throw_unseen();
}

}  // namespace gas
