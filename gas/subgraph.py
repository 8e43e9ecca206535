"""Graphs as compressed sparse rows, and the adjacency layouts that layers understand.

Rows are destinations: entry ``(i, j)`` is the edge ``j -> i``, PyG's ``adj_t``.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from gas import _native

LAYOUTS = ("csr", "edge_index", "sparse_tensor", "fused")


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


# Reading graphs -----------------------------------------------------------------------------------


def is_sparse_tensor(adj: Any) -> bool:
    """Whether ``adj`` is a ``torch_sparse.SparseTensor``."""
    return WITH_TORCH_SPARSE and isinstance(adj, SparseTensor)


def read_edges(adj: Any, num_nodes: int | None = None, name: str = "edge_index") -> Edges:
    """Reads the edges of any representation of a graph and checks them.

    Args:
        adj: ``edge_index`` of shape ``[2, E]``, or a square ``adj_t``: a ``torch.sparse`` matrix or
            a ``torch_sparse.SparseTensor``.
        num_nodes: The number of nodes. (default: what ``adj`` says)
        name: What error messages call ``adj``. (default: ``"edge_index"``)

    Raises:
        ValueError: If ``adj`` is no graph, or ``num_nodes`` doesn't fit it.
    """
    if is_sparse_tensor(adj):
        dst, src, weight = adj.coo()
        return _sized(src, dst, weight, tuple(adj.sizes()), num_nodes, name)
    if isinstance(adj, Tensor) and is_torch_sparse_tensor(adj):
        size = tuple(adj.shape)
        if adj.layout == torch.sparse_csr:
            count = adj.crow_indices().diff()
            dst = torch.repeat_interleave(torch.arange(size[0], device=adj.device), count)
            return _sized(adj.col_indices(), dst, adj.values(), size, num_nodes, name)
        adj = adj.to_sparse_coo()
        dst, src = adj._indices()  # Duplicates included, which coalesce() would merge.
        return _sized(src, dst, adj._values(), size, num_nodes, name)
    if not isinstance(adj, Tensor):
        raise ValueError(
            f"'{name}' is a {type(adj).__name__}, expected an integer tensor of shape [2, E], a "
            "torch.sparse matrix or a torch_sparse.SparseTensor"
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
    return _checked(Edges(src, dst, None, num_nodes), name)


def _sized(
    src: Tensor,
    dst: Tensor,
    weight: Tensor | None,
    size: tuple[int, ...],
    num_nodes: int | None,
    name: str,
) -> Edges:
    if len(size) != 2 or size[0] != size[1]:
        raise ValueError(f"'{name}' has shape {list(size)}, expected a square matrix")
    if num_nodes is not None and num_nodes != size[0]:
        raise ValueError(
            f"'num_nodes' is {num_nodes}, but '{name}' has {size[0]} rows: leave 'num_nodes' out"
        )
    return _checked(Edges(src.long(), dst.long(), weight, size[0]), name)


def _checked(edges: Edges, name: str) -> Edges:
    for ids in (edges.src, edges.dst):
        if ids.numel() == 0:
            continue
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0:
            raise ValueError(
                f"'{name}' holds the node id {low}, expected ids in [0, {edges.num_nodes}): ids "
                "count from 0; remove or renumber negative ones"
            )
        if high >= edges.num_nodes:
            raise ValueError(
                f"'{name}' holds the node id {high}, but 'num_nodes' is {edges.num_nodes}: "
                f"expected ids in [0, {edges.num_nodes}); correct the ids or set "
                f"num_nodes={high + 1}"
            )
    return edges


def read_graph(data: Data, edge_weight: bool = True) -> Edges:
    """Reads and checks the edges of ``data``: of ``adj_t`` if there is one, else ``edge_index``.

    Weights are the values of ``adj_t``, or ``data.edge_weight``; with ``edge_weight=False`` they
    are left out. A graph that has both must list its edges in the same order.

    Raises:
        ValueError: If edges, weights or node-level tensors don't fit each other.
    """
    adj_t, edge_index = data.get("adj_t"), data.get("edge_index")
    if adj_t is None and edge_index is None:
        raise ValueError("'data' has neither 'edge_index' nor 'adj_t': gas trains on one graph")
    if adj_t is not None:
        edges = read_edges(adj_t, name="adj_t")
        if data.get("x") is not None and data.x.size(0) != edges.num_nodes:
            raise ValueError(
                f"'x' has {data.x.size(0)} rows, but 'adj_t' has {edges.num_nodes}: one per node"
            )
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
            if weight.shape not in ((edges.src.numel(),), (edges.src.numel(), 1)):
                raise ValueError(
                    f"'edge_weight' has shape {list(weight.shape)}, expected one weight per edge: "
                    f"[{edges.src.numel()}]"
                )
            edges = edges._replace(weight=weight.view(-1))
    _check_nodes(data, edges.num_nodes)
    return edges if edge_weight else edges._replace(weight=None)


def _check_nodes(data: Data, num_nodes: int) -> None:
    for key, value in data:
        per_node = key in ("x", "y", "n_id") or key.endswith("_mask")
        if not per_node or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if value.size(0) != num_nodes:
            raise ValueError(
                f"'{key}' has {value.size(0)} rows, but the graph has {num_nodes} nodes: expected "
                "one row per node"
            )


def check_finite(data: Data) -> None:
    """Refuses features that hold NaN or infinite values.

    Raises:
        ValueError: Naming the first such row.
    """
    x = data.get("x")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        return
    for start in range(0, x.size(0), 65536):
        finite = torch.isfinite(x[start : start + 65536]).flatten(1).all(dim=1)
        if not finite.all():
            row = start + int((~finite).nonzero()[0])
            raise ValueError(
                f"'x' holds a NaN or infinite value in row {row}: replace it, for example with "
                "torch.nan_to_num(x), or switch this check off"
            )


def to_csr(edges: Edges) -> CSR:
    """Sorts edges into compressed sparse rows; duplicates stay."""
    rowptr, col, e_id = _native.coo_to_csr(edges.dst, edges.src, edges.num_nodes)
    in_order = bool((e_id[1:] > e_id[:-1]).all())
    return CSR(rowptr, col, None if in_order else e_id)


def is_row_per_node(data: Data, key: str) -> bool:
    """Whether ``data[key]`` is a tensor with one row per node."""
    value = data[key]
    return isinstance(value, Tensor) and _by_row(data, key) and data.is_node_attr(key)


def is_row_per_edge(data: Data, key: str) -> bool:
    """Whether ``data[key]`` is a tensor with one row per edge."""
    value = data[key]
    return isinstance(value, Tensor) and _by_row(data, key) and data.is_edge_attr(key)


def _by_row(data: Data, key: str) -> bool:
    named = key in ("edge_index", "adj_t", "num_nodes", "edge_label_index")
    return not named and data.__cat_dim__(key, data[key]) == 0


# Writing layouts ----------------------------------------------------------------------------------


@functools.cache
def _accept_beta_state() -> None:
    """Creates one CSR tensor, so that PyTorch says "beta state" here, once, unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, dtype=torch.long)
        torch.sparse_csr_tensor(torch.arange(2), one - 1, one.float(), check_invariants=False)


