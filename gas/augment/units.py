"""Units that an augmentation drops, edges or pairs of edges, and features; checks of options."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.index import ptr2index

from gas.graph import Adjacency, read_graph, version
from gas.native import (
    EgoGraph,
    check_number,
    coo_to_csr,
    csr_parts,
    find_starts,
    is_sparse,
    sparse_csr,
)


class Units:
    """The edges of a graph as an augmentation drops them: one by one, or in pairs.

    Self-loops are never dropped. Units are numbered in the order of the graph's compressed rows, so
    that kernels read masks sequentially.

    Args:
        data: The graph, with an ``edge_index``.
        undirected: Whether an edge and its reverse are one unit.

    Raises:
        ValueError: If the graph has no ``edge_index``, or ``undirected`` and an edge doesn't have a
            reverse of its own.
    """

    def __init__(self, data: Data, undirected: bool) -> None:
        if data.get("edge_index") is None:
            raise ValueError(
                "'data' has no 'edge_index', of which augmentations drop columns: of a graph with "
                "'adj_t', such as a graph folder, pass gas.graph.with_edge_index(data), to the "
                "loader, too"
            )
        if data.get("adj_t") is not None:
            raise ValueError(
                "'data' has an 'adj_t' besides 'edge_index', of which augmentations drop columns: "
                "delete 'adj_t'"
            )
        edges = read_graph(data)
        if edges.num_nodes == 0:
            raise ValueError("'data' has no nodes: there is nothing to augment")
        self.num_nodes = edges.num_nodes
        self.num_edges = edges.src.numel()
        self._edge_index = data.edge_index
        self._version = version(data.edge_index)

        other = (edges.src != edges.dst).nonzero().view(-1)
        src, dst = edges.src[other], edges.dst[other]
        rowptr, col, order = coo_to_csr(dst, src, self.num_nodes)
        self._ids = other[order]  # The position in edge_index of each entry of the rows.
        self._unit = _pairs(src, dst, self.num_nodes)[order] if undirected else None
        self.size = other.numel() // 2 if undirected else other.numel()
        loops = torch.bincount(edges.src[edges.src == edges.dst], minlength=self.num_nodes)
        rows = Adjacency(rowptr, col)
        unit = None if self._unit is None else self._unit.to(torch.int32)
        start = find_starts(rows.rowptr, rows.num_entries)
        self.graph = EgoGraph(rows.rowptr, rows.col, unit, loops.double() + 1, start)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a tensor counts its versions anew.
        return {**self.__dict__, "_version": self._version - version(self._edge_index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._version += version(self._edge_index)

    @property
    def device(self) -> torch.device:
        """Return the device of the graph."""
        return self.graph.col.device

    def check_size(self) -> None:
        """Refuse a graph without edges to drop."""
        if self.size == 0:
            raise ValueError(
                f"'data' has {self.num_edges} edges, none of them between two nodes: there is none "
                "to drop; use gas.augment.MaskFeatures"
            )

    def to_edge_mask(self, kept: Tensor) -> Tensor:
        """Return the mask of edges, of shape ``[E]``, from that of units, of shape ``[size]``."""
        mask = torch.ones(self.num_edges, dtype=torch.bool, device=self.device)
        return mask.scatter_(0, self._ids, kept if self._unit is None else kept[self._unit])

    def gather(self, edge_mask: Tensor) -> Tensor:
        """Return the mask of units from that of edges."""
        check_mask("edge_mask", edge_mask, self.num_edges, "edges", self.device)
        kept = edge_mask[self._ids]
        if self._unit is not None:
            kept = torch.empty_like(kept[: self.size]).scatter_(0, self._unit, kept)
        if not torch.equal(self.to_edge_mask(kept), edge_mask):
            raise ValueError(
                "'edge_mask' drops a self-loop, or one direction of an undirected edge: self-loops "
                "stay, and with undirected=True both directions have to be dropped together"
            )
        return kept

    def check(self, data: Data) -> None:
        """Refuse another graph than the one that the units were read from."""
        if version(self._edge_index) != self._version:
            raise ValueError(
                "'edge_index' was changed in place after the augmentation was built on it: build a "
                "new one"
            )
        edge_index = data.get("edge_index")
        if edge_index is self._edge_index and data.num_nodes == self.num_nodes:
            return
        found = (data.num_nodes, None if edge_index is None else edge_index.size(1))
        if found != (self.num_nodes, self.num_edges):
            raise ValueError(
                f"'data' has {found[0]} nodes and {found[1]} edges, but the augmentation was built "
                f"on a graph with {self.num_nodes} and {self.num_edges}: build one for this graph"
            )
        if not torch.equal(edge_index.to(self._edge_index), self._edge_index):
            raise ValueError(
                "'data' has other edges, or in another order, than the graph that the augmentation "
                "was built on: build one for this graph"
            )


class GraphState:
    """Augmented state of a graph, as masks of kept edges and nodes.

    ``edges`` of shape ``[units]`` and ``node_mask`` of shape ``[N]``, both bool.
    """

    def __init__(self, units: Units, edges: Tensor, node_mask: Tensor) -> None:
        self.units, self.edges, self.node_mask = units, edges, node_mask

    @cached_property
    def edge_mask(self) -> Tensor:
        """Return a mask of the kept columns of ``edge_index``, of shape ``[E]``."""
        return self.units.to_edge_mask(self.edges)

    @cached_property
    def scale(self) -> Tensor:
        """Return the factor of kept nodes' features, ``n / kept``, of shape ``[]``."""
        return self.node_mask.numel() / self.node_mask.sum().double()

    @cached_property
    def drop_fractions(self) -> Tensor:
        """Return the fractions of dropped edges and nodes, of shape ``[2]``, float64."""
        masks = (self.edges, self.node_mask)
        return torch.stack([(~mask).sum().double() / max(mask.numel(), 1) for mask in masks])


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # By bytes.


