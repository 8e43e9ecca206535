"""Compressed rows: what edges become, and what they are read from."""

from __future__ import annotations

import functools
import warnings

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


def sparse_csr(rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int) -> Tensor:
    """A ``torch.sparse_csr`` matrix, of ones where there are no values; duplicates add up."""
    _accept_beta_state()
    if value is None:
        value = torch.ones(col.numel(), device=col.device)
    size = (rowptr.numel() - 1, num_cols)
    return torch.sparse_csr_tensor(rowptr, col, value, size=size, check_invariants=False)


@functools.cache
def _accept_beta_state() -> None:
    """Creates one CSR tensor, so that PyTorch says "beta state" here, once, unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, dtype=torch.long)
        torch.sparse_csr_tensor(torch.arange(2), one - 1, one.float(), check_invariants=False)
