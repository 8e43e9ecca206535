#include "graph/undirected.h"

#include <map>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"

namespace {

template <typename Index>
void test_entries(int64_t num_nodes, int64_t num_edges, bool weighted, int threads) {
  std::mt19937 random(num_nodes + num_edges);
  std::vector<int64_t> src(num_edges), dst(num_edges);
  std::vector<int32_t> weight(num_edges);
  std::map<std::pair<int64_t, int64_t>, int64_t> expected;
  for (int64_t e = 0; e < num_edges; ++e) {
    src[e] = random() % num_nodes;
    dst[e] = random() % ((num_nodes + 3) / 4);  // Hubs, and duplicates.
    weight[e] = random() % 3;
    if (src[e] == dst[e] || (weighted && weight[e] == 0)) continue;
    expected[{src[e], dst[e]}] += weight[e];
    expected[{dst[e], src[e]}] += weight[e];
  }
  std::vector<int64_t> rowptr(num_nodes + 1), out_weight(2 * num_edges);
  std::vector<Index> col(2 * num_edges);
  const int64_t entries = gas::undirected(
      src.data(), dst.data(), weighted ? weight.data() : nullptr, num_edges, num_nodes,
      sizeof(Index), rowptr.data(), col.data(), weighted ? out_weight.data() : nullptr, threads);
  CHECK(entries == static_cast<int64_t>(expected.size()));
  CHECK(rowptr.front() == 0 && rowptr.back() == entries);
  auto entry = expected.begin();
  for (int64_t r = 0; r < num_nodes; ++r) {
    for (int64_t i = rowptr[r]; i < rowptr[r + 1]; ++i, ++entry) {
      CHECK(entry->first == std::make_pair(r, static_cast<int64_t>(col[i])));
      CHECK(!weighted || entry->second == out_weight[i]);
    }
  }
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    for (const bool weighted : {false, true}) {
      test_entries<int32_t>(1, 5, weighted, threads);
      test_entries<int64_t>(3, 0, weighted, threads);
      test_entries<int32_t>(60, 900, weighted, threads);
      test_entries<int64_t>(5000, 200000, weighted, threads);  // Several blocks of rows.
    }
  }
  int64_t out[4];
  for (const int64_t bad : {int64_t{-1}, int64_t{2}}) {
    const int64_t zero = 0;
    CHECK_THROWS(gas::undirected(&bad, &zero, nullptr, 1, 2, 8, out, out, nullptr, 1),
                 std::out_of_range);
    CHECK_THROWS(gas::undirected(&zero, &bad, nullptr, 1, 2, 8, out, out, nullptr, 1),
                 std::out_of_range);
  }
}
