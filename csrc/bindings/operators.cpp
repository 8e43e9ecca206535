// Every operator, for every type: on the CPU and, built with CUDA, on devices.
#include "bindings/define.h"
#include "common/simd.h"
#include "operators/attention.h"
#include "operators/attention_v2.h"
#include "operators/dropout.h"
#include "operators/edge_conv.h"
#include "operators/extreme.h"
#include "operators/mixture.h"
#include "operators/multiply.h"

template <typename T>
struct Argument<gas::Rows<T>> {
  using Type = std::tuple<uintptr_t, int64_t, uintptr_t, uintptr_t, int64_t>;
  static gas::Rows<T> take(const Type& rows) {
    const auto [own, num_own, other, place, num_other] = rows;
    return {reinterpret_cast<const T*>(own), num_own, reinterpret_cast<const T*>(other),
            reinterpret_cast<const int64_t*>(place), num_other};
  }
};

template <>
struct Argument<gas::Extreme> {
  using Type = bool;
  static gas::Extreme take(bool max) { return max ? gas::Extreme::kMax : gas::Extreme::kMin; }
};

template <>
struct Argument<gas::Codec> {
  using Type = int;
  static gas::Codec take(int codec) { return static_cast<gas::Codec>(codec); }
};

template <typename T>
struct Argument<gas::AttentionState<T>> : Addresses<gas::AttentionState<T>, 4> {};

template <typename A>
struct Argument<gas::MixtureGrad<A>> : Addresses<gas::MixtureGrad<A>, 3> {};

namespace {

template <typename T>
void bind_type(py::module_& m, const std::string& type) {
  using A = typename gas::Sum<T>::type;
  define_struct<gas::AttentionV2<T>, const gas::Attention&, const T*, const T*, const A*>(
      m, "AttentionV2_" + type);
  GAS_DEFINE(m, "multiply_" + type, multiply<T>);
  GAS_DEFINE(m, "dot_rows_" + type, dot_rows<T>);
  GAS_DEFINE(m, "extreme_" + type, extreme<T>);
  GAS_DEFINE(m, "extreme_backward_" + type, extreme_backward<T>);
  GAS_DEFINE(m, "attention_" + type, attention<T>);
  GAS_DEFINE(m, "attention_backward_" + type, attention_backward<T>);
  GAS_DEFINE(m, "attention_v2_" + type, attention_v2<T>);
  GAS_DEFINE(m, "attention_v2_backward_" + type, attention_v2_backward<T>);
  GAS_DEFINE(m, "edge_conv_" + type, edge_conv<T>);
  GAS_DEFINE(m, "edge_conv_backward_" + type, edge_conv_backward<T>);
  GAS_DEFINE(m, "mixture_spread_" + type, mixture_spread<T>);
  GAS_DEFINE(m, "mixture_collapse_" + type, mixture_collapse<T>);
  GAS_DEFINE(m, "mixture_backward_" + type, mixture_backward<T>);
}

template <typename A>
void bind_mixture(py::module_& m, const std::string& type) {
  define_struct<gas::Mixture<A>, int64_t, int64_t, const A*, const A*, const A*>(m,
                                                                                 "Mixture_" + type);
}

}  // namespace

void bind_operators(py::module_& m) {
  using gas::Activation;
  define_struct<gas::Attention, int64_t, int64_t, double, uint64_t, double, uint64_t>(m,
                                                                                      "Attention");
  py::enum_<Activation>(m, "Activation")
      .value("RELU", Activation::kRelu)
      .value("LEAKY_RELU", Activation::kLeakyRelu)
      .value("ELU", Activation::kElu)
      .value("SIGMOID", Activation::kSigmoid)
      .value("TANH", Activation::kTanh);
  define_struct<gas::EdgeConv, Activation, double, int64_t, bool>(m, "EdgeConv");
  bind_mixture<float>(m, "float32");
  bind_mixture<double>(m, "float64");
  define(m, "dropout_float32", gas::dropout<float>, Release());
  define(m, "dropout_float64", gas::dropout<double>, Release());
  define(m, "relu_dropout_float32", gas::relu_dropout<float>, Release());
  define(m, "relu_dropout_float64", gas::relu_dropout<double>, Release());
  define(m, "relu_dropout_backward_float32", gas::relu_dropout_backward<float>, Release());
  define(m, "relu_dropout_backward_float64", gas::relu_dropout_backward<double>, Release());
  define(m, "norm_relu_dropout_float32", gas::norm_relu_dropout<float>, Release());
  define(m, "norm_relu_dropout_float64", gas::norm_relu_dropout<double>, Release());
  define(m, "norm_relu_dropout_sums_float32", gas::norm_relu_dropout_sums<float>, Release());
  define(m, "norm_relu_dropout_sums_float64", gas::norm_relu_dropout_sums<double>, Release());
  define(m, "norm_relu_dropout_backward_float32", gas::norm_relu_dropout_backward<float>,
         Release());
  define(m, "norm_relu_dropout_backward_float64", gas::norm_relu_dropout_backward<double>,
         Release());
  define(m, "gather_dropout_float32", gas::gather_dropout<float>, Release());
  define(m, "gather_dropout_float64", gas::gather_dropout<double>, Release());
  define(m, "gather_decode_dropout", gas::gather_decode_dropout, Release());
  bind_type<float>(m, "float32");
  bind_type<double>(m, "float64");
  bind_type<gas::bfloat16>(m, "bfloat16");
}
