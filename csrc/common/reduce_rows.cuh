// What every operator does with the rows of a matrix on a CUDA device.
//
// Teams of lanes take chunks of rows. What they found of rows that are cut is left in scratch, and
// a second kernel joins that in order. All follows from sizes that the host knows and from row
// pointers that only the device reads: nothing waits, there are no atomics, and results are the
// same in every run and on every device.
//
// An `Op` says how: a Reduction with a Part (what a lane adds up), an Item (what it reads for an
// entry), and
//   fetch(lane, entry, column) -> Item,
//   add(lane, own, part, item),
//   finish(lane, row, own, part) writes the result.
// All lanes of a team call each of them together, but for `fetch`. One with numbers that are added
// up over all entries has kTotals of them for each lane, and
//   add(lane, own, part, item, totals),
//   close(lane, totals, out)     writes those of a chunk to a row `out`, of all columns together.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/chunks.cuh"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/matrix.h"
#include "common/pack.cuh"
#include "common/stream.h"
#include "common/sum_columns.cuh"

namespace gas::cuda {

constexpr int kJoined = 32;  // Chunks that a block looks through for cut rows.

struct Nothing {};

// What most add up.
template <typename A, int V>
struct Sums {
  A sum[V];

  __device__ void add(const Sums& other) {
    for (int j = 0; j < V; ++j) sum[j] += other.sum[j];
  }
};

// The matrix, and what most Ops do; others have their own.
struct Reduction {
  Sparse m;

  // What a lane reads of a row.
  using Own = Nothing;
  __device__ Own own(const Lane&, int64_t) const { return {}; }

  // Makes a part of no entries out of zeros.
  template <typename Part>
  __device__ void start(Part&) const {}

