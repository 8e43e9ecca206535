#include "operators/attention_v2.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/exp.h"
#include "common/prefetch.h"
#include "common/reduce_rows.h"
#include "operators/softmax.h"

namespace gas {
namespace {

constexpr int64_t kEnough = 8 * 1024;  // Elements; below this, waking a thread costs more.
constexpr int kLanes = 8;              // Elements of a dot product added up together.

template <typename A>
GAS_INLINE A add_up(const A* lane) {
  return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

// <att, leaky(mine + theirs)> of a head. `Width` is a head's where it is known when compiling.
template <int Width, typename T>
GAS_INLINE typename Sum<T>::type score_of(const typename Sum<T>::type* __restrict att,
                                          const typename Sum<T>::type* __restrict mine,
                                          const T* __restrict theirs, int64_t width,
                                          typename Sum<T>::type slope) {
  using A = typename Sum<T>::type;
  const int64_t size = Width > 0 ? Width : width;
  A lane[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= size; j += kLanes) {
    GAS_VECTOR_LOOP
    for (int i = 0; i < kLanes; ++i) {
      const A raw = mine[j + i] + load(theirs[j + i]);
      lane[i] += att[j + i] * leaky(raw, slope);
    }
  }
  A sum = add_up(lane);
  for (; j < size; ++j) {
    const A raw = mine[j] + load(theirs[j]);
    sum += att[j] * leaky(raw, slope);
  }
  return sum;
}

// That, and <mine_2, theirs_2>.
template <int Width, typename T>
GAS_INLINE void score_and_dot(const typename Sum<T>::type* __restrict att,
                              const typename Sum<T>::type* __restrict mine,
                              const T* __restrict theirs,
                              const typename Sum<T>::type* __restrict mine_2,
                              const T* __restrict theirs_2, int64_t width,
                              typename Sum<T>::type slope, typename Sum<T>::type& score,
                              typename Sum<T>::type& dot) {
  using A = typename Sum<T>::type;
  const int64_t size = Width > 0 ? Width : width;
  A lane[kLanes] = {}, lane_2[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= size; j += kLanes) {
    GAS_VECTOR_LOOP
    for (int i = 0; i < kLanes; ++i) {
      const A raw = mine[j + i] + load(theirs[j + i]);
      lane[i] += att[j + i] * leaky(raw, slope);
      lane_2[i] += mine_2[j + i] * load(theirs_2[j + i]);
    }
  }
  score = add_up(lane);
  dot = add_up(lane_2);
  for (; j < size; ++j) {
    const A raw = mine[j] + load(theirs[j]);
    score += att[j] * leaky(raw, slope);
    dot += mine_2[j] * load(theirs_2[j]);
  }
}

template <int Width, typename T, typename Out>
GAS_INLINE void forward_rows(const Sparse& m, const AttentionV2<T>& layer, Out* out,
                             typename Sum<T>::type* maximum, typename Sum<T>::type* total,
                             int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const Attention& how = layer.how;
  const int64_t heads = how.heads, width = Width > 0 ? Width : how.width, all = heads * width;
  const A slope = static_cast<A>(how.slope);
  const int64_t stop = m.rowptr[last];
  std::vector<A> scratch(2 * heads + 2 * all), scores;
  A* __restrict most = scratch.data();
  A* __restrict whole = most + heads;
  A* __restrict mine = whole + heads;
  A* __restrict sum = mine + all;
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    for (int64_t j = 0; j < all; ++j) {
      mine[j] = load(layer.target[row * all + j]);
      sum[j] = A{0};
    }
    for (int64_t h = 0; h < heads; ++h) {
      whole[h] = A{0};
      most[h] = first < end ? std::numeric_limits<A>::lowest() : A{0};
    }
    scores.resize((end - first) * heads);
    for (int64_t e = first; e < end; ++e) {
      if (e + kAhead < stop) {
        prefetch_row(layer.source + m.col[e + kAhead] * all, all);
      }
      const T* theirs = layer.source + m.col[e] * all;
      A* score = scores.data() + (e - first) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = h * width;
        score[h] = score_of<Width>(layer.att + at, mine + at, theirs + at, width, slope);
        most[h] = score[h] > most[h] ? score[h] : most[h];
      }
    }
    for (int64_t e = first; e < end; ++e) {
      const T* theirs = layer.source + m.col[e] * all;
      A* __restrict score = scores.data() + (e - first) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        score[h] = exp_of(score[h] - most[h]);
        whole[h] += score[h];
      }
      for (int64_t h = 0; h < heads; ++h) {
        const A a = score[h] * kept<A>(how, e, h);
        A* __restrict into = sum + h * width;
        const T* from = theirs + h * width;
        for (int64_t j = 0; j < width; ++j) into[j] += a * load(from[j]);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const A scale = inverse_or_zero(whole[h]);
      maximum[row * heads + h] = most[h];
      total[row * heads + h] = whole[h];
      for (int64_t j = h * width; j < (h + 1) * width; ++j) {
        store(out + row * all + j, sum[j] * scale);
      }
    }
  }
}

// The gradient towards destinations, and this part's sum towards att. `packed` receives what the
// sources' gradients need of a row: for every head its maximum, one over its sum, and D.
template <int Width, typename T, typename Out>
GAS_INLINE void target_rows(const Sparse& m, const AttentionV2<T>& layer, const T* out,
                            const T* grad, const typename Sum<T>::type* maximum,
                            const typename Sum<T>::type* total, typename Sum<T>::type* packed,
                            Out* grad_target, double* grad_att, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const Attention& how = layer.how;
  const int64_t heads = how.heads, width = Width > 0 ? Width : how.width, all = heads * width;
  const A slope = static_cast<A>(how.slope);
  const int64_t stop = m.rowptr[last];
  std::vector<A> scratch(2 * heads + 4 * all);
  A* __restrict score = scratch.data();
  A* __restrict dot = score + heads;
  A* __restrict mine = dot + heads;
  A* __restrict g = mine + all;
  A* __restrict bent = g + all;       // The sum of leaky' times the gradient towards scores.
  A* __restrict to_att = bent + all;  // The sum of leaky times it.
  for (int64_t row = begin; row < last; ++row) {
    A* here = packed + row * 3 * heads;
    for (int64_t h = 0; h < heads; ++h) {
      here[h] = maximum[row * heads + h];
      here[heads + h] = inverse_or_zero(total[row * heads + h]);
      here[2 * heads + h] = A{0};
      for (int64_t j = h * width; j < (h + 1) * width; ++j) {
        mine[j] = load(layer.target[row * all + j]);
        g[j] = load(grad[row * all + j]);
        here[2 * heads + h] += g[j] * load(out[row * all + j]);
        bent[j] = to_att[j] = A{0};
      }
    }
    for (int64_t e = m.rowptr[row]; e < m.rowptr[row + 1]; ++e) {
      if (e + kAhead < stop) {
        prefetch_row(layer.source + m.col[e + kAhead] * all, all);
      }
      const T* __restrict theirs = layer.source + m.col[e] * all;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = h * width;
        score_and_dot<Width>(layer.att + at, mine + at, theirs + at, g + at, theirs + at, width,
                             slope, score[h], dot[h]);
      }
      for (int64_t h = 0; h < heads; ++h) score[h] = exp_of(score[h] - here[h]) * here[heads + h];
      for (int64_t h = 0; h < heads; ++h) {
        const A d = score[h] * (kept<A>(how, e, h) * dot[h] - here[2 * heads + h]);
        const A low = d * slope;
        const int64_t at = h * width;
        GAS_VECTOR_LOOP
        for (int64_t i = 0; i < width; ++i) {
          const int64_t j = at + i;
          const A raw = mine[j] + load(theirs[j]), through = raw > A{0} ? d : low;
          bent[j] += through;
          to_att[j] += through * raw;
        }
      }
    }
    for (int64_t j = 0; j < all; ++j) {
      store(grad_target + row * all + j, bent[j] * layer.att[j]);
      grad_att[j] += static_cast<double>(to_att[j]);
    }
  }
}

