// The transpose of a sparse matrix.
#pragma once

#include <cstdint>

#include "common/matrix.h"

namespace gas {

// Writes the transpose: for each of `num_cols` columns its entries in increasing order of rows.
// Those from `kept` on are left out, as if they had no entries.
//   out_rowptr: [num_cols + 1], out_col and out_entry: [entries] or as many as are kept.
// Throws std::out_of_range for a column outside [0, num_cols), before anything is written.
void transpose(const Sparse& matrix, int64_t num_cols, int64_t kept, int32_t* out_rowptr,
               int32_t* out_col, int32_t* out_entry, int threads);

}  // namespace gas
