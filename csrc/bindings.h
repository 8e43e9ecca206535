// What the files that bind native functions share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>

#include "sparse.h"

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The members of gas::Rows, in order.
using RowsAt = std::tuple<uintptr_t, int64_t, uintptr_t, uintptr_t, int64_t>;

template <typename T>
gas::Rows<T> rows_at(const RowsAt& rows) {
  const auto [own, num_own, other, place, num_other] = rows;
  return {at<const T>(own), num_own, at<const T>(other), at<const int64_t>(place), num_other};
}

// In bindings_cuda.cpp.
void bind_cuda(pybind11::module_& m);
