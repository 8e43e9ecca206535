// How the rows of a sparse matrix are shared among teams of lanes.
//
// The work of a row is one, and one more for each entry. It is cut into chunks of equal size, each
// for one team. A row belongs to the chunk that it begins in, if it has no more entries than the
// size of a chunk: so a team does less than two chunks of work. A longer row is cut where chunks end.
#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "common/matrix.h"
#include "common/stream.h"

namespace gas::cuda {

struct Chunks {
  int64_t size;
  int32_t count;
  const int32_t* start;  // [count + 1]: the first row that begins in each chunk, or behind it.

  // Of all chunks together: they fill any device a few times. More would only add scratch, of which
  // each has two Parts.
  static constexpr int64_t kMostLanes = 1 << 20;

  // `lanes` work on a chunk.
  Chunks(const Sparse& m, int64_t lanes) : size(32), start(nullptr) {
    const int64_t work = m.num_rows + m.entries;
    while (size * kMostLanes < work * lanes) size *= 2;
    count = static_cast<int32_t>((work + size - 1) / size);
  }

  // The last chunk that has work of a row.
  __device__ int32_t last(const Sparse& m, int64_t row) const {
    return static_cast<int32_t>((m.rowptr[row + 1] + row) / size);
  }

  // The row that begins in a chunk and is cut, or -1: only the last that begins there can be.
  __device__ int32_t cut_row(const Sparse& m, int32_t chunk) const {
    const int32_t row = start[chunk + 1] - 1;
    if (row < start[chunk] || m.rowptr[row + 1] - m.rowptr[row] <= size) return -1;
    return row;
  }
};

enum class Piece { kWhole, kFirst, kLater };

// A thread for each chunk: teams that search for themselves would wait for some 20 loads, one after
// the other, which takes as long as the work of a small chunk.
template <typename Row>
__global__ void __launch_bounds__(kThreads) find_starts(Sparse m, Chunks chunks, Row* start) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t chunk = int64_t{blockIdx.x} * kThreads + threadIdx.x; chunk <= chunks.count;
       chunk += step) {
    const int64_t begin = chunk * chunks.size;
    int64_t row = 0;
    for (int64_t high = m.num_rows; row < high;) {
      const int64_t middle = (row + high) / 2;
      if (m.rowptr[middle] + middle < begin) {
        row = middle + 1;
      } else {
        high = middle;
      }
    }
    start[chunk] = static_cast<Row>(row);
  }
}

// Bytes of chunks.start, such that what follows is aligned.
inline int64_t start_bytes(const Chunks& chunks) {
  return (chunks.count / 4 + 1) * int64_t{4 * sizeof(int32_t)};
}

// Finds chunks.start, in scratch of start_bytes.
inline void start_chunks(const char* what, const Sparse& m, Chunks& chunks, void* scratch,
                         const Stream& stream) {
  auto* start = static_cast<int32_t*>(scratch);
  launch(what, find_starts<int32_t>, blocks_for(int64_t{chunks.count} + 1), stream.raw, m, chunks,
         start);
  chunks.start = start;
}

inline Chunks started_chunks(const char* what, const Sparse& m, int team, const Stream& stream) {
  Chunks chunks(m, team);
  start_chunks(what, m, chunks, stream.scratch<char>(start_bytes(chunks)), stream);
  return chunks;
}

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
__device__ void for_pieces(const Sparse& m, const Chunks& chunks, int32_t chunk,
                           const Body& body) {
  const int64_t begin = chunk * chunks.size, end = begin + chunks.size;
  const int32_t next = chunks.start[chunk + 1];
  int32_t row = chunks.start[chunk], first = m.rowptr[row];
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
