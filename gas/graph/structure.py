"""Compressed rows with the transpose that gradients walk, checked once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gas.native import MOST_INT32, Matrix, custom_op, is_transformed, transpose


@custom_op("gas::transpose")
def _transpose(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    return transpose(rowptr, col, num_cols, kept)


@_transpose.register_fake
def _(rowptr: Tensor, col: Tensor, num_cols: int, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), torch.empty_like(col), torch.empty_like(col)


def make_usable_in_training(value: Tensor | None = None) -> contextlib.AbstractContextManager[None]:
    """Make tensors in this context that training can use, also in inference mode.

    The same holds inside a transform such as :func:`torch.func.grad`, which ends before the tensors
    do, unless they are made of a value that the transform holds.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return _outside_inference()
    within = torch._C._functorch.peek_interpreter_stack() is not None
    if within and (value is None or not is_transformed(value)):
        return torch._C._DisableFuncTorch()
    return contextlib.nullcontext()


def _of_real_numbers() -> contextlib.AbstractContextManager[object]:
    """Compute without the fake tensors of ``torch.export``, which must not stay in a cache."""
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext()
    return _disable_current_modes()


@contextlib.contextmanager
def _outside_inference() -> Iterator[None]:
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def to_trainable(tensor: Tensor) -> Tensor:
    """Return a tensor that training can use and that counts its changes in place."""
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with make_usable_in_training():
        return tensor.clone()


class Uses(NamedTuple):
    """Structures that layers have requested of an adjacency.

    * ``transpose``: the transpose, at least of the columns that are rows, too.
    * ``is_whole``: of all columns.
    * ``with_self_loops``: what they have asked the one with self-loops for; ``None`` if they
      haven't asked for it.
    * ``kept``: the keys of others that were made of it, by what, and what was asked of those.
    """

    transpose: bool = False
    is_whole: bool = False
    with_self_loops: Uses | None = None
    kept: tuple[tuple[Any, Callable[[Any], Any], Uses], ...] = ()


class Structure:
    """Rows and columns, and as many columns of the transpose as gradients have needed so far."""

    def __init__(self, rowptr: Tensor, col: Tensor, num_cols: int) -> None:
        self.rowptr = to_trainable(rowptr.to(torch.int32).contiguous())
        self.col = to_trainable(col.to(torch.int32).contiguous())
        self.num_cols = num_cols
        # With the number of columns; one value, which threads replace by a larger one.
        self.known: tuple[Matrix, int] | None = None
        self.with_self_loops: Any = None  # An Adjacency, which holds another structure.
        self._versions = None if torch.compiler.is_compiling() else self._count()

    def _count(self) -> tuple[int, int]:
        return self.rowptr._version, self.col._version

    def check(self) -> None:
        """Raise ``RuntimeError`` if rows or columns have become others since they were checked."""
        if torch.compiler.is_compiling() or self._versions is None:
            return
        if self._count() != self._versions:
            raise RuntimeError(
                "'rowptr' or 'col' of an Adjacency was changed in place, which its transpose "
                "doesn't follow: make a new one, Adjacency(rowptr, col, value, num_cols), of clones"
            )

    def get(self, kept: int) -> Matrix:
        """Return the matrix with its transpose, which may leave out columns from ``kept`` on."""
        self.check()
        known = self.known
        if known is None or known[1] < kept:
            with make_usable_in_training(), _of_real_numbers():
                if kept == 0:  # It will not be read.
                    none = self.col.new_empty(0)
                    back = self.rowptr.new_zeros(self.num_cols + 1), none, none
                else:
                    back = _transpose(self.rowptr, self.col, self.num_cols, kept)
                known = Matrix.of(self.rowptr, self.col, *back), kept
            if self.known is None or self.known[1] < kept:
                self.known = known
        return known[0]

    def apply(self, function: Callable[[Tensor], Tensor]) -> Structure:
        """Apply a function to all tensors; return itself if they stay the same."""
        self.check()
        known = self.known
        rowptr, col = function(self.rowptr), function(self.col)
        back = None if known is None else [function(part) for part in known[0].back]
        if rowptr is self.rowptr and col is self.col:
            return self
        twin = Structure(rowptr, col, self.num_cols)
        if known is not None and back is not None:
            twin.known = Matrix.of(twin.rowptr, twin.col, *map(to_trainable, back)), known[1]
        if self.with_self_loops is not None:
            twin.with_self_loops = self.with_self_loops.apply(function)
        return twin

    def tensors(self) -> list[Tensor]:
        """Return every tensor, those of the transpose included."""
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
        Structure.__init__(self, rowptr, col, num_cols)
        if known is not None:
            with make_usable_in_training():
                back = map(to_trainable, known[0].back)
                self.known = Matrix.of(self.rowptr, self.col, *back), known[1]


def check_rows(rowptr: Tensor, col: Tensor, num_cols: int) -> None:
    """Raise ``ValueError`` or ``IndexError`` if kernels would read out of bounds."""
    for name, ids in (("rowptr", rowptr), ("col", col)):
        if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"'{name}' is {ids.dtype} of shape {list(ids.shape)}, expected a one-dimensional "
                "tensor of int32 or int64"
            )
    if col.numel() > MOST_INT32 or rowptr.numel() > MOST_INT32:
        raise too_many_entries(col)
    if rowptr.device != col.device:
        raise ValueError(f"'rowptr' is on {rowptr.device}, but 'col' is on {col.device}")
    if rowptr.numel() == 0 or not 0 <= num_cols <= MOST_INT32:
        raise ValueError(
            f"'rowptr' has shape {list(rowptr.shape)} and 'num_cols' is {num_cols}, expected "
            "[rows + 1] and a number of columns below 2^31"
        )
    if torch.compiler.is_compiling() or col.is_meta:
        return  # There are no values to check.
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


def too_many_entries(col: Tensor) -> ValueError:
    """Make the error for more entries than an int32 counts."""
    return ValueError(
        f"'col' has {col.numel():,} entries, expected fewer than 2^31: cut the graph into "
        "mini-batches"
    )
