// Vectors of numbers, where compilers don't find them in loops by themselves.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/simd.h"

namespace gas {

// 32 bytes, in one register or two. Handed over by reference: how a call does it otherwise depends
// on the processor.
template <typename A>
struct Vector {
  static constexpr int kLanes = 32 / sizeof(A);
  typedef A type __attribute__((vector_size(32)));
};

template <typename T>
GAS_INLINE void load(const T* from, typename Vector<T>::type& to) {
  std::memcpy(&to, from, sizeof to);
}
GAS_INLINE void load(const bfloat16* from, typename Vector<float>::type& to) {
  typedef uint16_t Halves __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  std::memcpy(&to, &words, sizeof to);
}

template <typename A>
GAS_INLINE void store(A* to, const typename Vector<A>::type& from) {
  std::memcpy(to, &from, sizeof from);
}

}  // namespace gas
