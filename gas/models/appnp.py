"""Personalised propagation of neural predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import ModuleList
from torch_geometric.transforms import GCNNorm

from gas.history import Rows, first_rows
from gas.models.layered import LayeredGNN, check_share
from gas.nn import Linear, Neighbours, SimpleConv
from gas.scalable import check_constructor, check_integer


class APPNP(LayeredGNN):
    """APPNP (Gasteiger, Bojchevski and Günnemann, ICLR 2019) with historical embeddings.

    Two linear layers predict from the features of each node, ``h_0``; then each layer propagates,
    ``h <- (1 - alpha) A h + alpha h_0``, with the normalised adjacency of the whole graph:
    ``T.GCNNorm()(data)``, before partitioning. Histories hold the output of each propagation, which
    is ``out_channels`` wide.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node.
        hidden_channels: Width between the two linear layers.
        out_channels: Outputs per node.
        num_layers: The number of propagations.
        alpha: The share of the prediction in each propagation, the teleport probability.
            (default: ``0.1``)
        dropout: Probability of dropping each element of the input of a linear layer.
            (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    transform = GCNNorm()
    needs_weights = True

    activation = staticmethod(lambda x: x)  # None between propagations.

    @check_constructor
    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        alpha: float = 0.1,
        dropout: float = 0.0,
        *,
        drop_input: bool = True,
        **kwargs: Any,
    ) -> None:
        check_share("alpha", alpha)
        check_integer("hidden_channels", hidden_channels, 1)
        super().__init__(
            num_nodes, in_channels, out_channels, out_channels, num_layers, dropout, drop_input,
            False, False, **kwargs,
        )  # fmt: skip
        self.alpha = alpha
        self.lins.append(Linear(in_channels, hidden_channels))
        self.lins.append(Linear(hidden_channels, out_channels))
        self.propagate = SimpleConv(aggr="sum")

    @property
    def reg_modules(self) -> ModuleList:
        """Return the modules that take the regular weight decay: the first linear layer."""
        return self.lins[:1]

    @property
    def nonreg_modules(self) -> ModuleList:
        """Return the modules that take the other weight decay: the second linear layer."""
        return self.lins[1:]

    def _start(self, x: Tensor | Rows) -> Tensor:
        return self.lins[1](self._drop(super()._start(x)))

    def _layer(
        self, layer: int, x: Tensor | Rows, first: Callable[[], Tensor], graph: Neighbours
    ) -> Tensor:
        h = self.propagate(graph.layer_input(x), graph.adj_t, graph.edge_weight)
        h = first_rows(h, graph.batch_size)
        return (1 - self.alpha) * h + self.alpha * first()

    def _drop_rows(self, layer: int, x: Any) -> Any:
        return x

    def _end(self, x: Tensor) -> Tensor:
        """Return the rows of the last propagation as they are."""
        return x
