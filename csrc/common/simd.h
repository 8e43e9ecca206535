// The types that operators read, and what compilers need to know to make vectors of loops.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

// Functions called by code for a processor are inlined into it (processor.h). `static`: with
// external linkage, gcc made vectors of fewer loops (attention's backward took 1.3 to 3 times as
// long).
#define GAS_INLINE static inline __attribute__((always_inline))
#define GAS_INLINED __attribute__((always_inline))  // Of a lambda, after its parameters.

// Before a short loop of fixed length: gcc would unroll it first, and then no longer see vectors in
// what chooses between numbers (3 to 20 times slower).
#if defined(__GNUC__) && !defined(__clang__)
#define GAS_VECTOR_LOOP _Pragma("GCC unroll 1")
#else
#define GAS_VECTOR_LOOP
#endif

// Before a loop of which no iteration reads or writes what another writes. Where arrays come from
// containers, gcc forgets now and then that they don't overlap, and has too many pairs to compare.
#if defined(__GNUC__) && !defined(__clang__)
#define GAS_INDEPENDENT_LOOP _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#else
#define GAS_INDEPENDENT_LOOP
#endif

namespace gas {

struct bfloat16 {
  uint16_t bits;
};

// The type to add up in: bfloat16 is for storage alone.
template <typename T>
struct Sum {
  using type = T;
};
template <>
struct Sum<bfloat16> {
  using type = float;
};

GAS_HOST_DEVICE GAS_INLINE float load(float x) { return x; }
GAS_HOST_DEVICE GAS_INLINE double load(double x) { return x; }
GAS_HOST_DEVICE GAS_INLINE float load(bfloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

GAS_HOST_DEVICE GAS_INLINE void store(float* at, float x) { *at = x; }
GAS_HOST_DEVICE GAS_INLINE void store(double* at, double x) { *at = x; }
GAS_HOST_DEVICE GAS_INLINE void store(bfloat16* at, float x) {  // To the nearest, ties to even.
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  at->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

}  // namespace gas
