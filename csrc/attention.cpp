#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "attention_edge.h"
#include "exp.h"
#include "parallel_rows.h"
#include "prefetch.h"

namespace gas {
namespace {

constexpr int64_t kGrainElements = 8 * 1024;  // Below this, waking a thread costs more.

int64_t grain_of(const Attention& how) {
  return kGrainElements / std::max<int64_t>(1, how.heads * how.width);
}


// `Heads` and `Width` are those of the layer where they are known at compile time, else 0.
template <int Heads, int Width, typename T>
GAS_INLINE void forward_rows(const Sparse& m, const Attention& how, const T* x,
                             const typename Sum<T>::type* source,
                             const typename Sum<T>::type* target, T* out,
                             const AttentionState<T>& state, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t heads = Heads > 0 ? Heads : how.heads;
  const int64_t width = Width > 0 ? Width : how.width, all = heads * width;
  const A slope = static_cast<A>(how.slope);
  const int64_t row_bytes = all * static_cast<int64_t>(sizeof(T));
  const int64_t stop = m.rowptr[last];
  std::vector<A> scratch(4 * heads + 2 * all), scores;
  std::vector<int32_t> sides(heads);
  A* __restrict maximum = scratch.data();
  A* __restrict total = maximum + heads;
  A* __restrict weight = total + heads;
  A* __restrict mine = weight + heads;
  A* __restrict positive = mine + heads;  // Of positive scores, and behind it of the others.
  int32_t* __restrict side = sides.data();
  const int32_t behind = static_cast<int32_t>(state.positive == nullptr ? 0 : all);
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    std::fill(scratch.begin(), scratch.end(), A{0});
    for (int64_t h = 0; h < heads; ++h) {
      mine[h] = target[row * heads + h];
      maximum[h] = first < end ? std::numeric_limits<A>::lowest() : A{0};
    }
    scores.resize((end - first) * heads);
    for (int64_t e = first; e < end; ++e) {
      if (e + 2 * kAhead < stop) __builtin_prefetch(source + m.col[e + 2 * kAhead] * heads);
      const A* __restrict theirs = source + m.col[e] * heads;
      A* __restrict score = scores.data() + (e - first) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const A s = leaky(theirs[h] + mine[h], slope);
        score[h] = s;
        maximum[h] = s > maximum[h] ? s : maximum[h];
      }
    }
    for (int64_t e = first; e < end; ++e) {
      if (e + kAhead < stop) {
        prefetch_row(reinterpret_cast<const char*>(x + m.col[e + kAhead] * all), row_bytes);
      }
      const T* theirs = x + m.col[e] * all;
      A* __restrict score = scores.data() + (e - first) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const A power = exp_of(score[h] - maximum[h]);
        const bool above = score[h] > A{0};
        side[h] = above ? 0 : behind;  // An address, not a branch, which would be mispredicted.
        total[h] += power;
        weight[h] += above ? power : A{0};
        score[h] = power;
      }
      for (int64_t h = 0; h < heads; ++h) {
        const A a = score[h] * kept<A>(how, e, h);
        A* __restrict into = positive + side[h] + h * width;
        const T* from = theirs + h * width;
        for (int64_t j = 0; j < width; ++j) into[j] += a * load(from[j]);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const A scale = total[h] > A{0} ? A{1} / total[h] : A{0};
      state.maximum[row * heads + h] = maximum[h];
      state.total[row * heads + h] = total[h];
      state.positive_weight[row * heads + h] = weight[h] * scale;
      for (int64_t j = h * width; j < (h + 1) * width; ++j) {
        if (state.positive != nullptr) {
          store(state.positive + row * all + j, positive[j] * scale);
          store(out + row * all + j, (positive[j] + positive[all + j]) * scale);
        } else {
          store(out + row * all + j, positive[j] * scale);
        }
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

template <int Heads, int Width, typename T>
GAS_INLINE void source_rows(const Sparse& m, const Attention& how, const T* x,
                            const typename Sum<T>::type* source, const T* grad,
                            const typename Sum<T>::type* packed, T* grad_x,
                            typename Sum<T>::type* grad_source, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t heads = Heads > 0 ? Heads : how.heads;
  const int64_t width = Width > 0 ? Width : how.width, all = heads * width;
  const A slope = static_cast<A>(how.slope);
  const int64_t row_bytes = all * static_cast<int64_t>(sizeof(T));
  const int64_t packed_bytes = 4 * heads * static_cast<int64_t>(sizeof(A));
  const int64_t stop = m.rowptr[last];
  std::vector<A> scratch(5 * heads + 2 * all);
  A* __restrict a = scratch.data();
  A* __restrict bend = a + heads;
  A* __restrict inner = bend + heads;
  A* __restrict own_score = inner + heads;
  A* __restrict sum_score = own_score + heads;
  A* __restrict sum = sum_score + heads;
  A* __restrict own = sum + all;
  for (int64_t row = begin; row < last; ++row) {
    for (int64_t j = 0; j < all; ++j) {
      own[j] = load(x[row * all + j]);
      sum[j] = A{0};
    }
    for (int64_t h = 0; h < heads; ++h) {
      own_score[h] = source[row * heads + h];
      sum_score[h] = A{0};
    }
    for (int64_t e = m.rowptr[row]; e < m.rowptr[row + 1]; ++e) {
      if (e + kAhead < stop) {
        const int64_t next = m.col[e + kAhead];
        prefetch_row(reinterpret_cast<const char*>(grad + next * all), row_bytes);
        prefetch_row(reinterpret_cast<const char*>(packed + next * 4 * heads), packed_bytes);
      }
      const A* __restrict at = packed + m.col[e] * 4 * heads;
      const T* __restrict from = grad + m.col[e] * all;
      for (int64_t h = 0; h < heads; ++h) {
        const A raw = own_score[h] + at[h];
        bend[h] = raw > A{0} ? A{1} : slope;
        a[h] = exp_of(raw * bend[h] - at[heads + h]) * at[2 * heads + h];
      }
      for (int64_t h = 0; h < heads; ++h) {
        const A keep = kept<A>(how, m.entry[e], h), through = a[h] * keep;
        constexpr int kLanes = 8;
        A lane[kLanes] = {};
        int64_t j = h * width;
        const int64_t full = j + width / kLanes * kLanes, stop_at = j + width;
        for (; j < full; j += kLanes) {
          for (int k = 0; k < kLanes; ++k) {
            const A g = load(from[j + k]);
            lane[k] += g * own[j + k];
            sum[j + k] += through * g;
          }
        }
        A dot = ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
                ((lane[2] + lane[6]) + (lane[3] + lane[7]));
        for (; j < stop_at; ++j) {
          const A g = load(from[j]);
          dot += g * own[j];
          sum[j] += through * g;
        }
        inner[h] = keep * dot;
      }
      for (int64_t h = 0; h < heads; ++h) {
        sum_score[h] += bend[h] * a[h] * (inner[h] - at[3 * heads + h]);
      }
    }
    for (int64_t j = 0; j < all; ++j) store(grad_x + row * all + j, sum[j]);
    for (int64_t h = 0; h < heads; ++h) grad_source[row * heads + h] = sum_score[h];
  }
}

// A function of one type can be compiled for several processors; a template can't.
#define GAS_FOR_TYPE(T, A)                                                                        \
  GAS_CLONES void forward_of(const Sparse& m, const Attention& how, const T* x, const A* source,  \
                             const A* target, T* out, const AttentionState<T>& state,             \
                             int64_t begin, int64_t end) {                                        \
    if (how.heads == 8 && how.width == 8) {                                                       \
      return forward_rows<8, 8>(m, how, x, source, target, out, state, begin, end);               \
    }                                                                                             \
    if (how.heads == 8 && how.width == 32) {                                                      \
      return forward_rows<8, 32>(m, how, x, source, target, out, state, begin, end);              \
    }                                                                                             \
    return forward_rows<0, 0>(m, how, x, source, target, out, state, begin, end);                 \
  }                                                                                               \
  GAS_CLONES void target_of(const Attention& how, const A* target, const T* out, const T* grad,   \
                            const AttentionState<T>& state, A* packed, A* grad_target,            \
                            int64_t begin, int64_t end) {                                         \
    target_rows(how, target, out, grad, state, packed, grad_target, begin, end);                  \
  }                                                                                               \
  GAS_CLONES void source_of(const Sparse& m, const Attention& how, const T* x, const A* source,   \
                            const T* grad, const A* packed, T* grad_x, A* grad_source,            \
                            int64_t begin, int64_t end) {                                         \
    if (how.heads == 8 && how.width == 8) {                                                       \
      return source_rows<8, 8>(m, how, x, source, grad, packed, grad_x, grad_source, begin, end); \
    }                                                                                             \
    if (how.heads == 8 && how.width == 32) {                                                      \
      return source_rows<8, 32>(m, how, x, source, grad, packed, grad_x, grad_source, begin,      \
                                end);                                                             \
    }                                                                                             \
    return source_rows<0, 0>(m, how, x, source, grad, packed, grad_x, grad_source, begin, end);   \
  }
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace

template <typename T>
void attention(const Sparse& matrix, const Attention& how, const T* x,
               const typename Sum<T>::type* source, const typename Sum<T>::type* target, T* out,
               const AttentionState<T>& state, int threads) {
  parallel_rows(matrix.rowptr, matrix.num_rows, grain_of(how), threads,
                [&](int64_t begin, int64_t end) {
                  forward_of(matrix, how, x, source, target, out, state, begin, end);
                });
}

template <typename T>
void attention_backward(const Sparse& transposed, int64_t num_rows, const Attention& how,
                        const T* x, const typename Sum<T>::type* source,
                        const typename Sum<T>::type* target, const T* out, const T* grad,
                        const AttentionState<T>& state, typename Sum<T>::type* packed, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        int threads) {
  parallel_chunks(num_rows, std::max<int64_t>(1, grain_of(how)), threads,
                  [&](int, int64_t begin, int64_t end) {
                    target_of(how, target, out, grad, state, packed, grad_target, begin, end);
                  });
  parallel_rows(transposed.rowptr, transposed.num_rows, grain_of(how), threads,
                [&](int64_t begin, int64_t end) {
                  source_of(transposed, how, x, source, grad, packed, grad_x, grad_source, begin,
                            end);
                });
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
