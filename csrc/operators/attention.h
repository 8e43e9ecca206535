// Attention over the edges of a graph, forward and backward, in one pass over the edges each.
//
// For an edge e from source c to destination r and a head h:
//   score(e, h) = leaky(source[c, h] + target[r, h]), with leaky(s) = s > 0 ? s : slope * s,
//   a(e, h) = exp(score(e, h)) / sum of that over the edges into r,
//   out[r, h] = sum of keep(e, h) * a(e, h) * x[c, h] over them, where keep is dropout's factor.
//
// Nothing of the size of the edges is stored: backward computes scores again from the row's maximum
// and sum. The gradient towards `target` needs no pass of its own. With G the gradient towards
// out[r, h], D = <G, out[r, h]> and da(e) = keep(e) <G, x[c, h]>, the sum of a(e) (da(e) - D) over
// all edges is zero, so that
//   sum of leaky'(e) a(e) (da(e) - D)  =  (1 - slope) * (<G, P> - A D),
// where P and A are the parts of out[r, h] and of the sum of a(e) that edges of positive score
// have. Forward adds up P in the same pass, at no further multiplication.
#pragma once

#include <cstdint>

#include "common/matrix.h"
#include "common/random.h"
#include "common/simd.h"
#include "common/stream.h"

namespace gas {

struct Attention {
  int64_t heads;
  int64_t width;       // Of a head.
  double slope;        // At least 0.
  uint64_t threshold;  // Of dropout on a, see random.h; 0 for none.
  double keep;         // The factor of what is kept.
  uint64_t seed;

  Attention(int64_t heads, int64_t width, double slope, uint64_t threshold, double keep,
            uint64_t seed)
      : heads(heads), width(width), slope(slope), threshold(threshold), keep(keep), seed(seed) {}
};

template <typename A>
GAS_HOST_DEVICE GAS_INLINE A leaky(A x, A slope) {
  return x > A{0} ? x : x * slope;
}

// The factor of dropout.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A kept(const Attention& how, int64_t entry, int64_t head) {
  if (how.threshold == 0) return A{1};
  const auto element = static_cast<uint64_t>(entry * how.heads + head);
  return is_kept(how.seed, element, how.threshold) ? static_cast<A>(how.keep) : A{0};
}

// The factor that makes weights of powers.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A inverse_or_zero(A total) {
  return total > A{0} ? A{1} / total : A{0};
}

// The gradient towards a target's score, from <G, P>, A and D above.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A target_gradient(const Attention& how, A positive, A weight, A dot) {
  return static_cast<A>(1.0 - how.slope) * (positive - weight * dot);
}

// Values saved by forward for backward, each with a row per destination.
template <typename T>
struct AttentionState {
  using A = typename Sum<T>::type;
  A* maximum;          // [rows, heads]
  A* total;            // [rows, heads]
  A* positive_weight;  // [rows, heads]: A above.
  T* positive;         // [rows, heads * width]: P above; null if no gradient is wanted.
};

template <typename T>
void attention(const Sparse& matrix, const Attention& how, const T* x,
               const typename Sum<T>::type* source, const typename Sum<T>::type* target, T* out,
               const AttentionState<T>& state, int threads);

// Writes the gradients towards x, source and target, given the transpose of the matrix, the
// gradient towards out, and `packed` as scratch of shape [rows, 4, heads].
template <typename T>
void attention_backward(const Sparse& transposed, int64_t num_rows, const Attention& how,
                        const T* x, const typename Sum<T>::type* source,
                        const typename Sum<T>::type* target, const T* out, const T* grad,
                        const AttentionState<T>& state, typename Sum<T>::type* packed, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        int threads);

// On a CUDA device, where all tables are: the same to rounding, and the same in every run. Nothing
// waits for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
namespace cuda {

template <typename T>
void attention(const Sparse& matrix, const Attention& how, const T* x,
               const typename Sum<T>::type* source, const typename Sum<T>::type* target, T* out,
               const AttentionState<T>& state, const Stream& stream);

// `packed` is scratch of 4 * num_rows * heads, aligned to 16 bytes.
template <typename T>
void attention_backward(const Sparse& transposed, int64_t num_rows, const Attention& how,
                        const T* x, const typename Sum<T>::type* source,
                        const typename Sum<T>::type* target, const T* out, const T* grad,
                        const AttentionState<T>& state, typename Sum<T>::type* packed, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        const Stream& stream);

}  // namespace cuda
}  // namespace gas
