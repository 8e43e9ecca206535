// Rows that are cut into pieces: hubs next to each other, the first row and the last, and a column.
#pragma once

#include <cstdint>
#include <random>

#include "hubs.h"

inline bool is_hub(int64_t row, int64_t rows) { return row < 2 || row == 4 || row + 1 == rows; }

inline int64_t hub_degree(int64_t row) { return gas::kHub + 1 + row * gas::kPiece / 3; }

// Every third entry is of column 4.
inline int32_t hub_column(int64_t cols, std::mt19937& random) {
  return static_cast<int32_t>(random() % 3 == 0 ? 4 : random() % cols);
}
