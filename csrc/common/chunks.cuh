// Assigns the rows of a sparse matrix to teams of lanes.
//
// The work of a row is one, and one more for each entry. It is cut into chunks of equal size, each
// for one team. A row belongs to the chunk that it begins in, if it has no more entries than the
// size of a chunk: so a team does less than two chunks of work. A longer row is cut where chunks
// end.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "common/matrix.h"
#include "graph/starts.h"

namespace gas::cuda {

struct Chunks {
  int64_t size;
  int32_t count;
  int32_t steps, each;  // Of the work on the matrix, and on a chunk.

  // Of all chunks together: they fill any device a few times. More would only add scratch, of which
  // each has two Parts.
  static constexpr int64_t kMostLanes = 1 << 20;

  // `lanes` work on a chunk.
  Chunks(const Sparse& m, int64_t lanes) : Chunks(m, kStep, steps_each(m, lanes)) {
    if (count > 0 && m.start == nullptr) {
      throw std::invalid_argument("a matrix on a device needs its starts");
    }
  }

  Chunks(const Sparse& m, int64_t step, int32_t each)
      : size(step * each),
        count(static_cast<int32_t>(steps_of(m, size))),
        steps(static_cast<int32_t>(steps_of(m, step))),
        each(each) {}

  // The first row that begins in a chunk or behind it. The starts may be those of more rows.
  __device__ int32_t start(const Sparse& m, int32_t chunk) const {
    return min(m.start[min(chunk * each, steps)], static_cast<int32_t>(m.num_rows));
  }

  // The last chunk that has work of a row.
  __device__ int32_t last(const Sparse& m, int64_t row) const {
    return static_cast<int32_t>((m.rowptr[row + 1] + row) / size);
  }

  // The row that begins in a chunk and is cut, or -1: only the last that begins there can be.
  __device__ int32_t cut_row(const Sparse& m, int32_t chunk) const {
    const int32_t row = start(m, chunk + 1) - 1;
    if (row < start(m, chunk) || m.rowptr[row + 1] - m.rowptr[row] <= size) return -1;
    return row;
  }

 private:
  static int32_t steps_each(const Sparse& m, int64_t lanes) {
    int32_t each = 1;
    while (each * kStep * kMostLanes < (m.num_rows + m.entries) * lanes) each *= 2;
    return each;
  }
};

enum class Piece { kWhole, kFirst, kLater };

// The number of a team in the grid.
__device__ inline int32_t chunk_of_team(int team) {
  return static_cast<int32_t>(blockIdx.x) * (kThreads / team) +
         static_cast<int32_t>(threadIdx.x) / team;
}

inline int64_t blocks_of_teams(int64_t teams, int team) {
  const int of_block = kThreads / team;
  return (teams + of_block - 1) / of_block;
}

// Calls body(row, begin, end, piece) for the entries [begin, end) of each row, or piece of a row,
// in a chunk. A later piece of a cut row comes first in its chunk; a first piece may be empty.
template <typename Body>
__device__ void for_pieces(const Sparse& m, const Chunks& chunks, int32_t chunk, const Body& body) {
  const int64_t begin = chunk * chunks.size, end = begin + chunks.size;
  const int32_t next = chunks.start(m, chunk + 1);
  int32_t row = chunks.start(m, chunk), first = m.rowptr[row];
  if (row > 0) {  // Entry e of a row is the work e + row + 1.
    const int64_t last = min(int64_t{first}, end - row);
    if (first - m.rowptr[row - 1] > chunks.size && begin - row < last) {
      body(row - 1, static_cast<int32_t>(begin - row), static_cast<int32_t>(last), Piece::kLater);
    }
  }
  for (; row < next; ++row) {
    const int32_t stop = m.rowptr[row + 1];
    const bool whole = stop - first <= chunks.size;
    body(row, first, whole ? stop : static_cast<int32_t>(end - row - 1),
         whole ? Piece::kWhole : Piece::kFirst);
    first = stop;
  }
}

}  // namespace gas::cuda
