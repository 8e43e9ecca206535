#include "sparse.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel_rows.h"
#include "prefetch.h"
#include "simd.h"

namespace gas {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;  // Below this, waking a thread costs more.

int64_t grain_of(int64_t width) { return kGrainElements / std::max<int64_t>(1, width); }

// Transposing ----------------------------------------------------------------------------------

constexpr int64_t kGrainColumns = 4096;

// Products -------------------------------------------------------------------------------------

// Where the row of a column is: in one table, or anywhere.
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
      const A w = load(weight[m.entry == nullptr ? e : m.entry[e]]);
      for (int j = 0; j < W; ++j) sum[j] += w * load(source[j]);
    }
  }
  for (int j = 0; j < W; ++j) store(out + row * width + at + j, sum[j] * scale);
}

template <typename T, typename Source, typename Out>
GAS_INLINE void multiply_rows(const Sparse& m, const T* weight, const Source& x, int64_t width,
                              bool mean, Out* out, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    for (int64_t e = first + kAhead; e < std::min(end + kAhead, stop); ++e) {
      prefetch_row(reinterpret_cast<const char*>(x[m.col[e]]), row_bytes);
    }
    const A scale = mean && end > first ? A{1} / static_cast<A>(end - first) : A{1};
    int64_t at = 0;
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

// Extremes -------------------------------------------------------------------------------------

constexpr int kBlock = 16;  // Columns that are looked at together, in registers.

// NaN wins and stays, as in PyTorch.
template <bool Max, typename A>
GAS_INLINE bool is_better(A a, A b) {
  return (Max ? a > b : a < b) | ((a != a) & (b == b));
}

// `W` columns from `at` on; `size` of them where fewer are left.
template <int W, bool Max, typename T>
GAS_INLINE void extreme_columns(const Sparse& m, const T* x, int64_t width, int64_t row,
                                int64_t at, int64_t size, T* out, int32_t* from) {
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
      const bool better = is_better<Max>(a, b);
      best[j] = better ? a : b;
      entry[j] = better ? static_cast<int32_t>(e) : entry[j];
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    store(out + row * width + at + j, best[j]);
    from[row * width + at + j] = entry[j];
  }
}

template <bool Max, typename T>
GAS_INLINE void extreme_rows(const Sparse& m, const T* x, int64_t width, T* out, int32_t* from,
                             int64_t begin, int64_t last) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t stop = m.rowptr[last];
  for (int64_t row = begin; row < last; ++row) {
    const int64_t end = std::min<int64_t>(m.rowptr[row + 1] + kAhead, stop);
    for (int64_t e = m.rowptr[row] + kAhead; e < end; ++e) {
      prefetch_row(reinterpret_cast<const char*>(x + m.col[e] * width), row_bytes);
    }
    int64_t at = 0;
    for (; at + kBlock <= width; at += kBlock) {
      extreme_columns<kBlock, Max>(m, x, width, row, at, kBlock, out, from);
    }
    if (at < width) extreme_columns<0, Max>(m, x, width, row, at, width - at, out, from);
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
    const int64_t end = std::min<int64_t>(m.rowptr[row + 1] + kAhead, stop);
    for (int64_t e = m.rowptr[row] + kAhead; e < end; ++e) {
      const int64_t base = m.col[e] * width;
      prefetch_row(reinterpret_cast<const char*>(grad + base), width * sizeof(T));
      prefetch_row(reinterpret_cast<const char*>(from + base), width * sizeof(int32_t));
    }
    int64_t at = 0;
    for (; at + kBlock <= width; at += kBlock) {
      extreme_backward_columns<kBlock>(m, grad, from, width, row, at, kBlock, out);
    }
    if (at < width) {
      extreme_backward_columns<0>(m, grad, from, width, row, at, width - at, out);
    }
  }
}

// Dot products ---------------------------------------------------------------------------------

