// Helpers for every launch.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "tests/cuda_on_host.h"  // The C++ tests run kernels on the CPU.
#endif

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace gas::cuda {

constexpr int kThreads = 256;  // Of a block.
constexpr int kBlocks = 2;     // That a multiprocessor has registers for: 128 for each thread.
constexpr int kWarp = 32;

// Blocks for `items` threads; kernels loop over what a full grid leaves.
inline int64_t blocks_for(int64_t items) {
  constexpr int64_t kMostBlocks = 65535;
  return std::min((items + kThreads - 1) / kThreads, kMostBlocks);
}

// Calls kernel(arguments...) in `blocks` blocks, at least one. `what` is for the message of the
// std::runtime_error thrown when the launch fails.
template <typename... Parameters, typename... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), int64_t blocks, uintptr_t stream,
            const Arguments&... arguments) {
  constexpr int64_t kMostBlocks = 0x7fffffff;
  if (blocks > kMostBlocks) {
    throw std::runtime_error(std::string(what) + " needs " + std::to_string(blocks) +
                             " blocks, expected at most " + std::to_string(kMostBlocks));
  }
#ifdef __CUDACC__
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) +
                             " on the device failed: " + cudaGetErrorString(error));
  }
#else
  static_cast<void>(stream);
  on_host::run(blocks, kThreads, [&] { kernel(arguments...); });
#endif
}

}  // namespace gas::cuda
