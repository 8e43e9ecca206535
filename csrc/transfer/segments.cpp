#include "transfer/segments.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

namespace gas {
namespace {

constexpr size_t kMostPieces = 1024;  // That the system takes at once.

int64_t padded(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Calls preadv or pwritev until all of some pieces is done. Pieces are changed.
template <typename Call>
int64_t move_all(int file, std::vector<iovec>& pieces, int64_t offset, const Call& call) {
  size_t first = 0;
  while (first < pieces.size()) {
    const size_t count = std::min(kMostPieces, pieces.size() - first);
    ssize_t done = call(file, pieces.data() + first, static_cast<int>(count), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done < 0 ? -errno : -EIO;
    offset += done;
    while (done > 0) {
      iovec& piece = pieces[first];
      const size_t part = std::min(static_cast<size_t>(done), piece.iov_len);
      piece.iov_base = static_cast<char*>(piece.iov_base) + part;
      piece.iov_len -= part;
      done -= static_cast<ssize_t>(part);
      if (piece.iov_len == 0) ++first;
    }
  }
  return 0;
}

void add(std::vector<iovec>& pieces, char* at, int64_t bytes) {
  if (bytes > 0) pieces.push_back({at, static_cast<size_t>(bytes)});
}

}  // namespace

int64_t read_segments(int file, int64_t offset, const int64_t* starts, int64_t n, int64_t row_bytes,
                      char* out) {
  std::array<char, kPage> between;
  std::vector<iovec> pieces;
  pieces.reserve(2 * static_cast<size_t>(n));
  int64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bytes = (starts[i + 1] - starts[i]) * row_bytes;
    add(pieces, out, bytes);
    add(pieces, between.data(), padded(bytes) - bytes);
    out += bytes;
    total += padded(bytes);
  }
  const int64_t error = move_all(file, pieces, offset, preadv);
  return error < 0 ? error : total;
}

template <typename Id>
int64_t write_segments(int file, const char* rows, int64_t row_bytes, const Id* ids, int64_t base,
                       const int64_t* starts, const int64_t* ends, const int64_t* offsets,
                       int64_t n) {
  std::vector<char> segment;
  std::vector<iovec> pieces;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bytes = (ends[i] - starts[i]) * row_bytes;
    if (bytes == 0) continue;
    segment.resize(static_cast<size_t>(std::max<int64_t>(segment.size(), padded(bytes))));
    char* out = segment.data();
    for (int64_t j = starts[i]; j < ends[i]; ++j, out += row_bytes) {
      std::memcpy(out, rows + (static_cast<int64_t>(ids[j]) - base) * row_bytes, row_bytes);
    }
    std::memset(out, 0, padded(bytes) - bytes);
    pieces.clear();
    add(pieces, segment.data(), padded(bytes));
    const int64_t error = move_all(file, pieces, offsets[i], pwritev);
    if (error < 0) return error;
  }
  return 0;
}

template int64_t write_segments<int32_t>(int, const char*, int64_t, const int32_t*, int64_t,
                                         const int64_t*, const int64_t*, const int64_t*, int64_t);
template int64_t write_segments<int64_t>(int, const char*, int64_t, const int64_t*, int64_t,
                                         const int64_t*, const int64_t*, const int64_t*, int64_t);

}  // namespace gas