def mask_node_features(x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    """Mask and scale the features of some nodes.

    Args:
        x: The features, of shape ``[nodes, ...]``.
        mask: Whether a node keeps its features, of shape ``[nodes]``, bool.
        scale: :attr:`GraphState.scale`.
    """
    if is_sparse(x):
        rowptr, col, value = csr_parts(x)
        kept = mask[ptr2index(rowptr.long(), col.numel())]
        value = (value * scale.to(x.dtype)).masked_fill_(~kept, 0)
        return sparse_csr(rowptr, col, value, x.size(1))
    mask = mask.view(-1, *[1] * (x.dim() - 1))
    bits = _BITS.get(x.element_size())
    if x.requires_grad or bits is None:
        return (x * scale.to(x.dtype)).masked_fill_(~mask, 0)
    # A bitwise "and" also removes NaN, and is 2.5 times as fast as masked_fill_.
    return (x.view(bits) & -mask.to(bits)).view(x.dtype).mul_(scale.to(x.dtype))


def check_mask(name: str, mask: Tensor, size: int, what: str, device: torch.device) -> None:
    """Raise ``ValueError`` unless ``mask`` is bool, on ``device``, with an entry for each."""
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"'{name}' is a {type(mask).__name__}, expected a tensor of torch.bool of shape "
            f"[{size}]: one entry for each of the graph's {what}"
        )
    shape = list(mask.shape)
    if mask.dtype != torch.bool or shape != [size] or mask.device != device:
        raise ValueError(
            f"'{name}' is {mask.dtype} of shape {shape} on {mask.device}, expected torch.bool of "
            f"shape [{size}] on {device}: one entry for each of the graph's {what}"
        )


def check_fraction(**options: float) -> None:
    """Refuse values outside of ``[0, 1]``."""
    _check(options, lambda v: 0.0 <= v <= 1.0, "a number in [0, 1]")


def check_rate(**options: float) -> None:
    """Refuse values that aren't between 0 and 1."""
    _check(options, lambda v: 0.0 < v < 1.0, "a rate between 0 and 1")


def check_not_negative(**options: float) -> None:
    """Refuse negative, infinite and NaN values."""
    _check(options, lambda v: 0.0 <= v < math.inf, "a finite number of at least 0")


def check_positive(**options: float) -> None:
    """Refuse values that aren't positive and finite."""
    _check(options, lambda v: 0.0 < v < math.inf, "a finite number above 0")


def _check(options: dict[str, Any], fits: Callable[[Any], bool], wanted: str) -> None:
    for name, value in options.items():
        check_number(name, value, fits, wanted)


def _pairs(src: Tensor, dst: Tensor, num_nodes: int) -> Tensor:
    """Return the pair of each edge, of shape ``[E]``: the i-th copies of both directions."""
    pair = torch.empty_like(src)
    sides = []
    for side in (src > dst, src < dst):
        edge = side.nonzero().view(-1)
        low, high = torch.minimum(src, dst)[edge], torch.maximum(src, dst)[edge]
        _, _, order = coo_to_csr(low, high, num_nodes)
        pair[edge[order]] = torch.arange(edge.numel(), device=src.device)
        sides.append(low[order] * num_nodes + high[order])
    down, up = sides
    if not torch.equal(down, up):
        both, where = torch.cat(sides).unique(return_inverse=True)
        more = torch.bincount(where[: down.numel()], minlength=both.numel())
        more = more - torch.bincount(where[down.numel() :], minlength=both.numel())
        first = int(more.nonzero()[0])
        ends = divmod(int(both[first]), num_nodes)
        one, two = ends[::-1] if more[first] > 0 else ends
        raise ValueError(
            f"'undirected' is True, but the edge {one} -> {two} is stored more often than its "
            "reverse: expected both directions of every edge; apply "
            "torch_geometric.transforms.ToUndirected(), or use undirected=False"
        )
    return pair
