"""The symmetric normalisation that layers do by themselves, as a function of the edges."""

from __future__ import annotations

import operator
from typing import Any

import torch_geometric.nn as pyg

from gas.convert.rewriting.edge_dropout import AFTER_DROP
from gas.convert.tracing.traced import Traced
from gas.convert.values.edge_layers import DROP, bind_arguments
from gas.convert.values.matrices import LOOPS, gcn_norm, normalises
from gas.graph import WEIGHT

LAYER = "layer"  # What a normalisation notes: the name of the layer that does it.


def disable_normalisation(layer: Any) -> bool:
    """Disable the normalisation of a layer, ``normalize``, and return whether it had one."""
    is_normalising = normalises(layer)
    if is_normalising:
        layer.normalize = False
    return is_normalising


def write_normalisation(traced: Traced) -> None:
    """Write what layers normalise by themselves into a traced graph, before they are called.

    Changes:
        These layers don't normalise any more.
    """
    net, graph = traced.net, traced.graph
    called = [node for node in graph.nodes if node.op == "call_module"]
    layers: dict[Any, Any] = {node.target: net.get_submodule(str(node.target)) for node in called}
    found = {name: disable_normalisation(layer) for name, layer in layers.items()}
    for node in called:
        layer = layers[node.target]
        if not found[node.target]:
            continue
        given = bind_arguments(layer, node.args, node.kwargs)
        adds_loops = not isinstance(layer, pyg.LGConv) and layer.add_self_loops
        adds_loops = adds_loops and LOOPS not in node.meta
        is_improved = getattr(layer, "improved", False)
        with graph.inserting_before(node):
            size = graph.call_method("size", (given["x"], layer.node_dim))
            dtype = graph.call_function(getattr, (given["x"], "dtype"))
            args = given["edge_index"], given.get(WEIGHT), size, is_improved, adds_loops
            made = graph.call_function(gcn_norm, (*args, layer.flow, dtype))
            edges = graph.call_function(operator.getitem, (made, 0))
            weight = graph.call_function(operator.getitem, (made, 1))
        made.meta[LAYER] = node.target
        for each in (made, edges, weight) if DROP in node.meta else ():
            each.meta[AFTER_DROP] = True
        if adds_loops:
            given["edge_index"] = edges
        given[WEIGHT] = weight
        node.args, node.kwargs = (), bind_arguments(layer, (), given)


def refuse_normalisation(traced: Traced) -> None:
    """Refuse layers that normalise weights which the model computes of rows of nodes."""
    for node in traced.graph.nodes:
        if node.target is gcn_norm:
            raise ValueError(
                f"'{node.meta.get(LAYER, node.name)}' normalises weights that the model computes, "
                f"'{node.args[1]}', which mini-batches can't: use normalize=False"
            )
