#include "operators/mixture.h"

#include "common/dot.cuh"
#include "common/exp.h"
#include "common/reduce_rows.cuh"

namespace gas::cuda {
namespace {

constexpr int kDims = 4;  // Coordinates of an edge that a lane keeps; others it reads again.

// A mean, and -1/2 over the variance, side by side.
template <typename A>
using Gaussian = Pack<A, 2>;

// The weights. Every lane computes those that it needs, which costs less than telling each other.
template <typename A>
struct Weights {
  int64_t dims;
  const A* pseudo;     // [entries, dims]
  const A* gaussians;  // [kernels, dims, 2]
  int64_t first;       // Of the dimensions that a lane keeps.

  // Zero beyond the last dimension, where a kernel gives no weight to what is zero.
  struct Edge {
    A u[kDims];
    int32_t entry;
  };
  struct Kernel {
    Gaussian<A> d[kDims];
    int32_t number;
  };

  __device__ Edge edge(const Sparse& m, int64_t e) const {
    Edge edge{};
    edge.entry = static_cast<int32_t>(m.place(e));
    for (int d = 0; d < kDims; ++d) {
      if (first + d < dims) edge.u[d] = pseudo[edge.entry * dims + first + d];
    }
    return edge;
  }
  __device__ Gaussian<A> gaussian(int64_t kernel, int64_t d) const {
    return read<2>(gaussians + (kernel * dims + d) * 2);
  }
  __device__ Kernel kernel(int32_t number) const {
    Kernel kernel{};
    kernel.number = number;
    for (int d = 0; d < kDims; ++d) {
      if (first + d < dims) kernel.d[d] = gaussian(number, first + d);
    }
    return kernel;
  }
  __device__ A operator()(const Edge& edge, const Kernel& kernel) const {
    A sum = 0;
    for (int d = 0; d < kDims; ++d) sum += exponent(edge.u[d], kernel.d[d]);
    if (dims > kDims) {
      for (int64_t d = 0; d < dims; ++d) {
        if (d >= first && d < first + kDims) continue;
        sum += exponent(pseudo[edge.entry * dims + d], gaussian(kernel.number, d));
      }
    }
    return exp_of(sum);
  }
  __device__ static A exponent(A u, const Gaussian<A>& by) {
    return exponent_of(u - by.v[0], by.v[1]);
  }
};

template <typename A>
__global__ void __launch_bounds__(kThreads)
    make_gaussians(const A* mu, const A* sigma, int64_t n, A* gaussians) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    write(gaussians + 2 * i, Gaussian<A>{{mu[i], A{-0.5} * inverse_variance(sigma[i])}});
  }
}

template <typename A>
Weights<A> weights_of(const Mixture<A>& mixture, const Stream& stream) {
  const int64_t n = mixture.kernels * mixture.dims;
  A* gaussians = nullptr;
  if (n > 0) {
    gaussians = stream.scratch<A>(2 * n);
    launch("mixture", make_gaussians<A>, blocks_for(n), stream.raw, mixture.mu, mixture.sigma, n,
           gaussians);
  }
  return {mixture.dims, mixture.pseudo, gaussians, 0};
}

// Reads, for each entry, width * sizeof(T) + dims * sizeof(A) + 4 to 8 bytes, and writes kernels *
// width * sizeof(T) for each row.
template <typename T, int V>
struct Spread : Reduction {
  using A = typename Sum<T>::type;
  using Own = typename Weights<A>::Kernel;
  using Part = Sums<A, V>;
  struct Item {
    Pack<T, V> x;
    typename Weights<A>::Edge edge;
  };

  Weights<A> weights;
  const T* x;
  int64_t kernels, width;
  bool mean;
  T* out;

  __device__ Own own(const Lane& lane, int32_t) const { return weights.kernel(lane.head); }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t from) const {
    return {read<V>(x + (from - lane.head) * width + lane.column), weights.edge(m, e)};
  }
  __device__ void add(const Lane&, const Own& own, Part& part, const Item& item) const {
    const A weight = weights(item.edge, own);
    for (int j = 0; j < V; ++j) part.sum[j] += weight * load(item.x.v[j]);
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (!lane.used) return;
    write_sums(out + row * kernels * width + lane.column, part, m.scale<A>(row, mean));
  }
};

// Reads, for each entry, kernels * width * sizeof(T) + dims * sizeof(A) + 4 to 8 bytes.
template <typename T, int V>
struct Collapse : Reduction {
  static constexpr int kAhead = sizeof(T) == 8 ? 2 : 4;
  using A = typename Sum<T>::type;
  using Part = Sums<A, V>;
  struct Item {
    typename Weights<A>::Edge edge;
    int32_t from;
  };

