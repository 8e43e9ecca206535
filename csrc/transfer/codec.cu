#include "transfer/codec.h"

#include "common/launch.cuh"

namespace gas::cuda {
namespace {

constexpr unsigned kEveryLane = 0xffffffffu;
constexpr unsigned kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr int64_t kScaleBytes = sizeof(float);

// One warp encodes a row: the largest magnitude first (the order of floats is that of their bits,
// with NaN on top), then the values.
__global__ void encode(const float* src, int64_t n, int64_t width, int64_t row_bytes, char* rows) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = int64_t{gridDim.x} * blockDim.x / kWarp;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  for (int64_t row = first; row < n; row += warps) {
    const float* x = src + row * width;
    unsigned largest = 0;
    for (int64_t i = lane; i < width; i += kWarp) {
      largest = max(largest, __float_as_uint(x[i]) & kMagnitude);
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      largest = max(largest, __shfl_xor_sync(kEveryLane, largest, step));
    }
    const float scale = __fdiv_rn(__uint_as_float(largest), 127.0f);
    const bool usable = scale > 0 && largest < kInfinity;
    char* out = rows + row * row_bytes;
    if (lane == 0) *reinterpret_cast<float*>(out) = scale;
    for (int64_t i = lane; i < row_bytes - kScaleBytes; i += kWarp) {
      int value = 0;
      if (usable && i < width) {
        value = __float2int_rn(fminf(fmaxf(__fdiv_rn(x[i], scale), -127.0f), 127.0f));
      }
      out[kScaleBytes + i] = static_cast<char>(value);
    }
  }
}

__global__ void decode(const char* rows, int64_t n, int64_t width, int64_t row_bytes, float* dst) {
  const int64_t total = n * width, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const char* row = rows + i / width * row_bytes;
    const float scale = *reinterpret_cast<const float*>(row);
    dst[i] = static_cast<float>(static_cast<signed char>(row[kScaleBytes + i % width])) * scale;
  }
}

}  // namespace

void encode_int8(const float* src, int64_t n, int64_t width, int64_t row_bytes, char* rows,
                 uintptr_t stream) {
  if (n == 0) return;
  launch("encoding rows", encode, blocks_for(n * kWarp), stream, src, n, width, row_bytes, rows);
}

void decode_int8(const char* rows, int64_t n, int64_t width, int64_t row_bytes, float* dst,
                 uintptr_t stream) {
  if (n == 0 || width == 0) return;
  launch("decoding rows", decode, blocks_for(n * width), stream, rows, n, width, row_bytes, dst);
}

}  // namespace gas::cuda
