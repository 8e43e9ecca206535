#include "common/parallel.h"

#include <pthread.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace gas {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Time that a thread looks for work, or for the end of a piece, before it sleeps: about as long as
// waking it takes. On a machine that is busy, spinning takes a core from those who compute.
constexpr microseconds kSpin{20};

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until there() for a short time; returns there().
template <typename There>
bool spin(const There& there) {
  const auto deadline = steady_clock::now() + kSpin;
  while (!there()) {
    if (steady_clock::now() >= deadline) return false;
    for (int i = 0; i < 8; ++i) pause();
  }
  return true;
}

// One loop. Helpers share it: one of them may only just be looking at a loop that has ended.
struct Loop {
  void (*const run)(const void*, int, int64_t);
  const void* const body;  // On the caller's stack: used only while a piece is being run.
  const int64_t pieces;
  const int threads;
  int joined = 1;  // Workers, the caller among them. Guarded by the pool's mutex.

  // Every worker has a share of neighbouring pieces, about the same in loop after loop, so that it
  // finds in its cache what it has written; once it has done those, it takes of others' shares.
  std::vector<std::atomic<int64_t>> next;  // First piece of each share that no thread has taken.
  std::atomic<int64_t> ended{0};           // Pieces.
  std::mutex mutex;
  std::condition_variable over;
  std::exception_ptr error;  // Of the first piece that has thrown. Guarded by `mutex`.
  int64_t failed = 0;

  Loop(void (*run)(const void*, int, int64_t), const void* body, int64_t pieces, int threads)
      : run(run), body(body), pieces(pieces), threads(threads), next(threads) {
    for (int share = 0; share < threads; ++share) next[share] = share_begin(share);
  }

  int64_t share_begin(int share) const { return share * pieces / threads; }

  bool has_work() const {
    for (int share = 0; share < threads; ++share) {
      if (next[share].load(std::memory_order_relaxed) < share_begin(share + 1)) return true;
    }
    return false;
  }

  // Returns a piece that no thread has taken, or -1.
  int64_t take(int worker) {
    for (int i = 0; i < threads; ++i) {
      const int share = (worker + i) % threads;
      const int64_t piece = next[share].fetch_add(1, std::memory_order_relaxed);
      if (piece < share_begin(share + 1)) return piece;
    }
    return -1;
  }

  bool has_ended() const { return ended.load(std::memory_order_acquire) == pieces; }

  // Runs pieces until none is left to take.
  void work(int worker) {
    for (int64_t piece = take(worker); piece >= 0; piece = take(worker)) {
      try {
        run(body, worker, piece);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!error || piece < failed) {
          error = std::current_exception();
          failed = piece;
        }
      }
      if (ended.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces && worker > 0) {
        const std::lock_guard<std::mutex> lock(mutex);
        over.notify_one();
      }
    }
  }

  // Waits until the pieces that others have taken have ended.
  void wait() {
    if (spin([&] { return has_ended(); })) return;
    std::unique_lock<std::mutex> lock(mutex);
    over.wait(lock, [&] { return has_ended(); });
  }
};

// The helpers of all loops of the process.
class Pool {
 public:
  void publish(const std::shared_ptr<Loop>& loop) {
    const int helpers = loop->threads - 1;
    int wake;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      loops_.push_back(loop);
      published_.fetch_add(1, std::memory_order_release);
      while (started_ < helpers && start_helper()) {
      }
      wake = std::min(helpers, sleeping_);
    }
    for (; wake > 0; --wake) work_.notify_one();
  }

  void withdraw(const std::shared_ptr<Loop>& loop) {
    const std::lock_guard<std::mutex> lock(mutex_);
    loops_.erase(std::find(loops_.begin(), loops_.end(), loop));
  }

 private:
  // Helpers sleep until the process ends: they are never joined, and the pool is never destroyed.
  bool start_helper() {
    try {
      std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {  // The system has no thread left.
      return false;
    }
    ++started_;
    return true;
  }

  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const uint64_t seen = published_.load(std::memory_order_relaxed);
      if (const std::shared_ptr<Loop> loop = find()) {
        const int worker = loop->joined++;
        lock.unlock();
        loop->work(worker);
        lock.lock();
        continue;
      }
      const auto more = [&] { return published_.load(std::memory_order_acquire) != seen; };
      lock.unlock();
      const bool found = spin(more);
      lock.lock();
      if (found) continue;
      ++sleeping_;
      work_.wait(lock, more);
      --sleeping_;
    }
  }

  // A loop that has work and room for a helper.
  std::shared_ptr<Loop> find() const {
    for (const auto& loop : loops_) {
      if (loop->joined < loop->threads && loop->has_work()) return loop;
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<std::shared_ptr<Loop>> loops_;
  std::atomic<uint64_t> published_{0};  // Loops so far.
  int started_ = 0, sleeping_ = 0;      // Helpers.
};

std::atomic<Pool*> pool{nullptr};
std::atomic<bool> forked{false};

// A process that was forked has none of the threads, and perhaps a locked mutex: it begins anew.
void begin_anew() {
  pool.store(nullptr);
  forked.store(true);
}

Pool& get_pool() {
  Pool* found = pool.load(std::memory_order_acquire);
  if (found == nullptr) {
    auto made = std::make_unique<Pool>();
    if (pool.compare_exchange_strong(found, made.get())) found = made.release();
  }
  return *found;
}

// By helpers of our own.
void run_by_helpers(const std::shared_ptr<Loop>& loop) {
  Pool& pool = get_pool();
  pool.publish(loop);
  loop->work(0);
  pool.withdraw(loop);
  loop->wait();
}

#ifdef _OPENMP
// OpenMP's threads are late if they keep the caller waiting for so long, and for a good part of the
// time that it took itself. They are then avoided for a short while: short, because delays happen
// on a quiet machine too, where they are faster than helpers that must be woken.
constexpr milliseconds kLate{1}, kPause{20};
std::atomic<steady_clock::rep> avoided_until{0};

bool team_is_there() {
  return !omp_in_parallel() && !forked.load(std::memory_order_relaxed) &&
         steady_clock::now().time_since_epoch().count() >=
             avoided_until.load(std::memory_order_relaxed);
}

void run_by_team(Loop& loop) {
  const auto begun = steady_clock::now();
  auto done = begun;
#pragma omp parallel num_threads(loop.threads)
  {
    const int worker = omp_get_thread_num();
    loop.work(worker);
    if (worker == 0) done = steady_clock::now();
  }
  const auto ended = steady_clock::now();
  if (ended - done > std::max<steady_clock::duration>(kLate, (done - begun) / 2)) {
    avoided_until.store((ended + kPause).time_since_epoch().count(), std::memory_order_relaxed);
  }
}
#endif

}  // namespace

void run_pieces(int64_t pieces, int threads, void (*run)(const void*, int, int64_t),
                const void* body) {
  static const int at_fork = pthread_atfork(nullptr, nullptr, begin_anew);
  static_cast<void>(at_fork);
  const int workers = static_cast<int>(std::min<int64_t>(threads, pieces));
  const auto loop = std::make_shared<Loop>(run, body, pieces, workers);
#ifdef _OPENMP
  if (team_is_there()) {
    run_by_team(*loop);
  } else {
    run_by_helpers(loop);
  }
#else
  run_by_helpers(loop);
#endif
  if (loop->error) std::rethrow_exception(loop->error);
}

}  // namespace gas
