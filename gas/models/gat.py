"""The graph attention network."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.nn import ModuleList
from torch_geometric.transforms import AddRemainingSelfLoops

from gas.models.layered import LayeredGNN
from gas.nn import GATConv
from gas.scalable import check_constructor, check_integer


class GAT(LayeredGNN):
    """A graph attention network (Veličković et al., ICLR 2018) with historical embeddings.

    Nodes attend to themselves if the graph has self-loops: ``T.AddRemainingSelfLoops()(data)``,
    before partitioning. Histories hold the output of each layer after its activation, ELU.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node; ``-1``: those of the first batch.
        hidden_channels: Width of each head of the hidden layers.
        hidden_heads: Attention heads of the hidden layers, whose outputs are concatenated.
        out_channels: Outputs per node.
        out_heads: Attention heads of the last layer, whose outputs are averaged.
        num_layers: The number of convolutions.
        dropout: Probability of dropping each element of a layer's input, and each attention
            weight. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        residual: Add a layer's input to its output, where widths agree. (default: ``False``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    transform = AddRemainingSelfLoops()
    infers_in_channels = True
    activation = staticmethod(F.elu)

    @check_constructor
    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int,
        hidden_heads: int,
        out_channels: int,
        out_heads: int,
        num_layers: int,
        dropout: float = 0.0,
        *,
        drop_input: bool = True,
        residual: bool = False,
        **kwargs: Any,
    ) -> None:
        check_integer("hidden_channels", hidden_channels, 1)
        check_integer("hidden_heads", hidden_heads, 1)
        check_integer("out_heads", out_heads, 1)
        super().__init__(
            num_nodes, in_channels, hidden_channels * hidden_heads, out_channels, num_layers,
            dropout, drop_input, False, residual, **kwargs,
        )  # fmt: skip
        self.hidden_heads = hidden_heads
        self.out_heads = out_heads

        def make_conv(i: int, o: int) -> GATConv:
            last = len(self.convs) == num_layers - 1
            width, heads = (o, out_heads) if last else (hidden_channels, hidden_heads)
            return GATConv(i, width, heads, concat=not last, dropout=dropout, add_self_loops=False)

        self._add_convs(make_conv)

    @property
    def reg_modules(self) -> ModuleList:
        """Return the modules that take the regular weight decay: all."""
        return self.convs

    @property
    def nonreg_modules(self) -> ModuleList:
        """Return the modules that take the other weight decay: none."""
        return ModuleList()
