// Runs CUDA kernels on the CPU, so that the tests can look at what they compute where there is no
// device. launch.h includes this when a .cu file is compiled by a C++ compiler.
//
// A CUDA thread is a fiber. Blocks run one after the other; the fibers of a block take turns, each
// going on until it waits for others at a barrier or in a shuffle. Those who wait for a thread that
// never comes stop the program, as do shuffles with lanes that are not in their mask, and launches
// of no block. Everything lives on one thread of the CPU, so that sanitizers see accesses out of
// bounds or misaligned (alignments are those of the device), and blocks and fibers can start in
// either order (`reversed`): most results that lack a barrier, or have two writers, differ then.
//
// What this can't show: races between blocks, or between threads that barriers don't order but that
// happen to take turns well; the device's memory model; limits of the hardware, such as its
// registers and shared memory; arithmetic that rounds differently, such as fused multiply-adds and
// expf; speed.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __shared__ static  // Of the one block that runs.
#define __launch_bounds__(...)

struct Place {
  unsigned x;
};
inline Place threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

namespace on_host {

inline bool reversed = false;  // The order in which blocks and threads take turns.
inline int64_t launches = 0;

constexpr unsigned kWarpLanes = 32;
constexpr size_t kStackBytes = 64 * 1024;  // The address sanitizer clears it at each change.

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "CUDA on the host: %s (block %u, thread %u)\n", what, blockIdx.x,
               threadIdx.x);
  std::exit(1);
}

// Changes from one stack to another, and tells the address sanitizer.
struct Context {
  ucontext_t context{};
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake = nullptr;

  void change_to(Context& other, bool forever = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(forever ? nullptr : &fake, other.stack, other.stack_bytes);
    swapcontext(&context, &other.context);
    arrive();
#else
    static_cast<void>(forever);
    swapcontext(&context, &other.context);
#endif
  }
  void arrive([[maybe_unused]] Context* from = nullptr) {
#if defined(__SANITIZE_ADDRESS__)
    const void* stack_left;
    size_t bytes_left;
    __sanitizer_finish_switch_fiber(fake, &stack_left, &bytes_left);
    if (from != nullptr) from->stack = stack_left, from->stack_bytes = bytes_left;
#endif
  }
};

struct Barrier {
  unsigned arrived = 0;
  int64_t passed = 0;
};

// Lanes of a warp that shuffle. No lane reaches the next shuffle but one before all have read.
struct Meeting {
  Barrier barrier;
  uint64_t values[2][kWarpLanes];
};

struct Block {
  Context scheduler;
  std::vector<Context> threads;
  std::vector<bool> ended;
  std::vector<std::map<unsigned, Meeting>> warps;  // By mask.
  Barrier all;
  unsigned alive = 0;
  bool moved = false;  // A lane has advanced since all were asked.
  const std::function<void()>* kernel = nullptr;

  // Gives the turn to others until `expected` threads have met.
  void wait(Barrier& barrier, const unsigned& expected) {
    const unsigned self = threadIdx.x;
    const int64_t turn = barrier.passed;
    moved = true;
    ++barrier.arrived;
    while (true) {
      if (barrier.passed == turn && barrier.arrived >= expected) {
        barrier.arrived = 0;
        ++barrier.passed;
      }
      if (barrier.passed != turn) return;
      threads[self].change_to(scheduler);
    }
  }
};
inline Block* block = nullptr;

inline void start() {
  const unsigned self = threadIdx.x;
  block->threads[self].arrive(&block->scheduler);
  (*block->kernel)();
  block->ended[self] = block->moved = true;
  --block->alive;
  block->threads[self].change_to(block->scheduler, true);
}

inline void run_block(unsigned threads, const std::function<void()>& kernel) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < threads) stacks.emplace_back(new char[kStackBytes]);
  Block here;
  here.threads.resize(threads);
  here.ended.resize(threads);
  here.warps.resize((threads + kWarpLanes - 1) / kWarpLanes);
  here.alive = threads;
  here.kernel = &kernel;
  for (unsigned i = 0; i < threads; ++i) {
    Context& thread = here.threads[i];
    getcontext(&thread.context);
    thread.stack = thread.context.uc_stack.ss_sp = stacks[i].get();
    thread.stack_bytes = thread.context.uc_stack.ss_size = kStackBytes;
    makecontext(&thread.context, start, 0);
  }
  block = &here;
  while (here.alive > 0) {
    here.moved = false;
    for (unsigned i = 0; i < threads; ++i) {
      threadIdx.x = reversed ? threads - 1 - i : i;
      if (!here.ended[threadIdx.x]) here.scheduler.change_to(here.threads[threadIdx.x]);
    }
    require(here.moved, "threads wait for others that never come");
  }
  block = nullptr;
}

template <typename Kernel>
void run(int64_t blocks, unsigned threads, const Kernel& kernel) {
  require(blocks > 0, "a launch of no block");
  ++launches;
  blockDim.x = threads;
  gridDim.x = static_cast<unsigned>(blocks);
  for (unsigned i = 0; i < gridDim.x; ++i) {
    blockIdx.x = reversed ? gridDim.x - 1 - i : i;
    run_block(threads, kernel);
  }
}

// The value that another lane of the mask gives.
template <typename T>
T exchange(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const unsigned lane = threadIdx.x % kWarpLanes;
  require(mask >> lane & 1u, "a thread is not in the mask that it gives");
  require(from < kWarpLanes && mask >> from & 1u, "a shuffle reads a lane that is not in its mask");
  const auto lanes = static_cast<unsigned>(__builtin_popcount(mask));
  Meeting& meeting = block->warps[threadIdx.x / kWarpLanes][mask];
  uint64_t* values = meeting.values[meeting.barrier.passed % 2];
  std::memcpy(&values[lane], &value, sizeof value);
  block->wait(meeting.barrier, lanes);
  std::memcpy(&value, &values[from], sizeof value);
  return value;
}

}  // namespace on_host

inline void __syncthreads() { on_host::block->wait(on_host::block->all, on_host::block->alive); }

// Returns true if the predicate of any thread is true. Predicates of the next call are collected
// behind a barrier that all have passed.
inline int __syncthreads_or(int predicate) {
  static bool any;
  __syncthreads();
  any = false;
  __syncthreads();
  if (predicate != 0) any = true;
  __syncthreads();
  return any;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  const unsigned lane = threadIdx.x % on_host::kWarpLanes;
  return on_host::exchange(mask, value, lane ^ static_cast<unsigned>(step));
}

template <typename T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}

// Of the kernels of csrc/transfer/codec.cu and rows.cu.
struct alignas(8) int2 {
  int32_t x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyintf(x)); }
