"""The rows of a mini-batch: its own, with gradient, and its halo's, without.

:class:`BatchPulls` reads the halo's rows from the histories, as one tensor with the batch's own or
as :class:`Rows`, ``push_and_pull(..., rows=True)``. A sparse product reads the halo's rows of
:class:`Rows` from the stored history and processes only the edges inside the batch in the backward
pass; dropout draws random numbers for the batch's own rows only.

**If the table changes first.** A batch pushes its own rows before it reads its halo's, and no node
is in both: within a call of a model, rows that are read in place equal pulled rows. After the call,
and in a recomputation in the backward pass (activation checkpointing), they may be those of a later
push: every reader calls :meth:`StoredRows.check`, which raises an error if one of *these* rows has
been pushed since, or the table has been changed by the caller or closed. Autograd never reads a
table: only sums and means read in place, as their backward pass needs no values. All other
operators (learnable edge weights, attention, linear layers) take pulled rows, which are copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gas.history.history import History, StoredRows
from gas.history.transfer import Copies, Pull
from gas.native import first_sparse_rows

Correct = Callable[[Tensor], None]
"""Changes pulled rows in place, such as :class:`gas.history.Correction`."""


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """A batch's own rows and its halo's, together of shape ``[batch_size + halo, width]``.

    :func:`gas.nn.spmm`, :func:`gas.nn.dropout` and the layers of :mod:`gas.nn` take it like a
    tensor; other functions raise ``TypeError``. It shares memory with ``own``.

    * ``own``: the batch's own rows, of shape ``[batch_size, width]``, with gradient.
    * ``halo``: the halo's rows, of shape ``[halo, width]`` and the same type, or stored rows.
    """

    own: Tensor
    halo: Tensor | StoredRows

    def halo_table(self) -> tuple[Tensor, Tensor | None]:
        """Return a table and the index of the halo's rows in it; ``None`` for all rows in order."""
        if isinstance(self.halo, Tensor):
            return self.halo, None
        self.halo.check()
        return self.halo.table, self.halo.index

    def kernel_inputs(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the inputs of :func:`gas.native.sparse.multiply`: ``x``, ``other`` and ``place``.

        They are the first rows, a table with the other rows, and the index of these in the table.
        Without an index the table is in order; without a table there are no other rows.
        """
        return self.own, *self.halo_table()

    def prototype(self) -> Tensor:
        """Return a tensor with the same dtype and device, and whether a gradient is required."""
        return self.own

    def halo_tensor(self) -> Tensor:
        """Return the halo's rows, of shape ``[halo, width]``, read-only."""
        return self.halo if isinstance(self.halo, Tensor) else self.halo.pull()

    def tensor(self) -> Tensor:
        """Return a copy of all rows as one tensor, with gradient towards ``own``."""
        return torch.cat([self.own, self.halo_tensor()])

    @property
    def shape(self) -> torch.Size:
        """The shape of all rows."""
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
        return self.prototype().dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.prototype().device

    @property
    def requires_grad(self) -> bool:
        """Return whether the batch's own rows need a gradient; features never do."""
        return self.prototype().requires_grad

    def __repr__(self) -> str:
        halo = "" if isinstance(self.halo, Tensor) else ", halo in place"
        return f"Rows({list(self.shape)}, own={self.own.size(0)}, dtype={self.dtype}{halo})"

    # No tensor ------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        refuse(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Rows has no {name!r}: {ROWS_HINT}")


ROWS_HINT = (
    "gas.nn.spmm, gas.nn.dropout and the layers of gas.nn take Rows, for anything else make a "
    "tensor of it by .tensor()"
)


def refuse(name: str) -> NoReturn:
    """Raise ``TypeError``: something that takes tensors was given :class:`Rows`."""
    raise TypeError(f"{name}() can't take Rows: {ROWS_HINT}")


def _make_refusal(name: str) -> Any:
    return lambda self, *_: refuse(name)


for _name in (
    *("getitem", "setitem", "len", "iter", "bool", "neg", "pos", "abs", "array"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(Rows, f"__{_name}__", _make_refusal(f"__{_name}__"))


def first_rows(x: Tensor | Rows, num_rows: int | None) -> Tensor:
    """Return ``x[:num_rows]``, or ``x`` itself if it has no more rows."""
    if isinstance(x, Rows):
        return x.own if num_rows == x.own.size(0) else first_rows(x.tensor(), num_rows)
    if num_rows is None or x.size(0) == num_rows:
        return x  # Autograd would copy the gradient of a slice, even of all rows.
    if x.layout == torch.sparse_csr:
        return first_sparse_rows(x, num_rows, _POINTERS.get(x))
    return x[:num_rows]


# Row pointers of sparse matrices on a device, in host memory: reading them from the device would
# make the host wait.
_POINTERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def cache_row_starts(x: Tensor, other: Tensor) -> Tensor:
    """Keep the row pointers of a sparse matrix on a device in host memory, too.

    Args:
        x: A ``torch.sparse_csr`` matrix.
        other: A matrix with the same row pointers, on the CPU or with pointers in host memory.
    """
    pointers = other.crow_indices() if other.is_cpu else _POINTERS.get(other)
    if pointers is not None and not x.is_cpu:
        _POINTERS[x] = pointers
    return x


class BatchPulls:
    """Read the halo's rows from every history, in the order in which a model needs them.

    Several forward passes of the batch may share them, such as those of its views: every row is
    pulled once. The first pass gets the pulled tensor, and may change it, so the copies for the
    other passes are made at once. Together they take as much memory as a pull for each pass.

    Args:
        histories: The histories to pull ahead, in order.
        batch_size: The number of in-batch nodes, for which space is left in front of the rows.
        n_id: Global ids of the in-batch nodes, then of the halo.
        limit: The maximum number of pending pulls. (default: all)
    """

    def __init__(
        self, histories: Iterable[History], batch_size: int, n_id: Tensor, limit: int | None = None
    ) -> None:
        self.readers = 1
        """The number of forward passes that read each history."""
        self._waiting = deque(histories)
        self._started: dict[History, Pull] = {}
        self._copies: dict[History, list[Tensor]] = {}  # For readers after the first.
        self._stored: dict[History, StoredRows] = {}
        self._batch_size = batch_size
        self._own, self._halo = n_id[:batch_size], n_id[batch_size:]
        self._ids: Copies = {}  # Ids of the halo on devices, once for all histories.
        self._limit = len(self._waiting) if limit is None else limit
        try:
            self._start()
        except BaseException:
            self.cancel()
            raise

    def _start(self) -> None:
        while self._waiting and len(self._started) < self._limit:
            history = self._waiting.popleft()
            self._started[history] = self._start_one(history, True)

    def _start_one(self, history: History, ahead: bool) -> Pull:
        return history.start_pull(self._halo, self._batch_size, self._own, self._ids, ahead)

    def tensor(self, history: History, own: Tensor, correct: Correct | None = None) -> Tensor:
        """Return the batch's own rows and its halo's in one tensor, which the caller may change.

        ``correct`` changes the halo's rows.
        """
        return join_own_and_halo(own, self._pull(history, correct))

    def rows(
        self, history: History, own: Tensor, in_place: bool = True, correct: Correct | None = None
    ) -> Rows:
        """Return the same as :class:`Rows`; the halo's rows are read in place if possible.

        That isn't possible after they have been pulled, if ``in_place`` is false, or if ``correct``
        changes them.
        """
        own = own if torch.is_grad_enabled() else own.detach()
        stored = self._stored.get(history)
        pulled = history in self._started or history in self._copies
        if stored is None and in_place and not pulled and correct is None:
            stored = history.stored_rows(self._halo, own.dtype, self._ids)
        if stored is None:
            return Rows(own, self._pull(history, correct)[self._batch_size :].to(own))
        if self.readers > 1:
            self._stored[history] = stored
        return Rows(own, stored)

    def _pull(self, history: History, correct: Correct | None = None) -> Tensor:
        """Return a history's rows of the halo, with space in front for the batch's own."""
        if self._copies.get(history):
            return self._copies[history].pop()
        pull = self._started.get(history)
        if pull is None:  # Not pulled ahead, or the model reads in another order, or twice.
            if history in self._waiting:
                self._waiting.remove(history)
            rows = self._start_one(history, False).wait()
        else:
            rows = pull.wait()
            del self._started[history]
            self._start()
        if self.readers > 1 and history not in self._copies:
            self._copies[history] = [torch.empty_like(rows) for _ in range(self.readers - 1)]
            for copy in self._copies[history]:
                copy[self._batch_size :] = rows[self._batch_size :]
        if correct is not None:
            correct(rows[self._batch_size :])
        return rows

    def cancel(self) -> None:
        """Cancel pending pulls; rows already copied for the batch's views stay."""
        self._waiting.clear()
        while self._started:
            self._started.popitem()[1].cancel()


class _Join(torch.autograd.Function):
    """Write rows in front of other rows, in place; the other rows get no gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Tensor) -> Tensor:
        ctx.size = own.size(0)
        ctx.mark_dirty(rows)
        rows[: own.size(0)] = own
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[: ctx.size], None


def join_own_and_halo(own: Tensor, rows: Tensor) -> Tensor:
    """Join the batch's own rows, with gradient, and the halo's, without.

    Args:
        own: The batch's own rows, of shape ``[batch_size, width]``.
        rows: Space for them, then the halo's rows, of shape ``[batch_size + halo, width]``; it is
            written to.
    """
    if own.dtype != rows.dtype or own.device != rows.device:
        return torch.cat([own, rows[own.size(0) :].to(own)])
    return _Join.apply(own, rows)
