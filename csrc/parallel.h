// A parallel loop over chunks of [0, n).
//
// With OpenMP, which PyTorch uses too: its libgomp.so.1 is loaded already and serves both, so that
// a region costs a microsecond. Threads of our own would share the cores with PyTorch's, which spin
// for milliseconds after every operation (measured: half the bandwidth). A forked data-loading
// worker asks for one thread and never enters the pool, which does not survive fork().
//
// Without OpenMP, threads are started for each call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace gas {

// Calls body(chunk, begin, end) for consecutive chunks that cover [0, n), at most `threads` of
// them and none smaller than `grain`. The first exception thrown by a chunk is rethrown here,
// after every chunk has ended.
template <typename Body>
void parallel_chunks(int64_t n, int64_t grain, int threads, const Body& body) {
  if (n <= 0) return;
  const int64_t most = (n + grain - 1) / grain;
  const int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(threads, most));
  if (chunks == 1) {
    body(0, int64_t{0}, n);
    return;
  }

  std::vector<std::exception_ptr> errors(chunks);
  const auto run = [&](int64_t chunk) {
    try {
      body(static_cast<int>(chunk), chunk * n / chunks, (chunk + 1) * n / chunks);
    } catch (...) {
      errors[chunk] = std::current_exception();
    }
  };

#ifdef _OPENMP
  const int team = static_cast<int>(chunks);
#pragma omp parallel for num_threads(team) schedule(static, 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
#else
  std::vector<std::thread> workers;
  workers.reserve(chunks - 1);
  for (int64_t chunk = 1; chunk < chunks; ++chunk) {
    try {
      workers.emplace_back(run, chunk);
    } catch (const std::system_error&) {
      run(chunk);  // The system has no thread left: this one does the work.
    }
  }
  run(0);
  for (auto& worker : workers) worker.join();
#endif
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace gas
