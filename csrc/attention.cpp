#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "attention_edge.h"
#include "attention_hubs.h"
#include "exp.h"
#include "parallel_rows.h"
#include "prefetch.h"
#include "vector.h"

namespace gas {
namespace {

constexpr int64_t kGrainElements = 8 * 1024;  // Below this, waking a thread costs more.
constexpr int64_t kBlock = 64;                // Entries that are weighed before they are added up.

int64_t grain_of(const Attention& how) {
  return kGrainElements / std::max<int64_t>(1, how.heads * how.width);
}

// A weight for every entry of a block and every head; and the same where the score is positive, else
// zero.
template <typename A>
struct Block {
  std::vector<A> shift, all, positive, of_target;

  explicit Block(int64_t heads)
      : shift(kBlock * heads), all(kBlock * heads), positive(kBlock * heads),
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
  const int64_t width = how.width, row_bytes = all * static_cast<int64_t>(sizeof(T));
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
          prefetch_row(reinterpret_cast<const char*>(x + m.col[at + e + kAhead] * all), row_bytes);
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
      const A scale = total[h] > A{0} ? A{1} / total[h] : A{0};
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
GAS_INLINE void target_rows(const Attention& how, const typename Sum<T>::type* target,
                            const T* out, const T* grad, const AttentionState<T>& state,
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
      into[2 * heads + h] = state.total[at] > A{0} ? A{1} / state.total[at] : A{0};
      into[3 * heads + h] = whole;
      grad_target[at] =
          static_cast<A>(1.0 - how.slope) * (positive - state.positive_weight[at] * whole);
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
  const int64_t width = how.width, row_bytes = all * static_cast<int64_t>(sizeof(T));
  const int64_t packed_bytes = 4 * heads * static_cast<int64_t>(sizeof(A));
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
          prefetch_row(reinterpret_cast<const char*>(grad + next * all), row_bytes);
          prefetch_row(reinterpret_cast<const char*>(packed + next * 4 * heads), packed_bytes);
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

// The compiler knows of a single head, whose loops are none. To know of eight did harm: gcc unrolled
// the loops over them, and no longer saw vectors.
template <bool Both, typename... Arguments>
GAS_INLINE void forward_heads(int64_t heads, const Arguments&... arguments) {
  if (heads == 1) return forward_rows<1, Both>(arguments...);
  forward_rows<0, Both>(arguments...);
}

template <typename... Arguments>
GAS_INLINE void source_heads(int64_t heads, const Arguments&... arguments) {
  if (heads == 1) return source_rows<1>(arguments...);
  source_rows<0>(arguments...);
}

// A function of one type can be compiled for several processors; a template can't.
#define GAS_FOR_TYPES(T, A, Out)                                                                  \
  GAS_CLONES void forward_of(const Sparse& m, const Attention& how, const T* x, const A* source,  \
                             const A* target, Out* out, const AttentionState<Out>& state,         \
                             int64_t begin, int64_t end) {                                        \
    if (state.positive != nullptr) {                                                              \
      return forward_heads<true>(how.heads, m, how, x, source, target, out, state, begin, end);   \
    }                                                                                             \
    forward_heads<false>(how.heads, m, how, x, source, target, out, state, begin, end);           \
  }                                                                                               \
  GAS_CLONES void source_of(const Sparse& m, const Attention& how, const T* x, const A* source,   \
                            const T* grad, const A* packed, Out* grad_x, A* grad_source,          \
                            int64_t begin, int64_t end) {                                         \
    source_heads(how.heads, m, how, x, source, grad, packed, grad_x, grad_source, begin, end);    \
  }
#define GAS_FOR_TYPE(T, A)                                                                        \
  GAS_FOR_TYPES(T, A, T)                                                                          \
  GAS_CLONES void target_of(const Attention& how, const A* target, const T* out, const T* grad,   \
                            const AttentionState<T>& state, A* packed, A* grad_target,            \
                            int64_t begin, int64_t end) {                                         \
    target_rows(how, target, out, grad, state, packed, grad_target, begin, end);                  \
  }
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
GAS_FOR_TYPES(bfloat16, float, float)
#undef GAS_FOR_TYPE
#undef GAS_FOR_TYPES

// Attention of the rows that are hubs, from what is found in their pieces.
template <typename T>
void attention_of_hubs(const Hubs& hubs, const Attention& how, const T* x,
                       const typename Sum<T>::type* source, const typename Sum<T>::type* target,
                       T* out, const AttentionState<T>& state, int threads) {
  using A = typename Sum<T>::type;
  const int64_t scores = hubs.num_pieces() * how.heads, values = scores * how.width;
  std::vector<A> maximum(scores), total(scores), weight(scores), sums(values);
  std::vector<A> positive(state.positive == nullptr ? 0 : values);
  const AttentionState<A> found{maximum.data(), total.data(), weight.data(),
                                state.positive == nullptr ? nullptr : positive.data()};
  const std::vector<A> own = hubs.repeat(target, how.heads);
  parallel_pieces(hubs, grain_of(how), threads, [&](int64_t begin, int64_t end) {
    forward_of(hubs.pieces(), how, x, source, own.data(), sums.data(), found, begin, end);
  });
  const auto share =
      join_scores(hubs, how.heads, maximum, total, state.maximum, state.total, threads);
  join_shares(hubs, how.heads, how.width, share, sums, out, threads);
  join_shares(hubs, how.heads, 1, share, weight, state.positive_weight, threads);
  if (state.positive == nullptr) return;
  join_shares(hubs, how.heads, how.width, share, positive, state.positive, threads);
}

}  // namespace

template <typename T>
void attention(const Sparse& matrix, const Attention& how, const T* x,
               const typename Sum<T>::type* source, const typename Sum<T>::type* target, T* out,
               const AttentionState<T>& state, int threads) {
  const Hubs hubs(matrix);
  parallel_rows(matrix, hubs, grain_of(how), threads, [&](int64_t begin, int64_t end) {
    forward_of(matrix, how, x, source, target, out, state, begin, end);
  });
  attention_of_hubs(hubs, how, x, source, target, out, state, threads);
}

template <typename T>
void attention_backward(const Sparse& transposed, int64_t num_rows, const Attention& how,
                        const T* x, const typename Sum<T>::type* source,
                        const typename Sum<T>::type* target, const T* out, const T* grad,
                        const AttentionState<T>& state, typename Sum<T>::type* packed, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        int threads) {
  using A = typename Sum<T>::type;
  parallel_chunks(num_rows, std::max<int64_t>(1, grain_of(how)), threads,
                  [&](int, int64_t begin, int64_t end) {
                    target_of(how, target, out, grad, state, packed, grad_target, begin, end);
                  });
  const Hubs hubs(transposed);
  parallel_rows(transposed, hubs, grain_of(how), threads, [&](int64_t begin, int64_t end) {
    source_of(transposed, how, x, source, grad, packed, grad_x, grad_source, begin, end);
  });
  const int64_t all = how.heads * how.width;
  const std::vector<T> own_x = hubs.repeat(x, all);
  const std::vector<A> own_source = hubs.repeat(source, how.heads);
  std::vector<A> to_x(own_x.size()), to_source(own_source.size());
  parallel_pieces(hubs, grain_of(how), threads, [&](int64_t begin, int64_t end) {
    source_of(hubs.pieces(), how, own_x.data(), own_source.data(), grad, packed, to_x.data(),
              to_source.data(), begin, end);
  });
  join_sums(hubs, to_x, all, false, grad_x, threads);
  join_sums(hubs, to_source, how.heads, false, grad_source, threads);
}

#define GAS_FOR_TYPE(T, A)                                                                        \
  template void attention(const Sparse&, const Attention&, const T*, const A*, const A*, T*,      \
                          const AttentionState<T>&, int);                                         \
  template void attention_backward(const Sparse&, int64_t, const Attention&, const T*, const A*,  \
                                   const A*, const T*, const T*, const AttentionState<T>&, A*,    \
                                   T*, A*, A*, int);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas
