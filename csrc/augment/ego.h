// Ego-graph sizes of an augmented graph: repeated products with its adjacency matrix and with that
// of the graph it was made from.
#pragma once

#include <cstdint>

#include "common/matrix.h"
#include "common/stream.h"

namespace gas {

// One hop of both sides of MH-Aug. With D = diag(loops), A the matrix and A' its kept entries,
//   out[:, 0] = (D + A') x[:, 0],    out[:, 1] = (D + A) x[:, 1].
// Entry e is kept where kept[matrix.entry[e]] != 0, or kept[e] if matrix.entry is null. x and out
// are [num_rows, 2]. Counts are whole numbers, so sums are exact in any order below 2^53.
void ego_hop(const Sparse& matrix, const uint8_t* kept, const double* loops, const double* x,
             double* out, int threads);

// On a CUDA device, where all tables are: the same to rounding, and the same in every run. Nothing
// waits for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
namespace cuda {

void ego_hop(const Sparse& matrix, const uint8_t* kept, const double* loops, const double* x,
             double* out, const Stream& stream);

}  // namespace cuda
}  // namespace gas
