"""The engine that the histories of one model share: lanes, memory to read into, streams."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from gas.history.cores import num_cores
from gas.native import BufferPool, Engine

MODES = ("serial", "concurrent", "none")

# Row ids on devices, with the event of their arrival; kept by a caller who reads several histories.
Copies = dict[torch.device, tuple[Tensor, torch.cuda.Event]]


def check_io(io: str) -> str:
    """Raise ``ValueError`` unless ``io`` is a mode of transfer."""
    if io not in MODES:
        raise ValueError(f"'io' is {io!r}, expected one of {', '.join(MODES)}")
    return io


class Streams:
    """One stream for all pulls and one for all pushes, so that the bus is used both ways.

    Each history orders its own pulls and pushes by events: see :class:`gas.history.cuda.CudaLink`.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pulls = torch.cuda.Stream(device)
        self.pushes = torch.cuda.Stream(device)

    def ids(self, index: Tensor, stream: torch.cuda.Stream, copies: Copies | None) -> Tensor:
        """Return row ids on the device, for a stream.

        Args:
            index: The ids, of shape ``[n]``, int64, there or on the CPU.
            stream: The stream that reads them.
            copies: Those that were made before, and will be kept. (``None``: none are)
        """
        made = None if copies is None else copies.get(self.device)
        if made is None:
            made = self._copied(index, stream)
            if copies is not None:
                copies[self.device] = made
        ids, event = made
        stream.wait_event(event)
        ids.record_stream(stream)  # It may have been allocated for another.
        return ids

    def _copied(self, index: Tensor, stream: torch.cuda.Stream) -> tuple[Tensor, torch.cuda.Event]:
        if index.device.type != "cpu":
            current = torch.cuda.current_stream(self.device)
            return index.contiguous(), current.record_event()
        # PyTorch's allocator keeps this pinned memory until the copy that it has seen is over.
        pinned = index.pin_memory()
        with torch.inference_mode(False), torch.cuda.stream(stream):
            return pinned.to(self.device, non_blocking=True), stream.record_event()


class TransferEngine(Engine):
    """Moves rows for the histories of one model.

    Args:
        io: ``"serial"`` moves rows when they are asked for; ``"concurrent"`` lets transfers run
            beside the computation, with equal results; ``"none"`` moves nothing, which is wrong on
            purpose: the upper bound for benchmarks.
        pool_size: Upper bound of the pinned buffers that a history's rows pass through on their way
            to a GPU, where it can't read them itself. (default: 2)
        threads: The number of workers. (default: a quarter of the cores, from 2 to 4)
    """

    def __init__(
        self, io: str = "concurrent", pool_size: int | None = None, threads: int | None = None
    ) -> None:
        # Two lanes at least may wait for a disk or a network at the same time.
        super().__init__(max(2, min(4, num_cores() // 4)) if threads is None else threads)
        self.io = check_io(io)
        self.pool_size = pool_size
        self.moved_bytes = 0
        self.pool = BufferPool()
        self._lanes = itertools.count()
        self._streams: dict[torch.device, Streams] = {}

    def new_lane(self) -> int:
        """Return a lane of its own, for a history."""
        return next(self._lanes)

    def streams(self, device: torch.device) -> Streams:
        """Return the streams of all histories on a CUDA device."""
        if device not in self._streams:
            self._streams[device] = Streams(device)
        return self._streams[device]

    def __deepcopy__(self, memo: dict[int, object]) -> TransferEngine:
        return TransferEngine(self.io, self.pool_size, self.threads)

    def __reduce__(self) -> tuple[type[TransferEngine], tuple[str, int | None, int]]:
        return TransferEngine, (self.io, self.pool_size, self.threads)
