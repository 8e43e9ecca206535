// A counter-based generator: every element's random number follows from a seed and its position,
// so that a backward pass can draw it again and threads need no order.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace gas {

// Turns counters, one or a vector of them, into 64 bits for a pair of elements each (splitmix64).
template <typename Words>
GAS_HOST_DEVICE inline void draw_bits(uint64_t seed, Words& z) {
  z = (z + 1) * 0x9e3779b97f4a7c15ULL + seed;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  z ^= z >> 31;
}

GAS_HOST_DEVICE inline uint64_t random_bits(uint64_t seed, uint64_t counter) {
  draw_bits(seed, counter);
  return counter;
}

// Returns true if dropout keeps an element; `threshold` is the dropout probability times 2^32.
GAS_HOST_DEVICE inline bool is_kept(uint64_t seed, uint64_t element, uint64_t threshold) {
  const uint64_t bits = random_bits(seed, element / 2);
  return (element % 2 == 0 ? bits & 0xffffffffULL : bits >> 32) >= threshold;
}

}  // namespace gas
