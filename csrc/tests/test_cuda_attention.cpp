// The CUDA kernels of csrc/operators/attention.cu, run on the CPU, against the
// functions for the CPU.
#include "operators/attention.cu"

#include <utility>

#include "cuda_data.h"

namespace {

template <typename T>
struct Results {
  using A = typename gas::Sum<T>::type;
  Table<T> out, positive, grad_x;
  Table<A> maximum, total, weight, grad_source, grad_target, packed;

  Results(const Graph& g, const gas::Attention& how, int64_t shift)
      : out(g.num_rows * how.heads * how.width, shift),
        positive(g.num_rows * how.heads * how.width, shift),
        grad_x(g.num_cols * how.heads * how.width, shift),
        maximum(g.num_rows * how.heads, 0),
        total(g.num_rows * how.heads, 0),
        weight(g.num_rows * how.heads, 0),
        grad_source(g.num_cols * how.heads, 0),
        grad_target(g.num_rows * how.heads, 0),
        packed(4 * g.num_rows * how.heads, 0) {}
  gas::AttentionState<T> state() const {
    return {maximum.data(), total.data(), weight.data(), positive.data()};
  }
  bool operator==(const Results& other) const {
    return out == other.out && positive == other.positive && grad_x == other.grad_x &&
           maximum == other.maximum && total == other.total && weight == other.weight &&
           grad_source == other.grad_source && grad_target == other.grad_target;
  }
};

template <typename T>
void test(const Graph& g, const gas::Attention& how, int64_t shift, std::mt19937& random) {
  using A = typename gas::Sum<T>::type;
  const auto x = numbers<T>(g.num_cols * how.heads * how.width, shift, random);
  const auto grad = numbers<T>(g.num_rows * how.heads * how.width, shift, random);
  const auto source = numbers<A>(g.num_cols * how.heads, 0, random);
  const auto target = numbers<A>(g.num_rows * how.heads, 0, random);
  const gas::Sparse m = g.forward(), t = g.backward();
  const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
    Results<T> r(g, how, shift);
    gas::cuda::attention(m, how, x.data(), source.data(), target.data(), r.out.data(), r.state(),
                         stream);
    gas::cuda::attention_backward(t, g.num_rows, how, x.data(), source.data(), target.data(),
                                  r.out.data(), grad.data(), r.state(), r.packed.data(),
                                  r.grad_x.data(), r.grad_source.data(), r.grad_target.data(),
                                  stream);
    return r;
  });

  const auto exact_x = exact(x), exact_source = exact(source), exact_target = exact(target);
  Results<double> wanted(g, how, 0);
  gas::attention(m, how, exact_x.data(), exact_source.data(), exact_target.data(),
                 wanted.out.data(), wanted.state(), 1);
  check_near(found.out, wanted.out);
  check_near(found.positive, wanted.positive);
  if (how.width > 0) {  // Else there is nothing that would look at it.
    check_near(found.maximum, wanted.maximum);
    check_near(found.total, wanted.total);
    check_near(found.weight, wanted.weight);
  }

  // Backward starts from the same numbers, which forward rounded.
  const auto exact_out = exact(found.out), exact_positive = exact(found.positive);
  const auto exact_grad = exact(grad);
  gas::AttentionState<double> state = wanted.state();
  state.positive = exact_positive.data();
  gas::attention_backward(t, g.num_rows, how, exact_x.data(), exact_source.data(),
                          exact_target.data(), exact_out.data(), exact_grad.data(), state,
                          wanted.packed.data(), wanted.grad_x.data(), wanted.grad_source.data(),
                          wanted.grad_target.data(), 1);
  check_near(found.grad_x, wanted.grad_x);
  check_near(found.grad_source, wanted.grad_source);
  check_near(found.grad_target, wanted.grad_target);

  Scratch scratch;  // Without a gradient, nothing but `positive` is left out.
  Results<T> alone(g, how, shift);
  gas::AttentionState<T> none = alone.state();
  none.positive = nullptr;
  gas::cuda::attention(m, how, x.data(), source.data(), target.data(), alone.out.data(), none,
                       scratch.stream());
  CHECK(alone.out == found.out && alone.maximum == found.maximum && alone.total == found.total);
}

