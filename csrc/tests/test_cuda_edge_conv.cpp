// The CUDA kernels of csrc/operators/edge_conv.cu, run on the CPU, against the
// functions for the CPU.
#include "operators/edge_conv.cu"

#include "cuda_data.h"

namespace {

using gas::Activation;

// The table whose rows are not aligned to vectors: one of kTables, or none.
constexpr int kTables = 6, kNone = -1;

template <typename T>
struct Results {
  Table<T> out, slope, back;

  Results(const Graph& g, int64_t width, int odd = kNone)
      : out(g.num_rows * width, odd == 3),
        slope(g.num_rows * width, odd == 4),
        back(g.num_cols * width, odd == 5) {}
  bool operator==(const Results& other) const {
    return out == other.out && slope == other.slope && back == other.back;
  }
};

template <typename T>
void test(const Graph& g, const gas::EdgeConv& how, int odd, std::mt19937& random) {
  const auto target = numbers<T>(g.num_rows * how.width, odd == 0, random);
  const auto source = numbers<T>(g.num_cols * how.width, odd == 1, random);
  const auto grad = numbers<T>(g.num_rows * how.width, odd == 2, random);
  const gas::Sparse m = g.forward(), t = g.backward();
  const auto found = in_both_orders([&](const gas::cuda::Stream& stream) {
    Results<T> r(g, how.width, odd);
    gas::cuda::edge_conv(m, how, target.data(), source.data(), r.out.data(), r.slope.data(),
                         stream);
    gas::cuda::edge_conv_backward(t, how, target.data(), source.data(), grad.data(), r.back.data(),
                                  stream);
    return r;
  });

  const auto exact_target = exact(target), exact_source = exact(source), exact_grad = exact(grad);
  Results<double> wanted(g, how.width);
  gas::edge_conv(m, how, exact_target.data(), exact_source.data(), wanted.out.data(),
                 wanted.slope.data(), 1);
  gas::edge_conv_backward(t, how, exact_target.data(), exact_source.data(), exact_grad.data(),
                          wanted.back.data(), 1);
  check_near(found.out, wanted.out);
  check_near(found.slope, wanted.slope);
  check_near(found.back, wanted.back);

  Scratch scratch;  // Without a gradient, nothing but the slopes is left out.
  Table<T> alone(found.out.n, odd == 3);
  gas::cuda::edge_conv<T>(m, how, target.data(), source.data(), alone.data(), nullptr,
                          scratch.stream());
  CHECK(alone == found.out);
}

template <typename T>
void test_all(std::mt19937& random) {
  const std::vector<int64_t> degrees{0, 2, 150, 31, 1, 0, 32, 33, 0, 7, 64, 3};
  const Graph g = make_graph(25, 33, degrees, random);
  for (const auto f : {Activation::kRelu, Activation::kLeakyRelu, Activation::kElu,
                       Activation::kSigmoid, Activation::kTanh}) {
    for (const int64_t width : {1, 3, 8, 33, 256}) {
      test<T>(g, {f, 0.3, width, width % 2 == 0}, kNone, random);
    }
    test<T>(g, {f, 1.5, 16, false}, kNone, random);
  }
  const auto tanh = [](int64_t width) { return gas::EdgeConv{Activation::kTanh, 0, width, true}; };
  for (int odd = 0; odd < kTables; ++odd) test<T>(g, tanh(16), odd, random);
  for (const int64_t width : {2, 64, 130}) test<T>(g, tanh(width), kNone, random);
  test<T>(make_graph(3, 5, {9000, 0, 40}, random), tanh(1), kNone, random);
  test<T>(make_graph(3, 5, {2500, 0, 40}, random), tanh(16), kNone, random);
  test<T>(make_graph(2, 900, {40, 3}, random), tanh(1024), kNone, random);
  test<T>(make_graph(5, 0, degrees, random), tanh(8), kNone, random);
  test<T>(make_graph(1, 1, {1}, random), tanh(8), kNone, random);
  test<T>(make_graph(2000, 1000, {0}, random), tanh(8), kNone, random);  // No entries at all.

  const int64_t before = on_host::launches;
  test<T>(make_graph(0, 0, degrees, random), tanh(8), kNone, random);
  test<T>(g, tanh(0), kNone, random);
  CHECK(on_host::launches == before);
}

void test_nan_stays() {
  const std::vector<float> target{0.5f}, source{std::nanf("")};
  const std::vector<int32_t> col{0}, rowptr{0, 1};
  gas::Sparse m{1, int64_t(col.size()), rowptr.data(), col.data(), nullptr};
  const auto start = starts_of(m);
  m.start = start.data();
  Scratch scratch;
  for (const auto f : {Activation::kRelu, Activation::kLeakyRelu, Activation::kElu,
                       Activation::kSigmoid, Activation::kTanh}) {
    float out = 0;
    gas::cuda::edge_conv<float>(m, {f, 0.3, 1, false}, target.data(), source.data(), &out, nullptr,
                                scratch.stream());
    CHECK(std::isnan(out));
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  test_all<float>(random);
  test_all<double>(random);
  test_all<gas::bfloat16>(random);
  test_nan_stays();
}
