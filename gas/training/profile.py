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
from gas.scalable import HeteroModel, ScalableGNN, moved_bytes

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
METHODS = (
    (Relabeler, "__call__", "batches"),
    (History, "push", "pushes"),
    (TransferEngine, "wait", "waits for rows"),
    (TransferEngine, "wait_lane", "waits for rows"),
)


class Profile:
    """Time of a block of code by phase; filled when the block ends.

    * ``seconds``, ``calls``: of each phase, without the phases inside of it; ``"Python"`` is the
      rest of the time, of Python, dispatch and autograd.
    * ``wall``: the seconds of the whole block.
    * ``moved_bytes``: the bytes of histories' rows that were read and written; ``None`` if no model
      was given.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.wall = 0.0
        self.moved_bytes: int | None = None
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
        rows = [("phase", "time", "share", "calls")]
        for phase in order:
            seconds, calls = self.seconds[phase], self.calls[phase]
            share = seconds / self.wall if self.wall else 0.0
            rows.append((phase, f"{1000 * seconds:.1f} ms", f"{share:.1%}", f"{calls or '-'}"))
        rows.append(("all", f"{1000 * self.wall:.1f} ms", "", ""))
        lines = [f"{row[0]:<16}{row[1]:>12}{row[2]:>9}{row[3]:>9}".rstrip() for row in rows]
        if self.moved_bytes is not None:
            rate = self.moved_bytes / self.wall if self.wall else 0.0
            lines.append(
                f"rows of histories moved: {human(self.moved_bytes)}, {human(int(rate))}/s"
            )
        return "\n".join(lines)


@contextlib.contextmanager
def profile(model: ScalableGNN | HeteroModel | None = None) -> Iterator[Profile]:
    """Measure where the time of training goes.

    ::

        with gas.profile(model) as found:
            gas.train_epoch(model, loader, optimizer)
        print(found)  # A line for each phase: time, share, calls.
        found.export_chrome_trace("trace.json")

    Native functions, pushes, waits for pulled rows and the cutting of batches are ranges of
    ``torch.profiler``, named ``"gas: PHASE"``. They cost nothing outside of this context. Inside,
    small steps become slower. What other threads do isn't measured.

    Args:
        model: The model whose moved rows are counted. (default: none)

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
    try:
        yield from _profile(model)
    finally:
        _ACTIVE.release()


def _profile(model: ScalableGNN | HeteroModel | None) -> Iterator[Profile]:
    """Measure while no other profile is active."""
    found, before = Profile(), 0 if model is None else moved_bytes(model)
    profiler: Any
    if torch.cuda.is_available():
        profiler = profile_devices(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    else:  # The other one imports PyTorch's compiler, for over a second.
        profiler = profile_cpu(use_kineto=False)
    # Else PyTorch 2.13 writes lines to standard error.
    level = {"KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, level))
        for owner, name, phase in METHODS:
            ranged = _make_range(phase, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, ranged))
        if native.C is not None:
            ranges = _Ranges(native.C)
            patches.enter_context(mock.patch.object(native.extension, "C", ranges))
        try:
            with profiler as found._profiler:
                start = time.perf_counter()
                try:
                    yield found
                finally:
                    found.wall = time.perf_counter() - start
        finally:
            found._fill()
            if model is not None:
                found.moved_bytes = moved_bytes(model) - before


class _Ranges:
    """The extension, whose functions are ranges of the profiler."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        phase = next((p for start, p in NATIVE.items() if name.startswith(start)), None)
        if phase is None or isinstance(value, type) or not callable(value):
            return value
        return _make_range(phase, value)


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