  Weights<A> weights;
  const T* x;
  int64_t kernels, width;
  bool mean;
  T* out;

  __device__ Item fetch(const Lane&, uint32_t e, int32_t from) const {
    return {weights.edge(m, e), from};
  }
  __device__ void add(const Lane& lane, const Own&, Part& part, const Item& item) const {
    const T* rows = x + item.from * kernels * width + lane.column;
    for (int64_t first = 0; first < kernels; first += kAhead) {
      Pack<T, V> ahead[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        ahead[i] = read<V>(rows + min(first + i, kernels - 1) * width);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= kernels) break;
        const A weight = weights(item.edge, weights.kernel(first + i));
        for (int j = 0; j < V; ++j) part.sum[j] += weight * load(ahead[i].v[j]);
      }
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (lane.used) write_sums(out + row * width + lane.column, part, m.scale<A>(row, mean));
  }
};

// The spread of `other`, and the sums over all entries of c and of c times the gap, each times the
// gap, where the gap is u - mu, and c the gradient towards w times w. The lanes of a head find its
// gradient together; a head of more columns than a team has is read in tiles, of which each reads
// the others' columns too. Reads what the spread reads.
template <typename T, int V>
struct MixtureBackward : Reduction {
  static constexpr int kAhead = sizeof(T) == 8 ? 1 : 2;
  using A = typename Sum<T>::type;
  using Part = Sums<A, V>;
  struct Own {
    Pack<T, V> own;
    typename Weights<A>::Kernel kernel;
    int32_t row;
  };
  struct Item {
    Pack<T, V> other;
    typename Weights<A>::Edge edge;
    int32_t from;
  };
  static constexpr int kTotals = 2 * kDims;

  Weights<A> weights;
  Columns columns;
  const T* table;  // Of own rows.
  const T* other;
  T* out;

  __device__ int64_t place_of_other(const Lane& lane, int64_t row, int64_t column) const {
    return (row - lane.head) * columns.width + column;
  }
  __device__ Own own(const Lane& lane, int32_t row) const {
    return {columns.at<V>(table, row, lane.column), weights.kernel(lane.head), row};
  }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t from) const {
    return {read<V>(other + place_of_other(lane, from, lane.column)), weights.edge(m, e), from};
  }
  __device__ void add(const Lane& lane, const Own& own, Part& part, const Item& item,
                      A* totals) const {
    A dot = lane.used ? dot_of(own.own, item.other) : A{0};
    columns.for_other_tiles(lane, [&](int64_t column) {
      dot += dot_of(columns.at<V>(table, own.row, column),
                    read<V>(other + place_of_other(lane, item.from, column)));
    });
    dot = sum_of_lanes(lane.mask, columns.head_lanes, dot);
    const A weight = weights(item.edge, own.kernel), c = dot * weight;
    for (int j = 0; j < V; ++j) part.sum[j] += weight * load(item.other.v[j]);
    for (int d = 0; d < kDims; ++d) {
      const A gap = item.edge.u[d] - own.kernel.d[d].v[0];
      totals[2 * d] += c * gap;
      totals[2 * d + 1] += c * gap * gap;
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (lane.used && out != nullptr) write_sums(out + columns.place(row, lane.column), part, A{1});
  }
  __device__ void close(const Lane& lane, const A* totals, A* into) const {
    if (!lane.used || !lane.leads || lane.tile != 0) return;
    for (int i = 0; i < kTotals; ++i) into[lane.head * kTotals + i] = totals[i];
  }
};

// The gradients towards the dimensions that lanes kept, from the sums above.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    scale_totals(Weights<A> weights, int64_t kernels, const A* totals, const A* sigma, A* grad_mu,
                 A* grad_sigma) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = first; i < kernels * kDims; i += step) {
    const int64_t kernel = i / kDims, d = weights.first + i % kDims;
    if (d >= weights.dims) continue;
    const double inverse = -2.0 * static_cast<double>(weights.gaussian(kernel, d).v[1]);
    const int64_t at = kernel * weights.dims + d;
    const double by_gap = totals[2 * i], by_square = totals[2 * i + 1];
    grad_mu[at] = mu_gradient<A>(by_gap, inverse);
    grad_sigma[at] = sigma_gradient(by_square, inverse, sigma[at]);
  }
}

