// The CUDA kernels of csrc/operators/mixture.cu, run on the CPU, against the
// functions for the CPU.
#include "operators/mixture.cu"

#include "cuda_data.h"

namespace {

// The table whose rows are not aligned to vectors: one of kTables, or none.
constexpr int kTables = 6, kNone = -1;

struct Shape {
  int64_t kernels, dims, width;
};

template <typename T>
struct Results {
  using A = typename gas::Sum<T>::type;
  Table<T> spread, collapse, out;
  Table<A> pseudo, mu, sigma;

  Results(const Graph& g, const gas::Sparse& m, const Shape& s, int odd = kNone)
      : spread(m.num_rows * s.kernels * s.width, odd == 3),
        collapse(m.num_rows * s.width, odd == 4),
        out(m.num_rows * s.kernels * s.width, odd == 5),
        pseudo(g.entries() * s.dims, 0),
        mu(s.kernels * s.dims, 0),
        sigma(s.kernels * s.dims, 0) {}
  gas::MixtureGrad<A> grad() const { return {pseudo.data(), mu.data(), sigma.data()}; }
  bool operator==(const Results& other) const {
    return spread == other.spread && collapse == other.collapse && out == other.out &&
           pseudo == other.pseudo && mu == other.mu && sigma == other.sigma;
  }
};

// Over the matrix, or over its transpose, which finds coordinates by its entries.
template <typename T>
void test(const Graph& g, bool transposed, const Shape& s, int odd, std::mt19937& random) {
  using A = typename gas::Sum<T>::type;
  const gas::Sparse m = transposed ? g.backward() : g.forward();
  const int64_t cols = transposed ? g.num_rows : g.num_cols, n = g.entries();
  const auto one = numbers<T>(cols * s.width, odd == 0, random);
  const auto many = numbers<T>(cols * s.kernels * s.width, odd == 1, random);
  const auto own = numbers<T>(m.num_rows * s.kernels * s.width, odd == 2, random);
  const auto pseudo = numbers<A>(n * s.dims, 0, random);
  const auto mu = numbers<A>(s.kernels * s.dims, 0, random);
  auto sigma = numbers<A>(s.kernels * s.dims, 0, random);
  for (int64_t i = 0; i < sigma.n; ++i) sigma[i] += sigma[i] < 0 ? A{-0.5} : A{0.5};
  const gas::Mixture<A> mixture{s.kernels, s.dims, pseudo.data(), mu.data(), sigma.data()};
  const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
    Results<T> r(g, m, s, odd);
    gas::cuda::mixture_spread(m, mixture, one.data(), s.width, true, r.spread.data(), stream);
    gas::cuda::mixture_collapse(m, mixture, many.data(), s.width, true, r.collapse.data(), stream);
    gas::cuda::mixture_backward(m, mixture, own.data(), one.data(), s.width, r.out.data(), r.grad(),
                                stream);
    return r;
  });

  const auto exact_one = exact(one), exact_many = exact(many), exact_own = exact(own),
             exact_pseudo = exact(pseudo), exact_mu = exact(mu), exact_sigma = exact(sigma);
  const gas::Mixture<double> exact_mixture{s.kernels, s.dims, exact_pseudo.data(), exact_mu.data(),
                                           exact_sigma.data()};
  Results<double> wanted(g, m, s);
  gas::mixture_spread(m, exact_mixture, exact_one.data(), s.width, true, wanted.spread.data(), 1);
  gas::mixture_collapse(m, exact_mixture, exact_many.data(), s.width, true, wanted.collapse.data(),
                        1);
  gas::mixture_backward(m, exact_mixture, exact_own.data(), exact_one.data(), s.width,
                        wanted.out.data(), wanted.grad(), 1);
  check_near(found.spread, wanted.spread);
  check_near(found.collapse, wanted.collapse);
  check_near(found.out, wanted.out);
  check_near(found.pseudo, wanted.pseudo);

  Scratch scratch;  // The parameters' gradients come alone, too, and sums without a mean.
  Results<T> alone(g, m, s, odd);
  gas::cuda::mixture_backward<T>(m, mixture, own.data(), one.data(), s.width, nullptr,
                                 {nullptr, alone.mu.data(), alone.sigma.data()}, scratch.stream());
  if (m.num_rows * s.width > 0) {  // Else they stay as they are.
    check_near(found.mu, wanted.mu);
    check_near(found.sigma, wanted.sigma);
    check_near(alone.mu, wanted.mu);
    check_near(alone.sigma, wanted.sigma);
  }
  gas::cuda::mixture_spread(m, mixture, one.data(), s.width, false, alone.spread.data(),
                            scratch.stream());
  check_near(alone.spread, wanted.out);
  gas::cuda::mixture_collapse(m, mixture, many.data(), s.width, false, alone.collapse.data(),
                              scratch.stream());
  gas::mixture_collapse(m, exact_mixture, exact_many.data(), s.width, false, wanted.collapse.data(),
                        1);
  check_near(alone.collapse, wanted.collapse);
}

template <typename T>
void test_all(std::mt19937& random) {
  const std::vector<int64_t> degrees{0, 2, 150, 31, 1, 0, 32, 33, 0, 7, 64, 3};
  const Graph g = make_graph(12, 33, degrees, random);
  const Graph few = make_graph(4, 5, {0, 2, 40, 33}, random);  // Shuffles take long as fibers.
  for (const bool transposed : {false, true}) {
    test<T>(g, transposed, {1, 1, 1}, kNone, random);
    test<T>(g, transposed, {3, 2, 8}, kNone, random);
    for (int odd = 0; odd < kTables; ++odd) test<T>(few, transposed, {3, 2, 8}, odd, random);
    test<T>(few, transposed, {2, 3, 33}, kNone, random);  // A row wider than a team.
    test<T>(few, transposed, {1, 2, 264}, kNone, random);
    test<T>(few, transposed, {2, 4, 3}, kNone, random);
    test<T>(few, transposed, {5, 5, 16}, kNone, random);  // More coordinates than a lane keeps.
    test<T>(few, transposed, {2, 9, 2}, kNone, random);
    test<T>(few, transposed, {40, 1, 2}, kNone, random);
  }
  test<T>(make_graph(3, 5, {9000, 0, 40}, random), false, {1, 1, 1}, kNone, random);
  test<T>(make_graph(3, 5, {1500, 0, 40}, random), true, {1, 2, 4}, kNone, random);
  test<T>(make_graph(5, 0, degrees, random), false, {2, 2, 4}, kNone, random);
  test<T>(make_graph(1, 1, {1}, random), false, {2, 2, 4}, kNone, random);
  test<T>(make_graph(300, 200, {0}, random), false, {2, 2, 4}, kNone, random);  // No entries.
  test<T>(few, true, {2, 0, 4}, kNone, random);
  test<T>(few, true, {0, 2, 4}, kNone, random);
  test<T>(few, true, {2, 2, 0}, kNone, random);

  const int64_t before = on_host::launches;
  test<T>(make_graph(0, 0, degrees, random), false, {2, 2, 4}, kNone, random);
  test<T>(make_graph(0, 5, degrees, random), false, {2, 2, 0}, kNone, random);
  CHECK(on_host::launches == before);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  test_all<float>(random);
  test_all<double>(random);
  test_all<gas::bfloat16>(random);
}
