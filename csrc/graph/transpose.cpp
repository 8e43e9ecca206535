#include "graph/transpose.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/parallel.h"
#include "common/processor.h"
#include "common/simd.h"

namespace gas {
namespace {

constexpr int64_t kGrainEntries = 16 * 1024;

bool are_inside(const int32_t* col, int64_t begin, int64_t end, int64_t num_cols) {
  uint32_t most = 0;  // A negative number is a large one.
  on_processor([&]() GAS_INLINED {
    uint32_t highest = 0;
    for (int64_t e = begin; e < end; ++e) {
      highest = std::max(highest, static_cast<uint32_t>(col[e]));
    }
    most = highest;
  });
  return begin == end || most < num_cols;
}

[[noreturn]] void refuse(const Sparse& matrix, int64_t num_cols) {
  int64_t e = 0;
  while (are_inside(matrix.col, e, e + 1, num_cols)) ++e;
  throw std::out_of_range("column " + std::to_string(matrix.col[e]) + " of entry " +
                          std::to_string(e) + " is outside [0, " + std::to_string(num_cols) + ")");
}

// Writes the entries in [begin, end) to where `next` says that those of their columns go.
void put(const Sparse& matrix, int64_t begin, int64_t end, int64_t kept, int32_t* next,
         int32_t* out_col, int32_t* out_entry) {
  const int32_t *rowptr = matrix.rowptr, *col = matrix.col;
  int64_t row = std::upper_bound(rowptr, rowptr + matrix.num_rows + 1, begin) - rowptr - 1;
  for (int64_t e = begin; e < end; ++row) {
    const int64_t last = std::min<int64_t>(end, rowptr[row + 1]);
    const auto one = [&](int64_t e) {
      const int32_t at = next[col[e]]++;
      out_col[at] = static_cast<int32_t>(row);
      out_entry[at] = static_cast<int32_t>(e);
    };
    // In a batch's rows, which are sorted, the first that is left out ends those that are kept.
    for (; e < last && col[e] < kept; ++e) one(e);
    for (; e < last; ++e) {
      if (col[e] < kept) one(e);
    }
  }
}

}  // namespace

void transpose(const Sparse& matrix, int64_t num_cols, int64_t kept, int32_t* out_rowptr,
               int32_t* out_col, int32_t* out_entry, int threads) {
  // Counting sort. Every share of the entries is counted and written by one thread, and begins in
  // each column where the share before ends. A share has more entries than counts to add up.
  const int64_t entries = matrix.entries, grain = std::max(kGrainEntries, 2 * num_cols);
  const int64_t shares = std::clamp<int64_t>(entries / grain, 1, std::max(1, threads));
  std::vector<int32_t> next(shares * num_cols);
  const auto each_share = [&](const auto& body) {
    parallel_chunks(shares, 1, threads, [&](int, int64_t first, int64_t last) {
      for (int64_t share = first; share < last; ++share) {
        body(share * entries / shares, (share + 1) * entries / shares,
             next.data() + share * num_cols);
      }
    });
  };
  std::atomic<bool> inside{true};
  each_share([&](int64_t begin, int64_t end, int32_t* count) {
    if (!are_inside(matrix.col, begin, end, num_cols)) {
      inside = false;
      return;
    }
    for (int64_t e = begin; e < end; ++e) ++count[matrix.col[e]];
  });
  if (!inside) refuse(matrix, num_cols);

  int32_t start = 0;
  for (int64_t c = 0; c < kept; ++c) {
    out_rowptr[c] = start;
    for (int64_t at = c; at < shares * num_cols; at += num_cols) {
      const int32_t count = next[at];
      next[at] = start;
      start += count;
    }
  }
  std::fill(out_rowptr + kept, out_rowptr + num_cols + 1, start);
  if (kept == 0) return;
  each_share([&](int64_t begin, int64_t end, int32_t* share) {
    put(matrix, begin, end, kept, share, out_col, out_entry);
  });
}

}  // namespace gas
