#include "transfer/rows.h"

#include "common/launch.cuh"
#include "transfer/team.cuh"

namespace gas::cuda {
namespace {

enum class Indexed { kSource, kDestination };

// A team of 2^shift lanes, at most a warp, moves one row after the other, neighbouring lanes
// neighbouring words of type T: nothing is divided.
template <Indexed indexed, typename T>
__global__ void move_rows(const T* __restrict__ src, int64_t row_words,
                          const int64_t* __restrict__ index, int64_t n, int shift,
                          T* __restrict__ dst) {
  const int lanes = 1 << shift, lane = threadIdx.x & (lanes - 1);
  const int64_t teams = (int64_t{gridDim.x} * blockDim.x) >> shift;
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> shift;
  for (int64_t row = first; row < n; row += teams) {
    const int64_t far = index[row] * row_words, near = row * row_words;
    const T* from = src + (indexed == Indexed::kSource ? far : near);
    T* to = dst + (indexed == Indexed::kSource ? near : far);
    for (int64_t word = lane; word < row_words; word += lanes) to[word] = from[word];
  }
}

template <Indexed indexed, typename T>
void move(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
          int64_t most_blocks, uintptr_t stream) {
  const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(T));
  const int shift = team_shift(row_words);
  launch("moving rows", move_rows<indexed, T>, std::min(blocks_for(n << shift), most_blocks),
         stream, reinterpret_cast<const T*>(src), row_words, index, n, shift,
         reinterpret_cast<T*>(dst));
}

// The widest word that divides the row and to which both tables are aligned.
template <Indexed indexed>
void dispatch(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
              int64_t most_blocks, uintptr_t stream) {
  if (n == 0 || row_bytes == 0) return;
  const uintptr_t bits =
      reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst) | row_bytes;
  if (bits % 16 == 0)
    return move<indexed, int4>(src, row_bytes, index, n, dst, most_blocks, stream);
  if (bits % 8 == 0) return move<indexed, int2>(src, row_bytes, index, n, dst, most_blocks, stream);
  if (bits % 4 == 0) return move<indexed, int>(src, row_bytes, index, n, dst, most_blocks, stream);
  if (bits % 2 == 0)
    return move<indexed, short>(src, row_bytes, index, n, dst, most_blocks, stream);
  return move<indexed, char>(src, row_bytes, index, n, dst, most_blocks, stream);
}

}  // namespace

void gather_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                 int64_t most_blocks, uintptr_t stream) {
  dispatch<Indexed::kSource>(src, row_bytes, index, n, dst, most_blocks, stream);
}

void scatter_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                  int64_t most_blocks, uintptr_t stream) {
  dispatch<Indexed::kDestination>(src, row_bytes, index, n, dst, most_blocks, stream);
}

}  // namespace gas::cuda
