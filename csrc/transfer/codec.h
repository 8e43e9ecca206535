// Codecs: rows of float32 in fewer bytes.
//
// Encoding rounds to nearest, ties to even. The results are those of PyTorch's conversions, bit by
// bit (a NaN stays a NaN, with a payload of its own).
#pragma once

#include <cstdint>

namespace gas {

enum class Codec {
  kBfloat16 = 1,
  kFloat16 = 2,
  // One float32 scale, then one int8 per value, then zeros up to a multiple of four bytes. The
  // scale is max |x| / 127, a value x is stored as round(x / scale), clamped to [-127, 127], and
  // read as that times the scale. A row with a NaN or an infinity is read as NaNs.
  kInt8 = 3,
};

// The bytes of a stored row of `width` values.
int64_t stored_bytes(Codec codec, int64_t width);

// Encodes `count` consecutive rows of `src` into consecutive rows.
void encode_rows(Codec codec, const float* src, int64_t width, int64_t count, char* rows);

// dst[i] <- table row index[i] for i in [begin, end). Indices are not checked.
void decode_rows(Codec codec, const char* table, int64_t width, const int64_t* index, int64_t begin,
                 int64_t end, float* dst);

namespace cuda {

// Encodes `n` consecutive rows of `width` float32 into rows of `row_bytes`, and decodes n rows:
// those at `index`, or, where it is null, the first. Indices are not checked. Everything is in
// device memory, but for encoded rows that are read, which may be in pinned host memory. Nothing
// waits for the host. At most `most_blocks` blocks of threads decode, at least one. `stream` is a
// raw cudaStream_t. Throws std::runtime_error when a launch fails.
void encode_int8(const float* src, int64_t n, int64_t width, int64_t row_bytes, char* rows,
                 uintptr_t stream);
void decode_int8(const char* rows, const int64_t* index, int64_t n, int64_t width,
                 int64_t row_bytes, float* dst, int64_t most_blocks, uintptr_t stream);

}  // namespace cuda
}  // namespace gas
