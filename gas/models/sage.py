"""GraphSAGE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_geometric.nn.resolver import aggregation_resolver

from gas.models.layered import LayeredGNN
from gas.nn import SAGEConv
from gas.scalable import check_constructor


class GraphSAGE(LayeredGNN):
    """GraphSAGE (Hamilton, Ying and Leskovec, NeurIPS 2017) with historical embeddings.

    No neighbour is sampled: a layer aggregates over all of them. Edges have no weights; load a
    graph that has some with ``edge_weight=False``. Histories hold the output of each layer after
    the activation.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node; ``-1``: those of the first batch.
        hidden_channels: Width of the hidden layers, or one width for each of them.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise each hidden layer. (default: ``False``)
        residual: Add a layer's input to its output, where widths agree. (default: ``False``)
        aggr: How neighbours are aggregated: ``"mean"``, ``"max"`` or ``"sum"``.
            (default: ``"mean"``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

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
        aggr: str = "mean",
        **kwargs: Any,
    ) -> None:
        try:
            aggregation_resolver("none" if aggr is None else aggr)
        except ValueError:
            raise ValueError(
                f"'aggr' is {aggr!r}, expected an aggregation of PyG, such as 'mean', 'max' or "
                "'sum'"
            ) from None
        super().__init__(
            num_nodes, in_channels, hidden_channels, out_channels, num_layers, dropout, drop_input,
            batch_norm, residual, **kwargs,
        )  # fmt: skip
        self.aggr = aggr
        self.gains_by_sparse = aggr != "max"
        self._add_convs(lambda i, o: SAGEConv(i, o, aggr=aggr))
