"""Shards: the nodes of a graph that one process trains, and the local graph of that process.

:func:`gas.cluster` partitions a graph into shards, each one range of rows. A process works on a
local graph: the nodes of its shard, every edge into them, and *replicas* of the sources of these
edges in other shards. Replicas have features and history rows, but no edges into them.
"""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data

from gas.graph.attributes import (
    PARTS,
    PERM,
    SHARD,
    SHARDS,
    is_node_list,
    is_row_per_edge,
    is_row_per_node,
)
from gas.graph.edges import check_ids, read_graph
from gas.graph.features import select_rows, with_csr_features
from gas.graph.layout import LAYOUTS, Layout, find_layout, implicit_ones, layout_of
from gas.graph.versions import GraphVersions
from gas.history import Encoded
from gas.native import BLOCK, check_integer, coo_to_csr, is_sparse, process_rank


@dataclass(frozen=True, eq=False)
class Shard:
    """Attribute ``shard`` of a local graph: its rows and edges in the whole graph.

    Tensors are int64, and on the CPU.

    * ``rank``: the number of the shard, and of its process.
    * ``bounds``: the first row of every shard in the whole graph, of shape ``[W + 1]``.
    * ``replicas``: the nodes of other shards that have an edge into a node of this one, each once:
      rows of the whole graph, increasing, of shape ``[R]``.
    * ``edges``: the id of each local edge in the whole graph, of shape ``[E]``; see ``e_id`` of
      mini-batches.
    * ``fingerprint``: a checksum of the graph and its shards, to compare with other processes.
    """

    rank: int
    bounds: Tensor
    replicas: Tensor
    edges: Tensor
    fingerprint: int

    @property
    def num_ranks(self) -> int:
        """The number of shards, W."""
        return self.bounds.numel() - 1

    @cached_property
    def begin(self) -> int:
        """The first of its rows in the whole graph."""
        return int(self.bounds[self.rank])

    @cached_property
    def end(self) -> int:
        """The row after its last."""
        return int(self.bounds[self.rank + 1])

    @property
    def num_own(self) -> int:
        """Number of own nodes, without replicas: the first rows of the local graph."""
        return self.end - self.begin

    @cached_property
    def num_nodes(self) -> int:
        """The number of nodes of the whole graph."""
        return int(self.bounds[-1])

    @cached_property
    def nodes(self) -> Tensor:
        """The row of the whole graph of each local row, of shape ``[num_own + R]``."""
        return torch.cat([torch.arange(self.begin, self.end), self.replicas])

    @cached_property
    def replica_ptr(self) -> Tensor:
        """Ranges of replicas by owner, of shape ``[W + 1]``.

        The nodes of shard ``r`` are ``replicas[replica_ptr[r] : replica_ptr[r + 1]]``.
        """
        return torch.searchsorted(self.replicas, self.bounds)

    def __repr__(self) -> str:
        return (
            f"Shard({self.rank} of {self.num_ranks}, nodes={self.num_own}, "
            f"replicas={self.replicas.numel()}, edges={self.edges.numel()})"
        )


def shard_of(data: Data, rank: int) -> Data:
    """Return the local graph of a process.

    Of a graph folder, only the edges into the shard are read, and the attributes of its edges,
    nodes and replicas; and ``perm``, for the fingerprint.

    Args:
        data: The whole graph, from :func:`gas.cluster` with ``shards``.
        rank: The number of the shard, from 0.

    Returns:
        A graph in memory with a row for each node of the shard, then for each replica; the edges
        into the shard's nodes (an ``edge_index`` in its previous order); and ``shard``, a
        :class:`Shard`. Masks, attributes named ``*_mask``, are false for replicas, and lists of
        nodes contain nodes of the shard only. ``parts`` are the parts of the shard; the last one
        ends where replicas begin. ``perm`` has a row of the original graph for each node and
        replica. A local graph of the same rank is returned as it is.

    Raises:
        ValueError: If the graph has no shards, or no shard ``rank``.
    """
    check_integer("rank", rank, 0)
    known = data.get(SHARD)
    if isinstance(known, Shard):
        if known.rank != rank:
            raise ValueError(
                f"'data' is the shard {known.rank} of a graph, expected the shard {rank}: pass "
                "the whole graph, or the shard that is meant"
            )
        return data
    bounds = _bounds(data)
    if rank >= bounds.numel() - 1:
        raise ValueError(
            f"'rank' is {rank}, but the graph has {bounds.numel() - 1} shards: expected a number "
            f"from 0 to {bounds.numel() - 2}"
        )
    if not is_sparse(data.get("x")):  # Rows of CSR features are read below.
        data = with_csr_features(data)
    begin, end = bounds[rank : rank + 2].tolist()
    dst, src, weight, edges, layout = _read_edges_into(data, begin, end)
    is_own = (src >= begin) & (src < end)
    replicas = torch.unique(src[~is_own])
    src = torch.where(is_own, src - begin, end - begin + torch.searchsorted(replicas, src))
    num_nodes = end - begin + replicas.numel()
    if layout is not None:  # Columns of a matrix are in order, as gas.permute has them.
        rowptr, col, order = coo_to_csr(dst - begin, src, num_nodes)
        src, dst, edges = src[order], dst[order], edges[order]
        if weight is not None:
            weight = weight[order]
        elif layout.name == "csr":
            weight = implicit_ones(edges.numel())
        if is_sparse(data.adj_t):
            index = data.adj_t.col_indices().dtype
            rowptr, col = rowptr.to(index), col.to(index)
    shard = Shard(rank, bounds, replicas, edges, _fingerprint(data, bounds))

    out = copy.copy(data)
    del out[SHARDS]
    for key, value in data:
        if key == "edge_index":
            out[key] = torch.stack([src, dst - begin])
        elif key not in (SHARDS, "adj_t"):
            out[key] = _select_own(data, key, value, shard)
    if layout is not None:
        out.adj_t = layout.make(rowptr, col, weight, num_nodes)
    out.num_nodes = num_nodes
    out[SHARD] = shard
    return out


