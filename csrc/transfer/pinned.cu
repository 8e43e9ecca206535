#include "transfer/pinned.h"

#include <cuda_runtime.h>

#include <stdexcept>

namespace gas::cuda {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // Or the next launch would report it.
  throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace

void pin(char* memory, int64_t bytes) {
  check(cudaHostRegister(memory, static_cast<size_t>(bytes),
                         cudaHostRegisterPortable | cudaHostRegisterMapped));
  void* on_device = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&on_device, memory, 0);
  if (error == cudaSuccess && on_device == memory) return;
  unpin(memory);
  check(error);
  throw std::runtime_error("the device would see it at another address");
}

void unpin(char* memory) { check(cudaHostUnregister(memory)); }

}  // namespace gas::cuda
