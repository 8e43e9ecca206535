"""Renumbering the nodes of a graph, so that every part is one range of rows."""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from gas.graph.attributes import (
    BATCH_SIZE,
    PARTS,
    SHARD,
    SHARDS,
    is_node_list,
    is_row_per_edge,
    is_row_per_node,
)
from gas.graph.edges import Edges, check_pairs, read_graph, to_csr
from gas.graph.features import select_rows, with_csr_features
from gas.graph.folder.opening import check_is_graph
from gas.graph.layout import LAYOUTS, find_layout, layout_of
from gas.graph.shards import Shard
from gas.history import is_encoded
from gas.native import check_flags

BLOCK = 2**20  # Ids that are looked up at once.
LINE_BYTES = 64  # Size of a cache line.


@check_flags
def permute(data: Data, perm: Tensor, log: bool = True, *, in_place: bool = False) -> Data:
    """Renumber the nodes of a graph, so that every part becomes a contiguous range.

    Node-level tensors and masks are permuted, ``edge_index``, ``edge_label_index`` and ``adj_t``
    renumbered. The columns of ``edge_index`` keep their order, so edge-level tensors stay as they
    are; the entries of an ``adj_t`` are sorted by row and column again, and edge-level tensors
    with them. Node ids in tensors named ``train_idx``, ``val_index``, ``test_nodes`` and so on are
    renumbered; those under other names, lists, and arrays of NumPy stay as they are. Parts and
    shards of :func:`gas.cluster` are removed, and so are dictionaries of tensors.

    Args:
        data: The graph; it is not modified, unless ``in_place``.
        perm: The old id of every new node, of shape ``[N]``, from :func:`gas.metis`.
        log: Report progress on standard error. (default: ``True``)
        in_place: Overwrite the tensors of ``data``, which can't be used afterwards, also if this is
            interrupted. It then takes additional memory for some columns of the features only. The
            tensors must be writable. Sparse and encoded features, an ``adj_t``, and tensors that
            share memory are copied nevertheless. (default: ``False``)

    Returns:
        The renumbered graph.

    Raises:
        ValueError: If ``perm`` is not a permutation of the nodes, or ``data`` a shard.
    """
    check_is_graph(data)
    if isinstance(data.get(SHARD), Shard):
        raise ValueError(
            "'data' is the graph of one process, a shard of a graph, whose rows are where the "
            "others expect them: renumber the whole graph, before gas.cluster cuts it"
        )
    data = with_csr_features(data)
    return permute_edges(data, read_graph(data), perm, log, in_place)


def permute_edges(data: Data, edges: Edges, perm: Tensor, log: bool, in_place: bool) -> Data:
    """Renumber the nodes of a graph whose edges were read; see :func:`permute`."""
    start = time.perf_counter()
    num_nodes = edges.num_nodes
    if not isinstance(perm, Tensor) or perm.dtype != torch.long or perm.shape != (num_nodes,):
        what = f"{perm.dtype} of shape {list(perm.shape)}" if isinstance(perm, Tensor) else perm
        raise ValueError(f"'perm' is {what}, expected an int64 tensor of shape [{num_nodes}]")
    new_id = torch.full_like(perm, -1)
    inside = (perm >= 0) & (perm < num_nodes)
    new_id[perm[inside]] = torch.arange(num_nodes, device=perm.device)[inside]
    if bool((new_id < 0).any()):
        missing = int((new_id < 0).nonzero()[0])
        raise ValueError(f"'perm' lacks the node {missing}, expected every node exactly once")

    if "edge_label_index" in data:
        check_pairs(data.edge_label_index, num_nodes, num_nodes, "edge_label_index")
    writable = _writable(data, perm) if in_place else frozenset[str]()
    out = copy.copy(data)
    for key in (PARTS, SHARDS, BATCH_SIZE) if PARTS in out else (SHARDS,):
        out.pop(key, None)
    for key, value in data:
        if isinstance(value, dict) and any(isinstance(rows, Tensor) for rows in value.values()):
            del out[key]
        elif key in ("edge_index", "edge_label_index"):
            ids = value.as_tensor() if isinstance(value, EdgeIndex) else value
            out[key] = _look_up(new_id, ids.long(), key in writable)
        elif is_node_list(key, value):
            out[key] = renumber_ids(key, value, new_id)
        elif is_row_per_node(data, key):
            if key in writable:
                width = LINE_BYTES // value.element_size()  # Some columns at a time.
                for block in value.split(width, dim=1) if value.dim() == 2 else [value]:
                    block.copy_(block[perm])
            else:
                out[key] = select_rows(value, perm)
    if "adj_t" in data:
        edges = edges._replace(src=new_id[edges.src], dst=new_id[edges.dst])
        csr = to_csr(edges)
        weight = edges.weight
        if weight is not None and csr.e_id is not None:
            weight = weight[csr.e_id]
        layout = layout_of(data.adj_t)
        out.adj_t = (layout if layout.name in LAYOUTS else find_layout("csr")).make(
            csr.rowptr, csr.col, weight, num_nodes
        )
        if csr.e_id is not None:
            for key, _ in data:
                if key == "edge_index":
                    out[key] = out[key][:, csr.e_id]
                elif is_row_per_edge(data, key):
                    out[key] = select_rows(data[key], csr.e_id)
    if log:
        print(f"Permuted the graph [{time.perf_counter() - start:.2f} s]", file=sys.stderr)
    return out


def _writable(data: Data, perm: Tensor) -> frozenset[str]:
    """Return the names of dense tensors that share memory with no other tensor."""
    tensors = {
        key: value
        for key, value in data
        if type(value) is Tensor and value.layout == torch.strided and value.is_contiguous()
        if not (value.requires_grad or value.is_inference())
    }
    others = [value for key, value in data if isinstance(value, Tensor) and key not in tensors]
    taken = Counter(
        value.untyped_storage().data_ptr()
        for value in (*tensors.values(), *others, perm)
        if value.layout == torch.strided and not is_encoded(value)
    )
    return frozenset(
        key for key, value in tensors.items() if taken[value.untyped_storage().data_ptr()] == 1
    )


def _look_up(new_id: Tensor, ids: Tensor, in_place: bool) -> Tensor:
    """Return ``new_id[ids]``, perhaps in the memory of ``ids``."""
    if not in_place:
        return new_id[ids]
    for block in (block for row in ids for block in row.split(BLOCK)):
        block.copy_(new_id[block])
    return ids


def invert_permutation(perm: Tensor) -> Tensor:
    """Return the new id of every node, given the old id of every new one."""
    new_id = torch.empty_like(perm)
    new_id[perm] = torch.arange(perm.numel(), device=perm.device)
    return new_id


def renumber_ids(key: str, ids: Tensor, new_id: Tensor) -> Tensor:
    """Return the new ids of the nodes in a list."""
    ids = ids.long()
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= new_id.numel()):
        low, high = int(ids.min()), int(ids.max())
        raise ValueError(
            f"'{key}' holds the node id {low if low < 0 else high}, expected ids in "
            f"[0, {new_id.numel()}): correct them, or rename it if it holds something else"
        )
    return new_id[ids]
