"""Keeping features sparse that are mostly zeros, such as words of texts."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.features import is_matrix, to_csr_features
from gas.graph.folder.opening import MAPPED
from gas.native import sparse_csr

RARE = 30  # Sparse features pay where fewer than one in so many isn't zero.
BLOCK = 2**20  # Values that are looked at together.


def with_sparse_features(data: Data, wanted: bool | str, pays: bool, log: bool) -> Data:
    """Keep the features of a graph sparse, if that is wanted and they are mostly zeros.

    Args:
        data: The graph; it is not modified.
        wanted: ``True``: whatever they are; ``"auto"``: ordinary ones where fewer than one in
            thirty isn't zero, if it ``pays``; ``False``: never. Sparse ones stay so.
        pays: Whether the model multiplies their non-zeros alone.
        log: Report on standard error that they were made sparse.

    Raises:
        ValueError: If ``wanted`` is none of these, or they can't be made sparse.
    """
    if wanted not in (True, False, "auto"):
        raise ValueError(f"'sparse_features' is {wanted!r}, expected True, False or 'auto'")
    x = data.get("x")
    if wanted is False or (wanted == "auto" and not pays) or is_matrix(x):
        return data
    if wanted == "auto" and hasattr(x, MAPPED):
        return data
    if not _is_ordinary(x):
        if wanted is True:
            found = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(
                f"'sparse_features' is True, but 'x' is {found}: expected a matrix of "
                "float32 or float64 without gradient; leave 'sparse_features' out"
            )
        return data
    made = _find_non_zeros(x, x.numel() if wanted is True else (x.numel() - 1) // RARE)
    if made is None:
        return data
    if log:
        share = made.values().numel() / max(x.numel(), 1)
        size = f"{x.size(0):,} x {x.size(1):,}"
        print(
            f"Features stay sparse: {share:.2%} of {size} values aren't zero "
            "(sparse_features=False keeps them dense)",
            file=sys.stderr,
        )
    out = copy.copy(data)
    out.x = made
    return out


def _is_ordinary(x: Any) -> bool:
    """Return whether features are a dense matrix in memory without a gradient."""
    return (
        type(x) is Tensor
        and x.dim() == 2
        and x.dtype in (torch.float32, torch.float64)
        and not x.requires_grad
    )


def _find_non_zeros(x: Tensor, most: int) -> Tensor | None:
    """Return dense features as a ``torch.sparse_csr`` matrix, if at most so many aren't zero."""
    width, total = x.size(1), 0
    counts, cols, values = [], [], []
    for block in x.split(max(1, BLOCK // max(width, 1))):
        flat = block.reshape(-1)
        total += int(torch.count_nonzero(flat))
        if total > most:
            return None
        place = flat.nonzero().view(-1)
        counts.append(torch.bincount(place // width, minlength=block.size(0)))
        cols.append((place % width).int())
        values.append(flat[place])
    rowptr = torch.zeros(x.size(0) + 1, dtype=torch.long, device=x.device)
    torch.cumsum(torch.cat(counts), 0, out=rowptr[1:])
    return to_csr_features(sparse_csr(rowptr, torch.cat(cols).long(), torch.cat(values), width))
