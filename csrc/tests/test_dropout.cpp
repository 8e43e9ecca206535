#include "operators/dropout.h"

#include <cmath>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "common/random.h"
#include "transfer/codec.h"

namespace {

std::vector<float> drop(int64_t n, double p, uint64_t seed, int threads) {
  const std::vector<float> x(n, 1.0f);
  std::vector<float> out(n, -1.0f);
  const auto threshold = static_cast<uint64_t>(p * 4294967296.0);
  gas::dropout(x.data(), n, threshold, static_cast<float>(1 / (1 - p)), seed, out.data(), threads);
  return out;
}

// Decoded and dropped in one pass, and one after the other.
void test_encoded(gas::Codec codec, int64_t width, int64_t n) {
  const int64_t rows = 500;
  std::vector<float> x(rows * width);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i)) * 3;
  std::vector<char> table(rows * gas::stored_bytes(codec, width));
  gas::encode_rows(codec, x.data(), width, rows, table.data());
  std::vector<int64_t> index(n);
  for (int64_t i = 0; i < n; ++i) index[i] = i * 7919 % rows;
  std::vector<float> read(n * width), expected(n * width);
  gas::decode_rows(codec, table.data(), width, index.data(), 0, n, read.data());
  const uint64_t threshold = 0x60000000;
  gas::dropout(read.data(), n * width, threshold, 1.6f, 5, expected.data(), 1);
  for (const int threads : {1, 3}) {
    std::vector<float> out(n * width, -1.0f);
    gas::gather_decode_dropout(codec, table.data(), rows, width, index.data(), n, threshold, 1.6f,
                               5, out.data(), threads);
    CHECK(out == expected);
  }
  for (const int64_t outside : {int64_t{-1}, rows}) {
    if (n == 0) break;
    index[n / 2] = outside;
    std::vector<float> out(n * width, -1.0f);
    bool thrown = false;
    try {
      gas::gather_decode_dropout(codec, table.data(), rows, width, index.data(), n, threshold, 1.6f,
                                 5, out.data(), 1);
    } catch (const std::out_of_range&) {
      thrown = true;
    }
    CHECK(thrown);
    for (const float value : out) CHECK(value == -1.0f);
  }
}

// In one pass, ReLU and dropout are what they are one after the other, and so is the gradient.
template <typename T>
void test_relu(int64_t n) {
  std::vector<T> x(n), grad(n), relu(n), wanted(n);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = static_cast<T>(std::sin(static_cast<double>(i)));
    grad[i] = static_cast<T>(i % 7 - 3);
    relu[i] = x[i] > 0 ? x[i] : T{0};
  }
  const uint64_t threshold = 0x60000000;
  const auto scale = static_cast<T>(1.6);
  gas::dropout(relu.data(), n, threshold, scale, 5, wanted.data(), 1);
  for (const int threads : {1, 3}) {
    std::vector<T> mine(n, T{-1}), out(n, T{-1}), back(n, T{-1});
    gas::relu_dropout(x.data(), n, threshold, scale, 5, mine.data(), out.data(), threads);
    CHECK(mine == relu);
    CHECK(out == wanted);
    gas::relu_dropout_backward(grad.data(), out.data(), n, scale, back.data(), threads);
    for (int64_t i = 0; i < n; ++i) {
      const bool passes = x[i] > 0 && gas::is_kept(5, i, threshold);
      CHECK(back[i] == (passes ? grad[i] * scale : T{0}));
    }
  }
}

