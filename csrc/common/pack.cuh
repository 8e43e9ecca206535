// Some numbers that a lane of a CUDA device reads and writes at once.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "common/launch.cuh"

namespace gas::cuda {

constexpr int kVectorBytes = 16;  // The widest load of a lane.

template <typename T, int V>
struct alignas(sizeof(T) * V < kVectorBytes ? sizeof(T) * V : kVectorBytes) Pack {
  T v[V];
};

template <int V, typename T>
__device__ Pack<T, V> read(const T* at) {
  return *reinterpret_cast<const Pack<T, V>*>(at);
}

template <typename T, int V>
__device__ void write(T* at, const Pack<T, V>& values) {
  *reinterpret_cast<Pack<T, V>*>(at) = values;
}

// Calls body(V), a compile-time number of columns for a lane: as many as a load can take if rows of
// `width` columns and all tables are aligned to that, else one.
template <typename T, typename Body>
void with_vectors(int64_t width, std::initializer_list<const void*> tables, const Body& body) {
  constexpr int kMost = kVectorBytes / sizeof(T);
  bool aligned = width % kMost == 0;
  for (const void* table : tables) {
    aligned = aligned && reinterpret_cast<uintptr_t>(table) % kVectorBytes == 0;
  }
  if (aligned) {
    body(std::integral_constant<int, kMost>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

}  // namespace gas::cuda
