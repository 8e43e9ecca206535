#include "graph/starts.h"

#include "common/launch.cuh"

namespace gas::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    search(Sparse m, int64_t step, int64_t steps, int32_t* start) {
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i <= steps; i += threads) {
    const int64_t begin = i * step;
    int64_t row = 0;
    for (int64_t high = m.num_rows; row < high;) {
      const int64_t middle = (row + high) / 2;
      if (m.rowptr[middle] + middle < begin) {
        row = middle + 1;
      } else {
        high = middle;
      }
    }
    start[i] = static_cast<int32_t>(row);
  }
}

}  // namespace

void find_starts(const Sparse& m, int64_t step, int32_t* start, uintptr_t stream) {
  const int64_t steps = steps_of(m, step);
  launch("find_starts", search, blocks_for(steps + 1), stream, m, step, steps, start);
}

}  // namespace gas::cuda
