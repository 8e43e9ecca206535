// One mini-batch of a graph: the rows of its nodes, with columns renumbered.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "graph/node_set.h"

namespace gas {

// Cuts the rows of some nodes out of compressed sparse rows and renumbers their columns: the
// batch's own nodes come first, in the order given, then the halo (every other node that a row
// refers to) in increasing global id.
//
// No edge is hashed. One table maps global to local ids, and every thread collects the columns of
// others in a set of bits, which lists them in order. Both live as long as the object: a batch
// costs O(its edges and nodes), however many nodes the graph has. The graph is read once; what
// doesn't have a number yet keeps its global id until all of the halo is known.
//
// One batch at a time: `start`, then `cut`, then `list`.
class Relabeler {
 public:
  // `sorted_rows` says that columns are sorted in each row, which saves sorting them again.
  Relabeler(int64_t num_nodes, bool sorted_rows);

  // Returns the number of edges of a batch. Throws std::out_of_range for an id outside the graph
  // and std::invalid_argument for a node listed twice.
  int64_t start(const int64_t* rowptr, const int64_t* nodes, int64_t num_nodes_in_batch);

  // Writes the batch that was started; returns the number of halo nodes.
  //   e_id:       what to call each entry of `col`, or null for its position; Name is int32_t or
  //               int64_t,
  //   value:      `value_bytes` for each entry of `col`: 4, 8, or 0 for none,
  //   out_rowptr: [batch + 1], out_col: [edges], local ids, sorted in each row; Index is int32_t,
  //               if the number of edges fits, or int64_t,
  //   out_eid:    [edges], out_value: [edges], of each edge.
  template <typename Index, typename Name>
  int64_t cut(const int64_t* rowptr, const int32_t* col, const Name* e_id, const void* value,
              int64_t value_bytes, Index* out_rowptr, Index* out_col, int64_t* out_eid,
              void* out_value, int threads);

  // Writes the batch's own nodes, then the halo: [batch + halo], global ids.
  void list(int64_t* n_id) const;

 private:
  void clear();
  void list_halo();
  template <typename Index, typename Name, typename Value>
  void split(const int64_t* rowptr, const int32_t* col, const Name* e_id, const Value* value,
             Index* out_col, int64_t* out_eid, Value* out_value, int threads);

  int64_t num_nodes_;
  bool sorted_rows_;
  bool in_order_ = false;                      // The batch's rows come out sorted.
  std::vector<int32_t> local_;                 // Global to local id, -1 outside the batch.
  std::vector<NodeSet> met_;                   // Of each thread.
  std::vector<std::vector<int32_t>> columns_;  // That are to be added to these.
  std::vector<int64_t> batch_, halo_;          // The entries of `local_` that are set.
  std::vector<int64_t> batch_rowptr_;
};

}  // namespace gas
