"""Heterogeneous graphs: conversion to one graph, partition, renumbering for each type.

For algorithms on a single graph, the nodes of all types are numbered type by type. After the
partition, a part is one range of rows of every type.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import cumsum

from gas.graph.attributes import BATCH_SIZE, PARTS, PERM, check_node_ids, is_node_list
from gas.graph.balance import balance_parts
from gas.graph.edges import Edges, check_pairs
from gas.graph.features import check_finite, select_rows, with_csr_features
from gas.graph.partition import PartitionOptions, find_parts
from gas.graph.permute import invert_permutation, renumber_ids
from gas.graph.report import check_ptr

OURS = (PARTS, PERM, "n_id", "e_id", "batch_size", "offset", "count")
EdgeType = tuple[str, str, str]
# Attributes without a row for each node, or edge, even if there are as many.
NOT_OF_NODES = (PARTS, "num_nodes")
NOT_OF_EDGES = ("edge_index", "edge_label_index")


class Types(NamedTuple):
    """The types of a graph, in the order in which its nodes and edges are numbered as one graph.

    * ``nodes``, ``edges``: the types.
    * ``first_node``, ``first_edge``: the first node and edge of each type, then their total, of
      shape ``[types + 1]``.
    """

    nodes: tuple[str, ...]
    edges: tuple[EdgeType, ...]
    first_node: Tensor
    first_edge: Tensor

    @property
    def num_nodes(self) -> dict[str, int]:
        """Number of nodes of each type."""
        return dict(zip(self.nodes, self.first_node.diff().tolist(), strict=True))

    def ends(self) -> list[tuple[int, int]]:
        """Return the positions of the source's and the destination's type for every edge type."""
        place = {name: i for i, name in enumerate(self.nodes)}
        return [(place[src], place[dst]) for src, _, dst in self.edges]


def edge_type_name(kind: EdgeType) -> str:
    """Return the name of an edge type in messages."""
    return f"('{kind[0]}', '{kind[1]}', '{kind[2]}')"


def types_of(data: HeteroData) -> Types:
    """Return the types of a graph, and check its edges and the sizes of its tensors."""
    sizes: dict[str, int] = {}
    for name in data.node_types:
        store = data[name]
        known = [
            value.size(0)
            for key, value in store.items()
            if isinstance(value, Tensor) and value.dim() > 0
            if key in ("x", "y", "n_id") or key.endswith("_mask")
        ]
        if "num_nodes" not in store and not known:
            raise ValueError(
                f"data['{name}'] has neither features nor 'num_nodes': set data['{name}'].num_nodes"
            )
        sizes[name] = int(store["num_nodes"] if "num_nodes" in store else known[0])
        _check_node_rows(name, store, sizes[name])
    if not sizes or not data.edge_types:
        raise ValueError("'data' has no types of nodes, or none of edges")
    counts = []
    for kind in data.edge_types:
        src, _, dst = kind
        for name in (src, dst):
            if name not in sizes:
                raise ValueError(
                    f"data[{edge_type_name(kind)}] joins nodes of type '{name}', which the graph "
                    f"doesn't have ({', '.join(sizes)})"
                )
        edge_index = data[kind].get("edge_index")
        if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.size(0) != 2:
            raise ValueError(
                f"data[{edge_type_name(kind)}] has no 'edge_index' of shape [2, E], by which "
                "heterogeneous graphs are read: set it, torch.empty(2, 0, dtype=torch.long) for no "
                "edges, in place of 'adj_t'"
            )
        for key in ("edge_index", "edge_label_index"):
            if key in data[kind]:
                name = f"{key} of {edge_type_name(kind)}"
                check_pairs(data[kind][key], sizes[src], sizes[dst], name)
        _check_edge_rows(kind, data[kind], edge_index.size(1))
        counts.append(edge_index.size(1))
    nodes, edges = tuple(sizes), tuple(data.edge_types)
    first_node, first_edge = (cumsum(torch.tensor(n)) for n in (list(sizes.values()), counts))
    return Types(nodes, edges, first_node, first_edge)


def _check_node_rows(kind: str, store: Any, size: int) -> None:
    """Refuse labels and masks of a type without a row per node, which wouldn't be renumbered."""
    for key, value in store.items():
        check_node_ids(f"data['{kind}'].{key}", key, value)
        if key not in ("x", "y") and not key.endswith("_mask"):
            continue
        if isinstance(value, list | np.ndarray) and len(value) == size:
            raise ValueError(
                f"data['{kind}'].{key} is of type {type(value).__name__}, whose rows would stay "
                "where they are when nodes are renumbered, expected a tensor: pass "
                f"torch.as_tensor({key})"
            )
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) != size:
            raise ValueError(
                f"data['{kind}'].{key} has {value.size(0)} rows, but there are {size} nodes of "
                "that type: expected one row per node"
            )


def _check_edge_rows(kind: EdgeType, store: Any, size: int) -> None:
    """Refuse attributes of an edge type that haven't a row for each of its edges."""
    for key in ("edge_attr", "edge_weight"):
        value = store.get(key)
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) != size:
            raise ValueError(
                f"data[{edge_type_name(kind)}].{key} has {value.size(0)} rows, but there are "
                f"{size} edges of that type: expected one row per edge"
            )


