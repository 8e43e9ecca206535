"""The adjacency of a batch or a graph, with the transpose that backward passes use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.index import ptr2index

from gas.graph.layout import Layout, check_size, layout_of, register_layout, sort_by_row
from gas.graph.structure import (
    Structure,
    Uses,
    check_entry_count,
    check_rows,
    make_usable_in_training,
    to_trainable,
)
from gas.native import Matrix, assert_range, learns, sparse_csr


class _CacheEntry(NamedTuple):
    """Cached results of an adjacency, with the values and their version counters."""

    value: Tensor | None
    version: int
    adj: Adjacency
    make: Callable[[Adjacency], Adjacency]


class Adjacency:
    """Sparse matrix of edges, in the form that operators of :mod:`gas.nn` take.

    Rows are destinations. The transpose is computed when a gradient first needs it, and cached.
    Values may be changed or replaced; rows and columns may not.

    Args:
        rowptr: First entry of each row, of shape ``[rows + 1]``.
        col: The source of each entry, of shape ``[E]``.
        value: A weight for each entry, of shape ``[E]``. (default: none)
        num_cols: The number of sources. (default: the number of rows)

    Raises:
        ValueError: If ``rowptr`` doesn't rise from 0 to the number of entries, ``value`` doesn't
            fit ``col``, or there are 2^31 entries or more.
        IndexError: If a source is outside ``[0, num_cols)``.
    """

    def __init__(
        self,
        rowptr: Tensor,
        col: Tensor,
        value: Tensor | None = None,
        num_cols: int | None = None,
    ) -> None:
        num_cols = max(rowptr.numel() - 1, 0) if num_cols is None else num_cols
        check_rows(rowptr, col, num_cols)
        self._start(Structure(rowptr, col, num_cols), value)

    sums_of: Callable[[Tensor, str], Tensor] | None = None
    """Sums or means over neighbours, computed for several relations at once; see gas.nn.hetero."""

    def _start(self, structure: Structure, value: Tensor | None) -> None:
        self._structure = structure
        self.value = value
        self._kept: dict[Any, _CacheEntry] = {}

    @classmethod
    def _of_structure(cls, structure: Structure, value: Tensor | None) -> Adjacency:
        adj = cls.__new__(cls)
        adj._start(structure, value)
        return adj

    @classmethod
    def from_valid_csr(
        cls, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int
    ) -> Adjacency:
        """Make an adjacency without checking rows and columns, so that the host doesn't wait."""
        check_entry_count(rowptr, col)
        return cls._of_structure(Structure(rowptr, col, num_cols), value)

    @classmethod
    def of(
        cls, adj: Any, num_nodes: int | None = None, edge_weight: Tensor | None = None
    ) -> Adjacency:
        """Convert an ``edge_index``, a ``torch.sparse`` matrix or another adjacency.

        Args:
            adj: ``edge_index`` of shape ``[2, E]``, a matrix, or an :class:`Adjacency`.
            num_nodes: The number of nodes of an ``edge_index``. (default: its largest id plus 1)
            edge_weight: The weights of an ``edge_index``, of shape ``[E]``. (default: none)
        """
        layout = layout_of(adj)
        if num_nodes is not None or edge_weight is not None:
            check_size(layout.size(adj), adj, num_nodes, edge_weight)
        if layout.name == "fused":
            return adj
        if layout.name in ("csr", "sparse_tensor"):
            return adjacency_from_csr(*layout.parts(adj), int(adj.size(1)))
        row, col = layout.entries(adj)
        size, value = layout.size(adj), layout.value(adj)
        if size is None:
            if num_nodes is None:  # Synchronises with a GPU.
                num_nodes = int(adj.max()) + 1 if adj.numel() else 0
            size, value = (num_nodes, num_nodes), edge_weight
        rowptr, order = sort_by_row(row, size[0])
        value = None if value is None else value[order]
        return adjacency_from_csr(rowptr, col[order], value, size[1])

    @property
    def rowptr(self) -> Tensor:
        """First entry of each row, of shape ``[rows + 1]``, int32."""
        return self._structure.rowptr

    @property
    def col(self) -> Tensor:
        """The source of each entry, of shape ``[E]``, int32."""
        return self._structure.col

    @property
    def value(self) -> Tensor | None:
        """The weight of each entry, of shape ``[E]``, or ``None``."""
        return self._value

    @value.setter
    def value(self, value: Tensor | None) -> None:
        col = self.col
        if value is not None:
            if value.shape != col.shape:
                raise ValueError(f"'value' has shape {list(value.shape)}, expected [{col.numel()}]")
            if value.is_complex():
                raise ValueError(f"'value' is {value.dtype}, expected real numbers")
            if value.device != col.device:
                raise ValueError(f"'value' is on {value.device}, but 'col' is on {col.device}")
            value = to_trainable(value)
        self._value = value

    def size(self, dim: int | None = None) -> Any:
        """Return the number of rows and of columns, or one of them."""
        shape = (self.rowptr.numel() - 1, self._structure.num_cols)
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
        """Device of the adjacency."""
        return self.col.device

    @property
    def matrix(self) -> Matrix:
        """Rows and transpose, in the form that the kernels take."""
        return self._structure.get(self._structure.num_cols)

    def matrix_for(self, x: Tensor) -> Matrix:
        """Return rows and transpose; the latter may leave out columns that need no gradient."""
        if torch.compiler.is_compiling():
            return self.matrix
        return self._structure.get(x.size(0) if learns(x) else 0)

    @property
    def uses(self) -> Uses:
        """Return what layers have asked for: the transpose, self-loops, selections of edges."""
        known, looped = self._structure.known, self._structure.with_self_loops
        columns = 0 if known is None else known[1]
        return Uses(
            columns > 0,
            columns > self.size(0),
            None if looped is None else looped.uses,
            tuple((key, kept.make, kept.adj.uses) for key, kept in self._kept.items()),
        )

    def prepare(self, uses: Uses) -> None:
        """Make the structures that another adjacency of the same graph was used for."""
        if uses.transpose:
            self._structure.get(self.size(1) if uses.is_whole else self.size(0))
        if uses.with_self_loops is not None:
            self.with_self_loops().prepare(uses.with_self_loops)
        for key, make, others in uses.kept:
            self.keep(key, make).prepare(others)

    def keep(self, key: Any, make: Callable[[Adjacency], Adjacency]) -> Adjacency:
        """Cache the result of ``make`` until the values change.

        Results of values that require a gradient aren't cached: each has its own autograd graph.

        Args:
            key: The key of the result in the cache.
            make: Computes the result from an adjacency.
        """
        self._structure.check()
        value = self.value
        if value is not None and value.requires_grad:
            return make(self)
        kept = self._kept.get(key)
        if torch.compiler.is_compiling():  # Version counters can't be read.
            return make(self) if kept is None or value is not None else kept.adj
        version = 0 if value is None else value._version
        if kept is None or kept.value is not value or kept.version != version:
            with make_usable_in_training(value):
                kept = _CacheEntry(value, version, make(self), make)
            self._kept[key] = kept
        return kept.adj

    def degree(self) -> Tensor:
        """Return the number of entries of each row, of shape ``[rows]``, int32."""
        return self.rowptr.diff()

    def remove_values(self) -> Adjacency:
        """Return the same edges without values; both share one transpose."""
        return self if self._value is None else self.with_value(None)

    def with_value(self, value: Tensor | None) -> Adjacency:
        """Return the same edges with other values; both share one transpose."""
        return self._of_structure(self._structure, value)

    def coo(self) -> tuple[Tensor, Tensor]:
        """Return the row and the column of every entry, each of shape ``[E]``, int64."""
        return ptr2index(self.rowptr.long(), self.num_entries), self.col.long()

    def to_edge_index(self) -> tuple[Tensor, Tensor | None]:
        """Return sources and destinations of shape ``[2, E]``, and the values."""
        row, col = self.coo()
        return torch.stack([col, row]), self.value

    def with_self_loops(self) -> Adjacency:
        """Return the edges without values, with one self-loop for each node that is a source, too.

        Existing self-loops are replaced, as in PyG's attention layers.
        """
        structure = self._structure
        structure.check()
        if structure.with_self_loops is None:
            with make_usable_in_training():
                row, col = self.coo()
                other = row != col
                nodes = torch.arange(min(self.shape), device=self.device)
                row, col = torch.cat([row[other], nodes]), torch.cat([col[other], nodes])
                rowptr, order = sort_by_row(row, self.size(0))
                col = col[order]
                structure.with_self_loops = self.from_valid_csr(rowptr, col, None, self.size(1))
        return structure.with_self_loops

    def to_torch_sparse(self) -> Tensor:
        """Convert to a ``torch.sparse_csr`` matrix; without values its entries are 1."""
        return sparse_csr(self.rowptr.long(), self.col.long(), self.value, self.size(1))

    def apply(self, function: Callable[[Tensor], Tensor], keep: bool = True) -> Adjacency:
        """Apply a function, such as a move to a device, to all tensors, cached ones included.

        Args:
            function: The function, which doesn't change the elements of a tensor.
            keep: Whether the precision of values stays the same. (default: ``True``)
        """
        with make_usable_in_training(self.value):
            structure = self._structure.apply(function)
            value = None if self.value is None else function(self.value)
            if structure is self._structure and value is self.value:
                return self
            twin = self._of_structure(structure, value)
            version, new = (0 if v is None else v._version for v in (self.value, twin.value))
            for key, (old, then, made, make) in list(self._kept.items()):
                if keep and old is self.value and then == version:
                    twin._kept[key] = _CacheEntry(twin.value, new, made.apply(function), make)
        return twin

    def to(self, *args: Any, **kwargs: Any) -> Adjacency:
        """Move to a device, or change the type of values, as :meth:`torch.nn.Module.to` does.

        Args:
            *args: A device, a floating point type, ``non_blocking``, or another tensor.
            **kwargs: ``device``, ``dtype`` and ``non_blocking``.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"'dtype' is {dtype}, expected a floating point type, of values")

        def move(tensor: Tensor) -> Tensor:
            kind = dtype if tensor.is_floating_point() else None
            return tensor.to(device, kind, non_blocking)

        return self.apply(move, keep=dtype is None)

    def cpu(self) -> Adjacency:
        """Move to the CPU."""
        return self.to("cpu")

    def cuda(
        self, device: int | str | torch.device | None = None, non_blocking: bool = False
    ) -> Adjacency:
        """Move to a GPU. (default: the current one)."""
        return self.apply(lambda tensor: tensor.cuda(device, non_blocking))

    def pin_memory(self) -> Adjacency:
        """Copy to pinned memory, from which a GPU copies asynchronously."""
        return self.apply(torch.Tensor.pin_memory)

    def is_pinned(self) -> bool:
        """Return whether its rows, columns and values are in pinned memory."""
        return all(t.is_pinned() for t in (self.rowptr, self.col, self.value) if t is not None)

    def share_memory_(self) -> Adjacency:
        """Move all tensors to shared memory, and return the adjacency itself."""
        for tensor in self.tensors():
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether its rows, columns and values are in shared memory."""
        return all(t.is_shared() for t in (self.rowptr, self.col, self.value) if t is not None)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`torch.Tensor.record_stream`."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def clone(self) -> Adjacency:
        """Return a copy with memory of its own."""
        return self.apply(torch.clone)

    def detach(self) -> Adjacency:
        """Return the same edges with detached values; both share one transpose."""
        return self.with_value(None if self.value is None else self.value.detach())

    def requires_grad_(self, requires_grad: bool = True) -> Adjacency:
        """Set whether values, if there are any, require a gradient; return the adjacency itself."""
        if self.value is not None:
            self.value.requires_grad_(requires_grad)
        return self

    def tensors(self) -> list[Tensor]:
        """Return all tensors, those of the transpose and of cached results included, each once."""
        own = (*self._structure.tensors(), self.rowptr, self.col, self.value)
        found = {id(t): t for t in own if t is not None}
        for kept in list(self._kept.values()):
            found.update((id(t), t) for t in kept.adj.tensors())
        return list(found.values())

    def __getstate__(self) -> dict[str, Any]:
        return {"structure": self._structure, "value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(state["structure"], state["value"])

    def __repr__(self) -> str:
        rows, cols = self.shape
        weighted = "weighted" if self.value is not None else "unweighted"
        return f"{self.__class__.__name__}({rows} x {cols}, {self.num_entries} entries, {weighted})"


class _Fused(Layout):
    """Layout of an :class:`Adjacency`."""

    name = "fused"

    def holds(self, adj: Any) -> bool:
        return isinstance(adj, Adjacency)

    def make(self, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Adjacency:
        return Adjacency.from_valid_csr(rowptr, col, value, num_cols)

    def parts(self, adj: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        return adj.rowptr, adj.col, adj.value

    def with_value(self, adj: Any, value: Tensor | None) -> Adjacency:
        return adj.with_value(value)

    def tensors(self, adj: Any) -> list[Tensor]:
        return adj.tensors()


register_layout(_Fused())


def adjacency_from_csr(
    rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int
) -> Adjacency:
    """Make an :class:`Adjacency`; check rows and columns on their device.

    Raises:
        ValueError: If rows don't rise from 0 to the number of entries.
        IndexError: If a column is outside ``[0, num_cols)``. (On a GPU both are assertions of the
            device, which CUDA reports at the next synchronisation.)
    """
    if col.is_cpu or torch.compiler.is_compiling():
        return Adjacency(rowptr, col, value, num_cols)
    rises = (rowptr[0] == 0) & (rowptr[-1] == col.numel()) & (rowptr.diff() >= 0).all()
    torch._assert_async(rises, f"'rowptr' does not rise from 0 to {col.numel()}")
    assert_range("col", col, num_cols, "column")
    return Adjacency.from_valid_csr(rowptr, col, value, num_cols)
