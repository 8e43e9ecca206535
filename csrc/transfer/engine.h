// The transfer engine: jobs that overlap with the computation, in lanes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace gas {

// The threads that may run a job: workers, threads that wait for it, or either.
enum class By { kAnyone, kWorkers, kWaiters };

// Work on `size` items, in pieces of at least `grain`: run(begin, end, threads) may be called for
// several pieces at once.
struct Job {
  int64_t size = 1;
  int64_t grain = 1;
  std::function<void(int64_t begin, int64_t end, int threads)> run;
};

// Jobs of one lane run one after the other, in the order they were submitted; jobs of different
// lanes may run at the same time. A history is a lane: a pull sees every push submitted before it
// and none submitted after it, whichever thread does the work.
//
// A thread that waits helps: it runs what is left of the lane up to its own job. On a machine whose
// cores are all busy computing, waiting therefore costs no more than doing the work at once.
//
// All functions may be called from several threads. In a process forked from the one that made the
// engine there are no workers: every function throws std::runtime_error, and destroying it does
// nothing.
class Engine {
 public:
  using Ticket = uint64_t;

  // `threads` workers, started by the first job that they may run; at most `capacity` unfinished
  // jobs. Without workers, all jobs are run by those who wait.
  Engine(int threads, int64_t capacity);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a job; where the queue is full, helps with the oldest jobs first. A job without a
  // waiter is `detached`: its error is thrown by the next `wait` or `submit`.
  Ticket submit(int64_t lane, Job job, By by = By::kAnyone, bool detached = false);

  // Waits until a job and everything before it in its lane has ended, at most `most`; helps with
  // up to `threads` threads. Returns whether it has ended, and throws the job's error, once. A
  // ticket that is not known has ended.
  bool wait(Ticket ticket, int threads, std::chrono::milliseconds most);

  // The same for the last job of a lane; true where it has none.
  bool wait_lane(int64_t lane, int threads, std::chrono::milliseconds most);

  // Returns true if a job has ended.
  bool done(Ticket ticket);

  // The time for which jobs ran so far, those that were waited for included, added up over the
  // threads that took their pieces.
  std::chrono::nanoseconds busy();

  // Takes jobs back: those that have not started never run. Returns once those that have started
  // ended. Their errors are dropped.
  void cancel(const Ticket* tickets, int64_t count);

  // Runs the detached jobs that are left, takes the others back and ends the workers. Nothing can
  // be submitted afterwards. The first unreported error of a detached job is thrown.
  void close();

 private:
  struct State;
  State& state();
  std::shared_ptr<State> state_;  // The workers have it, too: one of them may be the last.
};

}  // namespace gas
