"""The rows of a mini-batch in two parts: its own, with gradient, and its halo's, without.

:class:`Rows` is for those who ask for it, ``push_and_pull(..., rows=True)``, because they know what
takes it: a sparse product reads the halo's rows from the stored history itself and walks only the
edges inside the batch backward, and dropout draws numbers for the batch's own rows alone.

**When the table changes first.** A batch pushes its own rows before it reads its halo's, and no
node is both: what is read within a call of a model is what a pull would have read. Afterwards, for
somebody who kept the rows or computes again in the backward pass (activation checkpointing), they
may be those of a later push: :meth:`StoredRows.check`, which every reader passes, refuses them if
one of *these* rows has been pushed since, or the table has been changed by hand or closed. Autograd
never reads a table: sums and means, whose backward pass needs no values, are what reads in place,
and everything whose does need them (weights that learn, attention, linear layers) takes pulled
rows, which are copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gas.history.encoded_rows import Encoded
from gas.native import first_sparse_rows, gather_dropout, gather_rows, parts, sparse_csr


class RowTable(Protocol):
    """A table whose rows can be read in place, as :class:`gas.History` is."""

    def has_changed(self, index: Tensor, version: tuple[int, int, int]) -> bool:
        """Return whether one of the rows was pushed, or the table changed, since ``version``."""

    def pull(self, n_id: Tensor) -> Tensor:
        """Return a copy of some rows."""


@dataclass(eq=False)
class StoredRows:
    """Rows of a history that are read where they lie.

    * ``table``: all rows, of shape ``[N, width]``, not to be written to.
    * ``index``: which of them, of shape ``[n]``, int64, on the table's device.
    * ``version``: of the history, when its rows were asked for.
    """

    history: RowTable
    table: Tensor
    index: Tensor
    version: tuple[int, int, int]
    _pulled: Tensor | None = None

    def check(self) -> None:
        """Raise ``RuntimeError`` if the rows may not be those that were asked for any more."""
        if self.history.has_changed(self.index, self.version):
            raise RuntimeError(
                "these Rows are read where a history stores them, and it has changed since "
                "push_and_pull(..., rows=True): read them before the next batch is pushed (a "
                "checkpointed block reads them in the backward pass), or ask for a tensor, without "
                "rows=True"
            )

    def pull(self) -> Tensor:
        """Copy the rows, of shape ``[n, width]``, once; the copy is not to be written to."""
        if self._pulled is None:
            self.check()
            self._pulled = self.history.pull(self.index)
        return self._pulled


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """A batch's own rows and its halo's, together of shape ``[batch_size + halo, width]``.

    :func:`gas.nn.spmm`, :func:`gas.nn.dropout` and the layers of :mod:`gas.nn` take it beside
    tensors; everything else refuses it. It refers to what it was made of: changing ``own`` in place
    changes it.

    * ``own``: of shape ``[batch_size, width]``, with gradient.
    * ``halo``: of shape ``[halo, width]``, of the same type, or where they are stored.
    """

    own: Tensor
    halo: Tensor | StoredRows

    def where(self) -> tuple[Tensor, Tensor | None]:
        """Return a table, and the halo's rows of it; ``None`` for these if they are all of it."""
        if isinstance(self.halo, Tensor):
            return self.halo, None
        self.halo.check()
        return self.halo.table, self.halo.index

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the first rows; a table that has those behind them; and their places in it.

        Without places they lie as they are needed, without a table there are no others.
        """
        return self.own, *self.where()

    def stored(self) -> Tensor:
        """Return a tensor of the same type, on the same device."""
        return self.own

    def pulled(self) -> Tensor:
        """Return the halo's rows, of shape ``[halo, width]``, not to be written to."""
        return self.halo if isinstance(self.halo, Tensor) else self.halo.pull()

    def tensor(self) -> Tensor:
        """Both as one tensor, a copy that is the caller's, with gradient towards ``own``."""
        return torch.cat([self.own, self.pulled()])

    @property
    def shape(self) -> torch.Size:
        """That of both together."""
        halo = self.halo if isinstance(self.halo, Tensor) else self.halo.index
        return torch.Size((self.own.size(0) + halo.size(0), *self.own.shape[1:]))

    def size(self, dim: int) -> int:
        """See :meth:`torch.Tensor.size`."""
        return self.shape[dim]

    def dim(self) -> int:
        """See :meth:`torch.Tensor.dim`."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.stored().dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.stored().device

    @property
    def requires_grad(self) -> bool:
        """Return whether the batch's own rows need a gradient; features never do."""
        return self.stored().requires_grad

    def __repr__(self) -> str:
        halo = "" if isinstance(self.halo, Tensor) else ", halo in place"
        return f"Rows({list(self.shape)}, own={self.own.size(0)}, dtype={self.dtype}{halo})"

    # No tensor ------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        refuse(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Rows has no {name!r}: {TAKERS}")


TAKERS = (
    "gas.nn.spmm, gas.nn.dropout and the layers of gas.nn take Rows, for anything else make a "
    "tensor of it by .tensor()"
)


