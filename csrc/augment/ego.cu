#include "augment/ego.h"

#include "common/reduce_rows.cuh"

namespace gas::cuda {
namespace {

constexpr int64_t kSides = 2;  // Columns: edges, then nodes.

// Reads 21 bytes for each entry, or 25, most of them from caches where rows are near each other.
// A lane adds up both sides, or one of them where tables are not aligned.
template <int V>
struct EgoHop : Reduction {
  using Own = Pack<double, V>;
  using Part = Sums<double, V>;
  struct Item {
    Pack<double, V> x;
    bool kept;
  };

  const uint8_t* kept;
  const double* loops;
  const double* x;
  double* out;

  __device__ Own own(const Lane& lane, int32_t row) const {
    Own own = read<V>(x + row * kSides + lane.column);
    for (int j = 0; j < V; ++j) own.v[j] *= loops[row];
    return own;
  }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t col) const {
    const bool edge = kept[m.place(e)] != 0;
    return {read<V>(x + col * kSides + lane.column), edge};
  }
  __device__ void add(const Lane& lane, const Own&, Part& part, const Item& item) const {
    for (int j = 0; j < V; ++j) {
      part.sum[j] += item.kept || lane.column + j > 0 ? item.x.v[j] : 0.0;
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, Own own, const Part& part) const {
    for (int j = 0; j < V; ++j) own.v[j] += part.sum[j];
    write(out + row * kSides + lane.column, own);
  }
};

}  // namespace

void ego_hop(const Sparse& matrix, const uint8_t* kept, const double* loops, const double* x,
             double* out, const Stream& stream) {
  with_vectors<double>(kSides, {x, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const EgoHop<V> op{matrix, kept, loops, x, out};
    reduce_rows("ego_hop", op, Columns(1, kSides, V), stream);
  });
}

}  // namespace gas::cuda
