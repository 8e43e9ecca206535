// Gradients against differences of the definition, which a test gives as expected(c).
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

#include "check.h"

using Numbers = std::vector<double>;

// Draws n numbers, evenly from [-bound, bound).
inline Numbers numbers(int64_t n, std::mt19937& random, double bound = 1) {
  Numbers x(n);
  for (double& v : x) v = bound * (static_cast<double>(random()) / 2147483648.0 - 1.0);
  return x;
}

inline bool near(double a, double b, double tolerance) {
  return std::abs(a - b) <= tolerance * (1 + std::abs(b));
}

// The sum whose gradient, for the output, is grad.
template <typename Case>
double loss(const Case& c, const Numbers& grad) {
  const Numbers out = expected(c);
  double sum = 0;
  for (size_t i = 0; i < out.size(); ++i) sum += out[i] * grad[i];
  return sum;
}

// Compares gradients with differences of the loss, for about `tries` numbers of every input.
// inputs: an array of c, and its gradient.
template <typename Case>
void check_gradients(Case& c, const Numbers& grad,
                     std::initializer_list<std::pair<Numbers*, const Numbers*>> inputs, int tries,
                     double step, double tolerance) {
  for (const auto& [values, found] : inputs) {
    for (size_t i = 0; i < values->size(); i += 1 + values->size() / tries) {
      const double before = (*values)[i];
      (*values)[i] = before + step;
      const double above = loss(c, grad);
      (*values)[i] = before - step;
      const double below = loss(c, grad);
      (*values)[i] = before;
      CHECK(near((*found)[i], (above - below) / (2 * step), tolerance));
    }
  }
}
