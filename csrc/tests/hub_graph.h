// Rows and columns that are cut into pieces: neighbours, the first and the last.
#pragma once

#include <cstdint>
#include <random>

#include "common/hubs.h"

// Of a graph with hubs the entries of a row, else `otherwise`.
inline int64_t degree_of(bool hubs, int64_t row, int64_t rows, int64_t otherwise) {
  const bool is_hub = row < 2 || row == 4 || row + 1 == rows;
  return hubs && is_hub ? gas::kHub + 1 + row * gas::kPiece / 3 : otherwise;
}

// The column of an entry: in a graph with hubs, every second time one of three.
inline int32_t column_of(bool hubs, int64_t cols, std::mt19937& random) {
  const int64_t often[] = {0, 1, cols - 1};
  if (hubs && random() % 2 == 0) return static_cast<int32_t>(often[random() % 3]);
  return static_cast<int32_t>(random() % cols);
}
