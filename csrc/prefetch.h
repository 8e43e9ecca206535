// Fetching rows into the cache before they are read.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gas {

constexpr int64_t kAhead = 8;  // Rows fetched in advance.

inline void prefetch_row(const char* row, int64_t row_bytes) {
  constexpr int64_t kLine = 64;  // Bytes of a cache line.
  // The first lines start the hardware prefetcher, which follows the rest of a long row.
  for (int64_t byte = 0; byte < std::min<int64_t>(row_bytes, 4 * kLine); byte += kLine) {
    __builtin_prefetch(row + byte);
  }
}

}  // namespace gas
