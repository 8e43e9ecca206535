#include "operators/dropout.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "common/prefetch.h"
#include "common/processor.h"
#include "common/random.h"
#include "common/vector.h"
#include "transfer/rows.h"

namespace gas {
namespace {

constexpr int64_t kGrainPairs = 8 * 1024;
constexpr int64_t kRowsInBlock = 256;  // Whose sums are added up in T; sums of blocks in double.
constexpr int64_t kDecodedAtOnce = 4 * 1024;  // Elements: still in the first cache when dropped.

// What happens to elements, one or a vector of them, before they are dropped: nothing, or ReLU,
// which is stored as well.
struct AsTheyAre {
  template <typename T, typename Values>
  GAS_INLINED void operator()(const T*, Values&) const {}
};
template <typename T>
struct Relu {
  const T* x;
  T* out;
  template <typename Values>
  GAS_INLINED void operator()(const T* from, Values& values) const {
    values = values <= Values{} ? Values{} : values;  // Keeps NaN, as PyTorch does.
    store(out + (from - x), values);
  }
};

template <typename T>
GAS_INLINE void read(const T* from, T& to) {
  to = *from;
}
template <typename T>
GAS_INLINE void read(const T* from, typename Vector<T>::type& to) {
  load(from, to);
}

// ReLU of a row that is normalised by column.
template <typename T>
struct NormRelu {
  const T *x, *mean, *scale, *shift;
  T* out;
  template <typename Values>
  GAS_INLINED void operator()(const T* from, Values& values) const {
    const int64_t column = from - x;
    Values middle, factor, last;
    read(mean + column, middle);
    read(scale + column, factor);
    read(shift + column, last);
    values = (values - middle) * factor + last;
    Relu<T>{x, out}(from, values);
  }
};

// Picks the factor by table: a branch on random bits would be mispredicted every other time.
// The counter of the first pair is `first`.
template <typename T, typename Before>
GAS_INLINE void drop_pairs(const T* x, int64_t pairs, uint64_t first, uint64_t threshold, T scale,
                           uint64_t seed, T* out, const Before& before) {
  const T factor[2] = {T{0}, scale};
  for (int64_t i = 0; i < 2 * pairs; i += 2) {
    const uint64_t bits = random_bits(seed, first + i / 2);
    T low = x[i], high = x[i + 1];
    before(x + i, low);
    before(x + i + 1, high);
    out[i] = low * factor[(bits & 0xffffffffULL) >= threshold];
    out[i + 1] = high * factor[(bits >> 32) >= threshold];
  }
}

// The same in vectors, which compilers don't find; a pair's halves are in the order of its
// elements. (Measured: 1.3 times as fast with AVX2, 2.7 times with AVX-512.)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

template <typename Before>
GAS_INLINE void drop_vectors(const float* x, int64_t pairs, uint64_t first, uint64_t threshold,
                             float scale, uint64_t seed, float* out, const Before& before) {
  typedef uint64_t Pairs __attribute__((vector_size(32)));
  typedef uint32_t Halves __attribute__((vector_size(32)));
  int64_t pair = 0;
  if (threshold <= 0xffffffffULL) {
    const auto least = static_cast<uint32_t>(threshold);
    uint32_t scale_bits;
    std::memcpy(&scale_bits, &scale, sizeof scale);
    Pairs counters = {first, first + 1, first + 2, first + 3};
    for (; pair + 4 <= pairs; pair += 4, counters += 4) {
      Pairs bits = counters;
      draw_bits(seed, bits);
      Halves halves;
      std::memcpy(&halves, &bits, sizeof halves);
      const Halves kept = reinterpret_cast<Halves>(halves >= least) & scale_bits;
      Vector<float>::type factor, values;
      std::memcpy(&factor, &kept, sizeof factor);
      load(x + 2 * pair, values);
      before(x + 2 * pair, values);
      store(out + 2 * pair, values * factor);
    }
  }
  drop_pairs(x + 2 * pair, pairs - pair, first + pair, threshold, scale, seed, out + 2 * pair,
             before);
}
template <typename Before>
GAS_INLINE void drop_vectors(const double* x, int64_t pairs, uint64_t first, uint64_t threshold,
                             double scale, uint64_t seed, double* out, const Before& before) {
  drop_pairs(x, pairs, first, threshold, scale, seed, out, before);
}

// Drops elements first, ..., first + n - 1, of which `x` and `out` hold these alone.
template <typename T, typename Before = AsTheyAre>
GAS_INLINE void drop(const T* x, int64_t n, uint64_t first, uint64_t threshold, T scale,
                     uint64_t seed, T* out, const Before& before = {}) {
  const auto single = [&](int64_t i) {
    T value = x[i];
    before(x + i, value);
    out[i] = value * (is_kept(seed, first + i, threshold) ? scale : T{0});
  };
  if (n == 0) return;
  const int64_t odd = first % 2;  // Half of a pair.
  if (odd) single(0);
  const int64_t pairs = (n - odd) / 2;
  drop_vectors(x + odd, pairs, (first + odd) / 2, threshold, scale, seed, out + odd, before);
  if (odd + 2 * pairs < n) single(n - 1);
}

// Calls take(i, gradient) for the gradient towards each of n elements before ReLU, in vectors and
// then one by one.
template <typename T, typename Take>
GAS_INLINE void pass_gradient(const T* grad, const T* dropped, int64_t n, T scale,
                              const Take& take) {
  const auto pass = [&](int64_t i, const auto& zero) GAS_INLINED {
    auto g = zero, d = zero;
    read(grad + i, g);
    read(dropped + i, d);
    take(i, d == zero ? zero : g * scale);
  };
  int64_t i = 0;
  for (; i + Vector<T>::kLanes <= n; i += Vector<T>::kLanes) pass(i, typename Vector<T>::type{});
  for (; i < n; ++i) pass(i, T{0});
}

}  // namespace

template <typename T>
void dropout(const T* x, int64_t n, uint64_t threshold, T scale, uint64_t seed, T* out,
             int threads) {
  parallel_chunks((n + 1) / 2, kGrainPairs, threads, [&](int, int64_t begin, int64_t end) {
    const int64_t first = 2 * begin, count = std::min(2 * end, n) - first;
    // With AVX-512, processors multiply integers of 64 bits at once.
    on_processor<Vectors::kAvx512>(
        [&]() GAS_INLINED { drop(x + first, count, first, threshold, scale, seed, out + first); });
  });
}

template <typename T>
void relu_dropout(const T* x, int64_t n, uint64_t threshold, T scale, uint64_t seed, T* relu,
                  T* out, int threads) {
  parallel_chunks((n + 1) / 2, kGrainPairs, threads, [&](int, int64_t begin, int64_t end) {
    const int64_t first = 2 * begin, count = std::min(2 * end, n) - first;
    on_processor<Vectors::kAvx512>([&]() GAS_INLINED {
      drop(x + first, count, first, threshold, scale, seed, out + first,
           Relu<T>{x + first, relu + first});
    });
  });
}

template <typename T>
void relu_dropout_backward(const T* grad, const T* dropped, int64_t n, T scale, T* out,
                           int threads) {
  parallel_chunks(n, 2 * kGrainPairs, threads, [&](int, int64_t begin, int64_t end) {
    on_processor([&]() GAS_INLINED {
      const auto write = [&](int64_t i, const auto& g) GAS_INLINED { store(out + begin + i, g); };
      pass_gradient(grad + begin, dropped + begin, end - begin, scale, write);
    });
  });
}

template <typename T>
void norm_relu_dropout(const T* x, int64_t rows, int64_t width, const T* mean, const T* scale,
                       const T* shift, uint64_t threshold, T factor, uint64_t seed, T* relu, T* out,
                       int threads) {
  const int64_t grain = std::max<int64_t>(1, 2 * kGrainPairs / std::max<int64_t>(1, width));
  parallel_chunks(rows, grain, threads, [&](int, int64_t begin, int64_t end) {
    on_processor<Vectors::kAvx512>([&]() GAS_INLINED {
      for (int64_t first = begin * width; first < end * width; first += width) {
        drop(x + first, width, first, threshold, factor, seed, out + first,
             NormRelu<T>{x + first, mean, scale, shift, relu + first});
      }
    });
  });
}

template <typename T>
void norm_relu_dropout_sums(const T* grad, const T* dropped, const T* x, int64_t rows,
                            int64_t width, const T* mean, T factor, double* sums, int threads) {
  const int64_t blocks = (rows + kRowsInBlock - 1) / kRowsInBlock;
  std::vector<T> found(blocks * 2 * width);
  parallel_chunks(blocks, 1, threads, [&](int, int64_t begin, int64_t end) {
    on_processor([&]() GAS_INLINED {
      for (int64_t i = begin * kRowsInBlock; i < std::min(end * kRowsInBlock, rows); ++i) {
        const int64_t at = i * width;
        T *of_g = found.data() + i / kRowsInBlock * 2 * width, *of_product = of_g + width;
        pass_gradient(grad + at, dropped + at, width, factor,
                      [&](int64_t j, const auto& g) GAS_INLINED {
                        auto value = g, middle = g, sum = g, product = g;
                        read(x + at + j, value);
                        read(mean + j, middle);
                        read(of_g + j, sum);
                        read(of_product + j, product);
                        store(of_g + j, sum + g);
                        store(of_product + j, product + g * (value - middle));
                      });
      }
    });
  });
  std::fill(sums, sums + 2 * width, 0.0);
  for (size_t i = 0; i < found.size(); ++i) sums[i % (2 * width)] += found[i];
}

template <typename T>
void norm_relu_dropout_backward(const T* grad, const T* dropped, const T* x, int64_t rows,
                                int64_t width, const T* mean, const T* scale, const T* slope,
                                const T* shift, T factor, T* out, int threads) {
  const int64_t grain = std::max<int64_t>(1, 2 * kGrainPairs / std::max<int64_t>(1, width));
  parallel_chunks(rows, grain, threads, [&](int, int64_t begin, int64_t end) {
    on_processor([&]() GAS_INLINED {
      for (int64_t i = begin * width; i < end * width; i += width) {
        pass_gradient(grad + i, dropped + i, width, factor,
                      [&](int64_t j, const auto& g) GAS_INLINED {
                        auto value = g, middle = g, first = g, second = g, last = g;
                        read(x + i + j, value);
                        read(mean + j, middle);
                        read(scale + j, first);
                        read(slope + j, second);
                        read(shift + j, last);
                        store(out + i + j, g * first + (value - middle) * second + last);
                      });
      }
    });
  });
}

template <typename T>
void gather_dropout(const T* table, int64_t num_rows, int64_t width, const int64_t* index,
                    int64_t n, uint64_t threshold, T scale, uint64_t seed, T* out, int threads) {
  check_index(index, n, num_rows);
  const int64_t grain = std::max<int64_t>(1, 2 * kGrainPairs / std::max<int64_t>(1, width));
  parallel_chunks(n, grain, threads, [&](int, int64_t begin, int64_t end) {
    on_processor<Vectors::kAvx512>([&]() GAS_INLINED {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) prefetch_row(table + index[i + kAhead] * width, width);
        drop(table + index[i] * width, width, i * width, threshold, scale, seed, out + i * width);
      }
    });
  });
}

