// Loop over the rows of a matrix on a CUDA device, common to all operators.
//
// Teams of lanes take chunks of rows. What they found of rows that are cut is left in scratch, and
// is joined in order: of hubs first by groups of neighbouring chunks, then by the teams of a block.
// All follows from sizes that the host knows and from row pointers that only the device reads:
// nothing waits, there are no atomics, and results are the same in every run and on every device.
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

constexpr int kGroup = 32;  // Chunks that a team joins of a hub, before a block joins the groups.
constexpr int kAlone = 16;  // Chunks of a row that a team joins by itself.

struct Nothing {};

// Accumulator of most operators: a sum.
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

  // Entries that a lane reads before it adds the first. An Op of large Items reads fewer, so that
  // they stay in the registers that kBlocks leaves.
  static constexpr int kAhead = cuda::kAhead;

  // Columns that a lane reads of a row.
  using Own = Nothing;
  __device__ Own own(const Lane&, int32_t) const { return {}; }

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

// Partial results of rows that are cut by chunks.
template <typename Part>
struct Cut {
  // [chunks, 2, tiles, team]: of each chunk a later piece, after the first of another row. No more
  // than 2 * Chunks::kMostLanes: 92 MB for attention, however wide, 160 MB in the worst case.
  Part* parts;
  int group;  // Chunks joined beforehand, where a row has all of them: 1 for none.

  __device__ Part& of(int32_t chunk, bool later, const Columns& columns, int tile, int rank) const {
    const int64_t at = 2 * int64_t{chunk} + !later;
    return parts[(at * columns.tiles + tile) * columns.team + rank];
  }
};

// Totals of each chunk: [chunks, count].
template <typename A>
struct Totals {
  A* sums;
  int64_t count;
};

// Position of a thread in a grid with a team for each chunk and tile.
struct Thread {
  int tile, team, teams;  // `teams` of a block.
  int32_t chunk;          // May be behind the last.

  __device__ explicit Thread(const Columns& columns) {
    const auto tiles = static_cast<unsigned>(columns.tiles);
    const auto block = static_cast<int32_t>(blockIdx.x / tiles);
    tile = static_cast<int>(blockIdx.x % tiles);
    team = static_cast<int>(threadIdx.x) / columns.team;
    teams = kThreads / columns.team;
    chunk = block * teams + team;
  }
};

