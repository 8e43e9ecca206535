#include "transfer/codec.h"

#include <cstring>

#include "common/prefetch.h"
#include "common/processor.h"
#include "common/simd.h"

namespace gas {
namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr int64_t kScaleBytes = sizeof(float);

GAS_INLINE void encode_bfloat16(const float* x, int64_t width, char* row) {
  auto* out = reinterpret_cast<uint16_t*>(row);
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t bits = bits_of(x[i]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out[i] = static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? 0x7fc0u : rounded);
  }
}

GAS_INLINE void decode_bfloat16(const char* row, int64_t width, float* x) {
  const auto* in = reinterpret_cast<const uint16_t*>(row);
  for (int64_t i = 0; i < width; ++i) x[i] = float_of(uint32_t{in[i]} << 16);
}

// Normal halves keep ten bits of the significand; adding a power of two whose last bit is the
// last bit of a subnormal half rounds the small ones.
GAS_INLINE void encode_float16(const float* x, int64_t width, char* row) {
  auto* out = reinterpret_cast<uint16_t*>(row);
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t bits = bits_of(x[i]), magnitude = bits & kMagnitude;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    // Rebias the exponent from 127 to 15 and round away 13 bits; overflow runs into infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= (143u << 23) ? 0x7c00u : half;  // 2^16 and above.
    half = magnitude > kInfinity ? 0x7e00u : half;
    out[i] = static_cast<uint16_t>(sign | half);
  }
}

GAS_INLINE void decode_float16(const char* row, int64_t width, float* x) {
  const auto* in = reinterpret_cast<const uint16_t*>(row);
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t half = in[i], sign = (half & 0x8000u) << 16;
    const uint32_t shifted = (half & 0x7fffu) << 13;
    // Multiplying by 2^112 rebiases the exponent, of subnormal numbers too.
    const uint32_t finite = bits_of(float_of(shifted) * 0x1p112f);
    const uint32_t magnitude = shifted >= (31u << 23) ? shifted | kInfinity : finite;
    x[i] = float_of(sign | magnitude);
  }
}

GAS_INLINE void encode_int8(const float* x, int64_t width, char* row) {
  uint32_t largest = 0;  // The order of magnitudes is that of their bits, with NaN on top.
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float scale = float_of(largest) / 127.0f;
  std::memcpy(row, &scale, kScaleBytes);
  auto* out = reinterpret_cast<int8_t*>(row + kScaleBytes);
  if (scale > 0 && largest < kInfinity) {
    for (int64_t i = 0; i < width; ++i) {
      float value = x[i] / scale;
      value = value > 127.0f ? 127.0f : value;
      value = value < -127.0f ? -127.0f : value;
      // 1.5 * 2^23: the sum has no bits left for a fraction, so that adding rounds to an integer.
      out[i] = static_cast<int8_t>(bits_of(value + 12582912.0f) - bits_of(12582912.0f));
    }
  } else {
    std::memset(out, 0, width);
  }
  const int64_t used = kScaleBytes + width;
  std::memset(row + used, 0, stored_bytes(Codec::kInt8, width) - used);
}

GAS_INLINE void decode_int8(const char* row, int64_t width, float* x) {
  float scale;
  std::memcpy(&scale, row, kScaleBytes);
  const auto* in = reinterpret_cast<const int8_t*>(row + kScaleBytes);
  for (int64_t i = 0; i < width; ++i) x[i] = static_cast<float>(in[i]) * scale;
}

template <void encode(const float*, int64_t, char*)>
void encode_all(const float* src, int64_t width, int64_t count, char* rows, int64_t bytes) {
  on_processor([&]() GAS_INLINED {
    for (int64_t i = 0; i < count; ++i) encode(src + i * width, width, rows + i * bytes);
  });
}

template <void decode(const char*, int64_t, float*)>
void decode_all(const char* table, int64_t bytes, int64_t width, const int64_t* index,
                int64_t begin, int64_t end, float* dst) {
  on_processor([&]() GAS_INLINED {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch_row(table + index[i + kAhead] * bytes, bytes);
      decode(table + index[i] * bytes, width, dst + i * width);
    }
  });
}

}  // namespace

int64_t stored_bytes(Codec codec, int64_t width) {
  return codec == Codec::kInt8 ? (kScaleBytes + width + 3) / 4 * 4 : 2 * width;
}

void encode_rows(Codec codec, const float* src, int64_t width, int64_t count, char* rows) {
  const auto encode = codec == Codec::kBfloat16  ? encode_all<encode_bfloat16>
                      : codec == Codec::kFloat16 ? encode_all<encode_float16>
                                                 : encode_all<encode_int8>;
  encode(src, width, count, rows, stored_bytes(codec, width));
}

void decode_rows(Codec codec, const char* table, int64_t width, const int64_t* index, int64_t begin,
                 int64_t end, float* dst) {
  const auto decode = codec == Codec::kBfloat16  ? decode_all<decode_bfloat16>
                      : codec == Codec::kFloat16 ? decode_all<decode_float16>
                                                 : decode_all<decode_int8>;
  decode(table, stored_bytes(codec, width), width, index, begin, end, dst);
}

}  // namespace gas