template <typename T>
GAS_INLINE void dot_rows_of(const Sparse& m, const T* a, const T* b, int64_t width, T* out,
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
      A sum = ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
              ((lane[4] + lane[5]) + (lane[6] + lane[7]));
      for (; j < width; ++j) sum += load(left[j]) * load(right[j]);
      store(out + e, sum);
    }
  }
}

// A function of one type can be compiled for several processors; a template can't.
#define GAS_FOR_TYPES(T, Out)                                                                    \
  GAS_CLONES void run(const Sparse& m, const T* weight, InTable<T> x, int64_t width, bool mean,   \
                      Out* out, int64_t begin, int64_t end) {                                    \
    multiply_rows(m, weight, x, width, mean, out, begin, end);                                   \
  }                                                                                              \
  GAS_CLONES void run(const Sparse& m, const T* weight, Anywhere<T> x, int64_t width, bool mean,  \
                      Out* out, int64_t begin, int64_t end) {                                    \
    multiply_rows(m, weight, x, width, mean, out, begin, end);                                   \
  }                                                                                              \
  GAS_CLONES void run(const Sparse& m, const T* grad, const int32_t* from, int64_t width,        \
                      Out* out, int64_t begin, int64_t end) {                                    \
    extreme_backward_rows(m, grad, from, width, out, begin, end);                                \
  }
#define GAS_FOR_TYPE(T)                                                                          \
  GAS_FOR_TYPES(T, T)                                                                            \
  GAS_CLONES void run(const Sparse& m, Extreme which, const T* x, int64_t width, T* out,         \
                      int32_t* from, int64_t begin, int64_t end) {                               \
    if (which == Extreme::kMax) return extreme_rows<true>(m, x, width, out, from, begin, end);   \
    extreme_rows<false>(m, x, width, out, from, begin, end);                                     \
  }                                                                                              \
  GAS_CLONES void run(const Sparse& m, const T* a, const T* b, int64_t width, T* out,            \
                      int64_t begin, int64_t end) {                                              \
    dot_rows_of(m, a, b, width, out, begin, end);                                                \
  }
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
GAS_FOR_TYPES(bfloat16, float)
#undef GAS_FOR_TYPE
#undef GAS_FOR_TYPES

// Of each hub the first piece that has an extreme, as within a row.
template <bool Max, typename T>
void join_extremes(const Hubs& hubs, const std::vector<T>& value, const std::vector<int32_t>& entry,
                   int64_t width, T* out, int32_t* from) {
  for (const Hub& hub : hubs) {
    for (int64_t j = 0; j < width; ++j) {
      int64_t best = hub.first * width + j;
      for (int64_t piece = hub.first + 1; piece < hub.last; ++piece) {
        if (is_better<Max>(load(value[piece * width + j]), load(value[best]))) {
          best = piece * width + j;
        }
      }
      out[hub.row * width + j] = value[best];
      from[hub.row * width + j] = entry[best];
    }
  }
}

}  // namespace

void transpose(const Sparse& matrix, int64_t num_cols, int64_t kept, int32_t* out_rowptr,
               int32_t* out_col, int32_t* out_entry, int threads) {
  const int64_t entries = matrix.rowptr[matrix.num_rows];
  bool inside = true;
  for (int64_t e = 0; e < entries; ++e) inside &= matrix.col[e] >= 0 && matrix.col[e] < num_cols;
  for (int64_t e = 0; !inside; ++e) {
    if (matrix.col[e] < 0 || matrix.col[e] >= num_cols) {
      throw std::out_of_range("column " + std::to_string(matrix.col[e]) + " of entry " +
                              std::to_string(e) + " is outside [0, " + std::to_string(num_cols) +
                              ")");
    }
  }
  // Counting sort. out_rowptr[c + 1] holds the count, then the start, then the end of column c,
  // which is the start of column c + 1.
  std::fill(out_rowptr, out_rowptr + num_cols + 1, 0);
  if (kept == 0) return;
  for (int64_t e = 0; e < entries; ++e) {
    if (matrix.col[e] < kept) ++out_rowptr[matrix.col[e] + 1];
  }
  int32_t start = 0;
  for (int64_t c = 0; c < num_cols; ++c) {
    const int32_t count = out_rowptr[c + 1];
    out_rowptr[c + 1] = start;
    start += count;
  }
  // Each thread reads all entries and writes those of its own columns.
  parallel_chunks(kept, kGrainColumns, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < matrix.num_rows; ++row) {
      for (int64_t e = matrix.rowptr[row]; e < matrix.rowptr[row + 1]; ++e) {
        const int64_t c = matrix.col[e];
        if (c < begin || c >= end) continue;
        const int32_t at = out_rowptr[c + 1]++;
        out_col[at] = static_cast<int32_t>(row);
        out_entry[at] = static_cast<int32_t>(e);
      }
    }
  });
}

