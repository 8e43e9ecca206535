// The counts of csrc/ego.h on a CUDA device: the same numbers.
#pragma once

#include <cstdint>

#include "../ego.h"
#include "stream.h"

namespace gas::cuda {

// All tables are in device memory, `entries` is the number of entries of the matrix. Nothing waits
// for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
void ego_hop(const Sparse& matrix, int64_t entries, const uint8_t* kept, const double* loops,
             const double* x, double* out, const Stream& stream);

}  // namespace gas::cuda
