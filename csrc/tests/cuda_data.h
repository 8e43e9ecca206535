// Graphs, numbers and scratch for the tests of CUDA kernels, which run them on the CPU.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "common/simd.h"
#include "common/stream.h"
#include "cuda_on_host.h"
#include "graph/starts.cu"
#include "graph/transpose.h"

struct Graph {
  int64_t num_rows, num_cols;
  std::vector<int32_t> rowptr, col, t_rowptr, t_col, t_entry, start, t_start;

  int64_t entries() const { return static_cast<int64_t>(col.size()); }
  gas::Sparse forward() const {
    return {num_rows, entries(), rowptr.data(), col.data(), nullptr, start.data()};
  }
  gas::Sparse backward() const {
    return {num_cols, entries(), t_rowptr.data(), t_col.data(), t_entry.data(), t_start.data()};
  }
};

// Launches are counted of what is tested with them.
inline std::vector<int32_t> starts_of(const gas::Sparse& m, int64_t step = gas::cuda::kStep) {
  const int64_t before = on_host::launches;
  std::vector<int32_t> start(gas::cuda::steps_of(m, step) + 1, -1);
  gas::cuda::find_starts(m, step, start.data(), 0);
  on_host::launches = before;
  return start;
}

// With duplicate entries, and a row of each of `degrees`, again and again. Every third entry is of
// column 0, a hub of the transpose.
inline Graph make_graph(int64_t num_rows, int64_t num_cols, const std::vector<int64_t>& degrees,
                        std::mt19937& random) {
  Graph g{num_rows, num_cols, {0}, {}, {}, {}, {}, {}, {}};
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t e = 0; num_cols > 0 && e < degrees[r % degrees.size()]; ++e) {
      g.col.push_back(e % 3 == 0 ? 0 : static_cast<int32_t>(random() % num_cols));
    }
    g.rowptr.push_back(static_cast<int32_t>(g.col.size()));
  }
  g.t_rowptr.resize(num_cols + 1);
  g.t_col.resize(g.col.size());
  g.t_entry.resize(g.col.size());
  gas::transpose(g.forward(), num_cols, num_cols, g.t_rowptr.data(), g.t_col.data(),
                 g.t_entry.data(), 1);
  g.start = starts_of(g.forward());
  g.t_start = starts_of(g.backward());
  return g;
}

// A table that starts `shift` elements behind what a vector load wants. Its last element is the
// last of its memory, and it holds NaN (or, as integers, -1) until it is written.
template <typename T>
struct Table {
  Table(int64_t n, int64_t shift) : n(n), shift(shift), memory(new T[n + shift]) {
    std::memset(static_cast<void*>(memory.get()), 0xff, (n + shift) * sizeof(T));
  }
  T* data() const { return memory.get() + shift; }
  T& operator[](int64_t i) const { return data()[i]; }
  bool operator==(const Table& other) const {
    return n == other.n && std::memcmp(data(), other.data(), n * sizeof(T)) == 0;
  }

  int64_t n, shift;
  std::unique_ptr<T[]> memory;
};

template <typename T>
Table<T> numbers(int64_t n, int64_t shift, std::mt19937& random) {
  Table<T> table(n, shift);
  for (int64_t i = 0; i < n; ++i) {
    gas::store(&table[i], static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
  }
  return table;
}

// The same in double, which the CPU's kernels compute the wanted results with.
template <typename T>
Table<double> exact(const Table<T>& table) {
  Table<double> result(table.n, 0);
  for (int64_t i = 0; i < table.n; ++i) result[i] = gas::load(table[i]);
  return result;
}

template <typename T>
constexpr double kTolerance = sizeof(T) == 8   ? 1e-12
                              : sizeof(T) == 4 ? 2e-5
                                               : 1e-2;

template <typename T>
void check_near(const Table<T>& found, const Table<double>& wanted) {
  CHECK(found.n == wanted.n);
  for (int64_t i = 0; i < found.n; ++i) {
    const double a = gas::load(found[i]), b = wanted[i];
    CHECK(std::abs(a - b) <= kTolerance<T> * (1 + std::abs(b)));
  }
}

// Gives scratch that holds nothing useful.
class Scratch {
 public:
  gas::cuda::Stream stream() {
    return {0, [this](int64_t bytes) {
              tables_.emplace_back(new char[bytes]);
              std::memset(tables_.back().get(), 0xff, bytes);
              return reinterpret_cast<uintptr_t>(tables_.back().get());
            }};
  }

 private:
  std::vector<std::unique_ptr<char[]>> tables_;
};

// Returns the result of run(stream), equal in either order of blocks and threads.
template <typename Run>
auto in_both_orders(const Run& run) {
  const auto once = [&](bool reversed) {
    on_host::reversed = reversed;
    Scratch scratch;
    return run(scratch.stream());
  };
  auto found = once(false);
  CHECK(once(true) == found);
  return found;
}
