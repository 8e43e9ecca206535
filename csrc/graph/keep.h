// Some of the entries of a sparse matrix.
#pragma once

#include <cstdint>

namespace gas {

// The positions of the entries e with kept[id[e]] != 0, in order, and the rows that they make.
//   id: [entries], out_rowptr: [num_rows + 1], out_entry: room for all entries.
// Returns how many there are. Ids are not checked.
int64_t kept_entries(const int32_t* rowptr, int64_t num_rows, const int64_t* id,
                     const uint8_t* kept, int32_t* out_rowptr, int64_t* out_entry, int threads);

}  // namespace gas
