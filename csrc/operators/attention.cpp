#include "operators/attention.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/exp.h"
#include "common/prefetch.h"
#include "common/reduce_rows.h"
#include "common/vector.h"
#include "operators/softmax.h"

namespace gas {
namespace {

constexpr int64_t kEnough = 8 * 1024;  // Elements; below this, waking a thread costs more.
constexpr int64_t kBlock = 64;         // Entries that are weighed before they are added up.

// A weight for every entry of a block and every head; and the same where the score is positive,
// else zero.
template <typename A>
struct Block {
  std::vector<A> shift, all, positive, of_target;

  explicit Block(int64_t heads)
      : shift(kBlock * heads),
        all(kBlock * heads),
        positive(kBlock * heads),
        of_target(kBlock * heads) {}
};

// all[j] and positive[j] += their weights times x[col[e]][j], for H heads of V vectors each, in
// registers.
template <int H, int V, bool Both, typename T, typename A = typename Sum<T>::type>
GAS_INLINE void add_vectors(const int32_t* col, int64_t n, const T* x, int64_t stride, const A* w,
                            const A* w_positive, int64_t heads, A* all, A* positive) {
  using Lanes = typename Vector<A>::type;
  constexpr int kLanes = Vector<A>::kLanes;
  Lanes sum[H * V], part[H * V] = {};
  for (int i = 0; i < H * V; ++i) {
    load(all + i * kLanes, sum[i]);
    if (Both) load(positive + i * kLanes, part[i]);
  }
  for (int64_t e = 0; e < n; ++e) {
    const T* row = x + col[e] * stride;
    for (int i = 0; i < H * V; ++i) {
      Lanes value;
      load(row + i * kLanes, value);
      sum[i] += w[e * heads + i / V] * value;
      if (Both) part[i] += w_positive[e * heads + i / V] * value;
    }
  }
  for (int i = 0; i < H * V; ++i) {
    store(all + i * kLanes, sum[i]);
    if (Both) store(positive + i * kLanes, part[i]);
  }
}

// The same for every head.
template <bool Both, typename T, typename A = typename Sum<T>::type>
GAS_INLINE void add_rows(const int32_t* col, int64_t n, const T* x, const Block<A>& block,
                         int64_t heads, int64_t width, A* all, A* positive) {
  constexpr int kLanes = Vector<A>::kLanes;
  const A* w = block.all.data();
  const A* p = block.positive.data();
  const int64_t stride = heads * width;
  int64_t h = 0;
  for (; width == kLanes && h + 4 <= heads; h += 4) {
    const int64_t j = h * width;
    add_vectors<4, 1, Both>(col, n, x + j, stride, w + h, p + h, heads, all + j, positive + j);
  }
  for (; width == 2 * kLanes && h + 2 <= heads; h += 2) {
    const int64_t j = h * width;
    add_vectors<2, 2, Both>(col, n, x + j, stride, w + h, p + h, heads, all + j, positive + j);
  }
  for (; h < heads; ++h) {
    int64_t j = h * width;
    const int64_t end = j + width;
    for (; j + 4 * kLanes <= end; j += 4 * kLanes) {
      add_vectors<1, 4, Both>(col, n, x + j, stride, w + h, p + h, heads, all + j, positive + j);
    }
    for (; j + kLanes <= end; j += kLanes) {
      add_vectors<1, 1, Both>(col, n, x + j, stride, w + h, p + h, heads, all + j, positive + j);
    }
    for (; j < end; ++j) {
      for (int64_t e = 0; e < n; ++e) {
        const A value = load(x[col[e] * stride + j]);
        all[j] += w[e * heads + h] * value;
        if (Both) positive[j] += p[e * heads + h] * value;
      }
    }
  }
}

template <int Heads, bool Both, typename T, typename Out>
GAS_INLINE void forward_rows(const Sparse& m, const Attention& how, const T* x,
                             const typename Sum<T>::type* source,
                             const typename Sum<T>::type* target, Out* out,
                             const AttentionState<Out>& state, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t heads = Heads > 0 ? Heads : how.heads, all = heads * how.width;
  const int64_t width = how.width;
  const A slope = static_cast<A>(how.slope);
  const int64_t stop = m.rowptr[last];
  Block<A> block(heads);
  std::vector<A> maximum(heads), total(heads), weight(heads), sum(all), positive(all);
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    const A* mine = target + row * heads;
    std::fill(maximum.begin(), maximum.end(),
              first < end ? std::numeric_limits<A>::lowest() : A{0});
    for (int64_t e = first; e < end; ++e) {
      const A* theirs = source + m.col[e] * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const A s = leaky(theirs[h] + mine[h], slope);
        maximum[h] = s > maximum[h] ? s : maximum[h];
      }
    }
    std::fill(total.begin(), total.end(), A{0});
    std::fill(weight.begin(), weight.end(), A{0});
    std::fill(sum.begin(), sum.end(), A{0});
    std::fill(positive.begin(), positive.end(), A{0});
    for (int64_t at = first; at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      A* __restrict w = block.all.data();
      A* __restrict p = block.positive.data();
      for (int64_t e = 0; e < n; ++e) {
        if (at + e + kAhead < stop) {
          prefetch_row(x + m.col[at + e + kAhead] * all, all);
        }
        const A* theirs = source + m.col[at + e] * heads;
        GAS_INDEPENDENT_LOOP
        for (int64_t h = 0; h < heads; ++h) {
          const A s = leaky(theirs[h] + mine[h], slope);
          w[e * heads + h] = s - maximum[h];
          p[e * heads + h] = s > A{0} ? A{1} : A{0};
        }
      }
      GAS_INDEPENDENT_LOOP
      for (int64_t i = 0; i < n * heads; ++i) {
        w[i] = exp_of(w[i]);
        p[i] *= w[i];
      }
      for (int64_t e = 0; e < n; ++e) {
        GAS_INDEPENDENT_LOOP
        for (int64_t h = 0; h < heads; ++h) {
          total[h] += w[e * heads + h];
          weight[h] += p[e * heads + h];
        }
      }
      if (how.threshold != 0) {
        for (int64_t e = 0; e < n; ++e) {
          for (int64_t h = 0; h < heads; ++h) {
            const A keep = kept<A>(how, at + e, h);
            w[e * heads + h] *= keep;
            p[e * heads + h] *= keep;
          }
        }
      }
      add_rows<Both>(m.col + at, n, x, block, heads, width, sum.data(), positive.data());
    }
    for (int64_t h = 0; h < heads; ++h) {
      const A scale = inverse_or_zero(total[h]);
      const int64_t to = row * heads + h;
      state.maximum[to] = maximum[h];
      state.total[to] = total[h];
      state.positive_weight[to] = weight[h] * scale;
      for (int64_t j = 0; j < width; ++j) {
        store(out + to * width + j, sum[h * width + j] * scale);
        if (Both) store(state.positive + to * width + j, positive[h * width + j] * scale);
      }
    }
  }
}

