#include "graph/keep.h"

#include <array>

#include "common/parallel_rows.h"

namespace gas {
namespace {

constexpr int64_t kGrain = 16 * 1024;  // Rows and entries: below, waking a thread costs more.

}  // namespace

int64_t kept_entries(const int32_t* rowptr, int64_t num_rows, const int64_t* id,
                     const uint8_t* kept, int32_t* out_rowptr, int64_t* out_entry, int threads) {
  const Sparse rows{num_rows, rowptr[num_rows], rowptr, nullptr, nullptr};
  std::array<int64_t, kParts> start{};  // Entries kept by each part, then by all parts before it.
  parallel_parts(rows, Hubs(), kGrain, threads, [&](int64_t part, int64_t begin, int64_t end) {
    int64_t count = 0;
    for (int64_t e = rowptr[begin]; e < rowptr[end]; ++e) count += kept[id[e]] != 0;
    start[part] += count;
  });
  int64_t total = 0;
  for (int64_t& count : start) {
    const int64_t before = total;
    total += count;
    count = before;
  }
  out_rowptr[0] = 0;
  parallel_parts(rows, Hubs(), kGrain, threads, [&](int64_t part, int64_t begin, int64_t end) {
    int64_t at = start[part];
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t e = rowptr[row]; e < rowptr[row + 1]; ++e) {
        if (kept[id[e]] != 0) out_entry[at++] = e;
      }
      out_rowptr[row + 1] = static_cast<int32_t>(at);
    }
  });
  return total;
}

}  // namespace gas
