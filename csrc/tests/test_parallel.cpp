#include "common/parallel.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using std::chrono::milliseconds;

// Every index comes once, in pieces of at least `grain`, by workers of the range, each of which
// runs one piece at a time.
void test_covers(int64_t n, int64_t grain, int threads) {
  std::vector<std::atomic<int>> times(n), busy(threads);
  gas::parallel_chunks(n, grain, threads, [&](int worker, int64_t begin, int64_t end) {
    CHECK(0 <= worker && worker < threads && begin < end);
    CHECK(end - begin >= grain || end - begin == n);
    CHECK(++busy[worker] == 1);
    for (int64_t i = begin; i < end; ++i) ++times[i];
    --busy[worker];
  });
  for (const auto& count : times) CHECK(count == 1);
}

// The first exception of a piece is rethrown in the caller, after all pieces have ended.
void test_throws(int threads) {
  std::atomic<int> ended{0};
  std::string message;
  try {
    gas::parallel_chunks(8, 1, threads, [&](int, int64_t begin, int64_t end) {
      std::this_thread::sleep_for(milliseconds(1));
      ended += static_cast<int>(end - begin);
      if (end > 3) throw std::runtime_error(std::to_string(begin));
    });
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(ended == 8 && !message.empty() && std::stoi(message) <= 3);
  test_covers(100, 1, threads);
}

// A loop in a loop ends, although its helpers may all be busy.
void test_nested(int threads) {
  std::atomic<int64_t> total{0};
  gas::parallel_chunks(20, 1, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      gas::parallel_chunks(20, 1, threads,
                           [&](int, int64_t first, int64_t last) { total += last - first; });
    }
  });
  CHECK(total == 400);
}

void test_several_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([] {
      for (int round = 0; round < 200; ++round) test_covers(64, 1, 1 + round % 5);
    });
  }
  for (auto& caller : callers) caller.join();
}

// A caller waits for no more than the pieces that others have begun: while one loop holds all the
// helpers that there are, another one ends.
void test_no_helper_comes() {
  std::atomic<bool> over{false};
  std::atomic<int> begun{0};
  std::thread other([&] {
    gas::parallel_chunks(2, 1, 2, [&](int, int64_t, int64_t) {
      ++begun;
      while (!over) std::this_thread::sleep_for(milliseconds(1));
    });
  });
  while (begun < 1) std::this_thread::yield();
  test_covers(1000, 1, 2);
  over = true;
  other.join();
}

#ifndef __SANITIZE_THREAD__  // It allows no threads after a fork.
// A forked process has no helpers: it neither hangs nor fails, and starts its own.
void test_fork() {
  test_covers(100, 1, 4);
  const pid_t child = fork();
  if (child == 0) {
    for (int round = 0; round < 10; ++round) test_covers(100, 1, 4);
    _exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 8}) {
    for (const int64_t n : {0, 1, 7, 1000}) {
      for (const int64_t grain : {1, 3, 500, 5000}) test_covers(n, grain, threads);
    }
    test_throws(threads);
    test_nested(threads);
  }
  test_several_callers();
  test_no_helper_comes();
#ifndef __SANITIZE_THREAD__
  test_fork();
#endif
}
