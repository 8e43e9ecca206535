// Sorting the entries of one row of compressed sparse rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace gas {

// Sorts entries by (column, id). `scratch` is reused from row to row.
template <typename Index, typename Id>
void sort_row(Index* col, Id* id, int64_t count, std::vector<std::pair<Index, Id>>& scratch) {
  // Ids arrive in order among equal columns, so sorted columns are all there is to see.
  if (std::is_sorted(col, col + count)) return;
  scratch.clear();
  for (int64_t i = 0; i < count; ++i) scratch.emplace_back(col[i], id[i]);
  std::sort(scratch.begin(), scratch.end());
  for (int64_t i = 0; i < count; ++i) std::tie(col[i], id[i]) = scratch[i];
}

}  // namespace gas
