// Attention over the edges of a graph on a CUDA device: csrc/attention.h says what is computed. The
// same results to rounding, with the same elements dropped, and the same in every run.
#pragma once

#include <cstdint>

#include "../attention.h"
#include "stream.h"

namespace gas::cuda {

// All tables are in device memory, `entries` is the number of entries of the matrix. Nothing waits
// for the host, and columns are not checked. Each function throws std::runtime_error when a launch
// fails.
template <typename T>
void attention(const Sparse& matrix, int64_t entries, const Attention& how, const T* x,
               const typename Sum<T>::type* source, const typename Sum<T>::type* target, T* out,
               const AttentionState<T>& state, const Stream& stream);

// `packed` is scratch of 4 * num_rows * heads, aligned to 16 bytes.
template <typename T>
void attention_backward(const Sparse& transposed, int64_t entries, int64_t num_rows,
                        const Attention& how, const T* x, const typename Sum<T>::type* source,
                        const typename Sum<T>::type* target, const T* out, const T* grad,
                        const AttentionState<T>& state, typename Sum<T>::type* packed, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        const Stream& stream);

}  // namespace gas::cuda
