"""Refuse layers that aren't exact on mini-batches, or restrict them to in-batch rows."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gas.nn import reason_inexact

# Layers that process a sequence, which might be the batch's nodes by mistake.
SEQUENTIAL = (torch.nn.MultiheadAttention, torch.nn.RNNBase)


def _refuse(name: str, reason: str, layer: torch.nn.Module, _: Any) -> None:
    raise ValueError(f"'{name}' ({type(layer).__name__}) isn't exact on mini-batches: it {reason}")


def _refuse_nodes_as_sequence(
    name: str, sizes: tuple[int, int], layer: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> None:
    """Refuse a sequence layer that runs along the batch's nodes, not along a node's sequence."""
    x = next(iter((*args, *given.values())), None)
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        return
    along = 1 if x.dim() == 3 and layer.batch_first else 0
    if x.size(along) in sizes and (x.dim() == 2 or x.size(1 - along) not in sizes):
        reason = (
            f"goes along the {x.size(along)} nodes of the batch, as along a sequence: give each "
            "node's own sequence, [num_nodes, length, channels] with batch_first=True"
        )
        _refuse(name, reason, layer, args)


class ExactnessGuard:
    """Refuse layers whose outputs on mini-batches would differ from those on the whole graph.

    Args:
        model: The model.
        own: Its batch norms that need no check, as only in-batch rows ever reach them.
    """

    def __init__(self, model: torch.nn.Module, own: Iterable[torch.nn.Module] = ()) -> None:
        self._inexact = [
            (name, layer, reason)
            for name, layer in model.named_modules()
            if (reason := reason_inexact(layer))
        ]
        self._sequential = [
            (name, layer) for name, layer in model.named_modules() if isinstance(layer, SEQUENTIAL)
        ]
        known = {part for norm in own for part in norm.modules()}
        norms = (layer for layer in model.modules() if isinstance(layer, _BatchNorm))
        self._norms = [norm for norm in norms if norm not in known]
        # Norms that were called with in-batch rows or rows of edges, by the kind of batch.
        self._safe: set[tuple[Hashable, torch.nn.Module]] = set()

    @property
    def has_layers(self) -> bool:
        """Return whether the model has layers to check."""
        return bool(self._inexact or self._sequential or self._norms)

    def watch_batch(
        self, batch_size: int, num_rows: int, kind: Hashable = None
    ) -> contextlib.AbstractContextManager[None] | None:
        """Return a context that checks the layers of a forward pass; ``None`` if none needs it.

        Args:
            batch_size: The number of in-batch nodes.
            num_rows: The number of nodes of the batch, halo included.
            kind: A key of batches for which a norm is called with the same sort of rows. A norm
                that was called with other rows than those of all nodes isn't checked again for
                this kind, even if it gets as many rows by chance. (default: unknown)

        Raises:
            ValueError: In the context, when a layer that isn't exact is called, naming it.
        """
        safe = self._safe if kind is not None else ()
        norms = [
            norm
            for norm in (self._norms if num_rows > batch_size else ())
            if norm.training and (kind, norm) not in safe
        ]
        if not (self._inexact or self._sequential or norms):
            return None
        return self._watch(norms, batch_size, num_rows, kind)

    @contextlib.contextmanager
    def _watch(
        self, norms: Sequence[torch.nn.Module], batch_size: int, num_rows: int, kind: Hashable
    ) -> Iterator[None]:
        """Check the layers, with these norms, in this context."""
        pairs = [(norm, _OwnStatistics(batch_size, num_rows)) for norm in norms]
        with contextlib.ExitStack() as hooks:
            for name, layer, reason in self._inexact:
                refuse = partial(_refuse, name, reason)
                hooks.callback(layer.register_forward_pre_hook(refuse).remove)
            for name, layer in self._sequential:
                refuse = partial(_refuse_nodes_as_sequence, name, (batch_size, num_rows))
                hook = layer.register_forward_pre_hook(refuse, with_kwargs=True)
                hooks.callback(hook.remove)
            for layer, statistics in pairs:
                hooks.callback(layer.register_forward_pre_hook(statistics.select_own).remove)
                hooks.callback(layer.register_forward_hook(statistics.append_halo).remove)
            yield
        for layer, statistics in pairs:
            if statistics.saw_own and not statistics.saw_halo:
                self._safe.add((kind, layer))


class _OwnStatistics:
    """Hooks that compute a batch norm's statistics from in-batch rows alone.

    Halo rows are normalised by the same statistics. In a square batch they are empty and must not
    count as nodes.
    """

    def __init__(self, batch_size: int, num_rows: int) -> None:
        self._batch_size, self._num_rows = batch_size, num_rows
        self._x: list[Tensor | None] = []
        self.saw_own = self.saw_halo = False

    def select_own(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the norm's arguments with in-batch rows alone."""
        x = args[0] if args else None
        if not isinstance(x, Tensor) or x.dim() != 2 or x.size(0) != self._num_rows:
            self.saw_own = True
            self._x.append(None)
            return None
        self._x.append(x)
        self.saw_halo = True
        return (x[: self._batch_size], *args[1:])

    def append_halo(self, layer: Any, _: tuple[Any, ...], out: Tensor) -> Tensor | None:
        """Append the normalised halo rows to the norm's output."""
        x = self._x.pop()
        if x is None:
            return None
        own, halo = x[: self._batch_size], x[self._batch_size :]
        spread = (own.var(dim=0, unbiased=False) + layer.eps).sqrt()
        rest = (halo - own.mean(dim=0)) / spread
        if layer.affine:
            rest = rest * layer.weight + layer.bias
        return torch.cat([out, rest])
