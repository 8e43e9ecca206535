#include "transfer/codec.h"

#include "common/launch.cuh"
#include "transfer/team.cuh"

namespace gas::cuda {
namespace {

constexpr unsigned kEveryLane = 0xffffffffu;
constexpr unsigned kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr int64_t kScaleBytes = sizeof(float);

// A stored row is a scale and words of four values each; rows are as aligned as their scales.
constexpr int kValues = 4;
struct alignas(4) Word {
  signed char value[kValues];
};
struct alignas(16) Four {
  float value[kValues];
};

bool aligned(const float* x, int64_t width) {
  return width % kValues == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(Four) == 0;
}

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
    for (int64_t i = lane; i < (row_bytes - kScaleBytes) / kValues; i += kWarp) {
      Word word{};
      for (int k = 0; k < kValues; ++k) {
        const int64_t at = i * kValues + k;
        if (!usable || at >= width) break;
        const float quotient = fminf(fmaxf(__fdiv_rn(x[at], scale), -127.0f), 127.0f);
        word.value[k] = static_cast<signed char>(__float2int_rn(quotient));
      }
      reinterpret_cast<Word*>(out + kScaleBytes)[i] = word;
    }
  }
}

// A team of 2^shift lanes decodes a row, a lane four values at a time. Without `index`, rows follow
// one another.
template <bool kAligned>
__global__ void decode(const char* __restrict__ rows, const int64_t* __restrict__ index, int64_t n,
                       int64_t width, int64_t row_bytes, int shift, float* __restrict__ dst) {
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  const int64_t teams = (int64_t{gridDim.x} * blockDim.x) >> shift;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> shift;
  for (int64_t row = first; row < n; row += teams) {
    const char* from = rows + (index == nullptr ? row : index[row]) * row_bytes;
    const float scale = *reinterpret_cast<const float*>(from);
    float* to = dst + row * width;
    for (int64_t i = lane; i * kValues < width; i += lanes) {
      const Word word = reinterpret_cast<const Word*>(from + kScaleBytes)[i];
      Four four;
      for (int k = 0; k < kValues; ++k) four.value[k] = static_cast<float>(word.value[k]) * scale;
      if constexpr (kAligned) {
        reinterpret_cast<Four*>(to)[i] = four;
      } else {
        for (int k = 0; k < kValues; ++k) {
          if (i * kValues + k < width) to[i * kValues + k] = four.value[k];
        }
      }
    }
  }
}

}  // namespace

void encode_int8(const float* src, int64_t n, int64_t width, int64_t row_bytes, char* rows,
                 uintptr_t stream) {
  if (n == 0) return;
  launch("encoding rows", encode, blocks_for(n * kWarp), stream, src, n, width, row_bytes, rows);
}

void decode_int8(const char* rows, const int64_t* index, int64_t n, int64_t width,
                 int64_t row_bytes, float* dst, int64_t most_blocks, uintptr_t stream) {
  if (n == 0 || width == 0) return;
  const int shift = team_shift((width + kValues - 1) / kValues);
  const int64_t blocks = std::min(blocks_for(n << shift), most_blocks);
  launch("decoding rows", aligned(dst, width) ? decode<true> : decode<false>, blocks, stream, rows,
         index, n, width, row_bytes, shift, dst);
}

}  // namespace gas::cuda
