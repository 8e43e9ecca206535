#include "common/hubs.h"

#include <atomic>
#include <random>
#include <vector>

#include "check.h"
#include "common/parallel_rows.h"

namespace {

// Pointers may begin anywhere.
std::vector<int32_t> rows_of(const std::vector<int64_t>& degrees) {
  std::vector<int32_t> rowptr{degrees.size() % 2 == 0 ? 0 : 5000};
  for (const int64_t degree : degrees) {
    rowptr.push_back(rowptr.back() + static_cast<int32_t>(degree));
  }
  return rowptr;
}

// Hubs are the rows of more than kHub entries; their pieces are those entries, in order.
void test_pieces(const std::vector<int64_t>& degrees) {
  const auto rowptr = rows_of(degrees);
  const gas::Sparse m{int64_t(degrees.size()), rowptr.back(), rowptr.data(), nullptr, nullptr};
  const gas::Hubs hubs(m);
  const gas::Sparse pieces = hubs.pieces();
  const gas::Hub* hub = hubs.begin();
  int64_t before = 0;
  for (int64_t row = 0; row < m.num_rows; ++row) {
    CHECK(hubs.from(row) == hub && hubs.entries_before(row) == before);
    if (degrees[row] <= gas::kHub) continue;
    CHECK(hub != hubs.end() && hub->row == row && hub->entries == degrees[row]);
    CHECK(pieces.rowptr[hub->first] == rowptr[row] && pieces.rowptr[hub->last] == rowptr[row + 1]);
    for (int64_t piece = hub->first; piece < hub->last; ++piece) {
      const int64_t entries = pieces.rowptr[piece + 1] - pieces.rowptr[piece];
      CHECK(entries >= gas::kPiece && entries < 2 * gas::kPiece);
    }
    before += degrees[row];
    ++hub;
  }
  CHECK(hub == hubs.end() && (hubs.size() == 0) == (before == 0));
  CHECK(hubs.from(m.num_rows) == hubs.end() && hubs.entries_before(m.num_rows) == before);
}

// Every row that is no hub, and every piece, comes once.
void test_loops(const std::vector<int64_t>& degrees, int threads) {
  const auto rowptr = rows_of(degrees);
  const gas::Sparse m{int64_t(degrees.size()), rowptr.back(), rowptr.data(), nullptr, nullptr};
  for (const bool cut : {false, true}) {
    const gas::Hubs hubs = cut ? gas::Hubs(m) : gas::Hubs();
    std::vector<std::atomic<int>> rows(degrees.size()), parts(rows.size());
    std::vector<std::atomic<int>> pieces(hubs.num_pieces());
    gas::parallel_rows(m, hubs, 1, threads, [&](int64_t begin, int64_t end) {
      CHECK(begin < end);
      for (int64_t row = begin; row < end; ++row) ++rows[row];
    });
    std::vector<int64_t> part_of(rows.size(), -1);
    gas::parallel_parts(m, hubs, 1, threads, [&](int64_t part, int64_t begin, int64_t end) {
      CHECK(begin < end && 0 <= part && part < gas::kParts);
      for (int64_t row = begin; row < end; ++row) {
        ++parts[row];
        part_of[row] = part;
      }
    });
    gas::parallel_pieces(hubs, 1, threads, [&](int64_t begin, int64_t end) {
      CHECK(begin < end);
      for (int64_t piece = begin; piece < end; ++piece) ++pieces[piece];
    });
    int64_t part = 0;
    for (size_t row = 0; row < rows.size(); ++row) {
      const bool whole = !cut || degrees[row] <= gas::kHub;
      CHECK(rows[row] == whole && parts[row] == whole);
      if (!whole) continue;
      CHECK(part_of[row] >= part);
      part = part_of[row];
    }
    for (const gas::Hub& hub : hubs) {
      for (int64_t piece = hub.first; piece < hub.last; ++piece) CHECK(pieces[piece]-- == 1);
    }
    for (const auto& times : pieces) CHECK(times == 0);  // The rows between hubs are unused.
  }
}

void test(const std::vector<int64_t>& degrees) {
  test_pieces(degrees);
  for (const int threads : {1, 2, 7}) test_loops(degrees, threads);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  constexpr int64_t kHub = gas::kHub;
  test({});
  test({0, 3, 0});
  test({kHub, kHub, 1, kHub});
  test({kHub + 1});
  test({0, 0, kHub + 1, 0, 5 * kHub, kHub + 1, 2, kHub, 0, 3 * kHub + 7, 0});
  for (int i = 0; i < 50; ++i) {
    std::vector<int64_t> degrees(1 + random() % 60);
    for (int64_t& degree : degrees) {
      degree = random() % 4 == 0 ? random() % (3 * kHub) : random() % 9;
    }
    test(degrees);
  }
}
