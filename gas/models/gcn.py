"""The graph convolutional network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ModuleList
from torch_geometric.nn import GCNConv

from gas.models.weights import check_weights
from gas.nn import dropout
from gas.scalable import ScalableGNN


class GCN(ScalableGNN):
    """A graph convolutional network (Kipf and Welling, ICLR 2017) with historical embeddings.

    The edge weights are the symmetric normalisation of the *whole* graph,
    ``D^-1/2 (A + I) D^-1/2``, computed before partitioning: ``T.GCNNorm()(data)``. Histories hold
    the output of each layer after the activation.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node.
        hidden_channels: Width of the hidden layers.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise each hidden layer. (default: ``False``)
        residual: Add a layer's input to its output, where widths agree. (default: ``False``)
        linear: Start and end with a linear layer, which leaves all convolutions
            ``hidden_channels`` wide. (default: ``False``)
        pool_size: See :class:`gas.ScalableGNN`.
        buffer_size: See :class:`gas.ScalableGNN`.
        device: See :class:`gas.ScalableGNN`.
        **kwargs: Further arguments of :class:`gas.ScalableGNN`.
    """

    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        dropout: float = 0.0,
        drop_input: bool = True,
        batch_norm: bool = False,
        residual: bool = False,
        linear: bool = False,
        pool_size: int | None = None,
        buffer_size: int | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_nodes, hidden_channels, num_layers, pool_size, buffer_size, device, **kwargs
        )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.dropout = dropout
        self.drop_input = drop_input
        self.batch_norm = batch_norm
        self.residual = residual
        self.linear = linear

        self.lins = ModuleList()
        if linear:
            self.lins.append(Linear(in_channels, hidden_channels))
            self.lins.append(Linear(hidden_channels, out_channels))
        widths = [hidden_channels] * (num_layers + 1)
        if not linear:
            widths[0], widths[-1] = in_channels, out_channels
        self.convs = ModuleList(
            GCNConv(widths[i], widths[i + 1], normalize=False) for i in range(num_layers)
        )
        num_norms = num_layers if linear else num_layers - 1
        self.bns = ModuleList(
            BatchNorm1d(hidden_channels) for _ in range(num_norms if batch_norm else 0)
        )

    @property
    def reg_modules(self) -> ModuleList:
        """The modules that take the regular weight decay: all but the last transformation."""
        convs = self.convs if self.linear else self.convs[:-1]
        return ModuleList([*convs, *self.bns])

    @property
    def nonreg_modules(self) -> ModuleList:
        """The modules that take the other weight decay."""
        return self.lins if self.linear else self.convs[-1:]

    def reset_parameters(self) -> None:
        """Draws new weights and forgets the histories."""
        super().reset_parameters()
        for module in (*self.lins, *self.convs, *self.bns):
            module.reset_parameters()

    def forward(
        self, x: Tensor, adj_t: Any, *args: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Computes the outputs of the in-batch nodes, or of all; see :class:`gas.ScalableGNN`."""
        batch_size = args[0] if args else None
        check_weights(adj_t, edge_weight)
        x = self._start(x)
        for layer, history in enumerate(self.histories):
            x = self._hidden(layer, x, adj_t, edge_weight, batch_size)
            x = self.push_and_pull(history, x, *args)
        return self._end(x, adj_t, edge_weight, batch_size)

    def forward_layer(
        self,
        layer: int,
        x: Tensor,
        adj_t: Any,
        state: dict[str, Any],
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Computes one layer; see :meth:`gas.ScalableGNN.forward_layer`."""
        check_weights(adj_t, edge_weight)
        if layer == 0:
            x = self._start(x)
        if layer < self.num_layers - 1:
            return self._hidden(layer, x, adj_t, edge_weight, None)
        return self._end(x, adj_t, edge_weight, None)

    def _start(self, x: Tensor) -> Tensor:
        if self.linear:
            x = dropout(x, self.dropout, self.training and self.drop_input)
            x = self.lins[0](x).relu()
        return x

    def _hidden(
        self,
        layer: int,
        x: Tensor,
        adj_t: Any,
        edge_weight: Tensor | None,
        batch_size: int | None,
    ) -> Tensor:
        drop = self.drop_input or self.linear or layer > 0
        x = dropout(x, self.dropout, self.training and drop)
        # A square batch has empty halo rows: they must not reach the statistics of batch_norm.
        h = self.convs[layer](x, adj_t, edge_weight)[:batch_size]
        if self.batch_norm:
            h = self.bns[layer](h)
        if self.residual and h.size(-1) == x.size(-1):
            h = h + x[: h.size(0)]
        return h.relu()

    def _end(
        self, x: Tensor, adj_t: Any, edge_weight: Tensor | None, batch_size: int | None
    ) -> Tensor:
        if self.linear:
            h = self._hidden(self.num_layers - 1, x, adj_t, edge_weight, batch_size)
            return self.lins[1](dropout(h, self.dropout, self.training))
        x = dropout(x, self.dropout, self.training)
        return self.convs[-1](x, adj_t, edge_weight)[:batch_size]
