#include "graph/transpose.h"
#include "operators/extreme.h"
#include "operators/multiply.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "hub_graph.h"

namespace {

struct Graph {
  int64_t num_rows, num_cols;
  std::vector<int32_t> rowptr, col, t_rowptr, t_col, t_entry;

  int64_t entries() const { return static_cast<int64_t>(col.size()); }
  gas::Sparse forward() const { return {num_rows, entries(), rowptr.data(), col.data(), nullptr}; }
  gas::Sparse backward() const {
    return {num_cols, entries(), t_rowptr.data(), t_col.data(), t_entry.data()};
  }
};

// With empty rows, duplicate entries and, in row 1, a hub.
Graph make(int64_t num_rows, int64_t num_cols, bool hubs, std::mt19937& random, int threads) {
  Graph g{num_rows, num_cols, {0}, {}, {}, {}, {}};
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t other = num_cols == 0 || r % 7 == 3 ? 0 : r == 1 ? 500 : random() % 9;
    const int64_t degree = degree_of(hubs, r, num_rows, other);
    for (int64_t e = 0; e < degree; ++e) g.col.push_back(column_of(hubs, num_cols, random));
    g.rowptr.push_back(static_cast<int32_t>(g.col.size()));
  }
  g.t_rowptr.resize(num_cols + 1);
  g.t_col.resize(g.col.size());
  g.t_entry.resize(g.col.size());
  gas::transpose(g.forward(), num_cols, num_cols, g.t_rowptr.data(), g.t_col.data(),
                 g.t_entry.data(), threads);
  return g;
}

template <typename T>
std::vector<T> numbers(int64_t n, std::mt19937& random) {
  std::vector<T> x(n);
  for (T& v : x) v = static_cast<T>(random() % 2001) / T{1000} - T{1};
  return x;
}

template <typename T>
bool near(T a, double b) {
  return std::abs(a - b) <= (sizeof(T) == 8 ? 1e-12 : 1e-4) * (1 + std::abs(b));
}

// Columns that are left out are empty; the others are as before.
void test_part_of_a_transpose(const Graph& g, int threads) {
  const int64_t kept = g.num_cols / 2;
  const int32_t entries = g.t_rowptr[kept];
  std::vector<int32_t> rowptr(g.num_cols + 1), col(entries), entry(entries);
  gas::transpose(g.forward(), g.num_cols, kept, rowptr.data(), col.data(), entry.data(), threads);
  for (int64_t c = 0; c <= g.num_cols; ++c) CHECK(rowptr[c] == std::min(g.t_rowptr[c], entries));
  CHECK(std::equal(col.begin(), col.end(), g.t_col.begin()));
  CHECK(std::equal(entry.begin(), entry.end(), g.t_entry.begin()));
}

void test_transpose(const Graph& g) {
  CHECK(g.t_rowptr.front() == 0 && g.t_rowptr.back() == static_cast<int32_t>(g.col.size()));
  for (int64_t c = 0; c < g.num_cols; ++c) {
    for (int64_t e = g.t_rowptr[c]; e < g.t_rowptr[c + 1]; ++e) {
      const int32_t entry = g.t_entry[e], row = g.t_col[e];
      CHECK(g.col[entry] == c && g.rowptr[row] <= entry && entry < g.rowptr[row + 1]);
      if (e > g.t_rowptr[c]) CHECK(g.t_entry[e - 1] < entry);
    }
  }
}

// Threads that share the entries of one matrix, a row's among them, find what one finds.
void test_shares(bool hubs, std::mt19937& random) {
  const int64_t num_cols = 500;
  Graph g{20, num_cols, {0}, {}, {}, {}, {}};
  for (int64_t r = 0; r < g.num_rows; ++r) {
    const int64_t degree = r % 5 == 2 ? 0 : hubs && r == 3 ? 90000 : 4000;
    for (int64_t e = 0; e < degree; ++e) g.col.push_back(static_cast<int32_t>(random() % num_cols));
    g.rowptr.push_back(static_cast<int32_t>(g.col.size()));
  }
  for (const int threads : {1, 2, 3, 8}) {
    for (const int64_t kept : {num_cols, int64_t{200}, int64_t{0}}) {
      g.t_rowptr.assign(num_cols + 1, -1);
      g.t_col.assign(g.col.size(), -1);
      g.t_entry.assign(g.col.size(), -1);
      gas::transpose(g.forward(), num_cols, num_cols, g.t_rowptr.data(), g.t_col.data(),
                     g.t_entry.data(), threads);
      test_transpose(g);
      std::vector<int32_t> rowptr(num_cols + 1), col(g.col.size(), -1), entry(col);
      gas::transpose(g.forward(), num_cols, kept, rowptr.data(), col.data(), entry.data(), threads);
      const int32_t entries = g.t_rowptr[kept];
      for (int64_t c = 0; c <= num_cols; ++c) CHECK(rowptr[c] == std::min(g.t_rowptr[c], entries));
      CHECK(std::equal(col.begin(), col.begin() + entries, g.t_col.begin()));
      CHECK(std::equal(entry.begin(), entry.begin() + entries, g.t_entry.begin()));
      CHECK(std::all_of(entry.begin() + entries, entry.end(), [](int32_t e) { return e == -1; }));
    }
    const auto place = static_cast<size_t>(random() % g.col.size());  // In any share.
    const int32_t good = std::exchange(g.col[place], static_cast<int32_t>(num_cols));
    const std::vector<int32_t> before = g.t_rowptr;
    CHECK_THROWS(gas::transpose(g.forward(), num_cols, num_cols, g.t_rowptr.data(), g.t_col.data(),
                                g.t_entry.data(), threads),
                 std::out_of_range);
    CHECK(g.t_rowptr == before);
    g.col[place] = good;
  }
}

