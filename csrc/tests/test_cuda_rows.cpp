// The CUDA kernels of csrc/transfer/rows.cu and codec.cu, run on the CPU, against the
// functions for the CPU.
#include "transfer/codec.cu"
#include "transfer/rows.cu"

#include "cuda_data.h"
#include "transfer/codec.h"

namespace {

void test_rows(int64_t row_bytes, int64_t shift, int64_t blocks, std::mt19937& random) {
  constexpr int64_t kRows = 40, kPicked = 30;
  Table<char> table(kRows * row_bytes, shift), rows(kPicked * row_bytes, 0);
  for (int64_t i = 0; i < table.n; ++i) table[i] = static_cast<char>(random());
  std::vector<int64_t> index(kPicked);
  for (int64_t i = 0; i < kPicked; ++i) index[i] = i * 7 % kRows;  // Each row once at most.
  gas::cuda::gather_rows(table.data(), row_bytes, index.data(), kPicked, rows.data(), blocks, 0);
  CHECK(gridDim.x <= blocks);
  Table<char> back(kRows * row_bytes, shift);
  gas::cuda::scatter_rows(rows.data(), row_bytes, index.data(), kPicked, back.data(), blocks, 0);
  CHECK(gridDim.x <= blocks);
  std::vector<bool> picked(kRows);
  for (int64_t i = 0; i < kPicked; ++i) {
    picked[index[i]] = true;
    const char* wanted = table.data() + index[i] * row_bytes;
    CHECK(std::memcmp(rows.data() + i * row_bytes, wanted, row_bytes) == 0);
    CHECK(std::memcmp(back.data() + index[i] * row_bytes, wanted, row_bytes) == 0);
  }
  for (int64_t i = 0; i < back.n; ++i) CHECK(picked[i / row_bytes] || back[i] == -1);
}

void test_int8(int64_t width, int64_t shift, bool in_order, int64_t blocks, std::mt19937& random) {
  constexpr int64_t kRows = 60;
  auto x = numbers<float>(kRows * width, 0, random);
  for (int64_t j = 0; j < width; ++j) x[2 * width + j] = 0;
  x[3 * width] = INFINITY;
  x[5 * width] *= 1e30f;
  const int64_t row_bytes = gas::stored_bytes(gas::Codec::kInt8, width);
  Table<char> rows(kRows * row_bytes, 0), wanted(kRows * row_bytes, 0);
  Table<float> decoded(kRows * width, shift), wanted_decoded(kRows * width, 0);
  gas::cuda::encode_int8(x.data(), kRows, width, row_bytes, rows.data(), 0);
  gas::encode_rows(gas::Codec::kInt8, x.data(), width, kRows, wanted.data());
  CHECK(rows == wanted);
  std::vector<int64_t> index(kRows);
  for (int64_t i = 0; i < kRows; ++i) index[i] = in_order ? i : i * 3 % 7;
  gas::cuda::decode_int8(rows.data(), in_order ? nullptr : index.data(), kRows, width, row_bytes,
                         decoded.data(), blocks, 0);
  CHECK(gridDim.x <= blocks);
  gas::decode_rows(gas::Codec::kInt8, rows.data(), width, index.data(), 0, kRows,
                   wanted_decoded.data());
  for (int64_t i = 0; i < decoded.n; ++i) {
    CHECK(decoded[i] == wanted_decoded[i] || std::isnan(decoded[i]));
    CHECK(std::isnan(decoded[i]) == std::isnan(wanted_decoded[i]));
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const bool reversed : {false, true}) {
    on_host::reversed = reversed;
    for (const int64_t row_bytes : {1, 2, 4, 8, 12, 16, 30, 512, 528, 2048}) {
      for (const int64_t shift : {0, 2, 5}) test_rows(row_bytes, shift, 65535, random);
      test_rows(row_bytes, 0, 1, random);
    }
    for (const int64_t width : {1, 3, 4, 31, 32, 100, 260}) {
      for (const int64_t shift : {0, 1}) test_int8(width, shift, true, 65535, random);
      test_int8(width, 0, false, 1, random);
    }
  }
  const int64_t before = on_host::launches;
  gas::cuda::gather_rows(nullptr, 8, nullptr, 0, nullptr, 1, 0);
  gas::cuda::scatter_rows(nullptr, 0, nullptr, 5, nullptr, 1, 0);
  gas::cuda::encode_int8(nullptr, 0, 8, 12, nullptr, 0);
  gas::cuda::decode_int8(nullptr, nullptr, 5, 0, 4, nullptr, 1, 0);
  CHECK(on_host::launches == before);
}
