"""The sparse matrix of operators, its transpose, and calls of kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.index import ptr2index

from gas.native import extension as native
from gas.native.checks import assert_range, check_range
from gas.native.custom_op import custom_op

TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


@custom_op("gas::find_starts")
def find_starts(rowptr: Tensor, num_entries: int) -> Tensor:
    """Find the first rows of the chunks of a matrix for a device's kernels; see graph/starts.h.

    Args:
        rowptr: First entry of each row, of shape ``[rows + 1]``, int32.
        num_entries: The number of entries.

    Returns:
        Of shape ``[ceil((rows + num_entries) / 32) + 1]``, int32, where there are such kernels;
        empty elsewhere.
    """
    start = rowptr.new_empty(_num_starts(rowptr, num_entries))
    if start.numel() > 0:
        rows = native.C.Sparse(rowptr.numel() - 1, num_entries, rowptr.data_ptr(), 0, 0, 0)
        native.launch("cuda_find_starts", rowptr.device, rows, native.C.STEP, start)
    return start


@find_starts.register_fake
def _(rowptr: Tensor, num_entries: int) -> Tensor:
    return rowptr.new_empty(_num_starts(rowptr, num_entries))


def _num_starts(rowptr: Tensor, num_entries: int) -> int:
    if rowptr.is_cpu or not native.has_kernels(rowptr):
        return 0
    return -(-(rowptr.numel() - 1 + num_entries) // native.C.STEP) + 1


class Matrix(NamedTuple):
    """A sparse matrix in compressed rows, with its transpose.

    ``rowptr`` of shape ``[rows + 1]``, ``col`` of shape ``[entries]``; of the transpose
    ``t_rowptr`` of shape ``[cols + 1]``, ``t_col`` and ``t_entry``, the place of each entry in
    ``col``, of shape ``[entries]``. All int32. The transpose may lack the last columns: they are
    empty then, and elements that belong to no column have unspecified values.

    ``start`` and ``t_start`` are what :func:`find_starts` finds.
    """

    rowptr: Tensor
    col: Tensor
    t_rowptr: Tensor
    t_col: Tensor
    t_entry: Tensor
    start: Tensor
    t_start: Tensor

    @classmethod
    def of(
        cls, rowptr: Tensor, col: Tensor, t_rowptr: Tensor, t_col: Tensor, t_entry: Tensor
    ) -> Matrix:
        """Make a matrix from its rows and those of its transpose."""
        starts = [col.new_empty(0)] * 2
        if not col.is_cpu:
            starts = [find_starts(rowptr, col.numel()), find_starts(t_rowptr, t_col.numel())]
        return cls(rowptr, col, t_rowptr, t_col, t_entry, *starts)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.rowptr.numel() - 1

    @property
    def num_cols(self) -> int:
        """The number of columns."""
        return self.t_rowptr.numel() - 1

    @property
    def back(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transpose: ``t_rowptr``, ``t_col`` and ``t_entry``."""
        return self.t_rowptr, self.t_col, self.t_entry

    @property
    def row(self) -> Tensor:
        """The row of every entry, of shape ``[entries]``, int64."""
        return ptr2index(self.rowptr.long(), self.col.numel())


NONE = [None] * len(Matrix._fields)  # The gradients of an operator towards its matrix.


def empty_like(*tensors: Tensor) -> tuple[Any, ...]:
    """Return new tensors of the shapes and types of others, contiguous and uninitialised."""
    return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in tensors)


def divide_by_degree(m: Matrix, grad: Tensor) -> Tensor:
    """Return the gradient towards the sums of each row of ``m`` whose means have ``grad``."""
    degree = m.rowptr.diff().clamp(min=1).to(grad.dtype)
    return grad / degree.view(-1, *[1] * (grad.dim() - 1))


def run_typed(name: str, x: Tensor, *arguments: object) -> None:
    """Call a kernel for the type of ``x`` on its device."""
    native.run(f"{name}_{TYPES[x.dtype]}", x.device, *arguments)


def native_matrix(m: Matrix) -> object:
    """Return a matrix in the form of the kernels."""
    rowptr, col = m.rowptr.data_ptr(), m.col.data_ptr()
    return native.C.Sparse(m.num_rows, m.col.numel(), rowptr, col, 0, m.start.data_ptr())


def native_transpose(m: Matrix, num_cols: int | None = None) -> object:
    """Return the transpose, or its first rows, in the form of the kernels."""
    rows = m.num_cols if num_cols is None else num_cols
    tensors = m.t_rowptr, m.t_col, m.t_entry, m.t_start
    return native.C.Sparse(rows, m.t_col.numel(), *map(Tensor.data_ptr, tensors))


def native_sparse(
    num_rows: int,
    rowptr: Tensor,
    col: Tensor,
    entry: Tensor | None = None,
    start: Tensor | None = None,
) -> object:
    """Return compressed rows in the form of the kernels."""
    addresses = native.to_addresses((rowptr, col, entry, start))
    return native.C.Sparse(num_rows, col.numel(), *addresses)


@custom_op("gas::transpose")
def transpose(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the transpose of a matrix in compressed rows: ``t_rowptr``, ``t_col`` and ``t_entry``.

    Columns from ``kept`` on are left out, as if they were empty; what would be their entries has
    unspecified values.

    Raises:
        IndexError: If a column is outside ``[0, num_cols)``. (On a device that is an assertion of
            its own, which CUDA reports when the host waits.)
    """
    if not native.on_cpu(rowptr, col):  # On CUDA, too: a stable sort.
        return _transpose_torch(rowptr, col, num_cols, kept)
    out = rowptr.new_empty(num_cols + 1), torch.empty_like(col), torch.empty_like(col)
    matrix = native_sparse(rowptr.numel() - 1, rowptr, col)
    native.run("transpose", col.device, matrix, num_cols, kept, *out)
    return out


@transpose.register_fake
def _(rowptr: Tensor, col: Tensor, num_cols: int, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), torch.empty_like(col), torch.empty_like(col)


def _transpose_torch(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    if col.is_cpu:
        check_range("col", col, num_cols)
    else:  # The device checks it: the host would have to wait.
        assert_range("col", col, num_cols, "column")
    ordered, entry = torch.sort(col, stable=True)
    row = ptr2index(rowptr, col.numel())
    first = torch.arange(num_cols + 1, dtype=torch.int32, device=col.device).clamp_(max=kept)
    t_rowptr = torch.searchsorted(ordered, first, out_int32=True)
    return t_rowptr.to(rowptr.dtype), row[entry].to(torch.int32), entry.to(torch.int32)


def sum_type(x: Tensor) -> torch.dtype:
    """Return the type of sums."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
