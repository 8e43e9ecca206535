"""Rows of tables: the native functions, and their pure-torch twins."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gas.native import buffers
from gas.native import extension as native
from gas.native.checks import check_index, check_range


def gather_rows(table: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Read rows of a table: ``table[index]``.

    Args:
        table: The table, of shape ``[rows, ...]`` and any dtype.
        index: The rows to read, of shape ``[n]``, int64.
        out: Where to write, contiguous, of shape ``[n, ...]``. (default: a new tensor)

    Raises:
        IndexError: If an index is outside ``[0, rows)``; nothing was written then.
    """
    check_index("index", index)
    shape = (index.numel(), *table.shape[1:])
    if out is None:
        if table.dim() == 2:
            out = buffers.empty(index.numel(), table.size(1), table)
        else:
            out = table.new_empty(shape)
    elif out.shape != shape or out.dtype != table.dtype or not out.is_contiguous():
        raise ValueError(
            f"'out' is {out.dtype} of shape {list(out.shape)}, expected a contiguous "
            f"{table.dtype} tensor of shape {list(shape)}"
        )
    table = table.detach()
    if (
        not native.on_cpu(table, index, out) or not table.is_contiguous() or table.is_neg()
    ):  # Never copies a whole table.
        return _gather_rows_torch(table, index, out)
    index = index.contiguous()
    native.C.gather_rows(
        table.data_ptr(),
        table.size(0),
        math.prod(table.shape[1:]) * table.element_size(),
        index.data_ptr(),
        index.numel(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _gather_rows_torch(table: Tensor, index: Tensor, out: Tensor) -> Tensor:
    check_range("index", index, table.size(0))
    return torch.index_select(table, 0, index, out=out)
