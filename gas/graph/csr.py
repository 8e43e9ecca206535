"""Compressed rows: what edges become, and what they are read from."""

from __future__ import annotations

import torch
from torch import Tensor

from gas.native.graph import coo_to_csr


def row_ids(rowptr: Tensor, num_entries: int | None = None) -> Tensor:
    """The row of every entry, of shape ``[E]``; a GPU needn't be waited for if ``E`` is given."""
    rows = torch.arange(rowptr.numel() - 1, device=rowptr.device)
    return torch.repeat_interleave(rows, rowptr.diff(), output_size=num_entries)


def by_row(row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """First entry of each row, of shape ``[rows + 1]``, and the entries in the order of rows."""
    rowptr, order, _ = coo_to_csr(row, torch.arange(row.numel(), device=row.device), num_rows)
    return rowptr, order
