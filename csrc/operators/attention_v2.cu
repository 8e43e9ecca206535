#include "operators/attention_v2.h"

#include <limits>

#include "common/dot.cuh"
#include "common/exp.h"
#include "common/reduce_rows.cuh"

namespace gas::cuda {
namespace {

// A score takes the lanes of a head together: each adds up what its columns give. A head of more
// columns than a team has is read in tiles, of which each reads the others' columns too.

// <att, leaky(a + b)> of a lane's columns.
template <typename T, int V, typename A>
__device__ A score_of(const Pack<A, V>& att, const Pack<T, V>& a, const Pack<T, V>& b, A slope) {
  A sum = 0;
  for (int j = 0; j < V; ++j) sum += att.v[j] * leaky(load(a.v[j]) + load(b.v[j]), slope);
  return sum;
}

// The softmax of a row with a running maximum: what was added up is scaled when a larger score
// arrives. Reads, for each entry, heads * width * sizeof(T) + 4 bytes.
template <typename T, int V>
struct Attend : Reduction {
  using A = typename Sum<T>::type;
  struct Own {
    Pack<T, V> target;
    Pack<A, V> att;
    int32_t row;
  };
  struct Part {
    A maximum, total, sum[V];
  };
  struct Item {
    Pack<T, V> source;
    A keep;
    int32_t from;
  };
  static constexpr A kLowest = std::numeric_limits<A>::lowest();

  AttentionV2<T> layer;
  Columns columns;
  T* out;
  A* maximum;
  A* total;

  __device__ Own own(const Lane& lane, int32_t row) const {
    return {columns.at<V>(layer.target, row, lane.column), read<V>(layer.att + lane.column), row};
  }
  __device__ void start(Part& part) const { part.maximum = kLowest; }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t from) const {
    return {columns.at<V>(layer.source, from, lane.column), kept<A>(layer.how, e, lane.head), from};
  }
  __device__ void raise(Part& part, A most) const {
    if (!(most > part.maximum)) return;
    const A scale = exp_of(part.maximum - most);
    part.maximum = most;
    part.total *= scale;
    for (int j = 0; j < V; ++j) part.sum[j] *= scale;
  }
  __device__ void add(const Lane& lane, const Own& own, Part& part, const Item& item) const {
    const A slope = static_cast<A>(layer.how.slope);
    A score = lane.used ? score_of<T, V>(own.att, own.target, item.source, slope) : A{0};
    columns.for_other_tiles(lane, [&](int64_t column) {
      score +=
          score_of<T, V>(read<V>(layer.att + column), columns.at<V>(layer.target, own.row, column),
                         columns.at<V>(layer.source, item.from, column), slope);
    });
    score = sum_of_lanes(lane.mask, columns.head_lanes, score);
    raise(part, score);
    const A power = exp_of(score - part.maximum), a = power * item.keep;
    part.total += power;
    for (int j = 0; j < V; ++j) part.sum[j] += a * load(item.source.v[j]);
  }
  __device__ void join(Part& part, const Part& later) const {
    raise(part, later.maximum);
    const A scale = exp_of(later.maximum - part.maximum);
    part.total += later.total * scale;
    for (int j = 0; j < V; ++j) part.sum[j] += later.sum[j] * scale;
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (!lane.used) return;
    const A scale = inverse_or_zero(part.total);
    Pack<T, V> result;
    for (int j = 0; j < V; ++j) store(&result.v[j], part.sum[j] * scale);
    write(out + columns.place(row, lane.column), result);
    if (lane.leads && lane.tile == 0) {
      maximum[row * columns.heads + lane.head] =
          m.rowptr[row] < m.rowptr[row + 1] ? part.maximum : A{0};
      total[row * columns.heads + lane.head] = part.total;
    }
  }
};

// Values of a destination and a head for backward, adjacent so that a lane loads them at once.
enum Packed { kMaximum, kScale, kDot, kPacked = 4 };

// A team takes a head.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads)
    pack_targets(int64_t heads_of_rows, Columns columns, const T* out, const T* grad,
                 const typename Sum<T>::type* maximum, const typename Sum<T>::type* total,
                 typename Sum<T>::type* packed) {
  using A = typename Sum<T>::type;
  const Lane lane = columns.lane(0);
  const int64_t width = columns.width, step = int64_t{gridDim.x} * kThreads / columns.team;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / columns.team;
  for (int64_t at = first; at < heads_of_rows; at += step) {
    A dot = 0;
    for (int64_t j = lane.rank * V; j < width; j += columns.team * V) {
      dot += dot_of(read<V>(grad + at * width + j), read<V>(out + at * width + j));
    }
    dot = sum_of_lanes(lane.mask, columns.team, dot);
    if (lane.rank != 0) continue;
    Pack<A, kPacked> into{};
    into.v[kMaximum] = maximum[at];
    into.v[kScale] = inverse_or_zero(total[at]);
    into.v[kDot] = dot;
    write(packed + at * kPacked, into);
  }
}

// The gradients towards destinations and att. Reads what forward reads.
template <typename T, int V>
struct TargetBackward : Reduction {
  static constexpr int kAhead = sizeof(T) == 4 ? 4 : 2;
  using A = typename Sum<T>::type;
  struct Own {
    Pack<T, V> target, grad;
    Pack<A, V> att;
    Pack<A, kPacked> packed;
    int32_t row;
  };
  using Part = Sums<A, V>;  // Of leaky' times the gradient towards scores.
  struct Item {
    Pack<T, V> source;
    A keep;
    int32_t from;
  };
  static constexpr int kTotals = V;  // The sums of leaky times that gradient.

