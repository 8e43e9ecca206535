#include "sparse.h"

#include "teams.h"

namespace gas::cuda {
namespace {

// Reads, for each entry, width * sizeof(T) bytes of x and 4 to 8 + sizeof(T) of the matrix; writes
// width * sizeof(T) for each row: at the bandwidth of the device, but for what caches keep of x.
// A row that isn't in the first table takes 8 bytes more.
template <typename T, int V>
struct Multiply : Reduction {
  using A = typename Sum<T>::type;
  using Part = Sums<A, V>;
  struct Item {
    Pack<T, V> x;
    A weight;
  };

  const T* weight;
  Rows<T> x;
  int64_t width;
  bool mean;
  T* out;

  __device__ const T* source(int64_t col) const {
    if (x.other == nullptr || col < x.num_own) return x.own + col * width;
    const int64_t i = col - x.num_own;
    return x.other + (x.place == nullptr ? i : x.place[i]) * width;
  }
  __device__ Item fetch(const Lane& lane, int64_t e, int64_t col) const {
    Item item{read<V>(source(col) + lane.column), A{1}};
    if (weight != nullptr) item.weight = load(weight[m.entry == nullptr ? e : m.entry[e]]);
    return item;
  }
  __device__ void add(const Lane&, const Own&, Part& part, const Item& item) const {
    for (int j = 0; j < V; ++j) part.sum[j] += item.weight * load(item.x.v[j]);
  }
  __device__ void finish(const Lane& lane, int64_t row, const Own&, const Part& part) const {
    if (lane.used) write_sums(out + row * width + lane.column, part, scale_of<A>(row, mean));
  }
};

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
  __device__ Item fetch(const Lane& lane, int64_t e, int64_t col) const {
    return {read<V>(x + col * width + lane.column), static_cast<int32_t>(e)};
  }
  __device__ void take(Part& part, int j, T value, int32_t entry) const {
    const auto a = load(value), b = load(part.best[j]);
    // NaN wins and stays, as in PyTorch.
    const bool better = (which == Extreme::kMax ? a > b : a < b) | ((a != a) & (b == b));
    if (entry >= 0 && (better || part.entry[j] < 0)) {
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
  __device__ void finish(const Lane& lane, int64_t row, const Own&, const Part& part) const {
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

  __device__ Item fetch(const Lane& lane, int64_t e, int64_t col) const {
    const int64_t at = col * width + lane.column;
    return {read<V>(grad + at), read<V>(from + at), m.entry[e]};
  }
  __device__ void add(const Lane&, const Own&, Part& part, const Item& item) const {
    for (int j = 0; j < V; ++j) {
      part.sum[j] += item.from.v[j] == item.entry ? load(item.grad.v[j]) : A{0};
    }
  }
  __device__ void finish(const Lane& lane, int64_t row, const Own&, const Part& part) const {
    if (lane.used) write_sums(out + row * width + lane.column, part, A{1});
  }
};

// Reads width * sizeof(T) + 4 bytes for each entry and writes sizeof(T); a row of `a` stays in the
// cache.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    dot_chunks(Sparse m, Chunks chunks, Columns columns, const T* a, const T* b, T* out) {
  using A = typename Sum<T>::type;
  const int64_t chunk = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / columns.team;
  if (chunk >= chunks.count) return;
  const Lane lane = columns.lane(0);
  const int64_t width = columns.width;
  for_pieces(m, chunks, chunk, [&](int64_t row, int64_t begin, int64_t end, Piece) {
    for (int64_t e = begin; e < end; e += kAhead) {
      A dot[kAhead];
      dot_ahead<V>(lane, columns.team, width, a + row * width, b, m.col, e, end, dot);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (lane.rank == 0 && e + i < end) store(out + e + i, dot[i]);
      }
    }
  });
}

}  // namespace

template <typename T>
void multiply(const Sparse& matrix, int64_t entries, const T* weight, const Rows<T>& x,
              int64_t width, bool mean, T* out, const Stream& stream) {
  with_vectors<T>(width, {x.own, x.other, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Multiply<T, V> op{matrix, weight, x, width, mean, out};
    reduce_rows("multiply", op, entries, Columns(1, width, V), stream);
  });
}

template <typename T>
void extreme(const Sparse& matrix, int64_t entries, Extreme which, const T* x, int64_t width,
             T* out, int32_t* from, const Stream& stream) {
  with_vectors<T>(width, {x}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const FindExtreme<T, V> op{matrix, which, x, width, out, from};
    reduce_rows("extreme", op, entries, Columns(1, width, V), stream);
  });
}

template <typename T>
void extreme_backward(const Sparse& transposed, int64_t entries, const T* grad,
                      const int32_t* from, int64_t width, T* out, const Stream& stream) {
  with_vectors<T>(width, {grad, from, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const SpreadExtreme<T, V> op{transposed, grad, from, width, out};
    reduce_rows("extreme_backward", op, entries, Columns(1, width, V), stream);
  });
}

template <typename T>
void dot_rows(const Sparse& matrix, int64_t entries, const T* a, const T* b, int64_t width, T* out,
              const Stream& stream) {
  if (entries == 0) return;
  with_vectors<T>(width, {a, b}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Columns columns(1, width, V);
    const Chunks chunks(matrix.num_rows, entries, columns.team);
    launch("dot_rows", dot_chunks<T, V>, (chunks.count * columns.team + kThreads - 1) / kThreads,
           stream.raw, matrix, chunks, columns, a, b, out);
  });
}

#define GAS_FOR_TYPE(T)                                                                           \
  template void multiply(const Sparse&, int64_t, const T*, const Rows<T>&, int64_t, bool, T*,     \
                         const Stream&);                                                          \
  template void extreme(const Sparse&, int64_t, Extreme, const T*, int64_t, T*, int32_t*,         \
                        const Stream&);                                                           \
  template void extreme_backward(const Sparse&, int64_t, const T*, const int32_t*, int64_t, T*,   \
                                 const Stream&);                                                  \
  template void dot_rows(const Sparse&, int64_t, const T*, const T*, int64_t, T*, const Stream&);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas::cuda
