// A parallel loop over chunks of [0, n), for machines whose cores others use too.
//
// Work is cut into more pieces than threads, and every running thread takes the next piece: the
// caller finishes alone if no other thread runs. On a quiet machine the threads are OpenMP's, of
// the libgomp.so.1 that PyTorch has loaded already. They spin for milliseconds after every
// operation of PyTorch, start at once, and would compete with threads of our own for the cores. But
// OpenMP's loop ends only when each of its threads has run, which takes some milliseconds if
// another process occupies a core. After such a delay our own helper threads replace them for a
// while. Helpers sleep, and a caller waits only for pieces that they have begun.
//
// A process that was forked has none of the threads; it starts helpers of its own.
//
// Results must depend neither on the thread that runs a piece nor on the number of pieces.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gas {

// More pieces lose less when the system takes a core away in the middle of one; with four, epochs
// on a quiet machine took a few percent longer.
constexpr int64_t kPiecesPerThread = 2;

// Calls run(body, worker, piece) for every piece in [0, pieces), by the caller, who is worker 0,
// and up to threads - 1 helpers.
void run_pieces(int64_t pieces, int threads, void (*run)(const void*, int, int64_t),
                const void* body);

// Calls body(worker, begin, end) for consecutive pieces that cover [0, n), none smaller than
// `grain`. A worker, of which there are at most `threads`, runs one piece at a time, and any number
// of them. The exception of the first piece that throws is rethrown, after every piece has ended.
template <typename Body>
void parallel_chunks(int64_t n, int64_t grain, int threads, const Body& body) {
  if (n <= 0) return;
  const int64_t most = std::max<int64_t>(1, n / std::max<int64_t>(1, grain));
  const int64_t pieces = std::min(most, kPiecesPerThread * threads);
  if (threads <= 1 || pieces == 1) {
    body(0, int64_t{0}, n);
    return;
  }
  const auto run = [&](int worker, int64_t piece) {
    body(worker, piece * n / pieces, (piece + 1) * n / pieces);
  };
  using Run = decltype(run);
  run_pieces(
      pieces, threads,
      [](const void* self, int worker, int64_t piece) {
        (*static_cast<const Run*>(self))(worker, piece);
      },
      &run);
}

}  // namespace gas
