#include "graph/relabel.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "graph/csr.h"

namespace {

struct Graph {
  std::vector<int64_t> rowptr, col;
};

Graph random_graph(int64_t num_nodes, int64_t num_edges) {
  std::mt19937 random(num_nodes + num_edges);
  std::vector<int64_t> row(num_edges), col(num_edges), perm(num_edges);
  for (int64_t& r : row) r = random() % num_nodes;
  for (int64_t& c : col) c = random() % num_nodes;
  Graph graph{std::vector<int64_t>(num_nodes + 1), std::vector<int64_t>(num_edges)};
  gas::coo_to_csr(row.data(), col.data(), num_edges, num_nodes, graph.rowptr.data(),
                  graph.col.data(), perm.data(), 1);
  return graph;
}

// Against a map, a set and a sort.
void test_batch(gas::Relabeler& relabel, const Graph& graph, const std::vector<int64_t>& nodes,
                int threads) {
  const int64_t size = nodes.size();
  const auto [num_edges, num_halo] = relabel.count(graph.rowptr.data(), graph.col.data(),
                                                   nodes.data(), size, threads);
  std::vector<int64_t> rowptr(size + 1), col(num_edges), e_id(num_edges), halo(num_halo);
  relabel.write(graph.rowptr.data(), graph.col.data(), nodes.data(), size, nullptr, nullptr,
                0, rowptr.data(), col.data(), e_id.data(), nullptr, halo.data(), threads);

  // The same with names and values of the edges.
  std::vector<int64_t> name(graph.col.size()), named(num_edges);
  std::vector<uint32_t> value(graph.col.size()), out_value(num_edges);
  for (size_t e = 0; e < name.size(); ++e) {
    name[e] = 7 + 3 * e;
    value[e] = static_cast<uint32_t>(5 * e);
  }
  relabel.write(graph.rowptr.data(), graph.col.data(), nodes.data(), size, name.data(),
                value.data(), 4, rowptr.data(), col.data(), named.data(), out_value.data(),
                halo.data(), threads);
  std::vector<int32_t> small_rowptr(size + 1), small_col(num_edges);
  std::vector<int64_t> small_id(num_edges);
  relabel.write(graph.rowptr.data(), graph.col.data(), nodes.data(), size, nullptr, nullptr, 0,
                small_rowptr.data(), small_col.data(), small_id.data(), nullptr, halo.data(),
                threads);
  CHECK(std::equal(rowptr.begin(), rowptr.end(), small_rowptr.begin()));
  CHECK(std::equal(col.begin(), col.end(), small_col.begin()) && small_id == e_id);
  for (int64_t e = 0; e < num_edges; ++e) {
    CHECK(named[e] == name[e_id[e]] && out_value[e] == value[e_id[e]]);
  }

  std::map<int64_t, int64_t> local;
  for (int64_t i = 0; i < size; ++i) local[nodes[i]] = i;
  std::set<int64_t> expected_halo;
  for (const int64_t node : nodes) {
    for (int64_t e = graph.rowptr[node]; e < graph.rowptr[node + 1]; ++e) {
      if (!local.count(graph.col[e])) expected_halo.insert(graph.col[e]);
    }
  }
  CHECK(halo == std::vector<int64_t>(expected_halo.begin(), expected_halo.end()));
  for (int64_t i = 0; i < num_halo; ++i) local[halo[i]] = size + i;
  for (int64_t i = 0; i < size; ++i) {
    CHECK(rowptr[i + 1] - rowptr[i] == graph.rowptr[nodes[i] + 1] - graph.rowptr[nodes[i]]);
    for (int64_t e = rowptr[i]; e < rowptr[i + 1]; ++e) {
      CHECK(e_id[e] >= graph.rowptr[nodes[i]] && e_id[e] < graph.rowptr[nodes[i] + 1]);
      CHECK(col[e] == local[graph.col[e_id[e]]]);
      if (e > rowptr[i]) CHECK(col[e - 1] < col[e] || e_id[e - 1] < e_id[e]);
      if (e > rowptr[i]) CHECK(col[e - 1] <= col[e]);
    }
  }
}

void test_graph(int64_t num_nodes, int64_t num_edges, bool sorted_rows, int threads) {
  const Graph graph = random_graph(num_nodes, num_edges);
  gas::Relabeler relabel(num_nodes, sorted_rows);
  std::vector<int64_t> order(num_nodes);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(7);
  for (int round = 0; round < 3; ++round) {
    for (const int64_t n : {int64_t{0}, int64_t{1}, num_nodes / 3, num_nodes}) {
      test_batch(relabel, graph, {order.begin(), order.begin() + n}, threads);
    }
    std::shuffle(order.begin(), order.end(), random);
  }
}

void test_bad_batches() {
  const Graph graph = random_graph(10, 40);
  gas::Relabeler relabel(10, true);
  const auto count = [&](std::vector<int64_t> nodes) {
    relabel.count(graph.rowptr.data(), graph.col.data(), nodes.data(), nodes.size(), 1);
  };
  CHECK_THROWS(count({1, 10}), std::out_of_range);
  CHECK_THROWS(count({1, -1}), std::out_of_range);
  CHECK_THROWS(count({1, 2, 1}), std::invalid_argument);
  CHECK_THROWS(gas::Relabeler(int64_t{1} << 31, true), std::invalid_argument);
  test_batch(relabel, graph, {4, 2}, 1);  // A failed batch leaves nothing behind.
}

}  // namespace

int main() {
  for (const int threads : {1, 3}) {
    for (const bool sorted_rows : {true, false}) {
      test_graph(1, 0, sorted_rows, threads);
      test_graph(1, 4, sorted_rows, threads);
      test_graph(130, 900, sorted_rows, threads);
      test_graph(3000, 120000, sorted_rows, threads);
    }
  }
  test_bad_batches();
}
