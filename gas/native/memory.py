"""Memory in large pages, free memory and free disk space, and their sizes as text."""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from gas.native import extension as native
from gas.native.checks import check_integer

try:
    import resource
except ImportError:  # Windows.
    resource = None  # type: ignore[assignment]

# Control groups of version 2 and 1, by their controller in /proc/self/cgroup: the folder, and the
# files of the limit and of what is used.
CGROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}

HUGE_BYTES = 4 << 20  # Two huge pages of 2 MiB: smaller blocks gain little.

RESIDENT = re.compile(rb"^Rss(\w+):\s+(\d+) kB", re.MULTILINE)

# Error numbers of a full disk, a file at its size limit and an exhausted quota.
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

UNITS = {"B": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for unit, base in (("B", 1000), ("IB", 1024))
}


def zeros(num_bytes: int) -> np.ndarray:
    """Allocate host memory, in huge pages if available, which random reads are faster from."""
    if num_bytes < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(num_bytes, dtype=np.uint8)
    return _pages(num_bytes)


def _pages(num_bytes: int) -> np.ndarray:
    """Allocate zeros in pages of their own."""
    if hasattr(mmap, "MAP_ANONYMOUS"):
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:  # Windows.
        pages = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(OSError, AttributeError):  # The system has no huge pages.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def allocate_pinned(num_bytes: int) -> np.ndarray:
    """Allocate exactly the requested host memory, for access by GPUs over the bus.

    PyTorch's allocator would round up to the next power of two. The caller of kernels keeps a
    reference to the array until they have ended.
    """
    array = _pages(num_bytes)
    address = array.ctypes.data
    try:
        native.C.cuda_pin(address, num_bytes)
    except RuntimeError as error:
        raise MemoryError(
            f"'store' is 'pinned', but {human(num_bytes)} of memory can't be pinned, CUDA says "
            f"{str(error)!r}: use store='host', or raise the limit of locked memory (ulimit -l)"
        ) from error
    # Unpinned just before the pages are unmapped, with the array.
    back = weakref.finalize(array, native.C.cuda_unpin, address)
    back.atexit = False
    return array


def free_memory(device: torch.device | None = None) -> int:
    """Return the bytes that can still be allocated, of a device or of the host's memory.

    If the system doesn't report it, the number is larger than any request.
    """
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [bytes_in_proc("/proc/meminfo", "MemAvailable")]
    free += _free_cgroup_bytes()
    if resource is not None:
        for kind, counted in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
            allowed = resource.getrlimit(kind)[0]
            if allowed != resource.RLIM_INFINITY:
                free.append(allowed - (bytes_in_proc("/proc/self/status", counted) or 0))
    return max(0, min((f for f in free if f is not None), default=2**63))


def free_disk(path: Path) -> int:
    """Return the free bytes of the disk that holds ``path``, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@contextlib.contextmanager
def explain_full_disk(path: str | Path, text: Callable[[int], str]) -> Iterator[None]:
    """Add the cure to an error about a full disk in this context.

    Args:
        path: The file or folder that is written.
        text: Returns the error's text for a number of free bytes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        free = free_disk(Path(path).absolute())
        raise OSError(error.errno, text(free), str(path)) from error


def resident_bytes() -> int:
    """Return the bytes of this process in memory now; 0 if the system doesn't report them."""
    return bytes_in_proc("/proc/self/status", "VmRSS") or 0


def resident_kinds() -> tuple[float, float]:
    """Count the bytes of this process in memory by kind: its own, and pages of mapped files.

    The process has allocated its own. The files are libraries, graphs and histories on disk: the
    system reclaims their pages when it needs memory. NaN if the system doesn't report them.
    """
    try:
        found = dict(RESIDENT.findall(Path("/proc/self/status").read_bytes()))
    except OSError:
        found = {}
    own, mapped, shared = (int(found.get(kind, -1)) * 1024 for kind in (b"Anon", b"File", b"Shmem"))
    if min(own, mapped, shared) < 0:
        return math.nan, math.nan
    return own + shared, mapped  # Shared memory can't be reclaimed like files.


class PeakMemory:
    """Sample the peaks of :func:`resident_kinds`, ``own`` and ``mapped``, in this context.

    A thread does it: the system keeps only the peak of both kinds together. Memory that lives
    shorter than the interval may be missed.

    Args:
        seconds: The interval. (default: ``0.02``)
    """

    def __init__(self, seconds: float = 0.02) -> None:
        self.own, self.mapped = resident_kinds()
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gas-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        if math.isfinite(self.own):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
            self.sample()

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            self.sample()

    def sample(self) -> None:
        """Update the peaks."""
        own, mapped = resident_kinds()
        self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)


def bytes_in_proc(file: str, field: str) -> int | None:
    """Return a field of a file like ``/proc/meminfo``, in bytes; ``None`` without it."""
    with contextlib.suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def _free_cgroup_bytes(own: str = "/proc/self/cgroup") -> Iterator[int]:
    """Return the free bytes of this process's control groups and those above, if limited."""
    with contextlib.suppress(OSError):  # The system has no such groups.
        for line in Path(own).read_text().splitlines():
            controllers, _, group = line.partition(":")[2].partition(":")
            for controller in CGROUPS.keys() & {*controllers.split(",")}:
                root, limit, used = CGROUPS[controller]
                folder = Path(root + group)  # Doesn't exist if the group is named as by the host.
                for each in (folder, *folder.parents):
                    if not each.is_relative_to(root) or not (each / used).exists():
                        continue
                    most, now = ((each / name).read_text().strip() for name in (limit, used))
                    if most != "max":
                        yield int(most) - int(now) + _reclaimable(each)


def _reclaimable(group: Path) -> int:
    """Return the bytes of a control group in the page cache, which the system can reclaim."""
    file = group / "memory.stat"
    lines = file.read_text().splitlines() if file.exists() else []
    stat = dict(line.split() for line in lines)
    return int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))


def bytes_of(name: str, value: object) -> int:
    """Parse an amount of memory as a number of bytes, at least 1.

    Args:
        name: The name in the error.
        value: A number of bytes, or a string such as ``"6GB"``, ``"1.5 GiB"`` or ``"500MB"``: 1 GB
            is 10^9 bytes, 1 GiB 2^30.
    """
    size = value
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([KMGT]?I?B)", value.strip(), re.IGNORECASE)
        unit = None if found is None else UNITS.get(found[2].upper())
        if found is None or unit is None:
            raise ValueError(
                f"'{name}' is {value!r}, expected a size with its unit, such as '6GB' (10^9 bytes "
                "each), '6GiB' (2^30) or '500MB'"
            )
        size = int(float(found[1]) * unit)
    check_integer(name, size, 1, expected="a number of bytes, such as 6_000_000_000 or '6GB'")
    return int(size)  # type: ignore[call-overload]


def human(num_bytes: int) -> str:
    """Format a number of bytes."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
