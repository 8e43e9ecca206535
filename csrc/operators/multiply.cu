#include "operators/multiply.h"

#include "common/dot.cuh"
#include "common/reduce_rows.cuh"

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
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t col) const {
    Item item{read<V>(source(col) + lane.column), A{1}};
    if (weight != nullptr) item.weight = load(weight[m.place(e)]);
    return item;
  }
  __device__ void add(const Lane&, const Own&, Part& part, const Item& item) const {
    for (int j = 0; j < V; ++j) part.sum[j] += item.weight * load(item.x.v[j]);
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (lane.used) write_sums(out + row * width + lane.column, part, m.scale<A>(row, mean));
  }
};

// Reads width * sizeof(T) + 4 bytes for each entry and writes sizeof(T); a row of `a` stays in the
// cache.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    dot_chunks(Sparse m, Chunks chunks, Columns columns, const T* a, const T* b, T* out) {
  using A = typename Sum<T>::type;
  const int32_t chunk = chunk_of_team(columns.team);
  if (chunk >= chunks.count) return;
  const Lane lane = columns.lane(0);
  const int64_t width = columns.width;
  for_pieces(m, chunks, chunk, [&](int32_t row, uint32_t begin, uint32_t end, Piece) {
    for (uint32_t e = begin; e < end; e += kAhead) {
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
void multiply(const Sparse& matrix, const T* weight, const Rows<T>& x, int64_t width, bool mean,
              T* out, const Stream& stream) {
  with_vectors<T>(width, {x.own, x.other, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Multiply<T, V> op{matrix, weight, x, width, mean, out};
    reduce_rows("multiply", op, Columns(1, width, V), stream);
  });
}

template <typename T>
void dot_rows(const Sparse& matrix, const T* a, const T* b, int64_t width, T* out,
              const Stream& stream) {
  if (matrix.entries == 0) return;
  with_vectors<T>(width, {a, b}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Columns columns(1, width, V);
    const Chunks chunks(matrix, columns.team);
    launch("dot_rows", dot_chunks<T, V>, blocks_of_teams(chunks.count, columns.team), stream.raw,
           matrix, chunks, columns, a, b, out);
  });
}

#define GAS_FOR_TYPE(T)                                                              \
  template void multiply(const Sparse&, const T*, const Rows<T>&, int64_t, bool, T*, \
                         const Stream&);                                             \
  template void dot_rows(const Sparse&, const T*, const T*, int64_t, T*, const Stream&);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas::cuda
