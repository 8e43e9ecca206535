// Attention whose scores are a nonlinear function of both ends of an edge (GATv2).
//
// For an edge e from source c to destination r and a head h:
//   score(e, h) = <att[h], leaky(source[c, h] + target[r, h])>, leaky(s) = s > 0 ? s : slope * s,
//   a(e, h) = exp(score(e, h)) / sum of that over the edges into r,
//   out[r, h] = sum of keep(e, h) * a(e, h) * source[c, h] over them; keep is dropout's factor.
//
// Nothing of the size of the edges is stored: backward computes scores again from the row's maximum
// and sum. With G the gradient towards out[r, h] and D = <G, out[r, h]>, the gradient towards a
// score is a(e) (keep(e) <G, source[c, h]> - D). Both ends need it, each in a pass of its own.
#pragma once

#include <cstdint>

#include "common/matrix.h"
#include "common/simd.h"
#include "common/stream.h"
#include "operators/attention.h"

namespace gas {

template <typename T>
struct AttentionV2 {
  Attention how;                     // Of any slope.
  const T* source;                   // [cols, heads * width]
  const T* target;                   // [rows, heads * width]
  const typename Sum<T>::type* att;  // [heads * width]
};

// `maximum` and `total`, [rows, heads] each, are what backward needs.
template <typename T>
void attention_v2(const Sparse& matrix, const AttentionV2<T>& layer, T* out,
                  typename Sum<T>::type* maximum, typename Sum<T>::type* total, int threads);

// Writes the gradients towards source, target and att, given the matrix and its transpose, the
// gradient towards out, and `packed` as scratch of shape [rows, 3, heads]. The sum over all edges
// is added up in parts that depend on the matrix alone, in order.
template <typename T>
void attention_v2_backward(const Sparse& matrix, const Sparse& transposed,
                           const AttentionV2<T>& layer, const T* out, const T* grad,
                           const typename Sum<T>::type* maximum, const typename Sum<T>::type* total,
                           typename Sum<T>::type* packed, T* grad_source, T* grad_target,
                           typename Sum<T>::type* grad_att, int threads);

// On a CUDA device, where all tables are: the same to rounding, and the same in every run. Nothing
// waits for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
namespace cuda {

template <typename T>
void attention_v2(const Sparse& matrix, const AttentionV2<T>& layer, T* out,
                  typename Sum<T>::type* maximum, typename Sum<T>::type* total,
                  const Stream& stream);

// `packed` is scratch of 4 * num_rows * heads, aligned to 16 bytes. Without rows nothing is
// launched that would write grad_att: it stays as it is.
template <typename T>
void attention_v2_backward(const Sparse& matrix, const Sparse& transposed,
                           const AttentionV2<T>& layer, const T* out, const T* grad,
                           const typename Sum<T>::type* maximum, const typename Sum<T>::type* total,
                           typename Sum<T>::type* packed, T* grad_source, T* grad_target,
                           typename Sum<T>::type* grad_att, const Stream& stream);

}  // namespace cuda
}  // namespace gas
