"""``HistoryModel``: the histories of a model and the engine that transfers their rows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch_geometric.nn import MessagePassing

from gas.graph import Adjacency
from gas.history import (
    DriftCorrection,
    History,
    HistoryFactory,
    Staleness,
    TransferEngine,
    check_io,
    measure_staleness,
)
from gas.native import check_integer, warn
from gas.nn import FusedConv, fuse
from gas.scalable.exact import ExactnessGuard


class HistoryModel(torch.nn.Module):
    """A model with histories.

    * ``histories``: one for each layer's output that other nodes read.
    * ``view_histories``: those of each view, if views have separate histories.
    """

    histories: Sequence[History]
    view_histories: Sequence[Sequence[History]] | None
    num_nodes: Any
    _engine: TransferEngine
    _factory: HistoryFactory
    _calls: Any  # A gas.scalable.call.Calls.
    _planner: ClassVar[Callable[..., Any]]  # Set by gas.training, which builds on this.
    _returns_rows = True  # Whether it returns one tensor.
    _is_static = False  # Whether forward does the same for every batch, whatever it contains.
    _check_io = staticmethod(check_io)
    _drift: DriftCorrection | None = None  # In training that corrects stale rows.

    def __init__(self) -> None:
        super().__init__()
        self._is_proven = False  # Whether some batch has filled every history.
        self._supports_fused: bool | None = None  # Whether layers take an Adjacency, once known.
        self._watch: ExactnessGuard | None = None

    def _make_histories(self, folder: str = "") -> Sequence[History]:
        made = torch.nn.ModuleList(self._factory.make(self.num_nodes, self._engine, folder))
        return cast("Sequence[History]", made)

    def _all_histories(self) -> Iterator[History]:
        """Iterate over the histories, those of views included."""
        yield from itertools.chain(self.histories, *(self.view_histories or ()))

    @property
    def device(self) -> torch.device:
        """The device of the parameters, on which the model computes."""
        modules: list[torch.nn.Module | None] = [self]
        while modules:  # The order of parameters(), which takes 60 calls for its first one.
            module = modules.pop()
            if module is not None:
                for parameter in module._parameters.values():
                    if parameter is not None:
                        return parameter.device
                modules.extend(reversed(module._modules.values()))
        return torch.device("cpu")

    @property
    def _checkpoint_module(self) -> torch.nn.Module:
        """The module whose ``state_dict`` a checkpoint stores."""
        return self

    @property
    def io(self) -> str:
        """Mode of transfers: ``"serial"``, ``"concurrent"`` or ``"none"``."""
        return self._engine.io

    @io.setter
    def io(self, io: str) -> None:
        self._engine.io = self._check_io(io)
        if io == "none":
            warn(
                "io='none' moves no rows of histories: results are wrong, on purpose, as the upper "
                "bound for benchmarks",
            )

    @property
    def _supports_sparse_features(self) -> bool:
        """Return whether the first layers multiply only the non-zeros of sparse features."""
        return False

    @contextlib.contextmanager
    def _correct_drift(self, is_on: bool) -> Iterator[DriftCorrection]:
        """Measure the drift of stored rows in this context, and correct stale rows by it."""
        drift = DriftCorrection()
        self._drift = drift if is_on else None
        try:
            yield drift
        finally:
            self._drift = None

    @contextlib.contextmanager
    def _disable_transfers(self) -> Iterator[None]:
        """Skip pushes and pulls in this context, to measure a forward pass; outputs are wrong."""
        io, self._engine.io = self._engine.io, "none"
        try:
            yield
        finally:
            self._engine.io = io

    def staleness(self) -> list[Staleness]:
        """Return the staleness of each history."""
        return [measure_staleness(layer, history) for layer, history in enumerate(self.histories)]

    def reset_parameters(self) -> None:
        """Reset the histories; subclasses reset their parameters as well."""
        self._calls.order = None
        for history in self._all_histories():
            history.reset_parameters()

    def close(self) -> None:
        """Finish pending transfers, close the stores and stop the transfer engine's workers."""
        with contextlib.ExitStack() as stack:  # An error in one of them doesn't skip the others.
            stack.callback(self._engine.close)
            for history in self._all_histories():
                stack.callback(history.close)

    # Exactness ------------------------------------------------------------------------------------

    def _to_supported_layout(self, adj_t: Any) -> Any:
        """Return an adjacency in a layout that the layers support, which are fused if need be."""
        if not isinstance(adj_t, Adjacency):
            return adj_t
        if self._supports_fused is None:
            layers = [each for each in fuse(self).modules() if isinstance(each, MessagePassing)]
            self._supports_fused = all(isinstance(layer, FusedConv) for layer in layers)
        return adj_t if self._supports_fused else adj_t.to_torch_sparse()

    def _watch_layers(
        self, adj_t: Any, batch_size: int | None, n_id: torch.Tensor | None
    ) -> contextlib.AbstractContextManager[None] | None:
        """Return a context that refuses inexact layers, or ``None`` if no layer needs it."""
        if batch_size is None or n_id is None or batch_size == self.num_nodes:
            return None
        if self._watch is None or not self._is_proven:
            self._watch = ExactnessGuard(self, self._own_norms())
        if not self._watch.has_layers:
            return None
        return self._watch.watch_batch(batch_size, n_id.numel(), self._batch_kind(adj_t))

    def _own_norms(self) -> Iterable[torch.nn.Module]:
        """Return the batch norms that only in-batch rows reach, whatever the batch."""
        return ()

    def _batch_kind(self, adj_t: Any) -> Hashable:
        """Return a key of the batches for which norms get the same sort of rows, if known.

        Subclasses outside of gas may change forward, so that ``None`` is returned for them.
        """
        if not self._is_static or not type(self).__module__.startswith("gas."):
            return None
        if isinstance(adj_t, torch.Tensor) and adj_t.layout == torch.strided:
            return "edge_index"
        return type(adj_t).__name__, adj_t.size(0) == adj_t.size(1)


