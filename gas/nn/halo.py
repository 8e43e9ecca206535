"""The rows of a mini-batch: its own, with gradient, in front of the halo's, without.

:class:`BatchRows` is a tensor of both that isn't put together until somebody needs it whole. What
knows of it reads either part where it lies: a sparse product takes the halo's rows from the stored
history itself and walks only the edges inside the batch backward, :func:`gas.nn.dropout` draws
numbers for the batch's own rows alone. To everything else it is an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class _Join(torch.autograd.Function):
    """Writes rows in front of others, in place; the others get no gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Tensor) -> Tensor:
        ctx.size = own.size(0)
        ctx.mark_dirty(rows)
        rows[: own.size(0)] = own
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[: ctx.size], None


def join(own: Tensor, rows: Tensor) -> Tensor:
    """The batch's own rows, with gradient, then the halo's, without.

    Args:
        own: The batch's own rows, of shape ``[batch_size, width]``.
        rows: The halo's rows behind space for them, of shape ``[batch_size + halo, width]``; it is
            written to.
    """
    if own.dtype != rows.dtype or own.device != rows.device:
        return torch.cat([own, rows[own.size(0) :].to(own)])
    return _Join.apply(own, rows)


class Stored(NamedTuple):
    """Rows of a table: ``table[place]``, of shape ``[n]``, int64; without places, all of it."""

    table: Tensor
    place: Tensor | None


class Halo:
    """The rows of a halo, which several tensors may share.

    Args:
        num_rows: How many there are.
        pull: Yields them behind space for the batch's own rows, ``[batch_size + num_rows, width]``.
        stored: Where they can be read instead, for now.
    """

    def __init__(
        self, num_rows: int, pull: Callable[[], Tensor], stored: Stored | None = None
    ) -> None:
        self.num_rows = num_rows
        self.stored = stored
        self._pull = pull
        self._pulled: Tensor | None = None
        self._taken = False

    def settle(self) -> None:
        """Reads the rows now: where they are stored they may be about to change."""
        if self._pulled is None:
            self._pulled = self._pull()
        self.stored = None

    def where(self, own: Tensor) -> Stored:
        """Where to read the rows, as those of a batch's own type."""
        return self.stored or Stored(self.rows().to(own), None)

    def rows(self) -> Tensor:
        """The rows, of shape ``[num_rows, width]``; not to be written to."""
        self.settle()
        assert self._pulled is not None
        return self._pulled[self._pulled.size(0) - self.num_rows :]

    def behind_space(self) -> Tensor:
        """The rows behind space for the batch's own; the caller's to write to."""
        rows = self.rows()
        assert self._pulled is not None
        if not self._taken:
            self._taken = True
            return self._pulled
        copy = torch.empty_like(self._pulled)
        copy[copy.size(0) - self.num_rows :] = rows
        return copy


class _Shaped(torch.autograd.Function):
    """A tensor with a shape and no values, whose gradient is that of its first rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, num_rows: int) -> Tensor:
        ctx.size = own.size(0)
        return BatchRows._make_wrapper_subclass(
            BatchRows, (num_rows, *own.shape[1:]), dtype=own.dtype, device=own.device
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[: ctx.size], None


class BatchRows(Tensor):
    """A batch's own rows and its halo's, of shape ``[batch_size + halo, width]``.

    Make one with :meth:`of`. As long as nobody has asked for it whole, ``parts_of(x)`` yields them;
    after that it is what it was put together to, in-place changes included.
    """

    own: Tensor
    halo: Halo
    _whole: Tensor | None
    _own_version: int

    @staticmethod
    def of(own: Tensor, halo: Halo) -> Tensor:
        """The batch's own rows, of shape ``[batch_size, width]``, in front of its halo's."""
        if halo.num_rows == 0:
            return own
        if torch.compiler.is_compiling():
            return join(own, halo.behind_space())
        x = _Shaped.apply(own, own.size(0) + halo.num_rows)
        x.own, x.halo, x._whole, x._own_version = own, halo, None, _version(own)
        return x

    @torch.compiler.disable
    def whole(self) -> Tensor:
        """Both as one ordinary tensor, with gradient towards the first."""
        if self._whole is None:
            self.check()
            with torch.enable_grad():  # Whoever asks may not want it, but others may.
                self._whole = join(self.own, self.halo.behind_space())
        return self._whole

    def values(self) -> Tensor:
        """Both, without gradient."""
        return join(self.own.detach(), self.halo.behind_space())

    def check(self) -> None:
        """Raises ``RuntimeError`` if the batch's own rows were changed since."""
        if _version(self.own) != self._own_version:
            raise RuntimeError(
                "the tensor given to push_and_pull, or the first rows of what it returned, were "
                "changed in place, and so would be what it returned: change a clone() instead"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **(kwargs or {}))
            if func is Tensor.__getitem__ and _is_front(*args):
                return args[0].own
            return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None):  # type: ignore
        # What comes here has passed autograd, by a way that Python doesn't see.
        return func(*_plain(args, detached=True), **_plain(kwargs or {}, detached=True))


def _version(x: Tensor) -> int:
    """How often a tensor was changed in place, where that is counted."""
    return 0 if x.is_inference() else x._version


_METADATA = {
    Tensor.__len__,
    Tensor.dim,
    Tensor.is_floating_point,
    Tensor.numel,
    Tensor.size,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "device",
            "dtype",
            "is_cpu",
            "is_cuda",
            "is_leaf",
            "is_sparse",
            "is_sparse_csr",
            "layout",
            "ndim",
            "requires_grad",
            "shape",
        )
    ),
}


def _plain(values: Any, detached: bool = False) -> Any:
    def plain(value: Any) -> Any:
        if not isinstance(value, BatchRows):
            return value
        whole = value.whole()
        return whole.detach() if detached else whole

    return tree_map(plain, values)


def _is_front(x: Any, index: Any) -> bool:
    """Whether ``x[index]`` are the batch's own rows."""
    return (
        isinstance(x, BatchRows)
        and x._whole is None
        and isinstance(index, slice)
        and index.start in (None, 0)
        and index.step in (None, 1)
        and index.stop == x.own.size(0)
    )


def parts_of(x: Tensor) -> BatchRows | None:
    """``x``, if it is a batch's rows that nobody has asked for whole."""
    if torch.compiler.is_compiling() or not isinstance(x, BatchRows) or x._whole is not None:
        return None
    x.check()
    return x


def first_rows(x: Tensor, num_rows: int | None) -> Tensor:
    """``x[:num_rows]``, by way of the batch's own rows where they are known."""
    if num_rows is None or x.size(0) == num_rows:
        return x  # The gradient of a slice, even of all rows, would be copied.
    return x[:num_rows]


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` of a function that treats each row alike, such as a linear layer."""
    parts = parts_of(x)
    if parts is None:
        return function(x)
    return torch.cat([function(parts.own), function(parts.halo.rows().to(parts.own))])


def is_front(whole: Tensor, part: Tensor) -> bool:
    """Whether a tensor is a view of the first rows of another, or the batch's own rows of it."""
    if torch.compiler.is_compiling():
        return False  # It can't look at memory.
    parts = parts_of(whole)
    if parts is not None:
        return part is parts.own
    return (
        whole.requires_grad == part.requires_grad
        and part._base is not None
        and (part._base is whole or part._base is whole._base)
        and whole.data_ptr() == part.data_ptr()
        and whole.stride() == part.stride()
        and part.size(0) <= whole.size(0)
        and part.shape[1:] == whole.shape[1:]
    )
