"""What isn't exact on a mini-batch: refused, or made to look at the in-batch rows alone.

A batch knows all edges into its own nodes, and nothing else of its halo: neither degrees nor second
neighbours. A layer that needs them computes something else than on the whole graph, without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

NORMALISE = (
    "normalise the whole graph before it is cut into parts, T.GCNNorm()(data), and build the layer "
    "with normalize=False"
)
BY_MEAN = "leave 'symnorm' out of its aggregators"
UNROLL = "propagate once per layer, with push_and_pull in between"
BY_NODE = "use a norm that treats each node alike, such as BatchNorm or LayerNorm(mode='node')"


def _degrees(layer: Any) -> str:
    if not layer.normalize:
        return ""
    return f"normalises by the degrees of the batch, not of the graph: {NORMALISE}"


def _hops(layer: Any, hops: int) -> str:
    return f"propagates {hops} times within the batch: {UNROLL}" if hops > 1 else ""


def _whole_graph(layer: Any) -> str:
    return f"normalises by the statistics of the batch's nodes, halo included: {BY_NODE}"


# By class of PyG: why a layer isn't exact on batches, and the cure; empty for one that is.
INEXACT: dict[type[torch.nn.Module], Callable[[Any], str]] = {
    pyg.GCNConv: _degrees,
    pyg.GCN2Conv: _degrees,
    pyg.LGConv: _degrees,
    pyg.FAConv: _degrees,
    pyg.PDNConv: _degrees,
    pyg.TAGConv: lambda layer: _degrees(layer) or _hops(layer, layer.K),
    pyg.APPNP: lambda layer: _degrees(layer) or _hops(layer, layer.K),
    pyg.SGConv: lambda _: "normalises by the degrees of the batch: use gas.models.GCN",
    pyg.SSGConv: lambda _: "normalises by the degrees of the batch: use gas.models.APPNP",
    pyg.ARMAConv: lambda _: "normalises by the degrees of the batch: use gas.models.GCN",
    pyg.EGConv: lambda layer: (
        f"normalises by the degrees of the batch: {BY_MEAN}"
        if "symnorm" in layer.aggregators
        else ""
    ),
    pyg.ChebConv: lambda _: "needs the Laplacian of the whole graph: use gas.models.GCN",
    pyg.GraphNorm: _whole_graph,
    pyg.PairNorm: _whole_graph,
    pyg.DiffGroupNorm: _whole_graph,
    pyg.MeanSubtractionNorm: _whole_graph,
    pyg.InstanceNorm: _whole_graph,
    pyg.GraphSizeNorm: _whole_graph,
    pyg.LayerNorm: lambda layer: _whole_graph(layer) if layer.mode == "graph" else "",
}


def why_inexact(layer: torch.nn.Module) -> str:
    """Why a layer's result on a mini-batch differs from that on the graph; empty if it doesn't."""
    reasons = (INEXACT[cls](layer) for cls in type(layer).__mro__ if cls in INEXACT)
    return next(reasons, "")


def _refuse(name: str, reason: str, layer: torch.nn.Module, _: Any) -> None:
    raise ValueError(f"'{name}' ({type(layer).__name__}) isn't exact on mini-batches: it {reason}")


class Watch:
    """Sees to it that the layers of a model give on mini-batches what they give on the graph.

    Args:
        model: The model; what it is made of may change later.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._inexact = [
            (name, layer, reason)
            for name, layer in model.named_modules()
            if (reason := why_inexact(layer))
        ]
        self._norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
        # Norms that were given a batch's own rows, or rows of edges, by the kind of batch.
        self._at_ease: set[tuple[Hashable, torch.nn.Module]] = set()

    def is_needed(self, batch_size: int, num_rows: int, kind: Hashable) -> bool:
        """Whether it has to look at a forward pass.

        Args:
            batch_size: See :meth:`batch`.
            num_rows: See :meth:`batch`.
            kind: See :meth:`batch`.
        """
        return bool(self._inexact) or (num_rows > batch_size and bool(self._uneasy(kind)))

    def _uneasy(self, kind: Hashable) -> list[torch.nn.Module]:
        """Norms in training that may be given rows of the halo."""
        at_ease = self._at_ease if kind is not None else ()
        return [norm for norm in self._norms if norm.training and (kind, norm) not in at_ease]

    @contextlib.contextmanager
    def batch(self, batch_size: int, num_rows: int, kind: Hashable = None) -> Iterator[None]:
        """Watches over a forward pass of a batch of ``num_rows`` nodes, ``batch_size`` its own.

        Batches of one ``kind`` give a norm the same sort of rows in every pass: one that was given
        others than the nodes' is let alone, even if they are as many by chance. ``None``: unknown.

        Raises:
            ValueError: When a layer that isn't exact is called, naming it.
        """
        norms = self._uneasy(kind)
        spares = [_OwnStatistics(batch_size, num_rows) for _ in norms if num_rows > batch_size]
        with contextlib.ExitStack() as hooks:
            for name, layer, reason in self._inexact:
                refuse = partial(_refuse, name, reason)
                hooks.callback(layer.register_forward_pre_hook(refuse).remove)
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
