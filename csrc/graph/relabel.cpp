#include "graph/relabel.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/parallel.h"
#include "common/processor.h"
#include "common/simd.h"
#include "graph/sort_row.h"
#include "graph/split_row.h"

namespace gas {
namespace {

constexpr int64_t kGrainEdges = 16 * 1024;  // Some 20 us of work for a thread.
constexpr int64_t kColumns = 4 * 1024;      // Added to a set at once: they stay in the cache.

// Splits the rows so that every chunk has about the same number of edges.
template <typename Body>
void parallel_rows(const std::vector<int64_t>& rowptr, int threads, const Body& body) {
  const auto row_of = [&](int64_t edge) {
    return std::lower_bound(rowptr.begin(), rowptr.end(), edge) - rowptr.begin();
  };
  const int64_t num_edges = rowptr.back();
  parallel_chunks(num_edges, kGrainEdges, threads, [&](int worker, int64_t begin, int64_t end) {
    body(worker, row_of(begin), row_of(end));
  });
}

// Gives columns of the halo, which are -1 - their global id, their local ids.
template <typename Index>
void number(Index* col, int64_t from, int64_t to, const int32_t* local) {
  on_processor([=]() GAS_INLINED {
    GAS_INDEPENDENT_LOOP
    for (int64_t e = from; e < to; ++e) {
      const Index id = col[e], node = id < 0 ? ~id : 0;
      const Index known = local[node];
      col[e] = id < 0 ? known : id;
    }
  });
}

// out[e] = value[edge[e]] for e in [from, to).
template <typename T, typename To>
void write_values(const T* value, const int64_t* edge, int64_t from, int64_t to, To* out) {
  for (int64_t e = from; e < to; ++e) out[e] = value[edge[e]];
}

}  // namespace

Relabeler::Relabeler(int64_t num_nodes, bool sorted_rows)
    : num_nodes_(num_nodes), sorted_rows_(sorted_rows) {
  if (num_nodes < 0 || num_nodes > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("num_nodes is " + std::to_string(num_nodes) +
                                ", expected at most 2^31 - 1");
  }
  local_.assign(num_nodes, -1);
  batch_rowptr_.assign(1, 0);
}

void Relabeler::clear() {
  for (const int64_t node : batch_) local_[node] = -1;
  for (const int64_t node : halo_) local_[node] = -1;
  batch_.clear();
  halo_.clear();
  batch_rowptr_.assign(1, 0);
}

int64_t Relabeler::start(const int64_t* rowptr, const int64_t* nodes, int64_t size) {
  clear();
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
  return batch_rowptr_.back();
}

// Writes every row, own columns first, and collects those of others.
template <typename Index, typename Name, typename Value>
void Relabeler::split(const int64_t* rowptr, const int32_t* col, const Name* e_id,
                      const Value* value, Index* out_col, int64_t* out_eid, Value* out_value,
                      int threads) {
  const Entries<Index, Name, Value> entries{col,     local_.data(), e_id,     value,
                                            out_col, out_eid,       out_value};
  const auto wide = split_row_by_vectors<Index, Name, Value>();
  const auto row = wide ? wide : split_row<Index, Name, Value>;
  parallel_rows(batch_rowptr_, threads, [&](int worker, int64_t begin, int64_t end) {
    std::vector<int32_t>& columns = columns_[worker];
    int64_t known = 0;
    const auto add = [&] { met_[worker].add(columns.data(), std::exchange(known, 0)); };
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = batch_rowptr_[i], count = batch_rowptr_[i + 1] - at;
      if (known + count > static_cast<int64_t>(columns.size())) {
        add();
        columns.resize(std::max(kColumns, count));
      }
      known = row(entries, rowptr[batch_[i]], count, at, columns.data() + known) - columns.data();
    }
    add();
  });
}

// Lists the nodes that were met outside the batch, in increasing order, and numbers them.
void Relabeler::list_halo() {
  NodeSet::take(met_, [&](int64_t node) {
    local_[node] = static_cast<int32_t>(batch_.size() + halo_.size());
    halo_.push_back(node);
  });
}

template <typename Index, typename Name>
int64_t Relabeler::cut(const int64_t* rowptr, const int32_t* col, const Name* e_id,
                       const void* value, int64_t value_bytes, Index* out_rowptr, Index* out_col,
                       int64_t* out_eid, void* out_value, int threads) {
  if (!halo_.empty()) throw std::invalid_argument("cut() must follow start()");
  if (batch_rowptr_.back() > std::numeric_limits<Index>::max()) {
    throw std::invalid_argument("the batch has " + std::to_string(batch_rowptr_.back()) +
                                " edges, expected fewer than 2^31: take fewer nodes");
  }
  while (met_.size() < static_cast<size_t>(threads)) met_.emplace_back(num_nodes_);
  columns_.resize(met_.size());
  std::copy(batch_rowptr_.begin(), batch_rowptr_.end(), out_rowptr);

  // Values are moved as bits. Where rows will be sorted, names and values come after.
  const bool has_values = value_bytes != 0;
  const auto of_type = [&](const auto& body) {
    value_bytes == 8 ? body(static_cast<const uint64_t*>(value), static_cast<uint64_t*>(out_value))
                     : body(static_cast<const uint32_t*>(value), static_cast<uint32_t*>(out_value));
  };
  of_type([&](auto* values, auto* out_values) {
    split(rowptr, col, in_order_ ? e_id : nullptr, in_order_ && has_values ? values : nullptr,
          out_col, out_eid, out_values, threads);
  });
  list_halo();
  parallel_rows(batch_rowptr_, threads, [&](int, int64_t begin, int64_t end) {
    const int64_t from = batch_rowptr_[begin], to = batch_rowptr_[end];
    number(out_col, from, to, local_.data());
    if (in_order_) return;
    std::vector<std::pair<Index, int64_t>> scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = batch_rowptr_[i];
      sort_row(out_col + at, out_eid + at, batch_rowptr_[i + 1] - at, scratch);
    }
    of_type([&](auto* values, auto* out_values) {
      if (has_values) write_values(values, out_eid, from, to, out_values);
    });
    if (e_id) write_values(e_id, out_eid, from, to, out_eid);
  });
  return static_cast<int64_t>(halo_.size());
}

void Relabeler::list(int64_t* n_id) const {
  std::copy(halo_.begin(), halo_.end(), std::copy(batch_.begin(), batch_.end(), n_id));
}

#define GAS_CUT(Index, Name)                                                                \
  template int64_t Relabeler::cut(const int64_t*, const int32_t*, const Name*, const void*, \
                                  int64_t, Index*, Index*, int64_t*, void*, int);
GAS_CUT(int32_t, int32_t)
GAS_CUT(int32_t, int64_t)
GAS_CUT(int64_t, int32_t)
GAS_CUT(int64_t, int64_t)
#undef GAS_CUT

}  // namespace gas
