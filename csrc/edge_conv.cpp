#include "edge_conv.h"

#include <algorithm>
#include <vector>

#include "activate.h"
#include "parallel_rows.h"
#include "prefetch.h"
#include "simd.h"

namespace gas {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;  // Below this, waking a thread costs more.
constexpr int kBlock = 16;                     // Columns added up in registers.

int64_t grain_of(int64_t width) { return kGrainElements / std::max<int64_t>(1, width); }

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
GAS_INLINE void forward_rows(const Sparse& m, const EdgeConv& how, const T* target,
                             const T* source, Out* out, Out* slopes, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t width = how.width, row_bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    for (int64_t e = first + kAhead; e < std::min(end + kAhead, stop); ++e) {
      prefetch_row(reinterpret_cast<const char*>(source + m.col[e] * width), row_bytes);
    }
    const A scale = how.mean && end > first ? A{1} / static_cast<A>(end - first) : A{1};
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
  const int64_t width = how.width, row_bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    for (int64_t e = first + kAhead; e < std::min(end + kAhead, stop); ++e) {
      prefetch_row(reinterpret_cast<const char*>(target + m.col[e] * width), row_bytes);
      prefetch_row(reinterpret_cast<const char*>(grad + m.col[e] * width), row_bytes);
    }
    int64_t at = 0;
    for (; at + kBlock <= width; at += kBlock) {
      backward_columns<F, kBlock>(m, how, target, source, grad, out, row, at, kBlock);
    }
    if (at < width) {
      backward_columns<F, 0>(m, how, target, source, grad, out, row, at, width - at);
    }
  }
}

// A function of one type can be compiled for several processors; a template can't.
#define GAS_BY_ACTIVATION(call, ...)                      \
  switch (how.activation) {                               \
    case Activation::kRelu:                               \
      return call<Activation::kRelu>(__VA_ARGS__);        \
    case Activation::kLeakyRelu:                          \
      return call<Activation::kLeakyRelu>(__VA_ARGS__);   \
    case Activation::kElu:                                \
      return call<Activation::kElu>(__VA_ARGS__);         \
    case Activation::kSigmoid:                            \
      return call<Activation::kSigmoid>(__VA_ARGS__);     \
    case Activation::kTanh:                               \
      return call<Activation::kTanh>(__VA_ARGS__);        \
  }
#define GAS_FOR_TYPES(T, Out)                                                                   \
  GAS_CLONES void forward_of(const Sparse& m, const EdgeConv& how, const T* target,             \
                             const T* source, Out* out, Out* slope, int64_t begin,              \
                             int64_t end) {                                                     \
    GAS_BY_ACTIVATION(forward_rows, m, how, target, source, out, slope, begin, end)             \
  }                                                                                             \
  GAS_CLONES void backward_of(const Sparse& m, const EdgeConv& how, const T* target,            \
                              const T* source, const T* grad, Out* out, int64_t begin,          \
                              int64_t end) {                                                    \
    GAS_BY_ACTIVATION(backward_rows, m, how, target, source, grad, out, begin, end)             \
  }
GAS_FOR_TYPES(float, float)
GAS_FOR_TYPES(double, double)
GAS_FOR_TYPES(bfloat16, bfloat16)
GAS_FOR_TYPES(bfloat16, float)
#undef GAS_FOR_TYPES
#undef GAS_BY_ACTIVATION

}  // namespace

template <typename T>
void edge_conv(const Sparse& matrix, const EdgeConv& how, const T* target, const T* source, T* out,
               T* slope, int threads) {
  const Hubs hubs(matrix);
  parallel_rows(matrix, hubs, grain_of(how.width), threads, [&](int64_t begin, int64_t end) {
    forward_of(matrix, how, target, source, out, slope, begin, end);
  });
  const EdgeConv sum{how.activation, how.parameter, how.width, false};
  const std::vector<T> own = hubs.repeat(target, how.width);
  std::vector<typename Sum<T>::type> parts(own.size()), slopes(slope == nullptr ? 0 : own.size());
  parallel_pieces(hubs, grain_of(how.width), threads, [&](int64_t begin, int64_t end) {
    forward_of(hubs.pieces(), sum, own.data(), source, parts.data(),
               slope == nullptr ? nullptr : slopes.data(), begin, end);
  });
  join_sums(hubs, parts, how.width, how.mean, out, threads);
  if (slope != nullptr) join_sums(hubs, slopes, how.width, how.mean, slope, threads);
}

template <typename T>
void edge_conv_backward(const Sparse& transposed, const EdgeConv& how, const T* target,
                        const T* source, const T* grad, T* out, int threads) {
  const Hubs hubs(transposed);
  parallel_rows(transposed, hubs, grain_of(how.width), threads, [&](int64_t begin, int64_t end) {
    backward_of(transposed, how, target, source, grad, out, begin, end);
  });
  const std::vector<T> own = hubs.repeat(source, how.width);
  std::vector<typename Sum<T>::type> parts(own.size());
  parallel_pieces(hubs, grain_of(how.width), threads, [&](int64_t begin, int64_t end) {
    backward_of(hubs.pieces(), how, target, own.data(), grad, parts.data(), begin, end);
  });
  join_sums(hubs, parts, how.width, false, out, threads);
}

#define GAS_FOR_TYPE(T)                                                                        \
  template void edge_conv(const Sparse&, const EdgeConv&, const T*, const T*, T*, T*, int);    \
  template void edge_conv_backward(const Sparse&, const EdgeConv&, const T*, const T*,         \
                                   const T*, T*, int);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas
