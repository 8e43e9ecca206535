#include "operators/edge_conv.h"

#include "common/reduce_rows.cuh"

namespace gas::cuda {
namespace {

// Reads width * sizeof(T) + 4 bytes for each entry, writes twice width * sizeof(T) for each row.
template <typename T, int V>
struct ActivateEdges : Reduction {
  using A = typename Sum<T>::type;
  using Own = Pack<T, V>;   // The target.
  using Item = Pack<T, V>;  // The source.
  struct Part {
    Sums<A, V> values, slopes;
  };

  EdgeConv how;
  const T* target;
  const T* source;
  T* out;
  T* slopes;

  __device__ Own own(const Lane& lane, int32_t row) const {
    return read<V>(target + row * how.width + lane.column);
  }
  __device__ Item fetch(const Lane& lane, uint32_t, int32_t from) const {
    return read<V>(source + from * how.width + lane.column);
  }
  __device__ void add(const Lane&, const Own& own, Part& part, const Item& item) const {
    with_activation(how.activation, [&](auto activation) {
      for (int j = 0; j < V; ++j) {
        A value, slope;
        activate<decltype(activation)::value>(load(own.v[j]) + load(item.v[j]),
                                              static_cast<A>(how.parameter), value, slope);
        part.values.sum[j] += value;
        part.slopes.sum[j] += slope;
      }
    });
  }
  __device__ void join(Part& part, const Part& later) const {
    part.values.add(later.values);
    part.slopes.add(later.slopes);
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (!lane.used) return;
    const int64_t at = row * how.width + lane.column;
    const A scale = m.scale<A>(row, how.mean);
    write_sums(out + at, part.values, scale);
    if (slopes != nullptr) write_sums(slopes + at, part.slopes, scale);
  }
};

// Reads 2 * width * sizeof(T) + 4 bytes for each entry.
template <typename T, int V>
struct ActivateBackward : Reduction {
  using A = typename Sum<T>::type;
  using Own = Pack<T, V>;  // The source.
  using Part = Sums<A, V>;
  struct Item {
    Pack<T, V> target, grad;
  };

  EdgeConv how;
  const T* target;
  const T* source;
  const T* grad;
  T* out;

  __device__ Own own(const Lane& lane, int32_t row) const {
    return read<V>(source + row * how.width + lane.column);
  }
  __device__ Item fetch(const Lane& lane, uint32_t, int32_t to) const {
    const int64_t at = to * how.width + lane.column;
    return {read<V>(target + at), read<V>(grad + at)};
  }
  __device__ void add(const Lane&, const Own& own, Part& part, const Item& item) const {
    with_activation(how.activation, [&](auto activation) {
      for (int j = 0; j < V; ++j) {
        A value, slope;
        activate<decltype(activation)::value>(load(item.target.v[j]) + load(own.v[j]),
                                              static_cast<A>(how.parameter), value, slope);
        part.sum[j] += slope * load(item.grad.v[j]);
      }
    });
  }
  __device__ void finish(const Lane& lane, int32_t row, const Own&, const Part& part) const {
    if (lane.used) write_sums(out + row * how.width + lane.column, part, A{1});
  }
};

}  // namespace

template <typename T>
void edge_conv(const Sparse& matrix, const EdgeConv& how, const T* target, const T* source, T* out,
               T* slope, const Stream& stream) {
  with_vectors<T>(how.width, {target, source, out, slope}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const ActivateEdges<T, V> op{matrix, how, target, source, out, slope};
    reduce_rows("edge_conv", op, Columns(1, how.width, V), stream);
  });
}

template <typename T>
void edge_conv_backward(const Sparse& transposed, const EdgeConv& how, const T* target,
                        const T* source, const T* grad, T* out, const Stream& stream) {
  with_vectors<T>(how.width, {target, source, grad, out}, [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    const ActivateBackward<T, V> op{transposed, how, target, source, grad, out};
    reduce_rows("edge_conv_backward", op, Columns(1, how.width, V), stream);
  });
}

#define GAS_FOR_TYPE(T)                                                                          \
  template void edge_conv(const Sparse&, const EdgeConv&, const T*, const T*, T*, T*,            \
                          const Stream&);                                                        \
  template void edge_conv_backward(const Sparse&, const EdgeConv&, const T*, const T*, const T*, \
                                   T*, const Stream&);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
GAS_FOR_TYPE(bfloat16)
#undef GAS_FOR_TYPE

}  // namespace gas::cuda
