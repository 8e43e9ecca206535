#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel_rows.h"
#include "prefetch.h"
#include "random.h"

namespace gas {
namespace {

constexpr int64_t kGrainElements = 8 * 1024;  // Below this, waking a thread costs more.

int64_t grain_of(const Attention& how) {
  return kGrainElements / std::max<int64_t>(1, how.heads * how.width);
}

// exp(x) for x <= 0, to 2 units in the last place, by instructions that work on vectors: 2^n times a
// polynomial of the rest (Cephes). The large constant rounds to a whole number.
GAS_INLINE float exp_of(float x) {
  constexpr float kRound = 12582912.0f, kLog2e = 1.44269504f;
  x = x < -87.0f ? -87.0f : x;
  const float n = (x * kLog2e + kRound) - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}
GAS_INLINE double exp_of(double x) { return std::exp(x); }

template <typename A>
GAS_INLINE A leaky(A x, A slope) {
  return x > A{0} ? x : x * slope;
}

template <typename A>
GAS_INLINE A kept(const Attention& how, int64_t entry, int64_t head) {
  if (how.threshold == 0) return A{1};
  const auto element = static_cast<uint64_t>(entry * how.heads + head);
  return is_kept(how.seed, element, how.threshold) ? static_cast<A>(how.keep) : A{0};
}

// `Width` is a head's width where it is known at compile time, else 0.
template <int Width, typename T>
GAS_INLINE void forward_rows(const Sparse& m, const Attention& how, const T* x,
                             const typename Sum<T>::type* source,
                             const typename Sum<T>::type* target, T* out,
                             const AttentionState<T>& state, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t heads = how.heads, width = Width > 0 ? Width : how.width, all = heads * width;
  const A slope = static_cast<A>(how.slope);
  const int64_t row_bytes = all * static_cast<int64_t>(sizeof(T));
  const int64_t stop = m.rowptr[last];
  std::vector<A> score, sum(2 * all);
  for (int64_t row = begin; row < last; ++row) {
    const int64_t first = m.rowptr[row], end = m.rowptr[row + 1];
    const A* mine = target + row * heads;
    A* maximum = state.maximum + row * heads;
    A* total = state.total + row * heads;
    A* weight = state.positive_weight + row * heads;
    for (int64_t h = 0; h < heads; ++h) {
      maximum[h] = first < end ? std::numeric_limits<A>::lowest() : A{0};
      total[h] = weight[h] = A{0};
    }
    score.resize((end - first) * heads);
    for (int64_t e = first; e < end; ++e) {
      const A* theirs = source + m.col[e] * heads;
      A* at = score.data() + (e - first) * heads;
      for (int64_t h = 0; h < heads; ++h) {
        at[h] = leaky(theirs[h] + mine[h], slope);
        maximum[h] = at[h] > maximum[h] ? at[h] : maximum[h];
      }
    }
    std::fill(sum.begin(), sum.end(), A{0});
    A* positive = sum.data();
    A* other = state.positive == nullptr ? positive : positive + all;
    for (int64_t e = first; e < end; ++e) {
      if (e + kAhead < stop) {
        prefetch_row(reinterpret_cast<const char*>(x + m.col[e + kAhead] * all), row_bytes);
      }
      const T* theirs = x + m.col[e] * all;
      A* at = score.data() + (e - first) * heads;
      bool above[64];
      for (int64_t h0 = 0; h0 < heads; h0 += 64) {
        const int64_t some = std::min<int64_t>(64, heads - h0);
        for (int64_t h = 0; h < some; ++h) {
          above[h] = at[h0 + h] > A{0};
          at[h0 + h] = exp_of(at[h0 + h] - maximum[h0 + h]);
          total[h0 + h] += at[h0 + h];
          weight[h0 + h] += above[h] ? at[h0 + h] : A{0};
        }
        for (int64_t h = 0; h < some; ++h) {
          const A a = at[h0 + h] * kept<A>(how, e, h0 + h);
          A* into = (above[h] ? positive : other) + (h0 + h) * width;
          const T* from = theirs + (h0 + h) * width;
          for (int64_t j = 0; j < width; ++j) into[j] += a * load(from[j]);
        }
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const A scale = total[h] > A{0} ? A{1} / total[h] : A{0};
      weight[h] *= scale;
      for (int64_t j = h * width; j < (h + 1) * width; ++j) {
        if (state.positive != nullptr) {
          store(state.positive + row * all + j, positive[j] * scale);
          store(out + row * all + j, (positive[j] + other[j]) * scale);
        } else {
          store(out + row * all + j, positive[j] * scale);
        }
      }
    }
  }
}

// D, and from it the gradient towards `target`, of each destination.
template <typename T>
GAS_INLINE void target_rows(const Attention& how, const T* out, const T* grad,
                            const AttentionState<T>& state, typename Sum<T>::type* dot,
                            typename Sum<T>::type* grad_target, int64_t begin, int64_t last) {
  using A = typename Sum<T>::type;
  for (int64_t at = begin * how.heads; at < last * how.heads; ++at) {
    A whole = 0, positive = 0;
    for (int64_t j = at * how.width; j < (at + 1) * how.width; ++j) {
      whole += load(grad[j]) * load(out[j]);
      positive += load(grad[j]) * load(state.positive[j]);
    }
    dot[at] = whole;
    grad_target[at] =
        static_cast<A>(1.0 - how.slope) * (positive - state.positive_weight[at] * whole);
  }
}

template <int Width, typename T>
GAS_INLINE void source_rows(const Sparse& m, const Attention& how, const T* x,
                            const typename Sum<T>::type* source,
                            const typename Sum<T>::type* target, const T* grad,
                            const AttentionState<T>& state, const typename Sum<T>::type* dot,
                            T* grad_x, typename Sum<T>::type* grad_source, int64_t begin,
                            int64_t last) {
  using A = typename Sum<T>::type;
  const int64_t heads = how.heads, width = Width > 0 ? Width : how.width, all = heads * width;
  const A slope = static_cast<A>(how.slope);
  const int64_t row_bytes = all * static_cast<int64_t>(sizeof(T));
  const int64_t stop = m.rowptr[last];
  std::vector<A> sum(all), a(heads), bend(heads);
  for (int64_t row = begin; row < last; ++row) {
    const T* mine = x + row * all;
    A* into_source = grad_source + row * heads;
    std::fill(sum.begin(), sum.end(), A{0});
    for (int64_t h = 0; h < heads; ++h) into_source[h] = A{0};
    for (int64_t e = m.rowptr[row]; e < m.rowptr[row + 1]; ++e) {
      if (e + kAhead < stop) {
        prefetch_row(reinterpret_cast<const char*>(grad + m.col[e + kAhead] * all), row_bytes);
      }
      const int64_t to = m.col[e], at = to * heads;
      for (int64_t h = 0; h < heads; ++h) {
        const A raw = source[row * heads + h] + target[at + h];
        bend[h] = raw > A{0} ? A{1} : slope;
        a[h] = exp_of(raw * bend[h] - state.maximum[at + h]) / state.total[at + h];
      }
      for (int64_t h = 0; h < heads; ++h) {
        const A keep = kept<A>(how, m.entry[e], h), through = a[h] * keep;
        const T* from = grad + to * all + h * width;
        const T* own = mine + h * width;
        A* into = sum.data() + h * width;
        constexpr int kLanes = 8;
        A lane[kLanes] = {};
        int64_t j = 0;
        for (; j + kLanes <= width; j += kLanes) {
          for (int k = 0; k < kLanes; ++k) {
            const A g = load(from[j + k]);
            lane[k] += g * load(own[j + k]);
            into[j + k] += through * g;
          }
        }
        A inner = ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
                  ((lane[4] + lane[5]) + (lane[6] + lane[7]));
        for (; j < width; ++j) {
          const A g = load(from[j]);
          inner += g * load(own[j]);
          into[j] += through * g;
        }
        into_source[h] += bend[h] * a[h] * (keep * inner - dot[at + h]);
      }
    }
    for (int64_t j = 0; j < all; ++j) store(grad_x + row * all + j, sum[j]);
  }
}

// A function of one type can be compiled for several processors; a template can't.
#define GAS_FOR_TYPE(T, A)                                                                        \
  GAS_CLONES void forward_of(const Sparse& m, const Attention& how, const T* x, const A* source,  \
                             const A* target, T* out, const AttentionState<T>& state,             \
                             int64_t begin, int64_t end) {                                        \
    switch (how.width) {                                                                          \
      case 8: return forward_rows<8>(m, how, x, source, target, out, state, begin, end);          \
      case 16: return forward_rows<16>(m, how, x, source, target, out, state, begin, end);        \
      case 32: return forward_rows<32>(m, how, x, source, target, out, state, begin, end);        \
      default: return forward_rows<0>(m, how, x, source, target, out, state, begin, end);         \
    }                                                                                             \
  }                                                                                               \
  GAS_CLONES void target_of(const Attention& how, const T* out, const T* grad,                    \
                            const AttentionState<T>& state, A* dot, A* grad_target,               \
                            int64_t begin, int64_t end) {                                         \
    target_rows(how, out, grad, state, dot, grad_target, begin, end);                             \
  }                                                                                               \
  GAS_CLONES void source_of(const Sparse& m, const Attention& how, const T* x, const A* source,   \
                            const A* target, const T* grad, const AttentionState<T>& state,       \
                            const A* dot, T* grad_x, A* grad_source, int64_t begin,               \
                            int64_t end) {                                                        \
    switch (how.width) {                                                                          \
      case 8:                                                                                     \
        return source_rows<8>(m, how, x, source, target, grad, state, dot, grad_x, grad_source,   \
                              begin, end);                                                        \
      case 16:                                                                                    \
        return source_rows<16>(m, how, x, source, target, grad, state, dot, grad_x, grad_source,  \
                               begin, end);                                                       \
      case 32:                                                                                    \
        return source_rows<32>(m, how, x, source, target, grad, state, dot, grad_x, grad_source,  \
                               begin, end);                                                       \
      default:                                                                                    \
        return source_rows<0>(m, how, x, source, target, grad, state, dot, grad_x, grad_source,   \
                              begin, end);                                                        \
    }                                                                                             \
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
                        const AttentionState<T>& state, typename Sum<T>::type* dot, T* grad_x,
                        typename Sum<T>::type* grad_source, typename Sum<T>::type* grad_target,
                        int threads) {
  parallel_chunks(num_rows, std::max<int64_t>(1, grain_of(how)), threads,
                  [&](int, int64_t begin, int64_t end) {
                    target_of(how, out, grad, state, dot, grad_target, begin, end);
                  });
  parallel_rows(transposed.rowptr, transposed.num_rows, grain_of(how), threads,
                [&](int64_t begin, int64_t end) {
                  source_of(transposed, how, x, source, target, grad, state, dot, grad_x,
                            grad_source, begin, end);
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
