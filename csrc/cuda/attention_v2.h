// Attention scored by both ends on a CUDA device: csrc/attention_v2.h says what is computed. The
// same results to rounding, with the same elements dropped, and the same in every run.
#pragma once

#include <cstdint>

#include "../attention_v2.h"
#include "stream.h"

namespace gas::cuda {

// All tables are in device memory, `entries` is the number of entries of the matrix. Nothing waits
// for the host, and columns are not checked. Each function throws std::runtime_error when a launch
// fails.
template <typename T>
void attention_v2(const Sparse& matrix, int64_t entries, const AttentionV2<T>& layer, T* out,
                  typename Sum<T>::type* maximum, typename Sum<T>::type* total,
                  const Stream& stream);

// `packed` is scratch of 4 * num_rows * heads, aligned to 16 bytes. Without rows nothing is
// launched that would write grad_att: it stays as it is.
template <typename T>
void attention_v2_backward(const Sparse& matrix, const Sparse& transposed, int64_t entries,
                           const AttentionV2<T>& layer, const T* out, const T* grad,
                           const typename Sum<T>::type* maximum,
                           const typename Sum<T>::type* total, typename Sum<T>::type* packed,
                           T* grad_source, T* grad_target, typename Sum<T>::type* grad_att,
                           const Stream& stream);

}  // namespace gas::cuda
