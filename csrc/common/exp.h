// Exponentials of numbers at most zero, by instructions that work on vectors, and on devices.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/simd.h"

namespace gas {

template <typename A>
struct SplitExp {
  A power, rest;
};

// exp(x) = power * (1 + rest), with `power` a power of two and `rest` in about [-0.3, 0.42]: a
// polynomial (Cephes). The large constant rounds to a whole number. x is at most 0, or NaN.
GAS_HOST_DEVICE GAS_INLINE SplitExp<float> split_exp(float x) {
  constexpr float kRound = 12582912.0f, kLog2e = 1.44269504f;
  x = x < -87.0f ? -87.0f : x;
  const float n = (x * kLog2e + kRound) - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return {power, p * r * r + r};
}

// exp(x) for x <= 0, to 2 units in the last place; no less than exp(-87) on the CPU.
GAS_HOST_DEVICE GAS_INLINE float exp_of(float x) {
#ifdef __CUDA_ARCH__
  return expf(x);
#else
  const SplitExp<float> split = split_exp(x);
  return split.power * (split.rest + 1.0f);
#endif
}
GAS_HOST_DEVICE GAS_INLINE double exp_of(double x) { return std::exp(x); }

// exp(x) and exp(x) - 1 for x <= 0, the latter as precise near 0.
GAS_HOST_DEVICE GAS_INLINE void exp_and_less(float x, float& exp, float& less) {
  const SplitExp<float> split = split_exp(x);
  exp = split.power * (split.rest + 1.0f);
  less = split.power * split.rest + (split.power - 1.0f);
}
GAS_HOST_DEVICE GAS_INLINE void exp_and_less(double x, double& exp, double& less) {
  exp = std::exp(x);
  less = std::expm1(x);
}

}  // namespace gas
