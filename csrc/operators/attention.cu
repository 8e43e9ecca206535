#include "operators/attention.h"

#include <limits>

#include "common/exp.h"
#include "common/reduce_rows.cuh"

namespace gas::cuda {
namespace {

// The softmax of a row with a running maximum: what was added up is scaled when a larger score
// arrives. All lanes of a head compute its weights, which costs less than telling each other.
//
// Reads, for each entry, heads * (width * sizeof(T) + sizeof(A)) + 4 bytes; writes 2 * heads *
// width * sizeof(T) for each row.
template <typename T, int V>
struct Attend : Reduction {
  using A = typename Sum<T>::type;
  using Own = A;  // The target's score.
  struct Part {
    A maximum, total, weight;  // `weight` is that of positive scores.
    A sum[V], positive[V];
  };
  struct Item {
    Pack<T, V> x;
    A source, keep;
  };
  static constexpr A kLowest = std::numeric_limits<A>::lowest();

  Attention how;
  const T* x;
  const A* source;
  const A* target;
  T* out;
  AttentionState<T> state;

  __device__ Own own(const Lane& lane, int32_t row) const {
    return target[row * how.heads + lane.head];
  }
  __device__ void start(Part& part) const { part.maximum = kLowest; }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t from) const {
    return {read<V>(x + from * how.heads * how.width + lane.column),
            source[from * how.heads + lane.head], kept<A>(how, e, lane.head)};
  }
  __device__ void raise(Part& part, A maximum) const {
    if (!(maximum > part.maximum)) return;
    const A scale = exp_of(part.maximum - maximum);
    part.maximum = maximum;
    part.total *= scale;
    part.weight *= scale;
    for (int j = 0; j < V; ++j) {
      part.sum[j] *= scale;
      part.positive[j] *= scale;
    }
  }
  __device__ void add(const Lane&, Own own, Part& part, const Item& item) const {
    const A score = leaky(item.source + own, static_cast<A>(how.slope));
    raise(part, score);
    const A power = exp_of(score - part.maximum), a = power * item.keep;
    part.total += power;
    for (int j = 0; j < V; ++j) part.sum[j] += a * load(item.x.v[j]);
    if (score > A{0}) {
      part.weight += power;
      for (int j = 0; j < V; ++j) part.positive[j] += a * load(item.x.v[j]);
    }
  }
  __device__ void join(Part& part, const Part& later) const {
    raise(part, later.maximum);
    const A scale = exp_of(later.maximum - part.maximum);
    part.total += later.total * scale;
    part.weight += later.weight * scale;
    for (int j = 0; j < V; ++j) {
      part.sum[j] += later.sum[j] * scale;
      part.positive[j] += later.positive[j] * scale;
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, Own, const Part& part) const {
    if (!lane.used) return;
    const A scale = inverse_or_zero(part.total);
    const int64_t at = row * how.heads * how.width + lane.column;
    Pack<T, V> result, positive;
    for (int j = 0; j < V; ++j) {
      store(&result.v[j], part.sum[j] * scale);
      store(&positive.v[j], part.positive[j] * scale);
    }
    write(out + at, result);
    if (state.positive != nullptr) write(state.positive + at, positive);
    if (lane.leads && lane.tile == 0) {
      const int64_t place = row * how.heads + lane.head;
      state.maximum[place] = m.rowptr[row] < m.rowptr[row + 1] ? part.maximum : A{0};
      state.total[place] = part.total;
      state.positive_weight[place] = part.weight * scale;
    }
  }
};

// Values of a destination and a head for its sources, adjacent so that a lane loads them at once.
enum Packed { kScore, kMaximum, kScale, kDot, kPacked };

// Of each destination the gradient towards its scores, and `packed`. A team takes a head.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    reduce_targets(Attention how, int64_t num_rows, Columns columns,
                   const typename Sum<T>::type* target, const T* out, const T* grad,
                   AttentionState<T> state, typename Sum<T>::type* packed,
                   typename Sum<T>::type* grad_target) {
  using A = typename Sum<T>::type;
  const Lane lane = columns.lane(0);
  const int64_t width = how.width, step = int64_t{gridDim.x} * kThreads / columns.team;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / columns.team;
  for (int64_t at = first; at < num_rows * how.heads; at += step) {
    A whole = 0, positive = 0;
    for (int64_t j = lane.rank * V; j < width; j += columns.team * V) {
      const Pack<T, V> g = read<V>(grad + at * width + j), o = read<V>(out + at * width + j),
                       p = read<V>(state.positive + at * width + j);
      for (int k = 0; k < V; ++k) {
        whole += load(g.v[k]) * load(o.v[k]);
        positive += load(g.v[k]) * load(p.v[k]);
      }
    }
    whole = sum_of_lanes(lane.mask, columns.team, whole);
    positive = sum_of_lanes(lane.mask, columns.team, positive);
    if (lane.rank != 0) continue;
    Pack<A, kPacked> into;
    into.v[kScore] = target[at];
    into.v[kMaximum] = state.maximum[at];
    into.v[kScale] = inverse_or_zero(state.total[at]);
    into.v[kDot] = whole;
    write(packed + at * kPacked, into);
    grad_target[at] = target_gradient(how, positive, state.positive_weight[at], whole);
  }
}

// The gradients towards sources, for rows of the transpose. With G the gradient towards the output
// of an edge's destination, and D, a, keep and leaky' as in attention.h, that towards the
// source's score is the sum of leaky' a (keep <G, x> - D) over its edges, which is
//   <sum of leaky' a keep G, x> - sum of leaky' a D:
// one dot product for each row, none for each edge.
//
// Reads, for each entry, heads * (width * sizeof(T) + 4 * sizeof(A)) + 8 bytes.
template <typename T, int V>
struct AttendBackward : Reduction {
  using A = typename Sum<T>::type;
  using Own = A;  // The source's score.
  struct Part {
    A dot;              // The sum of leaky' a D.
    A sum[V], bent[V];  // The sums of a keep G, and of leaky' a keep G.
  };
  struct Item {
    Pack<T, V> grad;
    Pack<A, kPacked> packed;
    A keep;
  };

