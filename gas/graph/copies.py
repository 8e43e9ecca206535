"""Graphs in tensors of their own."""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch import Tensor
from torch_geometric.data import Data

from gas.graph.edges import is_row_per_edge
from gas.graph.layout import layout_of

EDGES = ("edge_index", "adj_t", "edge_weight")


def clone_unless_learnable(tensor: Tensor) -> Tensor:
    """Return a copy that may be changed in place, or a learnable tensor itself."""
    return tensor if tensor.requires_grad else tensor.clone()


def without_edges(data: Data) -> Data:
    """Return the graph without its edges and their weights, of which the caller has a copy.

    They stay where another attribute has a row per edge.
    """
    keys = [key for key in EDGES if key in data]
    if any(is_row_per_edge(data, key) for key, _ in data if key not in EDGES):
        return data
    out = copy.copy(data)
    out.num_nodes = data.num_nodes
    for key in keys:
        del out[key]
    return out


def copy_graph(data: Data, shared: Collection[str] = ()) -> Data:
    """Copy a graph into new tensors; a transpose of its adjacency is shared.

    Args:
        data: The graph; if its weights are the values of ``adj_t``, those of the copy are as well.
        shared: Names of attributes that aren't copied. (default: none)
    """
    # Rows that a batch has not read are read here, for both.
    attributes = list(data._store._mapping.items())
    out = copy.copy(data)
    for key, value in attributes:
        if isinstance(value, Tensor) and key != "adj_t" and key not in shared:
            out[key] = clone_unless_learnable(value)
    adj_t, weight = data.get("adj_t"), data.get("edge_weight")
    if adj_t is None:
        return out
    layout = layout_of(adj_t)
    value = layout.value(adj_t)
    if value is not None and weight is not None and weight.data_ptr() == value.data_ptr():
        value = out.edge_weight.view(-1)
    elif value is not None:
        value = clone_unless_learnable(value)
    out.adj_t = layout.with_value(adj_t, value)
    return out