  AttentionV2<T> layer;
  Columns columns;
  const T* grad;
  const A* packed;
  T* grad_target;

  __device__ Own own(const Lane& lane, int32_t row) const {
    return {columns.at<V>(layer.target, row, lane.column), columns.at<V>(grad, row, lane.column),
            read<V>(layer.att + lane.column),
            read<kPacked>(packed + (row * columns.heads + lane.head) * kPacked), row};
  }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t from) const {
    return {columns.at<V>(layer.source, from, lane.column), kept<A>(layer.how, e, lane.head), from};
  }
  __device__ void add(const Lane& lane, const Own& own, Part& part, const Item& item,
                      A* totals) const {
    const A slope = static_cast<A>(layer.how.slope);
    A score = 0, dot = 0;
    if (lane.used) {
      score = score_of<T, V>(own.att, own.target, item.source, slope);
      dot = dot_of(own.grad, item.source);
    }
    columns.for_other_tiles(lane, [&](int64_t column) {
      const Pack<T, V> source = columns.at<V>(layer.source, item.from, column);
      score += score_of<T, V>(read<V>(layer.att + column),
                              columns.at<V>(layer.target, own.row, column), source, slope);
      dot += dot_of(columns.at<V>(grad, own.row, column), source);
    });
    score = sum_of_lanes(lane.mask, columns.head_lanes, score);
    dot = sum_of_lanes(lane.mask, columns.head_lanes, dot);
    const A a = exp_of(score - own.packed.v[kMaximum]) * own.packed.v[kScale];
    const A d = a * (item.keep * dot - own.packed.v[kDot]), low = d * slope;
    for (int j = 0; j < V; ++j) {
      const A raw = load(own.target.v[j]) + load(item.source.v[j]);
      const A through = raw > A{0} ? d : low;
      part.sum[j] += through;
      totals[j] += through * raw;
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own& own, const Part& part) const {
    if (!lane.used) return;
    Pack<T, V> result;
    for (int j = 0; j < V; ++j) store(&result.v[j], part.sum[j] * own.att.v[j]);
    write(grad_target + columns.place(row, lane.column), result);
  }
  __device__ void close(const Lane& lane, const A* totals, A* into) const {
    if (!lane.used) return;
    for (int j = 0; j < V; ++j) into[lane.column + j] = totals[j];
  }
};

// The gradient towards sources, for rows of the transpose. Reads, for each entry, heads *
// (2 * width * sizeof(T) + 4 * sizeof(A)) + 8 bytes.
template <typename T, int V>
struct SourceBackward : Reduction {
  static constexpr int kAhead = 2;
  using A = typename Sum<T>::type;
  struct Own {
    Pack<T, V> source;
    Pack<A, V> att;
    int32_t row;
  };
  struct Part {
    A sum[V], bent[V];  // Of keep a G, and of leaky' times the gradient towards scores.
  };
  struct Item {
    Pack<T, V> target, grad;
    Pack<A, kPacked> packed;
    A keep;
    int32_t to;
  };

  AttentionV2<T> layer;
  Columns columns;
  const T* grad;
  const A* packed;
  T* grad_source;

