#include "transfer/transfer.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/parallel.h"
#include "transfer/rows.h"

namespace gas {
namespace {

// `count` consecutive rows of a buffer to consecutive rows of a table.
void write(const Table& table, const char* buffer, int64_t count, char* rows) {
  if (table.encoded) {
    encode_rows(table.codec, reinterpret_cast<const float*>(buffer), table.width, count, rows);
  } else {
    std::memcpy(rows, buffer, count * table.row_bytes);
  }
}

}  // namespace

std::vector<Range> make_ranges(const int64_t* offset, const int64_t* count, int64_t num_ranges,
                               int64_t num_rows) {
  std::vector<Range> ranges;
  int64_t begin = 0;
  for (int64_t i = 0; i < num_ranges; ++i) {
    const int64_t first = offset[i], rows = count[i];
    if (first < 0 || rows < 0 || first > num_rows - rows) {
      throw std::out_of_range(std::to_string(rows) + " rows from row " + std::to_string(first) +
                              " are not all in a table of " + std::to_string(num_rows) + " rows");
    }
    ranges.push_back({first, rows, begin});
    begin += rows;
  }
  return ranges;
}

Job pull(const Table& table, const int64_t* index, int64_t n, char* buffer) {
  check_index(index, n, table.num_rows);
  Job job;
  job.size = n;
  job.grain = grain_rows(table.buffer_bytes());
  job.run = [=](int64_t first, int64_t last, int threads) {
    parallel_chunks(last - first, job.grain, threads, [&](int, int64_t begin, int64_t end) {
      begin += first, end += first;
      if (table.encoded) {
        decode_rows(table.codec, table.rows, table.width, index, begin, end,
                    reinterpret_cast<float*>(buffer));
      } else {
        gather_range(table.rows, table.row_bytes, index, begin, end, buffer);
      }
    });
  };
  return job;
}

Job push(const Table& table, const char* buffer, const int64_t* index, int64_t n) {
  check_index(index, n, table.num_rows);
  Job job;
  job.size = n > 0;  // One piece: a row may be listed twice.
  job.run = [=](int64_t, int64_t, int threads) {
    // Every piece looks at all indices and writes those of its own part of the table, so that no
    // row is written by two: one for each thread.
    const int64_t most = std::max<int64_t>(1, n / grain_rows(table.buffer_bytes()));
    const int parts = static_cast<int>(std::min<int64_t>(threads, most));
    const int64_t rows = table.num_rows / std::max(1, parts);
    parallel_chunks(table.num_rows, rows, parts, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = 0; i < n; ++i) {
        if (index[i] < begin || index[i] >= end) continue;
        write(table, buffer + i * table.buffer_bytes(), 1, table.rows + index[i] * table.row_bytes);
      }
    });
  };
  return job;
}

Job push(const Table& table, const char* buffer, std::vector<Range> ranges) {
  Job job;
  job.size = ranges.empty() ? 0 : ranges.back().begin + ranges.back().count;
  job.grain = grain_rows(table.buffer_bytes());
  job.run = [table, buffer, grain = job.grain, ranges = std::move(ranges)](
                int64_t first, int64_t last, int threads) {
    parallel_chunks(last - first, grain, threads, [&](int, int64_t begin, int64_t end) {
      begin += first, end += first;
      for (const Range& range : ranges) {
        const int64_t from = std::max(begin, range.begin);
        const int64_t to = std::min(end, range.begin + range.count);
        if (from >= to) continue;
        const int64_t row = range.first + from - range.begin;
        write(table, buffer + from * table.buffer_bytes(), to - from,
              table.rows + row * table.row_bytes);
      }
    });
  };
  return job;
}

void run(const Job& job, int threads) {
  if (job.size > 0) job.run(0, job.size, threads);
}

}  // namespace gas
