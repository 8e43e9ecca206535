"""What the histories of one model share: an engine, its lanes, and memory to read into."""

from __future__ import annotations

import itertools
import weakref

import torch

from gas.history.cores import num_cores
from gas.history.streams import Streams
from gas.native.buffers import BufferPool
from gas.native.engine import Engine

MODES = ("serial", "concurrent", "none")


def check_io(io: str) -> str:
    """Raises ``ValueError`` unless ``io`` is a mode of transfer."""
    if io not in MODES:
        raise ValueError(f"'io' is {io!r}, expected one of {', '.join(MODES)}")
    return io


class TransferEngine:
    """Moves rows for the histories of one model.

    Args:
        io: ``"serial"`` moves rows when they are asked for; ``"concurrent"`` lets transfers run
            beside the computation, with equal results; ``"none"`` moves nothing, which is wrong on
            purpose: the upper bound for benchmarks.
        pool_size: Upper bound of the pinned buffers that a history's rows pass through on their way
            to a GPU, where it can't read them itself. (default: 2)
    """

    def __init__(self, io: str = "concurrent", pool_size: int | None = None) -> None:
        self.io = check_io(io)
        self.pool_size = pool_size
        self.moved_bytes = 0
        self.pool = BufferPool()
        # Two lanes at least may wait for a disk or a network at the same time.
        self.jobs = Engine(threads=max(2, min(4, num_cores() // 4)))
        self._lanes = itertools.count()
        self._streams: dict[torch.device, Streams] = {}
        # Before Python ends, the workers must: they write to memory that it frees.
        self._finalizer = weakref.finalize(self, self.jobs.close)

    def new_lane(self) -> int:
        """A lane of its own, for a history."""
        return next(self._lanes)

    def streams(self, device: torch.device) -> Streams:
        """The streams of all histories on a CUDA device."""
        if device not in self._streams:
            self._streams[device] = Streams(device)
        return self._streams[device]

    def close(self) -> None:
        """Finishes pushes under way and ends the workers. Nothing can be moved afterwards."""
        self._finalizer()

    def __deepcopy__(self, memo: dict[int, object]) -> TransferEngine:
        return TransferEngine(self.io, self.pool_size)

    def __reduce__(self) -> tuple[type[TransferEngine], tuple[str, int | None]]:
        return TransferEngine, (self.io, self.pool_size)
