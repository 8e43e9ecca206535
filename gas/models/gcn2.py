"""GCNII: graph convolutions with an initial residual and identity mapping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.transforms import GCNNorm

from gas.history import Rows
from gas.models.layered import LayeredGNN, check_share
from gas.nn import GCN2Conv, Linear, Neighbours
from gas.scalable import check_constructor, check_integer, check_number


class GCN2(LayeredGNN):
    """GCNII (Chen, Wei, Huang, Ding and Li, ICML 2020) with historical embeddings.

    A linear layer, convolutions that mix in its output ``x_0``, a linear layer. Edges need the
    normalisation of the whole graph: ``T.GCNNorm()(data)``, before partitioning. Histories hold the
    output of each convolution after the activation; ``x_0`` is computed from the features.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node.
        hidden_channels: Width of all convolutions.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        alpha: The share of ``x_0`` in the input of each convolution. (default: ``0.1``)
        theta: Sets how fast the weights approach the identity: by ``log(theta / layer + 1)``.
            (default: ``0.5``)
        shared_weights: Transform ``x_0`` by the weights of the propagated features, not by its
            own. (default: ``True``)
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise each layer. (default: ``False``)
        residual: Add a layer's input to its output. (default: ``False``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    transform = GCNNorm()
    needs_weights = True

    @check_constructor
    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        alpha: float = 0.1,
        theta: float = 0.5,
        shared_weights: bool = True,
        dropout: float = 0.0,
        drop_input: bool = True,
        batch_norm: bool = False,
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        check_share("alpha", alpha)
        check_number("theta", theta, lambda t: 0 <= t < math.inf, "a number of at least 0")
        check_integer("hidden_channels", hidden_channels, 1)
        super().__init__(
            num_nodes, in_channels, hidden_channels, out_channels, num_layers, dropout, drop_input,
            batch_norm, residual, **kwargs,
        )  # fmt: skip
        self.lins.append(Linear(in_channels, hidden_channels))
        self.lins.append(Linear(hidden_channels, out_channels))
        self._add_convs(
            lambda i, o: GCN2Conv(
                o, alpha, theta, len(self.convs) + 1, shared_weights, normalize=False
            )
        )

    def _conv(
        self, layer: int, x: Tensor | Rows, first: Callable[[], Tensor], graph: Neighbours
    ) -> Tensor:
        x_0 = first()
        rows = x.size(0) if graph.num_rows is None else graph.num_rows
        missing = rows - x_0.size(0)
        if missing:  # The empty rows of a square batch.
            x_0 = F.pad(x_0, (0, 0, 0, missing))
        return self.convs[layer](x, x_0, graph.adj_t, graph.edge_weight)
