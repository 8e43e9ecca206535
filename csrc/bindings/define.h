// Binding of native functions. Tensors arrive as addresses and sizes, so the module links no
// torch and one build serves every version of it; Python checks arguments and keeps tensors alive.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>

#include "common/stream.h"

namespace py = pybind11;

// Arguments ------------------------------------------------------------------------------------

// Type in Python of a parameter of type P: the same, but addresses for pointers.
// Specialised for other structs that have no class of their own in Python.
template <typename P>
struct Argument {
  using Type = P;
  static P take(const Type& value) { return value; }
};

template <typename T>
struct Argument<const T&> : Argument<T> {};

template <typename T>
struct Argument<T*> {
  using Type = uintptr_t;
  static T* take(uintptr_t address) { return reinterpret_cast<T*>(address); }
};

// A struct of N pointers.
template <typename S, size_t N>
struct Addresses {
  using Type = std::array<uintptr_t, N>;
  static S take(const Type& at) { return take(at, std::make_index_sequence<N>()); }

 private:
  struct Anything {  // Converts to any pointer type of a member.
    uintptr_t address;
    template <typename T>
    operator T*() const {
      return reinterpret_cast<T*>(address);
    }
  };
  template <size_t... I>
  static S take(const Type& at, std::index_sequence<I...>) {
    return {Anything{at[I]}...};
  }
};

// Functions ------------------------------------------------------------------------------------

template <typename R, typename... Parameters, typename... Extra>
void define(py::module_& m, const std::string& name, R (*function)(Parameters...),
            const Extra&... extra) {
  m.def(
      name.c_str(),
      [function](typename Argument<Parameters>::Type... arguments) {
        return function(Argument<Parameters>::take(arguments)...);
      },
      extra...);
}

using Release = py::call_guard<py::gil_scoped_release>;

// Binds gas::function and, if the module is built with CUDA, gas::cuda::function under one name.
// The last argument decides: a number of threads, or a stream. Neither holds the GIL: a launch
// waits where too many are queued, and scratch from Python takes it for as long as that needs.
#ifdef GAS_WITH_CUDA
#define GAS_DEFINE(m, name, ...)                \
  define(m, name, gas::__VA_ARGS__, Release()); \
  define(m, name, gas::cuda::__VA_ARGS__, Release())
#else
#define GAS_DEFINE(m, name, ...) define(m, name, gas::__VA_ARGS__, Release())
#endif

// A struct, made of what it is initialised with.
template <typename S, typename... Parameters>
void define_struct(py::module_& m, const std::string& name) {
  py::class_<S>(m, name.c_str()).def(py::init([](typename Argument<Parameters>::Type... arguments) {
    return S{Argument<Parameters>::take(arguments)...};
  }));
}

// Subjects -------------------------------------------------------------------------------------

void bind_graph(py::module_& m);
void bind_transfer(py::module_& m);
void bind_operators(py::module_& m);
void bind_augment(py::module_& m);
