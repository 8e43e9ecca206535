#include "graph/undirected.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/parallel.h"

namespace gas {
namespace {

constexpr int64_t kGrainRows = 1024;
constexpr int64_t kBlocks = 8;  // Each reads all edges once, and holds the entries of its rows.
constexpr int64_t kLeastEntries = 1 << 16;

// `start[r]`: where the entries of row r would start if none were dropped; becomes rowptr.
template <typename Index, bool kWeighted>
int64_t write_rows(const int64_t* src, const int64_t* dst, const int32_t* weight, int64_t num_edges,
                   int64_t num_nodes, int64_t* start, void* out_col, int64_t* out_weight,
                   int threads) {
  using Entry = std::conditional_t<kWeighted, std::pair<Index, int64_t>, Index>;
  Index* col = static_cast<Index*>(out_col);
  const int64_t most = std::max(start[num_nodes] / kBlocks, kLeastEntries);
  std::vector<Entry> entries;
  std::vector<int64_t> begin, end;  // Of each row, in `entries`.
  int64_t written = 0;
  for (int64_t low = 0, first = 0; low < num_nodes;) {
    // `start[low]` is a row pointer by now, which is why `first` is kept apart.
    const int64_t* after =
        std::upper_bound(start + low + 1, start + num_nodes + 1, first + most) - 1;
    const int64_t high = std::max(low + 1, static_cast<int64_t>(after - start));
    const int64_t rows = high - low, next = start[high];
    entries.resize(next - first);
    begin.assign(rows, 0);
    for (int64_t r = 1; r < rows; ++r) begin[r] = start[low + r] - first;
    end = begin;

    const auto add = [&](int64_t row, int64_t other, int64_t edge) {
      if (row < low || row >= high) return;
      Entry& entry = entries[end[row - low]++];
      if constexpr (kWeighted) {
        entry = {static_cast<Index>(other), weight[edge]};
      } else {
        entry = static_cast<Index>(other);
      }
    };
    for (int64_t e = 0; e < num_edges; ++e) {
      if (src[e] == dst[e]) continue;
      add(src[e], dst[e], e);
      add(dst[e], src[e], e);
    }
    parallel_chunks(rows, kGrainRows, threads, [&](int, int64_t from, int64_t to) {
      for (int64_t r = from; r < to; ++r) {
        const auto row = entries.begin() + begin[r], row_end = entries.begin() + end[r];
        std::sort(row, row_end);
        auto kept = row;
        if constexpr (kWeighted) {
          for (auto entry = row; entry != row_end;) {
            Entry sum = *entry++;
            for (; entry != row_end && entry->first == sum.first; ++entry) {
              sum.second += entry->second;
            }
            if (sum.second > 0) *kept++ = sum;
          }
        } else {
          kept = std::unique(row, row_end);
        }
        end[r] = kept - entries.begin();
      }
    });

    for (int64_t r = 0; r < rows; ++r) {
      start[low + r] = written;
      for (int64_t i = begin[r]; i < end[r]; ++i, ++written) {
        if constexpr (kWeighted) {
          std::tie(col[written], out_weight[written]) = entries[i];
        } else {
          col[written] = entries[i];
        }
      }
    }
    low = high;
    first = next;
  }
  start[num_nodes] = written;
  return written;
}

}  // namespace

int64_t undirected(const int64_t* src, const int64_t* dst, const int32_t* weight, int64_t num_edges,
                   int64_t num_nodes, int64_t index_bytes, int64_t* rowptr, void* col,
                   int64_t* out_weight, int threads) {
  for (int64_t e = 0; e < num_edges; ++e) {
    for (const int64_t id : {src[e], dst[e]}) {
      if (id < 0 || id >= num_nodes) {
        throw std::out_of_range("node " + std::to_string(id) + " of edge " + std::to_string(e) +
                                " is outside [0, " + std::to_string(num_nodes) + ")");
      }
    }
  }
  std::fill(rowptr, rowptr + num_nodes + 1, 0);
  for (int64_t e = 0; e < num_edges; ++e) {
    if (src[e] == dst[e]) continue;
    ++rowptr[src[e] + 1];
    ++rowptr[dst[e] + 1];
  }
  for (int64_t r = 0; r < num_nodes; ++r) rowptr[r + 1] += rowptr[r];
  const bool small = index_bytes == 4, weighted = weight != nullptr;
  const auto rows = small ? (weighted ? write_rows<int32_t, true> : write_rows<int32_t, false>)
                          : (weighted ? write_rows<int64_t, true> : write_rows<int64_t, false>);
  return rows(src, dst, weight, num_edges, num_nodes, rowptr, col, out_weight, threads);
}

}  // namespace gas
