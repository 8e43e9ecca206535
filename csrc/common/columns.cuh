// Assigns the columns of a table to the lanes of a CUDA device.
//
// A team of 1 to 32 neighbouring lanes, a power of two, reads a row together; each lane has a
// vector of neighbouring columns, all of one head. Rows wider than a team are read in tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/pack.cuh"

namespace gas::cuda {

constexpr int kAhead = 4;  // Entries that a lane reads before it adds the first.

struct Lane {
  int64_t column;  // The first of its columns in a row, head * width + ...
  int head;
  int tile;       // Of the head.
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
  int head_tiles, tiles;

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
    head_tiles = static_cast<int>(std::max<int64_t>(1, (vectors + head_lanes - 1) / head_lanes));
    tiles = head_tiles * static_cast<int>((heads + team_heads - 1) / team_heads);
  }

  __device__ Lane lane(int tile) const {
    Lane lane;
    lane.rank = static_cast<int>(threadIdx.x) % team;
    const int in_head = lane.rank % head_lanes;
    lane.tile = tile % head_tiles;
    lane.head = tile / head_tiles * (team / head_lanes) + lane.rank / head_lanes;
    const int64_t in_width = int64_t{lane.tile * head_lanes + in_head} * vector;
    lane.used = lane.head < heads && in_width < width;
    lane.leads = in_head == 0;
    if (lane.head >= heads) lane.head = 0;
    lane.column = lane.head * width + (lane.used ? in_width : 0);
    const unsigned lanes = team == kWarp ? 0xffffffffu : (1u << team) - 1u;
    lane.mask = lanes << (static_cast<int>(threadIdx.x) % kWarp / team * team);
    return lane;
  }

  // Offset of a column of a row in a table.
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
    for (int tile = 0; tile < head_tiles; ++tile) {
      const int64_t in_width = int64_t{tile * head_lanes + lane.rank % head_lanes} * vector;
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

}  // namespace gas::cuda
