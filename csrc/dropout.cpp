#include "dropout.h"

#include "parallel.h"
#include "random.h"

namespace gas {
namespace {

constexpr int64_t kGrainPairs = 8 * 1024;

// Picks the factor by table: a branch on random bits would be mispredicted every other time.
template <typename T>
inline void drop_pairs(const T* x, int64_t begin, int64_t end, uint64_t threshold,
                       const T* factor, uint64_t seed, T* out) {
  for (int64_t pair = begin; pair < end; ++pair) {
    const uint64_t bits = random_bits(seed, pair);
    out[2 * pair] = x[2 * pair] * factor[(bits & 0xffffffffULL) >= threshold];
    out[2 * pair + 1] = x[2 * pair + 1] * factor[(bits >> 32) >= threshold];
  }
}

}  // namespace

template <typename T>
void dropout(const T* x, int64_t n, uint64_t threshold, T scale, uint64_t seed, T* out,
             int threads) {
  const T factor[2] = {T{0}, scale};
  parallel_chunks(n / 2, kGrainPairs, threads, [&](int, int64_t begin, int64_t end) {
    drop_pairs(x, begin, end, threshold, factor, seed, out);
  });
  if (n % 2 == 1) {
    out[n - 1] = x[n - 1] * factor[(random_bits(seed, n / 2) & 0xffffffffULL) >= threshold];
  }
}

template void dropout(const float*, int64_t, uint64_t, float, uint64_t, float*, int);
template void dropout(const double*, int64_t, uint64_t, double, uint64_t, double*, int);

}  // namespace gas