template <typename Op, typename Part, typename A>
__global__ void __launch_bounds__(kThreads, kBlocks)
    reduce_chunks(Op op, Chunks chunks, Columns columns, Cut<Part> cut, Totals<A> totals) {
  constexpr int kAhead = Op::kAhead;
  const Thread at(columns);
  if (at.chunk >= chunks.count) return;
  const Lane lane = columns.lane(at.tile);
  [[maybe_unused]] A total[kTotalsOf<Op> + 1] = {};
  for_pieces(op.m, chunks, at.chunk, [&](int32_t row, int32_t begin, int32_t end, Piece piece) {
    const typename Op::Own own = op.own(lane, row);
    Part part{};
    op.start(part);
    const uint32_t stop = end;  // Unsigned: four behind the last there may be is no int32.
    for (uint32_t e = begin; e < stop; e += kAhead) {
      int32_t cols[kAhead];
      typename Op::Item items[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {  // The last again, rather than a branch before a load.
        cols[i] = op.m.col[min(e + i, stop - 1)];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) items[i] = op.fetch(lane, min(e + i, stop - 1), cols[i]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (e + i >= stop) continue;
        if constexpr (kTotalsOf<Op> > 0) {
          op.add(lane, own, part, items[i], total);
        } else {
          op.add(lane, own, part, items[i]);
        }
      }
    }
    if (piece == Piece::kWhole) return op.finish(lane, row, own, part);
    cut.of(at.chunk, piece == Piece::kLater, columns, at.tile, lane.rank) = part;
  });
  if constexpr (kTotalsOf<Op> > 0) op.close(lane, total, totals.sums + at.chunk * totals.count);
}

// Joins what was found in the chunks [begin, end) of a row that begins in `first`.
template <typename Op, typename Part>
__device__ Part join_pieces(const Op& op, const Columns& columns, const Cut<Part>& cut, int tile,
                            int rank, int32_t first, int32_t begin, int32_t end) {
  Part part{};
  op.start(part);
  while (begin < end) {
    op.join(part, cut.of(begin, begin > first, columns, tile, rank));
    const bool joined = begin > first && begin % cut.group == 0 && begin + cut.group <= end;
    begin += joined ? cut.group : 1;
  }
  return part;
}

// A team joins the later pieces of the row that has all chunks of its group, in the place of the
// first of them.
template <typename Op, typename Part>
__global__ void __launch_bounds__(kThreads, kBlocks)
    join_groups(Op op, Chunks chunks, Columns columns, Cut<Part> cut) {
  const Thread at(columns);
  const int32_t begin = at.chunk * kGroup;
  if (begin >= chunks.count) return;
  const int32_t row = chunks.start(op.m, begin) - 1;
  if (row < 0 || begin + kGroup - 1 > chunks.last(op.m, row)) return;
  const int rank = columns.lane(at.tile).rank;
  cut.group = 1;
  cut.of(begin, true, columns, at.tile, rank) =
      join_pieces(op, columns, cut, at.tile, rank, -1, begin, begin + kGroup);
}

// A team joins the row that is cut in its chunk; those of many pieces, all teams of its block.
template <typename Op, typename Part>
__global__ void __launch_bounds__(kThreads, kBlocks)
    join_chunks(Op op, Chunks chunks, Columns columns, Cut<Part> cut) {
  __shared__ Part found[kThreads];
  __shared__ int32_t long_rows[kThreads];  // Of each team, or -1.
  const Thread at(columns);
  const Lane lane = columns.lane(at.tile);
  int32_t row = at.chunk < chunks.count ? chunks.cut_row(op.m, at.chunk) : -1;
  if (row >= 0) {
    const int32_t end = chunks.last(op.m, row) + 1;
    if (end - at.chunk <= kAlone) {
      op.finish(lane, row, op.own(lane, row),
                join_pieces(op, columns, cut, at.tile, lane.rank, at.chunk, at.chunk, end));
      row = -1;
    }
  }
  if (lane.rank == 0) long_rows[at.team] = row;
  if (__syncthreads_or(row >= 0) == 0) return;
  for (int i = 0; i < at.teams; ++i) {
    row = long_rows[i];
    if (row < 0) continue;
    const int32_t first = at.chunk - at.team + i, end = chunks.last(op.m, row) + 1;
    const int32_t before = first / cut.group, groups = (end - 1) / cut.group - before + 1;
    const int32_t each = (groups + at.teams - 1) / at.teams * cut.group;
    const int32_t begin = before * cut.group + at.team * each;
    found[threadIdx.x] = join_pieces(op, columns, cut, at.tile, lane.rank, first, max(begin, first),
                                     min(begin + each, end));
    for (int step = 1; step < at.teams; step *= 2) {
      __syncthreads();
      if (at.team % (2 * step) == 0) {
        op.join(found[threadIdx.x], found[threadIdx.x + step * columns.team]);
      }
    }
    if (at.team == 0) op.finish(lane, row, op.own(lane, row), found[threadIdx.x]);
    __syncthreads();
  }
}

// Reduces every row of op.m. An Op with totals leaves their sums in totals.sums, if there are any
// rows and columns.
template <typename Op, typename A = float>
void reduce_rows(const char* what, const Op& op, const Columns& columns, const Stream& stream,
                 const Totals<A>& totals = {nullptr, 0}) {
  using Part = typename Op::Part;
  if (columns.heads * columns.width == 0) return;
  const int64_t lanes = int64_t{columns.team} * columns.tiles;
  const Chunks chunks(op.m, lanes);
  if (chunks.count == 0) return;
  const bool may_cut = op.m.entries > chunks.size;
  Part* parts = may_cut ? stream.scratch<Part>(2 * chunks.count * lanes) : nullptr;
  const auto blocks = [&](int64_t n) { return blocks_of_teams(n, columns.team) * columns.tiles; };
  Totals<A> of_chunks{nullptr, totals.count};
  if (totals.count > 0) of_chunks.sums = stream.scratch<A>(chunks.count * totals.count);
  // Without groups, a team of the block that joins a hub has the pieces of two groups at most.
  const bool grouped = chunks.count > 2 * kGroup * kThreads / columns.team;
  const Cut<Part> cut{parts, grouped ? kGroup : 1};
  launch(what, reduce_chunks<Op, Part, A>, blocks(chunks.count), stream.raw, op, chunks, columns,
         cut, of_chunks);
  if (may_cut && grouped) {
    launch(what, join_groups<Op, Part>, blocks((chunks.count + kGroup - 1) / kGroup), stream.raw,
           op, chunks, columns, cut);
  }
  if (may_cut) {
    launch(what, join_chunks<Op, Part>, blocks(chunks.count), stream.raw, op, chunks, columns, cut);
  }
  sum_columns(what, of_chunks.sums, chunks.count, totals.count, totals.sums, stream);
}

}  // namespace gas::cuda
