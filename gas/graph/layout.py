"""The layouts of an adjacency: CSR matrix, ``edge_index``, ``SparseTensor``.

Rows are destinations: entry ``(i, j)`` is the edge ``j -> i``, PyG's ``adj_t``. Code that depends
on the layout of an adjacency calls the methods of :func:`layout_of`, instead of testing its type.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor
from torch_geometric.index import ptr2index
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from gas.native import (
    assert_range,
    check_index,
    check_integer,
    check_probability,
    coo_to_csr,
    sparse_csr,
)


class Layout(abc.ABC):
    """A layout of adjacencies, with the operations on them."""

    name = ""

    @abc.abstractmethod
    def holds(self, adj: Any) -> bool:
        """Return whether ``adj`` has this layout."""

    def make(self, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Any:
        """Make an adjacency of compressed rows.

        Args:
            rowptr: First entry of each row, of shape ``[rows + 1]``.
            col: The source of each entry, of shape ``[E]``.
            value: Its weight, of shape ``[E]``, or ``None``.
            num_cols: The number of sources.
        """
        raise NotImplementedError(f"adjacencies in the layout {self.name!r} can't be made")

    def parts(self, adj: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the arguments of :meth:`make`: ``rowptr``, ``col`` and ``value``."""
        raise NotImplementedError(
            f"the layout {self.name!r} has no compressed rows: pass adj.to_sparse_csr()"
        )

    def num_rows(self, adj: Any) -> int | None:
        """Return the number of rows; ``None`` for an ``edge_index``, which has no size."""
        size = self.size(adj)
        return None if size is None else size[0]

    def size(self, adj: Any) -> tuple[int, int] | None:
        """Return the number of rows and of columns; ``None`` for an ``edge_index``."""
        return int(adj.size(0)), int(adj.size(1))

    def entries(self, adj: Any) -> tuple[Tensor, Tensor]:
        """Return row (destination) and column (source) of every edge, each of shape ``[E]``."""
        rowptr, col, _ = self.parts(adj)
        return ptr2index(rowptr.long(), col.numel()), col

    def value(self, adj: Any) -> Tensor | None:
        """Return the weight of every edge, of shape ``[E]``, or ``None``."""
        return self.parts(adj)[2]

    def with_value(self, adj: Any, value: Tensor | None) -> Any:
        """Return the edges with other weights, of shape ``[E]``; both may share a transpose."""
        rowptr, col, _ = self.parts(adj)
        return self.make(rowptr, col, value, int(adj.size(1)))

    def tensors(self, adj: Any) -> list[Tensor]:
        """Return the tensors of an adjacency."""
        return [part for part in self.parts(adj) if part is not None]

    def select_edges(
        self, adj: Any, entry: Tensor, value: Tensor | None = None, rowptr: Tensor | None = None
    ) -> Any:
        """Select edges, in the same order.

        Args:
            adj: The adjacency.
            entry: The positions of the selected edges, increasing, of shape ``[kept]``.
            value: Their new values, of shape ``[kept]``; ignored for an ``edge_index``.
                (default: their values)
            rowptr: Their rows, of shape ``[rows + 1]``. (default: computed from ``entry``)
        """
        old_rowptr, col, old = self.parts(adj)
        if value is None and old is not None:
            value = old.index_select(0, entry)
        col = col.index_select(0, entry)
        if rowptr is None:
            rowptr = torch.searchsorted(entry, old_rowptr.long()).to(col.dtype)
        return self.make(rowptr, col, value, int(adj.size(1)))


