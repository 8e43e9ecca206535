"""Layers whose result on a mini-batch differs from that on the graph: reasons and cures.

A batch has all edges into its own nodes, but not the degrees, further neighbours or outgoing edges
of its halo. A layer that needs them would return other results without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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


def _reason_degrees(layer: Any) -> str:
    """Return why a layer that normalises by degrees isn't exact, "" if it doesn't."""
    if not layer.normalize:
        return ""
    return f"normalises by the degrees of the batch, not of the graph: {NORMALISE}"


def _reason_hops(layer: Any, hops: int) -> str:
    """Return why a layer of several hops isn't exact, "" for one hop."""
    return f"propagates {hops} times within the batch: {UNROLL}" if hops > 1 else ""


def _reason_gated(layer: pyg.GatedGraphConv) -> str:
    """Return why ``GatedGraphConv`` of several steps isn't exact, "" for one step."""
    if layer.num_layers <= 1:
        return ""
    return (
        f"propagates {layer.num_layers} times within the batch: take as many of "
        "GatedGraphConv(num_layers=1), with push_and_pull in between"
    )


def _reason_norm_of_all(layer: Any) -> str:
    return f"normalises by the statistics of the batch's nodes, halo included: {BY_NODE}"


def _reason_global_attention(layer: Any) -> str:
    return f"attends to all nodes of the batch, not of the graph: {LOCAL}"


def _reason_pooling(layer: Any) -> str:
    return (
        "selects nodes of the batch, not of the graph: train models that pool nodes on whole "
        "graphs, with torch_geometric.loader.DataLoader"
    )


def _reason_no_weights(layer: Any) -> str:
    return (
        "spreads given rows over the whole graph, and has no weights to train: call it once on the "
        "whole graph, with the labels, or with model.predict(graph)"
    )


def _reason_edge_order(layer: Any) -> str:
    return (
        "depends on the order in which a node's edges are stored, which is another one in a batch: "
        "use an aggregation without order, such as 'mean', 'max' or SoftmaxAggregation"
    )


def _reason_flow(layer: Any) -> str:
    if layer.flow == "source_to_target":
        return ""
    return (
        "reads the edges out of a node, of which a batch has those into its own nodes alone: turn "
        "the graph's edges around, edge_index.flip(0), and use flow='source_to_target'"
    )


# The reason why a layer isn't exact on batches, and the cure, by class of PyG; "" if it is exact.
INEXACT: dict[type[torch.nn.Module], Callable[[Any], str]] = {
    pyg.GCNConv: _reason_degrees,
    pyg.GCN2Conv: _reason_degrees,
    pyg.LGConv: _reason_degrees,
    pyg.FAConv: _reason_degrees,
    pyg.PDNConv: _reason_degrees,
    pyg.DNAConv: _reason_degrees,
    pyg.TAGConv: lambda layer: _reason_degrees(layer) or _reason_hops(layer, layer.K),
    pyg.APPNP: lambda layer: _reason_degrees(layer) or _reason_hops(layer, layer.K),
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
    pyg.GatedGraphConv: _reason_gated,
    pyg.HypergraphConv: lambda _: (
        "goes from nodes to hyperedges and back within the batch: make the hyperedges nodes of a "
        "HeteroData, with a layer for each way"
    ),
    pyg.DirGNNConv: lambda _: (
        "reads the edges out of a node, of which a batch has those into its own nodes alone: add "
        "them the other way round, as edges of another 'edge_type', and use RGCNConv"
    ),
    pyg.GraphNorm: _reason_norm_of_all,
    pyg.PairNorm: _reason_norm_of_all,
    pyg.DiffGroupNorm: _reason_norm_of_all,
    pyg.MeanSubtractionNorm: _reason_norm_of_all,
    pyg.InstanceNorm: _reason_norm_of_all,
    pyg.GraphSizeNorm: _reason_norm_of_all,
    pyg.LayerNorm: lambda layer: _reason_norm_of_all(layer) if layer.mode == "graph" else "",
    pyg.HeteroBatchNorm: lambda layer: (
        "" if layer.track_running_stats else _reason_norm_of_all(layer)
    ),
    pyg.aggr.LSTMAggregation: _reason_edge_order,
    pyg.aggr.GRUAggregation: _reason_edge_order,
    pyg.aggr.MLPAggregation: _reason_edge_order,
    pyg.aggr.LCMAggregation: _reason_edge_order,
    pyg.aggr.PatchTransformerAggregation: _reason_edge_order,
    pyg.aggr.EquilibriumAggregation: lambda _: (
        "minimises an energy of all nodes of the batch together: use an aggregation of each node's "
        "own edges, such as SoftmaxAggregation or DeepSetsAggregation"
    ),
    pyg.MessagePassing: _reason_flow,
}
# Layers that neither a transform of the graph nor histories make exact.
NEVER: dict[type[torch.nn.Module], Callable[[Any], str]] = {
    pyg.GPSConv: lambda _: (
        "attends to all nodes of the batch, not of the graph: take its 'conv' alone, with the "
        f"norms and the MLP around it; {LOCAL}"
    ),
    pyg.TopKPooling: _reason_pooling,
    pyg.SAGPooling: _reason_pooling,
    pyg.ASAPooling: _reason_pooling,
    pyg.EdgePooling: _reason_pooling,
    pyg.MemPooling: _reason_pooling,
    PerformerAttention: _reason_global_attention,
    SGFormerAttention: _reason_global_attention,
    PolynormerAttention: _reason_global_attention,
    pyg.LabelPropagation: _reason_no_weights,
    pyg.CorrectAndSmooth: _reason_no_weights,
    pyg.TGNMemory: lambda _: (
        "keeps a memory of the nodes that every call changes, so that it depends on the batches "
        f"before: {BY_TIME}"
    ),
}
# The layers of PyTorch Geometric Temporal, which need not be installed.
RECURRENT = "torch_geometric_temporal.nn.recurrent"


def reason_inexact(layer: torch.nn.Module) -> str:
    """Return the reason why a layer isn't exact on mini-batches; "" if it is."""
    kinds = type(layer).__mro__
    is_layer = isinstance(layer, pyg.MessagePassing)  # Of one step.
    if not is_layer and any(cls.__module__.startswith(RECURRENT) for cls in kinds):
        return (
            "is a recurrent layer, which carries a state of all nodes from one step of time to the "
            f"next past the histories: {BY_TIME}, or convert a module that unrolls the steps, with "
            "gas.to_scalable"
        )
    reasons = (INEXACT[cls](layer) for cls in kinds if cls in INEXACT)
    return reason_never_exact(layer) or next(filter(None, reasons), "")


def reason_never_exact(layer: torch.nn.Module) -> str:
    """Return the reason why a layer can't be made exact on mini-batches; "" if it may be."""
    for cls in type(layer).__mro__:
        if cls in NEVER:
            return NEVER[cls](layer)
    return ""


class NeverExactError(ValueError):
    """Error of a module that nothing makes exact on mini-batches."""


def check_exact(name: str, module: torch.nn.Module) -> None:
    """Refuse a module that nothing makes exact.

    Raises:
        NeverExactError: With its name.
    """
    if reason := reason_never_exact(module):
        where = f"'{name}' ({type(module).__name__})" if name else type(module).__name__
        raise NeverExactError(f"{where} isn't exact on mini-batches: it {reason}")


@contextlib.contextmanager
def explain_failures(net: torch.nn.Module) -> Iterator[None]:
    """Give a part of a module that nothing makes exact as the reason why the module fails."""
    try:
        yield
    except ValueError:
        for name, module in net.named_modules():
            check_exact(name, module)
        raise
