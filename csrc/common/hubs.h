// Rows of very many entries, cut into pieces that threads share.
//
// The pieces of all hubs are the rows of one matrix, which has the entries of the first and row
// pointers of its own. An operator runs on it as on any other, into scratch of the type that it
// adds up in, and then joins what the pieces of each hub found, in order. Pieces depend on the
// matrix alone, so that results don't depend on the number of threads. Scratch is a row for some
// 2,000 entries of hubs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/matrix.h"

namespace gas {

constexpr int64_t kPiece = 2048;      // A piece has as many entries or more, but fewer than twice.
constexpr int64_t kHub = 2 * kPiece;  // A row of more entries is a hub.

struct Hub {
  int64_t row;
  int64_t first, last;  // Its pieces are [first, last).
  int64_t before;       // Entries of the hubs before it.
  int64_t entries;
};

class Hubs {
 public:
  Hubs() = default;
  explicit Hubs(const Sparse& matrix) : col_(matrix.col), entry_(matrix.entry) {
    if (matrix.num_rows == 0) return;
    const int32_t* rowptr = matrix.rowptr;
    const int32_t* stop = rowptr + matrix.num_rows + 1;
    // Of any kHub neighbouring entries one has a number that kHub divides: so has a hub.
    for (int64_t at = up(rowptr[0]); at < rowptr[matrix.num_rows];) {
      const int64_t row = std::upper_bound(rowptr, stop, at) - rowptr - 1;
      const int64_t begin = rowptr[row], end = rowptr[row + 1];
      if (end - begin > kHub) add(row, begin, end);
      at = up(end);
    }
  }

  const Hub* begin() const { return hubs_.data(); }
  const Hub* end() const { return hubs_.data() + hubs_.size(); }
  int64_t size() const { return static_cast<int64_t>(hubs_.size()); }

  // A row for every piece, and an unused one between those of two hubs.
  Sparse pieces() const {
    const int64_t entries = rowptr_.empty() ? 0 : rowptr_.back() - rowptr_.front();
    return {num_pieces(), entries, rowptr_.data(), col_, entry_};
  }
  int64_t num_pieces() const {
    return rowptr_.empty() ? 0 : static_cast<int64_t>(rowptr_.size()) - 1;
  }

  // The first hub at or behind a row.
  const Hub* from(int64_t row) const {
    return std::lower_bound(begin(), end(), row,
                            [](const Hub& hub, int64_t wanted) { return hub.row < wanted; });
  }

  int64_t entries_before(int64_t row) const {
    const Hub* hub = from(row);
    return hub == begin() ? 0 : hub[-1].before + hub[-1].entries;
  }

  // For each piece its hub's row of a table.
  template <typename T>
  std::vector<T> repeat(const T* table, int64_t width) const {
    std::vector<T> rows(num_pieces() * width);
    for (const Hub& hub : *this) {
      for (int64_t piece = hub.first; piece < hub.last; ++piece) {
        std::copy_n(table + hub.row * width, width, rows.data() + piece * width);
      }
    }
    return rows;
  }

 private:
  static int64_t up(int64_t entry) { return (entry + kHub - 1) / kHub * kHub; }

  void add(int64_t row, int64_t begin, int64_t end) {
    const auto first = static_cast<int64_t>(rowptr_.size());
    const int64_t entries = end - begin, count = entries / kPiece;
    for (int64_t i = 0; i <= count; ++i) {
      rowptr_.push_back(static_cast<int32_t>(begin + i * entries / count));
    }
    hubs_.push_back({row, first, first + count, entries_before(row), entries});
  }

  const int32_t* col_ = nullptr;
  const int32_t* entry_ = nullptr;
  std::vector<int32_t> rowptr_;
  std::vector<Hub> hubs_;
};

}  // namespace gas
