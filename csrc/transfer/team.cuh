// Lanes that move one row together.
#pragma once

#include <cstdint>

#include "common/launch.cuh"

namespace gas::cuda {

// The logarithm of the lanes of a team: one for each word of a row, at most a warp.
inline int team_shift(int64_t row_words) {
  int shift = 0;
  while ((1 << shift) < kWarp && (1 << shift) < row_words) ++shift;
  return shift;
}

}  // namespace gas::cuda
