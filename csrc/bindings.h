// What the files that bind native functions share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// In bindings_cuda.cpp.
void bind_cuda(pybind11::module_& m);
