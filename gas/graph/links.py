"""Pairs of nodes for link prediction: read them, look up their edges, remove these."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.edges import check_ids, read_graph, to_csr, with_edge_index
from gas.graph.entries import has_entry

PAIRS = "edge_label_index"  # PyG's names of pairs and their labels.
LABELS = "edge_label"
BLOCK = 1 << 22  # Edges that are looked up at a time.


def are_linked(rowptr: Tensor, col: Tensor, pairs: Tensor) -> Tensor:
    """Return whether pairs ``[2, K]`` are edges, in either direction; a bool tensor ``[K]``."""
    src, dst = pairs
    return has_entry(rowptr, col, dst, src) | has_entry(rowptr, col, src, dst)


def read_pairs(data: Data, num_nodes: int) -> Tensor:
    """Return the pairs of nodes of ``data.edge_label_index``, of shape ``[2, K]``, int64."""
    pairs = data.get(PAIRS)
    if pairs is None:
        raise ValueError(
            "the graph has no 'edge_label_index', the pairs of nodes to learn from: split its "
            "edges, torch_geometric.transforms.RandomLinkSplit(disjoint_train_ratio=0.3), or set "
            "data.edge_label_index, before gas.cluster, which renumbers them"
        )
    is_tensor = isinstance(pairs, Tensor)
    are_ids = is_tensor and pairs.dtype in (torch.int64, torch.int32)
    if not are_ids or pairs.dim() != 2 or pairs.size(0) != 2 or pairs.size(1) == 0:
        what = f"{pairs.dtype} of shape {list(pairs.shape)}" if is_tensor else type(pairs).__name__
        raise ValueError(f"'{PAIRS}' is {what}, expected ids of nodes of shape [2, K], K > 0")
    check_ids(pairs, num_nodes, PAIRS)
    return pairs.long()


def remove_links(data: Data, edge_label_index: Tensor | None = None) -> Data:
    """Return a graph without the edges to predict, in both directions.

    Otherwise messages along these edges would reveal them. Remove them before the graph is
    normalised and partitioned::

        train = gas.graph.remove_links(data, positives)
        graph = gas.cluster(train, num_parts=40, model=model)
        loader = gas.loader.LinkLoader(graph, batch_size=10, shuffle=True)

    ``torch_geometric.transforms.RandomLinkSplit`` with a ``disjoint_train_ratio`` selects such
    edges at random.

    Args:
        data: The graph; it is not modified.
        edge_label_index: The pairs of nodes to predict, of shape ``[2, K]``.
            (default: ``data.edge_label_index``)

    Returns:
        The other edges with their attributes, self-loops included, and ``edge_label_index``.

    Raises:
        ValueError: If the pairs aren't of the graph's nodes, or no edge is left.
    """
    out = copy.copy(with_edge_index(data))
    edges = read_graph(out)
    if edge_label_index is not None:
        out[PAIRS] = edge_label_index
        if LABELS in out and edge_label_index is not data.get(PAIRS):
            del out[LABELS]  # Of other pairs.
    pairs = read_pairs(out, edges.num_nodes)
    if "edge_index" not in out:
        raise ValueError(
            "'data' has an 'adj_t' that isn't torch.sparse_csr, and no 'edge_index': take the "
            "edges out before T.ToSparseTensor"
        )
    src, dst = edges.src, edges.dst
    targets = to_csr(edges._replace(src=pairs[0], dst=pairs[1], weight=None))
    blocks = zip(src.split(BLOCK), dst.split(BLOCK), strict=True)
    taken = torch.cat(
        [are_linked(targets.rowptr, targets.col, torch.stack(each)) for each in blocks]
    )
    kept = ~taken | (src == dst)
    if kept.numel() and not bool(kept.any()):
        raise ValueError(
            f"'{PAIRS}' has every edge of the graph, so that none is left to pass messages: tell "
            "some of them, torch_geometric.transforms.RandomLinkSplit(disjoint_train_ratio=0.3)"
        )
    labels = {key: out[key] for key in (PAIRS, LABELS) if key in out}
    for key in labels:  # PyG could take them for attributes of edges.
        del out[key]
    out = out.edge_subgraph(kept)
    out.num_nodes = edges.num_nodes
    for key, value in labels.items():
        out[key] = value
    return out
