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
from gas.nn.halo import row_by_row
from gas.nn.mixture import gaussian_mixture


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
        source = row_by_row(lambda rows: F.linear(rows, by_difference), x[0])
        return edge_conv(adj, target, source, activation, self._reduce)


def _layers(module: Any) -> list[Any]:
    return list(module) if type(module) is torch.nn.Sequential and len(module) else [module]


class GMMConv(_Fused, pyg.GMMConv):
    """:class:`torch_geometric.nn.GMMConv`; transforms before or after it sums, what is cheaper."""

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
    ) -> Tensor:
        """See PyG; without ``edge_attr``, values of the adjacency are the coordinates."""
        if not isinstance(edge_index, Adjacency):
            return super().forward(x, edge_index, edge_attr, size)
        pseudo = edge_attr
        if pseudo is None:
            if edge_index.value is None or self.dim != 1:
                raise ValueError(
                    "'edge_attr' is None, expected coordinates of shape "
                    f"[{edge_index.num_entries}, {self.dim}], in the order of the entries of the "
                    "adjacency"
                )
            pseudo = edge_index.value[:, None]
        reason = self._unsupported({})
        if reason:
            out = super().forward(x, edge_index.to_edge_index()[0], pseudo, size)
            self.path = f"pyg: {reason}"
            return out
        self.path = "fused"
        source, own = (x, x) if isinstance(x, Tensor) else x
        mixture = pseudo, self.mu, self.sigma, self._reduce
        weight = self.g.view(-1, self.kernel_size, self.out_channels)  # [in, kernels, out]
        if sums_first(edge_index, source, self.kernel_size, self.out_channels):
            sums = gaussian_mixture(edge_index, source, *mixture)  # [rows, kernels, in]
            out = sums.flatten(1) @ weight.transpose(0, 1).flatten(0, 1)
        else:
            transformed = row_by_row(lambda rows: rows @ self.g, source).view(
                -1, self.kernel_size, self.out_channels
            )
            out = gaussian_mixture(edge_index, transformed, *mixture)
        if self.root_weight and own is not None:
            out = out + self.root(own)
        return out if self.bias is None else out + self.bias

    def _unsupported(self, kwargs: dict[str, Any]) -> str:
        if self.separate_gaussians:
            return "separate_gaussians=True"
        if self._reduce in ("max", "min"):
            return f"aggr={self.aggr!r} is none of sum, mean"
        return super()._unsupported(kwargs)


# One element of a product that computes its weights takes as long as so many multiplications of a
# dense one. Those of a plain product take 4 to 34, by degree and width; see also conv.py.
SPARSE_COST = 10


def sums_first(adj: Adjacency, x: Tensor, kernels: int, out_channels: int) -> bool:
    """Whether summing each kernel's rows before the linear layer costs less than after it.

    Either way a pass over the edges reads a row of each kernel and another reads one row for all of
    them, but for a narrow input, or one without a gradient. What differs most is the product: of
    the rows, or of the columns.
    """
    rows, cols = adj.shape
    again = 1 if x.requires_grad else 0
    product = kernels * x.size(1) * out_channels
    before = SPARSE_COST * adj.num_entries * x.size(1) * (2 + again * kernels) + 3 * rows * product
    after = SPARSE_COST * adj.num_entries * out_channels * (1 + kernels)
    return before <= after + (2 + again) * cols * product
