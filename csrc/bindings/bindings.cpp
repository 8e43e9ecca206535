// The module gas._C. Holds no logic.
#include "bindings/define.h"
#include "common/matrix.h"

PYBIND11_MODULE(_C, m) {
  m.attr("INTERFACE") = GAS_INTERFACE;
#ifdef GAS_WITH_CUDA
  m.attr("WITH_CUDA") = true;
#else
  m.attr("WITH_CUDA") = false;
#endif
  define_struct<gas::Sparse, int64_t, int64_t, const int32_t*, const int32_t*, const int32_t*,
                const int32_t*>(m, "Sparse");
  define_struct<gas::cuda::Stream, uintptr_t, std::function<uintptr_t(int64_t)>>(m, "Stream");
  bind_graph(m);
  bind_transfer(m);
  bind_operators(m);
  bind_augment(m);
}
