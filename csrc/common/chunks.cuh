// How the rows of a sparse matrix are shared among teams of lanes.
//
// The work of a row is one, and one more for each entry. It is cut into chunks of equal size, each
// for one team. A row belongs to the chunk that it begins in, if it has no more entries than the
// size of a chunk: so a team does less than two chunks of work. A longer row is cut where chunks end.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "common/matrix.h"

namespace gas::cuda {

struct Chunks {
  int64_t size, count;

  Chunks(const Sparse& m, int team) : size(32) {
    // Lanes enough to fill any device a few times; more would only add scratch, of which there are
    // two Parts for each lane and tile.
    constexpr int64_t kEnough = 1 << 20;
    const int64_t work = m.num_rows + m.entries;
    while (size * kEnough < work * team) size *= 2;
    count = (work + size - 1) / size;
  }
};

enum class Piece { kWhole, kFirst, kLater };

// Calls body(row, begin, end, piece) for the entries [begin, end) of each row, or piece of a row,
// in a chunk. A later piece of a cut row comes first in its chunk; a first piece may be empty.
template <typename Body>
__device__ void for_pieces(const Sparse& m, const Chunks& chunks, int64_t chunk,
                           const Body& body) {
  const int64_t begin = chunk * chunks.size, end = begin + chunks.size;
  int64_t row = 0;  // The first that begins in the chunk or behind it.
  for (int64_t high = m.num_rows; row < high;) {
    const int64_t middle = (row + high) / 2;
    if (m.rowptr[middle] + middle < begin) {
      row = middle + 1;
    } else {
      high = middle;
    }
  }
  if (row > 0) {  // Entry e of a row is the work e + row + 1.
    const int64_t stop = m.rowptr[row], last = min(stop, end - row);
    if (stop - m.rowptr[row - 1] > chunks.size && begin - row < last) {
      body(row - 1, begin - row, last, Piece::kLater);
    }
  }
  for (; row < m.num_rows; ++row) {
    const int64_t first = m.rowptr[row], stop = m.rowptr[row + 1];
    if (first + row >= end) break;
    const bool whole = stop - first <= chunks.size;
    body(row, first, whole ? stop : end - row - 1, whole ? Piece::kWhole : Piece::kFirst);
  }
}

}  // namespace gas::cuda
