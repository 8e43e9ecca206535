#include "augment/ego.h"

#include <random>
#include <vector>

#include "check.h"

namespace {

void test_hop(int64_t nodes, int64_t entries, bool shared, int threads) {
  std::mt19937 random(nodes + entries);
  std::vector<int32_t> rowptr(nodes + 1), col(entries), unit(entries);
  for (int64_t e = 0; e < entries; ++e) {
    ++rowptr[1 + random() % nodes];
    col[e] = static_cast<int32_t>(random() % nodes);
    unit[e] = static_cast<int32_t>(random() % (entries / 2 + 1));
  }
  for (int64_t row = 0; row < nodes; ++row) rowptr[row + 1] += rowptr[row];
  std::vector<uint8_t> kept(entries + 1);
  for (uint8_t& k : kept) k = random() % 2;
  std::vector<double> loops(nodes), x(2 * nodes), out(2 * nodes, -1.0);
  for (double& value : loops) value = 1.0 + random() % 2;
  for (double& value : x) value = random() % 100;

  const gas::Sparse matrix{nodes, int64_t(col.size()), rowptr.data(), col.data(),
                           shared ? unit.data() : nullptr};
  gas::ego_hop(matrix, kept.data(), loops.data(), x.data(), out.data(), threads);
  for (int64_t row = 0; row < nodes; ++row) {
    double wanted[2] = {loops[row] * x[2 * row], loops[row] * x[2 * row + 1]};
    for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
      if (kept[shared ? unit[e] : e]) wanted[0] += x[2 * col[e]];
      wanted[1] += x[2 * col[e] + 1];
    }
    CHECK(out[2 * row] == wanted[0] && out[2 * row + 1] == wanted[1]);
  }
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    for (const bool shared : {false, true}) {
      test_hop(1, 0, shared, threads);
      test_hop(3, 9, shared, threads);
      test_hop(9000, 60000, shared, threads);
    }
  }
}
