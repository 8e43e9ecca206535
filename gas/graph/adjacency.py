"""The adjacency of a batch or a graph, with the transpose that gradients walk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gas.graph.csr import by_row, row_ids
from gas.native.custom_op import custom_op, is_transformed, learns
from gas.native.matrix import Matrix, transpose
from gas.native.sparse_rows import sparse_csr

MOST = 2**31 - 1  # What an int32 can count.


@custom_op("gas::transpose")
def _transpose(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    return transpose(rowptr, col, num_cols, kept)


@_transpose.register_fake
def _(rowptr: Tensor, col: Tensor, num_cols: int, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), torch.empty_like(col), torch.empty_like(col)


def _lasting(value: Tensor | None = None) -> contextlib.AbstractContextManager[None]:
    """Makes tensors of use to training, though it were in inference mode that they are needed.

    Nor do they belong to a transform such as :func:`torch.func.grad`, which ends before them,
    unless they are made of a value that it holds.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return _outside_inference()
    within = torch._C._functorch.peek_interpreter_stack() is not None
    if within and (value is None or not is_transformed(value)):
        return torch._C._DisableFuncTorch()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _outside_inference() -> Iterator[None]:
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that training can use, whose changes are counted."""
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with _lasting():
        return tensor.clone()


class _Structure:
    """Rows and columns, and as many columns of the transpose as gradients have needed so far."""

    def __init__(self, rowptr: Tensor, col: Tensor, num_cols: int) -> None:
        self.rowptr = _plain(rowptr.to(torch.int32).contiguous())
        self.col = _plain(col.to(torch.int32).contiguous())
        self.num_cols = num_cols
        # With the number of columns; one value, which threads replace by a larger one.
        self.known: tuple[Matrix, int] | None = None
        self.with_self_loops: Adjacency | None = None
        self._versions = None if torch.compiler.is_compiling() else self._count()

    def _count(self) -> tuple[int, int]:
        return self.rowptr._version, self.col._version

    def check(self) -> None:
        """Raises ``RuntimeError`` if rows or columns have become others since they were checked."""
        if torch.compiler.is_compiling() or self._versions is None:
            return
        if self._count() != self._versions:
            raise RuntimeError(
                "'rowptr' or 'col' of an Adjacency was changed in place, which its transpose "
                "doesn't follow: make a new one, Adjacency(rowptr, col, value, num_cols), of clones"
            )

    def get(self, kept: int) -> Matrix:
        """The matrix with its transpose, of which columns from ``kept`` on may be left out."""
        self.check()
        known = self.known
        if known is None or known[1] < kept:
            with _lasting():
                if kept == 0:  # Nobody will walk it.
                    none = self.col.new_empty(0)
                    back = self.rowptr.new_zeros(self.num_cols + 1), none, none
                else:
                    back = _transpose(self.rowptr, self.col, self.num_cols, kept)
                known = Matrix.of(self.rowptr, self.col, *back), kept
            if self.known is None or self.known[1] < kept:
                self.known = known
        return known[0]

    def apply(self, function: Callable[[Tensor], Tensor]) -> _Structure:
        """What ``function`` makes of all tensors; itself where that is the same."""
        self.check()
        known = self.known
        rowptr, col = function(self.rowptr), function(self.col)
        back = None if known is None else [function(part) for part in known[0].back]
        if rowptr is self.rowptr and col is self.col:
            return self
        twin = _Structure(rowptr, col, self.num_cols)
        if known is not None and back is not None:
            twin.known = Matrix.of(twin.rowptr, twin.col, *map(_plain, back)), known[1]
        if self.with_self_loops is not None:
            twin.with_self_loops = self.with_self_loops.apply(function)
        return twin

    def tensors(self) -> list[Tensor]:
        known, looped = self.known, self.with_self_loops
        parts = [self.rowptr, self.col]
        if known is not None:
            matrix = known[0]
            starts = [start for start in (matrix.start, matrix.t_start) if start.numel() > 0]
            parts += [*matrix.back, *starts]
        return parts if looped is None else [*parts, *looped.tensors()]

    def __getstate__(self) -> tuple[Any, ...]:
        self.check()
        return self.rowptr, self.col, self.num_cols, self.known

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        rowptr, col, num_cols, known = state
        _Structure.__init__(self, rowptr, col, num_cols)
        if known is not None:
            with _lasting():
                back = map(_plain, known[0].back)
                self.known = Matrix.of(self.rowptr, self.col, *back), known[1]


class Uses(NamedTuple):
    """What layers have asked an adjacency for.

    * ``transpose``: the transpose, at least of the columns that are rows, too.
    * ``is_whole``: of all columns.
    * ``with_self_loops``: what they have asked the one with self-loops for; ``None`` if they
      haven't asked for it.
    * ``kept``: the keys of others that were made of it, by what, and what was asked of those.
    """

    transpose: bool = False
    is_whole: bool = False
    with_self_loops: Uses | None = None
    kept: tuple[tuple[Any, Callable[[Adjacency], Adjacency], Uses], ...] = ()


class _Kept(NamedTuple):
    """What was made of an adjacency, of which values, and how often those had been changed."""

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
        if num_cols is None:
            num_cols = max(rowptr.numel() - 1, 0)
        _check(rowptr, col, num_cols)
        self._start(_Structure(rowptr, col, num_cols), value)

    sums_of: Callable[[Tensor, str], Tensor] | None = None
    """Sums or means over the rows of a tensor, made with those of others; see gas.nn.hetero."""

    def _start(self, structure: _Structure, value: Tensor | None) -> None:
        self._structure = structure
        self.value = value
        self._kept: dict[Any, _Kept] = {}

    @classmethod
    def _of_structure(cls, structure: _Structure, value: Tensor | None) -> Adjacency:
        adj = cls.__new__(cls)
        adj._start(structure, value)
        return adj

    @classmethod
    def trusted(cls, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Adjacency:
        """One of rows and columns that are known to be right: kernels read where these point.

        Others are looked at, which waits for a GPU.
        """
        if col.numel() > MOST:
            raise _too_many(col)
        return cls._of_structure(_Structure(rowptr, col, num_cols), value)

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
        from gas.graph.layout import to_adjacency  # Which knows all layouts, this one too.

        return to_adjacency(adj, num_nodes, edge_weight)

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
        col = self._structure.col
        if value is not None:
            if value.shape != col.shape:
                raise ValueError(f"'value' has shape {list(value.shape)}, expected [{col.numel()}]")
            if value.is_complex():
                raise ValueError(f"'value' is {value.dtype}, expected real numbers")
            if value.device != col.device:
                raise ValueError(f"'value' is on {value.device}, but 'col' is on {col.device}")
            value = _plain(value)
        self._value = value

    def size(self, dim: int | None = None) -> Any:
        """The number of rows and of columns, or one of them."""
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
        """Where it lives."""
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
        """What it was asked for."""
        known, looped = self._structure.known, self._structure.with_self_loops
        columns = 0 if known is None else known[1]
        return Uses(
            columns > 0,
            columns > self.size(0),
            None if looped is None else looped.uses,
            tuple((key, kept.make, kept.adj.uses) for key, kept in self._kept.items()),
        )

    def prepare(self, uses: Uses) -> None:
        """Makes what another one, of a batch of the same graph, was asked for."""
        if uses.transpose:
            self._structure.get(self.size(1) if uses.is_whole else self.size(0))
        if uses.with_self_loops is not None:
            self.with_self_loops().prepare(uses.with_self_loops)
        for key, make, others in uses.kept:
            self.keep(key, make).prepare(others)

    def keep(self, key: Any, make: Callable[[Adjacency], Adjacency]) -> Adjacency:
        """What ``make`` makes of it: once, and anew when its values have changed.

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
            with _lasting(value):
                kept = _Kept(value, version, make(self), make)
            self._kept[key] = kept
        return kept.adj

    def degree(self) -> Tensor:
        """The number of entries of each row, of shape ``[rows]``, int32."""
        return self.rowptr.diff()

    def unweighted(self) -> Adjacency:
        """The same edges without values; both share one transpose."""
        if self.value is None:
            return self
        return self.with_value(None)

    def with_value(self, value: Tensor | None) -> Adjacency:
        """The same edges with other values; both share one transpose."""
        return self._of_structure(self._structure, value)

    def coo(self) -> tuple[Tensor, Tensor]:
        """The row and the column of every entry, each of shape ``[E]``, int64."""
        return row_ids(self.rowptr, self.num_entries), self.col.long()

    def to_edge_index(self) -> tuple[Tensor, Tensor | None]:
        """Sources and destinations of shape ``[2, E]``, and the values."""
        row, col = self.coo()
        return torch.stack([col, row]), self.value

    def with_self_loops(self) -> Adjacency:
        """The same edges without values, and one self-loop for each node that is on both sides.

        Self-loops that are there already are replaced, as PyG's attention layers do.
        """
        structure = self._structure
        structure.check()
        if structure.with_self_loops is None:
            with _lasting():
                structure.with_self_loops = self._with_self_loops()
        return structure.with_self_loops

    def _with_self_loops(self) -> Adjacency:
        row, col = self.coo()
        other = row != col
        nodes = torch.arange(min(self.shape), device=self.device)
        row, col = torch.cat([row[other], nodes]), torch.cat([col[other], nodes])
        rowptr, order = by_row(row, self.size(0))
        return self.trusted(rowptr, col[order], None, self.size(1))

    def to_torch_sparse(self) -> Tensor:
        """The same as a ``torch.sparse_csr`` matrix, of ones where there are no values."""
        return sparse_csr(self.rowptr.long(), self.col.long(), self.value, self.size(1))

    # What tensors have, by which PyG, data loaders and processes handle them ----------------------

    def apply(self, function: Callable[[Tensor], Tensor], keep: bool = True) -> Adjacency:
        """An adjacency of what ``function`` makes of each tensor, what is kept included.

        Args:
            function: Such as a move; it doesn't change what is in a tensor.
            keep: Whether it leaves values as precise as they are. (default: ``True``)
        """
        with _lasting(self.value):
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
        """Whether its rows, columns and values are in pinned memory."""
        return all(tensor.is_pinned() for tensor in self._given())

    def share_memory_(self) -> Adjacency:
        """Moves its tensors to memory that other processes see; itself."""
        for tensor in self.tensors():
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether other processes see its rows, columns and values."""
        return all(tensor.is_shared() for tensor in self._given())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`torch.Tensor.record_stream`."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def clone(self) -> Adjacency:
        """A copy with memory of its own."""
        return self.apply(torch.clone)

    def detach(self) -> Adjacency:
        """The same edges with values that pass no gradient on; both share one transpose."""
        return self._of_structure(
            self._structure, None if self.value is None else self.value.detach()
        )

    def requires_grad_(self, requires_grad: bool = True) -> Adjacency:
        """Makes its values, if it has any, take a gradient; itself."""
        if self.value is not None:
            self.value.requires_grad_(requires_grad)
        return self

    def _given(self) -> list[Tensor]:
        given = [self.rowptr, self.col]
        return given if self.value is None else [*given, self.value]

    def tensors(self) -> list[Tensor]:
        """The tensors it is made of, and those of what is kept, each once."""
        found = {id(t): t for t in (*self._structure.tensors(), *self._given())}
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


def _check(rowptr: Tensor, col: Tensor, num_cols: int) -> None:
    """Raises ``ValueError`` or ``IndexError`` if kernels would read where there is nothing."""
    for name, ids in (("rowptr", rowptr), ("col", col)):
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"'{name}' is {ids.dtype} of shape {list(ids.shape)}, expected a one-dimensional "
                "tensor of int32 or int64"
            )
    if col.numel() > MOST or rowptr.numel() > MOST:
        raise _too_many(col)
    if rowptr.device != col.device:
        raise ValueError(f"'rowptr' is on {rowptr.device}, but 'col' is on {col.device}")
    if rowptr.numel() == 0 or not 0 <= num_cols <= MOST:
        raise ValueError(
            f"'rowptr' has shape {list(rowptr.shape)} and 'num_cols' is {num_cols}, expected "
            "[rows + 1] and a number of columns below 2^31"
        )
    if torch.compiler.is_compiling() or col.is_meta:
        return  # Nothing can be looked at.
    falls = (rowptr[1:] < rowptr[:-1]).any()
    ends = [rowptr[0], rowptr[-1], falls, *(torch.aminmax(col) if col.numel() else ())]
    first, last, fell, *bounds = torch.stack([end.long() for end in ends]).tolist()  # Waits once.
    if first != 0 or last != col.numel() or fell:
        raise ValueError(f"'rowptr' does not rise from 0 to the {col.numel()} entries of 'col'")
    for bound in bounds:
        if not 0 <= bound < num_cols:
            raise IndexError(
                f"'col' holds {bound}, which is outside [0, {num_cols}): give 'num_cols' if there "
                "are more sources than rows"
            )


def _too_many(col: Tensor) -> ValueError:
    return ValueError(
        f"'col' has {col.numel():,} entries, expected fewer than 2^31: cut the graph into "
        "mini-batches"
    )
