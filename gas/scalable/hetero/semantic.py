"""HAN's attention over relations, whose weights are means over all nodes of a type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module

from gas.graph import EdgeType
from gas.history import History


def mean_rows(kind: str, rows: Tensor) -> Tensor:
    """Return the mean of all rows, or zero if there are none."""
    return rows.sum(0) / max(1, rows.size(0))


class HANConv(pyg.HANConv):
    """:class:`torch_geometric.nn.HANConv` whose means over all nodes can be replaced."""

    mean_over_nodes = staticmethod(mean_rows)
    """Return the mean of the scores of all nodes of a type, ``[n, relations]``."""

    def forward(
        self,
        x_dict: Mapping[str, Tensor],
        edge_index_dict: Mapping[EdgeType, Tensor],
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        """See :class:`torch_geometric.nn.HANConv`."""
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
        return {kind: self._combine_relations(kind, rows) for kind, rows in outs.items()}

    def _combine_relations(self, kind: str, outs: list[Tensor]) -> Tensor | None:
        """Return the weighted sum of the outputs of a type's relations."""
        if len(outs) < 2:
            return outs[0] if outs else None
        rows = torch.stack(outs)
        scores = (self.q * self.k_lin(rows).tanh()).sum(-1).t()
        weight = self.mean_over_nodes(kind, scores).softmax(0)
        return (weight[:, None, None] * rows).sum(0)


def replace_han_convs(net: Module) -> Module:
    """Replace PyG's ``HANConv`` by that of this module, in place."""
    for layer in net.modules():
        if type(layer) is pyg.HANConv:
            layer.__class__ = HANConv
    return net


class Totals:
    """The sums of all rows of histories, which are updated with each push."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Tensor]] = {}  # With the history's version.

    def of(self, position: int, history: History) -> Tensor:
        """Return the sum of a history's rows, of shape ``[width]``, float64."""
        known = self._known.get(position)
        if known is None or known[0] != _history_version(history):
            known = _history_version(history), history.emb.double().sum(0)
            self._known[position] = known
        return known[1]

    def set(self, position: int, history: History, total: Tensor) -> None:
        """Store the sum after a push."""
        self._known[position] = _history_version(history), total


def _history_version(history: History) -> tuple[Any, ...]:
    return history.changes, history.num_resets
