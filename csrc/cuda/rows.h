// Moving rows of a table by index on a CUDA device, ordered by a stream alone.
#pragma once

#include <cstdint>

namespace gas::cuda {

// dst[i] = src[index[i]] and dst[index[i]] = src[i] for i in [0, n).
//
// `index` and one of the tables are in device memory; the other table may be pinned host memory,
// whose rows then cross the bus directly. Nothing waits for the host and indices are not checked
// here: the loader checks them when it makes them. `stream` is a raw cudaStream_t. Throws
// std::runtime_error when a launch fails.
void gather_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                 uintptr_t stream);
void scatter_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                  uintptr_t stream);

}  // namespace gas::cuda
