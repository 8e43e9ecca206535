// A parallel loop over the rows of a sparse matrix, in chunks of equal work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"

namespace gas {

// Calls body(begin, end) for ranges of rows that cover [0, num_rows), each with about the same
// number of rows and entries together; `grain` is the least of them that is worth a thread.
template <typename Body>
void parallel_rows(const int32_t* rowptr, int64_t num_rows, int64_t grain, int threads,
                   const Body& body) {
  const auto work = [&](int64_t row) { return rowptr[row] + row; };
  const auto row_at = [&](int64_t wanted) {  // The first row with that much work before it.
    int64_t low = 0, high = num_rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (work(middle) < wanted) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int64_t total = num_rows > 0 ? work(num_rows) : 0;
  parallel_chunks(total, std::max<int64_t>(1, grain), threads,
                  [&](int, int64_t begin, int64_t end) {
                    const int64_t first = row_at(begin);
                    const int64_t last = end == total ? num_rows : row_at(end);
                    if (first < last) body(first, last);
                  });
}

}  // namespace gas
