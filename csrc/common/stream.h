// Stream of a device's kernels, and the allocator of their scratch memory.
#pragma once

#include <cstdint>
#include <functional>

namespace gas::cuda {

struct Stream {
  uintptr_t raw;  // A cudaStream_t.
  // Returns device memory of that many bytes, aligned to 16, that is not reused before the
  // stream has passed the call that requested it.
  std::function<uintptr_t(int64_t)> allocate;

  template <typename T>
  T* scratch(int64_t n) const {
    return reinterpret_cast<T*>(allocate(n * static_cast<int64_t>(sizeof(T))));
  }
};

}  // namespace gas::cuda
