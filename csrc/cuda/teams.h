// How the rows of a sparse matrix are shared among the lanes of a CUDA device.
//
// Columns: a team of 1 to 32 neighbouring lanes, a power of two, reads a row together; each lane
// has a vector of neighbouring columns, all of one head. Rows wider than a team are read in tiles.
//
// Rows: the work of a row is one, and one more for each entry. It is cut into chunks of equal size,
// each for one team. A row belongs to the chunk that it begins in, if it has no more entries than the
// size of a chunk: so a team does less than two chunks of work. A longer row is cut where chunks end.
// What each team found is left in scratch, and a second kernel joins that in order. All follows from sizes that the host knows and from row pointers that only
// the device reads: nothing waits, there are no atomics, and results are the same in every run and
// on every device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "../matrix.h"
#include "../simd.h"
#include "launch.h"
#include "stream.h"

namespace gas::cuda {

// Vectors --------------------------------------------------------------------------------------

constexpr int kVectorBytes = 16;  // The widest load of a lane.

template <typename T, int V>
struct alignas(sizeof(T) * V < kVectorBytes ? sizeof(T) * V : kVectorBytes) Pack {
  T v[V];
};

template <int V, typename T>
__device__ Pack<T, V> read(const T* at) {
  return *reinterpret_cast<const Pack<T, V>*>(at);
}

template <typename T, int V>
__device__ void write(T* at, const Pack<T, V>& values) {
  *reinterpret_cast<Pack<T, V>*>(at) = values;
}

// Calls body(V), a compile-time number of columns for a lane: as many as a load can take if rows of
// `width` columns and all tables are aligned to that, else one.
template <typename T, typename Body>
void with_vectors(int64_t width, std::initializer_list<const void*> tables, const Body& body) {
  constexpr int kMost = kVectorBytes / sizeof(T);
  bool aligned = width % kMost == 0;
  for (const void* table : tables) {
    aligned = aligned && reinterpret_cast<uintptr_t>(table) % kVectorBytes == 0;
  }
  if (aligned) {
    body(std::integral_constant<int, kMost>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

// Columns --------------------------------------------------------------------------------------

struct Lane {
  int64_t column;  // The first of its columns in a row, head * width + ...
  int64_t head;
  int64_t tile;   // Of the head.
  int rank;       // In the team.
  bool used;      // One without columns reads the first of its head, and writes nothing.
  bool leads;     // The first of its head in the team.
  unsigned mask;  // The lanes of its team in the warp.
};

// `heads` times `width` columns, `V` for a lane.
struct Columns {
  int64_t heads, width;
  int vector;
  int head_lanes;  // Of a team, for a head: a power of two.
  int team;        // A power of two.
  int64_t head_tiles, tiles;

  Columns(int64_t heads, int64_t width, int vector) : heads(heads), width(width), vector(vector) {
    const auto up = [](int64_t n) {  // To a power of two, at most a warp.
      int power = 1;
      while (power < n && power < kWarp) power *= 2;
      return power;
    };
    const int64_t vectors = width / vector;
    head_lanes = up(vectors);
    team = static_cast<int>(std::min<int64_t>(kWarp, int64_t{head_lanes} * up(heads)));
    const int team_heads = team / head_lanes;
    head_tiles = std::max<int64_t>(1, (vectors + head_lanes - 1) / head_lanes);
    tiles = head_tiles * ((heads + team_heads - 1) / team_heads);
  }

  __device__ Lane lane(int64_t tile) const {
    Lane lane;
    lane.rank = static_cast<int>(threadIdx.x) % team;
    const int in_head = lane.rank % head_lanes;
    lane.tile = tile % head_tiles;
    lane.head = tile / head_tiles * (team / head_lanes) + lane.rank / head_lanes;
    const int64_t in_width = (lane.tile * head_lanes + in_head) * vector;
    lane.used = lane.head < heads && in_width < width;
    lane.leads = in_head == 0;
    if (lane.head >= heads) lane.head = 0;
    lane.column = lane.head * width + (lane.used ? in_width : 0);
    const unsigned lanes = team == kWarp ? 0xffffffffu : (1u << team) - 1u;
    lane.mask = lanes << (static_cast<int>(threadIdx.x) % kWarp / team * team);
    return lane;
  }

  // Where a column of a row is in a table.
  __device__ int64_t place(int64_t row, int64_t column) const {
    return row * heads * width + column;
  }

  template <int V, typename T>
  __device__ Pack<T, V> at(const T* table, int64_t row, int64_t column) const {
    return read<V>(table + place(row, column));
  }

  // Calls body(column) for what the lane would have in the other tiles of its head.
  template <typename Body>
  __device__ void for_other_tiles(const Lane& lane, const Body& body) const {
    if (head_tiles == 1) return;
    for (int64_t tile = 0; tile < head_tiles; ++tile) {
      const int64_t in_width = (tile * head_lanes + lane.rank % head_lanes) * vector;
      if (tile != lane.tile && in_width < width) body(lane.head * width + in_width);
    }
  }
};

// The sum over `lanes` neighbours, a power of two, in the same order for each of them.
template <typename A>
__device__ A sum_of_lanes(unsigned mask, int lanes, A value) {
  for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(mask, value, step);
  return value;
}

// Dot products of one row with others -----------------------------------------------------------

constexpr int kAhead = 4;  // Entries that a lane reads before it adds the first.

template <typename T, int V>
__device__ typename Sum<T>::type dot_of(const Pack<T, V>& a, const Pack<T, V>& b) {
  typename Sum<T>::type sum = 0;
  for (int j = 0; j < V; ++j) sum += load(a.v[j]) * load(b.v[j]);
  return sum;
}

// found[i] = <a, b[col[min(e + i, end - 1)]]>, rows of `width` that a team reads together; every
// lane gets them all.
template <int V, typename T>
__device__ void dot_ahead(const Lane& lane, int team, int64_t width, const T* a, const T* b,
                          const int32_t* col, int64_t e, int64_t end,
                          typename Sum<T>::type (&found)[kAhead]) {
  for (auto& sum : found) sum = 0;
  for (int64_t at = lane.rank * V; at < width; at += team * V) {
    const Pack<T, V> left = read<V>(a + at);
    Pack<T, V> right[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) right[i] = read<V>(b + col[min(e + i, end - 1)] * width + at);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) found[i] += dot_of(left, right[i]);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) found[i] = sum_of_lanes(lane.mask, team, found[i]);
}

// Rows -----------------------------------------------------------------------------------------

struct Chunks {
  int64_t size, count;

  Chunks(int64_t num_rows, int64_t entries, int team) : size(32) {
    // Lanes enough to fill any device a few times; more would only add scratch, of which there are
    // two Parts for each lane and tile.
    constexpr int64_t kEnough = 1 << 20;
    const int64_t work = num_rows + entries;
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

// Sums of columns ------------------------------------------------------------------------------

// out[group, i] = the sum of in[row, i] over a group of neighbouring rows; zero for none.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    sum_groups(const In* in, int64_t rows, int64_t groups, int64_t n, Out* out) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < groups * n; i += step) {
    const int64_t group = i / n, column = i % n;
    double sum = 0;
    for (int64_t row = rows * group / groups; row < rows * (group + 1) / groups; ++row) {
      sum += static_cast<double>(in[row * n + column]);
    }
    out[i] = static_cast<Out>(sum);
  }
}

// out[i] = the sum of in[row, i] over the rows, in groups that depend on their number alone.
template <typename In, typename Out>
void sum_columns(const char* what, const In* in, int64_t rows, int64_t n, Out* out,
                 const Stream& stream) {
  constexpr int64_t kGroups = 128;
  if (n == 0) return;
  if (rows < 2 * kGroups) {
    launch(what, sum_groups<In, Out>, blocks_for(n), stream.raw, in, rows, int64_t{1}, n, out);
    return;
  }
  double* groups = stream.scratch<double>(kGroups * n);
  launch(what, sum_groups<In, double>, blocks_for(kGroups * n), stream.raw, in, rows, kGroups, n,
         groups);
  launch(what, sum_groups<double, Out>, blocks_for(n), stream.raw, groups, kGroups, int64_t{1}, n,
         out);
}

// Reducing rows --------------------------------------------------------------------------------
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

  // What makes a sum the mean of a row's entries, if that is wanted and there are any; else 1.
  template <typename A>
  __device__ A scale_of(int64_t row, bool mean) const {
    const int64_t count = m.rowptr[row + 1] - m.rowptr[row];
    return mean && count > 0 ? A{1} / static_cast<A>(count) : A{1};
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

// Reduces every row of op.m, which has `entries` entries. An Op with totals leaves their sums in
// totals.sums, if there are any rows and columns.
template <typename Op, typename A = float>
void reduce_rows(const char* what, const Op& op, int64_t entries, const Columns& columns,
                 const Stream& stream, const Totals<A>& totals = {nullptr, 0}) {
  using Part = typename Op::Part;
  const Chunks chunks(op.m.num_rows, entries, columns.team);
  if (chunks.count == 0 || columns.heads * columns.width == 0) return;
  Cut<Part> cut{nullptr, nullptr};
  const bool may_cut = entries > chunks.size;
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
