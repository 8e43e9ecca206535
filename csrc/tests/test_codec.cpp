#include "transfer/codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

using gas::Codec;

namespace {

std::vector<float> round_trip(Codec codec, const std::vector<float>& x, int64_t width) {
  const int64_t n = width == 0 ? 1 : static_cast<int64_t>(x.size()) / width;
  std::vector<char> rows(n * gas::stored_bytes(codec, width), 'x');
  gas::encode_rows(codec, x.data(), width, n, rows.data());
  std::vector<int64_t> reversed(n);
  for (int64_t i = 0; i < n; ++i) reversed[i] = n - 1 - i;
  std::vector<float> out(x.size());
  gas::decode_rows(codec, rows.data(), width, reversed.data(), 0, n, out.data());
  std::vector<float> in_order(x.size());
  for (int64_t i = 0; i < n; ++i) {
    std::copy_n(out.data() + i * width, width, in_order.data() + (n - 1 - i) * width);
  }
  return in_order;
}

// `digits` of the significand, the smallest normal number and the largest number.
void test_floats(Codec codec, int digits, double smallest, double largest) {
  std::mt19937 random(7);
  std::vector<float> x;
  for (int i = 0; i < 100000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (std::isfinite(value)) x.push_back(value);
  }
  for (const double value : {0.0, 1.0, 65504.0, 65519.0, 65520.0, 1e-8, 6e-8, 3e-5, 6.1e-5}) {
    x.push_back(static_cast<float>(value));
    x.push_back(static_cast<float>(-value));
  }
  const std::vector<float> y = round_trip(codec, x, 1);
  for (size_t i = 0; i < x.size(); ++i) {
    // Rounded to a multiple of the last digit's value, ties to even.
    const double magnitude = std::max(std::fabs(double{x[i]}), smallest);
    const double unit = std::ldexp(1.0, std::ilogb(magnitude) - digits + 1);
    double expected = std::nearbyint(x[i] / unit) * unit;
    if (std::fabs(expected) > largest) expected = std::copysign(INFINITY, x[i]);
    CHECK(double{y[i]} == expected);
    CHECK(std::signbit(y[i]) == std::signbit(x[i]));
  }
}

void test_special(Codec codec) {
  const float inf = INFINITY;
  const std::vector<float> y = round_trip(codec, {inf, -inf, NAN, -NAN}, 1);
  if (codec == Codec::kInt8) {
    for (const float value : y) CHECK(std::isnan(value));
  } else {
    CHECK(y[0] == inf && y[1] == -inf && std::isnan(y[2]) && std::isnan(y[3]));
  }
}

void test_int8() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const int64_t width : {0, 1, 3, 4, 16, 100}) {
    std::vector<float> x(width * 50);
    for (float& value : x) value = normal(random);
    const std::vector<float> y = round_trip(Codec::kInt8, x, width);
    for (int64_t row = 0; row < (width ? 50 : 0); ++row) {
      float largest = 0;
      for (int64_t i = 0; i < width; ++i)
        largest = std::max(largest, std::fabs(x[row * width + i]));
      for (int64_t i = row * width; i < (row + 1) * width; ++i) {
        CHECK(std::fabs(x[i] - y[i]) <= largest / 127 * 0.5001);
      }
    }
    CHECK(gas::stored_bytes(Codec::kInt8, width) % 4 == 0);
  }
  // Zeros, numbers too small to have a scale, and one NaN among numbers.
  const float tiny = std::numeric_limits<float>::denorm_min();
  CHECK(round_trip(Codec::kInt8, {0, -0.0f, tiny, 0}, 2) == std::vector<float>(4, 0));
  for (const float value : round_trip(Codec::kInt8, {1, NAN, 2}, 3)) CHECK(std::isnan(value));
  // A scale that is rounded itself must not overflow.
  for (const float value : round_trip(Codec::kInt8, {190 * tiny, -190 * tiny}, 2)) {
    CHECK(std::fabs(value) > 0 && std::fabs(value) <= 260 * tiny);
  }
}

}  // namespace

int main() {
  test_floats(Codec::kBfloat16, 8, 0x1p-126, 3.3895313892515355e38);
  test_floats(Codec::kFloat16, 11, 0x1p-14, 65504);
  for (const Codec codec : {Codec::kBfloat16, Codec::kFloat16, Codec::kInt8}) test_special(codec);
  test_int8();
}
