"""Find edges without a reverse, and add the reverses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import Edges, is_row_per_edge, read_graph


def _is_one_way(edges: Edges) -> Tensor:
    """Return a mask of the edges without a reverse, of shape ``[E]``; false for self-loops."""
    there, back = (
        a * edges.num_nodes + b for a, b in ((edges.src, edges.dst), (edges.dst, edges.src))
    )
    known, wanted = np.sort(there.numpy(force=True)), back.numpy(force=True)
    order = np.argsort(wanted)  # Sorted look-ups use the CPU's cache.
    at = np.searchsorted(known, wanted[order]).clip(max=max(len(known) - 1, 0))
    lacks = np.empty(len(wanted), dtype=bool)
    lacks[order] = known[at] != wanted[order]
    return torch.from_numpy(lacks)


def one_way_share(edges: Edges) -> float:
    """Return the fraction of edges without a reverse, self-loops excluded."""
    num_edges = int((edges.src != edges.dst).sum())
    return int(_is_one_way(edges).sum()) / num_edges if num_edges else 0.0


def with_reverse(data: Data, kind: Tensor | None = None) -> Data:
    """Append the missing reverses of edges, with their attributes.

    An edge in the other direction of another ``edge_type`` counts as a reverse.

    Args:
        data: The graph, which is modified.
        kind: The type of each node, of shape ``[N]``: only edges within a type get reverses.
            (default: all edges)
    """
    if "adj_t" in data:
        raise ValueError(
            "'undirected' is True, but the graph has an 'adj_t': make it symmetric where it is "
            "made, or give an 'edge_index'"
        )
    edges = read_graph(data)
    lacks = _is_one_way(edges)
    if kind is not None:
        lacks &= kind[edges.src.long()] == kind[edges.dst.long()]
    for key in [key for key, _ in data if is_row_per_edge(data, key)]:
        data[key] = torch.cat([data[key], data[key][lacks]])
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, lacks].flip(0)], dim=1)
    return data
