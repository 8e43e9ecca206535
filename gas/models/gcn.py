"""The graph convolutional network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from torch_geometric.transforms import GCNNorm

from gas.history import Rows
from gas.models.layered import LayeredGNN
from gas.nn import GCNConv, Linear, Neighbours
from gas.scalable import check_constructor, check_integer


class GCN(LayeredGNN):
    """A graph convolutional network (Kipf and Welling, ICLR 2017) with historical embeddings.

    The edge weights are the symmetric normalisation of the *whole* graph,
    ``D^-1/2 (A + I) D^-1/2``, computed before partitioning: ``T.GCNNorm()(data)``. Histories hold
    the output of each layer after the activation.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node; without ``linear``, ``-1``: those of the first batch.
        hidden_channels: Width of the hidden layers, or one width for each of them.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise each hidden layer. (default: ``False``)
        residual: Add a layer's input to its output, where widths agree. (default: ``False``)
        linear: Start and end with a linear layer, which leaves all convolutions
            ``hidden_channels`` wide. (default: ``False``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    transform = GCNNorm()
    needs_weights = True
    infers_in_channels = True

    @check_constructor
    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int | Sequence[int],
        out_channels: int,
        num_layers: int,
        dropout: float = 0.0,
        drop_input: bool = True,
        batch_norm: bool = False,
        residual: bool = False,
        linear: bool = False,
        **kwargs: Any,
    ) -> None:
        if linear and isinstance(hidden_channels, Sequence):
            raise ValueError(
                f"'hidden_channels' is {hidden_channels}, expected one width with linear=True"
            )
        if linear:
            check_integer("in_channels", in_channels, 1)
        super().__init__(
            num_nodes, in_channels, hidden_channels, out_channels, num_layers, dropout, drop_input,
            batch_norm, residual, **kwargs,
        )  # fmt: skip
        self.linear = linear
        if linear:
            width = cast(int, hidden_channels)
            self.lins.append(Linear(in_channels, width))
            self.lins.append(Linear(width, out_channels))
        self._add_convs(lambda i, o: GCNConv(i, o, normalize=False))

    def _conv(
        self, layer: int, x: Tensor | Rows, first: Callable[[], Tensor], graph: Neighbours
    ) -> Tensor:
        return self.convs[layer](x, graph.adj_t, graph.edge_weight)
