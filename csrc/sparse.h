// Products of a sparse matrix in compressed rows with a dense one, and what their gradients need.
//
// Rows are destinations. Gradients towards the sources walk the transpose, so that every row of
// every result is added up in one order, by one thread or in pieces that follow from the matrix
// (hubs.h): there are no atomics, and results don't depend on the number of threads.
#pragma once

#include <cstdint>

#include "matrix.h"

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

enum class Extreme { kMax, kMin };

// Writes the transpose: for each of `num_cols` columns its entries in increasing order of rows. Those
// from `kept` on are left out, as if they had no entries.
//   out_rowptr: [num_cols + 1], out_col and out_entry: [entries] or as many as are kept.
// Throws std::out_of_range for a column outside [0, num_cols), before anything is written.
void transpose(const Sparse& matrix, int64_t num_cols, int64_t kept, int32_t* out_rowptr,
               int32_t* out_col, int32_t* out_entry, int threads);

// out[r] = sum of weight[e] * x[col[e]] over the entries e of row r, divided by their number if
// `mean` (zero for none). `weight` may be null: then it is 1. x and out are `width` wide.
template <typename T>
void multiply(const Sparse& matrix, const T* weight, const Rows<T>& x, int64_t width, bool mean,
              T* out, int threads);

// out[r] = the largest (or smallest) of x[col[e]], element by element, zero for an empty row;
// from[r] is the entry that it came from, the first of equals, or -1.
template <typename T>
void extreme(const Sparse& matrix, Extreme which, const T* x, int64_t width, T* out, int32_t* from,
             int threads);

// The gradient of `extreme` towards x, given the transpose and the gradient towards out:
// out[c] = sum of grad[col[e]] where from[col[e]] is e's entry.
template <typename T>
void extreme_backward(const Sparse& transposed, const T* grad, const int32_t* from, int64_t width,
                      T* out, int threads);

// out[e] = <a[r], b[col[e]]> for the entries e of each row r: the gradient towards weights.
template <typename T>
void dot_rows(const Sparse& matrix, const T* a, const T* b, int64_t width, T* out, int threads);

}  // namespace gas
