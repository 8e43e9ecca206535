// The CUDA kernels of csrc/operators/attention_v2.cu, run on the CPU, against the
// functions for the CPU.
#include "operators/attention_v2.cu"

#include "cuda_data.h"

namespace {

// The table whose rows are not aligned to vectors: one of kTables, or none.
constexpr int kTables = 7, kNone = -1;

template <typename T>
struct Results {
  using A = typename gas::Sum<T>::type;
  Table<T> out, grad_source, grad_target;
  Table<A> maximum, total, grad_att, packed;

  Results(const Graph& g, const gas::Attention& how, int odd = kNone)
      : out(g.num_rows * how.heads * how.width, odd == 4),
        grad_source(g.num_cols * how.heads * how.width, odd == 5),
        grad_target(g.num_rows * how.heads * how.width, odd == 6),
        maximum(g.num_rows * how.heads, 0),
        total(g.num_rows * how.heads, 0),
        grad_att(how.heads * how.width, 0),
        packed(4 * g.num_rows * how.heads, 0) {}
  bool operator==(const Results& other) const {
    return out == other.out && grad_source == other.grad_source &&
           grad_target == other.grad_target && maximum == other.maximum && total == other.total &&
           grad_att == other.grad_att;
  }
};

template <typename T>
void test(const Graph& g, const gas::Attention& how, int odd, std::mt19937& random) {
  using A = typename gas::Sum<T>::type;
  const int64_t all = how.heads * how.width;
  const auto source = numbers<T>(g.num_cols * all, odd == 0, random);
  const auto target = numbers<T>(g.num_rows * all, odd == 1, random);
  const auto grad = numbers<T>(g.num_rows * all, odd == 2, random);
  auto att = numbers<A>(all, odd == 3, random);
  for (int64_t i = 0; i < all; ++i) att[i] /= std::sqrt(static_cast<A>(how.width));
  const gas::Sparse m = g.forward(), t = g.backward();
  const gas::AttentionV2<T> layer{how, source.data(), target.data(), att.data()};
  const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
    Results<T> r(g, how, odd);
    gas::cuda::attention_v2(m, layer, r.out.data(), r.maximum.data(), r.total.data(), stream);
    gas::cuda::attention_v2_backward(m, t, layer, r.out.data(), grad.data(), r.maximum.data(),
                                     r.total.data(), r.packed.data(), r.grad_source.data(),
                                     r.grad_target.data(), r.grad_att.data(), stream);
    return r;
  });

  const auto exact_source = exact(source), exact_target = exact(target), exact_att = exact(att);
  const gas::AttentionV2<double> exact_layer{how, exact_source.data(), exact_target.data(),
                                             exact_att.data()};
  Results<double> wanted(g, how);
  gas::attention_v2(m, exact_layer, wanted.out.data(), wanted.maximum.data(), wanted.total.data(),
                    1);
  check_near(found.out, wanted.out);
  if (how.width > 0) {  // Else there is nothing that would look at it.
    check_near(found.maximum, wanted.maximum);
    check_near(found.total, wanted.total);
  }

  // Backward starts from the same numbers, which forward rounded.
  const auto exact_out = exact(found.out), exact_grad = exact(grad);
  gas::attention_v2_backward(m, t, exact_layer, exact_out.data(), exact_grad.data(),
                             wanted.maximum.data(), wanted.total.data(), wanted.packed.data(),
                             wanted.grad_source.data(), wanted.grad_target.data(),
                             wanted.grad_att.data(), 1);
  check_near(found.grad_source, wanted.grad_source);
  check_near(found.grad_target, wanted.grad_target);
  if (g.num_rows > 0) check_near(found.grad_att, wanted.grad_att);
}

gas::Attention how(int64_t heads, int64_t width, double p, double slope = 0.2) {
  return {heads, width, slope, static_cast<uint64_t>(p * 4294967296.0), 1.0 / (1.0 - p), 7};
}

template <typename T>
void test_all(std::mt19937& random) {
  const std::vector<int64_t> degrees{0, 2, 150, 31, 1, 0, 32, 33, 0, 7, 64, 3};
  const Graph g = make_graph(12, 33, degrees, random);
  const Graph few = make_graph(4, 5, {0, 2, 40, 33}, random);  // Shuffles take long as fibers.
  for (const double p : {0.0, 0.4}) {
    test<T>(g, how(1, 1, p), kNone, random);
    test<T>(g, how(3, 3, p), kNone, random);
    test<T>(g, how(8, 8, p), kNone, random);
    test<T>(few, how(8, 8, p, 0.0), kNone, random);
    test<T>(few, how(3, 33, p), kNone, random);  // A head wider than a team.
    test<T>(few, how(1, 64, p, 1.5), kNone, random);
    test<T>(few, how(2, 130, p, -0.5), kNone, random);
    test<T>(few, how(40, 2, p), kNone, random);
    test<T>(few, how(1, 264, p), kNone, random);
  }
  for (int odd = 0; odd < kTables; ++odd) test<T>(few, how(2, 8, 0.4), odd, random);
  test<T>(make_graph(3, 5, {9000, 0, 40}, random), how(1, 1, 0.4), kNone, random);
  test<T>(make_graph(3, 5, {1500, 0, 40}, random), how(1, 4, 0.4), kNone, random);
  test<T>(make_graph(5, 0, degrees, random), how(2, 4, 0), kNone, random);
  test<T>(make_graph(1, 1, {1}, random), how(2, 4, 0), kNone, random);
  test<T>(make_graph(300, 200, {0}, random), how(2, 4, 0.4), kNone, random);  // No entries at all.
  test<T>(g, how(2, 0, 0), kNone, random);

  const int64_t before = on_host::launches;
  test<T>(make_graph(0, 0, degrees, random), how(2, 4, 0), kNone, random);
  test<T>(make_graph(0, 0, degrees, random), how(2, 0, 0), kNone, random);
  test<T>(g, how(0, 4, 0), kNone, random);
  CHECK(on_host::launches == before);
}

// The running maximum rises and falls by more than exp can take.
void test_large_scores() {
  std::mt19937 random(3);
  const Graph g = make_graph(4, 50, {300, 5, 70, 1}, random);
  const gas::Attention h = how(2, 4, 0);
  const auto source = numbers<float>(50 * 8, 0, random), target = numbers<float>(4 * 8, 0, random);
  auto att = numbers<float>(8, 0, random);
  for (int64_t i = 0; i < att.n; ++i) att[i] *= 1e4f;
  const auto exact_source = exact(source), exact_target = exact(target), exact_att = exact(att);
  Results<float> found(g, h);
  Results<double> wanted(g, h);
  Scratch scratch;
  gas::cuda::attention_v2<float>(g.forward(), {h, source.data(), target.data(), att.data()},
                                 found.out.data(), found.maximum.data(), found.total.data(),
                                 scratch.stream());
  gas::attention_v2<double>(g.forward(),
                            {h, exact_source.data(), exact_target.data(), exact_att.data()},
                            wanted.out.data(), wanted.maximum.data(), wanted.total.data(), 1);
  for (int64_t i = 0; i < found.out.n; ++i) CHECK(std::abs(found.out[i] - wanted.out[i]) < 5e-3);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  test_all<float>(random);
  test_all<double>(random);
  test_all<gas::bfloat16>(random);
  test_large_scores();
}