def moved_bytes(model: HistoryModel) -> int:
    """Return the bytes of stored rows that have been pulled and pushed so far.

    Rows that :mod:`gas.nn` reads in place aren't counted.
    """
    return model._engine.pulled_bytes + model._engine.pushed_bytes


def idle_bytes(model: HistoryModel) -> int:
    """Return the bytes of the transfer buffers that are unused at the moment."""
    return model._engine.pool.idle_bytes


def free_buffers(model: HistoryModel) -> None:
    """Free the unused transfer buffers, such as before batches of another size."""
    model._engine.pool.clear()


def emb_device(model: HistoryModel) -> torch.device:
    """Return the device of the histories."""
    return model.histories[0].device if model.histories else torch.device("cpu")


def set_banks(model: HistoryModel, number: int) -> None:
    """Give a model separate histories for ``number`` views; new ones are copies of its own."""
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


@contextlib.contextmanager
def preserve_modes(module: torch.nn.Module, mode: bool | None = None) -> Iterator[None]:
    """Restore the training mode of a module and of each of its submodules afterwards.

    Args:
        module: The module. Other threads can't call a model with its histories meanwhile.
        mode: Call ``module.train(mode)`` first. (default: leave the modes)

    Raises:
        RuntimeError: If another thread is calling a model with histories.
    """
    model = getattr(module, "_orig_mod", module)  # Of a compiled one.
    with model._calls.hold() if isinstance(model, HistoryModel) else contextlib.nullcontext():
        modes = [(each, each.training) for each in module.modules()]
        try:
            if mode is not None:
                module.train(mode)
            yield
        finally:
            for each, before in modes:
                each.training = before


def history_widths(hidden_channels: int | Sequence[int], num_layers: int) -> list[int]:
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
