"""Parameters of a module's method, and the attributes of a graph that they are for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from gas.graph import WEIGHT

ADJACENCY = ("edge_index", "adj_t", "adj")
# Parameters of graph batches and of neighbour samplers.
UNSUPPORTED = ("batch", "batch_size", "num_sampled_nodes_per_hop", "num_sampled_edges_per_hop")


def parameters(net: Module, method: str) -> dict[str, Any]:
    """Return a method's parameters and defaults; ``inspect.Parameter.empty`` without one."""
    if isinstance(net, pyg.Sequential):
        return dict.fromkeys(net.signature.param_dict, inspect.Parameter.empty)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    encoder = getattr(net, "encoder", None)
    for function in (getattr(net, method), getattr(encoder, "forward", None)):
        named = [] if function is None else inspect.signature(function).parameters.values()
        if found := {p.name: p.default for p in named if p.kind not in kinds}:
            return found
    return {}  # Nor has what it passes its arguments to, as torch_geometric.nn.GAE does.


def adjacency_name(names: Sequence[str]) -> str:
    """Return the name of the parameter for the adjacency.

    Raises:
        ValueError: If there is none.
    """
    for name in ADJACENCY:
        if name in names:
            return name
    if not names:
        raise ValueError(
            "the model's forward names no parameters, by which attributes of the graph would be "
            "given: write one that does, such as forward(self, x, edge_index), or convert the "
            "module inside"
        )
    several = [name for name in names if "edge_index" in name or name.endswith("_dict")]
    if len(several) > 1:
        raise ValueError(
            f"the model takes {', '.join(names)}: put edges of several kinds into one 'edge_index' "
            "with an 'edge_type', and take edge_index[:, edge_type == 0] inside, or give a "
            "HeteroData"
        )
    raise ValueError(
        f"the model takes {', '.join(names)}, and none of them is the adjacency: name it "
        "'edge_index' or 'adj_t', or take the graph as the only argument, forward(data)"
    )


def features_parameter(wanted: dict[str, Any], data: Data, edges: str) -> str:
    """Return the first parameter, if it is for ``x`` under another name; "" otherwise."""
    first, default = next(iter(wanted.items()))
    is_known = first == edges or first in data or default is not inspect.Parameter.empty
    return "" if is_known or "x" in wanted or "x" not in data or first in UNSUPPORTED else first


def refuse_ambiguous_weights(net: Module, wanted: dict[str, Any], data: Data) -> None:
    """Refuse a graph with a number for each edge that a module might be given as its weight."""
    if WEIGHT not in wanted or WEIGHT in data or "edge_attr" in wanted or "edge_attr" not in data:
        return
    value = data.edge_attr
    if isinstance(value, Tensor) and value.is_floating_point() and value.squeeze(-1).dim() == 1:
        raise ValueError(
            f"{type(net).__name__} takes 'edge_weight', which the graph doesn't have, and has a "
            "number for each edge in 'edge_attr': if these are the weights, set data.edge_weight = "
            "data.edge_attr; otherwise leave them out, del data.edge_attr"
        )


def graph_parameter(wanted: dict[str, Any], data: Data) -> str:
    """Return the parameter for the graph itself, such as ``data``; "" if there is none."""
    if any(name in ADJACENCY for name in wanted):
        return ""
    needed = [name for name, default in wanted.items() if default is inspect.Parameter.empty]
    unknown = [name for name in needed if name not in data or name in UNSUPPORTED]
    return unknown[0] if len(unknown) == 1 and len(needed) == 1 else ""
