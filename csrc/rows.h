// Moving rows of a table by index. Rows are bytes, so every element type works.
#pragma once

#include <cstdint>

namespace gas {

// Throws std::out_of_range, naming the culprit, unless every index is in [0, rows).
void check_index(const int64_t* index, int64_t n, int64_t rows);

// How many rows make a piece of work that is worth a thread.
int64_t grain_rows(int64_t row_bytes);

// dst[i] = src[index[i]] for i in [begin, end). Indices are not checked.
void gather_range(const char* src, int64_t row_bytes, const int64_t* index, int64_t begin,
                  int64_t end, char* dst);

// dst[i] = src[index[i]] for i in [0, n). Throws std::out_of_range before anything is written.
void gather_rows(const char* src, int64_t src_rows, int64_t row_bytes, const int64_t* index,
                 int64_t n, char* dst, int threads);

}  // namespace gas
