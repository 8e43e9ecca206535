// The int8 codec of codec.h on a CUDA device.
#pragma once

#include <cstdint>

namespace gas::cuda {

// Encodes `n` consecutive rows of `width` float32 into rows of `row_bytes`, and back. Everything is
// in device memory; nothing waits for the host. `stream` is a raw cudaStream_t. Throws
// std::runtime_error when a launch fails.
void encode_int8(const float* src, int64_t n, int64_t width, int64_t row_bytes, char* rows,
                 uintptr_t stream);
void decode_int8(const char* rows, int64_t n, int64_t width, int64_t row_bytes, float* dst,
                 uintptr_t stream);

}  // namespace gas::cuda
