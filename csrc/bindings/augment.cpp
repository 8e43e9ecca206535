#include "augment/ego.h"
#include "augment/subset.h"
#include "bindings/define.h"

void bind_augment(py::module_& m) {
  GAS_DEFINE(m, "draw_subset", draw_subset);
  GAS_DEFINE(m, "ego_hop", ego_hop);
}
