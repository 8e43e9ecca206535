// Products of a sparse matrix in compressed rows with a dense one, and what their gradients need.
//
// Rows are destinations. Gradients towards the sources walk the transpose, so that every row of
// every result is added up in one order, by one thread or in pieces that follow from the matrix:
// there are no atomics, and results don't depend on the number of threads.
#pragma once

#include <cstdint>

#include "common/matrix.h"
#include "common/stream.h"

namespace gas {

// Rows of features. The first `num_own` are in `own`, one after the other; row num_own + i is row
// place[i] of the table `other`, for i < num_other: the halo of a batch, in a history. Without
// places it is row i.
template <typename T>
struct Rows {
  const T* own;
  int64_t num_own;
  const T* other;        // Null if all rows are in `own`.
  const int64_t* place;  // [num_other] or null
  int64_t num_other;
};

template <typename T>
Rows<T> in_one_table(const T* x) {
  return {x, 0, nullptr, nullptr, 0};
}

// out[r] = sum of weight[e] * x[col[e]] over the entries e of row r, divided by their number if
// `mean` (zero for none). `weight` may be null: then it is 1. x and out are `width` wide.
template <typename T>
void multiply(const Sparse& matrix, const T* weight, const Rows<T>& x, int64_t width, bool mean,
              T* out, int threads);

// out[e] = <a[r], b[col[e]]> for the entries e of each row r: the gradient towards weights.
template <typename T>
void dot_rows(const Sparse& matrix, const T* a, const T* b, int64_t width, T* out, int threads);

// On a CUDA device, where all tables are: the same to rounding, and the same in every run. Nothing
// waits for the host, and columns are not checked. Throws std::runtime_error when a launch fails.
namespace cuda {

template <typename T>
void multiply(const Sparse& matrix, const T* weight, const Rows<T>& x, int64_t width, bool mean,
              T* out, const Stream& stream);

template <typename T>
void dot_rows(const Sparse& matrix, const T* a, const T* b, int64_t width, T* out,
              const Stream& stream);

}  // namespace cuda
}  // namespace gas
