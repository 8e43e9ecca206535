"""Time of training by phase: batches, products, waits for rows, dense layers, Python."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler import profile as profile_cpu
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as profile_devices

from gas import native
from gas.history import History, TransferEngine
from gas.native import Relabeler, human
from gas.scalable import HeteroModel, ScalableGNN

_ACTIVE = threading.Lock()  # PyTorch's profiler ends the process if two are active.
PREFIX = "gas: "
# Phases of the native functions, by the beginnings of their names.
NATIVE = {
    "transpose": "batches",
    "draw_subset": "batches",
    "gather_rows": "features",
    "gather_dropout": "features",
    "gather_decode": "features",
    "dropout": "dropout",
    "relu_dropout": "dropout",
    "multiply": "products",
    "attention": "attention",
}
# Phases of the operators of PyTorch; others are elementwise.
TORCH = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"), "dense layers"),
    **dict.fromkeys(("aten::_fused_adam_", "aten::_foreach_add_"), "optimizer"),
}
# Functions that copy rows: the positions of the rows' width and of their number, and the bytes of a
# unit of the width.
COPIES = {
    "gather_rows": (2, 4, 1),
    "gather_dropout_float32": (2, 4, 4),
    "gather_dropout_float64": (2, 4, 8),
    "gather_decode_dropout": (3, 5, 4),
}


class Profile:
    """Time of a block of code by phase; filled when the block ends.

    * ``seconds``, ``calls``: of each phase, without the phases inside of it; ``"Python"`` is the
      rest of the time, of Python, dispatch and autograd.
    * ``wall``: the seconds of the whole block.
    * ``bytes``: of the phases that copy rows. ``"pushes"`` and ``"waits for rows"`` have the stored
      bytes of histories' rows that were written and read, if a model was given; ``"features"`` has
      the bytes of the copies. Rows that products read in place aren't counted.
    * ``moved_bytes``: the bytes of histories' rows that were read and written; ``None`` if no model
      was given.
    * ``busy``: the seconds for which the model's transfers ran, in workers or in the thread that
      waited for them. ``None`` if no model was given, on a GPU, whose streams move rows beside the
      computation without being timed, and without the native extension.
    * ``waited``: the seconds for which this thread waited for them, those of pushes included, or
      moved rows itself; ``None`` where ``busy`` is.
    * ``overlap``: the share of ``busy`` that was hidden behind the computation,
      ``1 - waited / busy``, at least 0; ``None`` if nothing was moved, or ``busy`` isn't known.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.wall = 0.0
        self.bytes: dict[str, int] = {}
        self.moved_bytes: int | None = None
        self.busy: float | None = None
        self.waited: float | None = None
        self.overlap: float | None = None
        self._profiler: Any = None

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write a trace for ``chrome://tracing`` or Perfetto; it can be written once.

        Args:
            path: The file, such as ``trace.json``.
        """
        self._profiler.export_chrome_trace(str(path))

    def summary(self) -> dict[str, Any]:
        """Return what was measured, for JSON."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def _fill(self) -> None:
        """Add up the profiler's events."""
        for event in self._profiler.key_averages():
            phase = _phase_of(event.key)
            if phase is None:
                continue
            spent = event.self_cpu_time_total + getattr(event, "self_device_time_total", 0)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent / 1e6
            self.calls[phase] = self.calls.get(phase, 0) + event.count
        self.seconds["Python"] = max(0.0, self.wall - sum(self.seconds.values()))
        self.calls["Python"] = 0

    def __str__(self) -> str:
        order = sorted(self.seconds, key=lambda phase: -self.seconds[phase])
        rows = [("phase", "time", "share", "calls", "bytes")]
        for phase in order:
            seconds, calls = self.seconds[phase], self.calls[phase]
            share = seconds / self.wall if self.wall else 0.0
            size = human(self.bytes[phase]) if phase in self.bytes else "-"
            time_of = f"{1000 * seconds:.1f} ms"
            rows.append((phase, time_of, f"{share:.1%}", f"{calls or '-'}", size))
        rows.append(("all", f"{1000 * self.wall:.1f} ms", "", "", ""))
        lines = [
            f"{name:<16}{cells[0]:>12}{cells[1]:>9}{cells[2]:>9}{cells[3]:>12}".rstrip()
            for name, *cells in rows
        ]
        if self.moved_bytes is not None:
            rate = self.moved_bytes / self.wall if self.wall else 0.0
            lines.append(
                f"rows of histories moved: {human(self.moved_bytes)}, {human(int(rate))}/s"
            )
        if self.overlap is not None:
            lines.append(
                f"overlap: {self.overlap:.1%}, {1000 * (self.busy or 0.0):.1f} ms of transfers, "
                f"{1000 * (self.waited or 0.0):.1f} ms of waiting"
            )
        return "\n".join(lines)


