// The subsets of csrc/subset.h on a CUDA device: the same elements.
#pragma once

#include <cstdint>

#include "stream.h"

namespace gas::cuda {

// drawn[i] = 1 for the k[0] elements of [0, n) with the smallest keys random_bits(seed, i), else 0.
// With `among`, not null, only elements with among[i] != 0 take part; 0 <= k[0] <= their number.
//
// All tables are in device memory, `k` too: nothing waits for the host. Throws std::runtime_error
// when a launch fails.
void draw_subset(int64_t n, const int64_t* k, uint64_t seed, const uint8_t* among, uint8_t* drawn,
                 const Stream& stream);

}  // namespace gas::cuda