def refuse(name: str) -> NoReturn:
    """Raise ``TypeError``: something that takes tensors was given :class:`Rows`."""
    raise TypeError(f"{name}() can't take Rows: {TAKERS}")


def _refusing(name: str) -> Any:
    return lambda self, *_: refuse(name)


for _name in (
    *("getitem", "setitem", "len", "iter", "bool", "neg", "pos", "abs", "array"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(Rows, f"__{_name}__", _refusing(f"__{_name}__"))


class Features(Rows):
    """Input features of a batch, history 0: rows of the graph's table, copied only when needed.

    Layers take it as they take other :class:`Rows`. A sparse product reads the rows of the table
    itself, and dropout is done while they are read; rows of :func:`gas.quantize` are decoded by
    then. No gradient flows towards them.

    Args:
        table: All features, of shape ``[N, width]``, not to be written to.
        index: The batch's own rows, then the halo's, of shape ``[batch_size + halo]``, int64.
        num_own: The batch size.
        p: The probability of dropping an element. (default: ``0.0``)
        seed: Of what is dropped. (default: ``0``)
    """

    def __init__(
        self, table: Tensor, index: Tensor, num_own: int, p: float = 0.0, seed: int = 0
    ) -> None:
        if isinstance(table, Encoded):
            table = table if table.plain is None else table.plain
        self.__dict__.update(table=table.detach(), index=index, num_own=num_own, p=p, seed=seed)

    table: Tensor
    index: Tensor
    num_own: int
    p: float
    seed: int

    def dropped(self, p: float, seed: int) -> Features:
        """Return the same with elements dropped, those of the halo's rows, too.

        Args:
            p: The probability.
            seed: Decides on each element by its position.
        """
        if self.p == 0.0:
            return Features(self.table, self.index, self.num_own, p, seed)
        every = torch.arange(self.index.numel(), device=self.device)
        return Features(self._whole, every, self.num_own, p, seed)

    def _read(self, index: Tensor) -> Tensor:
        if isinstance(self.table, Encoded):
            return self.table.read(index, self.p, self.seed)
        if self.p > 0.0:
            return gather_dropout(self.table, index, self.p, self.seed)
        return gather_rows(self.table, index)

    @cached_property
    def _whole(self) -> Tensor:
        return self._read(self.index)

    @cached_property
    def own(self) -> Tensor:
        """The batch's own rows, of shape ``[batch_size, width]``, not to be written to."""
        if not self._in_place or "_whole" in self.__dict__:  # There is a copy of all anyhow.
            return self._whole[: self.num_own]
        return self._read(self.index[: self.num_own])

    @property
    def halo(self) -> Tensor:
        """Return the halo's rows, of shape ``[halo, width]``, not to be written to."""
        return self._whole[self.num_own :]

    @property
    def _in_place(self) -> bool:
        """Return whether a product may read the table in place."""
        table = self.table
        return self.p == 0.0 and not isinstance(table, Encoded) and table.is_contiguous()

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :meth:`Rows.parts`."""
        if not self._in_place:
            return self._whole, None, None
        return self.table[:0], self.table, self.index.contiguous()

    def stored(self) -> Tensor:
        """See :meth:`Rows.stored`."""
        return self.table

    def tensor(self) -> Tensor:
        """Return all rows, of shape ``[batch_size + halo, width]``, cached and read-only."""
        return self._whole

    @property
    def shape(self) -> torch.Size:
        """Of all rows."""
        return torch.Size((self.index.numel(), self.table.size(1)))

    def __repr__(self) -> str:
        return f"Features({list(self.shape)}, own={self.num_own}, dtype={self.dtype})"


def first_rows(x: Tensor | Rows, num_rows: int | None) -> Tensor:
    """Return ``x[:num_rows]``, which are ``x`` itself where it has no more."""
    if isinstance(x, Rows):
        return x.own if num_rows == x.own.size(0) else first_rows(x.tensor(), num_rows)
    if num_rows is None or x.size(0) == num_rows:
        return x  # The gradient of a slice, even of all rows, would be copied.
    if x.layout == torch.sparse_csr:
        pointers = _POINTERS.get(x)
        if pointers is None:
            return first_sparse_rows(x, num_rows)
        size = int(pointers[num_rows])
        rowptr, col, value = parts(x)
        return sparse_csr(rowptr[: num_rows + 1], col[:size], value[:size], x.size(1))
    return x[:num_rows]


# Where the rows of sparse matrices on a device begin, on the host, which would wait to be told.
_POINTERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def begin_alike(x: Tensor, other: Tensor) -> Tensor:
    """Let a sparse matrix tell the host where its rows begin, as one that is like it does.

    Args:
        x: A ``torch.sparse_csr`` matrix.
        other: One whose rows begin at the same entries, on the CPU or such a one itself.
    """
    pointers = other.crow_indices() if other.is_cpu else _POINTERS.get(other)
    if pointers is not None and not x.is_cpu:
        _POINTERS[x] = pointers
    return x
