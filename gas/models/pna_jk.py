"""Principal neighbourhood aggregation with jumping knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import BatchNorm1d, Identity, ReLU, Sequential

from gas.history import Rows
from gas.models.layered import LayeredGNN
from gas.models.pna import PNAConv, check_aggregation
from gas.nn import Linear, apply_rowwise
from gas.scalable import check_constructor, check_integer


class PNA_JK(LayeredGNN):  # noqa: N801  # The published name.
    """A network of :class:`PNAConv` whose last layer gets the outputs of all others.

    A linear layer, convolutions, and a linear layer over all their outputs, concatenated as in
    jumping knowledge networks (Xu et al., ICML 2018). Histories hold the output of each convolution
    after the activation.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node.
        hidden_channels: Width of all convolutions.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        aggregators: Some of ``"sum"``, ``"mean"``, ``"max"`` and ``"min"``.
        scalers: Some of ``"identity"``, ``"amplification"`` and ``"attenuation"``.
        deg: The number of edges into each node of the training graph, of shape ``[N]``.
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise the first linear layer and each convolution. (default: ``False``)
        residual: Add a layer's input to its output. (default: ``False``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    jumping_knowledge = True

    @check_constructor
    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        aggregators: Sequence[str],
        scalers: Sequence[str],
        deg: Tensor,
        dropout: float = 0.0,
        drop_input: bool = True,
        batch_norm: bool = False,
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        check_aggregation(aggregators, scalers, deg)
        check_integer("hidden_channels", hidden_channels, 1)
        super().__init__(
            num_nodes, in_channels, hidden_channels, out_channels, num_layers, dropout, drop_input,
            batch_norm, residual, **kwargs,
        )  # fmt: skip
        norm = BatchNorm1d(hidden_channels) if batch_norm else Identity()
        self.lins.append(Sequential(Linear(in_channels, hidden_channels), norm, ReLU()))
        self.lins.append(Linear((num_layers + 1) * hidden_channels, out_channels))
        self._add_convs(lambda i, o: PNAConv(i, o, aggregators, scalers, deg))
        self.drop_first = False  # Its input has been dropped before the first linear layer.

    def _start(self, x: Tensor | Rows) -> Tensor:
        return apply_rowwise(self.lins[0], self._drop(x, self.drop_input))
