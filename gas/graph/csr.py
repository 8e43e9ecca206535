"""Compressed rows: what edges become, and what they are read from."""

from __future__ import annotations

import torch
from torch import Tensor

from gas.native import assert_range, check_index, coo_to_csr


def row_ids(rowptr: Tensor, num_entries: int | None = None) -> Tensor:
    """Return the row of every entry, of shape ``[E]``; no synchronisation if ``E`` is given."""
    rows = torch.arange(rowptr.numel() - 1, device=rowptr.device)
    return torch.repeat_interleave(rows, rowptr.diff(), output_size=num_entries)


def sort_by_row(row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """First entry of each row, of shape ``[rows + 1]``, and the entries in the order of rows.

    Raises:
        IndexError: If a row is outside ``[0, num_rows)``. (On a device that is an assertion of its
            own, which CUDA reports when the host waits.)
    """
    if not row.is_cpu:
        check_index("row", row)
        assert_range("row", row, num_rows, "row")
        ordered, order = torch.sort(row, stable=True)
        return torch.searchsorted(ordered, torch.arange(num_rows + 1, device=row.device)), order
    rowptr, order, _ = coo_to_csr(row, torch.arange(row.numel(), device=row.device), num_rows)
    return rowptr, order
