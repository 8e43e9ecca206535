"""Measure the costs of our kernels and of PyTorch's on a CUDA device, for :mod:`.costs`."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gas.native import costs
from gas.native.device import gather_rows, scatter_rows
from gas.native.matrix import Matrix
from gas.native.sparse import multiply

WAYS = ("gas", "torch")
ROW_BYTES = [4 << k for k in range(11)]  # Of rows that are moved: 4 to 4096.
WIDTHS = [1 << k for k in range(9)]  # Of rows that are added up: 1 to 256.

Timer = Callable[[Callable[[], object]], float]


def measure(
    device: torch.device | str = "cuda", num_bytes: int = 1 << 29, timer: Timer | None = None
) -> dict[str, Any]:
    """Measure both ways of every operation on a device, and use the faster ones from now on.

    Args:
        device: Nothing else should run there. (default: ``"cuda"``)
        num_bytes: The largest tables, more than a cache holds. (default: 512 MiB)
        timer: The seconds of a call of a function. (default: a median by CUDA events)

    Returns:
        Seconds, by operation, size and way: of ``"gather"`` and ``"scatter"`` the size is the bytes
        of a row, of ``"sum"`` and ``"weighted sum"`` the width.
    """
    device = torch.device(device)
    found: dict[str, Any] = {}
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for operation, size, call in _operations(device, num_bytes):
            seconds = {}
            for way in WAYS:
                with costs.force(way):
                    seconds[way] = (timer or _median)(call)
            found.setdefault(operation, {})[str(size)] = seconds
    costs.save_costs(device, found)
    return found


def _operations(
    device: torch.device, num_bytes: int
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    for size in ROW_BYTES:
        num_rows = min(num_bytes // size, 1 << 24)
        table = torch.rand(num_rows, size // 4, device=device)
        index = torch.randperm(num_rows, device=device)[: max(1, num_rows // 4)]
        rows = table[index]
        yield "gather", size, functools.partial(gather_rows, table, index)
        yield "scatter", size, functools.partial(scatter_rows, table, index, rows)
    num_nodes, degree = max(1, num_bytes >> 11), 16
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    rowptr = torch.arange(0, num_nodes * degree + 1, degree, **ints)
    col = torch.randint(num_nodes, (num_nodes * degree,), **ints)
    matrix = Matrix.of(rowptr, col, torch.zeros_like(rowptr), col[:0], col[:0])
    weight = torch.rand(col.numel(), device=device)
    for width in WIDTHS:
        x = torch.rand(num_nodes, width, device=device)
        rest = x, None, None, False, False, None
        yield "sum", width, functools.partial(multiply, matrix, None, *rest)
        yield "weighted sum", width, functools.partial(multiply, matrix, weight, *rest)


def _median(function: Callable[[], object], warm_up: int = 2, rounds: int = 9) -> float:
    """Return seconds on the current stream, which the host waits for."""
    times = []
    for number in range(warm_up + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        if number >= warm_up:
            times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
