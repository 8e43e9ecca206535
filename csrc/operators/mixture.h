// Sums over neighbours with weights from a mixture of Gaussians of each edge's coordinates.
//
// For an edge e with coordinates u(e), and a kernel k:
//   w(e, k) = exp(-1/2 sum over d of (u(e)[d] - mu[k, d])^2 / (1e-15 + sigma[k, d]^2)).
//
// Kernels share their input or their output: `mixture_spread` makes a row for each kernel of what
// all of them read, `mixture_collapse` adds up what each of them reads. The one is the other's
// gradient, over the transpose. Weights are computed again wherever they are needed, for some edges
// at a time: nothing of the size of the edges is stored.
#pragma once

#include <cstdint>

#include "common/matrix.h"
#include "common/simd.h"
#include "common/stream.h"

namespace gas {

// Parameters, and coordinates in the order of the matrix's entries; a transpose finds them by its
// `entry`.
template <typename A>
struct Mixture {
  int64_t kernels;
  int64_t dims;
  const A* pseudo;  // [entries, dims]
  const A* mu;      // [kernels, dims]
  const A* sigma;   // [kernels, dims]
};

// One over a variance, with PyG's epsilon.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A inverse_variance(A sigma) {
  return A{1} / (static_cast<A>(1e-15) + sigma * sigma);
}

// Term of a coordinate in the exponent of w, times -1/2 over its variance.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A exponent_of(A gap, A scale) {
  return gap * gap * scale;
}

// The gradients towards mu and sigma, from the sums over edges of c times the gap u - mu and of
// that times the gap, where c is the gradient towards w, times w.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A mu_gradient(double by_gap, double inverse) {
  return static_cast<A>(by_gap * inverse);
}
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A sigma_gradient(double by_square, double inverse, A sigma) {
  return static_cast<A>(by_square * inverse * inverse * sigma);
}

// Destinations of the gradients.
template <typename A>
struct MixtureGrad {
  A* pseudo;  // [entries, dims], or null if not wanted.
  A* mu;      // [kernels, dims]
  A* sigma;   // [kernels, dims]
};

// out[r, k] = sum of w(e, k) * x[col[e]] over the entries e of row r, divided by their number if
// `mean`. x: [cols, width], out: [rows, kernels, width].
template <typename T>
void mixture_spread(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture, const T* x,
                    int64_t width, bool mean, T* out, int threads);

// out[r] = sum over k and e of w(e, k) * x[col[e], k], divided by their number if `mean`.
// x: [cols, kernels, width], out: [rows, width].
template <typename T>
void mixture_collapse(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* x, int64_t width, bool mean, T* out, int threads);

// The gradients towards pseudo, mu and sigma: that towards w(e, k) is <own[r, k], other[col[e]]>.
// own: [rows, kernels, width], other: [cols, width]. In the same pass, unless null, `out` receives
// the spread of `other`. Sums over all edges are added up in parts that depend on the matrix alone,
// in order: they are the same for any number of threads.
template <typename T>
void mixture_backward(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* own, const T* other, int64_t width, T* out,
                      const MixtureGrad<typename Sum<T>::type>& grad, int threads);

// On a CUDA device, where all tables are: the same to rounding, and the same in every run. Nothing
// waits for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
namespace cuda {

template <typename T>
void mixture_spread(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture, const T* x,
                    int64_t width, bool mean, T* out, const Stream& stream);

template <typename T>
void mixture_collapse(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* x, int64_t width, bool mean, T* out, const Stream& stream);

// Without rows or columns nothing is launched that would write grad.mu and grad.sigma: they stay as
// they are.
template <typename T>
void mixture_backward(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* own, const T* other, int64_t width, T* out,
                      const MixtureGrad<typename Sum<T>::type>& grad, const Stream& stream);

}  // namespace cuda
}  // namespace gas
