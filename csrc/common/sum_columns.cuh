// Sums over the rows of a table.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "common/stream.h"

namespace gas::cuda {

// out[group, i] = the sum of in[row, i] over a group of neighbouring rows; zero for none.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    sum_groups(const In* in, int64_t rows, int64_t groups, int64_t n, Out* out) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < groups * n; i += step) {
    const int64_t group = i / n, column = i % n;
    double sum = 0;
    for (int64_t row = rows * group / groups; row < rows * (group + 1) / groups; ++row) {
      sum += static_cast<double>(in[row * n + column]);
    }
    out[i] = static_cast<Out>(sum);
  }
}

// out[i] = the sum of in[row, i] over the rows, in groups that depend on their number alone.
template <typename In, typename Out>
void sum_columns(const char* what, const In* in, int64_t rows, int64_t n, Out* out,
                 const Stream& stream) {
  constexpr int64_t kGroups = 128;
  if (n == 0) return;
  if (rows < 2 * kGroups) {
    launch(what, sum_groups<In, Out>, blocks_for(n), stream.raw, in, rows, int64_t{1}, n, out);
    return;
  }
  double* groups = stream.scratch<double>(kGroups * n);
  launch(what, sum_groups<In, double>, blocks_for(kGroups * n), stream.raw, in, rows, kGroups, n,
         groups);
  launch(what, sum_groups<double, Out>, blocks_for(n), stream.raw, groups, kGroups, int64_t{1}, n,
         out);
}

}  // namespace gas::cuda