// Of each destination the gradient towards its scores; and what the sources' gradients need of it,
// side by side: for every head its score, its maximum, one over its sum, and D.
template <typename T>
GAS_INLINE void target_rows(const Attention& how, const typename Sum<T>::type* target, const T* out,
                            const T* grad, const AttentionState<T>& state,
                            typename Sum<T>::type* packed, typename Sum<T>::type* grad_target,
                            int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t heads = how.heads, width = how.width;
  for (int64_t row = begin; row < last; ++row) {
    A* into = packed + row * 4 * heads;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = row * heads + h;
      A whole = 0, positive = 0;
      for (int64_t j = at * width; j < (at + 1) * width; ++j) {
        whole += load(grad[j]) * load(out[j]);
        positive += load(grad[j]) * load(state.positive[j]);
      }
      into[h] = target[at];
      into[heads + h] = state.maximum[at];
      into[2 * heads + h] = inverse_or_zero(state.total[at]);
      into[3 * heads + h] = whole;
      grad_target[at] = target_gradient(how, positive, state.positive_weight[at], whole);
    }
  }
}

// With S the gradient towards x[c] and P the part of it that comes from positive scores, the
// gradient towards a source's scores needs no product of rows for an edge:
//   sum of leaky'(e) a(e) keep(e) <G, x[c]>  =  <slope S + (1 - slope) P, x[c]>.
template <int Heads, typename T, typename Out>
GAS_INLINE void source_rows(const Sparse& m, const Attention& how, const T* x,
                            const typename Sum<T>::type* source, const T* grad,
                            const typename Sum<T>::type* packed, Out* grad_x,
                            typename Sum<T>::type* grad_source, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t heads = Heads > 0 ? Heads : how.heads, all = heads * how.width;
  const int64_t width = how.width;
  const A slope = static_cast<A>(how.slope);
  const int64_t stop = m.rowptr[last];
  Block<A> block(heads);
  std::vector<A> of_score(heads), sum(all), positive(all);
  for (int64_t row = begin; row < last; ++row) {
    const A* mine = source + row * heads;
    std::fill(of_score.begin(), of_score.end(), A{0});
    std::fill(sum.begin(), sum.end(), A{0});
    std::fill(positive.begin(), positive.end(), A{0});
    const int64_t end = m.rowptr[row + 1];
    for (int64_t at = m.rowptr[row]; at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      A* __restrict shift = block.shift.data();
      A* __restrict w = block.all.data();
      A* __restrict p = block.positive.data();
      A* __restrict of_target = block.of_target.data();
      for (int64_t e = 0; e < n; ++e) {
        if (at + e + kAhead < stop) {
          const int64_t next = m.col[at + e + kAhead];
          prefetch_row(grad + next * all, all);
          prefetch_row(packed + next * 4 * heads, 4 * heads);
        }
        const A* theirs = packed + m.col[at + e] * 4 * heads;
        GAS_INDEPENDENT_LOOP
        for (int64_t h = 0; h < heads; ++h) {
          const A raw = mine[h] + theirs[h];
          shift[e * heads + h] = leaky(raw, slope) - theirs[heads + h];
          p[e * heads + h] = raw > A{0} ? A{1} : A{0};
          w[e * heads + h] = theirs[2 * heads + h];
          of_target[e * heads + h] = theirs[3 * heads + h];
        }
      }
      GAS_INDEPENDENT_LOOP
      for (int64_t i = 0; i < n * heads; ++i) {
        w[i] *= exp_of(shift[i]);
        p[i] *= w[i];
        of_target[i] *= slope * w[i] + (A{1} - slope) * p[i];
      }
      for (int64_t e = 0; e < n; ++e) {
        GAS_INDEPENDENT_LOOP
        for (int64_t h = 0; h < heads; ++h) of_score[h] -= of_target[e * heads + h];
      }
      if (how.threshold != 0) {
        for (int64_t e = 0; e < n; ++e) {
          for (int64_t h = 0; h < heads; ++h) {
            const A keep = kept<A>(how, m.entry[at + e], h);
            w[e * heads + h] *= keep;
            p[e * heads + h] *= keep;
          }
        }
      }
      add_rows<true>(m.col + at, n, grad, block, heads, width, sum.data(), positive.data());
    }
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t to = row * heads + h;
      A inner = 0;
      for (int64_t j = 0; j < width; ++j) {
        const A s = sum[h * width + j], part = positive[h * width + j];
        inner += (slope * s + (A{1} - slope) * part) * load(x[to * width + j]);
        store(grad_x + to * width + j, s);
      }
      grad_source[to] = of_score[h] + inner;
    }
  }
}

}  // namespace

