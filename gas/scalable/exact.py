"""Layers that aren't exact on mini-batches: refused, or restricted to in-batch rows."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from gas.nn import reason_inexact

# What looks along a sequence, which may be one of nodes by mistake.
SEQUENTIAL = (torch.nn.MultiheadAttention, torch.nn.RNNBase)


def _refuse(name: str, reason: str, layer: torch.nn.Module, _: Any) -> None:
    raise ValueError(f"'{name}' ({type(layer).__name__}) isn't exact on mini-batches: it {reason}")


def _refuse_nodes(
    name: str, sizes: tuple[int, int], layer: Any, args: tuple[Any, ...], given: dict[str, Any]
) -> None:
    """Refuse a sequence of the batch's nodes; a batch of as many sequences is one for each."""
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


class Watch:
    """Sees to it that the layers of a model give on mini-batches what they give on the graph.

    Args:
        model: The model; what it is made of may change later.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._inexact = [
            (name, layer, reason)
            for name, layer in model.named_modules()
            if (reason := reason_inexact(layer))
        ]
        self._sequential = [
            (name, layer) for name, layer in model.named_modules() if isinstance(layer, SEQUENTIAL)
        ]
        self._norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
        # Norms that were given a batch's own rows, or rows of edges, by the kind of batch.
        self._at_ease: set[tuple[Hashable, torch.nn.Module]] = set()

    @property
    def looks(self) -> bool:
        """Return whether the model has a layer to watch."""
        return bool(self._inexact or self._sequential or self._norms)

    def is_needed(self, batch_size: int, num_rows: int, kind: Hashable) -> bool:
        """Return whether it has to look at a forward pass.

        Args:
            batch_size: See :meth:`batch`.
            num_rows: See :meth:`batch`.
            kind: See :meth:`batch`.
        """
        norms = num_rows > batch_size and bool(self._norms_that_see_halo(kind))
        return bool(self._inexact) or bool(self._sequential) or norms

    def _norms_that_see_halo(self, kind: Hashable) -> list[torch.nn.Module]:
        """Norms in training that may be given rows of the halo."""
        at_ease = self._at_ease if kind is not None else ()
        return [norm for norm in self._norms if norm.training and (kind, norm) not in at_ease]

    @contextlib.contextmanager
    def batch(self, batch_size: int, num_rows: int, kind: Hashable = None) -> Iterator[None]:
        """Watch over a forward pass of a batch of ``num_rows`` nodes, ``batch_size`` its own.

        Batches of one ``kind`` give a norm the same sort of rows in every pass: one that was given
        others than the nodes' is let alone, even if they are as many by chance. ``None``: unknown.

        Raises:
            ValueError: When a layer that isn't exact is called, naming it.
        """
        norms = self._norms_that_see_halo(kind)
        spares = [_OwnStatistics(batch_size, num_rows) for _ in norms if num_rows > batch_size]
        with contextlib.ExitStack() as hooks:
            for name, layer, reason in self._inexact:
                refuse = partial(_refuse, name, reason)
                hooks.callback(layer.register_forward_pre_hook(refuse).remove)
            for name, layer in self._sequential:
                refuse = partial(_refuse_nodes, name, (batch_size, num_rows))
                hook = layer.register_forward_pre_hook(refuse, with_kwargs=True)
                hooks.callback(hook.remove)
            for layer, spare in zip(norms, spares, strict=False):
                hooks.callback(layer.register_forward_pre_hook(spare.before).remove)
                hooks.callback(layer.register_forward_hook(spare.after).remove)
            yield
        for layer, spare in zip(norms, spares, strict=False):
            if spare.saw_own and not spare.saw_halo:
                self._at_ease.add((kind, layer))


class _OwnStatistics:
    """Lets batch norm count a batch's own rows alone; halo rows are normalised by the same.

    Those of a square batch's convolution hold nothing, and would count as nodes.
    """

    def __init__(self, batch_size: int, num_rows: int) -> None:
        self._batch_size, self._num_rows = batch_size, num_rows
        self._x: list[Tensor | None] = []
        self.saw_own = self.saw_halo = False

    def before(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0] if args else None
        if not isinstance(x, Tensor) or x.dim() != 2 or x.size(0) != self._num_rows:
            self.saw_own = True
            self._x.append(None)
            return None
        self._x.append(x)
        self.saw_halo = True
        return (x[: self._batch_size], *args[1:])

    def after(self, layer: Any, _: tuple[Any, ...], out: Tensor) -> Tensor | None:
        x = self._x.pop()
        if x is None:
            return None
        own, halo = x[: self._batch_size], x[self._batch_size :]
        spread = (own.var(dim=0, unbiased=False) + layer.eps).sqrt()
        rest = (halo - own.mean(dim=0)) / spread
        if layer.affine:
            rest = rest * layer.weight + layer.bias
        return torch.cat([out, rest])
