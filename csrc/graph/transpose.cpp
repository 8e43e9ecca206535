#include "graph/transpose.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/parallel.h"

namespace gas {
namespace {

constexpr int64_t kGrainColumns = 4096;

}  // namespace

void transpose(const Sparse& matrix, int64_t num_cols, int64_t kept, int32_t* out_rowptr,
               int32_t* out_col, int32_t* out_entry, int threads) {
  const int64_t entries = matrix.entries;
  bool inside = true;
  for (int64_t e = 0; e < entries; ++e) inside &= matrix.col[e] >= 0 && matrix.col[e] < num_cols;
  for (int64_t e = 0; !inside; ++e) {
    if (matrix.col[e] < 0 || matrix.col[e] >= num_cols) {
      throw std::out_of_range("column " + std::to_string(matrix.col[e]) + " of entry " +
                              std::to_string(e) + " is outside [0, " + std::to_string(num_cols) +
                              ")");
    }
  }
  // Counting sort. out_rowptr[c + 1] holds the count, then the start, then the end of column c,
  // which is the start of column c + 1.
  std::fill(out_rowptr, out_rowptr + num_cols + 1, 0);
  if (kept == 0) return;
  for (int64_t e = 0; e < entries; ++e) {
    if (matrix.col[e] < kept) ++out_rowptr[matrix.col[e] + 1];
  }
  int32_t start = 0;
  for (int64_t c = 0; c < num_cols; ++c) {
    const int32_t count = out_rowptr[c + 1];
    out_rowptr[c + 1] = start;
    start += count;
  }
  // Each piece reads all entries and writes those of its own columns: one for each thread.
  const int64_t grain = std::max(kGrainColumns, kept / std::max(1, threads));
  parallel_chunks(kept, grain, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < matrix.num_rows; ++row) {
      for (int64_t e = matrix.rowptr[row]; e < matrix.rowptr[row + 1]; ++e) {
        const int64_t c = matrix.col[e];
        if (c < begin || c >= end) continue;
        const int32_t at = out_rowptr[c + 1]++;
        out_col[at] = static_cast<int32_t>(row);
        out_entry[at] = static_cast<int32_t>(e);
      }
    }
  });
}

}  // namespace gas
