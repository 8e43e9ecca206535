#include "operators/attention_v2.h"

#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "common/random.h"
#include "gradients.h"
#include "hub_graph.h"
#include "graph/transpose.h"

namespace {

struct Case {
  int64_t rows, cols;
  gas::Attention how;
  std::vector<int32_t> rowptr{0}, col;
  Numbers source, target, att;
};

Case make(int64_t rows, int64_t heads, int64_t width, double p, bool hubs, std::mt19937& random) {
  const gas::Attention how(heads, width, 0.2, static_cast<uint64_t>(p * 4294967296.0),
                           1.0 / (1.0 - p), 7);
  Case c{rows, rows + 5, how, {0}, {}, {}, {}, {}};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t degree = degree_of(hubs, r, rows, r % 5 == 2 ? 0 : random() % 7);
    for (int64_t e = 0; e < degree; ++e) c.col.push_back(column_of(hubs, c.cols, random));
    c.rowptr.push_back(static_cast<int32_t>(c.col.size()));
  }
  c.source = numbers(c.cols * heads * width, random);
  c.target = numbers(c.rows * heads * width, random);
  c.att = numbers(heads * width, random);
  return c;
}

// The definition.
Numbers expected(const Case& c) {
  const int64_t heads = c.how.heads, width = c.how.width;
  Numbers out(c.rows * heads * width);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      double total = 0;
      for (int pass = 0; pass < 2; ++pass) {
        for (int64_t e = c.rowptr[r]; e < c.rowptr[r + 1]; ++e) {
          const double* theirs = c.source.data() + (c.col[e] * heads + h) * width;
          double score = 0;
          for (int64_t j = 0; j < width; ++j) {
            const double raw = theirs[j] + c.target[(r * heads + h) * width + j];
            score += c.att[h * width + j] * (raw > 0 ? raw : raw * c.how.slope);
          }
          const double power = std::exp(score);
          if (pass == 0) {
            total += power;
            continue;
          }
          const bool kept = gas::is_kept(c.how.seed, e * heads + h, c.how.threshold);
          const double a = kept ? power / total * c.how.keep : 0;
          for (int64_t j = 0; j < width; ++j) out[(r * heads + h) * width + j] += a * theirs[j];
        }
      }
    }
  }
  return out;
}

template <typename T>
struct Result {
  std::vector<T> out, source, target, att;
};

template <typename T>
Result<T> run(const Case& c, const Numbers& grad, int threads) {
  const gas::Sparse forward{c.rows, int64_t(c.col.size()), c.rowptr.data(), c.col.data(), nullptr};
  std::vector<int32_t> t_rowptr(c.cols + 1), t_col(c.col.size()), t_entry(c.col.size());
  gas::transpose(forward, c.cols, c.cols, t_rowptr.data(), t_col.data(), t_entry.data(), threads);
  const gas::Sparse backward{c.cols, forward.entries, t_rowptr.data(), t_col.data(),
                             t_entry.data()};
  const auto cast = [](const Numbers& v) { return std::vector<T>(v.begin(), v.end()); };
  const auto source = cast(c.source), target = cast(c.target), att = cast(c.att), g = cast(grad);
  std::vector<T> maximum(c.rows * c.how.heads), total(maximum), packed(3 * maximum.size());
  Result<T> r{g, source, target, att};
  const gas::AttentionV2<T> layer{c.how, source.data(), target.data(), att.data()};
  gas::attention_v2(forward, layer, r.out.data(), maximum.data(), total.data(), threads);
  gas::attention_v2_backward(forward, backward, layer, r.out.data(), g.data(), maximum.data(),
                             total.data(), packed.data(), r.source.data(), r.target.data(),
                             r.att.data(), threads);
  return r;
}

void test(int64_t rows, int64_t heads, int64_t width, double p, std::mt19937& random,
          bool hubs = false) {
  Case c = make(rows, heads, width, p, hubs, random);
  const Numbers grad = numbers(rows * heads * width, random), wanted = expected(c);
  const auto exact = run<double>(c, grad, 1);
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(near(exact.out[i], wanted[i], 1e-12));
  const int checked = hubs || rows > 500 ? 4 : 20;  // Each takes two passes over the graph.
  check_gradients(
      c, grad,
      {{&c.source, &exact.source}, {&c.target, &exact.target}, {&c.att, &exact.att}}, checked, 1e-6,
      1e-5);
  const auto one = run<float>(c, grad, 1), three = run<float>(c, grad, 3);
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(near(one.out[i], wanted[i], 1e-4));
  CHECK(one.out == three.out && one.source == three.source);  // Whatever the number of threads.
  CHECK(one.target == three.target && one.att == three.att);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const double p : {0.0, 0.4}) {
    test(0, 2, 3, p, random);
    test(1, 1, 1, p, random);
    for (const int64_t width : {1, 3, 8, 11, 32, 40}) test(23, 3, width, p, random);
    test(17, 70, 2, p, random);
    test(600, 2, 8, p, random);
    for (const int64_t heads : {1, 3}) test(20, heads, 11, p, random, true);
  }
}