def _bounds(data: Data) -> Tensor:
    """Return the first row of every shard of a whole graph, and its end, ``[num_shards + 1]``."""
    bounds, parts = data.get(SHARDS), data.get(PARTS)
    if bounds is None or parts is None or PERM not in data:
        raise ValueError(
            "'data' has no 'shards': partition it for the processes, with 'shards' as their "
            "number, data = gas.cluster(data, num_parts, shards=2)"
        )
    bounds, parts = bounds.cpu(), parts.cpu()
    among = bool(torch.isin(bounds, parts).all()) and bool((bounds.diff() >= 0).all())
    if not among or int(bounds[0]) != 0 or int(bounds[-1]) != data.num_nodes:
        raise ValueError(
            f"'shards' is {bounds.tolist()}, expected rows that rise from 0 to the number of "
            f"nodes, {data.num_nodes}, at each of which one of 'parts' begins: cut the graph anew"
        )
    return bounds


def _read_edges_into(
    data: Data, begin: int, end: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Layout | None]:
    """Return destinations, sources, weights and ids of the edges into some rows.

    The last value is the layout of the adjacency to make, ``None`` for an ``edge_index``.
    """
    adj_t = data.get("adj_t")
    layout = None if adj_t is None else layout_of(adj_t, "adj_t")
    if layout is not None and layout.name == "csr" and "edge_index" not in data:
        rowptr, col, weight = layout.parts(adj_t)
        rowptr = rowptr[begin : end + 1].long()
        first, last = int(rowptr[0]), int(rowptr[-1])
        src = col[first:last].long()
        check_ids(src, data.num_nodes, "adj_t")
        dst = torch.repeat_interleave(torch.arange(begin, end), rowptr.diff())
        weight = None if weight is None else weight[first:last]
        return dst, src, weight, torch.arange(first, last), layout
    whole = read_graph(data)
    edges = ((whole.dst >= begin) & (whole.dst < end)).nonzero().view(-1)
    weight = None if whole.weight is None else whole.weight[edges]
    if layout is not None and layout.name not in LAYOUTS:
        layout = find_layout("csr")
    return whole.dst[edges], whole.src[edges], weight, edges, layout


def _select_own(data: Data, key: str, value: Any, shard: Shard) -> Any:
    """Select the rows of an attribute that belong to a local graph."""
    if key == PARTS:
        parts = value.cpu()
        return parts[(parts >= shard.begin) & (parts <= shard.end)] - shard.begin
    if key == "edge_label_index":
        raise ValueError(
            f"'{key}' holds pairs of nodes, of which those of several shards have no process: "
            "delete it"
        )
    if is_node_list(key, value):
        ids = value.long()
        return ids[(ids >= shard.begin) & (ids < shard.end)] - shard.begin
    if is_row_per_node(data, key):
        rows = _load_rows(value, shard.nodes)
        if key.endswith("_mask"):
            rows[shard.num_own :] = False
        return rows
    return _load_rows(value, shard.edges) if is_row_per_edge(data, key) else value


def _load_rows(value: Tensor, index: Tensor) -> Tensor:
    """Select rows of a tensor, and load them into memory."""
    if isinstance(value, Encoded) and value.store.tier == "disk":
        value = Encoded.of(value.store, value.codec, value.size(1), "host")
    return select_rows(value, index)


def _fingerprint(data: Data, bounds: Tensor) -> int:
    """Return a checksum of a graph and its shards."""
    crc = 0
    edges = data.get("edge_index")  # An adj_t is in a graph folder, which processes share.
    listed = [] if edges is None else list(edges)
    for ids in (bounds, data[PARTS], data[PERM], torch.tensor([data.num_edges]), *listed):
        for block in ids.split(BLOCK):
            crc = zlib.crc32(block.cpu().contiguous().numpy().data, crc)
    return crc


# One per process ----------------------------------------------------------------------------------


# The last whole graph, which isn't kept alive, with its versions and its local graph: several
# loaders are often made of one graph.
_LAST: Any = WeakIdKeyDictionary()


def local_graph(data: Data) -> Data:
    """Return the graph of this process: its shard in distributed training, else the whole graph.

    Raises:
        ValueError: If the numbers of processes of ``torch.distributed`` and of shards differ.
    """
    if SHARDS not in data or SHARD in data or PARTS not in data:
        return data
    rank, num_ranks = process_rank()
    if num_ranks == 1:
        return data
    if num_ranks != data[SHARDS].numel() - 1:
        raise ValueError(
            f"'data' is cut into {data[SHARDS].numel() - 1} shards, but there are {num_ranks} "
            f"processes: cut it with shards={num_ranks}, or start as many processes as shards"
        )
    versions, local = _LAST.get(data, (None, None))  # Another thread may replace it.
    if versions is None or versions.find_changes(data) or local[SHARD].rank != rank:
        versions, local = GraphVersions(data), shard_of(data, rank)
        _LAST.clear()
        _LAST[data] = versions, local
    return local
