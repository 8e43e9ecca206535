"""Find, insert and remove entries of sorted compressed rows; pairs of nodes for link prediction."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.attributes import find_mark
from gas.graph.edges import check_pairs, expand_ranges, read_graph, to_csr, with_edge_index
from gas.native import coo_to_csr

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
    pairs = check_pairs(pairs, num_nodes, num_nodes, PAIRS)
    if not pairs.numel():
        raise ValueError(f"'{PAIRS}' has no pairs of nodes, expected at least one to learn from")
    return pairs


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
    if find_mark(data) is not None:
        raise ValueError(
            "'data' was prepared for a converted model, by the degrees of all edges: remove links "
            "of the graph as it was before"
        )
    out = copy.copy(with_edge_index(data))
    edges = read_graph(out)
    if edge_label_index is not None:
        out[PAIRS] = edge_label_index
        if LABELS in out and edge_label_index is not data.get(PAIRS):
            del out[LABELS]  # Of other pairs.
    pairs = read_pairs(out, edges.num_nodes)
    src, dst = edges.src, edges.dst
    targets = to_csr(edges._replace(src=pairs[0], dst=pairs[1], weight=None))
    blocks = zip(src.split(BLOCK), dst.split(BLOCK), strict=True)
    taken = torch.cat(
        [are_linked(targets.rowptr, targets.col, torch.stack(each)) for each in blocks]
    )
    kept = ~taken | (src == dst)
    if kept.numel() and not bool(kept.any()):
        raise ValueError(
            f"'{PAIRS}' has every edge of the graph, so that none is left to pass messages: "
            "predict only some of them, "
            "torch_geometric.transforms.RandomLinkSplit(disjoint_train_ratio=0.3)"
        )
    labels = {key: out[key] for key in (PAIRS, LABELS) if key in out}
    for key in labels:  # PyG could take them for attributes of edges.
        del out[key]
    out = out.edge_subgraph(kept)
    out.num_nodes = edges.num_nodes
    for key, value in labels.items():
        out[key] = value
    return out


# Entries ------------------------------------------------------------------------------------------


def first_entry(
    rowptr: Tensor, col: Tensor, row: Tensor, value: Tensor, after: bool = False
) -> Tensor:
    """Return the first entry of each row whose column is at least some value, by binary search.

    Args:
        rowptr: First entry of each row, of shape ``[rows + 1]``.
        col: Columns, sorted in each row, of shape ``[E]``.
        row: The rows, of shape ``[K]``, int64.
        value: The columns, of shape ``[K]``, int64.
        after: Return the first entry whose column is greater. (default: ``False``)

    Returns:
        Of shape ``[K]``, int64; the end of the row where there is none.
    """
    low, high = rowptr[row].long(), rowptr[row + 1].long()
    longest = int((high - low).max()) if row.numel() else 0
    for _ in range(longest.bit_length()):
        middle = (low + high) >> 1
        found = col[middle.clamp(max=col.numel() - 1)]
        below = (low < high) & ((found <= value) if after else (found < value))
        high = torch.where(below | (low >= high), high, middle)
        low = torch.where(below, middle + 1, low)
    return low


def has_entry(rowptr: Tensor, col: Tensor, row: Tensor, value: Tensor) -> Tensor:
    """Return whether rows have entries in given columns, ``[K]``; see :func:`first_entry`."""
    at = first_entry(rowptr, col, row, value)
    if not col.numel():
        return torch.zeros_like(row, dtype=torch.bool)
    return (at < rowptr[row + 1]) & (col[at.clamp(max=col.numel() - 1)] == value)


def find_entries(rowptr: Tensor, col: Tensor, row: Tensor, value: Tensor) -> Tensor:
    """Return the positions of all entries of some rows and columns, equal ones included."""
    begin = first_entry(rowptr, col, row, value)
    count = first_entry(rowptr, col, row, value, after=True) - begin
    return expand_ranges(begin, count)


def entry_rows(rowptr: Tensor, entry: Tensor) -> Tensor:
    """Return the row of each entry, of shape ``[K]``."""
    return torch.searchsorted(rowptr, entry, right=True) - 1


def insert_entries(
    rowptr: Tensor, col: Tensor, row: Tensor, new_col: Tensor, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Insert entries into a CSR matrix, and append empty rows.

    A new entry comes after old ones of the same row and column.

    Args:
        rowptr: First entry of each row, of shape ``[rows + 1]``.
        col: Columns, sorted in each row, of shape ``[E]``.
        row: The row of each new entry, of shape ``[K]``, int64.
        new_col: Its column, of shape ``[K]``, int64.
        num_rows: The new number of rows.

    Returns:
        The new ``rowptr`` and ``col``, and where each entry comes from, of shape ``[E + K]``: below
        ``E`` an old entry, else the new entry of that number less ``E``.
    """
    longer = torch.cat([rowptr, rowptr[-1:].expand(num_rows + 1 - rowptr.numel())])
    added, new_col, order = coo_to_csr(row.contiguous(), new_col.contiguous(), num_rows)
    row = row[order]
    at = first_entry(longer, col, row, new_col, after=True) + torch.arange(row.numel())
    is_old = torch.ones(col.numel() + row.numel(), dtype=torch.bool)
    is_old[at] = False
    source = torch.empty(is_old.numel(), dtype=torch.long)
    out = torch.empty(is_old.numel(), dtype=col.dtype)
    # NumPy assigns by a mask ten times as fast as PyTorch.
    source.numpy()[is_old.numpy()] = torch.arange(col.numel()).numpy()
    out.numpy()[is_old.numpy()] = col.numpy()
    source[at], out[at] = col.numel() + order, new_col.to(col.dtype)
    return longer + added, out, source


def remove_entries(rowptr: Tensor, col: Tensor, entry: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Remove entries.

    Returns:
        ``rowptr``, ``col``, and the old positions of the remaining entries.
    """
    stays = torch.ones(col.numel(), dtype=torch.bool)
    stays[entry] = False
    taken = torch.bincount(entry_rows(rowptr, entry.unique()), minlength=rowptr.numel() - 1)
    fewer = rowptr.clone()
    fewer[1:] -= taken.cumsum(0)
    kept = torch.from_numpy(np.flatnonzero(stays.numpy()))
    return fewer, col[kept], kept


def find_changed_rows(
    before: tuple[Tensor, Tensor, Sequence[Tensor]], after: tuple[Tensor, Tensor, Sequence[Tensor]]
) -> Tensor:
    """Return the rows that differ in an entry or its attributes, and new rows.

    Args:
        before: ``rowptr``, ``col``, and tensors with a row for each entry, such as weights.
        after: The same afterwards; rows may have been appended.
    """
    (old_ptr, old_col, old_values), (new_ptr, new_col, new_values) = before, after
    num_old, num_new = old_ptr.numel() - 1, new_ptr.numel() - 1
    size = new_ptr.diff()
    is_alike = torch.zeros(num_new, dtype=torch.bool)
    is_alike[:num_old] = size[:num_old] == old_ptr.diff()
    old_at = torch.repeat_interleave(is_alike[:num_old], old_ptr.diff())
    new_at = torch.repeat_interleave(is_alike, size)
    differs = old_col[old_at] != new_col[new_at]
    for old, new in zip(old_values, new_values, strict=True):
        change = old[old_at] != new[new_at]
        differs |= change.flatten(1).any(1) if change.dim() > 1 else change
    is_alike[entry_rows(new_ptr, new_at.nonzero().view(-1)[differs])] = False
    return (~is_alike).nonzero().view(-1)
