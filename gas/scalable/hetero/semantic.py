"""HAN's attention over relations, which weighs them by means over all nodes of a type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module

from gas.graph import EdgeType
from gas.history import History


def mean_of(kind: str, rows: Tensor) -> Tensor:
    """Return the mean of all rows, zero of none."""
    return rows.sum(0) / max(1, rows.size(0))


class HANConv(pyg.HANConv):
    """:class:`torch_geometric.nn.HANConv`, which asks for the means that it weighs relations by."""

    mean_over_nodes = staticmethod(mean_of)
    """The mean over all nodes of a type, of which rows of scores are given, ``[n, relations]``."""

    def forward(
        self,
        x_dict: Mapping[str, Tensor],
        edge_index_dict: Mapping[EdgeType, Tensor],
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        """See PyG."""
        if return_semantic_attention_weights:
            return super().forward(x_dict, edge_index_dict, True)
        shape = -1, self.heads, self.out_channels // self.heads
        h = {kind: self.proj[kind](x).view(shape) for kind, x in x_dict.items()}
        outs: dict[str, list[Tensor]] = {kind: [] for kind in x_dict}
        for (src, name, dst), edges in edge_index_dict.items():
            key, x = "__".join((src, name, dst)), (h[src], h[dst])
            lins = self.lin_src[key], self.lin_dst[key]
            alpha = tuple((rows * lin).sum(-1) for rows, lin in zip(x, lins, strict=True))
            outs[dst].append(self.propagate(edges, x=x, alpha=alpha).relu())
        return {kind: self._weighed(kind, rows) for kind, rows in outs.items()}

    def _weighed(self, kind: str, outs: list[Tensor]) -> Tensor | None:
        if len(outs) < 2:
            return outs[0] if outs else None
        rows = torch.stack(outs)
        scores = (self.q * self.k_lin(rows).tanh()).sum(-1).t()
        weight = self.mean_over_nodes(kind, scores).softmax(0)
        return (weight[:, None, None] * rows).sum(0)


def ask_for_means(net: Module) -> Module:
    """Make the layers of PyG such ones, in place."""
    for layer in net.modules():
        if type(layer) is pyg.HANConv:
            layer.__class__ = HANConv
    return net


class Totals:
    """The sums of all rows of histories, kept up to date by what is pushed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Tensor]] = {}  # With what tells whether they still are.

    def of(self, position: int, history: History) -> Tensor:
        """Return the sum of a history's rows, of shape ``[width]``, float64."""
        known = self._known.get(position)
        if known is None or known[0] != _state(history):
            known = _state(history), history.emb.double().sum(0)
            self._known[position] = known
        return known[1]

    def set(self, position: int, history: History, total: Tensor) -> None:
        """Note the sum after a push."""
        self._known[position] = _state(history), total


def _state(history: History) -> tuple[Any, ...]:
    return history.changes, history.num_resets
