// Parallel loops over the rows of a sparse matrix, in chunks of equal work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"

namespace gas {

// Rows by the work before them, which is their number and that of their entries.
struct RowsByWork {
  const int32_t* rowptr;
  int64_t num_rows;

  int64_t total() const { return num_rows > 0 ? rowptr[num_rows] + num_rows : 0; }

  // The first row with that much work before it.
  int64_t operator()(int64_t work) const {
    if (work >= total()) return num_rows;
    int64_t low = 0, high = num_rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (rowptr[middle] + middle < work) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Calls body(begin, end) for ranges of rows that cover [0, num_rows), each with about the same
// number of rows and entries together; `grain` is the least of them that is worth a thread.
template <typename Body>
void parallel_rows(const int32_t* rowptr, int64_t num_rows, int64_t grain, int threads,
                   const Body& body) {
  const RowsByWork row_at{rowptr, num_rows};
  parallel_chunks(row_at.total(), std::max<int64_t>(1, grain), threads,
                  [&](int, int64_t begin, int64_t end) {
                    const int64_t first = row_at(begin), last = row_at(end);
                    if (first < last) body(first, last);
                  });
}

constexpr int64_t kParts = 64;

// Calls body(part, begin, end) for at most kParts such ranges, numbered in order. They depend on
// the matrix alone: what each part adds up is the same for any number of threads.
template <typename Body>
void parallel_parts(const int32_t* rowptr, int64_t num_rows, int64_t grain, int threads,
                    const Body& body) {
  const RowsByWork row_at{rowptr, num_rows};
  const int64_t total = row_at.total();
  if (total == 0) return;
  const int64_t grain_parts = std::max<int64_t>(1, grain * kParts / total);
  parallel_chunks(kParts, grain_parts, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = row_at(part * total / kParts);
      const int64_t last = row_at((part + 1) * total / kParts);
      if (first < last) body(part, first, last);
    }
  });
}

}  // namespace gas