void gather_decode_dropout(Codec codec, const char* table, int64_t num_rows, int64_t width,
                           const int64_t* index, int64_t n, uint64_t threshold, float scale,
                           uint64_t seed, float* out, int threads) {
  check_index(index, n, num_rows);
  const int64_t columns = std::max<int64_t>(1, width);
  const int64_t grain = std::max<int64_t>(1, 2 * kGrainPairs / columns);
  const int64_t step = std::max<int64_t>(1, kDecodedAtOnce / columns);
  parallel_chunks(n, grain, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += step) {
      const int64_t last = std::min(first + step, end);
      decode_rows(codec, table, width, index, first, last, out);
      float* rows = out + first * width;
      on_processor<Vectors::kAvx512>([&]() GAS_INLINED {
        drop(rows, (last - first) * width, first * width, threshold, scale, seed, rows);
      });
    }
  });
}

#define GAS_FOR_TYPE(T)                                                                          \
  template void dropout(const T*, int64_t, uint64_t, T, uint64_t, T*, int);                      \
  template void relu_dropout(const T*, int64_t, uint64_t, T, uint64_t, T*, T*, int);             \
  template void relu_dropout_backward(const T*, const T*, int64_t, T, T*, int);                  \
  template void norm_relu_dropout(const T*, int64_t, int64_t, const T*, const T*, const T*,      \
                                  uint64_t, T, uint64_t, T*, T*, int);                           \
  template void norm_relu_dropout_sums(const T*, const T*, const T*, int64_t, int64_t, const T*, \
                                       T, double*, int);                                         \
  template void norm_relu_dropout_backward(const T*, const T*, const T*, int64_t, int64_t,       \
                                           const T*, const T*, const T*, const T*, T, T*, int);  \
  template void gather_dropout(const T*, int64_t, int64_t, const int64_t*, int64_t, uint64_t, T, \
                               uint64_t, T*, int);
GAS_FOR_TYPE(float)
GAS_FOR_TYPE(double)
#undef GAS_FOR_TYPE

}  // namespace gas
