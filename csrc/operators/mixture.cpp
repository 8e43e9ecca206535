#include "operators/mixture.h"

#include <algorithm>
#include <vector>

#include "common/exp.h"
#include "common/prefetch.h"
#include "common/reduce_rows.h"

namespace gas {
namespace {

constexpr int64_t kEnough = 8 * 1024;  // Elements; below this, waking a thread costs more.
constexpr int kLanes = 8;              // Edges whose weights are computed together.

template <typename A>
std::vector<A> inverse_of(const Mixture<A>& mixture) {
  std::vector<A> inverse(mixture.kernels * mixture.dims);
  for (size_t i = 0; i < inverse.size(); ++i) inverse[i] = inverse_variance(mixture.sigma[i]);
  return inverse;
}

// Of `count` edges from `first` on the coordinates, [dims][kLanes], and weights, [kernels][kLanes].
template <typename A>
GAS_INLINE void weights_of(const Sparse& m, const Mixture<A>& mixture, const A* inverse,
                           int64_t first, int64_t count, A* __restrict u, A* __restrict weight) {
  const int64_t dims = mixture.dims;
  for (int64_t l = 0; l < kLanes; ++l) {
    const A* from = mixture.pseudo + m.place(first + std::min(l, count - 1)) * dims;
    for (int64_t d = 0; d < dims; ++d) u[d * kLanes + l] = from[d];
  }
  for (int64_t k = 0; k < mixture.kernels; ++k) {
    A sum[kLanes] = {};
    for (int64_t d = 0; d < dims; ++d) {
      const A mu = mixture.mu[k * dims + d], scale = A{-0.5} * inverse[k * dims + d];
      GAS_VECTOR_LOOP
      for (int l = 0; l < kLanes; ++l) {
        sum[l] += exponent_of(u[d * kLanes + l] - mu, scale);
      }
    }
    GAS_VECTOR_LOOP
    for (int l = 0; l < kLanes; ++l) weight[k * kLanes + l] = exp_of(sum[l]);
  }
}

// sum[k] += weight[k] * x[col] over some edges, `W` columns of each.
template <int W, typename T>
GAS_INLINE void spread_columns(const int32_t* col, int64_t count, int64_t kernels,
                               const typename Sum<T>::type* weight, const T* x, int64_t width,
                               int64_t at, typename Sum<T>::type* __restrict sum) {
  using A = typename Sum<T>::type;
  for (int64_t k = 0; k < kernels; ++k) {
    A* into = sum + k * width + at;
    A part[W];
    for (int j = 0; j < W; ++j) part[j] = into[j];
    for (int64_t l = 0; l < count; ++l) {
      const T* from = x + col[l] * width + at;
      const A a = weight[k * kLanes + l];
      for (int j = 0; j < W; ++j) part[j] += a * load(from[j]);
    }
    for (int j = 0; j < W; ++j) into[j] = part[j];
  }
}

template <typename T>
GAS_INLINE void spread(const int32_t* col, int64_t count, int64_t kernels,
                       const typename Sum<T>::type* weight, const T* x, int64_t width,
                       typename Sum<T>::type* sum) {
  int64_t at = 0;
  for (; at + 16 <= width; at += 16) {
    spread_columns<16>(col, count, kernels, weight, x, width, at, sum);
  }
  for (; at + 8 <= width; at += 8) {
    spread_columns<8>(col, count, kernels, weight, x, width, at, sum);
  }
  for (; at < width; ++at) spread_columns<1>(col, count, kernels, weight, x, width, at, sum);
}

// sum += weight[k] * x[col, k] over kernels and some edges, `W` columns of each.
template <int W, typename T>
GAS_INLINE void collapse_columns(const int32_t* col, int64_t count, int64_t kernels,
                                 const typename Sum<T>::type* weight, const T* x, int64_t width,
                                 int64_t at, typename Sum<T>::type* __restrict sum) {
  using A = typename Sum<T>::type;
  A part[W];
  for (int j = 0; j < W; ++j) part[j] = sum[at + j];
  for (int64_t l = 0; l < count; ++l) {
    for (int64_t k = 0; k < kernels; ++k) {
      const T* from = x + (col[l] * kernels + k) * width + at;
      const A a = weight[k * kLanes + l];
      for (int j = 0; j < W; ++j) part[j] += a * load(from[j]);
    }
  }
  for (int j = 0; j < W; ++j) sum[at + j] = part[j];
}

template <typename T>
GAS_INLINE void collapse(const int32_t* col, int64_t count, int64_t kernels,
                         const typename Sum<T>::type* weight, const T* x, int64_t width,
                         typename Sum<T>::type* sum) {
  int64_t at = 0;
  for (; at + 16 <= width; at += 16) {
    collapse_columns<16>(col, count, kernels, weight, x, width, at, sum);
  }
  for (; at + 8 <= width; at += 8) {
    collapse_columns<8>(col, count, kernels, weight, x, width, at, sum);
  }
  for (; at < width; ++at) collapse_columns<1>(col, count, kernels, weight, x, width, at, sum);
}

// Fetches what edges `kAhead` behind some will read: `rows` rows each.
template <typename T>
GAS_INLINE void prefetch_edges(const Sparse& m, const Mixture<typename Sum<T>::type>& mixture,
                               const T* x, int64_t rows, int64_t width, int64_t first,
                               int64_t count, int64_t stop) {
  prefetch_entries(m, first, first + count, stop, [&](int64_t e, int64_t col) GAS_INLINED {
    for (int64_t row = col * rows; row < (col + 1) * rows; ++row) {
      prefetch_row(x + row * width, width);
    }
    if (m.entry != nullptr) __builtin_prefetch(mixture.pseudo + m.entry[e] * mixture.dims);
  });
}

template <bool Spread, typename T, typename Out>
GAS_INLINE void forward_rows(const Sparse& m, const Mixture<typename Sum<T>::type>& mixture,
                             const typename Sum<T>::type* inverse, const T* x, int64_t width,
                             bool mean, Out* out, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t kernels = mixture.kernels;
  const int64_t size = Spread ? kernels * width : width;  // Of a row of the output.
  const int64_t stop = m.rowptr[last];
  std::vector<A> scratch((kernels + mixture.dims) * kLanes + size);
  A* weight = scratch.data();
  A* u = weight + kernels * kLanes;
  A* sum = u + mixture.dims * kLanes;
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    std::fill(sum, sum + size, A{0});
    for (int64_t e = first; e < end; e += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - e);
      prefetch_edges(m, mixture, x, Spread ? 1 : kernels, width, e, count, stop);
      weights_of(m, mixture, inverse, e, count, u, weight);
      if (Spread) {
        spread(m.col + e, count, kernels, weight, x, width, sum);
      } else {
        collapse(m.col + e, count, kernels, weight, x, width, sum);
      }
    }
    const A scale = m.scale<A>(row, mean);
    for (int64_t j = 0; j < size; ++j) store(out + row * size + j, sum[j] * scale);
  }
}

