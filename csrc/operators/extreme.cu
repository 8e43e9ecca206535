#include "operators/extreme.h"

#include "common/reduce_rows.cuh"

namespace gas::cuda {
namespace {

// Moves what an unweighted product does, and writes 4 bytes more for each element of the result.
template <typename T, int V>
struct FindExtreme : Reduction {
  struct Part {
    T best[V];
    int32_t entry[V];
  };
  struct Item {
    Pack<T, V> x;
    int32_t entry;
  };

  Extreme which;
  const T* x;
  int64_t width;
  T* out;
  int32_t* from;

  __device__ void start(Part& part) const {
    for (int j = 0; j < V; ++j) part.entry[j] = -1;
  }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t col) const {
    return {read<V>(x + col * width + lane.column), static_cast<int32_t>(e)};
  }
  __device__ void take(Part& part, int j, T value, int32_t entry) const {
    const auto a = load(value), b = load(part.best[j]);
    if (entry >= 0 && (is_better(which, a, b) || part.entry[j] < 0)) {
      part.best[j] = value;
      part.entry[j] = entry;
    }
  }
  __device__ void add(const Lane&, const Own&, Part& part, const Item& item) const {
    for (int j = 0; j < V; ++j) take(part, j, item.x.v[j], item.entry);
  }
  __device__ void join(Part& part, const Part& later) const {
    for (int j = 0; j < V; ++j) take(part, j, later.best[j], later.entry[j]);
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (!lane.used) return;
    for (int j = 0; j < V; ++j) {
      out[row * width + lane.column + j] = part.best[j];
      from[row * width + lane.column + j] = part.entry[j];
    }
  }
};

// Reads width * (sizeof(T) + 4) + 8 bytes for each entry.
template <typename T, int V>
struct SpreadExtreme : Reduction {
  using A = typename Sum<T>::type;
  using Part = Sums<A, V>;
  struct Item {
    Pack<T, V> grad;
    Pack<int32_t, V> from;
    int32_t entry;
  };

  const T* grad;
  const int32_t* from;
  int64_t width;
  T* out;

  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t col) const {
    const int64_t at = col * width + lane.column;
    return {read<V>(grad + at), read<V>(from + at), m.entry[e]};
  }
  __device__ void add(const Lane&, const Own&, Part& part, const Item& item) const {
    for (int j = 0; j < V; ++j) {
      part.sum[j] += item.from.v[j] == item.entry ? load(item.grad.v[j]) : A{0};
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (lane.used) write_sums(out + row * width + lane.column, part, A{1});
  }
};

}  // namespace

template <typename T>
void extreme(const Sparse& matrix, Extreme which, const T* x, int64_t width, T* out, int32_t* from,
             const Stream& stream) {
  with_vectors<T>(width, {x}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const FindExtreme<T, V> op{matrix, which, x, width, out, from};
    reduce_rows("extreme", op, Columns(1, width, V), stream);
  });
}

template <typename T>
void extreme_backward(const Sparse& transposed, const T* grad, const int32_t* from, int64_t width,
                      T* out, const Stream& stream) {
  with_vectors<T>(width, {grad, from, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const SpreadExtreme<T, V> op{transposed, grad, from, width, out};
    reduce_rows("extreme_backward", op, Columns(1, width, V), stream);
  });
}

#define GAS_FOR_TYPE(T)                                                                          \
  template void extreme(const Sparse&, Extreme, const T*, int64_t, T*, int32_t*, const Stream&); \
  template void extreme_backward(const Sparse&, const T*, const int32_t*, int64_t, T*,           \
                                 const Stream&);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas::cuda
