// Sums over the edges of a function of what both ends are, element by element.
//
// For edges from sources c to a destination r:
//   out[r] = sum of act(target[r] + source[c]), divided by their number if `mean` (zero for none).
//
// Nothing of the size of the edges is stored: backward computes the activation's derivative again.
// The gradient towards target[r] is the one towards out[r] times the sum of act', element by
// element; forward adds that sum up in the same pass, so that it needs no pass of its own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/exp.h"
#include "common/matrix.h"
#include "common/stream.h"

namespace gas {

enum class Activation { kRelu, kLeakyRelu, kElu, kSigmoid, kTanh };

struct EdgeConv {
  Activation activation;
  double parameter;  // The leaky ReLU's slope below zero, ELU's alpha.
  int64_t width;
  bool mean;
};

// An activation and its derivative. Comparisons are such that NaN stays NaN.
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

// Calls body(F), with the activation known when compiling.
template <typename Body>
GAS_HOST_DEVICE GAS_INLINE void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kRelu: return body(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kLeakyRelu:
      return body(std::integral_constant<Activation, Activation::kLeakyRelu>());
    case Activation::kElu: return body(std::integral_constant<Activation, Activation::kElu>());
    case Activation::kSigmoid:
      return body(std::integral_constant<Activation, Activation::kSigmoid>());
    case Activation::kTanh: return body(std::integral_constant<Activation, Activation::kTanh>());
  }
}

// `slope` receives the sum (or mean) of act' of each element; null if no gradient is wanted.
template <typename T>
void edge_conv(const Sparse& matrix, const EdgeConv& how, const T* target, const T* source, T* out,
               T* slope, int threads);

// The gradient towards the sources, given the transpose and the gradient towards the sum:
// out[c] = sum of grad[r] * act'(target[r] + source[c]) over the edges c -> r.
template <typename T>
void edge_conv_backward(const Sparse& transposed, const EdgeConv& how, const T* target,
                        const T* source, const T* grad, T* out, int threads);

// On a CUDA device, where all tables are: the same to rounding, and the same in every run. Nothing
// waits for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
namespace cuda {

template <typename T>
void edge_conv(const Sparse& matrix, const EdgeConv& how, const T* target, const T* source, T* out,
               T* slope, const Stream& stream);

template <typename T>
void edge_conv_backward(const Sparse& transposed, const EdgeConv& how, const T* target,
                        const T* source, const T* grad, T* out, const Stream& stream);

}  // namespace cuda
}  // namespace gas
