// Pulls and pushes: moving rows between a table in host memory and a buffer, decoded and encoded.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/codec.h"
#include "transfer/engine.h"

namespace gas {

// A table of `num_rows` stored rows. Buffers hold rows of `width` float32, or, where nothing is
// encoded, rows of the same bytes as the table's.
struct Table {
  char* rows;
  int64_t num_rows;
  int64_t row_bytes;
  bool encoded;
  Codec codec;    // For encoded rows.
  int64_t width;  // For encoded rows.

  int64_t buffer_bytes() const { return encoded ? width * int64_t{sizeof(float)} : row_bytes; }
};

// `count` rows of a table, from row `first`; they are the buffer's rows from `begin`.
struct Range {
  int64_t first, count, begin;
};

// Checks ranges that fill a buffer in turn. Throws std::out_of_range, naming the range.
std::vector<Range> make_ranges(const int64_t* offset, const int64_t* count, int64_t num_ranges,
                               int64_t num_rows);

// buffer[i] = table[index[i]] for i in [0, n). Throws std::out_of_range, before anything is read.
// The memory behind the pointers, `index` included, must outlive the job.
Job pull(const Table& table, const int64_t* index, int64_t n, char* buffer);

// table[index[i]] = buffer[i] for i in [0, n); of rows with the same index the last one wins.
// Throws std::out_of_range, before anything is written.
Job push(const Table& table, const char* buffer, const int64_t* index, int64_t n);

// table[range] = buffer[range's rows], for every range.
Job push(const Table& table, const char* buffer, std::vector<Range> ranges);

// Runs a job here and now, with up to `threads` threads.
void run(const Job& job, int threads);

}  // namespace gas