  // Adds what was found of later entries.
  template <typename Part>
  __device__ void join(Part& part, const Part& later) const {
    part.add(later);
  }
};

template <typename T, typename A, int V>
__device__ void write_sums(T* at, const Sums<A, V>& sums, A scale) {
  Pack<T, V> result;
  for (int j = 0; j < V; ++j) store(&result.v[j], sums.sum[j] * scale);
  write(at, result);
}

template <typename Op, typename = void>
constexpr int kTotalsOf = 0;
template <typename Op>
constexpr int kTotalsOf<Op, std::void_t<decltype(Op::kTotals)>> = Op::kTotals;

template <typename Part>
struct Cut {
  int32_t* row;  // [chunks]: the row whose first piece is in the chunk, or -1.
  Part* parts;   // [chunks, 2, tiles, team]
};

template <typename Part>
__device__ Part& part_of(const Cut<Part>& cut, int64_t chunk, bool later, const Columns& columns,
                         int64_t tile, int rank) {
  return cut.parts[((2 * chunk + later) * columns.tiles + tile) * columns.team + rank];
}

// What Ops with totals write: [chunks, count].
template <typename A>
struct Totals {
  A* sums;
  int64_t count;
};

template <typename Op, typename Part, typename A>
__global__ void __launch_bounds__(kThreads)
    reduce_chunks(Op op, Chunks chunks, Columns columns, Cut<Part> cut, Totals<A> totals) {
  const int64_t tile = blockIdx.x % columns.tiles, block = blockIdx.x / columns.tiles;
  const int64_t chunk = (block * kThreads + threadIdx.x) / columns.team;
  if (chunk >= chunks.count) return;
  const Lane lane = columns.lane(tile);
  int64_t cut_row = -1;
  [[maybe_unused]] A total[kTotalsOf<Op> + 1] = {};
  for_pieces(op.m, chunks, chunk, [&](int64_t row, int64_t begin, int64_t end, Piece piece) {
    const typename Op::Own own = op.own(lane, row);
    Part part{};
    op.start(part);
    for (int64_t e = begin; e < end; e += kAhead) {
      int64_t cols[kAhead];
      typename Op::Item items[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {  // The last again, rather than a branch before a load.
        cols[i] = op.m.col[min(e + i, end - 1)];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) items[i] = op.fetch(lane, min(e + i, end - 1), cols[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (e + i >= end) continue;
        if constexpr (kTotalsOf<Op> > 0) {
          op.add(lane, own, part, items[i], total);
        } else {
          op.add(lane, own, part, items[i]);
        }
      }
    }
    if (piece == Piece::kWhole) return op.finish(lane, row, own, part);
    if (piece == Piece::kFirst) cut_row = row;
    part_of(cut, chunk, piece == Piece::kLater, columns, tile, lane.rank) = part;
  });
  if (cut.row != nullptr && tile == 0 && lane.rank == 0) {
    cut.row[chunk] = static_cast<int32_t>(cut_row);
  }
  if constexpr (kTotalsOf<Op> > 0) op.close(lane, total, totals.sums + chunk * totals.count);
}

// A block joins a row: each team some neighbouring pieces, then the first team what those found.
template <typename Op, typename Part>
__global__ void __launch_bounds__(kThreads)
    join_chunks(Op op, Chunks chunks, Columns columns, Cut<Part> cut) {
  __shared__ Part found[kThreads];
  const int64_t tile = blockIdx.x % columns.tiles, block = blockIdx.x / columns.tiles;
  const Lane lane = columns.lane(tile);
  const int team = static_cast<int>(threadIdx.x) / columns.team, teams = kThreads / columns.team;
  const int64_t stop = min((block + 1) * kJoined, chunks.count);
  for (int64_t chunk = block * kJoined; chunk < stop; ++chunk) {
    const int64_t row = cut.row[chunk];
    if (row < 0) continue;
    const int64_t pieces = (op.m.rowptr[row + 1] + row) / chunks.size - chunk + 1;
    const int64_t each = (pieces + teams - 1) / teams, end = min((team + 1) * each, pieces);
    Part part{};
    op.start(part);
    for (int64_t i = team * each; i < end; ++i) {
      op.join(part, part_of(cut, chunk + i, i > 0, columns, tile, lane.rank));
    }
    found[threadIdx.x] = part;
    __syncthreads();
    if (team == 0) {
      for (int64_t other = 1; other * each < pieces; ++other) {
        op.join(part, found[other * columns.team + lane.rank]);
      }
      op.finish(lane, row, op.own(lane, row), part);
    }
    __syncthreads();
  }
}

// Reduces every row of op.m. An Op with totals leaves their sums in
// totals.sums, if there are any rows and columns.
template <typename Op, typename A = float>
void reduce_rows(const char* what, const Op& op, const Columns& columns, const Stream& stream,
                 const Totals<A>& totals = {nullptr, 0}) {
  using Part = typename Op::Part;
  const Chunks chunks(op.m, columns.team);
  if (chunks.count == 0 || columns.heads * columns.width == 0) return;
  Cut<Part> cut{nullptr, nullptr};
  const bool may_cut = op.m.entries > chunks.size;
  if (may_cut) {
    const int64_t parts = 2 * chunks.count * columns.tiles * columns.team;
    const int64_t row_bytes = (chunks.count * 4 + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    const int64_t part_bytes = parts * static_cast<int64_t>(sizeof(Part));
    char* scratch = stream.scratch<char>(row_bytes + part_bytes);
    cut = {reinterpret_cast<int32_t*>(scratch), reinterpret_cast<Part*>(scratch + row_bytes)};
  }
  Totals<A> of_chunks{nullptr, totals.count};
  if (totals.count > 0) of_chunks.sums = stream.scratch<A>(chunks.count * totals.count);
  const int64_t blocks = (chunks.count * columns.team + kThreads - 1) / kThreads;
  launch(what, reduce_chunks<Op, Part, A>, blocks * columns.tiles, stream.raw, op, chunks, columns,
         cut, of_chunks);
  if (may_cut) {
    launch(what, join_chunks<Op, Part>, (chunks.count + kJoined - 1) / kJoined * columns.tiles,
           stream.raw, op, chunks, columns, cut);
  }
  sum_columns(what, of_chunks.sums, chunks.count, totals.count, totals.sums, stream);
}

}  // namespace gas::cuda
