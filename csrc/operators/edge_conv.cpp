#include "operators/edge_conv.h"

#include <algorithm>
#include <vector>

#include "common/prefetch.h"
#include "common/reduce_rows.h"

namespace gas {
namespace {

constexpr int64_t kEnough = 16 * 1024;  // Elements; below this, waking a thread costs more.
constexpr int kBlock = 16;              // Columns added up in registers.

// `W` columns from `at` on; `size` of them where fewer are left.
template <Activation F, int W, typename T, typename Out>
GAS_INLINE void forward_columns(const Sparse& m, const EdgeConv& how, const T* target,
                                const T* source, Out* out, Out* slopes, int64_t row, int64_t at,
                                int64_t size, typename Sum<T>::type scale) {
  using A = typename Sum<T>::type;
  const int64_t columns = W > 0 ? W : size;
  const A parameter = static_cast<A>(how.parameter);
  A mine[kBlock], sum[kBlock] = {}, bend[kBlock] = {};
  const int64_t here = row * how.width + at;
  for (int64_t j = 0; j < columns; ++j) mine[j] = load(target[here + j]);
  const int64_t end = m.rowptr[row + 1];
  for (int64_t e = m.rowptr[row]; e < end; ++e) {
    const T* theirs = source + m.col[e] * how.width + at;
    GAS_VECTOR_LOOP
    for (int64_t j = 0; j < columns; ++j) {
      A value, slope;
      activate<F>(mine[j] + load(theirs[j]), parameter, value, slope);
      sum[j] += value;
      bend[j] += slope;
    }
  }
  for (int64_t j = 0; j < columns; ++j) store(out + here + j, sum[j] * scale);
  if (slopes == nullptr) return;
  for (int64_t j = 0; j < columns; ++j) store(slopes + here + j, bend[j] * scale);
}

template <Activation F, typename T, typename Out>
GAS_INLINE void forward_rows(const Sparse& m, const EdgeConv& how, bool mean, const T* target,
                             const T* source, Out* out, Out* slopes, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t width = how.width, stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    prefetch_sources(m, row, stop, width, source);
    const A scale = m.scale<A>(row, mean);
    int64_t at = 0;
    for (; at + kBlock <= width; at += kBlock) {
      forward_columns<F, kBlock>(m, how, target, source, out, slopes, row, at, kBlock, scale);
    }
    if (at < width) {
      forward_columns<F, 0>(m, how, target, source, out, slopes, row, at, width - at, scale);
    }
  }
}

template <Activation F, int W, typename T, typename Out>
GAS_INLINE void backward_columns(const Sparse& m, const EdgeConv& how, const T* target,
                                 const T* source, const T* grad, Out* out, int64_t row, int64_t at,
                                 int64_t size) {
  using A = typename Sum<T>::type;
  const int64_t columns = W > 0 ? W : size;
  const A parameter = static_cast<A>(how.parameter);
  A mine[kBlock], sum[kBlock] = {};
  const int64_t here = row * how.width + at;
  for (int64_t j = 0; j < columns; ++j) mine[j] = load(source[here + j]);
  const int64_t end = m.rowptr[row + 1];
  for (int64_t e = m.rowptr[row]; e < end; ++e) {
    const int64_t there = m.col[e] * how.width + at;
    GAS_VECTOR_LOOP
    for (int64_t j = 0; j < columns; ++j) {
      A value, slope;
      activate<F>(load(target[there + j]) + mine[j], parameter, value, slope);
      sum[j] += slope * load(grad[there + j]);
    }
  }
  for (int64_t j = 0; j < columns; ++j) store(out + here + j, sum[j]);
}

template <Activation F, typename T, typename Out>
GAS_INLINE void backward_rows(const Sparse& m, const EdgeConv& how, const T* target,
                              const T* source, const T* grad, Out* out, int64_t begin,
                              int64_t last) {
  const int64_t width = how.width, stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    prefetch_sources(m, row, stop, width, target, grad);
    int64_t at = 0;
    for (; at + kBlock <= width; at += kBlock) {
      backward_columns<F, kBlock>(m, how, target, source, grad, out, row, at, kBlock);
    }
    if (at < width) {
      backward_columns<F, 0>(m, how, target, source, grad, out, row, at, width - at);
    }
  }
}

}  // namespace

template <typename T>
void edge_conv(const Sparse& matrix, const EdgeConv& how, const T* target, const T* source, T* out,
               T* slope, int threads) {
  const auto run = [&](const SomeRows& rows, const T* own, auto* to, auto* slopes) GAS_INLINED {
    with_activation(how.activation, [&](auto activation) GAS_INLINED {
      forward_rows<activation>(rows.m, how, how.mean && rows.whole, own, source, to, slopes,
                               rows.begin, rows.end);
    });
  };
  reduce_rows(matrix, grain_of(kEnough, how.width), threads, run, Own{target, how.width},
              Sums{out, how.width, how.mean}, Sums{slope, how.width, how.mean});
}

template <typename T>
void edge_conv_backward(const Sparse& transposed, const EdgeConv& how, const T* target,
                        const T* source, const T* grad, T* out, int threads) {
  const auto run = [&](const SomeRows& rows, const T* own, auto* to) GAS_INLINED {
    with_activation(how.activation, [&](auto activation) GAS_INLINED {
      backward_rows<activation>(rows.m, how, target, own, grad, to, rows.begin, rows.end);
    });
  };
  reduce_rows(transposed, grain_of(kEnough, how.width), threads, run, Own{source, how.width},
              Sums{out, how.width, false});
}

#define GAS_FOR_TYPE(T)                                                                          \
  template void edge_conv(const Sparse&, const EdgeConv&, const T*, const T*, T*, T*, int);      \
  template void edge_conv_backward(const Sparse&, const EdgeConv&, const T*, const T*, const T*, \
                                   T*, int);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas
