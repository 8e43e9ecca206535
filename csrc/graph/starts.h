// Find the row at the start of each chunk of a matrix, for kernels that split it into chunks.
#pragma once

#include <cstdint>

#include "common/matrix.h"

namespace gas::cuda {

constexpr int64_t kStep = 32;  // Of work: one for each row, and one more for each of its entries.

inline int64_t steps_of(const Sparse& m, int64_t step = kStep) {
  return (m.num_rows + m.entries + step - 1) / step;
}

// Writes for each step the first row whose work begins there or behind it, and behind the last step
// the number of rows: [steps_of(m) + 1].
//
// That is done once for a matrix. Teams that search for themselves would wait for some 20 loads,
// one after the other, which takes as long as the work of a small chunk.
void find_starts(const Sparse& m, int64_t step, int32_t* start, uintptr_t stream);

}  // namespace gas::cuda