template <int Width, typename T, typename Out>
GAS_INLINE void source_rows(const Sparse& m, const AttentionV2<T>& layer, const T* grad,
                            const typename Sum<T>::type* packed, Out* grad_source, int64_t begin,
                            int64_t last) {
  using A = typename Sum<T>::type;
  const Attention& how = layer.how;
  const int64_t heads = how.heads, width = Width > 0 ? Width : how.width, all = heads * width;
  const A slope = static_cast<A>(how.slope);
  const int64_t stop = m.rowptr[last];
  std::vector<A> scratch(2 * heads + 3 * all);
  A* __restrict score = scratch.data();
  A* __restrict dot = score + heads;
  A* __restrict mine = dot + heads;
  A* __restrict sum = mine + all;
  A* __restrict bent = sum + all;
  for (int64_t row = begin; row < last; ++row) {
    for (int64_t j = 0; j < all; ++j) {
      mine[j] = load(layer.source[row * all + j]);
      sum[j] = bent[j] = A{0};
    }
    for (int64_t e = m.rowptr[row]; e < m.rowptr[row + 1]; ++e) {
      if (e + kAhead < stop) {
        const int64_t next = m.col[e + kAhead];
        prefetch_row(grad + next * all, all);
        prefetch_row(layer.target + next * all, all);
        prefetch_row(packed + next * 3 * heads, 3 * heads);
      }
      const T* __restrict theirs = layer.target + m.col[e] * all;
      const T* __restrict g = grad + m.col[e] * all;
      const A* there = packed + m.col[e] * 3 * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = h * width;
        score_and_dot<Width>(layer.att + at, mine + at, theirs + at, mine + at, g + at, width,
                             slope, score[h], dot[h]);
      }
      for (int64_t h = 0; h < heads; ++h) {
        score[h] = exp_of(score[h] - there[h]) * there[heads + h];
      }
      for (int64_t h = 0; h < heads; ++h) {
        const A through = kept<A>(how, m.entry[e], h) * score[h];
        const A d = through * dot[h] - score[h] * there[2 * heads + h], low = d * slope;
        const int64_t at = h * width;
        GAS_VECTOR_LOOP
        for (int64_t i = 0; i < width; ++i) {
          const int64_t j = at + i;
          const A raw = mine[j] + load(theirs[j]);
          sum[j] += through * load(g[j]);
          bent[j] += raw > A{0} ? d : low;
        }
      }
    }
    for (int64_t j = 0; j < all; ++j) {
      store(grad_source + row * all + j, sum[j] + bent[j] * layer.att[j]);
    }
  }
}

