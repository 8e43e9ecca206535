#include "transfer/transfer.h"

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "bindings/define.h"
#include "transfer/codec.h"
#include "transfer/engine.h"
#include "transfer/pinned.h"
#include "transfer/rows.h"
#include "transfer/segments.h"

namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
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

}  // namespace

void bind_transfer(py::module_& m) {
  using gas::By;
  using gas::Engine;
  using gas::Job;
  using gas::Table;

  define(m, "gather_rows", gas::gather_rows, Release());
  define(m, "read_segments", gas::read_segments, Release());
  define(m, "write_segments_int32", gas::write_segments<int32_t>, Release());
  define(m, "write_segments_int64", gas::write_segments<int64_t>, Release());
#ifdef GAS_WITH_CUDA
  define(m, "cuda_gather_rows", gas::cuda::gather_rows, Release());
  define(m, "cuda_scatter_rows", gas::cuda::scatter_rows, Release());
  define(m, "cuda_encode_int8", gas::cuda::encode_int8, Release());
  define(m, "cuda_decode_int8", gas::cuda::decode_int8, Release());
  define(m, "cuda_pin", gas::cuda::pin, Release());
  define(m, "cuda_unpin", gas::cuda::unpin, Release());
#endif
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
  define(m, "pull", gas::pull);
  define(m, "push_rows",
         static_cast<Job (*)(const Table&, const char*, const int64_t*, int64_t)>(gas::push));
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
          "busy_ns", [](Engine& self) { return static_cast<int64_t>(self.busy().count()); },
          Release())
      .def(
          "cancel",
          [](Engine& self, const std::vector<Engine::Ticket>& tickets) {
            self.cancel(tickets.data(), static_cast<int64_t>(tickets.size()));
          },
          Release())
      .def("close", &Engine::close, Release());
}
