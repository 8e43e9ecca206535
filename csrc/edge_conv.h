// Sums over the edges of a function of what both ends are, element by element.
//
// For edges from sources c to a destination r:
//   out[r] = sum of act(target[r] + source[c]), divided by their number if `mean` (zero for none).
//
// Nothing of the size of the edges is stored: backward computes the activation's derivative again.
// The gradient towards target[r] is the one towards out[r] times the sum of act', element by
// element; forward adds that sum up beside the rest, so that it needs no pass of its own.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace gas {

enum class Activation { kRelu, kLeakyRelu, kElu, kSigmoid, kTanh };

struct EdgeConv {
  Activation activation;
  double parameter;  // The leaky ReLU's slope below zero, ELU's alpha.
  int64_t width;
  bool mean;
};

// `slope` receives the sum (or mean) of act' of each element; null if no gradient is wanted.
template <typename T>
void edge_conv(const Sparse& matrix, const EdgeConv& how, const T* target, const T* source, T* out,
               T* slope, int threads);

// The gradient towards the sources, given the transpose and the gradient towards the sum:
// out[c] = sum of grad[r] * act'(target[r] + source[c]) over the edges c -> r.
template <typename T>
void edge_conv_backward(const Sparse& transposed, const EdgeConv& how, const T* target,
                        const T* source, const T* grad, T* out, int threads);

}  // namespace gas