def csr_matrix(rowptr: Tensor, col: Tensor, value: Tensor, size: tuple[int, int]) -> Tensor:
    """A ``torch.sparse_csr`` matrix. Duplicate entries are allowed: their products add up."""
    _accept_beta_state()
    return torch.sparse_csr_tensor(rowptr, col, value, size=size, check_invariants=False)


def sparse_tensor(rowptr: Tensor, col: Tensor, value: Tensor | None, size: tuple[int, int]) -> Any:
    """A ``torch_sparse.SparseTensor``."""
    return SparseTensor(
        rowptr=rowptr, col=col, value=value, sparse_sizes=size, is_sorted=True, trust_data=True
    )


def num_rows(adj: Any) -> int | None:
    """The rows of an adjacency matrix; ``None`` for an ``edge_index``, which doesn't say."""
    if isinstance(adj, Tensor) and not is_torch_sparse_tensor(adj):
        return None
    return int(adj.size(0))


def entries(adj: Any) -> tuple[Tensor, Tensor]:
    """The row and the column, destination and source, of every edge, each of shape ``[E]``."""
    if is_sparse_tensor(adj):
        row, col, _ = adj.coo()
        return row, col
    if isinstance(adj, Tensor) and adj.layout == torch.sparse_csr:
        return row_ids(adj.crow_indices(), adj.col_indices().numel()), adj.col_indices()
    if isinstance(adj, Tensor) and is_torch_sparse_tensor(adj):
        row, col = adj.to_sparse_coo()._indices()
        return row, col
    return adj[1], adj[0]


