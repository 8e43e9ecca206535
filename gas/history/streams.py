"""What the histories of a model share on one device: two streams, and the ids of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

# Row ids on devices, with the event of their arrival; kept by who asks several histories for them.
Copies = dict[torch.device, tuple[Tensor, torch.cuda.Event]]


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
        """Row ids on the device, for a stream.

        Args:
            index: The ids, of shape ``[n]``, int64, there or on the CPU.
            stream: Who reads them.
            copies: Those that were made before, and will be kept. (``None``: nobody asks again)
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
