#include "operators/multiply.h"

#include <algorithm>
#include <vector>

#include "common/prefetch.h"
#include "common/reduce_rows.h"

namespace gas {
namespace {

constexpr int64_t kEnough = 16 * 1024;  // Elements; below this, waking a thread costs more.
constexpr int64_t kGrainRows = 4096;    // Addresses of rows.

// Address of the row of a column: in one table, or by a list of pointers.
template <typename T>
struct InTable {
  const T* x;
  int64_t width;
  const T* operator[](int64_t col) const { return x + col * width; }
};
template <typename T>
using Anywhere = const T* const*;

// Adds up `W` columns of a row's sources in registers.
template <int W, typename T, typename Source, typename Out>
GAS_INLINE void sum_columns(const Sparse& m, const T* weight, const Source& x, int64_t width,
                            int64_t row, int64_t at, typename Sum<T>::type scale, Out* out) {
  using A = typename Sum<T>::type;
  A sum[W] = {};
  const int64_t end = m.rowptr[row + 1];
  for (int64_t e = m.rowptr[row]; e < end; ++e) {
    const T* source = x[m.col[e]] + at;
    if (weight == nullptr) {
      for (int j = 0; j < W; ++j) sum[j] += load(source[j]);
    } else {
      const A w = load(weight[m.place(e)]);
      for (int j = 0; j < W; ++j) sum[j] += w * load(source[j]);
    }
  }
  for (int j = 0; j < W; ++j) store(out + row * width + at + j, sum[j] * scale);
}

template <typename T, typename Source, typename Out>
GAS_INLINE void multiply_rows(const Sparse& m, const T* weight, const Source& x, int64_t width,
                              bool mean, Out* out, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    prefetch_entries(m, m.rowptr[row], m.rowptr[row + 1], stop,
                     [&](int64_t, int64_t col) GAS_INLINED { prefetch_row(x[col], width); });
    const A scale = m.scale<A>(row, mean);
    int64_t at = 0;
    for (; at + 64 <= width; at += 64) sum_columns<64>(m, weight, x, width, row, at, scale, out);
    for (; at + 32 <= width; at += 32) sum_columns<32>(m, weight, x, width, row, at, scale, out);
    if (at + 16 <= width) {
      sum_columns<16>(m, weight, x, width, row, at, scale, out);
      at += 16;
    }
    if (at + 8 <= width) {
      sum_columns<8>(m, weight, x, width, row, at, scale, out);
      at += 8;
    }
    if (at + 4 <= width) {
      sum_columns<4>(m, weight, x, width, row, at, scale, out);
      at += 4;
    }
    for (; at < width; ++at) sum_columns<1>(m, weight, x, width, row, at, scale, out);
  }
}

template <typename T>
GAS_INLINE void dots_of_rows(const Sparse& m, const T* a, const T* b, int64_t width, T* out,
                             int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  constexpr int kLanes = 8;
  for (int64_t row = begin; row < last; ++row) {
    const T* left = a + row * width;
    for (int64_t e = m.rowptr[row]; e < m.rowptr[row + 1]; ++e) {
      const T* right = b + m.col[e] * width;
      A lane[kLanes] = {};
      int64_t j = 0;
      for (; j + kLanes <= width; j += kLanes) {
        for (int k = 0; k < kLanes; ++k) lane[k] += load(left[j + k]) * load(right[j + k]);
      }
      A sum =
          ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
      for (; j < width; ++j) sum += load(left[j]) * load(right[j]);
      store(out + e, sum);
    }
  }
}

}  // namespace

template <typename T>
void multiply(const Sparse& matrix, const T* weight, const Rows<T>& x, int64_t width, bool mean,
              T* out, int threads) {
  const auto from = [&](auto source) {
    const auto run = [&](const SomeRows& rows, auto* to) GAS_INLINED {
      multiply_rows(rows.m, weight, source, width, mean && rows.whole, to, rows.begin, rows.end);
    };
    reduce_rows<Vectors::kAvx512>(matrix, grain_of(kEnough, width), threads, run,
                                  Sums{out, width, mean});
  };
  if (x.other == nullptr) return from(InTable<T>{x.own, width});
  std::vector<const T*> rows(x.num_own + x.num_other);
  for (int64_t i = 0; i < x.num_own; ++i) rows[i] = x.own + i * width;
  parallel_chunks(x.num_other, kGrainRows, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      rows[x.num_own + i] = x.other + (x.place == nullptr ? i : x.place[i]) * width;
    }
  });
  from(Anywhere<T>(rows.data()));
}

template <typename T>
void dot_rows(const Sparse& matrix, const T* a, const T* b, int64_t width, T* out, int threads) {
  const auto run = [&](const SomeRows& rows, const T* own) GAS_INLINED {
    dots_of_rows(rows.m, own, b, width, out, rows.begin, rows.end);
  };
  reduce_rows(matrix, grain_of(kEnough, width), threads, run, Own{a, width});
}

#define GAS_FOR_TYPE(T)                                                                    \
  template void multiply(const Sparse&, const T*, const Rows<T>&, int64_t, bool, T*, int); \
  template void dot_rows(const Sparse&, const T*, const T*, int64_t, T*, int);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas
