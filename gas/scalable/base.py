"""Histories and the engine that moves rows: the base of all models."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch_geometric.nn import MessagePassing

from gas.graph import Adjacency
from gas.history import (
    History,
    HistoryFactory,
    Staleness,
    TransferEngine,
    check_io,
    measure_staleness,
)
from gas.native import check_integer, warn
from gas.nn import FusedConv, fuse
from gas.scalable.exact import Watch


class HistoryModel(torch.nn.Module):
    """A model with histories.

    * ``histories``: one for each layer's output that others read.
    * ``view_histories``: those of each view, where views have histories of their own.
    """

    histories: Sequence[History]
    view_histories: Sequence[Sequence[History]] | None
    num_nodes: Any
    _engine: TransferEngine
    _factory: HistoryFactory
    _is_static = False  # Forward does the same of every batch, whatever is in it.

    def __init__(self) -> None:
        super().__init__()
        self._is_proven = False  # A batch has gone through forward and filled every history.
        self._takes_fused: bool | None = None  # Not looked at yet.
        self._watch: Watch | None = None

    def _make_histories(self, folder: str = "") -> Sequence[History]:
        made = torch.nn.ModuleList(self._factory.make(self.num_nodes, self._engine, folder))
        return cast("Sequence[History]", made)

    def _all_histories(self) -> Iterator[History]:
        """Iterate over the histories, those of views included."""
        yield from itertools.chain(self.histories, *(self.view_histories or ()))

    @property
    def device(self) -> torch.device:
        """Device of the parameters, which is that of the computation."""
        modules: list[torch.nn.Module | None] = [self]
        while modules:  # The order of parameters(), which takes 60 calls to the first of them.
            module = modules.pop()
            if module is not None:
                for parameter in module._parameters.values():
                    if parameter is not None:
                        return parameter.device
                modules.extend(reversed(module._modules.values()))
        return torch.device("cpu")

    @property
    def _plain(self) -> torch.nn.Module:
        """The module that has the weights by the names that a checkpoint gives them."""
        return self

    @property
    def io(self) -> str:
        """Mode of transfers: ``"serial"``, ``"concurrent"`` or ``"none"``."""
        return self._engine.io

    @io.setter
    def io(self, io: str) -> None:
        self._engine.io = check_io(io)
        if io == "none":
            warn(
                "io='none' moves no rows of histories: results are wrong, on purpose, as the upper "
                "bound for benchmarks",
            )

    @property
    def _multiplies_sparse(self) -> bool:
        """Return whether layers of gas multiply sparse features by their non-zeros."""
        return False

    @contextlib.contextmanager
    def _without_histories(self) -> Iterator[None]:
        """Read and write no rows of histories in this context; outputs are wrong then.

        It is for measuring what a forward pass takes.
        """
        io, self._engine.io = self._engine.io, "none"
        try:
            yield
        finally:
            self._engine.io = io

    def _measure_ages(self) -> list[Staleness]:
        return [measure_staleness(layer, history) for layer, history in enumerate(self.histories)]

    def close(self) -> None:
        """Write what is under way, close the stores and end the transfer engine's workers."""
        with contextlib.ExitStack() as everything:  # What fails keeps nothing from being closed.
            everything.callback(self._engine.close)
            for history in self._all_histories():
                everything.callback(history.close)

    # Exactness ------------------------------------------------------------------------------------

    def _to_supported(self, adj_t: Any) -> Any:
        """Return an adjacency as the layers take it, after fusing those of PyG that can be."""
        if not isinstance(adj_t, Adjacency):
            return adj_t
        if self._takes_fused is None:
            layers = [each for each in fuse(self).modules() if isinstance(each, MessagePassing)]
            self._takes_fused = all(isinstance(layer, FusedConv) for layer in layers)
        return adj_t if self._takes_fused else adj_t.to_torch_sparse()

    def _watch_layers(
        self, adj_t: Any, batch_size: int | None, n_id: torch.Tensor | None
    ) -> contextlib.AbstractContextManager[None] | None:
        """Return a context that refuses inexact layers, ``None`` where no layer needs it."""
        if batch_size is None or n_id is None or batch_size == self.num_nodes:
            return None
        if self._watch is None or not self._is_proven:
            self._watch = Watch(self)
        if not self._watch.looks:
            return None
        kind, num_rows = self._kind(adj_t), n_id.numel()
        if not self._watch.is_needed(batch_size, num_rows, kind):
            return None
        return self._watch.batch(batch_size, num_rows, kind)

    def _kind(self, adj_t: Any) -> Hashable:
        """Return what decides which rows a norm is given in every pass; ``None`` if more does."""
        if not self._is_static or not type(self).__module__.startswith("gas."):  # Or a subclass.
            return None
        if isinstance(adj_t, torch.Tensor) and adj_t.layout == torch.strided:
            return "edge_index"
        return type(adj_t).__name__, adj_t.size(0) == adj_t.size(1)


def moved_bytes(model: HistoryModel) -> int:
    """Return the bytes of stored rows that were pulled from histories and pushed to them so far.

    Those that :mod:`gas.nn` reads where they are stored aren't moved.
    """
    return model._engine.moved_bytes


def idle_bytes(model: HistoryModel) -> int:
    """Return the bytes of buffers for rows of histories that wait for their next use."""
    return model._engine.pool.idle_bytes


def free_buffers(model: HistoryModel) -> None:
    """Give up these buffers, such as before other batches than the last ones."""
    model._engine.pool.clear()


def emb_device(model: HistoryModel) -> torch.device:
    """Return where the histories live."""
    return model.histories[0].device if model.histories else torch.device("cpu")


def set_banks(model: HistoryModel, number: int) -> None:
    """Give a model histories for so many views: copies of its own, where there were none."""
    banks = list(model.view_histories or ())
    for bank in banks[number:]:
        for history in bank:
            history.close()
    factory = dataclasses.replace(model._factory, path=None)
    while len(banks) < number:
        made = torch.nn.ModuleList(factory.clone(model.histories, model._engine)).to(model.device)
        banks.append(cast("Sequence[History]", made))
    modules = torch.nn.ModuleList(cast("list[torch.nn.Module]", banks[:number]))
    if not number:
        model._modules.pop("view_histories", None)
    model.view_histories = cast("Sequence[Sequence[History]]", modules) if number else None


def widths_of(hidden_channels: int | Sequence[int], num_layers: int) -> list[int]:
    """Return the width of every history."""
    if isinstance(hidden_channels, Sequence):
        widths = list(hidden_channels)
    else:
        widths = [hidden_channels] * (num_layers - 1)
    for width in widths:
        check_integer("hidden_channels", width, 0)
    if len(widths) != num_layers - 1:
        raise ValueError(
            f"'hidden_channels' has {len(widths)} widths, expected one for each of the "
            f"{num_layers - 1} histories of {num_layers} layers"
        )
    return widths
