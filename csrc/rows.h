// Moving rows of a table by index. Rows are bytes, so every element type works.
#pragma once

#include <cstdint>

namespace gas {

// dst[i] = src[index[i]] for i in [0, n). Throws std::out_of_range before anything is written.
void gather_rows(const char* src, int64_t src_rows, int64_t row_bytes, const int64_t* index,
                 int64_t n, char* dst, int threads);

// dst[index[i]] = src[i] for i in [0, n). Throws std::out_of_range before anything is written.
// With repeated indices one of the rows wins, whole; which one is unspecified.
void scatter_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                  int64_t dst_rows, int threads);

}  // namespace gas
