#include "transfer/engine.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "transfer/transfer.h"

using gas::By;
using gas::Engine;
using gas::Job;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLong{60000};

Job call(std::function<void()> body) {
  Job job;
  job.run = [body = std::move(body)](int64_t, int64_t, int) { body(); };
  return job;
}

void sleep_ms(int ms) { std::this_thread::sleep_for(milliseconds(ms)); }

void test_a_lane_keeps_its_order(int threads, By by) {
  Engine engine(threads, 1000);
  std::vector<int> seen;  // Guarded by the lane.
  Engine::Ticket last = 0;
  for (int i = 0; i < 500; ++i) {
    last = engine.submit(0, call([&seen, i] { seen.push_back(i); }), by);
    engine.submit(1 + i % 3, call([] {}), by);
  }
  CHECK(engine.wait(last, 1, kLong));
  CHECK(seen.size() == 500);
  for (int i = 0; i < 500; ++i) CHECK(seen[i] == i);
}

void test_every_item_once(int threads) {
  Engine engine(threads, 10);
  std::vector<std::atomic<int>> seen(10007);
  Job job;
  job.size = 10007;
  job.grain = 100;
  job.run = [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) ++seen[i];
  };
  CHECK(engine.wait(engine.submit(0, job), 2, kLong));
  for (const auto& count : seen) CHECK(count == 1);
}

void test_jobs_of_nothing() {
  Engine engine(1, 10);
  Job job;
  job.size = 0;
  job.run = [](int64_t, int64_t, int) { CHECK(false); };
  CHECK(engine.wait(engine.submit(0, job), 1, kLong));
  CHECK(engine.wait(12345, 1, kLong));  // An unknown job counts as ended.
  CHECK(engine.wait_lane(77, 1, kLong));
}

void test_errors() {
  for (const int threads : {0, 2}) {
    Engine engine(threads, 10);
    const auto fail = call([] { throw std::runtime_error("the disk is gone"); });
    const auto ticket = engine.submit(0, fail);
    bool told = false;
    try {
      engine.wait(ticket, 1, kLong);
    } catch (const std::runtime_error& error) {
      told = std::string(error.what()) == "the disk is gone";
    }
    CHECK(told);
    CHECK(engine.wait(ticket, 1, kLong));  // Once.

    engine.submit(0, fail, By::kAnyone, true);
    CHECK_THROWS(engine.wait_lane(0, 1, kLong), std::runtime_error);
    bool ran = false;
    CHECK(engine.wait(engine.submit(0, call([&] { ran = true; })), 1, kLong));
    CHECK(ran);  // The engine goes on.
  }
}

void test_waiting_for_a_while() {
  Engine engine(1, 10);
  std::atomic<bool> go{false};
  const auto ticket = engine.submit(0, call([&] {
                                      while (!go) sleep_ms(1);
                                    }),
                                    By::kWorkers);
  CHECK(!engine.wait(ticket, 1, milliseconds(5)));
  CHECK(!engine.done(ticket));
  go = true;
  CHECK(engine.wait(ticket, 1, kLong));
  CHECK(engine.done(ticket));
}

void test_who_runs_a_job() {
  Engine engine(1, 10);
  std::thread::id by;
  const auto job = call([&] { by = std::this_thread::get_id(); });
  const auto mine = engine.submit(0, job, By::kWaiters);
  sleep_ms(5);
  CHECK(!engine.done(mine));
  CHECK(engine.wait(mine, 1, kLong));
  CHECK(by == std::this_thread::get_id());
  CHECK(engine.wait(engine.submit(0, job, By::kWorkers), 1, kLong));
  CHECK(by != std::this_thread::get_id());
}

void test_time_of_jobs() {
  for (const int threads : {0, 2}) {
    Engine engine(threads, 10);
    CHECK(engine.busy().count() == 0);
    const auto start = std::chrono::steady_clock::now();
    for (int lane = 0; lane < 2; ++lane) engine.submit(lane, call([] { sleep_ms(20); }));
    CHECK(engine.wait_lane(0, 1, kLong) && engine.wait_lane(1, 1, kLong));
    const auto most = 2 * (std::chrono::steady_clock::now() - start);
    CHECK(engine.busy() >= milliseconds(40) && engine.busy() <= most);
    const auto failed = engine.submit(0, call([] {
                                        sleep_ms(20);
                                        throw std::runtime_error("");
                                      }));
    CHECK_THROWS(engine.wait(failed, 1, kLong), std::runtime_error);
    CHECK(engine.busy() >= milliseconds(60));
  }
}

void test_cancel() {
  Engine engine(1, 10);
  std::atomic<bool> go{false}, started{false};
  int ran = 0;
  const auto first = engine.submit(0, call([&] {
                                     started = true;
                                     while (!go) sleep_ms(1);
                                   }));
  const auto second = engine.submit(0, call([&] { ++ran; }));
  const auto failing =
      engine.submit(1, call([] { throw std::runtime_error("not waited for"); }), By::kWaiters);
  while (!started) sleep_ms(1);
  std::thread later([&] {
    sleep_ms(20);
    go = true;
  });
  const Engine::Ticket tickets[] = {first, second, failing};
  engine.cancel(tickets, 3);  // Waits for the first one.
  CHECK(go);
  later.join();
  CHECK(engine.wait(engine.submit(0, call([&] { ran += 10; })), 1, kLong));
  CHECK(ran == 10);
}

