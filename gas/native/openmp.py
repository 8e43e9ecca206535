"""The OpenMP runtimes of the process: the threads of two fight for the cores."""

from __future__ import annotations

import os
import re

from gas.native.warning import warn

_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


def runtimes(maps: str = "/proc/self/maps") -> set[str]:
    """Return the files of the loaded OpenMP runtimes; empty if the system doesn't tell."""
    try:
        with open(maps) as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if ".so" in line}
    except OSError:  # Only Linux has it.
        return set()
    return {os.path.realpath(path) for path in paths if _RUNTIME.search(path)}


def warn_of_second(before: set[str], after: set[str]) -> None:
    """Warn if the extension has brought an OpenMP runtime beside one that was there."""
    if not before or not after - before:
        return
    warn(
        f"gas._C has loaded a second OpenMP runtime, {min(after - before)}, beside {min(before)} "
        "of PyTorch: their threads wait for each other's cores, and everything may be slow. "
        "Build gas without OpenMP, it then has threads of its own: "
        "CMAKE_ARGS=-DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON pip install .",
        RuntimeWarning,
    )
