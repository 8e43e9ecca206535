#include "graph/csr.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "graph/sort_row.h"

namespace gas {
namespace {

constexpr int64_t kGrainRows = 1024;

}  // namespace

template <typename Index>
void coo_to_csr(const int64_t* row, const int64_t* col, int64_t num_edges, int64_t num_rows,
                int64_t* rowptr, Index* out_col, Index* perm, int threads) {
  for (int64_t e = 0; e < num_edges; ++e) {
    if (row[e] < 0 || row[e] >= num_rows) {
      throw std::out_of_range("row " + std::to_string(row[e]) + " of edge " + std::to_string(e) +
                              " is outside [0, " + std::to_string(num_rows) + ")");
    }
  }

  // Counting sort by row. rowptr[r + 1] first holds the count, then the start, then the end of
  // row r, which is the start of row r + 1: no second array of cursors is needed.
  std::fill(rowptr, rowptr + num_rows + 1, 0);
  for (int64_t e = 0; e < num_edges; ++e) ++rowptr[row[e] + 1];
  int64_t start = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t count = rowptr[r + 1];
    rowptr[r + 1] = start;
    start += count;
  }
  for (int64_t e = 0; e < num_edges; ++e) {
    const int64_t at = rowptr[row[e] + 1]++;
    out_col[at] = static_cast<Index>(col[e]);
    perm[at] = static_cast<Index>(e);
  }

  parallel_chunks(num_rows, kGrainRows, threads, [&](int, int64_t begin, int64_t end) {
    std::vector<std::pair<Index, Index>> scratch;
    for (int64_t r = begin; r < end; ++r) {
      sort_row(out_col + rowptr[r], perm + rowptr[r], rowptr[r + 1] - rowptr[r], scratch);
    }
  });
}

template void coo_to_csr(const int64_t*, const int64_t*, int64_t, int64_t, int64_t*, int32_t*,
                         int32_t*, int);
template void coo_to_csr(const int64_t*, const int64_t*, int64_t, int64_t, int64_t*, int64_t*,
                         int64_t*, int);

}  // namespace gas
