#include "augment/subset.h"

#include "common/launch.cuh"
#include "common/random.h"

namespace gas::cuda {
namespace {

// Radix selection from the highest digit down. A round counts the digits of those keys that share
// all digits known so far with the k-th, then one block finds the k-th's next. Keys are computed
// anew in every pass: that takes less time than storing them. Of n keys few are left after
// log2(n) bits, and once it is clear who is drawn, the rounds that remain do nothing.
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kRounds = (64 + kDigitBits - 1) / kDigitBits;

struct Search {
  uint64_t low;   // The least key that shares the digits known so far.
  int64_t left;   // Number of keys to draw among equal prefixes: 0 once `last` is known.
  uint64_t last;  // Keys up to this one are drawn, if any are.
  unsigned long long count[kDigits];  // Of this round; one of the types that atomicAdd takes.
};

// The bits of a key that no round before this one looked at.
__device__ uint64_t rest(int round) {
  return round < kRounds ? ~uint64_t{0} >> (round * kDigitBits) : 0;
}

// The last round has fewer bits than a digit: those below are zero.
__device__ int digit_of(uint64_t key, int round) {
  return static_cast<int>(key << (round * kDigitBits) >> (64 - kDigitBits));
}

__device__ uint64_t with_digit(uint64_t low, int digit, int round) {
  return low | (static_cast<uint64_t>(digit) << (64 - kDigitBits) >> (round * kDigitBits));
}

__global__ void __launch_bounds__(kThreads) start_search(const int64_t* k, Search* search) {
  for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kThreads) search->count[i] = 0;
  if (threadIdx.x == 0) {
    search->low = 0;
    search->left = *k;
    search->last = ~uint64_t{0};
  }
}

__global__ void __launch_bounds__(kThreads)
    count_digits(int64_t n, uint64_t seed, const uint8_t* among, int round, Search* search) {
  __shared__ unsigned count[kDigits];
  if (search->left <= 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kThreads) count[i] = 0;
  __syncthreads();
  const uint64_t low = search->low, known = ~rest(round);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    if (among != nullptr && among[i] == 0) continue;
    const uint64_t key = random_bits(seed, i);
    if (((key ^ low) & known) == 0) atomicAdd(count + digit_of(key, round), 1u);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kThreads) {
    if (count[i] > 0) atomicAdd(search->count + i, static_cast<unsigned long long>(count[i]));
  }
}

// One block; each thread has some neighbouring digits, and leaves their counts zero.
__global__ void __launch_bounds__(kThreads) find_digit(int round, Search* search) {
  constexpr int kEach = kDigits / kThreads;
  __shared__ int64_t upto[kThreads];  // The sum of the counts of a thread and all before it.
  const int self = static_cast<int>(threadIdx.x), first = self * kEach;
  const int64_t left = search->left;
  if (left <= 0) return;
  int64_t count[kEach], own = 0;
  for (int i = 0; i < kEach; ++i) {
    count[i] = static_cast<int64_t>(search->count[first + i]);
    search->count[first + i] = 0;
    own += count[i];
  }
  upto[self] = own;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int64_t more = self >= step ? upto[self - step] : 0;
    __syncthreads();
    upto[self] += more;
    __syncthreads();
  }
  int64_t rank = left - (upto[self] - own);  // Of the k-th key, among those from a digit on.
  for (int i = 0; i < kEach; rank -= count[i++]) {
    if (rank <= 0 || rank > count[i]) continue;  // All but one digit of one thread.
    const uint64_t low = with_digit(search->low, first + i, round);
    const bool all = rank == count[i];  // That share the digit: no matter which is the k-th.
    search->low = low;
    search->left = all ? 0 : rank;
    if (all) search->last = low | rest(round + 1);
  }
}

__global__ void __launch_bounds__(kThreads)
    mark_drawn(int64_t n, const int64_t* k, uint64_t seed, const uint8_t* among,
               const Search* search, uint8_t* drawn) {
  const uint64_t last = search->last;
  const bool any = *k > 0;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    const bool member = among == nullptr || among[i] != 0;
    drawn[i] = any && member && random_bits(seed, i) <= last;
  }
}

}  // namespace

void draw_subset(int64_t n, const int64_t* k, uint64_t seed, const uint8_t* among, uint8_t* drawn,
                 const Stream& stream) {
  constexpr int64_t kPerBlock = 4 * kDigits;  // A block has up to kDigits counts to add to others'.
  constexpr int64_t kEnough = 1 << 11;        // Blocks that fill any device.
  if (n == 0) return;
  Search* search = stream.scratch<Search>(1);
  launch("draw_subset", start_search, 1, stream.raw, k, search);
  const int64_t blocks = std::min((n + kPerBlock - 1) / kPerBlock, kEnough);
  for (int round = 0; round < kRounds; ++round) {
    launch("draw_subset", count_digits, blocks, stream.raw, n, seed, among, round, search);
    launch("draw_subset", find_digit, 1, stream.raw, round, search);
  }
  launch("draw_subset", mark_drawn, blocks_for(n), stream.raw, n, k, seed, among, search, drawn);
}

}  // namespace gas::cuda
