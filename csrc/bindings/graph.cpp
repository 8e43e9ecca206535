#include "bindings/define.h"
#include "graph/csr.h"
#include "graph/keep.h"
#include "graph/relabel.h"
#include "graph/starts.h"
#include "graph/transpose.h"
#include "graph/undirected.h"

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_graph(py::module_& m) {
  define(m, "coo_to_csr_int32", gas::coo_to_csr<int32_t>, Release());
  define(m, "coo_to_csr_int64", gas::coo_to_csr<int64_t>, Release());
  define(m, "kept_entries", gas::kept_entries, Release());
  define(m, "transpose", gas::transpose, Release());
  define(m, "undirected", gas::undirected, Release());
#ifdef GAS_WITH_CUDA
  m.attr("STEP") = gas::cuda::kStep;
  define(m, "cuda_find_starts", gas::cuda::find_starts, Release());
#endif
  py::class_<gas::Relabeler>(m, "Relabeler")
      .def(py::init<int64_t, bool>())
      .def(
          "start",
          [](gas::Relabeler& self, uintptr_t rowptr, uintptr_t nodes, int64_t size) {
            return self.start(at<const int64_t>(rowptr), at<const int64_t>(nodes), size);
          },
          Release())
      .def(
          "cut",
          [](gas::Relabeler& self, uintptr_t rowptr, uintptr_t col, uintptr_t e_id,
             int64_t name_bytes, uintptr_t value, int64_t value_bytes, int64_t index_bytes,
             uintptr_t out_rowptr, uintptr_t out_col, uintptr_t out_eid, uintptr_t out_value,
             int threads) {
            const auto cut = [&](auto* name, auto* rowptr_to, auto* col_to) {
              return self.cut(at<const int64_t>(rowptr), at<const int32_t>(col), name,
                              at<const void>(value), value_bytes, rowptr_to, col_to,
                              at<int64_t>(out_eid), at<void>(out_value), threads);
            };
            const auto of_names = [&](auto* name) {
              if (index_bytes == 4) return cut(name, at<int32_t>(out_rowptr), at<int32_t>(out_col));
              return cut(name, at<int64_t>(out_rowptr), at<int64_t>(out_col));
            };
            return name_bytes == 4 ? of_names(at<const int32_t>(e_id))
                                   : of_names(at<const int64_t>(e_id));
          },
          Release())
      .def(
          "list", [](const gas::Relabeler& self, uintptr_t n_id) { self.list(at<int64_t>(n_id)); },
          Release());
}
