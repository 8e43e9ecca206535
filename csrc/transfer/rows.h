// Moving rows of a table by index. Rows are bytes, so every element type works.
#pragma once

#include <cstdint>

namespace gas {

// Throws std::out_of_range, naming the culprit, unless every index is in [0, rows).
void check_index(const int64_t* index, int64_t n, int64_t rows);

// Number of rows that are worth a thread.
int64_t grain_rows(int64_t row_bytes);

// dst[i] = src[index[i]] for i in [begin, end). Indices are not checked.
void gather_range(const char* src, int64_t row_bytes, const int64_t* index, int64_t begin,
                  int64_t end, char* dst);

// dst[i] = src[index[i]] for i in [0, n). Throws std::out_of_range before anything is written.
void gather_rows(const char* src, int64_t src_rows, int64_t row_bytes, const int64_t* index,
                 int64_t n, char* dst, int threads);

namespace cuda {

// dst[i] = src[index[i]] and dst[index[i]] = src[i] for i in [0, n).
//
// `index` and one of the tables are in device memory; the other table may be pinned host memory,
// whose rows then cross the bus directly. Nothing waits for the host and indices are not checked
// here: the loader checks them when it makes them. At most `most_blocks` blocks of threads run, at
// least one: those that read over the bus wait most of the time, and would keep others from every
// multiprocessor. `stream` is a raw cudaStream_t. Throws std::runtime_error when a launch fails.
void gather_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                 int64_t most_blocks, uintptr_t stream);
void scatter_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                  int64_t most_blocks, uintptr_t stream);

}  // namespace cuda
}  // namespace gas
