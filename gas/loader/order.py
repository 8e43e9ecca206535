"""The order of an epoch's mini-batches, which a checkpoint can take up in the middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Sampler

from gas.loader.sampler import PartSampler


class BatchOrder(Sampler[list[int]]):
    """Draws the mini-batches of an epoch all at once, and knows how many were handed out.

    Args:
        batches: Draws an epoch: lists of parts.
        ptr: The parts of the graph, of shape ``[num_parts + 1]``.

    Raises:
        ValueError: If they are drawn by a sampler of other parts.
    """

    def __init__(self, batches: Iterable[list[int]], ptr: Tensor) -> None:
        self.batches = batches
        sampler = getattr(batches, "sampler", None)
        self.sampler = sampler if isinstance(sampler, PartSampler) else None  # Which has a state.
        if self.sampler is not None and not torch.equal(self.sampler.ptr, ptr.cpu()):
            raise ValueError(
                f"'sampler' is {self.sampler}, of other parts than the {ptr.numel() - 1} of the "
                "graph: make it of the same graph, PartSampler(graph)"
            )
        self.epoch: list[list[int]] | None = None  # That has begun.
        self.done = 0  # Of its batches.
        self.resumes = False  # Whether the next epoch is the rest of this one.

    def __len__(self) -> int:
        return len(cast(Sized, self.batches))

    def __iter__(self) -> Iterator[list[int]]:
        if not hasattr(self.batches, "__len__"):  # It may never end.
            yield from self.batches
            return
        if not self.resumes or self.epoch is None:
            self.epoch, self.done = [[int(part) for part in parts] for parts in self.batches], 0
        self.resumes = False
        yield from self.epoch[self.done :]

    def end(self, before: tuple[list[list[int]] | None, int] = (None, 0)) -> None:
        """The epoch has ended; that in which it was run, if there was one, goes on."""
        self.epoch, self.done = before
        self.resumes = False

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` takes."""
        return {"epoch": self.epoch, "done": 0 if self.epoch is None else self.done}

    def restore(self, state: dict[str, Any], of_sampler: dict[str, Any] | None = None) -> None:
        """Goes on in an epoch, if one had begun, and with the state of the sampler of parts."""
        if self.sampler is not None and of_sampler is not None:
            self.sampler.load_state_dict(of_sampler)
        self.epoch, self.done = state["epoch"], state["done"]
        self.resumes = self.epoch is not None


def check_order(state: Any, num_parts: int) -> None:
    """Refuses what is no epoch of so many parts.

    Raises:
        ValueError: Saying why.
    """
    epoch, done = (state.get(key) for key in ("epoch", "done")) if state else (None, None)
    batches = [] if epoch is None else epoch
    fits = isinstance(batches, list) and all(
        isinstance(parts, list)
        and parts
        and all(isinstance(part, int) and 0 <= part < num_parts for part in parts)
        for parts in batches
    )
    if not fits or not isinstance(done, int) or not 0 <= done <= len(batches):
        raise ValueError(
            f"'loader' has {num_parts} parts, and what was saved is no epoch of them: make the "
            "loader as it was when the checkpoint was written"
        )
