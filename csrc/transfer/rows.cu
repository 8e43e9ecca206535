#include "transfer/rows.h"

#include "common/launch.cuh"

namespace gas::cuda {
namespace {

enum class Indexed { kSource, kDestination };

// One thread moves one word of type T, so that neighbouring threads touch neighbouring bytes.
template <Indexed indexed, typename T>
__global__ void move_rows(const T* src, int64_t row_words, const int64_t* index, int64_t n,
                          T* dst) {
  const int64_t total = n * row_words;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const int64_t row = i / row_words, word = i % row_words;
    const int64_t far = index[row] * row_words + word;
    if constexpr (indexed == Indexed::kSource) {
      dst[i] = src[far];
    } else {
      dst[far] = src[i];
    }
  }
}

template <Indexed indexed, typename T>
void move(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
          uintptr_t stream) {
  const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(T));
  launch("moving rows", move_rows<indexed, T>, blocks_for(n * row_words), stream,
         reinterpret_cast<const T*>(src), row_words, index, n, reinterpret_cast<T*>(dst));
}

// The widest word that divides the row and to which both tables are aligned.
template <Indexed indexed>
void dispatch(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
              uintptr_t stream) {
  if (n == 0 || row_bytes == 0) return;
  const uintptr_t bits =
      reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst) | row_bytes;
  if (bits % 16 == 0) return move<indexed, int4>(src, row_bytes, index, n, dst, stream);
  if (bits % 8 == 0) return move<indexed, int2>(src, row_bytes, index, n, dst, stream);
  if (bits % 4 == 0) return move<indexed, int>(src, row_bytes, index, n, dst, stream);
  if (bits % 2 == 0) return move<indexed, short>(src, row_bytes, index, n, dst, stream);
  return move<indexed, char>(src, row_bytes, index, n, dst, stream);
}

}  // namespace

void gather_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                 uintptr_t stream) {
  dispatch<Indexed::kSource>(src, row_bytes, index, n, dst, stream);
}

void scatter_rows(const char* src, int64_t row_bytes, const int64_t* index, int64_t n, char* dst,
                  uintptr_t stream) {
  dispatch<Indexed::kDestination>(src, row_bytes, index, n, dst, stream);
}

}  // namespace gas::cuda
