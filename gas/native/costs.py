"""Choose between our kernels and PyTorch's on a CUDA device, by a table of measured costs.

Which are faster at moving rows of a table, and at sums over neighbours, depends on the device and
on the width of rows. :func:`gas.native.measure_costs.measure` measures both and keeps the table in
the cache, for devices of the same name and this version of PyTorch. Without a table, and on the
CPU, our kernels are used. cuSPARSE may add up in another order in every run:
:func:`torch.use_deterministic_algorithms` excludes it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gas.native.checks import cache_dir
from gas.native.files import read_json, write_json

MARGIN = 0.95  # PyTorch must take less than this share of our time: noise must not decide.

# Seconds by device, operation, size and way.
Costs = dict[str, dict[str, dict[str, dict[str, float]]]]

_forced: str | None = None  # The way that is being measured.


def prefers_torch_move(operation: str, table: Tensor) -> bool:
    """Return whether PyTorch is faster at the ``"gather"`` or ``"scatter"`` of a table's rows."""
    if not table.is_cuda or table.dtype != torch.float32 or table.size(0) == 0:
        return False
    return _prefers_torch(operation, table.nbytes // table.size(0), table.device)


def prefers_torch_sum(weight: Tensor | None, x: Tensor) -> bool:
    """Return whether PyTorch's cuSPARSE is faster at the sums of neighbours' rows ``x``."""
    if not x.is_cuda or x.dtype != torch.float32 or torch.are_deterministic_algorithms_enabled():
        return False
    return _prefers_torch("sum" if weight is None else "weighted sum", x.size(1), x.device)


def _prefers_torch(operation: str, size: int, device: torch.device) -> bool:
    return _forced == "torch" if _forced is not None else _is_torch_faster(operation, size, device)


@functools.cache
def _is_torch_faster(operation: str, size: int, device: torch.device) -> bool:
    """Compare the costs at the next larger measured size, or at the largest."""
    costs = _read_kernel_costs().get(_device_key(device), {}).get(operation, {})
    sizes = sorted(map(int, costs))
    if not sizes:
        return False
    seconds = costs[str(next((limit for limit in sizes if size <= limit), sizes[-1]))]
    return seconds["torch"] < MARGIN * seconds["gas"]


def _device_key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, PyTorch {torch.__version__}"


def _costs_path() -> Path:
    return cache_dir() / "costs.json"


def _read_kernel_costs() -> Costs:
    """Read the measured seconds of our kernels and PyTorch's; an unreadable file has none."""
    try:
        return read_json(_costs_path())
    except (OSError, ValueError):
        return {}


def save_costs(device: torch.device, costs: dict[str, dict[str, dict[str, float]]]) -> None:
    """Write the measured costs of a device to the cache, and use them from now on."""
    write_json(_costs_path(), {**_read_kernel_costs(), _device_key(device): costs}, indent=1)
    _is_torch_faster.cache_clear()


@contextlib.contextmanager
def force(way: str) -> Iterator[None]:
    """Use one way in this context, ``"gas"`` or ``"torch"``."""
    global _forced
    _forced = way
    try:
        yield
    finally:
        _forced = None