  Attention how;
  const T* x;
  const A* source;
  const T* grad;
  const A* packed;
  T* grad_x;
  A* grad_source;  // [tiles of a head, rows, heads], to be added up
  int head_lanes;

  __device__ Own own(const Lane& lane, int32_t row) const {
    return source[row * how.heads + lane.head];
  }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t to) const {
    return {read<V>(grad + to * how.heads * how.width + lane.column),
            read<kPacked>(packed + (to * how.heads + lane.head) * kPacked),
            kept<A>(how, m.entry[e], lane.head)};
  }
  __device__ void add(const Lane&, Own own, Part& part, const Item& item) const {
    const A raw = own + item.packed.v[kScore];
    const A bend = raw > A{0} ? A{1} : static_cast<A>(how.slope);
    const A a = exp_of(raw * bend - item.packed.v[kMaximum]) * item.packed.v[kScale];
    const A through = a * item.keep, bent = through * bend;
    part.dot += bend * a * item.packed.v[kDot];
    for (int j = 0; j < V; ++j) {
      const A g = load(item.grad.v[j]);
      part.sum[j] += through * g;
      part.bent[j] += bent * g;
    }
  }
  __device__ void join(Part& part, const Part& later) const {
    part.dot += later.dot;
    for (int j = 0; j < V; ++j) {
      part.sum[j] += later.sum[j];
      part.bent[j] += later.bent[j];
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, Own, const Part& part) const {
    const int64_t at = row * how.heads * how.width + lane.column;
    A dot = 0;
    if (lane.used) {
      const Pack<T, V> features = read<V>(x + at);
      Pack<T, V> result;
      for (int j = 0; j < V; ++j) {
        dot += part.bent[j] * load(features.v[j]);
        store(&result.v[j], part.sum[j]);
      }
      write(grad_x + at, result);
    }
    dot = sum_of_lanes(lane.mask, head_lanes, dot);
    if (!lane.used || !lane.leads) return;
    grad_source[(lane.tile * m.num_rows + row) * how.heads + lane.head] =
        lane.tile == 0 ? dot - part.dot : dot;
  }
};

}  // namespace

template <typename T>
void attention(const Sparse& matrix, const Attention& how, const T* x,
               const typename Sum<T>::type* source, const typename Sum<T>::type* target, T* out,
               const AttentionState<T>& state, const Stream& stream) {
  if (how.width == 0) {  // There is no lane that would write zeros.
    const int64_t n = matrix.num_rows * how.heads;
    sum_columns("attention", state.maximum, 0, n, state.maximum, stream);
    sum_columns("attention", state.total, 0, n, state.total, stream);
    sum_columns("attention", state.positive_weight, 0, n, state.positive_weight, stream);
    return;
  }
  with_vectors<T>(how.width, {x, out, state.positive}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Attend<T, V> op{matrix, how, x, source, target, out, state};
    reduce_rows("attention", op, Columns(how.heads, how.width, V), stream);
  });
}

template <typename T>
void attention_backward(const Sparse& transposed, int64_t num_rows, const Attention& how,
                        const T* x, const typename Sum<T>::type* source,
                        const typename Sum<T>::type* target, const T* out, const T* grad,
                        const AttentionState<T>& state, typename Sum<T>::type* packed, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        const Stream& stream) {
  using A = typename Sum<T>::type;
  with_vectors<T>(how.width, {x, out, grad, grad_x, state.positive}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Columns head(1, how.width, V), columns(how.heads, how.width, V);
    if (num_rows * how.heads > 0) {
      launch("attention_backward", reduce_targets<T, V>,
             blocks_for(num_rows * how.heads * head.team), stream.raw, how, num_rows, head, target,
             out, grad, state, packed, grad_target);
    }
    const int64_t n = transposed.num_rows * how.heads;
    const int64_t tiles = how.width > 0 ? columns.head_tiles : 0;
    A* parts = tiles > 1 ? stream.scratch<A>(tiles * n) : grad_source;
    const AttendBackward<T, V> op{transposed,        how, x, source, grad, packed, grad_x, parts,
                                  columns.head_lanes};
    reduce_rows("attention_backward", op, columns, stream);
    if (tiles != 1) sum_columns("attention_backward", parts, tiles, n, grad_source, stream);
  });
}

#define GAS_FOR_TYPE(T, A)                                                                         \
  template void attention(const Sparse&, const Attention&, const T*, const A*, const A*, T*,       \
                          const AttentionState<T>&, const Stream&);                                \
  template void attention_backward(const Sparse&, int64_t, const Attention&, const T*, const A*,   \
                                   const A*, const T*, const T*, const AttentionState<T>&, A*, T*, \
                                   A*, A*, const Stream&);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas::cuda
