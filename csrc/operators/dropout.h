// Dropout from a counter-based generator: any element's fate can be drawn again, in any order.
#pragma once

#include <cstdint>

#include "transfer/codec.h"

namespace gas {

// out[i] = x[i] * (keep(seed, i) ? scale : 0) for i in [0, n). Element i is kept when its 32 random
// bits are at least `threshold`, which is 2^32 times the probability of dropping. The result does
// not depend on `threads`. Bits: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) of the counter i / 2,
// the low half for even i, the high half for odd i.
template <typename T>
void dropout(const T* x, int64_t n, uint64_t threshold, T scale, uint64_t seed, T* out,
             int threads);

// relu[i] = max(x[i], 0), which keeps NaN, and dropout of that, in one pass.
template <typename T>
void relu_dropout(const T* x, int64_t n, uint64_t threshold, T scale, uint64_t seed, T* relu,
                  T* out, int threads);

// The gradient towards x: out[i] = dropped[i] == 0 ? 0 : grad[i] * scale, where `dropped` is what
// relu_dropout wrote to `out` and no random number is drawn again.
template <typename T>
void relu_dropout_backward(const T* grad, const T* dropped, int64_t n, T scale, T* out,
                           int threads);

// relu_dropout of (x - mean) * scale + shift, which a batch norm makes of its input; `factor` is
// what kept elements are multiplied by.
template <typename T>
void norm_relu_dropout(const T* x, int64_t rows, int64_t width, const T* mean, const T* scale,
                       const T* shift, uint64_t threshold, T factor, uint64_t seed, T* relu, T* out,
                       int threads);

// The sums of each column of g, which is relu_dropout_backward of `grad`, and then those of
// g * (x - mean). Rows are added up in one order for any number of threads.
template <typename T>
void norm_relu_dropout_sums(const T* grad, const T* dropped, const T* x, int64_t rows,
                            int64_t width, const T* mean, T factor, double* sums, int threads);

// out = g * scale + (x - mean) * slope + shift: the gradient towards x, where the mean and the
// variance depend on x as well.
template <typename T>
void norm_relu_dropout_backward(const T* grad, const T* dropped, const T* x, int64_t rows,
                                int64_t width, const T* mean, const T* scale, const T* slope,
                                const T* shift, T factor, T* out, int threads);

// The same as dropout of the rows index[0], ..., index[n - 1] of a table, one after the other, in
// one pass.
// Throws std::out_of_range for a row outside [0, num_rows), before anything is written.
template <typename T>
void gather_dropout(const T* table, int64_t num_rows, int64_t width, const int64_t* index,
                    int64_t n, uint64_t threshold, T scale, uint64_t seed, T* out, int threads);

// The same of a table of encoded rows, which are `width` wide when they are decoded.
void gather_decode_dropout(Codec codec, const char* table, int64_t num_rows, int64_t width,
                           const int64_t* index, int64_t n, uint64_t threshold, float scale,
                           uint64_t seed, float* out, int threads);

}  // namespace gas
