"""PyG's layers with a function on edges, on the fused operators; see :mod:`gas.nn.conv`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

from gas.nn.adjacency import Adjacency
from gas.nn.conv import _Fused
from gas.nn.edge_conv import activation_of, edge_conv


class EdgeConv(_Fused, pyg.EdgeConv):
    """:class:`torch_geometric.nn.EdgeConv`, with products for nodes instead of edges.

    Where ``nn`` is a linear layer, or one and an activation of :func:`gas.nn.edge_conv`. The
    difference ``x_j - x_i`` is taken after the product, which rounds more coarsely where positions
    are large and differences small.
    """

    nn: torch.nn.Module

    def _unsupported(self, kwargs: dict[str, Any]) -> str:
        reason = super()._unsupported(kwargs)
        if reason:
            return reason
        layers = _layers(self.nn)
        if type(layers[0]) not in (torch.nn.Linear, pyg.Linear) or len(layers) > 2:
            return "'nn' is more than a linear layer and an activation"
        if any(m._forward_hooks or m._forward_pre_hooks for m in (self.nn, *layers)):
            return "'nn' has hooks"
        try:
            activation_of(layers[1] if len(layers) > 1 else None, self._reduce)
        except ValueError as error:
            return str(error)
        return ""

    def _propagate(self, adj: Adjacency, x: Any, **_: Any) -> Tensor:
        linear, activation = (*_layers(self.nn), None)[:2]
        by_target, by_difference = linear.weight.chunk(2, dim=1)
        target = F.linear(x[1], by_target - by_difference, linear.bias)
        source = F.linear(x[0], by_difference)
        return edge_conv(adj, target, source, activation, self._reduce)


def _layers(module: Any) -> list[Any]:
    return list(module) if type(module) is torch.nn.Sequential and len(module) else [module]
