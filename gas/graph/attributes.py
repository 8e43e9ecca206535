"""Attributes of a graph: the names that gas sets, rows of nodes and edges, copies."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.layout import layout_of

PERM = "perm"  # The row of the original graph of each node.
PARTS = "parts"  # The first row of each part.
BATCH_SIZE = "batch_size"  # The parts per mini-batch of the last loader, the default of others.
SHARDS = "shards"  # Of a graph for several processes, the first row of each shard.
SHARD = "shard"  # Of the local graph of a process, a :class:`Shard`.
PREPARED = "prepared_"  # The prefix of what a converted model computes for the whole graph.
EDGES = ("edge_index", "adj_t", "edge_weight")
MASKS = ("train_mask", "val_mask", "test_mask")
# Lists of node ids; "train_idx" is OGB's, the others are as common.
NODE_LISTS = re.compile(r"(train|val|valid|validation|test|unlabell?ed)_(idx|index|ids?|nodes?)")


def find_mark(data: Data) -> Tensor | None:
    """Return the mark of a graph whose edges were prepared for a converted model; else ``None``."""
    marks = (value for key, value in data.to_dict().items() if key.startswith(PREPARED))
    return next((each for each in marks if isinstance(each, Tensor) and each.dim() == 0), None)


def is_node_list(key: str, value: object) -> bool:
    """Return whether an attribute of a graph is a tensor of node ids, by its name."""
    if not isinstance(value, Tensor) or NODE_LISTS.fullmatch(key) is None:
        return False
    return value.dim() > 0 and value.dtype in (torch.int64, torch.int32, torch.int16)


def check_node_ids(name: str, key: str, value: object) -> None:
    """Refuse node ids, known by their key, that aren't a tensor of integers.

    Raises:
        ValueError: If they would stay as they are when nodes are renumbered; ``name`` names them.
    """
    if NODE_LISTS.fullmatch(key) is None or is_node_list(key, value):
        return
    if isinstance(value, Tensor):
        is_number = value.dim() > 0 and value.dtype != torch.bool
    else:
        is_number = isinstance(value, list | tuple | np.ndarray) and np.size(value) > 0
        is_number = is_number and np.asarray(value).dtype.kind in "iuf"
    if is_number:
        what = value.dtype if isinstance(value, Tensor) else f"of type {type(value).__name__}"
        raise ValueError(
            f"{name} is {what}, and its node ids would stay as they are when nodes are "
            f"renumbered, expected a tensor of int64: torch.as_tensor({key}).long()"
        )


def is_row_per_node(data: Data, key: str) -> bool:
    """Return whether ``data[key]`` is a tensor with one row per node."""
    value, sizes = data[key], _sizes(data)
    if not isinstance(value, Tensor):
        return False
    if sizes is None:
        return _is_by_row(data, key, value) and data.is_node_attr(key)
    return has_row_per_node(data, key, value, sizes)


def needs_row_per_node(key: str, shape: Sequence[int], num_edges: int) -> bool:
    """Return whether an attribute of a shape is refused unless it has a row per node.

    These are features, labels and masks, except masks with a row for each edge.
    """
    if key.endswith("_mask"):
        return key in MASKS or (*shape[:1],) != (num_edges,)
    return key in ("x", "y", "n_id")


def count_nodes_and_edges(data: Data) -> tuple[int, int]:
    """Return the numbers of nodes and edges that :func:`is_row_per_node` compares sizes with."""
    return _sizes(data) or (int(data.num_nodes or 0), int(data.num_edges))


def has_row_per_node(data: Data, key: str, value: Tensor, sizes: tuple[int, int]) -> bool:
    """Return whether a tensor has one row per node, given the numbers of nodes and edges."""
    if not _is_by_row(data, key, value) or value.size(0) != sizes[0]:
        return False
    return sizes[0] != sizes[1] or "edge" not in key


def is_row_per_edge(data: Data, key: str) -> bool:
    """Return whether ``data[key]`` is a tensor with one row per edge."""
    value, sizes = data[key], _sizes(data)
    if not isinstance(value, Tensor) or not _is_by_row(data, key, value):
        return False
    if sizes is None:
        return data.is_edge_attr(key)
    return value.size(0) == sizes[1] and (sizes[0] != sizes[1] or "edge" in key)


def keys_by_row(data: Data, keys: list[str]) -> tuple[list[str], list[str]]:
    """Return the attributes with one row per node, and those with one row per edge."""
    per_node = [key for key in keys if is_row_per_node(data, key)]
    return per_node, [key for key in keys if is_row_per_edge(data, key)]


def _sizes(data: Data) -> tuple[int, int] | None:
    """Return the numbers of nodes and edges; ``None`` if PyG has to count.

    PyG takes the number of edges from the first attribute with "edge" in its name, such as
    ``edge_label_index``, or ``edge_type`` of a graph to whose edges self-loops were added. Only
    mini-batches whose matrix isn't square are left to it.
    """
    edge_index = data.get("edge_index")
    if isinstance(edge_index, Tensor) and edge_index.dim() == 2:
        return int(data.num_nodes or 0), edge_index.size(1)
    adj_t = data.get("adj_t")
    if edge_index is not None or not isinstance(adj_t, Tensor) or adj_t.layout != torch.sparse_csr:
        return None
    return (adj_t.size(0), adj_t._nnz()) if adj_t.size(0) == adj_t.size(1) else None


def _is_by_row(data: Data, key: str, value: Tensor) -> bool:
    """Return whether a tensor is stacked along its first dimension, as PyG batches attributes."""
    named = key in ("edge_index", "adj_t", "num_nodes", "edge_label_index")
    named = named or (key.startswith("edge_label") and "edge_label_index" in data)  # Of those.
    if named or value.dim() == 0:
        return False
    # PyG stacks attributes with "index" in their name along the last dimension.
    dim = data.__cat_dim__(key, value)
    return isinstance(dim, int) and dim % value.dim() == 0


def clone_unless_learnable(tensor: Tensor) -> Tensor:
    """Return a copy that may be changed in place, or a learnable tensor itself."""
    return tensor if tensor.requires_grad else tensor.clone()


def remove_edges(data: Data) -> Data:
    """Return the graph without edges and weights, unless another attribute has a row per edge."""
    keys = [key for key in EDGES if key in data]
    if any(is_row_per_edge(data, key) for key, _ in data if key not in EDGES):
        return data
    out = copy.copy(data)
    out.num_nodes = data.num_nodes
    for key in keys:
        del out[key]
    return out


def copy_graph(data: Data, shared: Collection[str] = ()) -> Data:
    """Copy the tensors of a graph; a cached transpose of its adjacency is shared.

    Args:
        data: The graph. If its weights and the values of ``adj_t`` share memory, so do the copies.
        shared: Names of attributes that aren't copied. (default: none)
    """
    # This reads lazy rows of a batch once, for both.
    attributes = dict(data._store._mapping.items())
    out = copy.copy(data)
    new = out._store._mapping
    for key, value in attributes.items():
        if isinstance(value, Tensor) and key != "adj_t" and key not in shared:
            new[key] = clone_unless_learnable(value)
    adj_t, weight = attributes.get("adj_t"), attributes.get("edge_weight")
    if adj_t is None:
        return out
    layout = layout_of(adj_t)
    value = layout.value(adj_t)
    if value is not None and weight is not None and weight.data_ptr() == value.data_ptr():
        value = new["edge_weight"].view(-1)
    elif value is not None:
        value = clone_unless_learnable(value)
    new["adj_t"] = layout.with_value(adj_t, value)
    return out


def known_target_mask(y: Tensor) -> Tensor:
    """Return a mask of the known targets, of the shape of ``y``: not NaN, nor a negative class."""
    return ~y.isnan() if y.is_floating_point() else y >= 0
