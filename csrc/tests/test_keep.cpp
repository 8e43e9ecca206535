#include "graph/keep.h"

#include <random>
#include <vector>

#include "check.h"

int main() {
  std::mt19937 random(1);
  for (const int64_t rows : {0, 1, 5, 20000}) {
    for (const int share : {0, 1, 50, 100}) {  // Of 100.
      std::vector<int32_t> rowptr{0};
      for (int64_t r = 0; r < rows; ++r) {
        rowptr.push_back(rowptr.back() + (r == 3 ? 3000 : static_cast<int32_t>(random() % 4)));
      }
      std::vector<int64_t> id(rowptr.back());
      std::vector<uint8_t> kept(2 * id.size());
      for (int64_t& i : id) i = random() % kept.size();
      for (uint8_t& k : kept) k = static_cast<int>(random() % 100) < share;
      std::vector<int32_t> wanted_rowptr{0};
      std::vector<int64_t> wanted;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t e = rowptr[r]; e < rowptr[r + 1]; ++e) {
          if (kept[id[e]]) wanted.push_back(e);
        }
        wanted_rowptr.push_back(static_cast<int32_t>(wanted.size()));
      }
      for (const int threads : {1, 3}) {
        std::vector<int32_t> out_rowptr(rows + 1, -1);
        std::vector<int64_t> entry(id.size());
        const int64_t count = gas::kept_entries(rowptr.data(), rows, id.data(), kept.data(),
                                                out_rowptr.data(), entry.data(), threads);
        entry.resize(count);
        CHECK(entry == wanted && out_rowptr == wanted_rowptr);
      }
    }
  }
}