template <typename T>
GAS_INLINE typename Sum<T>::type dot(const typename Sum<T>::type* a, const T* b, int64_t width) {
  using A = typename Sum<T>::type;
  A lane[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) lane[i] += a[j + i] * load(b[j + i]);
  }
  A sum = ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
  for (; j < width; ++j) sum += a[j] * load(b[j]);
  return sum;
}

// Adds to `sums`, for every kernel and dimension, the sum over edges of c and of c times the gap,
// each times the gap, where the gap is u - mu, and c the gradient towards w times w.
template <typename T, typename Out>
GAS_INLINE void backward_rows(const Sparse& m, const Mixture<typename Sum<T>::type>& mixture,
                              const typename Sum<T>::type* inverse, const T* own, const T* other,
                              int64_t width, Out* out, typename Sum<T>::type* grad_pseudo,
                              double* sums, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t kernels = mixture.kernels, dims = mixture.dims, size = kernels * width;
  const int64_t stop = m.rowptr[last], pairs = kernels * dims;
  std::vector<A> scratch((kernels + 2 * dims) * kLanes + 2 * size);
  std::vector<double> lanes(2 * pairs * kLanes);
  A* __restrict weight = scratch.data();
  A* __restrict u = weight + kernels * kLanes;
  A* __restrict to_u = u + dims * kLanes;
  A* __restrict sum = to_u + dims * kLanes;
  A* __restrict mine = sum + size;
  double* __restrict by_gap = lanes.data();
  double* __restrict by_square = by_gap + pairs * kLanes;
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    std::fill(sum, sum + size, A{0});
    for (int64_t j = 0; j < size; ++j) mine[j] = load(own[row * size + j]);
    for (int64_t e = first; e < end; e += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - e);
      prefetch_edges(m, mixture, other, 1, width, e, count, stop);
      weights_of(m, mixture, inverse, e, count, u, weight);
      if (out != nullptr) spread(m.col + e, count, kernels, weight, other, width, sum);
      std::fill(to_u, to_u + dims * kLanes, A{0});
      for (int64_t k = 0; k < kernels; ++k) {
        A c[kLanes] = {};  // Zero beyond `count`.
        for (int64_t l = 0; l < count; ++l) {
          c[l] = dot(mine + k * width, other + m.col[e + l] * width, width);
        }
        GAS_VECTOR_LOOP
        for (int l = 0; l < kLanes; ++l) c[l] *= weight[k * kLanes + l];
        for (int64_t d = 0; d < dims; ++d) {
          const A mu = mixture.mu[k * dims + d], scale = -inverse[k * dims + d];
          double* __restrict gaps = by_gap + (k * dims + d) * kLanes;
          double* __restrict squares = by_square + (k * dims + d) * kLanes;
          GAS_VECTOR_LOOP
          for (int l = 0; l < kLanes; ++l) {
            const A gap = u[d * kLanes + l] - mu, through = c[l] * gap;
            gaps[l] += static_cast<double>(through);
            squares[l] += static_cast<double>(through * gap);
            to_u[d * kLanes + l] += through * scale;
          }
        }
      }
      if (grad_pseudo == nullptr) continue;
      for (int64_t l = 0; l < count; ++l) {
        A* into = grad_pseudo + m.place(e + l) * dims;
        for (int64_t d = 0; d < dims; ++d) into[d] = to_u[d * kLanes + l];
      }
    }
    if (out == nullptr) continue;
    for (int64_t j = 0; j < size; ++j) store(out + row * size + j, sum[j]);
  }
  for (int64_t i = 0; i < 2 * pairs; ++i) {
    for (int l = 0; l < kLanes; ++l) sums[i] += lanes[i * kLanes + l];
  }
}

}  // namespace

