// A uniform subset of exact size, without sorting.
#pragma once

#include <cstdint>

namespace gas {

// drawn[i] = 1 for the k elements of [0, n) with the smallest keys random_bits(seed, i), else 0.
// With `among`, not null, only elements with among[i] != 0 take part; `count` is their number (n
// without it), and 0 <= k <= count. Keys of one seed are distinct, because SplitMix64 maps counters
// one to one: there are no ties, and the result does not depend on `threads`.
void draw_subset(int64_t n, int64_t k, uint64_t seed, const uint8_t* among, int64_t count,
                 uint8_t* drawn, int threads);

}  // namespace gas
