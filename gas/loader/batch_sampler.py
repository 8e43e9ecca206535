"""Order of the mini-batches of an epoch, which checkpoints save; batch sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch_geometric.data import Data, HeteroData

from gas.graph import BATCH_SIZE
from gas.loader.part_sampler import PartSampler
from gas.native import check_integer


@dataclass(eq=False)
class Epoch:
    """The mini-batches of an epoch, lists of parts, and how many of them were yielded."""

    batches: list[list[int]]
    done: int = 0
    outer: Epoch | None = None  # That of the loop, over the same loader, in which it began.
    has_ended: bool = False


class ResumableBatchSampler(Sampler[list[int]]):
    """Sampler that draws all mini-batches of an epoch at its start, and counts those yielded.

    Args:
        batches: Iterable over the mini-batches of an epoch, lists of parts.
        ptr: The parts of the graph, of shape ``[num_parts + 1]``.

    Raises:
        ValueError: If its :class:`PartSampler` is for other parts.
    """

    def __init__(self, batches: Iterable[list[int]], ptr: Tensor) -> None:
        self.batches, self.num_parts = batches, ptr.numel() - 1
        sampler = getattr(batches, "sampler", None)
        self.sampler = sampler if isinstance(sampler, PartSampler) else None
        if self.sampler is not None and not torch.equal(self.sampler.ptr, ptr.cpu()):
            raise ValueError(
                f"'sampler' is {self.sampler}, of other parts than the {ptr.numel() - 1} of the "
                "graph: make it of the same graph, PartSampler(graph)"
            )
        self.epoch: Epoch | None = None  # The current one.
        self.resumes = False  # Whether the next epoch is the rest of the current one.
        # The current epoch of a loop over a PrefetchLoader, which has yielded one batch fewer.
        self.received: Epoch | None = None

    def __len__(self) -> int:
        return len(cast(Sized, self.batches))

    def __iter__(self) -> Iterator[list[int]]:
        self.received = None  # Of a loop that was left, but whose iterator still exists.
        if not hasattr(self.batches, "__len__"):  # It may be infinite.
            yield from self.batches
            return
        if not self.resumes or self.epoch is None:
            batches = [[int(part) for part in parts] for parts in self.batches]
            self.epoch = Epoch(batches, outer=self.epoch)
        epoch = self.epoch
        for parts in epoch.batches:
            for part in parts:
                if not 0 <= part < self.num_parts:
                    raise IndexError(
                        f"the sampler draws part {part}, expected parts in [0, {self.num_parts})"
                    )
            if len({*parts}) < max(len(parts), 1):
                raise ValueError(
                    f"the sampler draws the batch {parts}, expected one part or more, each once"
                )
        self.resumes = False
        yield from epoch.batches[epoch.done :]

    def end(self, epoch: Epoch) -> None:
        """End an epoch; the current one is then the innermost that goes on."""
        epoch.has_ended = True
        while self.epoch is not None and self.epoch.has_ended:
            self.epoch, self.resumes = self.epoch.outer, False

    def forget(self) -> None:
        """Begin anew with the next epoch."""
        self.epoch, self.resumes = None, False

    def state(self) -> dict[str, Any]:
        """Return the state for :meth:`restore`."""
        epoch = self.epoch if self.received is None else self.received
        if epoch is None:
            return {"epoch": None, "done": 0}
        return {"epoch": epoch.batches, "done": epoch.done}

    def restore(self, state: dict[str, Any], of_sampler: dict[str, Any] | None = None) -> None:
        """Restore the order of an epoch, and the state of the :class:`PartSampler`."""
        if self.sampler is not None and of_sampler is not None:
            self.sampler.load_state_dict(of_sampler)
        saved = state["epoch"]
        self.epoch = None if saved is None else Epoch(saved, state["done"])
        self.received, self.resumes = None, saved is not None


def check_order(state: Any, num_parts: int) -> None:
    """Refuse a saved order that isn't an epoch of ``num_parts`` parts.

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
        mine: The state of the loader.
        state: The saved state.
        sampler: The :class:`PartSampler` of the loader, if it has one.

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
    _check_presence("a", "PartSampler", state.get("sampler"), sampler)
    if sampler is not None:
        sampler.check_state(state["sampler"])
    if state["batches"] != mine["batches"]:
        raise ValueError(
            f"'loader' has {mine['batches']} mini-batches an epoch, but it had "
            f"{state['batches']} when it was saved: choose 'batch_size' as it was then"
        )
    check_order(state["order"], mine["parts"].numel() - 1)
    _check_presence("a", "generator", state["generator"], mine["generator"])
    _check_presence("an", "augmentation", state["augmentation"], mine["augmentation"])


def _check_presence(article: str, what: str, saved: object, mine: object) -> None:
    """Refuse a loader with something that was saved without it, or the other way round."""
    if (saved is None) != (mine is None):
        raise ValueError(
            f"'loader' has {'no' if mine is None else article} {what}, other than what was saved: "
            "make it as it was"
        )


def choose_batch_size(
    data: Data | HeteroData, batch_size: int | None, has_ptr: bool, options: Mapping[str, Any]
) -> int:
    """Return the number of parts per mini-batch: the argument, or that of the last loader.

    Args:
        data: The graph.
        batch_size: The argument, if it is given.
        has_ptr: Whether ``ptr`` is given, so that the parts may differ from those of the graph.
        options: Arguments of the ``DataLoader``: with a ``batch_sampler`` the result is 1.

    Raises:
        ValueError: If the argument is invalid.
    """
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1, expected="a whole number of parts, at least 1")
        return batch_size
    known = getattr(data, BATCH_SIZE, None)
    if has_ptr or options.get("batch_sampler") is not None:
        return 1
    return known if isinstance(known, int) and known >= 1 else 1


def remember_batch_size(data: Data | HeteroData, batch_size: int | None, has_ptr: bool) -> None:
    """Set ``data.batch_size``, the default of later loaders, if the parts are the graph's."""
    if batch_size is not None and not has_ptr:
        setattr(data, BATCH_SIZE, batch_size)