// The same of normalised rows; sums are those of one row after the other.
template <typename T>
void test_norm(int64_t rows, int64_t width) {
  const int64_t n = rows * width;
  const uint64_t threshold = 0x60000000;
  const auto factor = static_cast<T>(1.6);
  std::vector<T> x(n), grad(n), mean(width), scale(width), shift(width), slope(width);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = static_cast<T>(std::sin(static_cast<double>(i)));
    grad[i] = static_cast<T>(i % 7 - 3);
  }
  for (int64_t j = 0; j < width; ++j) {
    mean[j] = static_cast<T>(j % 3) / 4;
    scale[j] = static_cast<T>(j % 5 + 1) / 2;
    shift[j] = static_cast<T>(j % 2) / 2;
    slope[j] = static_cast<T>(j % 4) / 8;
  }
  const auto is_close = [](double a, double b) {
    return std::abs(a - b) <= 1e-3 * std::max(1.0, std::abs(b));
  };
  for (const int threads : {1, 3}) {
    std::vector<T> relu(n, T{-1}), out(n, T{-1}), back(n, T{-1});
    std::vector<double> sums(2 * width, -1.0), wanted(2 * width, 0.0);
    gas::norm_relu_dropout(x.data(), rows, width, mean.data(), scale.data(), shift.data(),
                           threshold, factor, 5, relu.data(), out.data(), threads);
    gas::norm_relu_dropout_sums(grad.data(), out.data(), x.data(), rows, width, mean.data(), factor,
                                sums.data(), threads);
    gas::norm_relu_dropout_backward(grad.data(), out.data(), x.data(), rows, width, mean.data(),
                                    scale.data(), slope.data(), shift.data(), factor, back.data(),
                                    threads);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t j = i % width;
      const T normalised = (x[i] - mean[j]) * scale[j] + shift[j];
      CHECK(is_close(relu[i], std::max(normalised, T{0})));
      const bool kept = gas::is_kept(5, i, threshold);
      CHECK(out[i] == (kept ? relu[i] * factor : T{0}));
      const T g = out[i] == T{0} ? T{0} : grad[i] * factor;
      wanted[j] += g;
      wanted[width + j] += g * (x[i] - mean[j]);
      CHECK(is_close(back[i], g * scale[j] + (x[i] - mean[j]) * slope[j] + shift[j]));
    }
    for (int64_t j = 0; j < 2 * width; ++j) CHECK(is_close(sums[j], wanted[j]));
  }
}

}  // namespace

int main() {
  for (const int64_t rows : {0, 1, 255, 256, 257, 1000}) {
    for (const int64_t width : {0, 1, 7, 8, 33}) {
      test_norm<float>(rows, width);
      test_norm<double>(rows, width);
    }
  }
  for (const int64_t size : {0, 1, 2, 7, 8, 9, 33, 100001}) {
    test_relu<float>(size);
    test_relu<double>(size);
  }
  const int64_t n = 300001;
  for (const double p : {0.1, 0.5, 0.9}) {
    const std::vector<float> out = drop(n, p, 42, 1);
    CHECK(out == drop(n, p, 42, 3));  // Threads don't matter ...
    CHECK(out != drop(n, p, 43, 1));  // ... the seed does.
    const auto threshold = static_cast<uint64_t>(p * 4294967296.0);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool keep = gas::is_kept(42, i, threshold);
      CHECK(out[i] == (keep ? static_cast<float>(1 / (1 - p)) : 0.0f));
      kept += keep;
    }
    CHECK(std::abs(kept - n * (1 - p)) < 5 * std::sqrt(n * p * (1 - p)));
  }
  for (const float value : drop(99, 1.0, 1, 1)) CHECK(value != value || value == 0.0f);
  for (const float value : drop(99, 0.0, 1, 1)) CHECK(value == 1.0f);
  CHECK(drop(0, 0.5, 1, 1).empty());
  CHECK(drop(1, 0.5, 1, 1)[0] == drop(2, 0.5, 1, 1)[0]);
  for (const gas::Codec codec : {gas::Codec::kBfloat16, gas::Codec::kFloat16, gas::Codec::kInt8}) {
    for (const int64_t width : {0, 1, 3, 8, 64, 131}) {
      for (const int64_t rows : {0, 1, 33, 700}) test_encoded(codec, width, rows);
    }
    test_encoded(codec, 5000, 33);
  }
}
