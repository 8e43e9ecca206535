"""Which of two ways to the same numbers is faster on a CUDA device: a table of measured costs.

Rows of a table on the device are moved, and rows are added up over neighbours, by the kernels of
``csrc`` or by PyTorch's (``index_select``, ``index_copy_``, cuSPARSE). Which are faster depends on
the device and on the width of rows. :func:`measure` finds out, and keeps what it found in the
cache, for devices of the same name and this version of PyTorch. Where nobody has measured, and on
the CPU, our kernels are taken.

cuSPARSE may add up in another order in every run: :func:`torch.use_deterministic_algorithms`
excludes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gas.native.cache import cache_dir

WAYS = ("gas", "torch")
ROW_BYTES = [4 << k for k in range(11)]  # Of rows that are moved: 4 to 4096.
WIDTHS = [1 << k for k in range(9)]  # Of rows that are added up: 1 to 256.
MARGIN = 0.95  # Of our time PyTorch has to take less than this: noise shall decide nothing.

# By device: of an operation and a size the seconds of each way.
Costs = dict[str, dict[str, dict[str, dict[str, float]]]]
Timer = Callable[[Callable[[], object]], float]

_forced: str | None = None  # The way that is being measured.


def moves_by_torch(operation: str, table: Tensor) -> bool:
    """Whether PyTorch is faster at the ``"gather"`` or ``"scatter"`` of a table's rows."""
    if not table.is_cuda or table.dtype != torch.float32 or table.size(0) == 0:
        return False
    return _prefers_torch(operation, table.nbytes // table.size(0), table.device)


def sums_by_torch(weight: Tensor | None, x: Tensor) -> bool:
    """Whether cuSPARSE is faster at sums over neighbours, weighted or not."""
    if not x.is_cuda or x.dtype != torch.float32 or torch.are_deterministic_algorithms_enabled():
        return False
    return _prefers_torch("sum" if weight is None else "weighted sum", x.size(1), x.device)


def _prefers_torch(operation: str, size: int, device: torch.device) -> bool:
    return _forced == "torch" if _forced is not None else _chosen(operation, size, device)


@functools.cache
def _chosen(operation: str, size: int, device: torch.device) -> bool:
    """By the costs of the next larger size that was measured, or of the largest."""
    costs = _read().get(_name(device), {}).get(operation, {})
    sizes = sorted(map(int, costs))
    if not sizes:
        return False
    seconds = costs[str(next((limit for limit in sizes if size <= limit), sizes[-1]))]
    return seconds["torch"] < MARGIN * seconds["gas"]


def _name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, PyTorch {torch.__version__}"


def _file() -> Path:
    return cache_dir() / "costs.json"


def _read() -> Costs:
    """What has been measured; an unreadable file counts as absent."""
    try:
        return json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}


# Measuring ----------------------------------------------------------------------------------------


def measure(
    device: torch.device | str = "cuda", num_bytes: int = 1 << 29, timer: Timer | None = None
) -> dict[str, Any]:
    """Measures every way on a device, and keeps the costs: from now on the faster ones are taken.

    Args:
        device: Nothing else should run there. (default: ``"cuda"``)
        num_bytes: The largest tables, more than a cache holds. (default: 512 MiB)
        timer: The seconds of a call of a function. (default: a median by CUDA events)

    Returns:
        Seconds, by operation, size and way: of ``"gather"`` and ``"scatter"`` the size is the bytes
        of a row, of ``"sum"`` and ``"weighted sum"`` the width.

    Raises:
        OSError: If they can't be kept.
    """
    device = torch.device(device)
    found: dict[str, Any] = {}
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for operation, size, call in _operations(device, num_bytes):
            seconds = {}
            for way in WAYS:
                with _forcing(way):
                    seconds[way] = (timer or _median)(call)
            found.setdefault(operation, {})[str(size)] = seconds
    file, costs = _file(), _read()
    costs[_name(device)] = found
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(costs, indent=1))
    os.replace(temporary, file)
    _chosen.cache_clear()
    return found


def _operations(
    device: torch.device, num_bytes: int
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    from gas.native import device as moves  # Which ask for costs.
    from gas.native import sparse
    from gas.native.matrix import Matrix

    for size in ROW_BYTES:
        num_rows = min(num_bytes // size, 1 << 24)
        table = torch.rand(num_rows, size // 4, device=device)
        index = torch.randperm(num_rows, device=device)[: max(1, num_rows // 4)]
        rows = table[index]
        yield "gather", size, functools.partial(moves.gather_rows, table, index)
        yield "scatter", size, functools.partial(moves.scatter_rows, table, index, rows)
    num_nodes, degree = max(1, num_bytes >> 11), 16
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    rowptr = torch.arange(0, num_nodes * degree + 1, degree, **ints)
    col = torch.randint(num_nodes, (num_nodes * degree,), **ints)
    matrix = Matrix.of(rowptr, col, torch.zeros_like(rowptr), col[:0], col[:0])
    weight = torch.rand(col.numel(), device=device)
    for width in WIDTHS:
        x = torch.rand(num_nodes, width, device=device)
        yield "sum", width, functools.partial(sparse.multiply, matrix, None, x)
        yield "weighted sum", width, functools.partial(sparse.multiply, matrix, weight, x)


@contextlib.contextmanager
def _forcing(way: str) -> Iterator[None]:
    global _forced
    _forced = way
    try:
        yield
    finally:
        _forced = None


def _median(function: Callable[[], object], warm_up: int = 2, rounds: int = 9) -> float:
    """Seconds on the current stream, which the host waits for."""
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
