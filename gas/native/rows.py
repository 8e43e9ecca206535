"""Rows of tables, dense and sparse: the native functions, and their pure-torch twins."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import cumsum

from gas.native import extension as native
from gas.native.checks import check_index, check_range
from gas.native.transfer import empty


def gather_rows(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Read rows of a table: ``table[index]``.

    Args:
        table: The table, of shape ``[rows, ...]`` and any dtype.
        index: The rows to read, of shape ``[n]``, int64.
        out: The tensor to write to, contiguous, of shape ``[n, ...]``. (default: a new tensor)

    Raises:
        IndexError: If an index is outside ``[0, rows)``; nothing was written then.
    """
    check_index("index", index)
    shape = (index.numel(), *table.shape[1:])
    if out is None:
        if table.dim() == 2:
            out = empty(index.numel(), table.size(1), table)
        else:
            out = table.new_empty(shape)
    elif out.shape != shape or out.dtype != table.dtype or not out.is_contiguous():
        raise ValueError(
            f"'out' is {out.dtype} of shape {list(out.shape)}, expected a contiguous "
            f"{table.dtype} tensor of shape {list(shape)}"
        )
    table = table.detach()
    is_lazy = table.is_neg() or table.is_conj()  # A view whose memory holds other numbers.
    if not native.on_cpu(table, index, out) or not table.is_contiguous() or is_lazy:
        # Never copies a whole table.
        return _gather_rows_torch(table, index, out)
    index = index.contiguous()
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    rows = table.data_ptr(), table.size(0), row_bytes, index.data_ptr(), index.numel()
    native.C.gather_rows(*rows, out.data_ptr(), torch.get_num_threads())
    return out


def _gather_rows_torch(table: Tensor, index: Tensor, out: Tensor) -> Tensor:
    check_range("index", index, table.size(0))
    return torch.index_select(table, 0, index, out=out)


# Sparse features: matrices of torch.sparse_csr with a row for each node --------------------------


def is_sparse(x: Any) -> bool:
    """Return whether features are a ``torch.sparse_csr`` matrix."""
    return isinstance(x, Tensor) and x.layout == torch.sparse_csr


def sparse_csr(rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Tensor:
    """Return a ``torch.sparse_csr`` matrix, with ones if there are no values; duplicates add up."""
    accept_beta_state()
    if value is None:
        value = torch.ones(col.numel(), device=col.device)
    size = (rowptr.numel() - 1, num_cols)
    return torch.sparse_csr_tensor(rowptr, col, value, size=size, check_invariants=False)


@functools.cache
def accept_beta_state() -> None:
    """Create a CSR tensor once to silence PyTorch's warning of the "beta state"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, dtype=torch.long)
        torch.sparse_csr_tensor(torch.arange(2), one - 1, one.float(), check_invariants=False)


def csr_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``rowptr``, ``col`` and values of a ``torch.sparse_csr`` matrix, without a copy."""
    return x.crow_indices(), x.col_indices(), x.values()


def gather_sparse_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[index]`` in the time of the entries of these rows.

    Args:
        x: A ``torch.sparse_csr`` matrix, of shape ``[rows, F]``.
        index: The rows to read, of shape ``[n]``, int64.
    """
    check_index("index", index)
    check_range("index", index, x.size(0))
    rowptr, col, value = csr_parts(x)
    start = rowptr[index]
    count = rowptr[1:][index] - start
    out = cumsum(count)
    size = int(out[-1])
    entry = torch.arange(size, device=col.device)
    entry += torch.repeat_interleave(start - out[:-1], count, output_size=size)
    return sparse_csr(out, col.index_select(0, entry), value.index_select(0, entry), x.size(1))


def first_sparse_rows(x: Tensor, num_rows: int, pointers: Tensor | None = None) -> Tensor:
    """Return ``x[:num_rows]``, which shares the memory of ``x``.

    Args:
        x: A ``torch.sparse_csr`` matrix.
        num_rows: The number of rows.
        pointers: Its row pointers in host memory, from which reading doesn't wait for a device.
            (default: those of ``x``)
    """
    rowptr, col, value = csr_parts(x)
    num_rows = min(num_rows, x.size(0))  # As of a dense matrix.
    size = int((rowptr if pointers is None else pointers)[num_rows])
    return sparse_csr(rowptr[: num_rows + 1], col[:size], value[:size], x.size(1))
