// Host memory that a device reads and writes over the bus.
#pragma once

#include <cstdint>

namespace gas::cuda {

// Lets every CUDA device use memory of the host at its own address, and takes that back. Both wait
// for the system, and pages stay in memory in between. Throws std::runtime_error, with CUDA's
// reason, where that can't be done.
void pin(char* memory, int64_t bytes);
void unpin(char* memory);

}  // namespace gas::cuda
