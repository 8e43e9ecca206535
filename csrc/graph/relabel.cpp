#include "graph/relabel.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/parallel.h"
#include "graph/sort_row.h"

namespace gas {
namespace {

constexpr int64_t kGrainEdges = 16 * 1024;  // Some 20 us of work for a thread.
constexpr int64_t kWordBits = 64;

// Splits the rows so that every chunk has about the same number of edges.
template <typename Body>
void parallel_rows(const std::vector<int64_t>& rowptr, int threads, const Body& body) {
  const auto row_of = [&](int64_t edge) {
    return std::lower_bound(rowptr.begin(), rowptr.end(), edge) - rowptr.begin();
  };
  const int64_t num_edges = rowptr.back();
  parallel_chunks(num_edges, kGrainEdges, threads, [&](int chunk, int64_t begin, int64_t end) {
    body(chunk, row_of(begin), row_of(end));
  });
}

// Renumbers one row: the batch's own nodes first, then the halo, each in the order of `col`. The
// row is filled from both ends, then the back is turned round.
template <typename Index>
void write_row(const int64_t* col, int64_t count, const int32_t* local, int64_t size,
               int64_t first, Index* out_col, int64_t* out_edge) {
  int64_t own = 0, halo = count;
  for (int64_t e = 0; e < count; ++e) {
    const Index id = local[col[e]];
    const bool is_own = id < size;
    halo -= !is_own;
    const int64_t at = is_own ? own : halo;
    own += is_own;
    out_col[at] = id;
    out_edge[at] = first + e;
  }
  std::reverse(out_col + halo, out_col + count);
  std::reverse(out_edge + halo, out_edge + count);
}

// out[e] = value[edge[e]] for e in [from, to); values are moved as bits.
template <typename T>
void write_values(const void* value, const int64_t* edge, int64_t from, int64_t to, void* out) {
  for (int64_t e = from; e < to; ++e) {
    static_cast<T*>(out)[e] = static_cast<const T*>(value)[edge[e]];
  }
}

}  // namespace

Relabeler::Relabeler(int64_t num_nodes, bool sorted_rows)
    : num_nodes_(num_nodes), sorted_rows_(sorted_rows) {
  if (num_nodes < 0 || num_nodes > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("num_nodes is " + std::to_string(num_nodes) +
                                ", expected at most 2^31 - 1");
  }
  local_.assign(num_nodes, -1);
}

void Relabeler::clear() {
  for (const int64_t node : batch_) local_[node] = -1;
  for (const int64_t node : halo_) local_[node] = -1;
  batch_.clear();
  halo_.clear();
}

// Lists the nodes that were met outside the batch, in increasing order, and numbers them.
void Relabeler::list_halo() {
  int64_t next = static_cast<int64_t>(batch_.size());
  for (size_t w = 0; w < met_[0].size(); ++w) {
    uint64_t word = 0;
    for (auto& met : met_) word |= std::exchange(met[w], 0);
    for (; word; word &= word - 1) {
      const int64_t node = static_cast<int64_t>(w) * kWordBits + __builtin_ctzll(word);
      if (local_[node] >= 0) continue;
      local_[node] = static_cast<int32_t>(next++);
      halo_.push_back(node);
    }
  }
}

std::pair<int64_t, int64_t> Relabeler::count(const int64_t* rowptr, const int64_t* col,
                                             const int64_t* nodes, int64_t size, int threads) {
  clear();
  const int64_t num_words = (num_nodes_ + kWordBits - 1) / kWordBits;
  while (met_.size() < 2 * static_cast<size_t>(threads)) met_.emplace_back(num_words, 0);
  batch_rowptr_.assign(1, 0);
  batch_rowptr_.reserve(size + 1);
  batch_.reserve(size);
  // Local ids then grow with global ids, among the batch's own nodes as among the halo.
  in_order_ = sorted_rows_ && std::is_sorted(nodes, nodes + size);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t node = nodes[i];
    if (node < 0 || node >= num_nodes_) {
      throw std::out_of_range("node id " + std::to_string(node) + " is outside [0, " +
                              std::to_string(num_nodes_) + ")");
    }
    if (local_[node] >= 0) {
      throw std::invalid_argument("node id " + std::to_string(node) + " is listed twice");
    }
    local_[node] = static_cast<int32_t>(i);
    batch_.push_back(node);
    batch_rowptr_.push_back(batch_rowptr_.back() + rowptr[node + 1] - rowptr[node]);
  }

