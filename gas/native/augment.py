"""Subsets of exact size and ego-graph counts: the native kernels, and their pure-torch twins.

The functions don't check their arguments; :mod:`gas.augment` does. Results equal those of the twins
bitwise. On a GPU, the host doesn't wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.index import ptr2index

from gas.native import extension as native
from gas.native.dropout import random_bits
from gas.native.matrix import native_sparse


def on_host(tensor: Tensor) -> bool:
    """Return whether ``tensor`` can be read without waiting for a device."""
    return tensor.device.type == "cpu"


# Subsets ------------------------------------------------------------------------------------------


def subset(
    size: int,
    k: Tensor,
    seed: int,
    device: torch.device,
    among: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Draw ``k`` elements, every subset of that size being equally likely.

    They are those with the smallest keys of a counter-based generator, which are distinct.

    Args:
        size: The number of elements.
        k: How many to draw, of shape ``[]``, a whole number of any dtype, on ``device``.
        seed: The seed of the generator, in ``[0, 2^63)``.
        device: Where to put the result.
        among: Which elements may be drawn, of shape ``[size]``, bool. (default: all)
        count: How many those are, of shape ``[]``; at least ``k``. (default: ``size``)

    Returns:
        Of shape ``[size]``, bool: true for what was drawn.
    """
    if not native.has_kernels(k, among):
        return _subset_torch(size, k, seed, device, among)
    drawn = torch.empty(size, dtype=torch.bool, device=k.device)
    if on_host(k):
        among_count = size if count is None else int(count)
        native.run("draw_subset", k.device, size, int(k), seed, among, among_count, drawn)
    else:
        native.run("draw_subset", k.device, size, k.long(), seed, among, drawn)
    return drawn


def _subset_torch(
    size: int, k: Tensor, seed: int, device: torch.device, among: Tensor | None
) -> Tensor:
    """Draw by the order of all keys, of equal ones the first; the host doesn't wait."""
    key = random_bits(size, seed, device) ^ torch.iinfo(torch.int64).min  # Kernels: unsigned.
    if among is not None:
        key = torch.where(among, key, torch.iinfo(torch.int64).max)
    rank = torch.empty_like(key).scatter_(
        0, key.argsort(stable=True), torch.arange(size, device=device)
    )
    drawn = rank < k
    return drawn if among is None else drawn & among


# Entries ------------------------------------------------------------------------------------------


def find_kept_entries(rowptr: Tensor, ids: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Select entries of a sparse matrix in compressed rows.

    Args:
        rowptr: First entry of each row, of shape ``[rows + 1]``, int32.
        ids: The position of every entry in ``kept``, of shape ``[entries]``, int64.
        kept: Whether entries stay, bool.

    Returns:
        The positions of those that stay, of shape ``[n]``, int64, and their rows, of shape
        ``[rows + 1]``, int32.
    """
    if not native.on_cpu(rowptr, ids, kept):
        entry = kept.index_select(0, ids).nonzero().view(-1)
        return entry, torch.searchsorted(entry, rowptr.long()).to(torch.int32)
    entry, out = torch.empty_like(ids), torch.empty_like(rowptr)
    size = rowptr.numel() - 1
    count = native.run("kept_entries", rowptr.device, rowptr, size, ids, kept, out, entry)
    return entry[:count], out


# Ego-graphs ---------------------------------------------------------------------------------------


class EgoGraph(NamedTuple):
    """The ``E`` edges of a graph of ``n`` nodes, its self-loops apart, as ego-graphs need them.

    ``rowptr`` of shape ``[n + 1]`` and ``col`` of shape ``[E]``, int32, rows being destinations;
    ``unit`` of shape ``[E]``, int32: which mask entry decides about an edge, ``None`` for its own
    position; ``loops`` of shape ``[n]``, float64: one more than the node's self-loops. ``start`` is
    what :func:`~gas.native.matrix.find_starts` finds.
    """

    rowptr: Tensor
    col: Tensor
    unit: Tensor | None
    loops: Tensor
    start: Tensor


def ego_hop(graph: EgoGraph, kept: Tensor, x: Tensor) -> Tensor:
    """Add up one hop of ego-graph sizes: ``(A' + D) x[:, 0]`` and ``(A + D) x[:, 1]``.

    ``A'`` has the kept edges alone, ``D`` is diagonal: 1 and the self-loops. See ``augment/ego.h``.

    Args:
        graph: The graph ``A``.
        kept: Whether ``A'`` keeps each unit, of shape ``[units]``, bool.
        x: Of shape ``[n, 2]``, float64, contiguous.
    """
    if not native.has_kernels(x, kept, graph.col):
        return _ego_hop_torch(graph, kept, x)
    out = torch.empty_like(x)
    matrix = native_sparse(x.size(0), graph.rowptr, graph.col, graph.unit, graph.start)
    native.run("ego_hop", x.device, matrix, kept, graph.loops, x, out)
    return out


def _ego_hop_torch(graph: EgoGraph, kept: Tensor, x: Tensor) -> Tensor:
    row = ptr2index(graph.rowptr.long(), graph.col.numel())
    values = x.index_select(0, graph.col)
    values[:, 0] *= kept if graph.unit is None else kept.index_select(0, graph.unit)
    return (graph.loops[:, None] * x).index_add_(0, row, values)