// Reads, for each entry, width * sizeof(T) bytes for each kernel, and writes dims * sizeof(A).
template <typename T, int V>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : kBlocks)
    coordinates_backward(Sparse m, Chunks chunks, Columns columns, int64_t kernels,
                         Weights<typename Sum<T>::type> all, const T* own, const T* other,
                         typename Sum<T>::type* grad) {
  using A = typename Sum<T>::type;
  const int32_t chunk = chunk_of_team(columns.team);
  if (chunk >= chunks.count) return;
  const Lane lane = columns.lane(0);
  const int64_t width = columns.width;
  for_pieces(m, chunks, chunk, [&](int32_t row, uint32_t begin, uint32_t end, Piece) {
    Weights<A> weights = all;
    for (; weights.first < weights.dims; weights.first += kDims) {
      for (uint32_t e = begin; e < end; e += kAhead) {
        typename Weights<A>::Edge edges[kAhead];
        A to_edge[kAhead][kDims] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) edges[i] = weights.edge(m, min(e + i, end - 1));
        for (int64_t k = 0; k < kernels; ++k) {
          A dot[kAhead];
          dot_ahead<V>(lane, columns.team, width, own + (row * kernels + k) * width, other, m.col,
                       e, end, dot);
          const auto kernel = weights.kernel(k);
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const A c = dot[i] * weights(edges[i], kernel);
            for (int d = 0; d < kDims; ++d) {
              to_edge[i][d] += c * (edges[i].u[d] - kernel.d[d].v[0]) * A{2} * kernel.d[d].v[1];
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (lane.rank != 0 || e + i >= end) continue;
          for (int d = 0; d < kDims; ++d) {
            const int64_t at = weights.first + d;
            if (at < weights.dims) grad[edges[i].entry * weights.dims + at] = to_edge[i][d];
          }
        }
      }
    }
  });
}

}  // namespace

template <typename T>
void mixture_spread(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture, const T* x,
                    int64_t width, bool mean, T* out, const Stream& stream) {
  const int64_t kernels = mixture.kernels;
  if (matrix.num_rows * kernels * width == 0) return;
  with_vectors<T>(width, {x, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const auto weights = weights_of(mixture, stream);
    const Spread<T, V> op{matrix, weights, x, kernels, width, mean, out};
    reduce_rows("mixture_spread", op, Columns(kernels, width, V), stream);
  });
}

template <typename T>
void mixture_collapse(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* x, int64_t width, bool mean, T* out, const Stream& stream) {
  if (matrix.num_rows * width == 0) return;
  with_vectors<T>(width, {x, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const auto weights = weights_of(mixture, stream);
    const Collapse<T, V> op{matrix, weights, x, mixture.kernels, width, mean, out};
    reduce_rows("mixture_collapse", op, Columns(1, width, V), stream);
  });
}

template <typename T>
void mixture_backward(const Sparse& matrix, const Mixture<typename Sum<T>::type>& mixture,
                      const T* own, const T* other, int64_t width, T* out,
                      const MixtureGrad<typename Sum<T>::type>& grad, const Stream& stream) {
  using A = typename Sum<T>::type;
  const char* what = "mixture_backward";
  const int64_t kernels = mixture.kernels, dims = mixture.dims;
  if (matrix.num_rows == 0) return;
  with_vectors<T>(width, {own, other, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    auto weights = weights_of(mixture, stream);
    const Columns row(1, width, V), columns(kernels, width, V);
    if (grad.pseudo != nullptr && matrix.entries * dims > 0) {
      const Chunks chunks(matrix, row.team);
      launch(what, coordinates_backward<T, V>, blocks_of_teams(chunks.count, row.team), stream.raw,
             matrix, chunks, row, kernels, weights, own, other, grad.pseudo);
    }
    if (kernels * width == 0) return;
    const int64_t n = kernels * MixtureBackward<T, V>::kTotals;
    const Totals<A> totals{stream.scratch<A>(n), n};
    do {  // The spread is wanted where there are no dimensions, too.
      const MixtureBackward<T, V> op{matrix, weights, columns,
                                     own,    other,   weights.first == 0 ? out : nullptr};
      reduce_rows(what, op, columns, stream, totals);
      launch(what, scale_totals<A>, blocks_for(kernels * kDims), stream.raw, weights, kernels,
             totals.sums, mixture.sigma, grad.mu, grad.sigma);
      weights.first += kDims;
    } while (weights.first < dims);
  });
}

#define GAS_FOR_TYPE(T, A)                                                                      \
  template void mixture_spread(const Sparse&, const Mixture<A>&, const T*, int64_t, bool, T*,   \
                               const Stream&);                                                  \
  template void mixture_collapse(const Sparse&, const Mixture<A>&, const T*, int64_t, bool, T*, \
                                 const Stream&);                                                \
  template void mixture_backward(const Sparse&, const Mixture<A>&, const T*, const T*, int64_t, \
                                 T*, const MixtureGrad<A>&, const Stream&);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas::cuda
