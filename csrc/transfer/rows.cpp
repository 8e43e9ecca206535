#include "transfer/rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/parallel.h"
#include "common/prefetch.h"

namespace gas {
namespace {

constexpr int64_t kGrainBytes = 64 * 1024;  // Below this, waking a thread costs more.
constexpr int64_t kSmallRow = 8;            // Reads this small overlap without prefetching.

// `Bytes` is the row size where it is known at compile time (memcpy becomes a few moves), else 0.
template <int Bytes>
void gather(const char* src, int64_t row_bytes, const int64_t* index, int64_t begin, int64_t end,
            char* dst) {
  const int64_t size = Bytes > 0 ? Bytes : row_bytes;
  for (int64_t i = begin; i < end; ++i) {
    if (size > kSmallRow && i + kAhead < end) prefetch_row(src + index[i + kAhead] * size, size);
    std::memcpy(dst + i * size, src + index[i] * size, Bytes > 0 ? Bytes : row_bytes);
  }
}

}  // namespace

void check_index(const int64_t* index, int64_t n, int64_t rows) {
  // One pass without a branch, which the compiler vectorises; a second one names the culprit.
  const auto outside = [&](int64_t i) { return (index[i] < 0) | (index[i] >= rows); };
  bool any = false;
  for (int64_t i = 0; i < n; ++i) any |= outside(i);
  if (!any) return;
  for (int64_t i = 0; i < n; ++i) {
    if (outside(i)) {
      throw std::out_of_range("index " + std::to_string(index[i]) + " at position " +
                              std::to_string(i) + " is out of range for a table of " +
                              std::to_string(rows) + " rows");
    }
  }
}

int64_t grain_rows(int64_t row_bytes) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes));
}

void gather_range(const char* src, int64_t row_bytes, const int64_t* index, int64_t begin,
                  int64_t end, char* dst) {
  switch (row_bytes) {
    case 1: return gather<1>(src, row_bytes, index, begin, end, dst);
    case 4: return gather<4>(src, row_bytes, index, begin, end, dst);
    case 8: return gather<8>(src, row_bytes, index, begin, end, dst);
    case 32: return gather<32>(src, row_bytes, index, begin, end, dst);
    case 64: return gather<64>(src, row_bytes, index, begin, end, dst);
    default: return gather<0>(src, row_bytes, index, begin, end, dst);
  }
}

void gather_rows(const char* src, int64_t src_rows, int64_t row_bytes, const int64_t* index,
                 int64_t n, char* dst, int threads) {
  check_index(index, n, src_rows);
  parallel_chunks(n, grain_rows(row_bytes), threads, [&](int, int64_t begin, int64_t end) {
    gather_range(src, row_bytes, index, begin, end, dst);
  });
}

}  // namespace gas
