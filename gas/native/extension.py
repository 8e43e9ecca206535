"""Load ``gas._C``, and call its functions on tensors of the CPU and of CUDA devices."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gas.native.checks import warn

# The interface of csrc/bindings/ that this package calls. CMake compiles it into the module.
INTERFACE = 28

_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


def openmp_runtimes(maps: str = "/proc/self/maps") -> set[str]:
    """Return the files of the loaded OpenMP runtimes; empty if the system doesn't tell."""
    try:
        with open(maps) as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if ".so" in line}
    except OSError:  # Only Linux has it.
        return set()
    return {os.path.realpath(path) for path in paths if _RUNTIME.search(path)}


def warn_of_second(before: set[str], after: set[str]) -> None:
    """Warn if the extension has loaded a second OpenMP runtime into the process."""
    if not before or not after - before:
        return
    warn(
        f"gas._C has loaded a second OpenMP runtime, {min(after - before)}, beside {min(before)} "
        "of PyTorch: their threads wait for each other's cores, and everything may be slow. "
        "Build gas without OpenMP, it then has threads of its own: "
        "CMAKE_ARGS=-DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON pip install .",
        RuntimeWarning,
    )


def _load() -> ModuleType | None:
    """Import ``gas._C``; without it, warn once that its twins in Python are used."""
    runtimes = openmp_runtimes()
    try:
        module = importlib.import_module("gas._C")
    except ModuleNotFoundError:
        reason = "it was not built"
    except ImportError as error:
        reason = f"it could not be loaded ({error})"
    else:
        if getattr(module, "INTERFACE", None) == INTERFACE:
            warn_of_second(runtimes, openmp_runtimes())
            return module
        reason = f"{module.__file__} was built from other sources than these"
    warn(
        f"gas runs without its native extension: {reason}. Everything works, only slower. To "
        "build it, run 'pip install .' (or 'pip install -e .' to work on the sources) in the "
        "repository; it needs a C++17 compiler.",
        RuntimeWarning,
    )
    return None


C: Any = _load()


def on_cpu(*tensors: Tensor | None) -> bool:
    """Return whether the extension was built, and all are on the CPU."""
    for tensor in tensors:  # No all(...): a generator is a call for each of them.
        if tensor is not None and not tensor.is_cpu:
            return False
    return C is not None


def has_kernels(*tensors: Tensor | None) -> bool:
    """Return whether kernels exist for all tensors: on the CPU, or on one CUDA device."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            break
    else:
        return C is not None
    devices = {t.device for t in tensors if t is not None}
    return C is not None and len(devices) == 1 and computes_on(devices.pop())


def computes_on(device: torch.device) -> bool:
    """Return whether operators run on a device: by our kernels, or on the CPU by their twins."""
    return device.type == "cpu" or (device.type == "cuda" and C is not None and C.WITH_CUDA)


_NUMBERS = frozenset((bool, float, int))


def to_addresses(arguments: Iterable[Any]) -> list[Any]:
    """Replace tensors, also in lists, by the addresses of their elements, and ``None`` by 0."""
    values: list[Any] = []
    for value in arguments:  # The most frequent types first: small batches spend their time here.
        kind = type(value)
        if kind is Tensor:
            values.append(value.data_ptr())
        elif kind in _NUMBERS:
            values.append(value)
        elif value is None:
            values.append(0)
        elif kind is list:
            values.append(to_addresses(value))
        else:
            values.append(value.data_ptr() if isinstance(value, Tensor) else value)
    return values


def run(name: str, device: torch.device, *arguments: object) -> Any:
    """Call a function of csrc/ on the CPU, or on the current stream of a CUDA device.

    Tensors are passed by address; see :func:`to_addresses`. A device's scratch is PyTorch's.
    """
    values = to_addresses(arguments)
    if device.type == "cpu":
        return getattr(C, name)(*values, torch.get_num_threads())
    scratch: list[Tensor] = []

    def allocate(size: int) -> int:
        scratch.append(torch.empty(size, dtype=torch.uint8, device=device))
        return scratch[-1].data_ptr()

    with _use_device(device):
        stream = torch.cuda.current_stream().cuda_stream
        return getattr(C, name)(*values, C.Stream(stream, allocate))


def launch(name: str, device: torch.device, *arguments: object) -> None:
    """Call a function of csrc/ that needs no scratch on the current stream of a CUDA device."""
    with _use_device(device):
        stream = torch.cuda.current_stream().cuda_stream
        getattr(C, name)(*to_addresses(arguments), stream)


_SAME_DEVICE = contextlib.nullcontext()


def _use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a CUDA device the current one if it isn't: kernels run on no other's streams."""
    is_current = torch.cuda.current_device() == device.index
    return _SAME_DEVICE if is_current else torch.cuda.device(device)
