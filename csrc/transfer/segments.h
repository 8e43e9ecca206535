// Segments of a file: pieces of a table's rows, each of which begins at a page.
#pragma once

#include <cstdint>

namespace gas {

constexpr int64_t kPage = 4096;

// Reads n segments that follow one another in a file from `offset` on, without what is between
// them, to `out`, one behind the other. Segment i has starts[i + 1] - starts[i] rows. Returns the
// bytes that were read, those between segments included, or the negative number of an error.
int64_t read_segments(int file, int64_t offset, const int64_t* starts, int64_t n, int64_t row_bytes,
                      char* out);

// Writes n segments, the i-th to offsets[i]: the rows ids[j] - base of a table, for j from
// starts[i] to ends[i] - 1. The rest of a segment's last page becomes zero, so that the system
// needn't read it. `Id` is int32_t or int64_t. Returns 0, or the negative number of an error.
template <typename Id>
int64_t write_segments(int file, const char* rows, int64_t row_bytes, const Id* ids, int64_t base,
                       const int64_t* starts, const int64_t* ends, const int64_t* offsets,
                       int64_t n);

}  // namespace gas
