#include "augment/ego.h"

#include "common/parallel_rows.h"

namespace gas {
namespace {

constexpr int64_t kGrain = 16 * 1024;

template <bool kShared>
void hop_rows(const Sparse& m, const uint8_t* kept, const double* loops, const double* x,
              double* out, int64_t begin, int64_t last) {
  for (int64_t row = begin; row < last; ++row) {
    double edges = loops[row] * x[2 * row], nodes = loops[row] * x[2 * row + 1];
    for (int64_t e = m.rowptr[row]; e < m.rowptr[row + 1]; ++e) {
      const double* source = x + 2 * static_cast<int64_t>(m.col[e]);
      edges += static_cast<double>(kept[kShared ? m.entry[e] : e]) * source[0];
      nodes += source[1];
    }
    out[2 * row] = edges;
    out[2 * row + 1] = nodes;
  }
}

}  // namespace

void ego_hop(const Sparse& matrix, const uint8_t* kept, const double* loops, const double* x,
             double* out, int threads) {
  const auto hop = matrix.entry == nullptr ? hop_rows<false> : hop_rows<true>;
  parallel_rows(matrix, Hubs(), kGrain, threads,
                [&](int64_t begin, int64_t end) { hop(matrix, kept, loops, x, out, begin, end); });
}

}  // namespace gas
