// An activation and its derivative, on the CPU and on devices.
#pragma once

#include "edge_conv.h"
#include "exp.h"
#include "host_device.h"

namespace gas {

// Comparisons are such that NaN stays NaN.
template <Activation F, typename A>
GAS_HOST_DEVICE GAS_INLINE void activate(A x, A parameter, A& value, A& slope) {
  if constexpr (F == Activation::kRelu) {
    value = x < A{0} ? A{0} : x;
    slope = x > A{0} ? A{1} : A{0};
  } else if constexpr (F == Activation::kLeakyRelu) {
    slope = x > A{0} ? A{1} : parameter;
    value = x * slope;
  } else if constexpr (F == Activation::kElu) {
    A power, less;
    exp_and_less(x > A{0} ? A{0} : x, power, less);
    value = x > A{0} ? x : parameter * less;
    slope = x > A{0} ? A{1} : parameter * power;
  } else if constexpr (F == Activation::kSigmoid) {
    const A power = exp_of(x > A{0} ? -x : x), scale = A{1} / (A{1} + power);
    value = (x > A{0} ? A{1} : power) * scale;
    slope = power * scale * scale;
  } else {
    A power, less;
    exp_and_less(A{-2} * (x > A{0} ? x : -x), power, less);
    const A scale = A{1} / (A{1} + power);
    value = (x > A{0} ? -less : less) * scale;
    slope = A{4} * power * scale * scale;
  }
}

}  // namespace gas
