// Binds the native functions; holds no logic. Tensors arrive as addresses and sizes, so this
// module links no torch and one build serves every version of it. gas/_native.py checks arguments
// and keeps tensors alive.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "csr.h"
#include "dropout.h"
#include "ego.h"
#include "engine.h"
#include "relabel.h"
#include "rows.h"
#include "sparse.h"
#include "subset.h"
#include "transfer.h"
#ifdef GAS_WITH_CUDA
#include "cuda/int8.h"
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

// Waits without the GIL, in slices, so that Ctrl-C is heard.
template <typename Wait>
void wait_in_slices(const Wait& wait) {
  while (true) {
    {
      py::gil_scoped_release release;
      if (wait(std::chrono::milliseconds(50))) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// Destroying an engine waits for its workers, which may need the GIL.
struct WithoutGil {
  void operator()(gas::Engine* engine) const {
    py::gil_scoped_release release;
    delete engine;
  }
};

void bind_transfer(py::module_& m) {
  using gas::By;
  using gas::Engine;
  using gas::Job;
  using gas::Table;

  py::enum_<By>(m, "By")
      .value("ANYONE", By::kAnyone)
      .value("WORKERS", By::kWorkers)
      .value("WAITERS", By::kWaiters);
  py::class_<Table>(m, "Table")
      .def(py::init([](uintptr_t rows, int64_t num_rows, int64_t row_bytes) {
        return Table{at<char>(rows), num_rows, row_bytes, false, gas::Codec{}, 0};
      }))
      .def(py::init([](uintptr_t rows, int64_t num_rows, int codec, int64_t width) {
        const auto by = static_cast<gas::Codec>(codec);
        return Table{at<char>(rows), num_rows, gas::stored_bytes(by, width), true, by, width};
      }));
  py::class_<Job>(m, "Job")
      .def(py::init([](std::function<void()> call) {
        Job job;
        job.run = [call = std::move(call)](int64_t, int64_t, int) { call(); };
        return job;
      }))
      .def("run", &gas::run, Release());
  m.def("pull", [](const Table& table, uintptr_t index, int64_t n, uintptr_t buffer) {
    return gas::pull(table, at<const int64_t>(index), n, at<char>(buffer));
  });
  m.def("push_rows", [](const Table& table, uintptr_t buffer, uintptr_t index, int64_t n) {
    return gas::push(table, at<const char>(buffer), at<const int64_t>(index), n);
  });
  m.def("push_ranges", [](const Table& table, uintptr_t buffer, const std::vector<int64_t>& offset,
                          const std::vector<int64_t>& count) {
    return gas::push(table, at<const char>(buffer),
                     gas::make_ranges(offset.data(), count.data(),
                                      static_cast<int64_t>(offset.size()), table.num_rows));
  });
  py::class_<Engine, std::unique_ptr<Engine, WithoutGil>>(m, "Engine")
      .def(py::init<int, int64_t>())
      .def("submit", &Engine::submit, Release())
      .def("wait",
           [](Engine& self, Engine::Ticket ticket, int threads) {
             wait_in_slices([&](auto most) { return self.wait(ticket, threads, most); });
           })
      .def("wait_lane",
           [](Engine& self, int64_t lane, int threads) {
             wait_in_slices([&](auto most) { return self.wait_lane(lane, threads, most); });
           })
      .def("done", &Engine::done, Release())
      .def(
          "cancel",
          [](Engine& self, const std::vector<Engine::Ticket>& tickets) {
            self.cancel(tickets.data(), static_cast<int64_t>(tickets.size()));
          },
          Release())
      .def("close", &Engine::close, Release());
}

template <typename T>
void bind_operators_of(py::module_& m, const std::string& type) {
  using A = typename gas::Sum<T>::type;
  using gas::Attention;
  using gas::Sparse;
  using State = gas::AttentionState<T>;
  const auto state = [](const std::vector<uintptr_t>& s) {
    return State{at<A>(s[0]), at<A>(s[1]), at<A>(s[2]), at<T>(s[3])};
  };
  m.def(("multiply_" + type).c_str(),
        [](const Sparse& matrix, uintptr_t weight, uintptr_t x, int64_t width, bool mean,
           uintptr_t out, int threads) {
          gas::multiply(matrix, at<const T>(weight), at<const T>(x), width, mean, at<T>(out),
                        threads);
        },
        Release());
  m.def(("extreme_" + type).c_str(),
        [](const Sparse& matrix, bool max, uintptr_t x, int64_t width, uintptr_t out,
           uintptr_t from, int threads) {
          const auto which = max ? gas::Extreme::kMax : gas::Extreme::kMin;
          gas::extreme(matrix, which, at<const T>(x), width, at<T>(out), at<int32_t>(from),
                       threads);
        },
        Release());
  m.def(("extreme_backward_" + type).c_str(),
        [](const Sparse& transposed, uintptr_t grad, uintptr_t from, int64_t width, uintptr_t out,
           int threads) {
          gas::extreme_backward(transposed, at<const T>(grad), at<const int32_t>(from), width,
                                at<T>(out), threads);
        },
        Release());
  m.def(("dot_rows_" + type).c_str(),
        [](const Sparse& matrix, uintptr_t a, uintptr_t b, int64_t width, uintptr_t out,
           int threads) {
          gas::dot_rows(matrix, at<const T>(a), at<const T>(b), width, at<T>(out), threads);
        },
        Release());
  m.def(("attention_" + type).c_str(),
        [state](const Sparse& matrix, const Attention& how, uintptr_t x, uintptr_t source,
                uintptr_t target, uintptr_t out, const std::vector<uintptr_t>& kept,
                int threads) {
          gas::attention(matrix, how, at<const T>(x), at<const A>(source), at<const A>(target),
                         at<T>(out), state(kept), threads);
        },
        Release());
  m.def(("attention_backward_" + type).c_str(),
        [state](const Sparse& transposed, int64_t num_rows, const Attention& how, uintptr_t x,
                uintptr_t source, uintptr_t target, uintptr_t out, uintptr_t grad,
                const std::vector<uintptr_t>& kept, uintptr_t packed, uintptr_t grad_x,
                uintptr_t grad_source, uintptr_t grad_target, int threads) {
          gas::attention_backward(transposed, num_rows, how, at<const T>(x), at<const A>(source),
                                  at<const A>(target), at<const T>(out), at<const T>(grad),
                                  state(kept), at<A>(packed), at<T>(grad_x), at<A>(grad_source),
                                  at<A>(grad_target), threads);
        },
        Release());
}

void bind_operators(py::module_& m) {
  using gas::Attention;
  using gas::Sparse;
  py::class_<Sparse>(m, "Sparse")
      .def(py::init([](int64_t num_rows, uintptr_t rowptr, uintptr_t col, uintptr_t entry) {
        return Sparse{num_rows, at<const int32_t>(rowptr), at<const int32_t>(col),
                      at<const int32_t>(entry)};
      }));
  py::class_<Attention>(m, "Attention")
      .def(py::init<int64_t, int64_t, double, uint64_t, double, uint64_t>());
  m.def(
      "transpose",
      [](const Sparse& matrix, int64_t num_cols, uintptr_t rowptr, uintptr_t col, uintptr_t entry,
         int threads) {
        gas::transpose(matrix, num_cols, at<int32_t>(rowptr), at<int32_t>(col), at<int32_t>(entry),
                       threads);
      },
      Release());
  m.def(
      "ego_hop",
      [](const Sparse& matrix, uintptr_t kept, uintptr_t loops, uintptr_t x, uintptr_t out,
         int threads) {
        gas::ego_hop(matrix, at<const uint8_t>(kept), at<const double>(loops),
                     at<const double>(x), at<double>(out), threads);
      },
      Release());
  bind_operators_of<float>(m, "float32");
  bind_operators_of<double>(m, "float64");
  bind_operators_of<gas::bfloat16>(m, "bfloat16");
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
      "coo_to_csr",
      [](uintptr_t row, uintptr_t col, int64_t num_edges, int64_t num_rows, uintptr_t rowptr,
         uintptr_t out_col, uintptr_t perm, int threads) {
        gas::coo_to_csr(at<const int64_t>(row), at<const int64_t>(col), num_edges, num_rows,
                        at<int64_t>(rowptr), at<int64_t>(out_col), at<int64_t>(perm), threads);
      },
      Release());
  m.def(
      "draw_subset",
      [](int64_t n, int64_t k, uint64_t seed, uintptr_t among, int64_t count, uintptr_t drawn,
         int threads) {
        gas::draw_subset(n, k, seed, at<const uint8_t>(among), count, at<uint8_t>(drawn), threads);
      },
      Release());

  bind_operators(m);
  bind_transfer(m);
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
  m.def("cuda_encode_int8", [](uintptr_t src, int64_t n, int64_t width, int64_t row_bytes,
                               uintptr_t rows, uintptr_t stream) {
    gas::cuda::encode_int8(at<const float>(src), n, width, row_bytes, at<char>(rows), stream);
  });
  m.def("cuda_decode_int8", [](uintptr_t rows, int64_t n, int64_t width, int64_t row_bytes,
                               uintptr_t dst, uintptr_t stream) {
    gas::cuda::decode_int8(at<const char>(rows), n, width, row_bytes, at<float>(dst), stream);
  });
#else
  m.attr("WITH_CUDA") = false;
#endif
}
