"""A pool that reuses host memory: the system clears new pages first, which takes most of a read."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.memory import human

SMALL_BYTES = 128 * 1024  # Below this size, the C library reuses memory itself.
LARGE_BYTES = 32 << 20  # From this size on, it always returns memory to the system.
HUGE_BYTES = 4 << 20  # Two huge pages of 2 MiB: smaller blocks gain little.
MOST_IDLE = 8  # Idle blocks of a pool.
MOST_IDLE_BYTES = 512 << 20  # Size of the idle blocks that all models share.


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


class BufferPool:
    """Allocate tensors in memory that is reused when it isn't referenced any more.

    Args:
        most_idle_bytes: Upper bound of the idle memory of one dtype. (default: none)
    """

    def __init__(self, most_idle_bytes: float = math.inf) -> None:
        self._most_idle_bytes = most_idle_bytes
        # By dtype: earlier contents of a buffer are finite numbers of its type.
        self._idle: dict[torch.dtype, deque[np.ndarray]] = defaultdict(deque)
        self._blocks: list[weakref.ref[np.ndarray]] = []
        self.peak_bytes = 0  # The largest size of all blocks, in use or idle.

    def allocate(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a CPU tensor of shape ``[rows, width]`` with unspecified but finite values."""
        size = rows * width * dtype.itemsize
        if size < SMALL_BYTES:
            with torch.inference_mode(False):
                return torch.zeros(rows, width, dtype=dtype, device="cpu")
        idle = self._idle[dtype]
        block = None
        for _ in range(len(idle)):
            try:
                candidate = idle.popleft()
            except IndexError:  # Another thread has taken the last block.
                break
            if size <= candidate.size <= 2 * size:
                block = candidate
                break
            if candidate.size > size or len(idle) < MOST_IDLE:
                idle.append(candidate)  # Too many small blocks are dropped.
        if block is None:
            # Larger than needed: the next batch's halo may be a little larger.
            step = 1 << max(0, math.ceil(math.log2(size)) - 3)
            block = zeros(-(-size // step) * step)
            self._note_peak(block)
        # The tensor keeps the array alive; the block is idle again when both are freed.
        array = block[:size]
        back = weakref.finalize(array, self._give_back, idle, block, self._most_idle_bytes)
        back.atexit = False
        storage = torch.from_numpy(array).untyped_storage()
        # Not a view: views that were made without gradient are read-only to autograd.
        with torch.inference_mode(False):  # Workers write to it outside of that mode.
            empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(storage, 0, (rows, width), (width, 1))

    def _note_peak(self, block: np.ndarray) -> None:
        """Update the peak by a new block."""
        alive = [ref for ref in self._blocks if ref() is not None]
        self._blocks = [*alive, weakref.ref(block)]
        blocks = [ref() for ref in self._blocks]
        held = sum([block.size for block in blocks if block is not None])
        self.peak_bytes = max(self.peak_bytes, held)

    @property
    def idle_bytes(self) -> int:
        """The size of the idle memory."""
        return sum(block.size for idle in tuple(self._idle.values()) for block in tuple(idle))

    def clear(self) -> None:
        """Free the idle memory."""
        for idle in tuple(self._idle.values()):
            idle.clear()

    @staticmethod
    def _give_back(idle: deque[np.ndarray], block: np.ndarray, most_bytes: float) -> None:
        idle.append(block)  # Atomic: this may run in any thread, at any time.
        with contextlib.suppress(IndexError):  # Another thread has taken the last one.
            while len(idle) > MOST_IDLE or sum([block.size for block in tuple(idle)]) > most_bytes:
                idle.popleft()

    def __deepcopy__(self, memo: object) -> BufferPool:
        return BufferPool(self._most_idle_bytes)

    def __reduce__(self) -> tuple[type[BufferPool], tuple[float]]:
        return BufferPool, (self._most_idle_bytes,)


SHARED = BufferPool(MOST_IDLE_BYTES)


def idle_bytes() -> int:
    """Return the size of the idle memory that all models share."""
    return SHARED.idle_bytes


def empty(rows: int, width: int, like: Tensor) -> Tensor:
    """Return an uninitialised tensor of shape ``[rows, width]``, of the dtype of another."""
    if like.device.type != "cpu" or rows * width * like.element_size() < LARGE_BYTES:
        return like.new_empty(rows, width)
    return SHARED.allocate(rows, width, like.dtype)
