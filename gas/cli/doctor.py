"""Description of the installation: versions, threads, memory, and what to do about problems."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import gas
from gas.native import C, cache_dir, free_disk, free_memory, human, num_cores, openmp_runtimes

# Extras by package, and what needs them.
EXTRAS = {
    "safetensors": "the model of a run",
    "pyarrow": "tables, and predictions.parquet",
    "matplotlib": "curves",
    "yaml": "files of settings",
    "tyro": "the command gas",
    "jinja2": "gas report",
    "torch_sparse": "layout='sparse_tensor'",
    "kaminpar": "method='kaminpar', which partitions on all cores",
    "rocksdict": "features in RocksDB",
    "tensorboard": "--tensorboard",
}
PIP_NAMES = {"yaml": "pyyaml", "torch_sparse": "torch-sparse"}
# torch-sparse is compiled against the installed PyTorch.
INSTALLS = {"torch-sparse": "--no-build-isolation torch-scatter torch-sparse"}


class Finding(NamedTuple):
    """A line of the description; ``cure`` is what to do about it, "" if all is well."""

    name: str
    value: str
    cure: str = ""


def examine() -> Iterator[Finding]:
    """Yield the findings about this installation and machine."""
    for name in ("torch", "torch-geometric", "numpy", "pymetis"):
        yield _version(name)
    yield Finding("gas", gas.__version__)
    yield Finding("Python", f"{platform.python_version()}, {platform.platform()}")
    yield _extension()
    yield _cuda()
    runtimes = sorted(Path(each).name for each in openmp_runtimes())
    several = "rebuild gas without OpenMP, docs/installation.md shows how"
    yield Finding("OpenMP", ", ".join(runtimes) or "none", several if len(runtimes) > 1 else "")
    yield _threads()
    yield from _allocator()
    yield Finding("free memory", human(free_memory()))
    for what, folder in (("here", Path.cwd()), ("of the cache", cache_dir())):
        free = free_disk(folder)
        cure = "free some room: partitions and graphs are written there" if free < 2**30 else ""
        yield Finding(f"free disk {what}", f"{human(free)}, {folder}", cure)
    for name, use in EXTRAS.items():
        found = importlib.util.find_spec(name) is not None
        package = PIP_NAMES.get(name, name)
        install = f"pip install {INSTALLS.get(package, package)}"
        yield Finding(package, "installed" if found else f"missing, for {use}: {install}")


def _version(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", f"pip install {name}")


def _extension() -> Finding:
    """Describe the native extension."""
    if C is None:
        cure = "everything is slower: pip install . in the repository, with a C++17 compiler"
        return Finding("extension", "not built", cure)
    return Finding("extension", f"{Path(C.__file__).name}{', with CUDA' if C.WITH_CUDA else ''}")


def _cuda() -> Finding:
    """Describe the GPUs that PyTorch sees, and whether the extension supports them."""
    if not torch.cuda.is_available():
        return Finding("CUDA", "no device; everything runs on the CPU")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    cure = "pip install . in a checkout builds the kernels of this GPU, if nvcc is installed"
    return Finding("CUDA", names, "" if C is not None and C.WITH_CUDA else cure)


def _threads() -> Finding:
    """Compare PyTorch's threads with the cores that the process may use."""
    threads, cores = torch.get_num_threads(), num_cores()
    cure = f"unset OMP_NUM_THREADS, or set it to {cores}" if threads > cores else ""
    return Finding("threads", f"{threads} on {cores} cores", cure)


def _allocator() -> Iterator[Finding]:
    """Name the allocator, where another one can be preloaded."""
    if platform.libc_ver()[0] == "glibc":
        preloaded = [
            name for name in os.environ.get("LD_PRELOAD", "").split(":") if "malloc" in name
        ]
        advice = (
            "glibc's; where tensors have 32 MiB, tcmalloc is faster: docs/performance/memory.md"
        )
        yield Finding("allocator", Path(preloaded[0]).name if preloaded else advice)


def print_findings(found: Iterator[Finding]) -> int:
    """Print findings, and return how many have a cure."""
    problems = 0
    for each in found:
        print(f"{each.name:<22} {each.value}")
        if each.cure:
            problems += 1
            print(f"{'':<22} -> {each.cure}")
    print(
        f"\n{problems} problem{'s' * (problems != 1)} found" if problems else "\nNo problems found"
    )
    return problems
