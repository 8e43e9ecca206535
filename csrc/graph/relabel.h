// One mini-batch of a graph: the rows of its nodes, with columns renumbered.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace gas {

// Cuts the rows of some nodes out of compressed sparse rows and renumbers their columns: the
// batch's own nodes come first, in the order given, then the halo (every other node that a row
// refers to) in increasing global id.
//
// No edge is hashed. A bit per node and thread collects the columns, a scan over the bits lists
// the halo in order, and one table maps global to local ids. Both live as long as the object, so
// a batch costs O(its edges) plus a scan of num_nodes / 64 words.
//
// One batch at a time: `count`, then `write` with the same arguments.
class Relabeler {
 public:
  // `sorted_rows` says that columns are sorted in each row, which saves sorting them again.
  Relabeler(int64_t num_nodes, bool sorted_rows);

  // Returns {number of edges, number of halo nodes}. Throws std::out_of_range for an id outside
  // the graph and std::invalid_argument for a node listed twice.
  std::pair<int64_t, int64_t> count(const int64_t* rowptr, const int64_t* col,
                                    const int64_t* nodes, int64_t num_nodes_in_batch, int threads);

  // Writes the batch that was counted.
  //   e_id:       what to call each entry of `col`, or null for its position,
  //   value:      `value_bytes` for each entry of `col`: 4, 8, or 0 for none,
  //   out_rowptr: [batch + 1], out_col: [edges], local ids, sorted in each row; Index is int32_t,
  //               if the number of edges fits, or int64_t,
  //   out_eid:    [edges], out_value: [edges], of each edge,
  //   halo:       [halo], global ids.
  template <typename Index>
  void write(const int64_t* rowptr, const int64_t* col, const int64_t* nodes,
             int64_t num_nodes_in_batch, const int64_t* e_id, const void* value,
             int64_t value_bytes, Index* out_rowptr, Index* out_col, int64_t* out_eid,
             void* out_value, int64_t* halo, int threads);

 private:
  void clear();
  void list_halo();

  int64_t num_nodes_;
  bool sorted_rows_;
  bool in_order_ = false;                   // Whether the batch's rows come out sorted.
  std::vector<int32_t> local_;              // Global to local id, -1 outside the batch.
  std::vector<std::vector<uint64_t>> met_;  // One bit per node, two maps per thread.
  std::vector<int64_t> batch_, halo_;       // What `local_` holds now.
  std::vector<int64_t> batch_rowptr_;
};

}  // namespace gas
