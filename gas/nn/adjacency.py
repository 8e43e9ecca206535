"""The adjacency of a batch or a graph, with the transpose that gradients walk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gas._operators import Matrix, transpose
from gas.nn.custom_op import custom_op
from gas.subgraph import csr_matrix, entries, is_sparse_tensor

MOST = 2**31 - 1  # What an int32 can count.


@custom_op("gas::transpose")
def _transpose(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    return transpose(rowptr, col, num_cols, kept)


@_transpose.register_fake
def _(rowptr: Tensor, col: Tensor, num_cols: int, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), torch.empty_like(col), torch.empty_like(col)


class _Directions:
    """A matrix and as many columns of its transpose as gradients have needed so far."""

    def __init__(self, rowptr: Tensor, col: Tensor, num_cols: int) -> None:
        self.rowptr, self.col, self.num_cols = rowptr, col, num_cols
        # With the number of columns; one value, which threads replace by a larger one.
        self.known: tuple[Matrix, int] | None = None

    def get(self, kept: int) -> Matrix:
        """The matrix with its transpose, of which columns from ``kept`` on may be left out."""
        known = self.known
        if known is None or known[1] < kept:
            back = _transpose(self.rowptr, self.col, self.num_cols, kept)
            known = Matrix(self.rowptr, self.col, *back), kept
            if self.known is None or self.known[1] < kept:
                self.known = known
        return known[0]


class Adjacency:
    """A sparse matrix of edges, rows being destinations, as operators of :mod:`gas.nn` take it.

    Its transpose is made when a gradient first needs it, and kept.

    Args:
        rowptr: First entry of each row, of shape ``[rows + 1]``.
        col: The source of each entry, of shape ``[E]``.
        value: A weight for each entry, of shape ``[E]``. (default: none)
        num_cols: The number of sources. (default: the number of rows)

    Raises:
        ValueError: If ``rowptr`` doesn't fit ``col``, or there are 2^31 entries or more.
        IndexError: If a source is outside ``[0, num_cols)``, when the transpose is made.
    """

    def __init__(
        self,
        rowptr: Tensor,
        col: Tensor,
        value: Tensor | None = None,
        num_cols: int | None = None,
    ) -> None:
        if col.numel() > MOST or rowptr.numel() > MOST:
            raise ValueError(
                f"'col' has {col.numel():,} entries, expected fewer than 2^31: cut the graph into "
                "mini-batches"
            )
        if value is not None and value.shape != col.shape:
            raise ValueError(f"'value' has shape {list(value.shape)}, expected [{col.numel()}]")
        self.rowptr = rowptr.to(torch.int32).contiguous()
        self.col = col.to(torch.int32).contiguous()
        self.value = value
        self._num_cols = rowptr.numel() - 1 if num_cols is None else num_cols
        self._directions = _Directions(self.rowptr, self.col, self._num_cols)
        self.kept: dict[Any, Adjacency] = {}  # What was made of it, such as its normalisation.

    @classmethod
    def of(
        cls, adj: Any, num_nodes: int | None = None, edge_weight: Tensor | None = None
    ) -> Adjacency:
        """Makes one of any adjacency: an ``edge_index``, a ``torch.sparse`` matrix, ...

        Args:
            adj: ``edge_index`` of shape ``[2, E]``, a matrix, or an :class:`Adjacency`.
            num_nodes: Of an ``edge_index``, the number of nodes. (default: its largest id plus 1)
            edge_weight: Of an ``edge_index``, the weight of each edge. (default: none)
        """
        if isinstance(adj, cls):
            return adj
        if isinstance(adj, Tensor) and adj.layout == torch.sparse_csr:
            return cls(adj.crow_indices(), adj.col_indices(), adj.values(), adj.size(1))
        if is_sparse_tensor(adj):
            rowptr, col, value = adj.csr()
            return cls(rowptr, col, value, adj.size(1))
        if not isinstance(adj, Tensor):
            raise ValueError(
                f"'adj' is a {type(adj).__name__}, expected an edge_index of shape [2, E], a "
                "torch.sparse matrix, a torch_sparse.SparseTensor or an Adjacency"
            )
        if adj.is_sparse:
            row, col = entries(adj)
            size, value = tuple(adj.shape), adj.to_sparse_coo()._values()
        else:
            row, col = entries(adj)
            if num_nodes is None:
                num_nodes = int(adj.max()) + 1 if adj.numel() else 0
            size, value = (num_nodes, num_nodes), edge_weight
        order = torch.sort(row, stable=True).indices
        rowptr = row.new_zeros(size[0] + 1)
        rowptr[1:] = torch.bincount(row, minlength=size[0]).cumsum(0)
        return cls(rowptr, col[order], None if value is None else value[order], size[1])

    def size(self, dim: int | None = None) -> Any:
        """The number of rows and of columns, or one of them."""
        shape = (self.rowptr.numel() - 1, self._num_cols)
        return shape if dim is None else shape[dim]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return self.size()

    @property
    def num_entries(self) -> int:
        """The number of edges."""
        return self.col.numel()

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.col.device

    @property
    def matrix(self) -> Matrix:
        """Both directions, as the kernels take them."""
        return self._directions.get(self._num_cols)

    def matrix_for(self, x: Tensor) -> Matrix:
        """Both directions; the transpose at least of the columns whose gradient ``x`` takes."""
        if torch.compiler.is_compiling():
            return self.matrix
        learns = torch.is_grad_enabled() and x.requires_grad
        return self._directions.get(x.size(0) if learns else 0)

    def degree(self) -> Tensor:
        """The number of entries of each row, of shape ``[rows]``, int32."""
        return self.rowptr.diff()

    def unweighted(self) -> Adjacency:
        """The same edges without values; both share one transpose."""
        if self.value is None:
            return self
        if "unweighted" not in self.kept:
            twin = Adjacency(self.rowptr, self.col, None, self._num_cols)
            twin._directions = self._directions
            self.kept["unweighted"] = twin
        return self.kept["unweighted"]

    def coo(self) -> tuple[Tensor, Tensor]:
        """The row and the column of every entry, each of shape ``[E]``, int64."""
        rows = torch.arange(self.size(0), device=self.device)
        return torch.repeat_interleave(rows, self.degree()), self.col.long()

    def to_edge_index(self) -> tuple[Tensor, Tensor | None]:
        """Sources and destinations of shape ``[2, E]``, and the values."""
        row, col = self.coo()
        return torch.stack([col, row]), self.value

    def with_self_loops(self) -> Adjacency:
        """The same edges without values, and one self-loop for each node that is on both sides.

        Self-loops that are there already are replaced, as PyG's attention layers do.
        """
        if "self-loops" not in self.kept:
            row, col = self.coo()
            other = row != col
            nodes = torch.arange(min(self.shape), device=self.device)
            row, col = torch.cat([row[other], nodes]), torch.cat([col[other], nodes])
            rowptr = row.new_zeros(self.size(0) + 1)
            rowptr[1:] = torch.bincount(row, minlength=self.size(0)).cumsum(0)
            order = torch.sort(row, stable=True).indices
            self.kept["self-loops"] = Adjacency(rowptr, col[order], None, self._num_cols)
        return self.kept["self-loops"]

    def to_torch_sparse(self) -> Tensor:
        """The same as a ``torch.sparse_csr`` matrix, of ones where there are no values."""
        value = self.value
        if value is None:
            value = torch.ones(self.num_entries, device=self.device)
        return csr_matrix(self.rowptr.long(), self.col.long(), value, self.shape)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Adjacency:
        """A copy on another device."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        value = None if self.value is None else move(self.value)
        twin = Adjacency(move(self.rowptr), move(self.col), value, self._num_cols)
        known = self._directions.known
        if known is not None:
            back = (move(part) for part in known[0][2:])
            twin._directions.known = Matrix(twin.rowptr, twin.col, *back), known[1]
        return twin

    def tensors(self) -> list[Tensor]:
        """The tensors it is made of, the transpose included once there is one."""
        known = self._directions.known
        parts = [self.rowptr, self.col] if known is None else list(known[0])
        return parts if self.value is None else [*parts, self.value]

    def __repr__(self) -> str:
        rows, cols = self.shape
        weighted = "weighted" if self.value is not None else "unweighted"
        return f"{self.__class__.__name__}({rows} x {cols}, {self.num_entries} entries, {weighted})"
