"""Edges and their reverses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.edges import Edges, is_row_per_edge, read_graph


def _lacks_reverse(edges: Edges) -> Tensor:
    """Which edges have no reverse, of shape ``[E]``; a loop is its own."""
    there = np.sort((edges.src * edges.num_nodes + edges.dst).numpy(force=True))
    back = (edges.dst * edges.num_nodes + edges.src).numpy(force=True)
    order = np.argsort(back)  # Looked up in order, neighbours are found in the cache.
    at = np.searchsorted(there, back[order]).clip(max=max(len(there) - 1, 0))
    lacks = np.empty(len(back), dtype=bool)
    lacks[order] = there[at] != back[order]
    return torch.from_numpy(lacks)


def share_one_way(edges: Edges) -> float:
    """The share of edges without a reverse, loops apart."""
    num_edges = int((edges.src != edges.dst).sum())
    return int(_lacks_reverse(edges).sum()) / num_edges if num_edges else 0.0


def with_reverse(data: Data) -> Data:
    """Adds the reverse of every edge that lacks it, with its attributes, after the others.

    Args:
        data: The graph, which is modified.

    Raises:
        ValueError: If the edges are those of an ``adj_t``.
    """
    if "adj_t" in data:
        raise ValueError(
            "'undirected' is True, but the graph has an 'adj_t': make it symmetric where it is "
            "made, or give an 'edge_index'"
        )
    lacks = _lacks_reverse(read_graph(data))
    for key in [key for key, _ in data if is_row_per_edge(data, key)]:
        data[key] = torch.cat([data[key], data[key][lacks]])
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, lacks].flip(0)], dim=1)
    return data
