// A sparse matrix in compressed rows, as every operator takes it.
#pragma once

#include <cstdint>

#include "common/simd.h"

namespace gas {

struct Sparse {
  int64_t num_rows;
  int64_t entries;        // Of `col`. The host can't read the row pointers of a device.
  const int32_t* rowptr;  // [num_rows + 1]
  const int32_t* col;     // [entries]
  // [entries] or null: the place of each entry's weight. A transpose reads those of the matrix that
  // it was made from.
  const int32_t* entry;
  // Of a matrix on a device, see graph/starts.h; else null.
  const int32_t* start = nullptr;

  GAS_HOST_DEVICE GAS_INLINED int64_t place(int64_t e) const {
    return entry == nullptr ? e : entry[e];
  }

  // Factor that turns a row's sum into its mean; 1 for sums and empty rows.
  template <typename A>
  GAS_HOST_DEVICE GAS_INLINED A scale(int64_t row, bool mean) const {
    const int64_t count = rowptr[row + 1] - rowptr[row];
    return mean && count > 0 ? A{1} / static_cast<A>(count) : A{1};
  }
};

}  // namespace gas
