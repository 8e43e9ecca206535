"""Which layers give another result on a mini-batch than on the graph: why, and the cure.

A batch knows all edges into its own nodes, and nothing else of its halo: neither degrees nor second
neighbours, nor edges out of a node. What needs more computes something else, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch_geometric.nn.attention import (
    PerformerAttention,
    PolynormerAttention,
    SGFormerAttention,
)

NORMALISE = (
    "normalise the whole graph before it is cut into parts, T.GCNNorm()(data), and build the layer "
    "with normalize=False"
)
BY_MEAN = "leave 'symnorm' out of its aggregators"
UNROLL = "propagate once per layer, with push_and_pull in between"
BY_NODE = "use a norm that treats each node alike, such as BatchNorm or LayerNorm(mode='node')"
LOCAL = (
    "attend along edges, with TransformerConv or GATv2Conv, and give what is global as features of "
    "the whole graph, such as T.AddLaplacianEigenvectorPE"
)
BY_TIME = (
    "give the steps of time as columns of 'x', and take torch.nn.GRU or LSTM node by node, before "
    "or after layers of message passing"
)


def _degrees(layer: Any) -> str:
    if not layer.normalize:
        return ""
    return f"normalises by the degrees of the batch, not of the graph: {NORMALISE}"


def _hops(layer: Any, hops: int) -> str:
    return f"propagates {hops} times within the batch: {UNROLL}" if hops > 1 else ""


def _gated(layer: pyg.GatedGraphConv) -> str:
    if layer.num_layers <= 1:
        return ""
    return (
        f"propagates {layer.num_layers} times within the batch: take as many of "
        "GatedGraphConv(num_layers=1), with push_and_pull in between"
    )


def _whole_graph(layer: Any) -> str:
    return f"normalises by the statistics of the batch's nodes, halo included: {BY_NODE}"


def _attends(layer: Any) -> str:
    return f"attends to all nodes of the batch, not of the graph: {LOCAL}"


def _in_order(layer: Any) -> str:
    return (
        "depends on the order in which a node's edges are stored, which is another one in a batch: "
        "use an aggregation without order, such as 'mean', 'max' or SoftmaxAggregation"
    )


def _backwards(layer: Any) -> str:
    if layer.flow == "source_to_target":
        return ""
    return (
        "reads the edges out of a node, of which a batch has those into its own nodes alone: turn "
        "the graph's edges around, edge_index.flip(0), and use flow='source_to_target'"
    )


# By class of PyG: why a layer isn't exact on batches, and the cure; empty for one that is.
INEXACT: dict[type[torch.nn.Module], Callable[[Any], str]] = {
    pyg.GCNConv: _degrees,
    pyg.GCN2Conv: _degrees,
    pyg.LGConv: _degrees,
    pyg.FAConv: _degrees,
    pyg.PDNConv: _degrees,
    pyg.DNAConv: _degrees,
    pyg.TAGConv: lambda layer: _degrees(layer) or _hops(layer, layer.K),
    pyg.APPNP: lambda layer: _degrees(layer) or _hops(layer, layer.K),
    pyg.SGConv: lambda _: "normalises by the degrees of the batch: use gas.models.GCN",
    pyg.SSGConv: lambda _: "normalises by the degrees of the batch: use gas.models.APPNP",
    pyg.ARMAConv: lambda _: "normalises by the degrees of the batch: use gas.models.GCN",
    pyg.MixHopConv: lambda _: (
        "normalises by the degrees of the batch, and propagates several times within it: use "
        "TAGConv, which to_scalable takes apart"
    ),
    pyg.PANConv: lambda _: (
        "normalises by the paths of the batch, and propagates several times within it: use "
        "TAGConv, which to_scalable takes apart"
    ),
    pyg.EGConv: lambda layer: (
        f"normalises by the degrees of the batch: {BY_MEAN}"
        if "symnorm" in layer.aggregators
        else ""
    ),
    pyg.ChebConv: lambda _: "needs the Laplacian of the whole graph: use gas.models.GCN",
    pyg.GatedGraphConv: _gated,
    pyg.HypergraphConv: lambda _: (
        "goes from nodes to hyperedges and back within the batch: make the hyperedges nodes of a "
        "HeteroData, with a layer for each way"
    ),
    pyg.GraphNorm: _whole_graph,
    pyg.PairNorm: _whole_graph,
    pyg.DiffGroupNorm: _whole_graph,
    pyg.MeanSubtractionNorm: _whole_graph,
    pyg.InstanceNorm: _whole_graph,
    pyg.GraphSizeNorm: _whole_graph,
    pyg.LayerNorm: lambda layer: _whole_graph(layer) if layer.mode == "graph" else "",
    pyg.aggr.LSTMAggregation: _in_order,
    pyg.aggr.GRUAggregation: _in_order,
    pyg.aggr.MLPAggregation: _in_order,
    pyg.aggr.LCMAggregation: _in_order,
    pyg.aggr.PatchTransformerAggregation: _in_order,
    pyg.aggr.EquilibriumAggregation: lambda _: (
        "minimises an energy of all nodes of the batch together: use an aggregation of each node's "
        "own edges, such as SoftmaxAggregation or DeepSetsAggregation"
    ),
    pyg.MessagePassing: _backwards,
}
# Those that nothing makes exact: neither a transform of the graph nor a history in between.
NEVER: dict[type[torch.nn.Module], Callable[[Any], str]] = {
    pyg.GPSConv: lambda _: (
        "attends to all nodes of the batch, not of the graph: take its 'conv' alone, with the "
        f"norms and the MLP around it; {LOCAL}"
    ),
    PerformerAttention: _attends,
    SGFormerAttention: _attends,
    PolynormerAttention: _attends,
    pyg.DirGNNConv: lambda _: (
        "reads the edges out of a node, of which a batch has those into its own nodes alone: add "
        "them the other way round, as edges of another 'edge_type', and use RGCNConv"
    ),
    pyg.TGNMemory: lambda _: (
        "keeps a memory of the nodes that every call changes, so that it depends on the batches "
        f"before: {BY_TIME}"
    ),
}
# PyTorch Geometric Temporal's, which need not be installed.
RECURRENT = "torch_geometric_temporal.nn.recurrent"


def why_inexact(layer: torch.nn.Module) -> str:
    """Why a layer's result on a mini-batch differs from that on the graph; empty if it doesn't."""
    reasons = (INEXACT[cls](layer) for cls in type(layer).__mro__ if cls in INEXACT)
    return why_never(layer) or next(filter(None, reasons), "")


def why_never(layer: torch.nn.Module) -> str:
    """Why nothing makes a layer exact on mini-batches; empty if something may."""
    for cls in type(layer).__mro__:
        if cls in NEVER:
            return NEVER[cls](layer)
        if cls.__module__.startswith(RECURRENT):
            return (
                "is a recurrent layer, which carries a state of all nodes from one step of time to "
                f"the next past the histories: {BY_TIME}"
            )
    return ""