void test_the_queue_is_bounded() {
  Engine engine(1, 2);
  std::atomic<int> ran{0};
  for (int i = 0; i < 50; ++i) {
    engine.submit(i % 2, call([&] {
                    sleep_ms(1);
                    ++ran;
                  }),
                  By::kWorkers, true);
    CHECK(i + 1 - ran <= 3);  // Two in the queue, one that has ended but isn't off it yet.
  }
  CHECK(engine.wait_lane(0, 1, kLong) && engine.wait_lane(1, 1, kLong));
  CHECK(ran == 50);
}

void test_close() {
  std::atomic<int> pushed{0}, pulled{0};
  {
    Engine engine(1, 100);
    engine.submit(0, call([] { sleep_ms(20); }));
    for (int i = 0; i < 10; ++i) {
      engine.submit(0, call([&] { ++pushed; }), By::kAnyone, true);
      engine.submit(0, call([&] { ++pulled; }));
    }
    engine.close();
    CHECK_THROWS(engine.submit(0, call([] {})), std::runtime_error);
    engine.close();
  }
  CHECK(pushed == 10);  // Submitted jobs still run.
  CHECK(pulled == 0);
  Engine unused(1, 1);
  Engine failing(1, 1);
  failing.submit(0, call([] { throw std::runtime_error("lost"); }), By::kWorkers, true);
  CHECK_THROWS(failing.close(), std::runtime_error);
}

void test_a_job_may_destroy_its_engine() {
  std::atomic<bool> gone{false};
  auto* engine = new Engine(2, 10);
  engine->submit(0, call([&] {
                   delete engine;
                   gone = true;
                 }),
                 By::kWorkers, true);
  while (!gone) sleep_ms(1);
}

void test_no_workers() {
  Engine engine(0, 10);
  int ran = 0;
  engine.submit(0, call([&] { ++ran; }), By::kWorkers, true);
  CHECK(engine.wait(engine.submit(0, call([&] { ran += ran; })), 1, kLong));
  CHECK(ran == 2);
}

// Pushes write rows of equal values, pulls must never see two values in one row.
void test_no_torn_rows() {
  constexpr int64_t kRows = 64, kWidth = 256, kRounds = 300;
  std::vector<char> rows(kRows * kWidth, 0);
  const gas::Table table = {rows.data(), kRows, kWidth, false, gas::Codec{}, 0};
  Engine engine(3, 16);
  std::vector<int64_t> every(kRows), odd;
  for (int64_t i = 0; i < kRows; ++i) every[i] = kRows - 1 - i;
  for (int64_t i = 1; i < kRows; i += 2) odd.push_back(i);

  const auto writer = [&](char first) {
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<char> x(kRows * kWidth, static_cast<char>(first + round));
      auto job = round % 2 ? gas::push(table, x.data(), odd.data(), odd.size())
                           : gas::push(table, x.data(), {{0, kRows, 0}});
      job.grain = 5;
      engine.wait(engine.submit(0, job), 1, kLong);
    }
  };
  const auto reader = [&] {
    std::vector<char> out(kRows * kWidth);
    for (int round = 0; round < kRounds; ++round) {
      auto job = gas::pull(table, every.data(), kRows, out.data());
      job.grain = 5;
      engine.wait(engine.submit(0, job), 1, kLong);
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t j = 1; j < kWidth; ++j) CHECK(out[i * kWidth + j] == out[i * kWidth]);
      }
    }
  };
  std::thread one([&] { writer(0); }), two([&] { writer(50); }), three(reader);
  reader();
  one.join(), two.join(), three.join();
}

#ifndef GAS_SANITIZE  // The sanitizers have threads of their own, which a fork loses.
void test_fork() {
  auto* engine = new Engine(1, 10);
  CHECK(engine->wait(engine->submit(0, call([] {}), By::kWorkers), 1, kLong));
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      engine->submit(0, call([] {}));
    } catch (const std::runtime_error&) {
      refused = true;
    }
    delete engine;  // Must neither hang nor stop the program.
    _exit(refused ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(engine->wait(engine->submit(0, call([] {})), 1, kLong));
  delete engine;
}
#endif

}  // namespace

int main() {
  for (const int threads : {0, 1, 3}) {
    test_a_lane_keeps_its_order(threads, By::kAnyone);
    test_every_item_once(threads);
  }
  test_a_lane_keeps_its_order(2, By::kWorkers);
  test_a_lane_keeps_its_order(2, By::kWaiters);
  test_jobs_of_nothing();
  test_errors();
  test_waiting_for_a_while();
  test_who_runs_a_job();
  test_time_of_jobs();
  test_cancel();
  test_the_queue_is_bounded();
  test_close();
  test_a_job_may_destroy_its_engine();
  test_no_workers();
  test_no_torn_rows();
#ifndef GAS_SANITIZE
  test_fork();
#endif
}
