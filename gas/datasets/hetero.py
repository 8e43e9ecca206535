"""Convert a graph with types of nodes and edges to PyG's ``HeteroData``."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import NodeStorage

from gas.datasets.edges import with_reverse
from gas.graph import MASKS, known_target_mask, select_rows
from gas.history import is_encoded
from gas.native import is_sparse

NODE, RELATION = "node", "to"  # Names for a graph without types.
NAMES = ("edge_type_names", "node_type_names")


def to_hetero_data(data: Data, undirected: bool = False) -> HeteroData:
    """Split a graph by ``node_type`` and ``edge_type`` into a ``HeteroData``.

    A type of edges becomes a relation for each pair of node types that it connects. Types of nodes
    without labels get neither ``y`` nor masks.

    Args:
        data: The graph, with an ``edge_index``, which is not modified; without types its nodes are
            of type ``node``, its edges ``("node", "to", "node")``.
        undirected: Add reverses: within a type of nodes, the missing reverses; for a relation
            between two types, a relation ``rev_...`` of all its reverses. (default: ``False``)
    """
    num_nodes = int(data.num_nodes or 0)
    kind, kinds = _types(data, "node_type", num_nodes, NODE)
    if undirected:
        data = with_reverse(copy.copy(data), kind)
    relation, relations = _types(data, "edge_type", data.edge_index.size(1), RELATION)
    src, dst = data.edge_index.long()
    joined = (kind[src] * len(relations) + relation) * len(kinds) + kind[dst]
    distinct, joined = joined.unique(return_inverse=True)
    triples = [
        (kinds[i // (len(relations) * len(kinds))], relations[i // len(kinds) % len(relations)],
         kinds[i % len(kinds)])
        for i in distinct.tolist()
    ]  # fmt: skip
    whole, apart = copy.copy(data), {}
    for key in ("x", "node_id", *NAMES):
        value = whole.get(key)
        if key in NAMES or isinstance(value, np.ndarray) or is_sparse(value) or is_encoded(value):
            apart[key] = value
            whole.pop(key, None)
    whole.num_nodes = num_nodes
    out = whole.to_heterogeneous(kind, joined, kinds, triples)
    for number, name in enumerate(kinds):
        store, rows = out[name], (kind == number).nonzero().view(-1)
        for key in ("x", "node_id"):
            value = apart.get(key)
            if value is not None:
                is_array = isinstance(value, np.ndarray)
                store[key] = value[rows.numpy()] if is_array else select_rows(value, rows)
        if "y" in store and not _has_labels(store):
            for key in ("y", *MASKS):
                store.pop(key, None)
        if "x" not in store:
            store.num_nodes = rows.numel()
    if undirected:
        _add_reverses(out)
    return out


def _types(data: Data, key: str, count: int, default: str) -> tuple[Tensor, list[str]]:
    """Return the type of each node or edge, and the names of types as text."""
    types, names = data.get(key), data.get(f"{key}_names")
    if types is None:
        return torch.zeros(count, dtype=torch.long), [default]
    if list(types.shape) != [count]:
        raise ValueError(
            f"{key!r} has shape {list(types.shape)}, expected [{count}]: a type for each "
            f"{key.removesuffix('_type')}"
        )
    types = types.long()
    if names is None:
        distinct, types = types.unique(return_inverse=True)
        names = distinct.tolist()
    return types, [str(name) for name in names]


def _has_labels(store: NodeStorage) -> bool:
    """Return whether a node of a type has a label, or is in a mask if labels are ``[N, C]``."""
    y = store.y
    if y.dim() > 1:
        masks = [store[key] for key in MASKS if key in store]
        return not masks or any(bool(mask.any()) for mask in masks)
    return bool(known_target_mask(y).any())


def _add_reverses(data: HeteroData) -> None:
    """Add the reverse of each relation between two types of nodes."""
    for src, name, dst in data.edge_types:
        store = data[src, name, dst]
        if src == dst:  # They have reverses already.
            continue
        back = dst, f"rev_{name}", src
        if back in data.edge_types:
            raise ValueError(
                f"'undirected' is True, but the graph has edges of type {back!r} already: leave it "
                "out, or rename them"
            )
        for key, value in store.items():
            data[back][key] = value.flip(0) if key == "edge_index" else value
