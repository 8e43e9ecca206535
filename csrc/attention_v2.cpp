#include "attention_v2.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "attention_edge.h"
#include "attention_hubs.h"
#include "exp.h"
#include "parallel_rows.h"
#include "prefetch.h"

namespace gas {
namespace {

constexpr int64_t kGrainElements = 8 * 1024;  // Below this, waking a thread costs more.
constexpr int kLanes = 8;                     // Elements of a dot product added up together.

int64_t grain_of(const Attention& how) {
  return kGrainElements / std::max<int64_t>(1, how.heads * how.width);
}

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
      lane[i] += att[j + i] * (raw > A{0} ? raw : raw * slope);
    }
  }
  A sum = add_up(lane);
  for (; j < size; ++j) {
    const A raw = mine[j] + load(theirs[j]);
    sum += att[j] * (raw > A{0} ? raw : raw * slope);
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
      lane[i] += att[j + i] * (raw > A{0} ? raw : raw * slope);
      lane_2[i] += mine_2[j + i] * load(theirs_2[j + i]);
    }
  }
  score = add_up(lane);
  dot = add_up(lane_2);
  for (; j < size; ++j) {
    const A raw = mine[j] + load(theirs[j]);
    score += att[j] * (raw > A{0} ? raw : raw * slope);
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
  const int64_t row_bytes = all * static_cast<int64_t>(sizeof(T)), stop = m.rowptr[last];
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
        const T* next = layer.source + m.col[e + kAhead] * all;
        prefetch_row(reinterpret_cast<const char*>(next), row_bytes);
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
      const A scale = whole[h] > A{0} ? A{1} / whole[h] : A{0};
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
  const int64_t row_bytes = all * static_cast<int64_t>(sizeof(T)), stop = m.rowptr[last];
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
      const A whole = total[row * heads + h];
      here[h] = maximum[row * heads + h];
      here[heads + h] = whole > A{0} ? A{1} / whole : A{0};
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
        const T* next = layer.source + m.col[e + kAhead] * all;
        prefetch_row(reinterpret_cast<const char*>(next), row_bytes);
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
  const int64_t row_bytes = all * static_cast<int64_t>(sizeof(T)), stop = m.rowptr[last];
  const int64_t packed_bytes = 3 * heads * static_cast<int64_t>(sizeof(A));
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
        prefetch_row(reinterpret_cast<const char*>(grad + next * all), row_bytes);
        prefetch_row(reinterpret_cast<const char*>(layer.target + next * all), row_bytes);
        prefetch_row(reinterpret_cast<const char*>(packed + next * 3 * heads), packed_bytes);
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

// A function of one type can be compiled for several processors; a template can't.
#define GAS_BY_WIDTH(call, ...)     \
  switch (layer.how.width) {        \
    case 8:                         \
      return call<8>(__VA_ARGS__);  \
    case 32:                        \
      return call<32>(__VA_ARGS__); \
    default:                        \
      return call<0>(__VA_ARGS__);  \
  }
#define GAS_FOR_TYPES(T, A, Out)                                                                  \
  GAS_CLONES void forward_of(const Sparse& m, const AttentionV2<T>& layer, Out* out, A* maximum,  \
                             A* total, int64_t begin, int64_t end) {                              \
    GAS_BY_WIDTH(forward_rows, m, layer, out, maximum, total, begin, end)                         \
  }                                                                                               \
  GAS_CLONES void target_of(const Sparse& m, const AttentionV2<T>& layer, const T* out,           \
                            const T* grad, const A* maximum, const A* total, A* packed,           \
                            Out* grad_target, double* grad_att, int64_t begin, int64_t end) {     \
    GAS_BY_WIDTH(target_rows, m, layer, out, grad, maximum, total, packed, grad_target, grad_att, \
                 begin, end)                                                                      \
  }                                                                                               \
  GAS_CLONES void source_of(const Sparse& m, const AttentionV2<T>& layer, const T* grad,          \
                            const A* packed, Out* grad_source, int64_t begin, int64_t end) {      \
    GAS_BY_WIDTH(source_rows, m, layer, grad, packed, grad_source, begin, end)                    \
  }
GAS_FOR_TYPES(float, float, float)
GAS_FOR_TYPES(double, double, double)
GAS_FOR_TYPES(bfloat16, float, bfloat16)
GAS_FOR_TYPES(bfloat16, float, float)
#undef GAS_FOR_TYPES
#undef GAS_BY_WIDTH

// The gradient towards hubs as destinations; the sum towards att of each piece goes to `to_att`.
template <typename T>
void target_of_hubs(const Hubs& hubs, const AttentionV2<T>& layer, const T* out, const T* grad,
                    const typename Sum<T>::type* maximum, const typename Sum<T>::type* total,
                    typename Sum<T>::type* packed, T* grad_target, double* to_att, int threads) {
  using A = typename Sum<T>::type;
  const int64_t heads = layer.how.heads, all = heads * layer.how.width;
  const auto target = hubs.repeat(layer.target, all), own_out = hubs.repeat(out, all);
  const auto own_grad = hubs.repeat(grad, all);
  const auto own_maximum = hubs.repeat(maximum, heads), own_total = hubs.repeat(total, heads);
  const AttentionV2<T> own{layer.how, layer.source, target.data(), layer.att};
  std::vector<A> to_target(hubs.num_pieces() * all), own_packed(hubs.num_pieces() * 3 * heads);
  parallel_pieces(hubs, grain_of(layer.how), threads, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      target_of(hubs.pieces(), own, own_out.data(), own_grad.data(), own_maximum.data(),
                own_total.data(), own_packed.data(), to_target.data(), to_att + piece * all, piece,
                piece + 1);
    }
  });
  join_sums(hubs, to_target, all, false, grad_target, threads);
  for (const Hub& hub : hubs) {
    std::copy_n(own_packed.data() + hub.first * 3 * heads, 3 * heads,
                packed + hub.row * 3 * heads);
  }
}

}  // namespace

