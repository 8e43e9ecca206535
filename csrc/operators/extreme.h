// The largest or smallest of what the entries of each row refer to, element by element.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/matrix.h"
#include "common/simd.h"
#include "common/stream.h"

namespace gas {

enum class Extreme { kMax, kMin };

// Returns true if `a` replaces `b`. NaN wins and stays, as in PyTorch.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE bool is_better(Extreme which, A a, A b) {
  return (which == Extreme::kMax ? a > b : a < b) | ((a != a) & (b == b));
}

// out[r] = the largest (or smallest) of x[col[e]], element by element, zero for an empty row;
// from[r] is the entry that it came from, the first of equals, or -1.
template <typename T>
void extreme(const Sparse& matrix, Extreme which, const T* x, int64_t width, T* out, int32_t* from,
             int threads);

// The gradient of `extreme` towards x, given the transpose and the gradient towards out:
// out[c] = sum of grad[col[e]] where from[col[e]] is e's entry.
template <typename T>
void extreme_backward(const Sparse& transposed, const T* grad, const int32_t* from, int64_t width,
                      T* out, int threads);

// On a CUDA device, where all tables are: the same to rounding, and the same in every run. Nothing
// waits for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
namespace cuda {

template <typename T>
void extreme(const Sparse& matrix, Extreme which, const T* x, int64_t width, T* out, int32_t* from,
             const Stream& stream);

template <typename T>
void extreme_backward(const Sparse& transposed, const T* grad, const int32_t* from, int64_t width,
                      T* out, const Stream& stream);

}  // namespace cuda
}  // namespace gas
