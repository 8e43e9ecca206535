"""Compressed rows with the transpose that backward passes use, checked once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gas.native import MOST_INT32, Matrix, is_transformed, transpose


def make_usable_in_training(value: Tensor | None = None) -> contextlib.AbstractContextManager[None]:
    """Make ordinary tensors in this context, also in inference mode.

    The same holds inside a transform such as :func:`torch.func.grad`, unless the tensors are made
    of a value that it transforms: cached tensors outlive the transform.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return _disable_inference_mode()
    within = torch._C._functorch.peek_interpreter_stack() is not None
    if within and (value is None or not is_transformed(value)):
        return torch._C._DisableFuncTorch()
    return contextlib.nullcontext()


def _disable_fake_tensors() -> contextlib.AbstractContextManager[object]:
    """Compute without the fake tensors of ``torch.export``, which must not get into a cache."""
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext()
    return _disable_current_modes()


@contextlib.contextmanager
def _disable_inference_mode() -> Iterator[None]:
    """Leave inference mode in this context, without enabling gradients."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def to_trainable(tensor: Tensor) -> Tensor:
    """Return a tensor that isn't an inference tensor, so that it has a version counter."""
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with make_usable_in_training():
        return tensor.clone()


class Uses(NamedTuple):
    """Structures that layers have requested of an adjacency.

    * ``transpose``: whether the transpose was requested, at least of the columns that are rows.
    * ``is_whole``: whether it was requested for all columns.
    * ``with_self_loops``: the structures requested of the adjacency with self-loops; ``None`` if
      that wasn't requested.
    * ``kept``: for each cached adjacency, its key, the function that makes it, and the structures
      requested of it.
    """

    transpose: bool = False
    is_whole: bool = False
    with_self_loops: Uses | None = None
    kept: tuple[tuple[Any, Callable[[Any], Any], Uses], ...] = ()


class Structure:
    """Rows and columns, and the columns of the transpose that gradients have needed so far."""

    def __init__(self, rowptr: Tensor, col: Tensor, num_cols: int) -> None:
        self.rowptr = to_trainable(rowptr.to(torch.int32).contiguous())
        self.col = to_trainable(col.to(torch.int32).contiguous())
        self.num_cols = num_cols
        # The matrix and its number of transposed columns: one value, which threads can replace.
        self.known: tuple[Matrix, int] | None = None
        self.with_self_loops: Any = None  # An Adjacency, which holds another structure.
        self._versions = None if torch.compiler.is_compiling() else self._read_versions()

    def _read_versions(self) -> tuple[int, int]:
        """Read PyTorch's counters of changes in place."""
        return self.rowptr._version, self.col._version

    def check(self) -> None:
        """Raise ``RuntimeError`` if rows or columns were changed in place."""
        if torch.compiler.is_compiling() or self._versions is None:
            return
        if self._read_versions() != self._versions:
            raise RuntimeError(
                "'rowptr' or 'col' of an Adjacency was changed in place, which its transpose "
                "doesn't follow: make a new one, Adjacency(rowptr, col, value, num_cols), of clones"
            )

    def get(self, kept: int) -> Matrix:
        """Return the matrix with the transpose of at least the first ``kept`` columns."""
        self.check()
        known = self.known
        if known is None or known[1] < kept:
            with make_usable_in_training(), _disable_fake_tensors():
                if kept == 0:  # The transpose isn't used.
                    none = self.col.new_empty(0)
                    back = self.rowptr.new_zeros(self.num_cols + 1), none, none
                else:
                    back = transpose(self.rowptr, self.col, self.num_cols, kept)
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
    check_entry_count(rowptr, col)
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


def check_entry_count(rowptr: Tensor, col: Tensor) -> None:
    """Refuse 2^31 rows or entries, or more."""
    if max(rowptr.numel(), col.numel()) > MOST_INT32:
        raise ValueError(
            f"'col' has {col.numel():,} entries, expected fewer than 2^31: cut the graph into "
            "mini-batches"
        )
