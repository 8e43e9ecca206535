// A set of nodes that is listed in order without looking at every node of the graph.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace gas {

// A bit per node, a bit for each word of these that isn't 0, and a bit for each word of those: what
// is looked at in full is a word for 2^18 nodes.
class NodeSet {
 public:
  explicit NodeSet(int64_t num_nodes) {
    for (auto& words : levels_) words.assign((num_nodes = (num_nodes + 63) / 64), 0);
  }

  // Adds nodes, whose array is overwritten: those that are new come first.
  void add(int32_t* nodes, int64_t count) {
    auto& [bits, words, groups] = levels_;
    int64_t fresh = 0;
    // Most are in the set already, in no predictable order: a branch would be mispredicted.
    for (int64_t i = 0; i < count; ++i) {
      const int32_t node = nodes[i];
      const uint64_t word = bits[node / 64], bit = uint64_t{1} << (node % 64);
      bits[node / 64] = word | bit;
      nodes[fresh] = node;
      fresh += (word & bit) == 0;
    }
    for (int64_t i = 0; i < fresh; ++i) {
      const int32_t word = nodes[i] / 64, group = word / 64;
      words[group] |= uint64_t{1} << (word % 64);
      groups[group / 64] |= uint64_t{1} << (group % 64);
    }
  }

  // Calls visit(node) for every node that is in one of the sets, in increasing order, and empties
  // them.
  template <typename Visit>
  static void take(std::vector<NodeSet>& sets, const Visit& visit) {
    const auto each = [&](int level, int64_t at, const auto& body) {
      uint64_t word = 0;
      for (NodeSet& set : sets) word |= std::exchange(set.levels_[level][at], 0);
      for (; word != 0; word &= word - 1) body(at * 64 + __builtin_ctzll(word));
    };
    const int64_t last = sets.empty() ? 0 : static_cast<int64_t>(sets[0].levels_[2].size());
    for (int64_t at = 0; at < last; ++at) {
      each(2, at,
           [&](int64_t group) { each(1, group, [&](int64_t word) { each(0, word, visit); }); });
    }
  }

 private:
  std::array<std::vector<uint64_t>, 3> levels_;
};

}  // namespace gas
