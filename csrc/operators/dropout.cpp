#include "operators/dropout.h"

#include <cstring>

#include "common/parallel.h"
#include "common/processor.h"
#include "common/random.h"
#include "common/vector.h"

namespace gas {
namespace {

constexpr int64_t kGrainPairs = 8 * 1024;

// Picks the factor by table: a branch on random bits would be mispredicted every other time.
template <typename T>
inline void drop_pairs(const T* x, int64_t begin, int64_t end, uint64_t threshold, T scale,
                       uint64_t seed, T* out) {
  const T factor[2] = {T{0}, scale};
  for (int64_t pair = begin; pair < end; ++pair) {
    const uint64_t bits = random_bits(seed, pair);
    out[2 * pair] = x[2 * pair] * factor[(bits & 0xffffffffULL) >= threshold];
    out[2 * pair + 1] = x[2 * pair + 1] * factor[(bits >> 32) >= threshold];
  }
}

// The same in vectors, which compilers don't find; a pair's halves are in the order of its elements.
// (Measured: 1.3 times as fast with AVX2, 2.7 times with AVX-512.)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

GAS_INLINE void drop_vectors(const float* x, int64_t begin, int64_t end, uint32_t threshold,
                             float scale, uint64_t seed, float* out) {
  typedef uint64_t Pairs __attribute__((vector_size(32)));
  typedef uint32_t Halves __attribute__((vector_size(32)));
  uint32_t scale_bits;
  std::memcpy(&scale_bits, &scale, sizeof scale);
  const uint64_t first = begin;
  Pairs pairs = {first, first + 1, first + 2, first + 3};
  int64_t pair = begin;
  for (; pair + 4 <= end; pair += 4, pairs += 4) {
    Pairs bits = pairs;
    draw_bits(seed, bits);
    Halves halves;
    std::memcpy(&halves, &bits, sizeof halves);
    const Halves kept = reinterpret_cast<Halves>(halves >= threshold) & scale_bits;
    Vector<float>::type factor, values;
    std::memcpy(&factor, &kept, sizeof factor);
    load(x + 2 * pair, values);
    store(out + 2 * pair, values * factor);
  }
  drop_pairs(x, pair, end, threshold, scale, seed, out);
}

void drop(const float* x, int64_t begin, int64_t end, uint64_t threshold, float scale,
          uint64_t seed, float* out) {
  if (threshold > 0xffffffffULL) return drop_pairs(x, begin, end, threshold, scale, seed, out);
  // With AVX-512, processors multiply integers of 64 bits at once.
  on_processor<Vectors::kAvx512>([&]() GAS_INLINED {
    drop_vectors(x, begin, end, static_cast<uint32_t>(threshold), scale, seed, out);
  });
}
void drop(const double* x, int64_t begin, int64_t end, uint64_t threshold, double scale,
          uint64_t seed, double* out) {
  drop_pairs(x, begin, end, threshold, scale, seed, out);
}

}  // namespace

template <typename T>
void dropout(const T* x, int64_t n, uint64_t threshold, T scale, uint64_t seed, T* out,
             int threads) {
  parallel_chunks(n / 2, kGrainPairs, threads, [&](int, int64_t begin, int64_t end) {
    drop(x, begin, end, threshold, scale, seed, out);
  });
  if (n % 2 == 1) {
    const bool keep = (random_bits(seed, n / 2) & 0xffffffffULL) >= threshold;
    out[n - 1] = x[n - 1] * (keep ? scale : T{0});
  }
}

template void dropout(const float*, int64_t, uint64_t, float, uint64_t, float*, int);
template void dropout(const double*, int64_t, uint64_t, double, uint64_t, double*, int);

}  // namespace gas
