"""Sums, means and extremes over neighbours: the native kernels, and their pure-torch twins."""

from __future__ import annotations

import torch
from torch import Tensor

from gas.native import costs
from gas.native import extension as native
from gas.native.matrix import Matrix, native_matrix, native_transpose, run_typed, sum_type
from gas.native.rows import sparse_csr
from gas.native.transfer import empty


def multiply(
    m: Matrix,
    weight: Tensor | None,
    x: Tensor,
    mean: bool = False,
    transposed: bool = False,
    num_rows: int | None = None,
    other: Tensor | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """Multiply ``A x`` or ``A^T x``: sum rows of ``x`` over the entries of each row.

    Args:
        m: The matrix ``A``.
        weight: Its entries' values, of shape ``[entries]``. (default: ones)
        x: Of shape ``[cols, width]``, contiguous; ``[rows, width]`` if ``transposed``.
        mean: Divide by the number of entries. (default: ``False``)
        transposed: Multiply by the transpose. (default: ``False``)
        num_rows: Of a product by the transpose, how many rows to compute. (default: all)
        other: A table with the rows that follow those of ``x``, contiguous.
        place: Their places in it, of shape ``[cols - rows of x]``, int64, contiguous.
            (default: the order of the table)
    """
    if not native.has_kernels(x, weight, other, place, m.col):
        if other is not None:
            x = torch.cat([x, other if place is None else other[place]])
        return _multiply_torch(m, weight, x, mean, transposed)[:num_rows]
    if other is None and not (mean or transposed) and costs.prefers_torch_sum(weight, x):
        return _multiply_sparse(m, weight, x)
    if num_rows is None:
        num_rows = m.num_cols if transposed else m.num_rows
    matrix = native_transpose(m, num_rows) if transposed else native_matrix(m)
    out = empty(num_rows, x.size(1), x)
    num_others = 0 if other is None else m.num_cols - x.size(0)
    rows = [x, x.size(0), other, place, num_others]
    run_typed("multiply", x, matrix, weight, rows, x.size(1), mean, out)
    return out


def _multiply_sparse(m: Matrix, weight: Tensor | None, x: Tensor) -> Tensor:
    """Multiply ``A x`` by PyTorch's sparse product, on CUDA that of cuSPARSE."""
    value = x.new_ones(m.col.numel()) if weight is None else weight
    with torch.autocast(x.device.type, enabled=False):  # It would multiply in a shorter type.
        return sparse_csr(m.rowptr, m.col, value, x.size(0)) @ x


def _multiply_torch(
    m: Matrix, weight: Tensor | None, x: Tensor, mean: bool, transposed: bool
) -> Tensor:
    to, source = (m.col.long(), m.row) if transposed else (m.row, m.col.long())
    rows = x[source].to(sum_type(x))
    if weight is not None:
        rows = rows * weight.to(rows)[:, None]
    out = rows.new_zeros(m.num_cols if transposed else m.num_rows, x.size(1))
    out.index_add_(0, to, rows)
    if mean:
        count = torch.bincount(to, minlength=out.size(0)).clamp(min=1)
        out = out / count[:, None]
    return out.to(x.dtype)


def dot_rows(m: Matrix, a: Tensor, b: Tensor) -> Tensor:
    """Return ``<a[row], b[col]>`` of every entry, of shape ``[entries]``."""
    if not native.has_kernels(a, b, m.col):
        left, right = a[m.row].to(sum_type(a)), b[m.col.long()].to(sum_type(a))
        return (left * right).sum(dim=1).to(a.dtype)
    out = a.new_empty(m.col.numel())
    run_typed("dot_rows", a, native_matrix(m), a, b, a.size(1), out)
    return out


def extreme(m: Matrix, x: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the largest or smallest element over the entries of each row, zero for none.

    Returns:
        Of shape ``[rows, width]`` each: the elements, and the entry that each came from, the first
        of equals, -1 for none, int32.
    """
    if not native.has_kernels(x, m.col):
        return _extreme_torch(m, x, largest)
    out = empty(m.num_rows, x.size(1), x)
    entry = torch.empty(out.shape, dtype=torch.int32, device=x.device)
    run_typed("extreme", x, native_matrix(m), largest, x, x.size(1), out, entry)
    return out, entry


def _extreme_torch(m: Matrix, x: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    row = m.row[:, None].expand(-1, x.size(1))
    values = x[m.col.long()]
    reduce = "amax" if largest else "amin"
    out = x.new_zeros(m.num_rows, x.size(1))
    out.scatter_reduce_(0, row, values, reduce, include_self=False)
    best = out[m.row]
    same = (values == best) | (values.isnan() & best.isnan())
    number = torch.arange(m.col.numel(), device=x.device)[:, None]
    last = m.col.numel()
    entry = torch.full(out.shape, last, device=x.device)
    entry.scatter_reduce_(0, row, torch.where(same, number, last), "amin")
    return out, torch.where(entry == last, -1, entry).to(torch.int32)


def extreme_backward(m: Matrix, grad: Tensor, entry: Tensor, num_rows: int) -> Tensor:
    """Return the gradient of :func:`extreme` for the first rows of ``x``: ``[num_rows, width]``."""
    if not native.has_kernels(grad, entry, m.col):
        out = grad.new_zeros(m.num_cols, grad.size(1), dtype=sum_type(grad))
        known = entry >= 0
        to = m.col.long()[entry.clamp(min=0).long()] if m.col.numel() else entry.long()
        out.scatter_add_(0, to.clamp(min=0), torch.where(known, grad, 0).to(out.dtype))
        return out[:num_rows].to(grad.dtype)
    out = empty(num_rows, grad.size(1), grad)
    matrix = native_transpose(m, num_rows)
    run_typed("extreme_backward", grad, matrix, grad, entry, grad.size(1), out)
    return out
