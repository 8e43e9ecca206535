// Binds the native functions; holds no logic. Tensors arrive as addresses and sizes, so this
// module links no torch and one build serves every version of it. gas/_native.py checks arguments
// and keeps tensors alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csr.h"
#include "dropout.h"
#include "relabel.h"
#include "rows.h"
#ifdef GAS_WITH_CUDA
#include "cuda/rows.h"
#endif

namespace py = pybind11;

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Release = py::call_guard<py::gil_scoped_release>;

template <typename T>
void bind_dropout(py::module_& m, const char* name) {
  m.def(
      name,
      [](uintptr_t x, int64_t n, uint64_t threshold, T scale, uint64_t seed, uintptr_t out,
         int threads) {
        gas::dropout(at<const T>(x), n, threshold, scale, seed, at<T>(out), threads);
      },
      Release());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("INTERFACE") = GAS_INTERFACE;

  m.def(
      "gather_rows",
      [](uintptr_t src, int64_t src_rows, int64_t row_bytes, uintptr_t index, int64_t n,
         uintptr_t dst, int threads) {
        gas::gather_rows(at<const char>(src), src_rows, row_bytes, at<const int64_t>(index), n,
                         at<char>(dst), threads);
      },
      Release());
  m.def(
      "scatter_rows",
      [](uintptr_t src, int64_t row_bytes, uintptr_t index, int64_t n, uintptr_t dst,
         int64_t dst_rows, int threads) {
        gas::scatter_rows(at<const char>(src), row_bytes, at<const int64_t>(index), n,
                          at<char>(dst), dst_rows, threads);
      },
      Release());
  m.def(
      "coo_to_csr",
      [](uintptr_t row, uintptr_t col, int64_t num_edges, int64_t num_rows, uintptr_t rowptr,
         uintptr_t out_col, uintptr_t perm, int threads) {
        gas::coo_to_csr(at<const int64_t>(row), at<const int64_t>(col), num_edges, num_rows,
                        at<int64_t>(rowptr), at<int64_t>(out_col), at<int64_t>(perm), threads);
      },
      Release());

  bind_dropout<float>(m, "dropout_float32");
  bind_dropout<double>(m, "dropout_float64");

  py::class_<gas::Relabeler>(m, "Relabeler")
      .def(py::init<int64_t, bool>())
      .def(
          "count",
          [](gas::Relabeler& self, uintptr_t rowptr, uintptr_t col, uintptr_t nodes, int64_t size,
             int threads) {
            return self.count(at<const int64_t>(rowptr), at<const int64_t>(col),
                              at<const int64_t>(nodes), size, threads);
          },
          Release())
      .def(
          "write",
          [](gas::Relabeler& self, uintptr_t rowptr, uintptr_t col, uintptr_t nodes, int64_t size,
             uintptr_t e_id, uintptr_t value, int64_t value_bytes, uintptr_t out_rowptr,
             uintptr_t out_col, uintptr_t out_eid, uintptr_t out_value, uintptr_t halo,
             int threads) {
            self.write(at<const int64_t>(rowptr), at<const int64_t>(col),
                       at<const int64_t>(nodes), size, at<const int64_t>(e_id),
                       at<const void>(value), value_bytes, at<int64_t>(out_rowptr),
                       at<int64_t>(out_col), at<int64_t>(out_eid), at<void>(out_value),
                       at<int64_t>(halo), threads);
          },
          Release());

#ifdef GAS_WITH_CUDA
  m.attr("WITH_CUDA") = true;
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
#else
  m.attr("WITH_CUDA") = false;
#endif
}