def check_features(data: HeteroData) -> None:
    """Refuse NaN and infinite features of nodes and edges."""
    for name in data.node_types:
        check_finite(f"data['{name}'].x", data[name].get("x"))
    for kind in data.edge_types:
        check_finite(f"data[{edge_type_name(kind)}].edge_attr", data[kind].get("edge_attr"))


def with_hetero_csr_features(data: HeteroData) -> HeteroData:
    """Convert sparse features of node types to CSR; return the graph itself if none needs it."""
    out = data
    for name in data.node_types:
        x = data[name].get("x")
        made = x if x is None else with_csr_features(Data(x=x), f"data['{name}'].x").x
        if made is not x:
            out = copy.copy(data) if out is data else out
            out[name].x = made
    return out


def to_homogeneous_edges(data: HeteroData, types: Types) -> Edges:
    """Return all edges, between nodes that are numbered as one graph."""
    first = types.first_node
    pairs = [
        data[kind].edge_index.cpu().long() + torch.stack([first[src], first[dst]])[:, None]
        for kind, (src, dst) in zip(types.edges, types.ends(), strict=True)
    ]
    src, dst = torch.cat(pairs, dim=1)
    return Edges(src, dst, None, int(first[-1]))


def cluster_heterogeneous(
    data: HeteroData, num_parts: Any, options: PartitionOptions, check: bool
) -> HeteroData:
    """Partition a heterogeneous graph; see :func:`gas.cluster`. Each type gets ``parts``."""
    data = with_hetero_csr_features(data)
    types = types_of(data)
    if check:
        check_features(data)
    for store in data.stores[1:]:
        taken = [key for key in OURS if key in store]
        if taken:
            raise ValueError(
                f"data['{store._key}'] has '{taken[0]}' already, which gas.cluster or a "
                "mini-batch sets: pass the graph as it was before, or rename the attribute"
            )
    edges = to_homogeneous_edges(data, types)
    perm, ptr = find_parts(edges, num_parts, options)
    part = torch.empty_like(perm)
    part[perm] = torch.repeat_interleave(ptr.diff())
    if options.method != "random":
        part = balance_parts(part, ptr.numel() - 1, _classes(data, types), edges)
    start = time.perf_counter()
    out = _permute(data, types, part, ptr.numel() - 1)
    if options.log:
        print(f"Permuted the graph [{time.perf_counter() - start:.2f} s]", file=sys.stderr)
    return out


def _classes(data: HeteroData, types: Types) -> Tensor:
    """Return the classes to balance: node types, labelled nodes separately, of shape ``[N]``."""
    found = []
    for number, (name, size) in enumerate(types.num_nodes.items()):
        mask = data[name].get("train_mask")
        labelled = torch.zeros(size, dtype=torch.long)
        if isinstance(mask, Tensor) and mask.size(0) == size:
            labelled = mask.view(size, -1).any(dim=1).cpu().long()
        found.append(2 * number + labelled)
    return torch.cat(found)


def _permute(data: HeteroData, types: Types, part: Tensor, num_parts: int) -> HeteroData:
    """Renumber the nodes, so that each part is one range of rows of every type."""
    out = copy.copy(data)
    if BATCH_SIZE in out._global_store:  # Of other parts, or of a mini-batch of PyG's.
        del out._global_store[BATCH_SIZE]
    new_ids = {}
    for number, (name, size) in enumerate(types.num_nodes.items()):
        first = int(types.first_node[number])
        mine = part[first : first + size]
        perm = mine.sort(stable=True).indices
        new_id = new_ids[name] = invert_permutation(perm)
        store = out[name]
        for key, value in list(data[name].items()):
            if is_node_list(key, value):
                store[key] = renumber_ids(key, value, new_id)
            elif is_row(data, name, key, size):
                store[key] = select_rows(value, perm)
        store.num_nodes = size
        store[PERM] = perm
        store[PARTS] = cumsum(torch.bincount(mine, minlength=num_parts))
    for kind in types.edges:
        store = out[kind]
        for key in ("edge_index", "edge_label_index"):
            if key in store:
                src, dst = store[key].long().cpu()
                store[key] = torch.stack([new_ids[kind[0]][src], new_ids[kind[2]][dst]])
    return out


def is_row(data: HeteroData, kind: str | EdgeType, key: str, size: int) -> bool:
    """Return whether an attribute is a tensor with a row for each node, or edge, of a type.

    Args:
        data: The graph.
        kind: A type of nodes or of edges.
        key: The name of an attribute.
        size: The number of nodes or edges of the type.
    """
    value, others = data[kind][key], NOT_OF_EDGES if isinstance(kind, tuple) else NOT_OF_NODES
    is_tensor = isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == size
    return is_tensor and key not in others


def parts_of(data: HeteroData, types: Types) -> list[Tensor]:
    """Return the parts of each type, each of shape ``[num_parts + 1]``."""
    found = [data[name].get(PARTS) for name in types.nodes]
    if any(not isinstance(parts, Tensor) for parts in found):
        raise ValueError("the graph has no 'parts': cut it, data = gas.cluster(data, num_parts)")
    for parts, size in zip(found, types.num_nodes.values(), strict=True):
        if parts.numel() != found[0].numel():
            raise ValueError("the types of the graph have different numbers of 'parts'")
        check_ptr(parts, size)
    return found
