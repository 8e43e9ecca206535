// Dropout from a counter-based generator: any element's fate can be drawn again, in any order.
#pragma once

#include <cstdint>

namespace gas {

// out[i] = x[i] * (keep(seed, i) ? scale : 0) for i in [0, n). Element i is kept when its 32 random
// bits are at least `threshold`, which is 2^32 times the probability of dropping. The result does
// not depend on `threads`. Bits: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of the counter i / 2,
// the low half for even i, the high half for odd i.
template <typename T>
void dropout(const T* x, int64_t n, uint64_t threshold, T scale, uint64_t seed, T* out,
             int threads);

}  // namespace gas
