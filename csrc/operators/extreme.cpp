#include "operators/extreme.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "common/prefetch.h"
#include "common/reduce_rows.h"

namespace gas {
namespace {

constexpr int64_t kEnough = 16 * 1024;  // Elements; below this, waking a thread costs more.
constexpr int kBlock = 16;              // Columns that are looked at together, in registers.

// `W` columns from `at` on; `size` of them where fewer are left.
template <int W, Extreme Which, typename T>
GAS_INLINE void extreme_columns(const Sparse& m, const T* x, int64_t width, int64_t row, int64_t at,
                                int64_t size, T* out, int32_t* from) {
  using A = typename Sum<T>::type;
  const int64_t columns = W > 0 ? W : size, first = m.rowptr[row], end = m.rowptr[row + 1];
  A best[kBlock] = {};
  int32_t entry[kBlock];
  for (int64_t j = 0; j < columns; ++j) {
    if (first < end) best[j] = load(x[m.col[first] * width + at + j]);
    entry[j] = first < end ? static_cast<int32_t>(first) : -1;
  }
  for (int64_t e = first + 1; e < end; ++e) {
    const T* source = x + m.col[e] * width + at;
    GAS_VECTOR_LOOP
    for (int64_t j = 0; j < columns; ++j) {
      const A a = load(source[j]), b = best[j];
      const bool better = is_better(Which, a, b);
      best[j] = better ? a : b;
      entry[j] = better ? static_cast<int32_t>(e) : entry[j];
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    store(out + row * width + at + j, best[j]);
    from[row * width + at + j] = entry[j];
  }
}

template <Extreme Which, typename T>
GAS_INLINE void extreme_rows(const Sparse& m, const T* x, int64_t width, T* out, int32_t* from,
                             int64_t begin, int64_t last) {
  const int64_t stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    prefetch_sources(m, row, stop, width, x);
    int64_t at = 0;
    for (; at + kBlock <= width; at += kBlock) {
      extreme_columns<kBlock, Which>(m, x, width, row, at, kBlock, out, from);
    }
    if (at < width) extreme_columns<0, Which>(m, x, width, row, at, width - at, out, from);
  }
}

template <int W, typename T, typename Out>
GAS_INLINE void extreme_backward_columns(const Sparse& m, const T* grad, const int32_t* from,
                                         int64_t width, int64_t row, int64_t at, int64_t size,
                                         Out* out) {
  using A = typename Sum<T>::type;
  const int64_t columns = W > 0 ? W : size, end = m.rowptr[row + 1];
  A sum[kBlock] = {};
  for (int64_t e = m.rowptr[row]; e < end; ++e) {
    const int64_t base = m.col[e] * width + at;
    const int32_t entry = m.entry[e];
    GAS_VECTOR_LOOP
    for (int64_t j = 0; j < columns; ++j) {
      const A g = load(grad[base + j]);
      sum[j] += from[base + j] == entry ? g : A{0};
    }
  }
  for (int64_t j = 0; j < columns; ++j) store(out + row * width + at + j, sum[j]);
}

template <typename T, typename Out>
GAS_INLINE void extreme_backward_rows(const Sparse& m, const T* grad, const int32_t* from,
                                      int64_t width, Out* out, int64_t begin, int64_t last) {
  const int64_t stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    prefetch_sources(m, row, stop, width, grad, from);
    int64_t at = 0;
    for (; at + kBlock <= width; at += kBlock) {
      extreme_backward_columns<kBlock>(m, grad, from, width, row, at, kBlock, out);
    }
    if (at < width) {
      extreme_backward_columns<0>(m, grad, from, width, row, at, width - at, out);
    }
  }
}

// Tables for reduce_rows: of each hub the first piece that has an extreme, as within a row.
template <typename T>
struct Extremes {
  Extreme which;
  T* out;
  int32_t* from;
  int64_t width;

  struct Scratch {
    std::vector<T> value;
    std::vector<int32_t> entry;
  };

  std::tuple<T*, int32_t*> whole() const { return {out, from}; }
  Scratch scratch(const Hubs& hubs) const {
    const int64_t n = hubs.num_pieces() * width;
    return {std::vector<T>(n), std::vector<int32_t>(n)};
  }
  std::tuple<T*, int32_t*> pointers(Scratch& found) const {
    return {found.value.data(), found.entry.data()};
  }
  void join(const Hubs& hubs, const Scratch& found, int threads) const {
    parallel_hubs(hubs, threads, [&](const Hub& hub) {
      for (int64_t j = 0; j < width; ++j) {
        int64_t best = hub.first * width + j;
        for (int64_t piece = hub.first + 1; piece < hub.last; ++piece) {
          const int64_t at = piece * width + j;
          if (is_better(which, load(found.value[at]), load(found.value[best]))) best = at;
        }
        out[hub.row * width + j] = found.value[best];
        from[hub.row * width + j] = found.entry[best];
      }
    });
  }
};
template <typename T>
Extremes(Extreme, T*, int32_t*, int64_t) -> Extremes<T>;

}  // namespace

template <typename T>
void extreme(const Sparse& matrix, Extreme which, const T* x, int64_t width, T* out, int32_t* from,
             int threads) {
  const auto run = [&](const SomeRows& rows, T* to, int32_t* entry) GAS_INLINED {
    if (which == Extreme::kMax) {
      extreme_rows<Extreme::kMax>(rows.m, x, width, to, entry, rows.begin, rows.end);
    } else {
      extreme_rows<Extreme::kMin>(rows.m, x, width, to, entry, rows.begin, rows.end);
    }
  };
  reduce_rows(matrix, grain_of(kEnough, width), threads, run, Extremes{which, out, from, width});
}

template <typename T>
void extreme_backward(const Sparse& transposed, const T* grad, const int32_t* from, int64_t width,
                      T* out, int threads) {
  const auto run = [&](const SomeRows& rows, auto* to) GAS_INLINED {
    extreme_backward_rows(rows.m, grad, from, width, to, rows.begin, rows.end);
  };
  reduce_rows(transposed, grain_of(kEnough, width), threads, run, Sums{out, width, false});
}

#define GAS_FOR_TYPE(T)                                                                \
  template void extreme(const Sparse&, Extreme, const T*, int64_t, T*, int32_t*, int); \
  template void extreme_backward(const Sparse&, const T*, const int32_t*, int64_t, T*, int);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas
