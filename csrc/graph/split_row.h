// The entries of a row of the graph, own columns first.
#pragma once

#include <cstdint>

namespace gas {

// Inputs and outputs for the entries of rows.
template <typename Index, typename Name, typename Value>
struct Entries {
  const int32_t* col;
  const int32_t* local;  // Of each node of the graph its place among the own ones, or -1.
  const Name* e_id;      // Id of each entry, or null for its position.
  const Value* value;    // With `out_value`: moved as bits, or null.
  Index* out_col;        // Local ids of own columns; of the others -1 - id.
  int64_t* out_eid;
  Value* out_value;
};

// Writes `count` entries from `first` on to the places from `at` on: those of own columns, then the
// others, each in order. Appends the others' columns to `halo`, where there is room for `count`,
// and returns its end.
template <typename Index, typename Name, typename Value>
using SplitRow = int32_t* (*)(const Entries<Index, Name, Value>& entries, int64_t first,
                              int64_t count, int64_t at, int32_t* halo);

template <typename Index, typename Name, typename Value>
int32_t* split_row(const Entries<Index, Name, Value>& entries, int64_t first, int64_t count,
                   int64_t at, int32_t* halo);

// The same on vectors of eight entries, 1.5 to 2 times as fast; null where the processor has no
// instruction that compresses them.
template <typename Index, typename Name, typename Value>
SplitRow<Index, Name, Value> split_row_by_vectors();

}  // namespace gas
