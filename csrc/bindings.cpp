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
#include "attention_v2.h"
#include "bindings.h"
#include "csr.h"
#include "dropout.h"
#include "edge_conv.h"
#include "ego.h"
#include "engine.h"
#include "keep.h"
#include "mixture.h"
#include "relabel.h"
#include "rows.h"
#include "sparse.h"
#include "subset.h"
#include "transfer.h"

namespace py = pybind11;

namespace {

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
  using gas::AttentionV2;
  using gas::EdgeConv;
  using gas::Mixture;
  using gas::Sparse;
  using State = gas::AttentionState<T>;
  const auto state = [](const std::vector<uintptr_t>& s) {
    return State{at<A>(s[0]), at<A>(s[1]), at<A>(s[2]), at<T>(s[3])};
  };
  m.def(("multiply_" + type).c_str(),
        [](const Sparse& matrix, uintptr_t weight, const RowsAt& x, int64_t width, bool mean,
           uintptr_t out, int threads) {
          gas::multiply(matrix, at<const T>(weight), rows_at<T>(x), width, mean, at<T>(out),
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
  py::class_<AttentionV2<T>>(m, ("AttentionV2_" + type).c_str())
      .def(py::init([](const Attention& how, uintptr_t source, uintptr_t target, uintptr_t att) {
        return AttentionV2<T>{how, at<const T>(source), at<const T>(target), at<const A>(att)};
      }));
  m.def(("attention_v2_" + type).c_str(),
        [](const Sparse& matrix, const AttentionV2<T>& layer, uintptr_t out, uintptr_t maximum,
           uintptr_t total, int threads) {
          gas::attention_v2(matrix, layer, at<T>(out), at<A>(maximum), at<A>(total), threads);
        },
        Release());
  m.def(("attention_v2_backward_" + type).c_str(),
        [](const Sparse& matrix, const Sparse& transposed, const AttentionV2<T>& layer,
           uintptr_t out, uintptr_t grad, uintptr_t maximum, uintptr_t total, uintptr_t packed,
           uintptr_t grad_source, uintptr_t grad_target, uintptr_t grad_att, int threads) {
          gas::attention_v2_backward(matrix, transposed, layer, at<const T>(out),
                                     at<const T>(grad), at<const A>(maximum), at<const A>(total),
                                     at<A>(packed), at<T>(grad_source), at<T>(grad_target),
                                     at<A>(grad_att), threads);
        },
        Release());
  m.def(("edge_conv_" + type).c_str(),
        [](const Sparse& matrix, const EdgeConv& how, uintptr_t target, uintptr_t source,
           uintptr_t out, uintptr_t slope, int threads) {
          gas::edge_conv(matrix, how, at<const T>(target), at<const T>(source), at<T>(out),
                         at<T>(slope), threads);
        },
        Release());
  m.def(("edge_conv_backward_" + type).c_str(),
        [](const Sparse& transposed, const EdgeConv& how, uintptr_t target, uintptr_t source,
           uintptr_t grad, uintptr_t out, int threads) {
          gas::edge_conv_backward(transposed, how, at<const T>(target), at<const T>(source),
                                  at<const T>(grad), at<T>(out), threads);
        },
        Release());
  m.def(("mixture_spread_" + type).c_str(),
        [](const Sparse& matrix, const Mixture<A>& mixture, uintptr_t x, int64_t width, bool mean,
           uintptr_t out, int threads) {
          gas::mixture_spread(matrix, mixture, at<const T>(x), width, mean, at<T>(out), threads);
        },
        Release());
  m.def(("mixture_collapse_" + type).c_str(),
        [](const Sparse& matrix, const Mixture<A>& mixture, uintptr_t x, int64_t width, bool mean,
           uintptr_t out, int threads) {
          gas::mixture_collapse(matrix, mixture, at<const T>(x), width, mean, at<T>(out), threads);
        },
        Release());
  m.def(("mixture_backward_" + type).c_str(),
        [](const Sparse& matrix, const Mixture<A>& mixture, uintptr_t own, uintptr_t other,
           int64_t width, uintptr_t out, uintptr_t grad_pseudo, uintptr_t grad_mu,
           uintptr_t grad_sigma, int threads) {
          const gas::MixtureGrad<A> grad{at<A>(grad_pseudo), at<A>(grad_mu), at<A>(grad_sigma)};
          gas::mixture_backward(matrix, mixture, at<const T>(own), at<const T>(other), width,
                                at<T>(out), grad, threads);
        },
        Release());
}

template <typename A>
void bind_mixture(py::module_& m, const char* name) {
  py::class_<gas::Mixture<A>>(m, name).def(
      py::init([](int64_t kernels, int64_t dims, uintptr_t pseudo, uintptr_t mu, uintptr_t sigma) {
        return gas::Mixture<A>{kernels, dims, at<const A>(pseudo), at<const A>(mu),
                               at<const A>(sigma)};
      }));
}

void bind_operators(py::module_& m) {
  using gas::Activation;
  using gas::Attention;
  using gas::EdgeConv;
  using gas::Sparse;
  py::class_<Sparse>(m, "Sparse")
      .def(py::init([](int64_t num_rows, uintptr_t rowptr, uintptr_t col, uintptr_t entry) {
        return Sparse{num_rows, at<const int32_t>(rowptr), at<const int32_t>(col),
                      at<const int32_t>(entry)};
      }));
  py::class_<Attention>(m, "Attention")
      .def(py::init<int64_t, int64_t, double, uint64_t, double, uint64_t>());
  py::enum_<Activation>(m, "Activation")
      .value("RELU", Activation::kRelu)
      .value("LEAKY_RELU", Activation::kLeakyRelu)
      .value("ELU", Activation::kElu)
      .value("SIGMOID", Activation::kSigmoid)
      .value("TANH", Activation::kTanh);
  py::class_<EdgeConv>(m, "EdgeConv")
      .def(py::init([](Activation activation, double parameter, int64_t width, bool mean) {
        return EdgeConv{activation, parameter, width, mean};
      }));
  bind_mixture<float>(m, "Mixture_float32");
  bind_mixture<double>(m, "Mixture_float64");
  m.def(
      "transpose",
      [](const Sparse& matrix, int64_t num_cols, int64_t kept, uintptr_t rowptr, uintptr_t col,
         uintptr_t entry, int threads) {
        gas::transpose(matrix, num_cols, kept, at<int32_t>(rowptr), at<int32_t>(col),
                       at<int32_t>(entry), threads);
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
  m.def(
      "kept_entries",
      [](uintptr_t rowptr, int64_t num_rows, uintptr_t id, uintptr_t kept, uintptr_t out_rowptr,
         uintptr_t out_entry, int threads) {
        return gas::kept_entries(at<const int32_t>(rowptr), num_rows, at<const int64_t>(id),
                                 at<const uint8_t>(kept), at<int32_t>(out_rowptr),
                                 at<int64_t>(out_entry), threads);
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
             uintptr_t e_id, uintptr_t value, int64_t value_bytes, int64_t index_bytes,
             uintptr_t out_rowptr, uintptr_t out_col, uintptr_t out_eid, uintptr_t out_value,
             uintptr_t halo, int threads) {
            const auto write = [&](auto* rowptr_to, auto* col_to) {
              self.write(at<const int64_t>(rowptr), at<const int64_t>(col),
                         at<const int64_t>(nodes), size, at<const int64_t>(e_id),
                         at<const void>(value), value_bytes, rowptr_to, col_to,
                         at<int64_t>(out_eid), at<void>(out_value), at<int64_t>(halo), threads);
            };
            if (index_bytes == 4) return write(at<int32_t>(out_rowptr), at<int32_t>(out_col));
            write(at<int64_t>(out_rowptr), at<int64_t>(out_col));
          },
          Release());

#ifdef GAS_WITH_CUDA
  m.attr("WITH_CUDA") = true;
  bind_cuda(m);
#else
  m.attr("WITH_CUDA") = false;
#endif
}