class _Csr(Layout):
    """Layout of a ``torch.sparse_csr`` matrix, which may have duplicate entries.

    Such a matrix always has values. Those of :func:`implicit_ones` count as no values.
    """

    name = "csr"

    def holds(self, adj: Any) -> bool:
        return isinstance(adj, Tensor) and adj.layout == torch.sparse_csr

    def make(self, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Tensor:
        return sparse_csr(rowptr, col, value, num_cols)

    def parts(self, adj: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        value = adj.values()
        one = value.stride(0) == 0 and bool((value[:1] == 1).all())
        return adj.crow_indices(), adj.col_indices(), None if one else value

    def with_value(self, adj: Any, value: Tensor | None) -> Tensor:
        # Cloned, so that the matrices don't share version counters of their indices.
        rowptr, col = adj.crow_indices().clone(), adj.col_indices().clone()
        return self.make(rowptr, col, value, int(adj.size(1)))


def implicit_ones(num_entries: int) -> Tensor:
    """Return ones that take no memory: the values of a ``torch.sparse_csr`` matrix without any."""
    return torch.ones(1).as_strided((num_entries,), (0,))


class _EdgeIndex(Layout):
    """Layout of an ``edge_index`` of shape ``[2, E]``: sources, then destinations."""

    name = "edge_index"

    def holds(self, adj: Any) -> bool:
        return isinstance(adj, Tensor) and adj.layout == torch.strided

    def make(self, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Tensor:
        return torch.stack([col, ptr2index(rowptr.long(), col.numel())])

    def size(self, adj: Any) -> tuple[int, int] | None:
        return None

    def entries(self, adj: Any) -> tuple[Tensor, Tensor]:
        """Return row and column of every edge."""
        return adj[1], adj[0]

    def value(self, adj: Any) -> Tensor | None:
        return None

    def tensors(self, adj: Any) -> list[Tensor]:
        return [adj]

    def select_edges(
        self, adj: Any, entry: Tensor, value: Tensor | None = None, rowptr: Tensor | None = None
    ) -> Tensor:
        return adj.index_select(1, entry)


class _SparseTensorLayout(Layout):
    """Layout of a ``torch_sparse.SparseTensor``."""

    name = "sparse_tensor"

    def holds(self, adj: Any) -> bool:
        return WITH_TORCH_SPARSE and isinstance(adj, SparseTensor)

    def make(self, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Any:
        size = (rowptr.numel() - 1, num_cols)
        return SparseTensor(
            rowptr=rowptr, col=col, value=value, sparse_sizes=size, is_sorted=True, trust_data=True
        )

    def parts(self, adj: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        return adj.csr()

    def with_value(self, adj: Any, value: Tensor | None) -> Any:
        return adj.fill_cache_().set_value(value, layout="csr")  # The transpose is in the cache.

    def entries(self, adj: Any) -> tuple[Tensor, Tensor]:
        """Return row and column of every edge."""
        row, col, _ = adj.coo()
        return row, col


class _Coo(Layout):
    """Layout of any other ``torch.sparse`` matrix, which is only read."""

    name = "coo"

    def holds(self, adj: Any) -> bool:
        return isinstance(adj, Tensor) and adj.layout not in (torch.strided, torch.sparse_csr)

    def entries(self, adj: Any) -> tuple[Tensor, Tensor]:
        """Return row and column of every edge."""
        row, col = adj.to_sparse_coo()._indices()  # Duplicates included, which coalesce() merges.
        return row, col

    def value(self, adj: Any) -> Tensor | None:
        return adj.to_sparse_coo()._values()

    def tensors(self, adj: Any) -> list[Tensor]:
        coo = adj.to_sparse_coo()
        return [coo._indices(), coo._values()]


LAYOUTS = ("csr", "edge_index", "sparse_tensor", "fused")  # The layouts of batches.
_KNOWN: list[Layout] = [_SparseTensorLayout(), _EdgeIndex(), _Csr(), _Coo()]


def register_layout(layout: Layout) -> None:
    """Add a layout, which is tried before the others; gas.graph.adjacency adds ``fused``."""
    _KNOWN.insert(0, layout)


def layout_of(adj: Any, name: str = "adj") -> Layout:
    """Return the layout of an adjacency."""
    for layout in _KNOWN:
        if layout.holds(adj):
            return layout
    raise ValueError(
        f"'{name}' is a {type(adj).__name__}, expected an integer tensor of shape [2, E], "
        "such as data.edge_index, a torch.sparse matrix, a torch_sparse.SparseTensor or a "
        "gas.nn.Adjacency"
    )


def find_layout(name: str) -> Layout:
    """Return the layout of adjacencies called ``name``."""
    if name not in LAYOUTS:
        raise ValueError(f"'layout' is {name!r}, expected one of {', '.join(map(repr, LAYOUTS))}")
    if name == "sparse_tensor" and not WITH_TORCH_SPARSE:
        raise ImportError(
            "layout='sparse_tensor' needs torch-sparse: pip install --no-build-isolation "
            "torch-scatter torch-sparse, or use layout='csr'"
        )
    return next(layout for layout in _KNOWN if layout.name == name)


def default_layout(adj: Any, is_clustered: bool = False) -> str:
    """Return the default layout of a graph's batches.

    Args:
        adj: The adjacency of the graph, if it has one as a matrix.
        is_clustered: Whether the parts are those of the graph, from :func:`gas.cluster`.
            (default: ``False``)
    """
    if WITH_TORCH_SPARSE and isinstance(adj, SparseTensor):
        return "sparse_tensor"
    return "fused" if is_clustered else "csr"


def sort_by_row(row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the first entry of each row, of shape ``[rows + 1]``, and the order that sorts by row.

    Raises:
        IndexError: If a row is outside ``[0, num_rows)``. (On a GPU that is an assertion of the
            device, which CUDA reports at the next synchronisation.)
    """
    if not row.is_cpu:
        check_index("row", row)
        assert_range("row", row, num_rows, "row")
        ordered, order = torch.sort(row, stable=True)
        return torch.searchsorted(ordered, torch.arange(num_rows + 1, device=row.device)), order
    rowptr, order, _ = coo_to_csr(row, torch.arange(row.numel(), device=row.device), num_rows)
    return rowptr, order


# Dropping edges -----------------------------------------------------------------------------------


def drop_edges(adj_t: Any, p: float, training: bool = True) -> Any:
    """Drop each edge with probability ``p``, as DropEdge (Rong et al., ICLR 2020) does.

    The remaining weights are scaled by ``1 / (1 - p)``, unless all are 1.

    Args:
        adj_t: A ``torch.sparse_csr`` matrix, a ``SparseTensor`` or a :class:`gas.nn.Adjacency`.
        p: Probability in ``[0, 1)``.
        training: Whether to drop at all. (default: ``True``)

    Returns:
        A matrix in the same layout with the edges that are left, or ``adj_t`` itself.

    Raises:
        ValueError: If ``adj_t`` is no matrix, or ``p`` no such probability.
    """
    if layout_of(adj_t, "adj_t").num_rows(adj_t) is None:
        raise ValueError(
            "'adj_t' is a dense tensor, expected a torch.sparse_csr matrix, a "
            "torch_sparse.SparseTensor or a gas.nn.Adjacency: for an edge_index use "
            "torch_geometric.utils.dropout_edge"
        )
    return drop_edges_and_rows(adj_t, {}, p)[0] if training else adj_t


def drop_edges_and_rows(
    adj: Any, attributes: dict[str, Any], p: float
) -> tuple[Any, dict[str, Any]]:
    """Drop each edge, and its row of each edge-level tensor, with probability ``p``.

    Args:
        adj: An adjacency in any of :data:`LAYOUTS`.
        attributes: Edge-level tensors; one named ``edge_weight`` is scaled by ``1 / (1 - p)``.
        p: Probability in ``[0, 1)``.
    """
    check_probability("p", p, below_one=True)
    if p == 0.0:
        return adj, attributes
    scale = 1.0 / (1.0 - p)
    layout = layout_of(adj)
    col, value = layout.entries(adj)[1], layout.value(adj)
    entry = _draw_kept_edges(col.numel(), p, col.device)
    if value is not None:
        are_weights = (value != 1).any()
        value = value[entry]
        value = torch.where(are_weights, value * scale, value)
    attributes = {key: attribute[entry] for key, attribute in attributes.items()}
    if "edge_weight" in attributes:
        attributes["edge_weight"] = attributes["edge_weight"] * scale
    return layout.select_edges(adj, entry, value), attributes


def _draw_kept_edges(num_edges: int, p: float, device: torch.device) -> Tensor:
    """Draw the positions of the kept edges, each with probability ``1 - p``, increasing.

    For a GPU, the host draws their number from a binomial distribution, so that it needn't
    synchronise to know the size of the result.
    """
    if device.type == "cpu":
        return (torch.rand(num_edges, device=device) >= p).nonzero().view(-1)
    total = torch.tensor(num_edges, dtype=torch.float64, device="cpu")
    num_kept = int(torch.binomial(total, torch.full_like(total, 1.0 - p)))
    return torch.randperm(num_edges, device=device)[:num_kept].sort().values


def check_size(
    size: tuple[int, int] | None, adj: Any, num_nodes: int | None, edge_weight: Tensor | None
) -> None:
    """Refuse weights and a number of nodes beside a matrix, and those that don't fit edges."""
    if isinstance(num_nodes, int | float | str | tuple | list):  # A proxy of a trace is none.
        check_integer("num_nodes", num_nodes, 0)
    if size is not None and (edge_weight is not None or num_nodes not in (None, *size)):
        name = "num_nodes" if edge_weight is None else "edge_weight"
        raise ValueError(
            f"{name!r} is given with a matrix of shape {list(size)}, which has its own: leave it "
            "out, or pass an edge_index; Adjacency.with_value takes other weights"
        )
    if edge_weight is not None and edge_weight.shape != adj.shape[1:]:
        raise ValueError(
            f"'edge_weight' has shape {list(edge_weight.shape)}, expected [{adj.size(1)}]: one "
            "weight for each edge"
        )
