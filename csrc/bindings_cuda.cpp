// Binds the functions of csrc/cuda, as bindings.cpp does those of the CPU. They only launch
// kernels, so they keep the GIL. Operators take what those of the CPU take, after the number of
// entries; in the place of threads come a stream and a function that allocates scratch for it.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <functional>
#include <string>
#include <vector>

#include "bindings.h"
#include "cuda/attention.h"
#include "cuda/attention_v2.h"
#include "cuda/edge_conv.h"
#include "cuda/ego.h"
#include "cuda/int8.h"
#include "cuda/mixture.h"
#include "cuda/rows.h"
#include "cuda/sparse.h"
#include "cuda/subset.h"

namespace py = pybind11;

namespace {

using Allocate = std::function<uintptr_t(int64_t)>;

template <typename T>
void bind_operators_of(py::module_& m, const std::string& type) {
  using A = typename gas::Sum<T>::type;
  using gas::Attention;
  using gas::AttentionV2;
  using gas::EdgeConv;
  using gas::Mixture;
  using gas::Sparse;
  using State = gas::AttentionState<T>;
  const auto state = [](const std::vector<uintptr_t>& s) {
    return State{at<A>(s[0]), at<A>(s[1]), at<A>(s[2]), at<T>(s[3])};
  };
  m.def(("cuda_multiply_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, uintptr_t weight, const RowsAt& x,
           int64_t width, bool mean, uintptr_t out, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::multiply(matrix, entries, at<const T>(weight), rows_at<T>(x), width, mean,
                              at<T>(out), {stream, allocate});
        });
  m.def(("cuda_extreme_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, bool max, uintptr_t x, int64_t width,
           uintptr_t out, uintptr_t from, uintptr_t stream, const Allocate& allocate) {
          const auto which = max ? gas::Extreme::kMax : gas::Extreme::kMin;
          gas::cuda::extreme(matrix, entries, which, at<const T>(x), width, at<T>(out),
                             at<int32_t>(from), {stream, allocate});
        });
  m.def(("cuda_extreme_backward_" + type).c_str(),
        [](int64_t entries, const Sparse& transposed, uintptr_t grad, uintptr_t from,
           int64_t width, uintptr_t out, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::extreme_backward(transposed, entries, at<const T>(grad),
                                      at<const int32_t>(from), width, at<T>(out),
                                      {stream, allocate});
        });
  m.def(("cuda_dot_rows_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, uintptr_t a, uintptr_t b, int64_t width,
           uintptr_t out, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::dot_rows(matrix, entries, at<const T>(a), at<const T>(b), width, at<T>(out),
                              {stream, allocate});
        });
  m.def(("cuda_attention_" + type).c_str(),
        [state](int64_t entries, const Sparse& matrix, const Attention& how, uintptr_t x,
                uintptr_t source, uintptr_t target, uintptr_t out,
                const std::vector<uintptr_t>& kept, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::attention(matrix, entries, how, at<const T>(x), at<const A>(source),
                               at<const A>(target), at<T>(out), state(kept), {stream, allocate});
        });
  m.def(("cuda_attention_backward_" + type).c_str(),
        [state](int64_t entries, const Sparse& transposed, int64_t num_rows, const Attention& how,
                uintptr_t x, uintptr_t source, uintptr_t target, uintptr_t out, uintptr_t grad,
                const std::vector<uintptr_t>& kept, uintptr_t packed, uintptr_t grad_x,
                uintptr_t grad_source, uintptr_t grad_target, uintptr_t stream,
                const Allocate& allocate) {
          gas::cuda::attention_backward(
              transposed, entries, num_rows, how, at<const T>(x), at<const A>(source),
              at<const A>(target), at<const T>(out), at<const T>(grad), state(kept),
              at<A>(packed), at<T>(grad_x), at<A>(grad_source), at<A>(grad_target),
              {stream, allocate});
        });
  m.def(("cuda_attention_v2_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, const AttentionV2<T>& layer, uintptr_t out,
           uintptr_t maximum, uintptr_t total, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::attention_v2(matrix, entries, layer, at<T>(out), at<A>(maximum),
                                  at<A>(total), {stream, allocate});
        });
  m.def(("cuda_attention_v2_backward_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, const Sparse& transposed,
           const AttentionV2<T>& layer, uintptr_t out, uintptr_t grad, uintptr_t maximum,
           uintptr_t total, uintptr_t packed, uintptr_t grad_source, uintptr_t grad_target,
           uintptr_t grad_att, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::attention_v2_backward(
              matrix, transposed, entries, layer, at<const T>(out), at<const T>(grad),
              at<const A>(maximum), at<const A>(total), at<A>(packed), at<T>(grad_source),
              at<T>(grad_target), at<A>(grad_att), {stream, allocate});
        });
  m.def(("cuda_edge_conv_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, const EdgeConv& how, uintptr_t target,
           uintptr_t source, uintptr_t out, uintptr_t slope, uintptr_t stream,
           const Allocate& allocate) {
          gas::cuda::edge_conv(matrix, entries, how, at<const T>(target), at<const T>(source),
                               at<T>(out), at<T>(slope), {stream, allocate});
        });
  m.def(("cuda_edge_conv_backward_" + type).c_str(),
        [](int64_t entries, const Sparse& transposed, const EdgeConv& how, uintptr_t target,
           uintptr_t source, uintptr_t grad, uintptr_t out, uintptr_t stream,
           const Allocate& allocate) {
          gas::cuda::edge_conv_backward(transposed, entries, how, at<const T>(target),
                                        at<const T>(source), at<const T>(grad), at<T>(out),
                                        {stream, allocate});
        });
  m.def(("cuda_mixture_spread_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, const Mixture<A>& mixture, uintptr_t x,
           int64_t width, bool mean, uintptr_t out, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::mixture_spread(matrix, entries, mixture, at<const T>(x), width, mean,
                                    at<T>(out), {stream, allocate});
        });
  m.def(("cuda_mixture_collapse_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, const Mixture<A>& mixture, uintptr_t x,
           int64_t width, bool mean, uintptr_t out, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::mixture_collapse(matrix, entries, mixture, at<const T>(x), width, mean,
                                      at<T>(out), {stream, allocate});
        });
  m.def(("cuda_mixture_backward_" + type).c_str(),
        [](int64_t entries, const Sparse& matrix, const Mixture<A>& mixture, uintptr_t own,
           uintptr_t other, int64_t width, uintptr_t out, uintptr_t grad_pseudo,
           uintptr_t grad_mu, uintptr_t grad_sigma, uintptr_t stream, const Allocate& allocate) {
          gas::cuda::mixture_backward(matrix, entries, mixture, at<const T>(own),
                                      at<const T>(other), width, at<T>(out),
                                      {at<A>(grad_pseudo), at<A>(grad_mu), at<A>(grad_sigma)},
                                      {stream, allocate});
        });
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("cuda_gather_rows", [](uintptr_t src, int64_t row_bytes, uintptr_t index, int64_t n,
                               uintptr_t dst, uintptr_t stream) {
    gas::cuda::gather_rows(at<const char>(src), row_bytes, at<const int64_t>(index), n,
                           at<char>(dst), stream);
  });
  m.def("cuda_scatter_rows", [](uintptr_t src, int64_t row_bytes, uintptr_t index, int64_t n,
                                uintptr_t dst, uintptr_t stream) {
    gas::cuda::scatter_rows(at<const char>(src), row_bytes, at<const int64_t>(index), n,
                            at<char>(dst), stream);
  });
  m.def("cuda_encode_int8", [](uintptr_t src, int64_t n, int64_t width, int64_t row_bytes,
                               uintptr_t rows, uintptr_t stream) {
    gas::cuda::encode_int8(at<const float>(src), n, width, row_bytes, at<char>(rows), stream);
  });
  m.def("cuda_decode_int8", [](uintptr_t rows, int64_t n, int64_t width, int64_t row_bytes,
                               uintptr_t dst, uintptr_t stream) {
    gas::cuda::decode_int8(at<const char>(rows), n, width, row_bytes, at<float>(dst), stream);
  });
  m.def("cuda_ego_hop", [](int64_t entries, const gas::Sparse& matrix, uintptr_t kept,
                           uintptr_t loops, uintptr_t x, uintptr_t out, uintptr_t stream,
                           const Allocate& allocate) {
    gas::cuda::ego_hop(matrix, entries, at<const uint8_t>(kept), at<const double>(loops),
                       at<const double>(x), at<double>(out), {stream, allocate});
  });
  m.def("cuda_draw_subset", [](int64_t n, uintptr_t k, uint64_t seed, uintptr_t among,
                               uintptr_t drawn, uintptr_t stream, const Allocate& allocate) {
    gas::cuda::draw_subset(n, at<const int64_t>(k), seed, at<const uint8_t>(among),
                           at<uint8_t>(drawn), {stream, allocate});
  });
  bind_operators_of<float>(m, "float32");
  bind_operators_of<double>(m, "float64");
  bind_operators_of<gas::bfloat16>(m, "bfloat16");
}