  __device__ Own own(const Lane& lane, int32_t row) const {
    return {columns.at<V>(layer.source, row, lane.column), read<V>(layer.att + lane.column), row};
  }
  __device__ Item fetch(const Lane& lane, uint32_t e, int32_t to) const {
    return {columns.at<V>(layer.target, to, lane.column), columns.at<V>(grad, to, lane.column),
            read<kPacked>(packed + (to * columns.heads + lane.head) * kPacked),
            kept<A>(layer.how, m.entry[e], lane.head), to};
  }
  __device__ void add(const Lane& lane, const Own& own, Part& part, const Item& item) const {
    const A slope = static_cast<A>(layer.how.slope);
    A score = 0, dot = 0;
    if (lane.used) {
      score = score_of<T, V>(own.att, own.source, item.target, slope);
      dot = dot_of(own.source, item.grad);
    }
    columns.for_other_tiles(lane, [&](int64_t column) {
      const Pack<T, V> source = columns.at<V>(layer.source, own.row, column);
      score += score_of<T, V>(read<V>(layer.att + column), source,
                              columns.at<V>(layer.target, item.to, column), slope);
      dot += dot_of(source, columns.at<V>(grad, item.to, column));
    });
    score = sum_of_lanes(lane.mask, columns.head_lanes, score);
    dot = sum_of_lanes(lane.mask, columns.head_lanes, dot);
    const A a = exp_of(score - item.packed.v[kMaximum]) * item.packed.v[kScale];
    const A through = a * item.keep, d = through * dot - a * item.packed.v[kDot], low = d * slope;
    for (int j = 0; j < V; ++j) {
      const A raw = load(own.source.v[j]) + load(item.target.v[j]);
      part.sum[j] += through * load(item.grad.v[j]);
      part.bent[j] += raw > A{0} ? d : low;
    }
  }
  __device__ void join(Part& part, const Part& later) const {
    for (int j = 0; j < V; ++j) {
      part.sum[j] += later.sum[j];
      part.bent[j] += later.bent[j];
    }
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own& own, const Part& part) const {
    if (!lane.used) return;
    Pack<T, V> result;
    for (int j = 0; j < V; ++j) {
      store(&result.v[j], part.sum[j] + part.bent[j] * own.att.v[j]);
    }
    write(grad_source + columns.place(row, lane.column), result);
  }
};

}  // namespace

template <typename T>
void attention_v2(const Sparse& matrix, const AttentionV2<T>& layer, T* out,
                  typename Sum<T>::type* maximum, typename Sum<T>::type* total,
                  const Stream& stream) {
  const int64_t heads = layer.how.heads, width = layer.how.width;
  if (width == 0) {  // There is no lane that would write zeros.
    sum_columns("attention_v2", maximum, 0, matrix.num_rows * heads, maximum, stream);
    sum_columns("attention_v2", total, 0, matrix.num_rows * heads, total, stream);
    return;
  }
  with_vectors<T>(width, {layer.source, layer.target, layer.att, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Columns columns(heads, width, V);
    const Attend<T, V> op{matrix, layer, columns, out, maximum, total};
    reduce_rows("attention_v2", op, columns, stream);
  });
}

template <typename T>
void attention_v2_backward(const Sparse& matrix, const Sparse& transposed,
                           const AttentionV2<T>& layer, const T* out, const T* grad,
                           const typename Sum<T>::type* maximum, const typename Sum<T>::type* total,
                           typename Sum<T>::type* packed, T* grad_source, T* grad_target,
                           typename Sum<T>::type* grad_att, const Stream& stream) {
  using A = typename Sum<T>::type;
  const char* what = "attention_v2_backward";
  const int64_t heads = layer.how.heads, width = layer.how.width;
  if (heads * width == 0) return;
  const std::initializer_list<const void*> tables = {layer.source, layer.target, layer.att,  out,
                                                     grad,         grad_source,  grad_target};
  with_vectors<T>(width, tables, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const Columns head(1, width, V), columns(heads, width, V);
    const int64_t heads_of_rows = matrix.num_rows * heads;
    if (heads_of_rows > 0) {
      launch(what, pack_targets<T, V>, blocks_for(heads_of_rows * head.team), stream.raw,
             heads_of_rows, head, out, grad, maximum, total, packed);
    }
    const TargetBackward<T, V> to_target{matrix, layer, columns, grad, packed, grad_target};
    reduce_rows(what, to_target, columns, stream, Totals<A>{grad_att, heads * width});
    const SourceBackward<T, V> to_source{transposed, layer, columns, grad, packed, grad_source};
    reduce_rows(what, to_source, columns, stream);
  });
}

#define GAS_FOR_TYPE(T, A)                                                                     \
  template void attention_v2(const Sparse&, const AttentionV2<T>&, T*, A*, A*, const Stream&); \
  template void attention_v2_backward(const Sparse&, const Sparse&, const AttentionV2<T>&,     \
                                      const T*, const T*, const A*, const A*, A*, T*, T*, A*,  \
                                      const Stream&);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas::cuda
