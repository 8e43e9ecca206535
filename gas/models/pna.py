"""Principal neighbourhood aggregation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList

from gas.history import Rows
from gas.models.layered import LayeredGNN
from gas.nn import Adjacency, Linear, apply_rowwise, spmm
from gas.scalable import check_constructor

AGGREGATORS = ("sum", "mean", "max", "min")
SCALERS = ("identity", "amplification", "attenuation")


def check_aggregation(aggregators: Sequence[str], scalers: Sequence[str], deg: Tensor) -> None:
    """Raise ``ValueError`` unless the arguments of :class:`PNAConv` fit."""
    for name, values, known in (
        ("aggregators", aggregators, AGGREGATORS),
        ("scalers", scalers, SCALERS),
    ):
        unknown = [value for value in values if value not in known]
        if isinstance(values, str) or not values or unknown:
            raise ValueError(f"{name!r} is {values!r}, expected some of {', '.join(known)}")
    is_vector = isinstance(deg, Tensor) and deg.dim() == 1
    if not is_vector or not bool((deg >= 0).all()) or not bool((deg > 0).any()):
        raise ValueError(
            f"'deg' is {deg!r}, expected the number of edges into each node, of shape [N], not all "
            "of them 0: pass torch_geometric.utils.degree(data.edge_index[1], data.num_nodes)"
        )


class PNAConv(torch.nn.Module):
    """Aggregate neighbours with several aggregators, each scaled by the degree in several ways.

    For every pair of an aggregator and a scaler, rows go through a linear layer and ReLU, are
    aggregated, go through another linear layer and are scaled; all pairs and a linear layer of the
    node's own row are summed. With the number ``d`` of edges into a node and the mean ``m`` of
    ``log(d + 1)`` over the training graph, ``amplification`` multiplies by ``log(d + 1) / m`` and
    ``attenuation`` by ``m / log(d + 1)``, with ``d`` at least 1.

    Source: Corso et al., *Principal Neighbourhood Aggregation for Graph Nets*, NeurIPS 2020, in the
    form of Fey et al., *GNNAutoScale*, ICML 2021. Edge weights are ignored.

    Args:
        in_channels: Input width.
        out_channels: Output width.
        aggregators: Of ``"sum"``, ``"mean"``, ``"max"`` and ``"min"``.
        scalers: Of ``"identity"``, ``"amplification"`` and ``"attenuation"``.
        deg: The number of edges into each node of the training graph, of shape ``[N]``.
    """

    mean_log_degree: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        aggregators: Sequence[str],
        scalers: Sequence[str],
        deg: Tensor,
    ) -> None:
        super().__init__()
        check_aggregation(aggregators, scalers, deg)
        self.pairs = list(itertools.product(aggregators, scalers))
        self.pre_lins = ModuleList(Linear(in_channels, out_channels) for _ in self.pairs)
        self.post_lins = ModuleList(Linear(out_channels, out_channels) for _ in self.pairs)
        self.lin = Linear(in_channels, out_channels)
        self.register_buffer("mean_log_degree", (deg.float() + 1).log().mean())

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for lin in (*self.pre_lins, *self.post_lins, self.lin):
            lin.reset_parameters()

    def forward(self, x: Tensor | Rows | tuple[Tensor, Tensor], adj_t: Any) -> Tensor:
        """Compute one row per destination: of shape ``[rows, out_channels]``.

        Args:
            x: Features of sources and destinations, or a pair of both.
            adj_t: The adjacency, in any layout.
        """
        source: Tensor | Rows
        if isinstance(x, Rows):
            source, own = x, x.own
        else:
            source, own = (x, x) if isinstance(x, Tensor) else x
        adj = Adjacency.of(adj_t, source.size(0)).remove_values()
        log_degree = (adj.degree()[: own.size(0)].to(source.dtype) + 1).log()[:, None]
        out = self.lin(own)
        for (aggregator, scaler), pre, post in zip(
            self.pairs, self.pre_lins, self.post_lins, strict=True
        ):
            h = apply_rowwise(pre, source).relu()
            h = post(spmm(adj, h, reduce=aggregator)[: own.size(0)])
            if scaler == "amplification":
                h = h * (log_degree / self.mean_log_degree)
            elif scaler == "attenuation":
                h = h * (self.mean_log_degree / log_degree.clamp(min=math.log(2)))
            out = out + h
        return out


class PNA(LayeredGNN):
    """A network of :class:`PNAConv` with historical embeddings.

    Histories hold the output of each layer after the activation.

    Args:
        num_nodes: The number of nodes of the graph.
        in_channels: Input features per node.
        hidden_channels: Width of the hidden layers, or one width for each of them.
        out_channels: Outputs per node.
        num_layers: The number of convolutions.
        aggregators: Some of ``"sum"``, ``"mean"``, ``"max"`` and ``"min"``.
        scalers: Some of ``"identity"``, ``"amplification"`` and ``"attenuation"``.
        deg: The number of edges into each node of the training graph, of shape ``[N]``.
        dropout: Probability of dropping each element of a layer's input. (default: ``0.0``)
        drop_input: Drop input features as well. (default: ``True``)
        batch_norm: Normalise each hidden layer. (default: ``False``)
        residual: Add a layer's input to its output, where widths agree. (default: ``False``)
        **kwargs: Further arguments of :class:`gas.ScalableGNN`, such as ``device`` and ``store``.
    """

    @check_constructor
    def __init__(
        self,
        num_nodes: int,
        in_channels: int,
        hidden_channels: int | Sequence[int],
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
        super().__init__(
            num_nodes, in_channels, hidden_channels, out_channels, num_layers, dropout, drop_input,
            batch_norm, residual, **kwargs,
        )  # fmt: skip
        self._add_convs(lambda i, o: PNAConv(i, o, aggregators, scalers, deg))
