// What attention computes for an edge, on the CPU and on devices.
#pragma once

#include <cstdint>

#include "attention.h"
#include "random.h"

namespace gas {

template <typename A>
GAS_HOST_DEVICE GAS_INLINE A leaky(A x, A slope) {
  return x > A{0} ? x : x * slope;
}

// The factor of dropout.
template <typename A>
GAS_HOST_DEVICE GAS_INLINE A kept(const Attention& how, int64_t entry, int64_t head) {
  if (how.threshold == 0) return A{1};
  const auto element = static_cast<uint64_t>(entry * how.heads + head);
  return is_kept(how.seed, element, how.threshold) ? static_cast<A>(how.keep) : A{0};
}

}  // namespace gas
