#include "operators/edge_conv.h"

#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "gradients.h"
#include "hub_graph.h"
#include "graph/transpose.h"

namespace {

using gas::Activation;

struct Case {
  int64_t rows, cols;
  gas::EdgeConv how;
  std::vector<int32_t> rowptr{0}, col;
  Numbers target, source;
};

Case make(int64_t rows, gas::EdgeConv how, bool hubs, std::mt19937& random) {
  Case c{rows, rows + 5, how, {0}, {}, {}, {}};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t degree = degree_of(hubs, r, rows, r % 5 == 2 ? 0 : random() % 7);
    for (int64_t e = 0; e < degree; ++e) c.col.push_back(column_of(hubs, c.cols, random));
    c.rowptr.push_back(static_cast<int32_t>(c.col.size()));
  }
  c.target = numbers(c.rows * how.width, random, 2);
  c.source = numbers(c.cols * how.width, random, 2);
  return c;
}

double activate(Activation f, double parameter, double x) {
  switch (f) {
    case Activation::kRelu: return std::max(x, 0.0);
    case Activation::kLeakyRelu: return x > 0 ? x : parameter * x;
    case Activation::kElu: return x > 0 ? x : parameter * std::expm1(x);
    case Activation::kSigmoid: return 1 / (1 + std::exp(-x));
    case Activation::kTanh: return std::tanh(x);
  }
  return 0;
}

// The definition.
Numbers expected(const Case& c) {
  const int64_t width = c.how.width;
  Numbers out(c.rows * width);
  for (int64_t r = 0; r < c.rows; ++r) {
    const int64_t degree = c.rowptr[r + 1] - c.rowptr[r];
    for (int64_t j = 0; j < width; ++j) {
      double& sum = out[r * width + j];
      for (int64_t e = c.rowptr[r]; e < c.rowptr[r + 1]; ++e) {
        const double x = c.target[r * width + j] + c.source[c.col[e] * width + j];
        sum += activate(c.how.activation, c.how.parameter, x);
      }
      if (c.how.mean && degree > 0) sum /= degree;
    }
  }
  return out;
}

template <typename T>
struct Result {
  std::vector<T> out, grad_target, grad_source;
};

template <typename T>
Result<T> run(const Case& c, const Numbers& grad, int threads) {
  const gas::Sparse forward{c.rows, int64_t(c.col.size()), c.rowptr.data(), c.col.data(), nullptr};
  std::vector<int32_t> t_rowptr(c.cols + 1), t_col(c.col.size()), t_entry(c.col.size());
  gas::transpose(forward, c.cols, c.cols, t_rowptr.data(), t_col.data(), t_entry.data(), threads);
  const gas::Sparse backward{c.cols, forward.entries, t_rowptr.data(), t_col.data(),
                             t_entry.data()};
  const auto cast = [](const Numbers& v) { return std::vector<T>(v.begin(), v.end()); };
  const auto target = cast(c.target), source = cast(c.source);
  const int64_t width = c.how.width;
  Numbers scaled = grad;
  for (int64_t i = 0; i < c.rows * width; ++i) {
    const int64_t degree = c.rowptr[i / width + 1] - c.rowptr[i / width];
    if (c.how.mean && degree > 0) scaled[i] /= degree;
  }
  const auto g = cast(scaled);
  Result<T> r{std::vector<T>(g.size()), std::vector<T>(g.size()), source};
  gas::edge_conv(forward, c.how, target.data(), source.data(), r.out.data(), r.grad_target.data(),
                 threads);
  for (size_t i = 0; i < g.size(); ++i) r.grad_target[i] *= static_cast<T>(grad[i]);
  gas::edge_conv_backward(backward, c.how, target.data(), source.data(), g.data(),
                          r.grad_source.data(), threads);

  std::vector<T> alone(g.size());  // Without a gradient, nothing but the output changes.
  gas::edge_conv<T>(forward, c.how, target.data(), source.data(), alone.data(), nullptr, threads);
  CHECK(alone == r.out);
  return r;
}

void test(int64_t rows, gas::EdgeConv how, std::mt19937& random, bool hubs = false) {
  Case c = make(rows, how, hubs, random);
  const Numbers grad = numbers(rows * how.width, random, 2), wanted = expected(c);
  const double rounding = hubs ? 100 : 1;  // Sums of thousands of numbers.
  const auto exact = run<double>(c, grad, 1);
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(near(exact.out[i], wanted[i], 1e-12));
  const int checked = hubs || rows > 1000 ? 4 : 20;  // Each takes two passes over the graph.
  check_gradients(c, grad,
                  {{&c.target, &exact.grad_target}, {&c.source, &exact.grad_source}}, checked, 1e-6,
                  1e-5 * rounding);
  const auto one = run<float>(c, grad, 1), three = run<float>(c, grad, 3);
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(near(one.out[i], wanted[i], 1e-5 * rounding));
  CHECK(one.out == three.out && one.grad_target == three.grad_target);
  CHECK(one.grad_source == three.grad_source);  // Whatever the number of threads.
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const auto f : {Activation::kRelu, Activation::kLeakyRelu, Activation::kElu,
                       Activation::kSigmoid, Activation::kTanh}) {
    for (const bool mean : {false, true}) {
      test(0, {f, 0.3, 3, mean}, random);
      test(1, {f, 0.3, 1, mean}, random);
      for (const int64_t width : {1, 3, 16, 21, 40}) test(23, {f, 0.3, width, mean}, random);
      test(2000, {f, 1.5, 16, mean}, random);
      test(20, {f, 0.3, 19, mean}, random, true);
    }
  }
}
