"""The matrix that operators take, its transpose, and the way that kernels are called."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gas import native
from gas.native.checks import check_range

TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class Matrix(NamedTuple):
    """A sparse matrix in compressed rows, with its transpose.

    ``rowptr`` of shape ``[rows + 1]``, ``col`` of shape ``[entries]``; of the transpose
    ``t_rowptr`` of shape ``[cols + 1]``, ``t_col`` and ``t_entry``, the place of each entry in
    ``col``, of shape ``[entries]``. All int32. The transpose may lack the last columns: they are
    empty then, and elements that belong to no column have unspecified values.
    """

    rowptr: Tensor
    col: Tensor
    t_rowptr: Tensor
    t_col: Tensor
    t_entry: Tensor

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.rowptr.numel() - 1

    @property
    def num_cols(self) -> int:
        """The number of columns."""
        return self.t_rowptr.numel() - 1

    @property
    def row(self) -> Tensor:
        """The row of every entry, of shape ``[entries]``, int64."""
        rows = torch.arange(self.num_rows, device=self.rowptr.device)
        return torch.repeat_interleave(rows, self.rowptr.diff(), output_size=self.col.numel())


def run(name: str, x: Tensor, *arguments: object) -> None:
    """Calls a kernel for the type of ``x`` where that is."""
    native.run(f"{name}_{TYPES[x.dtype]}", x.device, *arguments)


def address(tensor: Tensor | None) -> int:
    """Where a tensor's elements lie; 0 for none."""
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def forward_of(m: Matrix) -> object:
    """The matrix as kernels take it."""
    return native.C.Sparse(m.num_rows, m.col.numel(), m.rowptr.data_ptr(), m.col.data_ptr(), 0)


def transpose_of(m: Matrix, num_cols: int | None = None) -> object:
    """The transpose as kernels take it, or its first rows."""
    rows = m.num_cols if num_cols is None else num_cols
    address = m.t_rowptr.data_ptr(), m.t_col.data_ptr(), m.t_entry.data_ptr()
    return native.C.Sparse(rows, m.col.numel(), *address)


def transpose(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The transpose of a matrix in compressed rows: ``t_rowptr``, ``t_col`` and ``t_entry``.

    Columns from ``kept`` on are left out, as if they were empty; what would be their entries has
    unspecified values.

    Raises:
        IndexError: If a column is outside ``[0, num_cols)``. (On a device that is an assertion of
            its own, which CUDA reports when the host waits.)
    """
    if not native.on_cpu(rowptr, col):  # On CUDA, too: a stable sort.
        return _transpose_torch(rowptr, col, num_cols, kept)
    t_rowptr, t_col, t_entry = (
        rowptr.new_empty(num_cols + 1),
        torch.empty_like(col),
        torch.empty_like(col),
    )
    matrix = native.C.Sparse(rowptr.numel() - 1, col.numel(), rowptr.data_ptr(), col.data_ptr(), 0)
    native.C.transpose(
        matrix,
        num_cols,
        kept,
        t_rowptr.data_ptr(),
        t_col.data_ptr(),
        t_entry.data_ptr(),
        torch.get_num_threads(),
    )
    return t_rowptr, t_col, t_entry


def _transpose_torch(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    if col.is_cpu:
        check_range("col", col, num_cols)
    else:  # Looking would make the host wait for a device, which looks itself.
        inside = ((col >= 0) & (col < num_cols)).all()
        torch._assert_async(inside, f"'col' has a column outside [0, {num_cols})")
    ordered, entry = torch.sort(col, stable=True)
    rows = torch.arange(rowptr.numel() - 1, dtype=torch.int32, device=col.device)
    row = torch.repeat_interleave(rows, rowptr.diff(), output_size=col.numel())
    first = torch.arange(num_cols + 1, dtype=torch.int32, device=col.device).clamp_(max=kept)
    t_rowptr = torch.searchsorted(ordered, first, out_int32=True)
    return t_rowptr.to(rowptr.dtype), row[entry], entry.to(torch.int32)


def sum_type(x: Tensor) -> torch.dtype:
    """The type that elements are added up in."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
