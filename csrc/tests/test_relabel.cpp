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
#include "graph/node_set.h"
#include "graph/split_row.h"

namespace {

struct Graph {
  std::vector<int64_t> rowptr;
  std::vector<int32_t> col;
};

Graph random_graph(int64_t num_nodes, int64_t num_edges) {
  std::mt19937 random(num_nodes + num_edges);
  std::vector<int64_t> row(num_edges), col(num_edges);
  std::vector<int32_t> perm(num_edges);
  for (int64_t& r : row) r = random() % num_nodes;
  for (int64_t& c : col) c = random() % num_nodes;
  Graph graph{std::vector<int64_t>(num_nodes + 1), std::vector<int32_t>(num_edges)};
  gas::coo_to_csr(row.data(), col.data(), num_edges, num_nodes, graph.rowptr.data(),
                  graph.col.data(), perm.data(), 1);
  return graph;
}

template <typename Index, typename Value>
struct Cut {
  std::vector<Index> rowptr, col;
  std::vector<int64_t> e_id, n_id;
  std::vector<Value> value;
};

template <typename Index, typename Value, typename Name = int64_t>
Cut<Index, Value> cut(gas::Relabeler& relabel, const Graph& graph,
                      const std::vector<int64_t>& nodes, const Name* e_id, const Value* value,
                      int threads) {
  const int64_t size = nodes.size(),
                num_edges = relabel.start(graph.rowptr.data(), nodes.data(), size);
  Cut<Index, Value> out{std::vector<Index>(size + 1),
                        std::vector<Index>(num_edges),
                        std::vector<int64_t>(num_edges),
                        {},
                        std::vector<Value>(num_edges)};
  const int64_t num_halo =
      relabel.cut(graph.rowptr.data(), graph.col.data(), e_id, static_cast<const void*>(value),
                  value ? int64_t{sizeof(Value)} : 0, out.rowptr.data(), out.col.data(),
                  out.e_id.data(), static_cast<void*>(out.value.data()), threads);
  out.n_id.resize(size + num_halo);
  relabel.list(out.n_id.data());
  return out;
}

// The same with names and values of the edges, in both types of indices.
template <typename Index, typename Name, typename Value>
void test_values(gas::Relabeler& relabel, const Graph& graph, const std::vector<int64_t>& nodes,
                 const Cut<int64_t, uint32_t>& plain, int threads) {
  std::vector<Name> name(graph.col.size());
  std::vector<Value> value(graph.col.size());
  for (size_t e = 0; e < name.size(); ++e) {
    name[e] = 7 + 3 * e;
    value[e] = static_cast<Value>(5 * e) << (8 * sizeof(Value) - 30);
  }
  const auto found =
      cut<Index, Value, Name>(relabel, graph, nodes, name.data(), value.data(), threads);
  CHECK(std::equal(plain.rowptr.begin(), plain.rowptr.end(), found.rowptr.begin()));
  CHECK(std::equal(plain.col.begin(), plain.col.end(), found.col.begin()));
  CHECK(plain.n_id == found.n_id);
  for (size_t e = 0; e < plain.col.size(); ++e) {
    CHECK(found.e_id[e] == name[plain.e_id[e]] && found.value[e] == value[plain.e_id[e]]);
  }
}

// Against a map, a set and a sort.
void test_batch(gas::Relabeler& relabel, const Graph& graph, const std::vector<int64_t>& nodes,
                int threads) {
  const int64_t size = nodes.size();
  const auto plain =
      cut<int64_t, uint32_t, int64_t>(relabel, graph, nodes, nullptr, nullptr, threads);
  const auto& [rowptr, col, e_id, n_id, value] = plain;
  CHECK(std::equal(nodes.begin(), nodes.end(), n_id.begin()));
  const std::vector<int64_t> halo(n_id.begin() + size, n_id.end());
  const int64_t num_halo = halo.size();
  test_values<int32_t, int32_t, uint32_t>(relabel, graph, nodes, plain, threads);
  test_values<int32_t, int64_t, uint64_t>(relabel, graph, nodes, plain, threads);
  test_values<int64_t, int64_t, uint32_t>(relabel, graph, nodes, plain, threads);
  test_values<int64_t, int32_t, uint64_t>(relabel, graph, nodes, plain, threads);

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

// Rows of every length, split one entry and eight entries at a time.
template <typename Index, typename Name, typename Value>
void test_vectors() {
  const auto wide = gas::split_row_by_vectors<Index, Name, Value>();
  if (wide == nullptr) return;
  std::mt19937 random(3);
  for (int64_t count = 0; count < 70; ++count) {
    std::vector<int32_t> col(count);
    std::vector<Name> name(count);
    std::vector<int32_t> local(90, -1);
    std::vector<Value> value(count);
    for (int32_t i = 0; i < 30; ++i) local[random() % 90] = i;
    for (int64_t e = 0; e < count; ++e) {
      col[e] = random() % 90;
      name[e] = static_cast<Name>(random());
      value[e] = static_cast<Value>(random());
    }
    for (const bool full : {false, true}) {
      struct Out {  // With more room than is needed, which stays as it is.
        std::vector<Index> col;
        std::vector<int64_t> e_id;
        std::vector<Value> value;
        std::vector<int32_t> halo;
      } found[2];
      for (Out& out : found) {
        out = {std::vector<Index>(count + 9, 5), std::vector<int64_t>(count + 9, 5),
               std::vector<Value>(count + 9, 5), std::vector<int32_t>(count + 9)};
        const gas::Entries<Index, Name, Value> entries{col.data(),
                                                       local.data(),
                                                       full ? name.data() : nullptr,
                                                       full ? value.data() : nullptr,
                                                       out.col.data(),
                                                       out.e_id.data(),
                                                       out.value.data()};
        const auto split = &out == found ? gas::split_row<Index, Name, Value> : wide;
        const int64_t from = count / 3;  // Of a row that begins later, to a later place.
        const int32_t* end = split(entries, from, count - from, from + 2, out.halo.data());
        out.halo.resize(end - out.halo.data());
      }
      CHECK(found[0].col == found[1].col && found[0].e_id == found[1].e_id);
      CHECK(found[0].value == found[1].value && found[0].halo == found[1].halo);
    }
  }
}

// Sets whose members are in one word, in neighbouring words, and far from each other.
void test_set() {
  const int64_t num_nodes = 5000000;
  std::mt19937 random(5);
  std::vector<gas::NodeSet> sets(3, gas::NodeSet(num_nodes));
  for (const int64_t range : {int64_t{60}, int64_t{9000}, num_nodes}) {
    for (const int64_t count : {0, 1, 40, 3000}) {
      std::set<int64_t> expected;
      for (gas::NodeSet& set : sets) {
        for (int round = 0; round < 2; ++round) {
          std::vector<int32_t> nodes(count);
          for (int32_t& node : nodes) node = static_cast<int32_t>(num_nodes - 1 - random() % range);
          expected.insert(nodes.begin(), nodes.end());
          set.add(nodes.data(), count);
        }
      }
      for (int round = 0; round < 2; ++round) {  // They are empty after.
        std::vector<int64_t> found;
        gas::NodeSet::take(sets, [&](int64_t node) { found.push_back(node); });
        CHECK(found == std::vector<int64_t>(expected.begin(), expected.end()));
        expected.clear();
      }
    }
  }
}

void test_bad_batches() {
  const Graph graph = random_graph(10, 40);
  gas::Relabeler relabel(10, true);
  const auto start = [&](std::vector<int64_t> nodes) {
    relabel.start(graph.rowptr.data(), nodes.data(), nodes.size());
  };
  CHECK_THROWS(start({1, 10}), std::out_of_range);
  CHECK_THROWS(start({1, -1}), std::out_of_range);
  CHECK_THROWS(start({1, 2, 1}), std::invalid_argument);
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
  test_vectors<int32_t, int32_t, uint32_t>();
  test_vectors<int32_t, int64_t, uint64_t>();
  test_vectors<int64_t, int64_t, uint32_t>();
  test_vectors<int64_t, int32_t, uint64_t>();
  test_set();
}
