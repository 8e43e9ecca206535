"""Host memory that is used again.

A new tensor of some megabytes costs more than the rows that are read into it: the system clears its
pages first (measured: 3-4 GB/s into a new tensor, 10-20 GB/s into one that was used before).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor

from gas.history.memory import zeros

SMALL_BYTES = 128 * 1024  # Below this, the C library uses memory again by itself.
MOST_IDLE = 8  # Blocks that wait for their next use.


class BufferPool:
    """Hands out tensors in memory that is used again once nothing refers to it any more."""

    def __init__(self) -> None:
        # By dtype, so that what a buffer held is a number of its type.
        self._idle: dict[torch.dtype, deque[np.ndarray]] = defaultdict(deque)

    def take(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A tensor of shape ``[rows, width]`` on the CPU, with unspecified but finite values."""
        size = rows * width * dtype.itemsize
        if size < SMALL_BYTES:
            with torch.inference_mode(False):
                return torch.zeros(rows, width, dtype=dtype, device="cpu")
        idle = self._idle[dtype]
        block = None
        for _ in range(len(idle)):
            try:
                candidate = idle.popleft()
            except IndexError:  # Another thread has taken the last one.
                break
            if size <= candidate.size <= 2 * size:
                block = candidate
                break
            if candidate.size > size or len(idle) < MOST_IDLE:
                idle.append(candidate)  # Of use to others; too many small ones are dropped.
        if block is None:
            # Some room to spare: the next batch's halo may be a little larger.
            step = 1 << max(0, math.ceil(math.log2(size)) - 3)
            block = zeros(-(-size // step) * step)
        # The tensor keeps the array alive; when both are gone, the block is idle again.
        array = block[:size]
        weakref.finalize(array, self._give_back, idle, block).atexit = False
        storage = torch.from_numpy(array).untyped_storage()
        # Not a view: autograd lets nobody write to views that were made without gradient.
        with torch.inference_mode(False):  # Workers may write to it, who are not in that mode.
            empty = torch.empty(0, dtype=dtype, device="cpu")
        return empty.set_(storage, 0, (rows, width), (width, 1))

    @staticmethod
    def _give_back(idle: deque[np.ndarray], block: np.ndarray) -> None:
        idle.append(block)  # Atomic: this may run in any thread, at any time.
        if len(idle) > MOST_IDLE:
            idle.popleft()

    def __deepcopy__(self, memo: object) -> BufferPool:
        return BufferPool()

    def __reduce__(self) -> tuple[type[BufferPool], tuple[()]]:
        return BufferPool, ()
