"""The in-batch rows of a mini-batch, with gradient, in front of the halo's, without.

A tensor of both is an ordinary tensor. It also remembers the in-batch rows by themselves, so that
what knows of them hands its gradient to these alone: a sparse product then walks the edges inside
the batch backward, not those of the halo, whose gradient nobody wants. What doesn't know, or
changes the tensor in place, sees the ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_OWN = "_gas_in_batch"


def remember(rows: Tensor, own: Tensor) -> Tensor:
    """Notes that ``rows`` begins with ``own``, and that the rest of it has no gradient."""
    if own.requires_grad:
        setattr(rows, _OWN, (own, rows._version))
    return rows


def in_batch(x: Tensor) -> Tensor | None:
    """The in-batch rows of ``x``, if it is known that the others have no gradient."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    own, version = getattr(x, _OWN, (None, 0))
    return own if own is not None and version == x._version else None


def first_rows(x: Tensor, num_rows: int | None) -> Tensor:
    """``x[:num_rows]``, by way of the in-batch rows where they are known."""
    if num_rows is None or x.size(0) == num_rows:
        return x  # The gradient of a slice, even of all rows, would be copied.
    own = in_batch(x)
    return own if own is not None and own.size(0) == num_rows else x[:num_rows]


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` of a function that treats each row alike, such as a linear layer."""
    own = in_batch(x)
    if own is None:
        return function(x)
    return torch.cat([function(own), function(x.detach()[own.size(0) :])])


def is_front(whole: Tensor, part: Tensor) -> bool:
    """Whether a tensor is a view of the first rows of another, or its in-batch rows."""
    if torch.compiler.is_compiling():
        return False  # It can't look at memory.
    return in_batch(whole) is part or (
        whole.requires_grad == part.requires_grad
        and part._base is not None
        and (part._base is whole or part._base is whole._base)
        and whole.data_ptr() == part.data_ptr()
        and whole.stride() == part.stride()
        and part.size(0) <= whole.size(0)
        and part.shape[1:] == whole.shape[1:]
    )