def row_ids(rowptr: Tensor, num_entries: int | None = None) -> Tensor:
    """The row of every entry, of shape ``[E]``; a GPU needn't be waited for if ``E`` is given."""
    rows = torch.arange(rowptr.numel() - 1, device=rowptr.device)
    return torch.repeat_interleave(rows, rowptr.diff(), output_size=num_entries)


def check_layout(layout: str) -> None:
    """Refuses a layout that doesn't exist or can't be had.

    Raises:
        ValueError: If there is no such layout.
        ImportError: If ``torch-sparse`` is needed and missing.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"'layout' is {layout!r}, expected one of {', '.join(map(repr, LAYOUTS))}")
    if layout == "sparse_tensor" and not WITH_TORCH_SPARSE:
        raise ImportError(
            "layout='sparse_tensor' needs torch-sparse: pip install --no-build-isolation "
            "torch-scatter torch-sparse, or use layout='csr'"
        )


def dropout(adj_t: Any, p: float, training: bool = True) -> Any:
    """Drops each edge with probability ``p``, as DropEdge (Rong et al., ICLR 2020) does.

    Weights that remain are scaled by ``1 / (1 - p)``, unless all are 1: those are no weights.

    Args:
        adj_t: A ``torch.sparse_csr`` matrix or a ``torch_sparse.SparseTensor``.
        p: Probability in ``[0, 1)``.
        training: Whether to drop at all. (default: ``True``)
    """
    if num_rows(adj_t) is None:
        raise ValueError(
            "'adj_t' is neither a torch.sparse_csr matrix nor a torch_sparse.SparseTensor: for an "
            "edge_index use torch_geometric.utils.dropout_edge"
        )
    return drop_edges(adj_t, {}, p)[0] if training else adj_t


def keep_edges(
    adj: Any, entry: Tensor, value: Tensor | None = None, rowptr: Tensor | None = None
) -> Any:
    """Some of the edges of an adjacency in any of :data:`LAYOUTS`, in the same order.

    Args:
        adj: The adjacency.
        entry: The positions of those that stay, increasing, of shape ``[kept]``.
        value: Their values, of shape ``[kept]``; not of an ``edge_index``, which has none.
            (default: the values they have)
        rowptr: Their rows, of shape ``[rows + 1]``. (default: what follows from ``entry``)
    """
    if num_rows(adj) is None:
        return adj.index_select(1, entry)
    old_rowptr, col, old = _compressed(adj)
    if value is None and old is not None:
        value = old.index_select(0, entry)
    col = col.index_select(0, entry)
    if rowptr is None:
        rowptr = torch.searchsorted(entry, old_rowptr.long()).to(col.dtype)
    size = (int(adj.size(0)), int(adj.size(1)))
    if is_sparse_tensor(adj):
        return sparse_tensor(rowptr, col, value, size)
    if isinstance(adj, Tensor):
        assert value is not None
        return csr_matrix(rowptr, col, value, size)
    return adj.__class__(rowptr, col, value, size[1])


def _compressed(adj: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows, the columns and the values of a matrix."""
    if is_sparse_tensor(adj):
        return adj.csr()
    if isinstance(adj, Tensor):
        return adj.crow_indices(), adj.col_indices(), adj.values()
    return adj.rowptr, adj.col, adj.value  # A gas.nn.Adjacency, which lives above.


def drop_edges(adj: Any, attributes: dict[str, Tensor], p: float) -> tuple[Any, dict[str, Tensor]]:
    """Drops each edge, and its row of each edge-level tensor, with probability ``p``.

    Args:
        adj: An adjacency in any of :data:`LAYOUTS`.
        attributes: Edge-level tensors; one named ``edge_weight`` is scaled by ``1 / (1 - p)``.
        p: Probability in ``[0, 1)``.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"'p' is {p}, expected a probability in [0, 1)")
    if p == 0.0:
        return adj, attributes
    scale = 1.0 / (1.0 - p)
    _, col, value = (None, adj[0], None) if num_rows(adj) is None else _compressed(adj)
    entry = (torch.rand(col.numel(), device=col.device) >= p).nonzero().view(-1)
    if value is not None:
        value = value[entry] * (1.0 if bool((value == 1).all()) else scale)
    attributes = {key: attribute[entry] for key, attribute in attributes.items()}
    if "edge_weight" in attributes:
        attributes["edge_weight"] = attributes["edge_weight"] * scale
    return keep_edges(adj, entry, value), attributes