template <typename T>
void multiply(const Sparse& matrix, const T* weight, const Rows<T>& x, int64_t width, bool mean,
              T* out, int threads) {
  const auto from = [&](auto source) {
    sum_rows(matrix, width, mean, out, grain_of(width), threads,
             [&](const Sparse& m, bool mean, auto* to, int64_t begin, int64_t end) {
               run(m, weight, source, width, mean, to, begin, end);
             });
  };
  if (x.other == nullptr) return from(InTable<T>{x.own, width});
  std::vector<const T*> rows(x.num_own + x.num_other);
  for (int64_t i = 0; i < x.num_own; ++i) rows[i] = x.own + i * width;
  parallel_chunks(x.num_other, kGrainColumns, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      rows[x.num_own + i] = x.other + (x.place == nullptr ? i : x.place[i]) * width;
    }
  });
  from(Anywhere<T>(rows.data()));
}

template <typename T>
void extreme(const Sparse& matrix, Extreme which, const T* x, int64_t width, T* out, int32_t* from,
             int threads) {
  const Hubs hubs(matrix);
  parallel_rows(matrix, hubs, grain_of(width), threads, [&](int64_t begin, int64_t end) {
    run(matrix, which, x, width, out, from, begin, end);
  });
  std::vector<T> value(hubs.num_pieces() * width);
  std::vector<int32_t> entry(value.size());
  parallel_pieces(hubs, grain_of(width), threads, [&](int64_t begin, int64_t end) {
    run(hubs.pieces(), which, x, width, value.data(), entry.data(), begin, end);
  });
  const auto join = which == Extreme::kMax ? join_extremes<true, T> : join_extremes<false, T>;
  join(hubs, value, entry, width, out, from);
}

template <typename T>
void extreme_backward(const Sparse& transposed, const T* grad, const int32_t* from, int64_t width,
                      T* out, int threads) {
  sum_rows(transposed, width, false, out, grain_of(width), threads,
           [&](const Sparse& m, bool, auto* to, int64_t begin, int64_t end) {
             run(m, grad, from, width, to, begin, end);
           });
}

template <typename T>
void dot_rows(const Sparse& matrix, const T* a, const T* b, int64_t width, T* out, int threads) {
  const Hubs hubs(matrix);
  parallel_rows(matrix, hubs, grain_of(width), threads, [&](int64_t begin, int64_t end) {
    run(matrix, a, b, width, out, begin, end);
  });
  const std::vector<T> own = hubs.repeat(a, width);
  parallel_pieces(hubs, grain_of(width), threads, [&](int64_t begin, int64_t end) {
    run(hubs.pieces(), own.data(), b, width, out, begin, end);
  });
}

#define GAS_FOR_TYPE(T)                                                                          \
  template void multiply(const Sparse&, const T*, const Rows<T>&, int64_t, bool, T*, int);       \
  template void extreme(const Sparse&, Extreme, const T*, int64_t, T*, int32_t*, int);           \
  template void extreme_backward(const Sparse&, const T*, const int32_t*, int64_t, T*, int);     \
  template void dot_rows(const Sparse&, const T*, const T*, int64_t, T*, int);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas
