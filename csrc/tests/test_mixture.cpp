#include "operators/mixture.h"

#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "gradients.h"
#include "hub_graph.h"
#include "graph/transpose.h"

namespace {

struct Case {
  int64_t rows, cols, kernels, dims, width;
  bool mean;
  std::vector<int32_t> rowptr{0}, col;
  Numbers x, pseudo, mu, sigma;  // x: [cols, kernels, width]
};

Case make(int64_t rows, int64_t kernels, int64_t dims, int64_t width, bool mean, bool hubs,
          std::mt19937& random) {
  Case c{rows, rows + 5, kernels, dims, width, mean, {0}, {}, {}, {}, {}, {}};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t degree = degree_of(hubs, r, rows, r % 5 == 2 ? 0 : random() % 21);
    for (int64_t e = 0; e < degree; ++e) c.col.push_back(column_of(hubs, c.cols, random));
    c.rowptr.push_back(static_cast<int32_t>(c.col.size()));
  }
  c.x = numbers(c.cols * kernels * width, random);
  c.pseudo = numbers(c.col.size() * dims, random);
  c.mu = numbers(kernels * dims, random);
  c.sigma = numbers(kernels * dims, random);
  for (double& v : c.sigma) v += v < 0 ? -0.5 : 0.5;
  return c;
}

// The definition.
Numbers expected(const Case& c) {
  Numbers out(c.rows * c.width);
  for (int64_t r = 0; r < c.rows; ++r) {
    const double degree = c.rowptr[r + 1] - c.rowptr[r];
    for (int64_t e = c.rowptr[r]; e < c.rowptr[r + 1]; ++e) {
      for (int64_t k = 0; k < c.kernels; ++k) {
        double exponent = 0;
        for (int64_t d = 0; d < c.dims; ++d) {
          const double gap = c.pseudo[e * c.dims + d] - c.mu[k * c.dims + d];
          const double sigma = c.sigma[k * c.dims + d];
          exponent -= 0.5 * gap * gap / (1e-15 + sigma * sigma);
        }
        const double weight = std::exp(exponent) / (c.mean ? degree : 1);
        for (int64_t j = 0; j < c.width; ++j) {
          out[r * c.width + j] += weight * c.x[(c.col[e] * c.kernels + k) * c.width + j];
        }
      }
    }
  }
  return out;
}

template <typename T>
struct Result {
  std::vector<T> out, x, pseudo, mu, sigma;
};

template <typename T>
Result<T> run(const Case& c, const Numbers& grad, int threads) {
  const gas::Sparse forward{c.rows, int64_t(c.col.size()), c.rowptr.data(), c.col.data(), nullptr};
  std::vector<int32_t> t_rowptr(c.cols + 1), t_col(c.col.size()), t_entry(c.col.size());
  gas::transpose(forward, c.cols, c.cols, t_rowptr.data(), t_col.data(), t_entry.data(), threads);
  const gas::Sparse backward{c.cols, forward.entries, t_rowptr.data(), t_col.data(),
                             t_entry.data()};
  const auto cast = [](const Numbers& v) { return std::vector<T>(v.begin(), v.end()); };
  const auto x = cast(c.x), pseudo = cast(c.pseudo), mu = cast(c.mu), sigma = cast(c.sigma);
  Numbers scaled = grad;
  for (int64_t i = 0; i < c.rows * c.width; ++i) {
    const int64_t degree = c.rowptr[i / c.width + 1] - c.rowptr[i / c.width];
    if (c.mean && degree > 0) scaled[i] /= degree;
  }
  const auto g = cast(scaled);
  const gas::Mixture<T> mixture{c.kernels, c.dims, pseudo.data(), mu.data(), sigma.data()};
  Result<T> r{std::vector<T>(g.size()), x, pseudo, mu, sigma};
  gas::mixture_collapse(forward, mixture, x.data(), c.width, c.mean, r.out.data(), threads);
  gas::mixture_backward(backward, mixture, x.data(), g.data(), c.width, r.x.data(),
                        {r.pseudo.data(), r.mu.data(), r.sigma.data()}, threads);

  auto alone = x;  // The spread by itself is what the gradients came with.
  gas::mixture_spread(backward, mixture, g.data(), c.width, false, alone.data(), threads);
  CHECK(alone == r.x);
  auto pseudo_grad = pseudo, mu_grad = mu, sigma_grad = sigma;  // And they come alone.
  gas::mixture_backward<T>(backward, mixture, x.data(), g.data(), c.width, nullptr,
                           {nullptr, mu_grad.data(), sigma_grad.data()}, threads);
  CHECK(pseudo_grad == pseudo && mu_grad == r.mu && sigma_grad == r.sigma);
  return r;
}

void test(int64_t rows, int64_t kernels, int64_t dims, int64_t width, bool mean,
          std::mt19937& random, bool hubs = false) {
  Case c = make(rows, kernels, dims, width, mean, hubs, random);
  const Numbers grad = numbers(rows * width, random), wanted = expected(c);
  const auto exact = run<double>(c, grad, 1);
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(near(exact.out[i], wanted[i], 1e-12));
  check_gradients(c, grad,
                  {{&c.x, &exact.x},
                   {&c.pseudo, &exact.pseudo},
                   {&c.mu, &exact.mu},
                   {&c.sigma, &exact.sigma}},
                  10, 1e-5, 1e-5);
  const auto one = run<float>(c, grad, 1), three = run<float>(c, grad, 3);
  for (size_t i = 0; i < wanted.size(); ++i) CHECK(near(one.out[i], wanted[i], 1e-4));
  CHECK(one.out == three.out && one.x == three.x);  // Whatever the number of threads.
  CHECK(one.pseudo == three.pseudo && one.mu == three.mu && one.sigma == three.sigma);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const bool mean : {false, true}) {
    test(0, 2, 3, 4, mean, random);
    test(1, 1, 1, 1, mean, random);
    for (const int64_t width : {1, 3, 8, 21, 40}) test(23, 3, 2, width, mean, random);
    test(17, 11, 5, 2, mean, random);
    test(600, 2, 1, 16, mean, random);
    test(20, 2, 2, 19, mean, random, true);
  }
}
