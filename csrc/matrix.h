// A sparse matrix in compressed rows, as every operator takes it.
#pragma once

#include <cstdint>

namespace gas {

// A sparse matrix of `num_rows` rows. `entry`, if not null, is the place of each entry's weight:
// a transpose reads those of the matrix it was made from.
struct Sparse {
  int64_t num_rows;
  const int32_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [entries]
  const int32_t* entry;   // [entries] or null
};

}  // namespace gas