// Calls body(Width): a head's width where it is worth to be known when compiling, else 0.
template <typename Body>
GAS_INLINE void with_width(int64_t width, const Body& body) {
  if (width == 8) return body(std::integral_constant<int, 8>());
  if (width == 32) return body(std::integral_constant<int, 32>());
  body(std::integral_constant<int, 0>());
}

}  // namespace

template <typename T>
void attention_v2(const Sparse& matrix, const AttentionV2<T>& layer, T* out,
                  typename Sum<T>::type* maximum, typename Sum<T>::type* total, int threads) {
  using A = typename Sum<T>::type;
  const int64_t heads = layer.how.heads, all = heads * layer.how.width;
  const auto run = [&](const SomeRows& rows, const T* target, A* most, A* whole, auto* to)
                       GAS_INLINED {
                         const AttentionV2<T> own{layer.how, layer.source, target, layer.att};
                         // To know of a head's width did harm: with it, gcc took 1.5 times as long.
                         forward_rows<0>(rows.m, own, to, most, whole, rows.begin, rows.end);
                       };
  reduce_rows(matrix, grain_of(kEnough, all), threads, run, Own{layer.target, all},
              Softmax(heads, maximum, total, Average{out, layer.how.width}));
}

template <typename T>
void attention_v2_backward(const Sparse& matrix, const Sparse& transposed,
                           const AttentionV2<T>& layer, const T* out, const T* grad,
                           const typename Sum<T>::type* maximum, const typename Sum<T>::type* total,
                           typename Sum<T>::type* packed, T* grad_source, T* grad_target,
                           typename Sum<T>::type* grad_att, int threads) {
  using A = typename Sum<T>::type;
  const int64_t heads = layer.how.heads, all = heads * layer.how.width;
  const int64_t grain = grain_of(kEnough, all);
  const auto to_target = [&](const SomeRows& rows, double* to_att, const T* target,
                             const T* own_out, const T* own_grad, const A* most, const A* whole,
                             A* into, auto* to) GAS_INLINED {
    const AttentionV2<T> own{layer.how, layer.source, target, layer.att};
    with_width(layer.how.width, [&](auto width) GAS_INLINED {
      target_rows<width>(rows.m, own, own_out, own_grad, most, whole, into, to, to_att, rows.begin,
                         rows.end);
    });
  };
  const std::vector<double> to_att =
      reduce_rows_and_totals(matrix, grain, threads, all, to_target, Own{layer.target, all},
                             Own{out, all}, Own{grad, all}, Own{maximum, heads}, Own{total, heads},
                             Same{packed, 3 * heads}, Sums{grad_target, all, false});
  for (int64_t j = 0; j < all; ++j) grad_att[j] = static_cast<A>(to_att[j]);
  const auto to_source = [&](const SomeRows& rows, const T* source, auto* to) GAS_INLINED {
    const AttentionV2<T> own{layer.how, source, layer.target, layer.att};
    with_width(layer.how.width, [&](auto width) GAS_INLINED {
      source_rows<width>(rows.m, own, grad, packed, to, rows.begin, rows.end);
    });
  };
  reduce_rows(transposed, grain, threads, to_source, Own{layer.source, all},
              Sums{grad_source, all, false});
}

#define GAS_FOR_TYPE(T, A)                                                                    \
  template void attention_v2(const Sparse&, const AttentionV2<T>&, T*, A*, A*, int);          \
  template void attention_v2_backward(const Sparse&, const Sparse&, const AttentionV2<T>&,    \
                                      const T*, const T*, const A*, const A*, A*, T*, T*, A*, \
                                      int);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas
