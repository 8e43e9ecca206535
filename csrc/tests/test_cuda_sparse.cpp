// The CUDA kernels of csrc/operators/multiply.cu and extreme.cu, run on the CPU, against the
// functions for the CPU.
#include "operators/extreme.cu"
#include "operators/multiply.cu"

#include <tuple>

#include "cuda_data.h"

namespace {

// Every entry and every row is in one piece, in order, whatever the size of chunks. The starts are
// those of all rows, of which these may be the first.
void test_pieces(const Graph& g, int64_t num_rows, int64_t step, int32_t each) {
  using gas::cuda::Piece;
  gas::Sparse m = g.forward();
  const auto start = starts_of(m, step);
  m.start = start.data();
  m.num_rows = num_rows;
  const gas::cuda::Chunks chunks(m, step, each);
  const int64_t size = chunks.size;
  CHECK(size == step * each);
  int64_t row = -1, entry = 0;
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    int64_t work = 0;
    const auto body = [&](int64_t r, int64_t begin, int64_t end, Piece piece) {
      row += piece != Piece::kLater;
      const int64_t degree = g.rowptr[r + 1] - g.rowptr[r];
      CHECK(r == row && begin == entry && begin <= end && end <= g.rowptr[r + 1]);
      CHECK((piece == Piece::kWhole) == (degree <= size));
      CHECK((begin == g.rowptr[r]) || piece == Piece::kLater);
      CHECK((end == g.rowptr[r + 1]) || piece != Piece::kWhole);
      CHECK(begin < end || piece != Piece::kLater);
      entry = end;
      work += end - begin;
    };
    gas::cuda::for_pieces(m, chunks, static_cast<int32_t>(chunk), body);
    CHECK(work < 2 * size);
  }
  CHECK(row == num_rows - 1 && entry == g.rowptr[num_rows]);
}

template <typename T>
struct Results {
  Table<T> sum, back, dot, best, spread;
  Table<int32_t> from;

  Results(const Graph& g, int64_t width, int64_t shift)
      : sum(g.num_rows * width, shift),
        back(g.num_cols * width, shift),
        dot(g.entries(), shift),
        best(g.num_rows * width, shift),
        spread(g.num_cols * width, shift),
        from(g.num_rows * width, shift) {}
  bool operator==(const Results& other) const {
    return sum == other.sum && back == other.back && dot == other.dot && best == other.best &&
           spread == other.spread && from == other.from;
  }
};

template <typename T>
void test(const Graph& g, int64_t width, int64_t shift, std::mt19937& random) {
  const auto x = numbers<T>(g.num_cols * width, shift, random);
  const auto y = numbers<T>(g.num_rows * width, shift, random);
  const auto weights = numbers<T>(g.entries(), 0, random);
  const auto exact_x = exact(x), exact_y = exact(y), exact_weights = exact(weights);
  const gas::Sparse m = g.forward(), t = g.backward();
  for (const bool weighted : {false, true}) {
    const T* weight = weighted ? weights.data() : nullptr;
    const bool mean = weighted == (width % 2 == 0);
    const auto which = weighted ? gas::Extreme::kMax : gas::Extreme::kMin;
    Results<double> wanted(g, width, 0);
    const double* exact_weight = weighted ? exact_weights.data() : nullptr;
    const auto exact_rows = gas::in_one_table(exact_x.data());
    gas::multiply(m, exact_weight, exact_rows, width, mean, wanted.sum.data(), 1);
    const auto exact_grads = gas::in_one_table(exact_y.data());
    gas::multiply(t, exact_weight, exact_grads, width, !mean, wanted.back.data(), 1);
    gas::dot_rows(m, exact_y.data(), exact_x.data(), width, wanted.dot.data(), 1);
    gas::extreme(m, which, exact_x.data(), width, wanted.best.data(), wanted.from.data(), 1);
    gas::extreme_backward(t, exact_y.data(), wanted.from.data(), width, wanted.spread.data(), 1);
    const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
      Results<T> r(g, width, shift);
      const auto rows = gas::in_one_table(x.data()), grads = gas::in_one_table(y.data());
      gas::cuda::multiply(m, weight, rows, width, mean, r.sum.data(), stream);
      gas::cuda::multiply(t, weight, grads, width, !mean, r.back.data(), stream);
      gas::cuda::dot_rows(m, y.data(), x.data(), width, r.dot.data(), stream);
      gas::cuda::extreme(m, which, x.data(), width, r.best.data(), r.from.data(), stream);
      gas::cuda::extreme_backward(t, y.data(), r.from.data(), width, r.spread.data(), stream);
      return r;
    });
    check_near(found.sum, wanted.sum);
    check_near(found.back, wanted.back);
    check_near(found.dot, wanted.dot);
    check_near(found.spread, wanted.spread);
    CHECK(exact(found.best) == wanted.best && found.from == wanted.from);

    // With some of the rows in another table, in the opposite order.
    const int64_t own = g.num_cols / 3, others = g.num_cols - own;
    const Table<T> other(others * width, shift), first(own * width, shift);
    std::vector<int64_t> place(others);
    for (int64_t i = 0; i < others; ++i) {
      place[i] = others - 1 - i;
      std::copy_n(x.data() + (own + i) * width, width, other.data() + place[i] * width);
    }
    std::copy_n(x.data(), own * width, first.data());
    Scratch scratch;
    Results<T> split(g, width, shift);
    gas::cuda::multiply(m, weight,
                        gas::Rows<T>{first.data(), own, other.data(), place.data(), others}, width,
                        mean, split.sum.data(), scratch.stream());
    CHECK(split.sum == found.sum);
  }
}

template <typename T>
void test_all(std::mt19937& random) {
  const std::vector<int64_t> degrees{0, 2, 200, 31, 1, 0, 32, 33, 0, 7, 64, 3};
  const Graph g = make_graph(29, 37, degrees, random);
  for (const int64_t width : {1, 2, 3, 8, 33, 64, 130, 256}) {
    test<T>(g, width, 0, random);
    if (width % 8 == 0) test<T>(g, width, 1, random);  // Rows that are not aligned to vectors.
  }
  test<T>(make_graph(3, 5, {9000, 0, 40}, random), 1, 0, random);  // More pieces than threads.
  test<T>(make_graph(3, 5, {2500, 0, 40}, random), 16, 0, random);
  test<T>(make_graph(2, 900, {40, 3}, random), 1024, 0, random);
  test<T>(make_graph(5, 0, degrees, random), 8, 0, random);
  test<T>(make_graph(1, 1, {1}, random), 8, 0, random);
  test<T>(make_graph(2000, 1000, {0}, random), 8, 0, random);  // No entries at all.

  const int64_t before = on_host::launches;
  test<T>(make_graph(0, 0, degrees, random), 8, 0, random);
  CHECK(on_host::launches == before);
  test<T>(g, 0, 0, random);
  CHECK(on_host::launches == before + 2 * 2);  // Of the dot products, which are zero.
}

// Hubs of so many pieces that groups of them are joined first, by teams of all lanes of a warp.
void test_hubs(std::mt19937& random) {
  using T = float;
  constexpr int64_t kWidth = 32, kShift = 1;
  const Graph g = make_graph(7, 5, {3, 17500, 0, 40, 600, 2100, 1}, random);
  const int64_t launches = on_host::launches;
  const auto x = numbers<T>(g.num_cols * kWidth, kShift, random);
  const auto exact_x = exact(x);
  // The first rows alone, too: there are more entries than theirs then.
  for (const int64_t rows : {g.num_rows, int64_t{2}, int64_t{6}}) {
    gas::Sparse m = g.forward();
    m.num_rows = rows;
    Table<double> wanted(rows * kWidth, 0);
    gas::multiply<double>(m, nullptr, gas::in_one_table(exact_x.data()), kWidth, false,
                          wanted.data(), 1);
    const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
      Table<T> sum(rows * kWidth, kShift);
      gas::cuda::multiply<T>(m, nullptr, gas::in_one_table(x.data()), kWidth, false, sum.data(),
                             stream);
      return sum;
    });
    check_near(found, wanted);
  }
  CHECK(on_host::launches == launches + 3 * 2 * 3);  // Chunks, groups, and the rest.
}

void test_nan_and_signs() {
  const float nan = std::nanf("");
  const std::vector<float> x{1.0f, nan, 3.0f, nan, 0.0f, -0.0f};
  const std::vector<int32_t> col{0, 1, 2, 3, 4, 5, 5, 4}, rowptr{0, 4, 6, 8};
  gas::Sparse m{3, int64_t(col.size()), rowptr.data(), col.data(), nullptr};
  CHECK_THROWS(gas::cuda::Chunks(m, 1), std::invalid_argument);
  const auto start = starts_of(m);
  m.start = start.data();
  std::vector<float> out(3), wanted(3);
  std::vector<int32_t> from(3), wanted_from(3);
  Scratch scratch;
  for (const auto which : {gas::Extreme::kMax, gas::Extreme::kMin}) {
    gas::extreme(m, which, x.data(), 1, wanted.data(), wanted_from.data(), 1);
    gas::cuda::extreme(m, which, x.data(), 1, out.data(), from.data(), scratch.stream());
    CHECK(from == wanted_from && from[0] == 1);
    CHECK(std::isnan(out[0]) && std::signbit(out[1]) == std::signbit(wanted[1]));
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const auto& [rows, cols] : {std::pair{60, 9}, std::pair{1, 1}, std::pair{0, 3}}) {
    const Graph g = make_graph(rows, cols, {0, 0, 0, 1, 70, 3, 8, 9, 2, 17, 0, 200}, random);
    for (const int64_t step : {1, 7, 8, 32}) {
      for (const int32_t each : {1, 2, 64}) {
        for (const int64_t first : {int64_t{rows}, int64_t{rows / 2}}) {
          test_pieces(g, first, step, each);
        }
      }
    }
  }
  test_all<float>(random);
  test_all<double>(random);
  test_all<gas::bfloat16>(random);
  test_hubs(random);
  test_nan_and_signs();
}
