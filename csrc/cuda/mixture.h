// The sums of csrc/mixture.h on a CUDA device: the same results to rounding, and the same in every
// run.
#pragma once

#include <cstdint>

#include "../mixture.h"
#include "stream.h"

namespace gas::cuda {

// All tables are in device memory, `entries` is the number of entries of the matrix. Nothing waits
// for the host, and columns are not checked. Each function throws std::runtime_error when a launch
// fails.
template <typename T>
void mixture_spread(const Sparse& matrix, int64_t entries,
                    const Mixture<typename Sum<T>::type>& mixture, const T* x, int64_t width,
                    bool mean, T* out, const Stream& stream);

template <typename T>
void mixture_collapse(const Sparse& matrix, int64_t entries,
                      const Mixture<typename Sum<T>::type>& mixture, const T* x, int64_t width,
                      bool mean, T* out, const Stream& stream);

// Without rows or columns nothing is launched that would write grad.mu and grad.sigma: they stay as
// they are.
template <typename T>
void mixture_backward(const Sparse& matrix, int64_t entries,
                      const Mixture<typename Sum<T>::type>& mixture, const T* own, const T* other,
                      int64_t width, T* out, const MixtureGrad<typename Sum<T>::type>& grad,
                      const Stream& stream);

}  // namespace gas::cuda
