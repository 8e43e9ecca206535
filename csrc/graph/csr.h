// Compressed sparse rows from a list of edges.
#pragma once

#include <cstdint>

namespace gas {

// Sorts `num_edges` entries by (row, col, position) into compressed sparse rows.
//   rowptr: [num_rows + 1], out_col: [num_edges],
//   perm:   [num_edges], the position in the input of each sorted entry.
// Index is int32_t, if columns and positions fit, or int64_t.
// Throws std::out_of_range for a row outside [0, num_rows), before anything is written.
template <typename Index>
void coo_to_csr(const int64_t* row, const int64_t* col, int64_t num_edges, int64_t num_rows,
                int64_t* rowptr, Index* out_col, Index* perm, int threads);

}  // namespace gas
