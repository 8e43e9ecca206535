#include "transfer/segments.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <random>
#include <vector>

#include "check.h"

namespace {

int64_t padded(int64_t bytes) { return (bytes + gas::kPage - 1) / gas::kPage * gas::kPage; }

// Writes segments of rows in any order, and reads them in theirs.
template <typename Id>
void test_round_trip(int64_t row_bytes, const std::vector<int64_t>& counts) {
  constexpr int64_t kRows = 500, kBase = 1000;
  std::mt19937 random(3);
  std::vector<char> rows(kRows * row_bytes);
  for (char& value : rows) value = static_cast<char>(random() | 1);
  const int64_t n = static_cast<int64_t>(counts.size());
  std::vector<int64_t> starts = {0}, offsets = {0};
  for (const int64_t count : counts) {
    starts.push_back(starts.back() + count);
    offsets.push_back(offsets.back() + padded(count * row_bytes));
  }
  std::vector<Id> ids(starts.back());
  for (Id& id : ids) id = static_cast<Id>(kBase + random() % kRows);

  std::FILE* stream = std::tmpfile();
  const int file = fileno(stream);
  std::vector<int64_t> first, end, where;
  for (int64_t i = n - 1; i >= 0; --i) {
    first.push_back(starts[i]), end.push_back(starts[i + 1]), where.push_back(offsets[i]);
  }
  CHECK(gas::write_segments(file, rows.data(), row_bytes, ids.data(), kBase, first.data(),
                            end.data(), where.data(), n) == 0);
  std::vector<char> out(ids.size() * row_bytes);
  CHECK(gas::read_segments(file, 0, starts.data(), n, row_bytes, out.data()) == offsets.back());
  for (size_t i = 0; i < ids.size(); ++i) {
    for (int64_t k = 0; k < row_bytes; ++k) {
      CHECK(out[i * row_bytes + k] == rows[(ids[i] - kBase) * row_bytes + k]);
    }
  }
  for (int64_t i = 0; i < n; ++i) {  // Rows between segments are zero.
    for (int64_t at = offsets[i] + counts[i] * row_bytes; at < offsets[i + 1]; ++at) {
      char byte = 1;
      CHECK(pread(file, &byte, 1, at) == 1);
      CHECK(byte == 0);
    }
  }
  if (offsets.back() > 0) {
    CHECK(ftruncate(file, offsets.back() - 1) == 0);
    CHECK(gas::read_segments(file, 0, starts.data(), n, row_bytes, out.data()) == -EIO);
  }
  std::fclose(stream);
  if (!ids.empty()) {
    CHECK(gas::read_segments(-1, 0, starts.data(), n, row_bytes, out.data()) == -EBADF);
    CHECK(gas::write_segments(-1, rows.data(), row_bytes, ids.data(), kBase, first.data(),
                              end.data(), where.data(), n) == -EBADF);
  }
}

}  // namespace

int main() {
  for (const int64_t row_bytes : {4, 68, 512, 4096, 5000}) {
    test_round_trip<int32_t>(row_bytes, {});
    test_round_trip<int32_t>(row_bytes, {0, 3, 0, 70, 1});
    test_round_trip<int64_t>(row_bytes, {64, 200, 0});
  }
  test_round_trip<int32_t>(100, std::vector<int64_t>(1500, 1));  // More than a call takes.
  return 0;
}
