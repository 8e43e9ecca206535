// A uniform subset of exact size, without sorting.
#pragma once

#include <cstdint>

#include "common/stream.h"

namespace gas {

// drawn[i] = 1 for the k elements of [0, n) with the smallest keys random_bits(seed, i), else 0.
// With `among`, not null, only elements with among[i] != 0 take part; `count` is their number (n
// without it), and 0 <= k <= count. Keys of one seed are distinct, because SplitMix64 maps counters
// one to one: there are no ties, and the result does not depend on `threads`.
void draw_subset(int64_t n, int64_t k, uint64_t seed, const uint8_t* among, int64_t count,
                 uint8_t* drawn, int threads);

namespace cuda {

// drawn[i] = 1 for the k[0] elements of [0, n) with the smallest keys random_bits(seed, i), else 0.
// With `among`, not null, only elements with among[i] != 0 take part; 0 <= k[0] <= their number.
//
// All tables are in device memory, `k` too: nothing waits for the host. Throws std::runtime_error
// when a launch fails.
void draw_subset(int64_t n, const int64_t* k, uint64_t seed, const uint8_t* among, uint8_t* drawn,
                 const Stream& stream);

}  // namespace cuda
}  // namespace gas