template <typename T>
void mixture_spread(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture, const T* x,
                    int64_t width, bool mean, T* out, int threads) {
  const auto inverse = inverse_of(mixture);
  const auto run = [&](const SomeRows& rows, auto* to) GAS_INLINED {
    forward_rows<true>(rows.m, mixture, inverse.data(), x, width, mean && rows.whole, to,
                       rows.begin, rows.end);
  };
  const int64_t size = mixture.kernels * width;
  reduce_rows(matrix, grain_of(kEnough, size), threads, run, Sums{out, size, mean});
}

template <typename T>
void mixture_collapse(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* x, int64_t width, bool mean, T* out, int threads) {
  const auto inverse = inverse_of(mixture);
  const auto run = [&](const SomeRows& rows, auto* to) GAS_INLINED {
    forward_rows<false>(rows.m, mixture, inverse.data(), x, width, mean && rows.whole, to,
                        rows.begin, rows.end);
  };
  const int64_t grain = grain_of(kEnough, mixture.kernels * width);
  reduce_rows(matrix, grain, threads, run, Sums{out, width, mean});
}

template <typename T>
void mixture_backward(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* own, const T* other, int64_t width, T* out,
                      const MixtureGrad<typename Sum<T>::type>& grad, int threads) {
  using A = typename Sum<T>::type;
  const auto inverse = inverse_of(mixture);
  const int64_t pairs = mixture.kernels * mixture.dims, size = mixture.kernels * width;
  const auto run = [&](const SomeRows& rows, double* totals, const T* mine, auto* to) GAS_INLINED {
    backward_rows(rows.m, mixture, inverse.data(), mine, other, width, to, grad.pseudo, totals,
                  rows.begin, rows.end);
  };
  const std::vector<double> totals =
      reduce_rows_and_totals(matrix, grain_of(kEnough, size), threads, 2 * pairs, run,
                             Own{own, size}, Sums{out, size, false});
  for (int64_t i = 0; i < pairs; ++i) {
    grad.mu[i] = mu_gradient<A>(totals[i], inverse[i]);
    grad.sigma[i] = sigma_gradient(totals[pairs + i], inverse[i], mixture.sigma[i]);
  }
}

#define GAS_FOR_TYPE(T, A)                                                                      \
  template void mixture_spread(const Sparse&, const Mixture<A>&, const T*, int64_t, bool, T*,   \
                               int);                                                            \
  template void mixture_collapse(const Sparse&, const Mixture<A>&, const T*, int64_t, bool, T*, \
                                 int);                                                          \
  template void mixture_backward(const Sparse&, const Mixture<A>&, const T*, const T*, int64_t, \
                                 T*, const MixtureGrad<A>&, int);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas
