// The sums of csrc/edge_conv.h on a CUDA device: the same results to rounding, and the same in
// every run.
#pragma once

#include <cstdint>

#include "../edge_conv.h"
#include "stream.h"

namespace gas::cuda {

// All tables are in device memory, `entries` is the number of entries of the matrix. Nothing waits
// for the host, and columns are not checked. Each function throws std::runtime_error when a launch
// fails.
template <typename T>
void edge_conv(const Sparse& matrix, int64_t entries, const EdgeConv& how, const T* target,
               const T* source, T* out, T* slope, const Stream& stream);

template <typename T>
void edge_conv_backward(const Sparse& transposed, int64_t entries, const EdgeConv& how,
                        const T* target, const T* source, const T* grad, T* out,
                        const Stream& stream);

}  // namespace gas::cuda
