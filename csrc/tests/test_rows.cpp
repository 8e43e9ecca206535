#include "transfer/rows.h"

#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "common/parallel.h"

namespace {

void test_gather(int64_t rows, int64_t row_bytes, int64_t n, int threads) {
  std::mt19937 random(rows + row_bytes + n);
  std::vector<char> table(rows * row_bytes), out(n * row_bytes, 'x');
  for (char& byte : table) byte = static_cast<char>(random());
  std::vector<int64_t> index(n);
  for (int64_t& i : index) i = random() % rows;

  gas::gather_rows(table.data(), rows, row_bytes, index.data(), n, out.data(), threads);
  for (int64_t i = 0; i < n; ++i) {
    CHECK(std::memcmp(&out[i * row_bytes], &table[index[i] * row_bytes], row_bytes) == 0);
  }
}

void test_out_of_range() {
  const std::vector<char> table(12, 'a');
  std::vector<char> out(8, 'x');
  for (const int64_t bad : {int64_t{-1}, int64_t{3}}) {
    const std::vector<int64_t> index = {0, bad};
    CHECK_THROWS(gas::gather_rows(table.data(), 3, 4, index.data(), 2, out.data(), 1),
                 std::out_of_range);
    CHECK(out == std::vector<char>(8, 'x'));
  }
}

void test_exceptions_reach_the_caller() {
  for (const int threads : {1, 4}) {
    std::vector<char> seen(1000, 0);
    const auto body = [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) seen[i] = 1;
      if (begin == 0) throw std::runtime_error("from a chunk");
    };
    CHECK_THROWS(gas::parallel_chunks(1000, 10, threads, body), std::runtime_error);
    CHECK(seen == std::vector<char>(1000, 1));  // Every chunk had ended by then.
  }
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    for (const int64_t row_bytes : {1, 3, 4, 8, 20, 32, 64, 100, 1024}) {
      test_gather(1, row_bytes, 0, threads);
      test_gather(1, row_bytes, 5, threads);
      test_gather(2000, row_bytes, 3000, threads);
    }
  }
  test_out_of_range();
  test_exceptions_reach_the_caller();
}
