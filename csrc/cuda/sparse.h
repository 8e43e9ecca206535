// The products of csrc/sparse.h on a CUDA device: the same results to rounding, and the same in
// every run.
#pragma once

#include <cstdint>

#include "../sparse.h"
#include "stream.h"

namespace gas::cuda {

// All tables are in device memory, `entries` is the number of entries of the matrix. Nothing waits
// for the host, and columns are not checked. Each function throws std::runtime_error when a launch
// fails. There is no `transpose`: PyTorch's stable sort makes one.
template <typename T>
void multiply(const Sparse& matrix, int64_t entries, const T* weight, const Rows<T>& x,
              int64_t width, bool mean, T* out, const Stream& stream);

template <typename T>
void extreme(const Sparse& matrix, int64_t entries, Extreme which, const T* x, int64_t width,
             T* out, int32_t* from, const Stream& stream);

template <typename T>
void extreme_backward(const Sparse& transposed, int64_t entries, const T* grad,
                      const int32_t* from, int64_t width, T* out, const Stream& stream);

template <typename T>
void dot_rows(const Sparse& matrix, int64_t entries, const T* a, const T* b, int64_t width, T* out,
              const Stream& stream);

}  // namespace gas::cuda
