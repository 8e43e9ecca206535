// Loop over the rows of a matrix on the CPU, common to all operators: rows are split over threads;
// hubs are cut into pieces, which are rows like others, and what is found in them is joined in
// order; and all is compiled for several processors. Results don't depend on the number of threads.
//
// An operator says what happens for some rows, by run(rows, tables...), and what tables with a row
// for each of the matrix's it reads and writes: for the pieces of hubs there are others in their
// place, which have the type that is added up in. A Table has
//   whole(): the pointers that run gets for rows of the matrix, in a tuple,
//   scratch(hubs): what is in their place for pieces, and pointers(scratch) to that,
//   join(hubs, scratch, threads): writes the rows of hubs.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "common/hubs.h"
#include "common/parallel_rows.h"
#include "common/processor.h"
#include "common/simd.h"

namespace gas {

// The rows [begin, end) of a matrix.
struct SomeRows {
  const Sparse& m;
  int64_t begin, end;
  bool whole;  // Or pieces: what depends on all entries of a row is up to who joins them.
};

// Number of rows and entries that are worth a thread, where each costs `elements` steps.
inline int64_t grain_of(int64_t enough, int64_t elements) {
  return enough / std::max<int64_t>(1, elements);
}

// Tables ---------------------------------------------------------------------------------------

// One that is read.
template <typename T>
struct Own {
  const T* table;
  int64_t width;

  std::tuple<const T*> whole() const { return {table}; }
  std::vector<T> scratch(const Hubs& hubs) const { return hubs.repeat(table, width); }
  std::tuple<const T*> pointers(const std::vector<T>& scratch) const { return {scratch.data()}; }
  void join(const Hubs&, const std::vector<T>&, int) const {}
};
template <typename T>
Own(const T*, int64_t) -> Own<T>;

// One of sums over entries, or of their means. It may be null: so are its pieces then.
template <typename T>
struct Sums {
  using A = typename Sum<T>::type;
  T* out;
  int64_t width;
  bool mean;

  std::tuple<T*> whole() const { return {out}; }
  std::vector<A> scratch(const Hubs& hubs) const {
    return std::vector<A>(out == nullptr ? 0 : hubs.num_pieces() * width);
  }
  std::tuple<A*> pointers(std::vector<A>& scratch) const {
    return {out == nullptr ? nullptr : scratch.data()};
  }
  void join(const Hubs& hubs, const std::vector<A>& scratch, int threads) const {
    if (out == nullptr) return;
    parallel_hubs(hubs, threads, [&](const Hub& hub) {
      std::vector<A> sum(width);
      for (int64_t piece = hub.first; piece < hub.last; ++piece) {
        for (int64_t j = 0; j < width; ++j) sum[j] += scratch[piece * width + j];
      }
      const A scale = mean ? A{1} / static_cast<A>(hub.entries) : A{1};
      for (int64_t j = 0; j < width; ++j) store(out + hub.row * width + j, sum[j] * scale);
    });
  }
};
template <typename T>
Sums(T*, int64_t, bool) -> Sums<T>;

// One that doesn't depend on entries: all pieces of a hub find the same.
template <typename T>
struct Same {
  T* out;
  int64_t width;

  std::tuple<T*> whole() const { return {out}; }
  std::vector<T> scratch(const Hubs& hubs) const {
    return std::vector<T>(hubs.num_pieces() * width);
  }
  std::tuple<T*> pointers(std::vector<T>& scratch) const { return {scratch.data()}; }
  void join(const Hubs& hubs, const std::vector<T>& scratch, int) const {
    for (const Hub& hub : hubs) {
      std::copy_n(scratch.data() + hub.first * width, width, out + hub.row * width);
    }
  }
};
template <typename T>
Same(T*, int64_t) -> Same<T>;

// Loops ----------------------------------------------------------------------------------------

// Calls run(arguments..., pointers...) compiled for this processor.
template <Vectors Most, typename Run, typename... Pointers>
auto caller(const Run& run, const std::tuple<Pointers...>& pointers) {
  return std::apply(
      [&run](auto... at) {
        return [&run, at...](const auto&... arguments) {
          on_processor<Most>([&]() GAS_INLINED { run(arguments..., at...); });
        };
      },
      pointers);
}

// The part of hubs.
template <Vectors Most, typename Run, typename... Tables>
void reduce_pieces(const Hubs& hubs, int64_t grain, int threads, const Run& run,
                   const Tables&... tables) {
  if (hubs.size() == 0) return;
  const Sparse pieces = hubs.pieces();
  auto scratch = std::make_tuple(tables.scratch(hubs)...);
  const auto at =
      std::apply([&](auto&... of) { return std::tuple_cat(tables.pointers(of)...); }, scratch);
  const auto call = caller<Most>(run, at);
  parallel_pieces(hubs, grain, threads,
                  [&](int64_t begin, int64_t end) { call(SomeRows{pieces, begin, end, false}); });
  std::apply([&](auto&... of) { (tables.join(hubs, of, threads), ...); }, scratch);
}

// Calls run(rows, pointers...) for all rows; `grain` rows and entries are worth a thread. `Most`: the
// widest vectors that it is compiled for.
template <Vectors Most = Vectors::kAvx2, typename Run, typename... Tables>
void reduce_rows(const Sparse& matrix, int64_t grain, int threads, const Run& run,
                 const Tables&... tables) {
  const Hubs hubs(matrix);
  const auto call = caller<Most>(run, std::tuple_cat(tables.whole()...));
  parallel_rows(matrix, hubs, grain, threads,
                [&](int64_t begin, int64_t end) { call(SomeRows{matrix, begin, end, true}); });
  reduce_pieces<Most>(hubs, grain, threads, run, tables...);
}

// Calls run(rows, totals, pointers...), which adds what it finds in all rows to `count` totals, and
// returns those: added up in parts that depend on the matrix alone, in order.
template <typename Run, typename... Tables>
std::vector<double> reduce_rows_and_totals(const Sparse& matrix, int64_t grain, int threads,
                                           int64_t count, const Run& run, const Tables&... tables) {
  const Hubs hubs(matrix);
  const int64_t num_parts = kParts + hubs.num_pieces();
  std::vector<double> parts(num_parts * count);
  const auto call = caller<Vectors::kAvx2>(run, std::tuple_cat(tables.whole()...));
  parallel_parts(matrix, hubs, grain, threads, [&](int64_t part, int64_t begin, int64_t end) {
    call(SomeRows{matrix, begin, end, true}, parts.data() + part * count);
  });
  const auto run_pieces = [&](const SomeRows& rows, auto... at) GAS_INLINED {
    for (int64_t piece = rows.begin; piece < rows.end; ++piece) {
      double* totals = parts.data() + (kParts + piece) * count;
      run(SomeRows{rows.m, piece, piece + 1, false}, totals, at...);
    }
  };
  reduce_pieces<Vectors::kAvx2>(hubs, grain, threads, run_pieces, tables...);
  std::vector<double> totals(count);
  for (int64_t part = 0; part < num_parts; ++part) {
    for (int64_t i = 0; i < count; ++i) totals[i] += parts[part * count + i];
  }
  return totals;
}

}  // namespace gas
