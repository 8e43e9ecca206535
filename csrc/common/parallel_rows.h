// Parallel loops over the rows of a sparse matrix, in chunks of equal work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/hubs.h"
#include "common/matrix.h"
#include "common/parallel.h"

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

}  // namespace gas
