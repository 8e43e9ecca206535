#include "transfer/transfer.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"

using gas::Codec;
using gas::Table;

namespace {

Table plain(std::vector<char>& rows, int64_t row_bytes) {
  const int64_t num_rows = static_cast<int64_t>(rows.size()) / row_bytes;
  return {rows.data(), num_rows, row_bytes, false, Codec{}, 0};
}

void test_plain_rows(int64_t num_rows, int64_t row_bytes, int64_t n, int threads) {
  std::mt19937 random(num_rows + row_bytes + n);
  std::vector<char> rows(num_rows * row_bytes), out(n * row_bytes, 'x');
  for (char& byte : rows) byte = static_cast<char>(random());
  const std::vector<char> before = rows;
  const Table table = plain(rows, row_bytes);
  std::vector<int64_t> index(n);
  for (int64_t& i : index) i = random() % num_rows;

  gas::run(gas::pull(table, index.data(), n, out.data()), threads);
  for (int64_t i = 0; i < n; ++i) {
    CHECK(std::memcmp(&out[i * row_bytes], &before[index[i] * row_bytes], row_bytes) == 0);
  }

  std::vector<char> expected = rows;
  for (char& byte : out) byte = static_cast<char>(random());
  for (int64_t i = 0; i < n; ++i) {  // The last one wins.
    std::memcpy(&expected[index[i] * row_bytes], &out[i * row_bytes], row_bytes);
  }
  gas::run(gas::push(table, out.data(), index.data(), n), threads);
  CHECK(rows == expected);
}

void test_ranges(int threads) {
  constexpr int64_t kWidth = 24;
  std::vector<char> rows(1000 * kWidth, 'o');
  std::vector<float> x(600 * kWidth / 4);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const std::vector<int64_t> offset = {700, 10, 0, 300}, count = {300, 0, 5, 295};
  const auto ranges = gas::make_ranges(offset.data(), count.data(), 4, 1000);
  const auto* bytes = reinterpret_cast<const char*>(x.data());
  gas::run(gas::push(plain(rows, kWidth), bytes, ranges), threads);
  for (const auto& range : ranges) {
    for (int64_t i = 0; i < range.count; ++i) {
      CHECK(std::memcmp(&rows[(range.first + i) * kWidth], bytes + (range.begin + i) * kWidth,
                        kWidth) == 0);
    }
  }
  CHECK(rows[5 * kWidth] == 'o' && rows[299 * kWidth] == 'o' && rows[595 * kWidth] == 'o');
  gas::run(gas::push(plain(rows, kWidth), bytes, std::vector<gas::Range>{}), threads);
}

void test_encoded(Codec codec, int threads) {
  constexpr int64_t kRows = 3000, kWidth = 7;
  const int64_t row_bytes = gas::stored_bytes(codec, kWidth);
  std::vector<char> rows(kRows * row_bytes, 0);
  const Table table = {rows.data(), kRows, row_bytes, true, codec, kWidth};
  std::vector<float> x(kRows * kWidth), y(kRows * kWidth);
  std::vector<int64_t> index(kRows);
  for (int64_t i = 0; i < kRows; ++i) {
    index[i] = (i * 7) % kRows;
    for (int64_t j = 0; j < kWidth; ++j) x[i * kWidth + j] = static_cast<float>(i % 100);
  }
  const std::vector<int64_t> offset = {0}, count = {kRows};
  const auto* bytes = reinterpret_cast<const char*>(x.data());
  gas::run(gas::push(table, bytes, gas::make_ranges(offset.data(), count.data(), 1, kRows)),
           threads);
  gas::run(gas::pull(table, index.data(), kRows, reinterpret_cast<char*>(y.data())), threads);
  for (int64_t i = 0; i < kRows; ++i) {
    const float expected = static_cast<float>(index[i] % 100);
    CHECK(std::abs(y[i * kWidth] - expected) <= 1e-5f * expected);
  }
  gas::run(gas::push(table, bytes, index.data(), 10), threads);
  gas::run(gas::pull(table, index.data(), 10, reinterpret_cast<char*>(y.data())), threads);
  for (int64_t i = 0; i < 10; ++i) CHECK(std::abs(y[i * kWidth] - float(i)) <= 1e-5f * float(i));
}

void test_out_of_range() {
  std::vector<char> rows(12, 'a'), buffer(8, 'x');
  const Table table = plain(rows, 4);
  for (const int64_t bad : {int64_t{-1}, int64_t{3}}) {
    const std::vector<int64_t> index = {0, bad};
    CHECK_THROWS(gas::pull(table, index.data(), 2, buffer.data()), std::out_of_range);
    CHECK_THROWS(gas::push(table, buffer.data(), index.data(), 2), std::out_of_range);
  }
  const int64_t one = 1;
  for (const auto& [first, count] :
       {std::pair<int64_t, int64_t>{-1, 1}, {3, 1}, {2, 2}, {1, -1}, {1, INT64_MAX}}) {
    CHECK_THROWS(gas::make_ranges(&first, &count, 1, 3), std::out_of_range);
  }
  CHECK(gas::make_ranges(&one, &one, 1, 3).size() == 1);
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    for (const int64_t row_bytes : {1, 3, 4, 8, 20, 32, 64, 100, 1024}) {
      test_plain_rows(1, row_bytes, 0, threads);
      test_plain_rows(1, row_bytes, 5, threads);
      test_plain_rows(2000, row_bytes, 3000, threads);
    }
    test_ranges(threads);
    for (const Codec codec : {Codec::kBfloat16, Codec::kFloat16, Codec::kInt8}) {
      test_encoded(codec, threads);
    }
  }
  test_out_of_range();
}