  // Every thread marks the columns it meets in bits of its own, in-batch nodes included: marking
  // is one unconditional store into a few kilobytes. Neighbouring columns often share a word, so
  // even and odd edges use different maps; one would wait for the other's store.
  parallel_rows(batch_rowptr_, threads, [&](int chunk, int64_t begin, int64_t end) {
    const auto mark = [col](std::vector<uint64_t>& met, int64_t e) {
      met[col[e] / kWordBits] |= uint64_t{1} << (col[e] % kWordBits);
    };
    auto &even = met_[2 * chunk], &odd = met_[2 * chunk + 1];
    for (int64_t i = begin; i < end; ++i) {
      int64_t e = rowptr[nodes[i]];
      for (; e + 1 < rowptr[nodes[i] + 1]; e += 2) {
        mark(even, e);
        mark(odd, e + 1);
      }
      if (e < rowptr[nodes[i] + 1]) mark(even, e);
    }
  });

  list_halo();
  return {batch_rowptr_.back(), static_cast<int64_t>(halo_.size())};
}

template <typename Index>
void Relabeler::write(const int64_t* rowptr, const int64_t* col, const int64_t* nodes,
                      int64_t size, const int64_t* e_id, const void* value,
                      int64_t value_bytes, Index* out_rowptr, Index* out_col,
                      int64_t* out_eid, void* out_value, int64_t* halo, int threads) {
  if (static_cast<int64_t>(batch_.size()) != size) {
    throw std::invalid_argument("write() must follow count() of the same batch");
  }
  if (batch_rowptr_.back() > std::numeric_limits<Index>::max()) {
    throw std::invalid_argument("the batch has " + std::to_string(batch_rowptr_.back()) +
                                " edges, expected fewer than 2^31: take fewer nodes");
  }
  std::copy(batch_rowptr_.begin(), batch_rowptr_.end(), out_rowptr);
  std::copy(halo_.begin(), halo_.end(), halo);

  parallel_rows(batch_rowptr_, threads, [&](int, int64_t begin, int64_t end) {
    std::vector<std::pair<Index, int64_t>> scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = rowptr[nodes[i]], count = rowptr[nodes[i] + 1] - first;
      Index* row_col = out_col + batch_rowptr_[i];
      int64_t* row_eid = out_eid + batch_rowptr_[i];
      write_row(col + first, count, local_.data(), size, first, row_col, row_eid);
      if (!in_order_) sort_row(row_col, row_eid, count, scratch);
    }
    const int64_t from = batch_rowptr_[begin], to = batch_rowptr_[end];
    if (value_bytes == 4) write_values<uint32_t>(value, out_eid, from, to, out_value);
    if (value_bytes == 8) write_values<uint64_t>(value, out_eid, from, to, out_value);
    if (e_id) write_values<int64_t>(e_id, out_eid, from, to, out_eid);
  });
}

template void Relabeler::write(const int64_t*, const int64_t*, const int64_t*, int64_t,
                               const int64_t*, const void*, int64_t, int32_t*, int32_t*, int64_t*,
                               void*, int64_t*, int);
template void Relabeler::write(const int64_t*, const int64_t*, const int64_t*, int64_t,
                               const int64_t*, const void*, int64_t, int64_t*, int64_t*, int64_t*,
                               void*, int64_t*, int);

}  // namespace gas