@contextlib.contextmanager
def profile(model: ScalableGNN | HeteroModel | None = None) -> Iterator[Profile]:
    """Measure where the time of training goes.

    ::

        with gas.profile(model) as found:
            gas.train_epoch(model, loader, optimizer)
        print(found)  # A line for each phase: time, share, calls, bytes; and the overlap.
        found.export_chrome_trace("trace.json")

    Native functions, pushes, waits for pulled rows and the cutting of batches are ranges of
    ``torch.profiler``, named ``"gas: PHASE"``. They cost nothing outside of this context. Inside,
    small steps become slower. What other threads do isn't measured.

    Args:
        model: The model whose moved rows are counted, and whose transfers are timed.
            (default: none)

    Yields:
        The :class:`gas.training.Profile`, which is filled when the context ends.

    Raises:
        ValueError: If another profile is active.
    """
    if model is not None and not isinstance(model, ScalableGNN | HeteroModel):
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a gas.ScalableGNN, or none"
        )
    if not _ACTIVE.acquire(blocking=False):
        raise ValueError(
            "gas.profile is active already, and PyTorch has one profiler: end it first"
        )
    with contextlib.ExitStack() as stack:
        stack.callback(_ACTIVE.release)
        found, meter = Profile(), _Meter(None if model is None else model._engine)
        # Else PyTorch 2.13 writes lines to standard error.
        level = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}
        stack.enter_context(mock.patch.dict(os.environ, level))
        for owner, name, measured in (
            (Relabeler, "__call__", _make_range("batches", Relabeler.__call__)),
            (History, "push", meter.measure_push(History.push)),
            (TransferEngine, "wait", meter.measure_wait(TransferEngine.wait)),
            (TransferEngine, "wait_lane", meter.measure_wait(TransferEngine.wait_lane)),
        ):
            stack.enter_context(mock.patch.object(owner, name, measured))
        if native.C is not None:
            ranges = _ProfiledExtension(native.C, meter)
            stack.enter_context(mock.patch.object(native.extension, "C", ranges))
        profiler: Any
        if torch.cuda.is_available():
            profiler = profile_devices(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        else:  # The other one imports PyTorch's compiler, for over a second.
            profiler = profile_cpu(use_kineto=False)
        try:
            with profiler as found._profiler:
                start = time.perf_counter()
                try:
                    yield found
                finally:
                    found.wall = time.perf_counter() - start
        finally:
            found._fill()
            meter.fill(found)


class _Meter:
    """Count bytes, and time the waits for an engine, in the thread that makes it."""

    def __init__(self, engine: TransferEngine | None) -> None:
        self.engine = engine
        self.copied = 0  # The bytes of copied features.
        self._thread = threading.get_ident()
        self._waited = 0.0
        self._pushing = False
        self._before = self._read()

    def _read(self) -> tuple[int, int, float | None]:
        """Return the bytes that were pushed and pulled, and the seconds for which jobs ran.

        ``None`` on a GPU, where streams move rows without jobs, and without the extension, where
        jobs run when they are submitted.
        """
        engine = self.engine
        if engine is None:
            return 0, 0, None
        busy = None
        if engine.has_workers and not engine.streams:
            engine._restart_after_fork()
            busy = engine._engine.busy_ns() / 1e9
        return engine.pushed_bytes, engine.pulled_bytes, busy

    @property
    def is_here(self) -> bool:
        """Return whether the current thread is the measured one."""
        return threading.get_ident() == self._thread

    def measure_push(self, push: Callable[..., None]) -> Callable[..., None]:
        """Make pushes a phase, waits inside of them included."""

        @functools.wraps(push)
        def call(*args: Any, **kwargs: Any) -> None:
            with record_function(PREFIX + "pushes"):
                if not self.is_here:
                    return push(*args, **kwargs)
                self._pushing = True
                try:
                    push(*args, **kwargs)
                finally:
                    self._pushing = False

        return call

    def measure_wait(self, wait: Callable[..., None]) -> Callable[..., None]:
        """Make waits outside of pushes a phase, and add up the time of all."""

        @functools.wraps(wait)
        def call(engine: TransferEngine, *args: Any) -> None:
            if not self.is_here:
                return wait(engine, *args)
            phase = None if self._pushing else record_function(PREFIX + "waits for rows")
            with phase or contextlib.nullcontext():
                start = time.perf_counter()
                try:
                    wait(engine, *args)
                finally:
                    if engine is self.engine:
                        self._waited += time.perf_counter() - start

        return call

    def fill(self, found: Profile) -> None:
        """Set what was counted."""
        if self.copied:
            found.bytes["features"] = self.copied
        if self.engine is None:
            return
        (pushed, pulled, busy), (pushed_before, pulled_before, before) = self._read(), self._before
        found.bytes["pushes"] = pushed - pushed_before
        found.bytes["waits for rows"] = pulled - pulled_before
        found.moved_bytes = found.bytes["pushes"] + found.bytes["waits for rows"]
        if busy is not None and before is not None:
            found.busy, found.waited = busy - before, self._waited
            if found.busy > 0.0:
                found.overlap = max(0.0, 1.0 - found.waited / found.busy)


class _ProfiledExtension:
    """A proxy of the extension, which records each call as a range of the profiler."""

    def __init__(self, module: Any, meter: _Meter) -> None:
        self._module = module
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        phase = next((p for start, p in NATIVE.items() if name.startswith(start)), None)
        if phase is None or isinstance(value, type) or not callable(value):
            return value
        if name in COPIES and self._meter.is_here:
            return self._count_copied_bytes(value, *COPIES[name])
        return _make_range(phase, value)

    def _count_copied_bytes(
        self, function: Callable[..., Any], width_at: int, count_at: int, unit_bytes: int
    ) -> Callable[..., Any]:
        """Count the bytes of each call, by its arguments at two positions."""
        ranged = _make_range("features", function)

        def call(*args: Any) -> Any:
            self._meter.copied += unit_bytes * args[width_at] * args[count_at]
            return ranged(*args)

        return call


def _make_range(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + phase):
            return function(*args, **kwargs)

    return call


def _phase_of(name: str) -> str | None:
    """Return the phase of an event; ``None`` if its time is that of Python."""
    if name.startswith(PREFIX):
        return name.removeprefix(PREFIX)
    if name.startswith("aten::"):
        return TORCH.get(name, "elementwise")
    return "optimizer" if name.startswith("Optimizer.") else None
