"""Sparse features, matrices of ``torch.sparse_csr`` with a row for each node: some of their rows.

PyTorch can neither slice nor index such a matrix. Those that are made here share the types of
their indices, int32 or int64, with what they are made of.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from gas.native.checks import check_index, check_range


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
    """Create one CSR tensor, so that PyTorch says "beta state" here, once, unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, dtype=torch.long)
        torch.sparse_csr_tensor(torch.arange(2), one - 1, one.float(), check_invariants=False)


def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``rowptr``, ``col`` and values of a matrix, without a copy."""
    return x.crow_indices(), x.col_indices(), x.values()


def gather_sparse_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``, which takes the time of the entries of these rows.

    Args:
        x: A ``torch.sparse_csr`` matrix, of shape ``[rows, F]``.
        index: The rows to read, of shape ``[n]``, int64.

    Raises:
        IndexError: If an index is outside ``[0, rows)``.
    """
    check_index("index", index)
    check_range("index", index, x.size(0))
    rowptr, col, value = parts(x)
    start = rowptr[index]
    count = rowptr[1:][index] - start
    out = rowptr.new_zeros(index.numel() + 1)
    torch.cumsum(count, 0, out=out[1:])
    size = int(out[-1])
    entry = torch.arange(size, device=col.device)
    entry += torch.repeat_interleave(start - out[:-1], count, output_size=size)
    return sparse_csr(out, col.index_select(0, entry), value.index_select(0, entry), x.size(1))


def first_sparse_rows(x: Tensor, num_rows: int) -> Tensor:
    """``x[:num_rows]``, which shares the memory of ``x``."""
    rowptr, col, value = parts(x)
    rowptr = rowptr[: num_rows + 1]
    size = int(rowptr[-1])
    return sparse_csr(rowptr, col[:size], value[:size], x.size(1))
