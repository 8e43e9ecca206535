"""The mini-batches of an epoch: the parts of each, and their order, which a checkpoint resumes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch_geometric.data import Data, HeteroData

from gas.graph import BATCH_SIZE
from gas.loader.part_sampler import PartSampler
from gas.native import check_integer


class ResumableBatchSampler(Sampler[list[int]]):
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
        """Return the epoch has ended; that in which it was run, if there was one, goes on."""
        self.epoch, self.done = before
        self.resumes = False

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`."""
        return {"epoch": self.epoch, "done": 0 if self.epoch is None else self.done}

    def restore(self, state: dict[str, Any], of_sampler: dict[str, Any] | None = None) -> None:
        """Go on in an epoch, if one had begun, and with the state of the sampler of parts."""
        if self.sampler is not None and of_sampler is not None:
            self.sampler.load_state_dict(of_sampler)
        self.epoch, self.done = state["epoch"], state["done"]
        self.resumes = self.epoch is not None


def check_order(state: Any, num_parts: int) -> None:
    """Refuse what is no epoch of so many parts.

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


def check_state(
    loader: str, mine: Mapping[str, Any], state: Any, sampler: PartSampler | None
) -> None:
    """Refuse the state of a loader of another graph or partition.

    Args:
        loader: The name of the loader's class.
        mine: Its own state.
        state: What was saved.
        sampler: What draws its parts, if that has a state.

    Raises:
        ValueError: Saying what differs.
    """
    may = {"sampler"}
    if not isinstance(state, Mapping) or state.keys() - may != mine.keys() - may:
        raise ValueError(f"'loader' is a {loader}, but what was saved was none")
    if state["graph"] != mine["graph"] or not torch.equal(state["parts"], mine["parts"]):
        raise ValueError(
            "'loader' has another graph, or other parts of it, than what was saved: cut the "
            "graph as it was cut then, of which perm and parts were saved"
        )
    if (state.get("sampler") is None) != (sampler is None):
        raise ValueError(
            f"'loader' has {'no' if sampler is None else 'a'} PartSampler, other than what was "
            "saved: make it as it was"
        )
    if sampler is not None:
        sampler.check_state(state["sampler"])
    if state["batches"] != mine["batches"]:
        raise ValueError(
            f"'loader' has {mine['batches']} mini-batches an epoch, but it had "
            f"{state['batches']} when it was saved: choose 'batch_size' as it was then"
        )
    check_order(state["order"], mine["parts"].numel() - 1)
    if (state["generator"] is None) != (mine["generator"] is None):
        raise ValueError(
            f"'loader' has {'a' if state['generator'] is None else 'no'} generator, other than "
            "what was saved: make it as it was"
        )
    if (state["augmentation"] is None) != (mine["augmentation"] is None):
        raise ValueError(
            f"'loader' has {'an' if state['augmentation'] is None else 'no'} augmentation, "
            "other than what was saved: make it as it was"
        )


def choose_batch_size(
    data: Data | HeteroData, batch_size: int | None, has_ptr: bool, options: Mapping[str, Any]
) -> int:
    """Return the number of parts per mini-batch: the given one, or what the graph remembers.

    Args:
        data: The graph.
        batch_size: The given number, if there is one.
        has_ptr: Whether the parts are others than those that the graph has.
        options: Those of the ``DataLoader``: a ``batch_sampler`` takes no other number than 1.

    Raises:
        ValueError: If the given number is none.
    """
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1, expected="a whole number of parts, at least 1")
        return batch_size
    known = getattr(data, BATCH_SIZE, None)
    if has_ptr or options.get("batch_sampler") is not None:
        return 1
    return known if isinstance(known, int) and known >= 1 else 1


def remember_batch_size(data: Data | HeteroData, batch_size: int | None, has_ptr: bool) -> None:
    """Note a number that a loader of the graph's own parts was given: the default of the next."""
    if batch_size is not None and not has_ptr:
        setattr(data, BATCH_SIZE, batch_size)
