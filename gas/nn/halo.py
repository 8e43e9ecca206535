"""The rows of a mini-batch: its own, with gradient, in front of the halo's, without.

:class:`BatchRows` is a tensor of both that isn't put together until somebody needs it whole. What
knows of it reads either part where it lies: a sparse product takes the halo's rows from the stored
history itself and walks only the edges inside the batch backward, :func:`gas.nn.dropout` draws
numbers for the batch's own rows alone. To everything else it is an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Halo:
    """The rows of a halo, which several tensors may share.

    Args:
        num_rows: How many there are.
        pull: Yields them behind space for the batch's own rows, ``[batch_size + num_rows, width]``,
            in a tensor that is the caller's.
    """

    def __init__(self, num_rows: int, pull: Callable[[], Tensor]) -> None:
        self.num_rows = num_rows
        self.stored: tuple[Tensor, Tensor] | None = None
        """A table and the rows of it, of shape ``[num_rows]``, to read instead, for now."""
        self._pull = pull
        self._pulled: Tensor | None = None
        self._users = 0
        self._was_read = False
        self._is_given = False  # To a user, who may change it.

    def for_one_more(self) -> Halo:
        """This halo for one more tensor, or a copy, if what it pulled is somebody's already."""
        halo = self
        if self._is_given:
            halo = Halo(self.num_rows, self._pull)
            halo._pulled = None if self._pulled is None else self._pulled.clone()
        halo._users += 1
        return halo

    def settle(self) -> None:
        """Reads the rows now: where they are stored they are about to change."""
        if self._pulled is None:
            self._pulled = self._pull()
        self.stored = None

    def where(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        """A table of a batch's own type, and the rows of it; without these, they are all of it."""
        return self.stored or (self.rows().to(own), None)

    def rows(self) -> Tensor:
        """The rows, of shape ``[num_rows, width]``; not to be written to."""
        self.settle()
        assert self._pulled is not None
        self._was_read = True
        return self._pulled[self._pulled.size(0) - self.num_rows :]

    def behind(self, own: Tensor) -> Tensor:
        """A batch's own rows, with gradient, and these, in a tensor that is the caller's."""
        if self._users > 1 or self._was_read or self._is_given:
            return torch.cat([own, self.rows().to(own)])
        self.settle()
        assert self._pulled is not None
        whole = join(own, self._pulled)
        self._pulled, self._is_given = whole.detach(), True
        return whole


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

    Make one with :meth:`of`; ``parts_of(x)`` yields both. Once it is changed in place it is an
    ordinary tensor. Ask for its gradient, by ``retain_grad()`` or a hook, before it is used.
    """

    own: Tensor
    halo: Halo
    _whole: Tensor | None
    _versions: tuple[int, int]  # Of `own`, and of `_whole`.
    _front_is_out: bool
    _made_by: Any

    @staticmethod
    def of(own: Tensor, halo: Halo) -> Tensor:
        """The batch's own rows, of shape ``[batch_size, width]``, in front of its halo's."""
        halo = halo.for_one_more()
        if torch.compiler.is_compiling() or own.is_inference() or torch.is_inference_mode_enabled():
            return halo.behind(own)  # Nobody counts changes of tensors in inference mode.
        if not torch.is_grad_enabled():
            own = own.detach()
        x = _Shaped.apply(own, own.size(0) + halo.num_rows)
        x.own, x.halo, x._whole, x._front_is_out = own, halo, None, False
        x._versions = own._version, 0
        with torch._C.DisableTorchFunctionSubclass():
            x._made_by = x.grad_fn
        return x

    @torch.compiler.disable
    def whole(self) -> Tensor:
        """Both as one ordinary tensor, with gradient towards the first."""
        self.check()
        if self._whole is None:
            # Whoever asks may not want a gradient, but others may.
            with torch.inference_mode(False), torch.enable_grad():
                self._whole = self.halo.behind(self.own)
            self._versions = self._versions[0], self._whole._version
        return self._whole

    @property
    def is_apart(self) -> bool:
        """Whether it still is its parts, and nobody wants a gradient of its own."""
        whole = self._whole
        return whole is None or (
            (self.own._version, whole._version) == self._versions
            and whole.requires_grad == self.own.requires_grad
            and not whole.retains_grad
            and not whole._backward_hooks
        )

    def check(self) -> None:
        """Raises ``RuntimeError`` if its parts, or it and its first rows, have become different."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not self._made_by:
                raise RuntimeError(
                    "what push_and_pull returned was changed by an autograd function that works in "
                    "place: give it a clone()"
                )
        changed = self.own._version != self._versions[0]
        if self._whole is not None:
            changed = self._front_is_out and (changed or self._whole._version != self._versions[1])
        if changed:
            raise RuntimeError(
                "the tensor given to push_and_pull, what it returned, or the first rows of that "
                "were changed in place, but the others share their memory or don't: change a "
                "clone() instead"
            )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            x = args[0] if args else None
            if not isinstance(x, cls):
                return func(*_plain(args), **_plain(kwargs or {}))
            if x._whole is None and func in _METADATA:
                return func(*args, **(kwargs or {}))
            if func is Tensor.__getitem__ and _is_front(x, args[1]):
                x._front_is_out = True
                return x.own
            out = func(*_plain(args), **_plain(kwargs or {}))
            x.check()
            return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None):  # type: ignore
        # (PyTorch's stub forgets `func`.) What comes here has passed autograd, by a way that Python
        # doesn't see.
        return func(*_plain(args, detached=True), **_plain(kwargs or {}, detached=True))


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


def _is_front(x: BatchRows, index: Any) -> bool:
    """Whether ``x[index]`` are the batch's own rows."""
    return (
        x.is_apart
        and isinstance(index, slice)
        and index.start in (None, 0)
        and index.step in (None, 1)
        and index.stop == x.own.size(0)
    )


def parts_of(x: Tensor) -> BatchRows | None:
    """``x``, if it is a batch's rows that nobody has changed."""
    if torch.compiler.is_compiling() or not isinstance(x, BatchRows) or not x.is_apart:
        return None
    x.check()
    return x


def first_rows(x: Tensor, num_rows: int | None) -> Tensor:
    """``x[:num_rows]``, which are ``x`` itself where it has no more."""
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
