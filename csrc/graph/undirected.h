// An undirected graph from a list of edges, for partitioners.
#pragma once

#include <cstdint>

namespace gas {

// Both directions of every edge, once, without self-loops, as compressed sparse rows with columns
// sorted in each row.
//   weight:     [num_edges], none negative, or null. Those of duplicates and of both directions add
//               up; where nothing remains, there is no edge,
//   rowptr:     [num_nodes + 1],
//   col:        room for 2 * num_edges entries, int32_t or int64_t by `index_bytes`,
//   out_weight: room for as many, or null without weights.
// Returns how many entries there are. Beyond them nothing is written, so that room which the system
// has only promised is never taken: besides what is returned, this needs an eighth of the entries.
// Throws std::out_of_range for an id outside [0, num_nodes), before anything is written.
int64_t undirected(const int64_t* src, const int64_t* dst, const int32_t* weight, int64_t num_edges,
                   int64_t num_nodes, int64_t index_bytes, int64_t* rowptr, void* col,
                   int64_t* out_weight, int threads);

}  // namespace gas