// The compiler knows of a single head, whose loops are none. To know of eight did harm: gcc
// unrolled the loops over them, and no longer saw vectors.
template <typename T>
void attention(const Sparse& matrix, const Attention& how, const T* x,
               const typename Sum<T>::type* source, const typename Sum<T>::type* target, T* out,
               const AttentionState<T>& state, int threads) {
  using A = typename Sum<T>::type;
  const auto run = [&](const SomeRows& rows, const A* own, A* maximum, A* total, auto* to,
                       A* weight, auto* positive) GAS_INLINED {
    const AttentionState<std::remove_pointer_t<decltype(to)>> found{maximum, total, weight,
                                                                    positive};
    const auto forward = [&](auto heads, auto both) GAS_INLINED {
      forward_rows<heads, both>(rows.m, how, x, source, own, to, found, rows.begin, rows.end);
    };
    constexpr std::integral_constant<int, 0> kAny;
    constexpr std::integral_constant<int, 1> kOne;
    if (positive != nullptr) {
      how.heads == 1 ? forward(kOne, std::true_type()) : forward(kAny, std::true_type());
    } else {
      how.heads == 1 ? forward(kOne, std::false_type()) : forward(kAny, std::false_type());
    }
  };
  reduce_rows(matrix, grain_of(kEnough, how.heads * how.width), threads, run,
              Own{target, how.heads},
              Softmax(how.heads, state.maximum, state.total, Average{out, how.width},
                      Average{state.positive_weight, 1}, Average{state.positive, how.width}));
}

template <typename T>
void attention_backward(const Sparse& transposed, int64_t num_rows, const Attention& how,
                        const T* x, const typename Sum<T>::type* source,
                        const typename Sum<T>::type* target, const T* out, const T* grad,
                        const AttentionState<T>& state, typename Sum<T>::type* packed, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        int threads) {
  using A = typename Sum<T>::type;
  const int64_t all = how.heads * how.width, grain = grain_of(kEnough, all);
  parallel_chunks(num_rows, std::max<int64_t>(1, grain), threads,
                  [&](int, int64_t begin, int64_t end) {
                    on_processor([&]() GAS_INLINED {
                      target_rows(how, target, out, grad, state, packed, grad_target, begin, end);
                    });
                  });
  const auto run = [&](const SomeRows& rows, const T* own_x, const A* own_source, auto* to_x,
                       A* to_source) GAS_INLINED {
    const auto backward = [&](auto heads) GAS_INLINED {
      source_rows<heads>(rows.m, how, own_x, own_source, grad, packed, to_x, to_source, rows.begin,
                         rows.end);
    };
    if (how.heads == 1) return backward(std::integral_constant<int, 1>());
    backward(std::integral_constant<int, 0>());
  };
  reduce_rows(transposed, grain, threads, run, Own{x, all}, Own{source, how.heads},
              Sums{grad_x, all, false}, Sums{grad_source, how.heads, false});
}

#define GAS_FOR_TYPE(T, A)                                                                         \
  template void attention(const Sparse&, const Attention&, const T*, const A*, const A*, T*,       \
                          const AttentionState<T>&, int);                                          \
  template void attention_backward(const Sparse&, int64_t, const Attention&, const T*, const A*,   \
                                   const A*, const T*, const T*, const AttentionState<T>&, A*, T*, \
                                   A*, A*, int);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas
