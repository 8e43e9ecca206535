"""Graphs as lists of edges and as compressed sparse rows, read and checked.

Rows are destinations: entry ``(i, j)`` is the edge ``j -> i``, PyG's ``adj_t``.
"""

from __future__ import annotations

import copy
from collections.abc import Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from gas.graph.attributes import check_node_ids, needs_row_per_node
from gas.graph.layout import layout_of
from gas.native import BLOCK, coo_to_csr, has_sorted_rows, is_valid_rowptr


class Edges(NamedTuple):
    """The edges of a graph, in the order in which it stores them.

    ``src`` and ``dst`` have shape ``[E]``, int64; ``weight`` has shape ``[E]`` or is ``None``.
    """

    src: Tensor
    dst: Tensor
    weight: Tensor | None
    num_nodes: int


class CSR(NamedTuple):
    """A graph as compressed sparse rows.

    ``rowptr`` has shape ``[N + 1]``, ``col`` and ``e_id`` have shape ``[E]``. ``e_id[k]`` is the
    position of entry ``k`` in the graph's own edge order; ``None`` where the two orders agree.
    """

    rowptr: Tensor
    col: Tensor
    e_id: Tensor | None


def read_edges(adj: Any, num_nodes: int | None = None, name: str = "edge_index") -> Edges:
    """Read the edges of any representation of a graph and check them.

    Args:
        adj: ``edge_index`` of shape ``[2, E]``, or a square ``adj_t``: a ``torch.sparse`` matrix or
            a ``torch_sparse.SparseTensor``.
        num_nodes: The number of nodes. (default: what ``adj`` says)
        name: What error messages call ``adj``. (default: ``"edge_index"``)
    """
    layout = layout_of(adj, name)
    size = layout.size(adj)
    if size is not None:
        dst, src = layout.entries(adj)
        if size[0] != size[1]:
            raise ValueError(f"'{name}' has shape {list(size)}, expected a square matrix")
        if num_nodes is not None and num_nodes != size[0]:
            raise ValueError(
                f"'num_nodes' is {num_nodes}, but '{name}' has {size[0]} rows: leave 'num_nodes' "
                "out"
            )
        return _check_ends(Edges(src.long(), dst.long(), layout.value(adj), size[0]), name)
    if name == "adj_t" and adj.dim() == 2 and adj.size(0) == adj.size(1):
        raise ValueError(
            f"'adj_t' is a dense matrix of shape {list(adj.shape)}, expected a sparse one, whose "
            "rows are destinations: data.adj_t = data.adj_t.to_sparse_csr()"
        )
    if adj.is_floating_point() or adj.is_complex() or adj.dtype == torch.bool:
        raise ValueError(f"'{name}' has dtype {adj.dtype}, expected integers: pass {name}.long()")
    if adj.dim() != 2 or adj.size(0) != 2:
        hint = f": pass {name}.t()" if adj.dim() == 2 and adj.size(1) == 2 else ""
        raise ValueError(f"'{name}' has shape {list(adj.shape)}, expected [2, E]{hint}")
    if isinstance(adj, EdgeIndex):
        sizes = [size for size in adj.sparse_size() if size is not None]
        num_nodes = max(sizes) if num_nodes is None and sizes else num_nodes
        adj = adj.as_tensor()
    edge_index = adj.long()
    if num_nodes is None:
        num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    src, dst = edge_index
    return _check_ends(Edges(src, dst, None, num_nodes), name)


def _check_ends(edges: Edges, name: str) -> Edges:
    """Refuse edges whose ends aren't nodes; return the edges."""
    for ids in (edges.src, edges.dst):
        check_ids(ids, edges.num_nodes, name)
    return edges


def check_pairs(pairs: Any, num_sources: int, num_targets: int, name: str) -> Tensor:
    """Return pairs of nodes, of shape ``[2, K]``, int64; refuse other values."""
    is_tensor = isinstance(pairs, Tensor)
    are_ids = is_tensor and pairs.dtype in (torch.int64, torch.int32)
    if not are_ids or pairs.dim() != 2 or pairs.size(0) != 2:
        what = f"{pairs.dtype} of shape {list(pairs.shape)}" if is_tensor else type(pairs).__name__
        raise ValueError(f"'{name}' is {what}, expected ids of nodes of shape [2, K]")
    check_ids(pairs[0], num_sources, name)
    check_ids(pairs[1], num_targets, name)
    return pairs.long()


def check_ids(ids: Tensor, num_nodes: int, name: str, cure: str | None = None) -> None:
    """Refuse ids of nodes outside ``[0, num_nodes)``.

    Args:
        ids: The ids, of any shape.
        num_nodes: The number of nodes.
        name: What errors call the ids.
        cure: What helps with too large ids. (default: to correct them, or ``num_nodes``)
    """
    if ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0:
        raise ValueError(
            f"'{name}' holds the node id {low}, expected ids in [0, {num_nodes}): ids count from "
            "0; remove or renumber negative ones"
        )
    if high >= num_nodes:
        raise ValueError(
            f"'{name}' holds the node id {high}, but 'num_nodes' is {num_nodes}: expected ids in "
            f"[0, {num_nodes}); {cure or f'correct the ids or set num_nodes={high + 1}'}"
        )


def read_graph(data: Data, edge_weight: bool = True) -> Edges:
    """Read and check the edges of ``data``: of ``adj_t`` if there is one, else ``edge_index``.

    Weights are the values of ``adj_t``, or ``data.edge_weight``; with ``edge_weight=False`` they
    are left out. A graph that has both must list its edges in the same order.
    """
    adj_t, edge_index = data.get("adj_t"), data.get("edge_index")
    if adj_t is None and edge_index is None:
        raise ValueError(
            "'data' has neither 'edge_index' nor 'adj_t', expected the edges of one graph: set "
            "data.edge_index, of shape [2, E]"
        )
    if adj_t is not None:
        edges = read_edges(adj_t, name="adj_t")
        _check_fits(data, edges.num_nodes)
        if edge_index is not None:
            both = torch.stack([edges.src, edges.dst])
            if edge_index.shape != both.shape or not torch.equal(edge_index.long(), both):
                raise ValueError(
                    "'data' has an 'edge_index' and an 'adj_t' whose edges differ, or differ in "
                    "order: delete one of them"
                )
    else:
        edges = read_edges(edge_index, data.num_nodes)
        weight = data.get("edge_weight")
        if weight is not None:
            if not isinstance(weight, Tensor):
                raise ValueError(
                    f"'edge_weight' is of type {type(weight).__name__}, expected a tensor: "
                    "torch.as_tensor(data.edge_weight)"
                )
            if weight.shape not in ((edges.src.numel(),), (edges.src.numel(), 1)):
                raise ValueError(
                    f"'edge_weight' has shape {list(weight.shape)}, expected one weight per edge: "
                    f"[{edges.src.numel()}]"
                )
            edges = edges._replace(weight=weight.view(-1))
    check_nodes(data, edges.num_nodes)
    check_weight(edges.weight)
    return edges if edge_weight else edges._replace(weight=None)


def read_csr(data: Data, edge_weight: bool = True) -> tuple[CSR, Tensor | None]:
    """Read and check a graph as compressed sparse rows, and the weights in their order.

    An ``adj_t`` that is ``torch.sparse_csr`` with sorted columns, such as that of a graph folder,
    is not copied; anything else is read by :func:`read_graph` and sorted.
    """
    adj_t = data.get("adj_t")
    if isinstance(adj_t, Tensor) and "edge_index" not in data and adj_t.device.type == "cpu":
        layout = layout_of(adj_t, "adj_t")
        size = layout.size(adj_t)
        if layout.name == "csr" and size is not None and size[0] == size[1]:
            rowptr, col, weight = layout.parts(adj_t)
            _check_fits(data, size[0])
            check_ids(col, size[0], "adj_t")
            check_nodes(data, size[0])
            check_weight(weight)
            if is_valid_rowptr(rowptr, col.numel()) and has_sorted_rows(rowptr, col):
                return CSR(rowptr.long(), col, None), weight if edge_weight else None
    edges = read_graph(data, edge_weight)
    csr, weight = to_csr(edges, small=True), edges.weight
    if weight is not None and csr.e_id is not None:
        weight = weight.index_select(0, csr.e_id)
    return csr, weight


def with_edge_index(data: Data) -> Data:
    """Replace an ``adj_t``, a matrix in any layout, by a list of edges.

    The list is ``edge_index`` and ``edge_weight``. Other graphs are returned as they are.
    """
    adj_t = data.get("adj_t")
    if "edge_index" in data or adj_t is None or layout_of(adj_t, "adj_t").name == "edge_index":
        return data
    edges = read_graph(data)
    out = copy.copy(data)
    out.num_nodes = edges.num_nodes
    del out.adj_t
    out.edge_index = torch.stack([edges.src, edges.dst])
    if edges.weight is not None:
        out.edge_weight = edges.weight
    return out


def _check_fits(data: Data, num_rows: int) -> None:
    """Refuse features without a row for each row of ``adj_t``."""
    if data.get("x") is not None and data.x.size(0) != num_rows:
        raise ValueError(f"'x' has {data.x.size(0)} rows, but 'adj_t' has {num_rows}: one per node")


def check_nodes(data: Data, num_nodes: int) -> None:
    """Refuse attributes without one row per node that should have one, such as masks."""
    edge_index = data.get("edge_index")
    num_edges = data.num_edges if edge_index is None else edge_index.size(-1)
    for key, value in data:
        check_node_ids(f"'{key}'", key, value)
        shape = [len(value)] if isinstance(value, list) else getattr(value, "shape", ())
        per_node = needs_row_per_node(key, shape, num_edges)
        if per_node and isinstance(value, list | np.ndarray) and len(value) == num_nodes:
            raise ValueError(
                f"'{key}' is of type {type(value).__name__}, whose rows would stay where they are "
                f"when nodes are renumbered, expected a tensor: data.{key} = "
                f"torch.as_tensor(data.{key})"
            )
        if key == "node_id" and isinstance(value, Sized) and len(value) != num_nodes:
            raise ValueError(
                f"'node_id' has {len(value)} ids, but the graph has {num_nodes} nodes: expected "
                "one for each node"
            )
        if not per_node or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if value.size(0) != num_nodes:
            raise ValueError(
                f"'{key}' has {value.size(0)} rows, but the graph has {num_nodes} nodes: expected "
                "one row per node"
            )


def check_edge_rows(data: Data, num_edges: int) -> None:
    """Refuse ``edge_attr`` and ``edge_type`` that are arrays, or have no row per edge."""
    for key in ("edge_attr", "edge_type"):
        value = data.get(key)
        if isinstance(value, np.ndarray):
            raise ValueError(
                f"'{key}' is of type ndarray, whose rows would stay where they are when edges are "
                f"moved, expected a tensor: data.{key} = torch.as_tensor(data.{key})"
            )
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) != num_edges:
            raise ValueError(
                f"'{key}' has {value.size(0)} rows, but the graph has {num_edges} edges: expected "
                "one row per edge"
            )


def check_weight(weight: Tensor | None, start: int = 0) -> None:
    """Refuse weights, those of the edges from ``start`` on, that aren't finite."""
    if weight is None or not weight.is_floating_point():
        return
    for first in range(0, weight.numel(), BLOCK):
        finite = torch.isfinite(weight[first : first + BLOCK])
        if not bool(finite.all()):
            wrong = first + int((~finite).nonzero()[0])
            raise ValueError(
                f"'edge_weight' holds {float(weight[wrong])} at the edge {start + wrong}: "
                "expected finite numbers; replace it, or remove the edge"
            )


def expand_ranges(begin: Tensor, count: Tensor) -> Tensor:
    """Return the numbers from ``begin[i]`` to ``begin[i] + count[i] - 1``, one after the other."""
    shift = torch.repeat_interleave(begin - (count.cumsum(0) - count), count)
    return shift + torch.arange(shift.numel(), device=shift.device)


def to_csr(edges: Edges, small: bool = False) -> CSR:
    """Sort edges into compressed sparse rows; duplicates stay.

    Args:
        edges: The edges.
        small: Make ``col`` and ``e_id`` int32, if that holds them. (default: int64)
    """
    fits = max(edges.src.numel(), edges.num_nodes) <= torch.iinfo(torch.int32).max
    dtype = torch.int32 if small and fits else torch.int64
    rowptr, col, e_id = coo_to_csr(edges.dst, edges.src, edges.num_nodes, dtype)
    in_order = bool((e_id[1:] > e_id[:-1]).all())
    return CSR(rowptr, col, None if in_order else e_id)