// Rows of which some are in another table, in another order.
template <typename T>
struct Scattered {
  int64_t num_own;
  std::vector<T> other;
  std::vector<int64_t> place;

  Scattered(const std::vector<T>& x, int64_t num_cols, int64_t width, std::mt19937& random)
      : num_own(num_cols / 3), other(2 * x.size()), place(num_cols - num_own) {
    for (size_t i = 0; i < place.size(); ++i) place[i] = 2 * static_cast<int64_t>(i) + random() % 2;
    std::shuffle(place.begin(), place.end(), random);
    for (size_t i = 0; i < place.size(); ++i) {
      std::copy_n(x.data() + (num_own + i) * width, width, other.data() + place[i] * width);
    }
  }
  gas::Rows<T> rows(const std::vector<T>& x) const {
    return {x.data(), num_own, other.data(), place.data(), static_cast<int64_t>(place.size())};
  }
};

template <typename T>
void test_products(const Graph& g, int64_t width, std::mt19937& random, int threads) {
  const auto entries = static_cast<int64_t>(g.col.size());
  const auto x = numbers<T>(g.num_cols * width, random), y = numbers<T>(g.num_rows * width, random);
  const auto w = numbers<T>(entries, random);
  const Scattered<T> scattered(x, g.num_cols, width, random);
  const std::vector<T> own(x.begin(), x.begin() + scattered.num_own * width);
  std::vector<T> out(g.num_rows * width), same(out), back(g.num_cols * width), dot(entries);
  for (const bool weighted : {false, true}) {
    for (const bool mean : {false, true}) {
      const T* weight = weighted ? w.data() : nullptr;
      gas::multiply(g.forward(), weight, gas::in_one_table(x.data()), width, mean, out.data(),
                    threads);
      gas::multiply(g.forward(), weight, scattered.rows(own), width, mean, same.data(), threads);
      CHECK(out == same);
      for (int64_t r = 0; r < g.num_rows; ++r) {
        const double degree = g.rowptr[r + 1] - g.rowptr[r];
        for (int64_t j = 0; j < width; ++j) {
          double sum = 0;
          for (int64_t e = g.rowptr[r]; e < g.rowptr[r + 1]; ++e) {
            sum += double{x[g.col[e] * width + j]} * (weighted ? w[e] : T{1});
          }
          CHECK(near<T>(out[r * width + j], mean && degree > 0 ? sum / degree : sum));
        }
      }
    }
    gas::multiply(g.backward(), weighted ? w.data() : nullptr, gas::in_one_table(y.data()), width,
                  false, back.data(), threads);
    std::vector<double> wanted(back.size());
    for (int64_t r = 0; r < g.num_rows; ++r) {
      for (int64_t e = g.rowptr[r]; e < g.rowptr[r + 1]; ++e) {
        for (int64_t j = 0; j < width; ++j) {
          wanted[g.col[e] * width + j] += double{y[r * width + j]} * (weighted ? w[e] : T{1});
        }
      }
    }
    for (size_t i = 0; i < back.size(); ++i) CHECK(near<T>(back[i], wanted[i]));
  }
  gas::dot_rows(g.forward(), y.data(), x.data(), width, dot.data(), threads);
  for (int64_t r = 0; r < g.num_rows; ++r) {
    for (int64_t e = g.rowptr[r]; e < g.rowptr[r + 1]; ++e) {
      double sum = 0;
      for (int64_t j = 0; j < width; ++j) sum += double{y[r * width + j]} * x[g.col[e] * width + j];
      CHECK(near<T>(dot[e], sum));
    }
  }
}

template <typename T>
void test_extremes(const Graph& g, int64_t width, std::mt19937& random, int threads) {
  const auto x = numbers<T>(g.num_cols * width, random), y = numbers<T>(g.num_rows * width, random);
  std::vector<T> out(g.num_rows * width), back(g.num_cols * width);
  std::vector<int32_t> from(out.size());
  for (const bool max : {false, true}) {
    gas::extreme(g.forward(), max ? gas::Extreme::kMax : gas::Extreme::kMin, x.data(), width,
                 out.data(), from.data(), threads);
    std::vector<double> wanted(back.size());
    for (int64_t r = 0; r < g.num_rows; ++r) {
      for (int64_t j = 0; j < width; ++j) {
        int32_t best = -1;
        for (int32_t e = g.rowptr[r]; e < g.rowptr[r + 1]; ++e) {
          const T value = x[g.col[e] * width + j];
          const T known = best < 0 ? 0 : x[g.col[best] * width + j];
          if (best < 0 || (max ? value > known : value < known)) best = e;
        }
        CHECK(from[r * width + j] == best);
        CHECK(out[r * width + j] == (best < 0 ? 0 : x[g.col[best] * width + j]));
        if (best >= 0) wanted[g.col[best] * width + j] += y[r * width + j];
      }
    }
    gas::extreme_backward(g.backward(), y.data(), from.data(), width, back.data(), threads);
    for (size_t i = 0; i < back.size(); ++i) CHECK(near<T>(back[i], wanted[i]));
  }
}

// NaN in a later piece of a hub wins, the first of several, as within a row.
void test_missing_numbers() {
  const auto entries = static_cast<int32_t>(2 * gas::kHub);
  const int32_t rowptr[] = {0, entries};
  std::vector<int32_t> col(entries);
  std::vector<float> x(entries);
  for (int32_t e = 0; e < entries; ++e) {
    col[e] = e;
    x[e] = static_cast<float>(e % 7);
  }
  const gas::Sparse row{1, rowptr[1], rowptr, col.data(), nullptr};
  float out;
  int32_t from;
  for (const auto which : {gas::Extreme::kMax, gas::Extreme::kMin}) {
    gas::extreme(row, which, x.data(), 1, &out, &from, 2);
    const bool max = which == gas::Extreme::kMax;  // The first of equals.
    CHECK(out == (max ? 6 : 0) && from == (max ? 6 : 0));
  }
  x[entries / 2] = x[entries - 1] = std::nanf("");
  for (const auto which : {gas::Extreme::kMax, gas::Extreme::kMin}) {
    gas::extreme(row, which, x.data(), 1, &out, &from, 2);
    CHECK(std::isnan(out) && from == entries / 2);
  }
}

// Hubs are joined in one order, whatever the number of threads.
void test_threads(const Graph& g, std::mt19937& random) {
  const int64_t width = 19;
  const auto x = numbers<float>(g.num_cols * width, random),
             y = numbers<float>(g.num_rows * width, random);
  const auto w = numbers<float>(static_cast<int64_t>(g.col.size()), random);
  std::vector<std::vector<float>> found[3];
  std::vector<int32_t> entries[3];
  for (const int threads : {1, 2, 5}) {
    std::vector<float> out(y.size()), most(y.size()), least(y.size()), back(x.size()),
        dot(w.size());
    std::vector<int32_t> from(y.size());
    gas::extreme(g.forward(), gas::Extreme::kMin, x.data(), width, least.data(), from.data(),
                 threads);
    gas::multiply(g.forward(), w.data(), gas::in_one_table(x.data()), width, true, out.data(),
                  threads);
    gas::extreme(g.forward(), gas::Extreme::kMax, x.data(), width, most.data(), from.data(),
                 threads);
    gas::extreme_backward(g.backward(), y.data(), from.data(), width, back.data(), threads);
    gas::dot_rows(g.forward(), y.data(), x.data(), width, dot.data(), threads);
    found[threads / 2] = {out, most, least, back, dot};
    entries[threads / 2] = from;
  }
  CHECK(found[0] == found[1] && found[0] == found[2]);
  CHECK(entries[0] == entries[1] && entries[0] == entries[2]);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const int threads : {1, 3}) {
    for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{5000}}) {
      const Graph g = make(rows, rows == 0 ? 0 : rows + 40, false, random, threads);
      test_transpose(g);
      test_part_of_a_transpose(g, threads);
      for (const int64_t width : {1, 4, 7, 8, 33, 61}) {
        if (rows == 5000 && width > 8) continue;
        test_products<float>(g, width, random, threads);
        test_extremes<float>(g, width, random, threads);
      }
    }
  }
  const Graph g = make(20, 30, true, random, 1);
  for (const int threads : {1, 3}) {
    for (const int64_t width : {1, 33}) {
      test_products<double>(g, width, random, threads);
      test_extremes<double>(g, width, random, threads);
    }
  }
  test_threads(g, random);
  test_shares(false, random);
  test_shares(true, random);
  test_missing_numbers();
  const int32_t rowptr[] = {0, 1};
  int32_t out[3];
  for (const int32_t bad : {-1, 2}) {
    const gas::Sparse wrong{1, 1, rowptr, &bad, nullptr};
    CHECK_THROWS(gas::transpose(wrong, 2, 2, out, out, out, 1), std::out_of_range);
  }
}