template <typename T>
void attention_v2(const Sparse& matrix, const AttentionV2<T>& layer, T* out,
                  typename Sum<T>::type* maximum, typename Sum<T>::type* total, int threads) {
  using A = typename Sum<T>::type;
  const Hubs hubs(matrix);
  parallel_rows(matrix, hubs, grain_of(layer.how), threads, [&](int64_t begin, int64_t end) {
    forward_of(matrix, layer, out, maximum, total, begin, end);
  });
  const int64_t heads = layer.how.heads, width = layer.how.width;
  const auto target = hubs.repeat(layer.target, heads * width);
  const AttentionV2<T> own{layer.how, layer.source, target.data(), layer.att};
  std::vector<A> most(hubs.num_pieces() * heads), whole(most.size()), sums(target.size());
  parallel_pieces(hubs, grain_of(layer.how), threads, [&](int64_t begin, int64_t end) {
    forward_of(hubs.pieces(), own, sums.data(), most.data(), whole.data(), begin, end);
  });
  const auto share = join_scores(hubs, heads, most, whole, maximum, total, threads);
  join_shares(hubs, heads, width, share, sums, out, threads);
}

template <typename T>
void attention_v2_backward(const Sparse& matrix, const Sparse& transposed,
                           const AttentionV2<T>& layer, const T* out, const T* grad,
                           const typename Sum<T>::type* maximum,
                           const typename Sum<T>::type* total, typename Sum<T>::type* packed,
                           T* grad_source, T* grad_target, typename Sum<T>::type* grad_att,
                           int threads) {
  using A = typename Sum<T>::type;
  const int64_t all = layer.how.heads * layer.how.width;
  const Hubs into(matrix), out_of(transposed);
  std::vector<double> to_att((kParts + into.num_pieces()) * all);
  parallel_parts(matrix, into, grain_of(layer.how), threads,
                 [&](int64_t part, int64_t begin, int64_t end) {
                   target_of(matrix, layer, out, grad, maximum, total, packed, grad_target,
                             to_att.data() + part * all, begin, end);
                 });
  target_of_hubs(into, layer, out, grad, maximum, total, packed, grad_target,
                 to_att.data() + kParts * all, threads);
  for (int64_t j = 0; j < all; ++j) {
    double sum = 0;
    for (int64_t part = 0; part < kParts + into.num_pieces(); ++part) sum += to_att[part * all + j];
    grad_att[j] = static_cast<A>(sum);
  }
  parallel_rows(transposed, out_of, grain_of(layer.how), threads, [&](int64_t begin, int64_t end) {
    source_of(transposed, layer, grad, packed, grad_source, begin, end);
  });
  const auto source = out_of.repeat(layer.source, all);
  const AttentionV2<T> own{layer.how, source.data(), layer.target, layer.att};
  std::vector<A> to_source(source.size());
  parallel_pieces(out_of, grain_of(layer.how), threads, [&](int64_t begin, int64_t end) {
    source_of(out_of.pieces(), own, grad, packed, to_source.data(), begin, end);
  });
  join_sums(out_of, to_source, all, false, grad_source, threads);
}

#define GAS_FOR_TYPE(T, A)                                                                        \
  template void attention_v2(const Sparse&, const AttentionV2<T>&, T*, A*, A*, int);              \
  template void attention_v2_backward(const Sparse&, const Sparse&, const AttentionV2<T>&,        \
                                      const T*, const T*, const A*, const A*, A*, T*, T*, A*, int);
GAS_FOR_TYPE(float, float)
GAS_FOR_TYPE(double, double)
GAS_FOR_TYPE(bfloat16, float)
#undef GAS_FOR_TYPE

}  // namespace gas
