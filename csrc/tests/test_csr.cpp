#include "graph/csr.h"

#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "check.h"

namespace {

template <typename Index>
void test_sorted(int64_t num_rows, int64_t num_edges, int threads) {
  std::mt19937 random(num_rows + num_edges);
  std::vector<int64_t> row(num_edges), col(num_edges), rowptr(num_rows + 1);
  std::vector<Index> out(num_edges), perm(num_edges);
  for (int64_t& r : row) r = random() % num_rows;
  for (int64_t& c : col) c = random() % 5;
  gas::coo_to_csr(row.data(), col.data(), num_edges, num_rows, rowptr.data(), out.data(),
                  perm.data(), threads);
  CHECK(rowptr.front() == 0 && rowptr.back() == num_edges);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t e = rowptr[r]; e < rowptr[r + 1]; ++e) {
      CHECK(row[perm[e]] == r && col[perm[e]] == out[e]);
      if (e > rowptr[r]) CHECK(std::tie(out[e - 1], perm[e - 1]) < std::tie(out[e], perm[e]));
    }
  }
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    test_sorted<int64_t>(1, 0, threads);
    test_sorted<int32_t>(1, 50, threads);
    test_sorted<int64_t>(20000, 90000, threads);
    test_sorted<int32_t>(20000, 90000, threads);
  }
  int64_t out[3];
  for (const int64_t bad : {int64_t{-1}, int64_t{2}}) {
    const int64_t zero = 0;
    CHECK_THROWS(gas::coo_to_csr(&bad, &zero, 1, 2, out, out, out, 1), std::out_of_range);
  }
}
