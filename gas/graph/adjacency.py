"""The adjacency of a batch or a graph, with the transpose that gradients walk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.index import ptr2index

from gas.graph.layout import Layout, layout_of, register_layout, sort_by_row
from gas.graph.structure import (
    Structure,
    Uses,
    check_rows,
    make_usable_in_training,
    to_trainable,
    too_many_entries,
)
from gas.native import MOST_INT32, Matrix, assert_range, learns, sparse_csr


class _Kept(NamedTuple):
    """Cached results of an adjacency, with the values and their version counters."""

    value: Tensor | None
    version: int
    adj: Adjacency
    make: Callable[[Adjacency], Adjacency]


class Adjacency:
    """A sparse matrix of edges, rows being destinations, as operators of :mod:`gas.nn` take it.

    Its transpose is made when a gradient first needs it, and kept. Values may be changed, or
    replaced by others; rows and columns may not.

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
    """Sums or means over the rows of a tensor, made with those of others; see gas.nn.hetero."""

    def _start(self, structure: Structure, value: Tensor | None) -> None:
        self._structure = structure
        self.value = value
        self._kept: dict[Any, _Kept] = {}

    @classmethod
    def _of_structure(cls, structure: Structure, value: Tensor | None) -> Adjacency:
        adj = cls.__new__(cls)
        adj._start(structure, value)
        return adj

    @classmethod
    def trusted(cls, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Adjacency:
        """Make one of valid rows and columns, which aren't checked: that makes the host wait."""
        if col.numel() > MOST_INT32:
            raise too_many_entries(col)
        return cls._of_structure(Structure(rowptr, col, num_cols), value)

    @classmethod
    def of(
        cls, adj: Any, num_nodes: int | None = None, edge_weight: Tensor | None = None
    ) -> Adjacency:
        """Make one of any adjacency: an ``edge_index``, a ``torch.sparse`` matrix, ...

        Args:
            adj: ``edge_index`` of shape ``[2, E]``, a matrix, or an :class:`Adjacency`.
            num_nodes: Of an ``edge_index``, the number of nodes. (default: its largest id plus 1)
            edge_weight: Of an ``edge_index``, the weight of each edge. (default: none)
        """
        layout = layout_of(adj)
        if layout.name == "fused":
            return adj
        if layout.name in ("csr", "sparse_tensor"):
            rowptr, col, value = layout.parts(adj)
            return checked_adjacency(rowptr, col, value, int(adj.size(1)))
        row, col = layout.entries(adj)
        size, value = layout.size(adj), layout.value(adj)
        if size is None:
            if num_nodes is None:  # The host waits for a device.
                num_nodes = int(adj.max()) + 1 if adj.numel() else 0
            size, value = (num_nodes, num_nodes), edge_weight
        rowptr, order = sort_by_row(row, size[0])
        value = None if value is None else value[order]
        return checked_adjacency(rowptr, col[order], value, size[1])

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
        structure = self._structure
        shape = (structure.rowptr.numel() - 1, structure.num_cols)
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
        """Both directions, as the kernels take them."""
        return self._structure.get(self._structure.num_cols)

    def matrix_for(self, x: Tensor) -> Matrix:
        """Both directions; the transpose at least of the columns whose gradient ``x`` takes."""
        if torch.compiler.is_compiling():
            return self.matrix
        return self._structure.get(x.size(0) if learns(x) else 0)

    @property
    def uses(self) -> Uses:
        """Structures that were requested."""
        known, looped = self._structure.known, self._structure.with_self_loops
        columns = 0 if known is None else known[1]
        return Uses(
            columns > 0,
            columns > self.size(0),
            None if looped is None else looped.uses,
            tuple((key, kept.make, kept.adj.uses) for key, kept in self._kept.items()),
        )

    def prepare(self, uses: Uses) -> None:
        """Make what another one, of a batch of the same graph, was asked for."""
        if uses.transpose:
            self._structure.get(self.size(1) if uses.is_whole else self.size(0))
        if uses.with_self_loops is not None:
            self.with_self_loops().prepare(uses.with_self_loops)
        for key, make, others in uses.kept:
            self.keep(key, make).prepare(others)

    def keep(self, key: Any, make: Callable[[Adjacency], Adjacency]) -> Adjacency:
        """Cache the result of ``make``, until the values change.

        What is made of values that take a gradient isn't kept: it has a graph of its own.

        Args:
            key: What tells it from others.
            make: Makes it of an adjacency.
        """
        self._structure.check()
        value = self.value
        if value is not None and value.requires_grad:
            return make(self)
        kept = self._kept.get(key)
        if torch.compiler.is_compiling():  # It can't count changes of values.
            return make(self) if kept is None or value is not None else kept.adj
        version = 0 if value is None else value._version
        if kept is None or kept.value is not value or kept.version != version:
            with make_usable_in_training(value):
                kept = _Kept(value, version, make(self), make)
            self._kept[key] = kept
        return kept.adj

    def degree(self) -> Tensor:
        """Return the number of entries of each row, of shape ``[rows]``, int32."""
        return self.rowptr.diff()

    def unweighted(self) -> Adjacency:
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
        """Return the edges without values, and one self-loop for each node that is on both sides.

        Self-loops that are there already are replaced, as PyG's attention layers do.
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
                structure.with_self_loops = self.trusted(rowptr, col, None, self.size(1))
        return structure.with_self_loops

    def to_torch_sparse(self) -> Tensor:
        """Return the same as a ``torch.sparse_csr`` matrix, of ones where there are no values."""
        return sparse_csr(self.rowptr.long(), self.col.long(), self.value, self.size(1))

    def apply(self, function: Callable[[Tensor], Tensor], keep: bool = True) -> Adjacency:
        """Return an adjacency of what ``function`` makes of each tensor, what is kept included.

        Args:
            function: Such as a move; it doesn't change what is in a tensor.
            keep: Whether it leaves values as precise as they are. (default: ``True``)
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
                    twin._kept[key] = _Kept(twin.value, new, made.apply(function), make)
        return twin

    def to(self, *args: Any, **kwargs: Any) -> Adjacency:
        """Itself, or a copy on another device, as :meth:`torch.nn.Module.to`: a type is of values.

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
        """Itself, or a copy on the CPU."""
        return self.to("cpu")

    def cuda(
        self, device: int | str | torch.device | None = None, non_blocking: bool = False
    ) -> Adjacency:
        """Itself, or a copy on a GPU. (default: the current one)."""
        return self.apply(lambda tensor: tensor.cuda(device, non_blocking))

    def pin_memory(self) -> Adjacency:
        """Itself, or a copy in pinned memory, which a GPU copies without the CPU's help."""
        return self.apply(torch.Tensor.pin_memory)

    def is_pinned(self) -> bool:
        """Return whether its rows, columns and values are in pinned memory."""
        return all(tensor.is_pinned() for tensor in self._own_tensors())

    def share_memory_(self) -> Adjacency:
        """Move its tensors to memory that other processes see; itself."""
        for tensor in self.tensors():
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether other processes see its rows, columns and values."""
        return all(tensor.is_shared() for tensor in self._own_tensors())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`torch.Tensor.record_stream`."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def clone(self) -> Adjacency:
        """Return a copy with memory of its own."""
        return self.apply(torch.clone)

    def detach(self) -> Adjacency:
        """Return the same edges with values that pass no gradient on; both share one transpose."""
        return self.with_value(None if self.value is None else self.value.detach())

    def requires_grad_(self, requires_grad: bool = True) -> Adjacency:
        """Make its values, if it has any, take a gradient; itself."""
        if self.value is not None:
            self.value.requires_grad_(requires_grad)
        return self

    def _own_tensors(self) -> list[Tensor]:
        return [t for t in (self.rowptr, self.col, self.value) if t is not None]

    def tensors(self) -> list[Tensor]:
        """Return the tensors it is made of, and those of what is kept, each once."""
        found = {id(t): t for t in (*self._structure.tensors(), *self._own_tensors())}
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
    """An :class:`Adjacency`, which the operators of :mod:`gas.nn` take."""

    name = "fused"

    def holds(self, adj: Any) -> bool:
        return isinstance(adj, Adjacency)

    def make(self, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Adjacency:
        return Adjacency.trusted(rowptr, col, value, num_cols)

    def parts(self, adj: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        return adj.rowptr, adj.col, adj.value

    def with_value(self, adj: Any, value: Tensor | None) -> Adjacency:
        return adj.with_value(value)

    def tensors(self, adj: Any) -> list[Tensor]:
        return adj.tensors()


register_layout(_Fused())


def checked_adjacency(
    rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int
) -> Adjacency:
    """Make an :class:`Adjacency` of rows and columns, checking them on their device.

    Raises:
        ValueError: If rows don't rise from 0 to the number of entries.
        IndexError: If a column is outside ``[0, num_cols)``. (On a device both are an assertion of
            its own, which CUDA reports when the host waits.)
    """
    if col.is_cpu or torch.compiler.is_compiling():
        return Adjacency(rowptr, col, value, num_cols)
    rises = (rowptr[0] == 0) & (rowptr[-1] == col.numel()) & (rowptr.diff() >= 0).all()
    torch._assert_async(rises, f"'rowptr' does not rise from 0 to {col.numel()}")
    assert_range("col", col, num_cols, "column")
    return Adjacency.trusted(rowptr, col, value, num_cols)