gas::Attention how(int64_t heads, int64_t width, double p, double slope = 0.2) {
  return {heads, width, slope, static_cast<uint64_t>(p * 4294967296.0), 1.0 / (1.0 - p), 7};
}

template <typename T>
void test_all(std::mt19937& random) {
  const std::vector<int64_t> degrees{0, 2, 150, 31, 1, 0, 32, 33, 0, 7, 64, 3};
  const Graph g = make_graph(25, 33, degrees, random);
  for (const double p : {0.0, 0.4}) {
    test<T>(g, how(1, 1, p), 0, random);
    test<T>(g, how(3, 3, p), 0, random);
    test<T>(g, how(8, 8, p), 0, random);
    test<T>(g, how(8, 8, p, 0.0), 1, random);  // Rows that are not aligned to vectors.
    test<T>(g, how(3, 33, p), 0, random);      // A head wider than a team.
    test<T>(g, how(1, 64, p, 1.5), 0, random);
    test<T>(g, how(2, 130, p), 0, random);
    test<T>(g, how(40, 2, p), 0, random);
    test<T>(g, how(4, 256, p), 0, random);
  }
  test<T>(make_graph(3, 5, {9000, 0, 40}, random), how(1, 1, 0.4), 0, random);
  test<T>(make_graph(5, 0, degrees, random), how(2, 4, 0), 0, random);
  test<T>(make_graph(1, 1, {1}, random), how(2, 4, 0), 0, random);
  test<T>(make_graph(300, 200, {0}, random), how(2, 4, 0.4), 0, random);  // No entries at all.
  test<T>(g, how(2, 0, 0), 0, random);

  const int64_t before = on_host::launches;
  test<T>(make_graph(0, 0, degrees, random), how(2, 4, 0), 0, random);
  test<T>(make_graph(0, 0, degrees, random), how(2, 0, 0), 0, random);
  test<T>(g, how(0, 4, 0), 0, random);
  CHECK(on_host::launches == before);
}

// The running maximum rises and falls by more than exp can take.
void test_large_scores() {
  const Graph g = [] {
    std::mt19937 random(3);
    return make_graph(4, 50, {300, 5, 70, 1}, random);
  }();
  std::mt19937 random(4);
  const gas::Attention h = how(2, 4, 0);
  const auto x = numbers<float>(50 * 8, 0, random);
  auto source = numbers<float>(50 * 2, 0, random), target = numbers<float>(4 * 2, 0, random);
  for (int64_t i = 0; i < source.n; ++i) source[i] *= 1e4f;
  const auto exact_x = exact(x), exact_source = exact(source), exact_target = exact(target);
  Results<float> found(g, h, 0);
  Results<double> wanted(g, h, 0);
  Scratch scratch;
  gas::cuda::attention(g.forward(), h, x.data(), source.data(), target.data(), found.out.data(),
                       found.state(), scratch.stream());
  gas::attention(g.forward(), h, exact_x.data(), exact_source.data(), exact_target.data(),
                 wanted.out.data(), wanted.state(), 1);
  for (int64_t i = 0; i < found.out.n; ++i) CHECK(std::abs(found.out[i] - wanted.out[i]) < 2e-3);
}

// However many columns there are, a launch takes at most a few lanes for each of a large device.
void test_scratch() {
  struct Asked {
    int64_t bytes;
  };
  const gas::cuda::Stream stream{0, [](int64_t bytes) -> uintptr_t { throw Asked{bytes}; }};
  for (const auto& [heads, width] : {std::pair{1, 8}, std::pair{8, 64}, std::pair{8, 256}}) {
    for (const int64_t entries : {int64_t{1} << 15, int64_t{1} << 20, int64_t{1} << 30}) {
      const int32_t start = 0;  // Not read.
      const gas::Sparse m{50000, entries, nullptr, nullptr, nullptr, &start};
      int64_t bytes = 0;
      try {
        gas::cuda::attention<float>(m, how(heads, width, 0), nullptr, nullptr, nullptr, nullptr, {},
                                    stream);
      } catch (const Asked& asked) {
        bytes = asked.bytes;
      }
      CHECK(bytes > 0 && bytes < 100e6);
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  test_all<float>(random);
  test_all<double>(random);
  test_all<gas::bfloat16>(random);
  test_large_scores();
  test_scratch();
}
