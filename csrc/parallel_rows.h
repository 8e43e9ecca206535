// Parallel loops over the rows of a sparse matrix, in chunks of equal work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hubs.h"
#include "matrix.h"
#include "parallel.h"
#include "simd.h"

namespace gas {

// Rows by the work before them, which is their number and that of their entries; hubs' don't count.
struct RowsByWork {
  const Sparse& matrix;
  const Hubs& hubs;

  int64_t before(int64_t row) const { return matrix.rowptr[row] + row - hubs.entries_before(row); }
  int64_t total() const { return matrix.num_rows > 0 ? before(matrix.num_rows) : 0; }

  // The first row with that much work before it.
  int64_t operator()(int64_t work) const {
    if (work >= total()) return matrix.num_rows;
    int64_t low = 0, high = matrix.num_rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (before(middle) < work) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Calls body(begin, end) for the rows from one work to another that are no hubs.
  template <typename Body>
  void between(int64_t begin, int64_t end, const Body& body) const {
    int64_t row = (*this)(begin);
    const int64_t last = (*this)(end);
    for (const Hub* hub = hubs.from(row); hub != hubs.end() && hub->row < last; ++hub) {
      if (row < hub->row) body(row, hub->row);
      row = hub->row + 1;
    }
    if (row < last) body(row, last);
  }
};

// Calls body(begin, end) for ranges of rows that cover all but hubs. A thread's have about the same
// number of rows and entries together; `grain` is the least of them that is worth a thread.
template <typename Body>
void parallel_rows(const Sparse& matrix, const Hubs& hubs, int64_t grain, int threads,
                   const Body& body) {
  const RowsByWork rows{matrix, hubs};
  parallel_chunks(rows.total(), std::max<int64_t>(1, grain), threads,
                  [&](int, int64_t begin, int64_t end) { rows.between(begin, end, body); });
}

constexpr int64_t kParts = 64;

// Calls body(part, begin, end) for such ranges in at most kParts parts of equal work, numbered in
// order: more than once where a part has hubs. They depend on the matrix alone: what each part adds
// up is the same for any number of threads.
template <typename Body>
void parallel_parts(const Sparse& matrix, const Hubs& hubs, int64_t grain, int threads,
                    const Body& body) {
  const RowsByWork rows{matrix, hubs};
  const int64_t total = rows.total();
  if (total == 0) return;
  const int64_t grain_parts = std::max<int64_t>(1, grain * kParts / total);
  parallel_chunks(kParts, grain_parts, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      rows.between(part * total / kParts, (part + 1) * total / kParts,
                   [&](int64_t first, int64_t last) { body(part, first, last); });
    }
  });
}

// Calls body(begin, end) for ranges of the hubs' pieces; `grain` as above.
template <typename Body>
void parallel_pieces(const Hubs& hubs, int64_t grain, int threads, const Body& body) {
  parallel_chunks(hubs.num_pieces(), std::max<int64_t>(1, grain / kPiece), threads,
                  [&](int, int64_t begin, int64_t end) {
                    for (const Hub& hub : hubs) {
                      const int64_t first = std::max(begin, hub.first);
                      const int64_t last = std::min(end, hub.last);
                      if (first < last) body(first, last);
                    }
                  });
}

// Calls body(hub) for each.
template <typename Body>
void parallel_hubs(const Hubs& hubs, int threads, const Body& body) {
  constexpr int64_t kGrainHubs = 64;  // Of which each has a few rows to add up.
  parallel_chunks(hubs.size(), kGrainHubs, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(hubs.begin()[i]);
  });
}

// out[r] = the sum of the rows of `parts` that belong to hub r, divided by its entries if `mean`.
template <typename A, typename T>
void join_sums(const Hubs& hubs, const std::vector<A>& parts, int64_t width, bool mean, T* out,
               int threads) {
  parallel_hubs(hubs, threads, [&](const Hub& hub) {
    std::vector<A> sum(width);
    for (int64_t piece = hub.first; piece < hub.last; ++piece) {
      for (int64_t j = 0; j < width; ++j) sum[j] += parts[piece * width + j];
    }
    const A scale = mean ? A{1} / static_cast<A>(hub.entries) : A{1};
    for (int64_t j = 0; j < width; ++j) store(out + hub.row * width + j, sum[j] * scale);
  });
}

// Writes a sum (or mean) over the entries of each row, `width` wide, by run(matrix, mean, out,
// begin, end), which does that for some rows of a matrix. It is called for the pieces of hubs with
// sums of theirs, and must take T and the type that it adds up in for `out`.
template <typename T, typename Run>
void sum_rows(const Sparse& matrix, int64_t width, bool mean, T* out, int64_t grain, int threads,
              const Run& run) {
  const Hubs hubs(matrix);
  parallel_rows(matrix, hubs, grain, threads, [&](int64_t begin, int64_t end) {
    run(matrix, mean, out, begin, end);
  });
  std::vector<typename Sum<T>::type> parts(hubs.num_pieces() * width);
  parallel_pieces(hubs, grain, threads, [&](int64_t begin, int64_t end) {
    run(hubs.pieces(), false, parts.data(), begin, end);
  });
  join_sums(hubs, parts, width, mean, out, threads);
}

}  // namespace gas
