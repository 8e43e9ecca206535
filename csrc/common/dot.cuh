// Dot products of one row with others, by the lanes of a team together.
#pragma once

#include <cstdint>

#include "common/columns.cuh"
#include "common/pack.cuh"
#include "common/simd.h"

namespace gas::cuda {

template <typename T, int V>
__device__ typename Sum<T>::type dot_of(const Pack<T, V>& a, const Pack<T, V>& b) {
  typename Sum<T>::type sum = 0;
  for (int j = 0; j < V; ++j) sum += load(a.v[j]) * load(b.v[j]);
  return sum;
}

// found[i] = <a, b[col[min(e + i, end - 1)]]>, rows of `width` that a team reads together; every
// lane gets them all.
template <int V, typename T>
__device__ void dot_ahead(const Lane& lane, int team, int64_t width, const T* a, const T* b,
                          const int32_t* col, uint32_t e, uint32_t end,
                          typename Sum<T>::type (&found)[kAhead]) {
  for (auto& sum : found) sum = 0;
  for (int64_t at = lane.rank * V; at < width; at += team * V) {
    const Pack<T, V> left = read<V>(a + at);
    Pack<T, V> right[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) right[i] = read<V>(b + col[min(e + i, end - 1)] * width + at);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) found[i] += dot_of(left, right[i]);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) found[i] = sum_of_lanes(lane.mask, team, found[i]);
}

}  // namespace gas::cuda
