"""Refuse NaN and infinite features where a graph enters: one pass, without copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.folder.opening import MAPPED, mapped_rows
from gas.native import is_sparse, parts

BLOCK = 1 << 20  # Elements that are looked at at once.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_finite(name: str, x: Any, start: int | None = None) -> None:
    """Refuse features that hold NaN or infinite values; of sparse ones those that are stored.

    Args:
        name: What errors call them.
        x: The features, of shape ``[rows, ...]``; anything that isn't a tensor of real numbers is
            left alone.
        start: The number of the first row, if these are some of many. (default: all are there)

    Raises:
        ValueError: If one does, naming the first such value, and how many there are.
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.dim() == 0:
        return
    x = x.detach()
    found = _first_of_sparse(x) if is_sparse(x) else _first(x)
    if found is None:
        return
    row, column, value, count = found
    where = f"row {(start or 0) + row}" + f", column {column}" * (x.dim() > 1)
    many = f"{'' if start is None else 'at least '}{count} such value{'s' * (count > 1)}"
    raise ValueError(
        f"'{name}' holds a NaN or infinite value in {where} ({value}; {many}): replace it, for "
        f"example with torch.nan_to_num({name.split('.')[-1]}), or accept it, check=False "
        "(--no-check)"
    )


def _first(x: Tensor) -> tuple[int, int, float, int] | None:
    """Return row, column and value of the first non-finite element, and the number of these.

    The largest and the smallest element say whether there is one: NaN is larger than any.
    """
    found, count = None, 0
    rows = max(1, BLOCK // max(1, x[:1].numel()))
    for begin in range(0, x.size(0), rows):
        block = x[begin : begin + rows]
        if block.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(block))).all()):
            continue
        wrong = ~torch.isfinite(block).flatten(1) if block.dim() > 1 else ~torch.isfinite(block)
        count += int(wrong.sum())
        if found is None:
            row, *column = wrong.nonzero()[0].tolist()
            value = float(block[row].flatten()[column[0] if column else 0])
            found = begin + row, column[0] if column else 0, value
    return None if found is None else (*found, count)


def _first_of_sparse(x: Tensor) -> tuple[int, int, float, int] | None:
    """Return the same of the values of a ``torch.sparse_csr`` matrix."""
    rowptr, col, values = parts(x)
    found = _first(values)
    if found is None:
        return None
    entry, _, value, count = found
    row = torch.searchsorted(rowptr, rowptr.new_tensor([entry]), right=True)
    return int(row) - 1, int(col[entry]), value, count


def check_entering(data: Data, with_mapped: bool = False) -> None:
    """Refuse NaN and infinite features of nodes and edges where a graph enters.

    Args:
        data: The graph.
        with_mapped: Read features that are mapped from a file, too, which were checked when it was
            written. (default: ``False``)

    Raises:
        ValueError: See :func:`check_finite`.
    """
    for key in ("x", "edge_attr"):
        value = data.get(key)
        is_mapped = hasattr(value, MAPPED) or mapped_rows(value) is not None
        if with_mapped or not is_mapped:
            check_finite(key, value)
