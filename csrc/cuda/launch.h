// What every launch needs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace gas::cuda {

constexpr int kThreads = 256;

// Blocks for `items` threads; kernels loop over what a full grid leaves.
inline unsigned blocks_for(int64_t items) {
  constexpr int64_t kMostBlocks = 65535;
  return static_cast<unsigned>(std::min((items + kThreads - 1) / kThreads, kMostBlocks));
}

inline cudaStream_t as_stream(uintptr_t raw) { return reinterpret_cast<cudaStream_t>(raw); }

inline void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + " on the device failed: " +
                             cudaGetErrorString(error));
  }
}

}  // namespace gas::cuda
