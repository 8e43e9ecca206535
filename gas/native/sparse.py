"""Sums, means and extremes over neighbours: operators, derivatives, and pure-torch twins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gas.native import costs
from gas.native import extension as native
from gas.native.custom_op import custom_op
from gas.native.matrix import (
    NONE,
    Matrix,
    divide_by_degree,
    native_matrix,
    native_transpose,
    run_typed,
    sum_type,
)
from gas.native.rows import sparse_csr
from gas.native.transfer import empty


@custom_op("gas::multiply", "gas.nn.spmm")
def multiply(
    matrix: Sequence[Tensor],
    weight: Tensor | None,
    x: Tensor,
    other: Tensor | None,
    place: Tensor | None,
    mean: bool,
    transposed: bool,
    num_rows: int | None,
) -> Tensor:
    """Multiply ``A x`` or ``A^T x``: sum rows of ``x`` over the entries of each row.

    Args:
        matrix: The fields of a :class:`Matrix`, ``A``.
        weight: Its entries' values, of shape ``[entries]``. (``None``: ones)
        x: Of shape ``[cols, width]``; ``[rows, width]`` if ``transposed``.
        other: A table with the rows that follow those of ``x``, such as a halo's, contiguous; no
            gradient reaches it.
        place: Their places in it, of shape ``[cols - rows of x]``, int64, contiguous. (``None``:
            the order of the table)
        mean: Divide by the number of entries.
        transposed: Multiply by the transpose.
        num_rows: How many rows of a product by the transpose to compute. (``None``: all)
    """
    m = matrix if isinstance(matrix, Matrix) else Matrix(*matrix)
    x = x.contiguous()
    if not native.has_kernels(x, weight, other, place, m.col):
        if other is not None:
            x = torch.cat([x, other if place is None else other[place]])
        return _multiply_torch(m, weight, x, mean, transposed)[:num_rows]
    if other is None and not (mean or transposed) and costs.prefers_torch_sum(weight, x):
        return _multiply_sparse(m, weight, x)
    if num_rows is None:
        num_rows = m.num_cols if transposed else m.num_rows
    side = native_transpose(m, num_rows) if transposed else native_matrix(m)
    out = empty(num_rows, x.size(1), x)
    num_others = 0 if other is None else m.num_cols - x.size(0)
    rows = [x, x.size(0), other, place, num_others]
    run_typed("multiply", x, side, weight, rows, x.size(1), mean, out)
    return out


@multiply.register_fake
def _(matrix: Sequence[Tensor], weight: Tensor | None, x: Tensor, *how: Any) -> Tensor:
    m, (*_, transposed, num_rows) = Matrix(*matrix), how
    if num_rows is None:
        num_rows = m.num_cols if transposed else m.num_rows
    return x.new_empty(num_rows, x.size(1))


def _multiply_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, weight, x, _, _, mean, transposed, num_rows = inputs
    ctx.mean, ctx.transposed, ctx.num_rows = mean, transposed, x.size(0)
    ctx.padding = 0 if num_rows is None else Matrix(*matrix).num_cols - num_rows
    learns = weight is not None and weight.requires_grad
    ctx.save_for_backward(*matrix, weight, x if learns else None)


def _multiply_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, weight, x = ctx.saved_tensors
    if ctx.padding:
        grad = F.pad(grad, (0, 0, 0, ctx.padding))
    m = Matrix(*parts)
    grad = divide_by_degree(m, grad) if ctx.mean else grad
    _, needs_weight, needs_x, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if needs_x:
        back = not ctx.transposed
        rows = ctx.num_rows if back else None
        grad_x = multiply(m, weight, grad, None, None, False, back, rows)
    if needs_weight:
        pair = (x, grad) if ctx.transposed else (grad, x)
        grad_weight = dot_rows(m, *pair)
    return NONE, grad_weight, grad_x, None, None, None, None, None


multiply.register_autograd(_multiply_grad, setup_context=_multiply_setup)


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


@custom_op("gas::dot_rows", "gas.nn.spmm")
def dot_rows(matrix: Sequence[Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Return ``<a[row], b[col]>`` of every entry, the gradient of a product's weights."""
    m, a, b = Matrix(*matrix), a.contiguous(), b.contiguous()
    if not native.has_kernels(a, b, m.col):
        left, right = a[m.row].to(sum_type(a)), b[m.col.long()].to(sum_type(a))
        return (left * right).sum(dim=1).to(a.dtype)
    out = a.new_empty(m.col.numel())
    run_typed("dot_rows", a, native_matrix(m), a, b, a.size(1), out)
    return out


@dot_rows.register_fake
def _(matrix: Sequence[Tensor], a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(Matrix(*matrix).col.numel())


def _dot_rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, a, b = inputs
    ctx.save_for_backward(*matrix, a, b)


def _dot_rows_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, a, b = ctx.saved_tensors
    grads = [
        multiply(Matrix(*parts), grad.contiguous(), other, None, None, False, transposed, None)
        if needed
        else None
        for needed, other, transposed in zip(
            ctx.needs_input_grad[1:], (b, a), (False, True), strict=True
        )
    ]
    return NONE, *grads


dot_rows.register_autograd(_dot_rows_grad, setup_context=_dot_rows_setup)


@custom_op("gas::extreme", "gas.nn.spmm")
def extreme(
    matrix: Sequence[Tensor], x: Tensor, own: Tensor | None, largest: bool
) -> tuple[Tensor, Tensor]:
    """Return the largest or smallest element over the entries of each row, zero for none.

    Args:
        matrix: The fields of a :class:`Matrix`.
        x: Of shape ``[cols, width]``.
        own: The first rows of ``x``, if the gradient is towards these instead of ``x``.
        largest: Whether to take the largest.

    Returns:
        Of shape ``[rows, width]`` each: the elements, and the entry that each came from, the first
        of equals, -1 for none, int32.
    """
    m, x = Matrix(*matrix), x.contiguous()
    if not native.has_kernels(x, m.col):
        return _extreme_torch(m, x, largest)
    out = empty(m.num_rows, x.size(1), x)
    entry = torch.empty(out.shape, dtype=torch.int32, device=x.device)
    run_typed("extreme", x, native_matrix(m), largest, x, x.size(1), out, entry)
    return out, entry


@extreme.register_fake
def _(matrix: Sequence[Tensor], x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = x.new_empty(Matrix(*matrix).num_rows, x.size(1))
    return out, torch.empty_like(out, dtype=torch.int32)


def _extreme_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    matrix, x, own, _ = inputs
    ctx.num_rows = x.size(0) if own is None else own.size(0)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*matrix, output[1])


def _extreme_grad(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    *parts, entry = ctx.saved_tensors
    grad_x = extreme_backward(parts, grad, entry, ctx.num_rows)
    needs_own = ctx.needs_input_grad[2]
    return NONE, None if needs_own else grad_x, grad_x if needs_own else None, None


extreme.register_autograd(_extreme_grad, setup_context=_extreme_setup)


def _extreme_torch(m: Matrix, x: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Compute :func:`extreme` in pure PyTorch."""
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


@custom_op("gas::extreme_backward", "gas.nn.spmm")
def extreme_backward(
    matrix: Sequence[Tensor], grad: Tensor, entry: Tensor, num_rows: int
) -> Tensor:
    """Return the gradient of :func:`extreme` for the first rows of ``x``: ``[num_rows, width]``."""
    m, grad = Matrix(*matrix), grad.contiguous()
    if not native.has_kernels(grad, entry, m.col):
        out = grad.new_zeros(m.num_cols, grad.size(1), dtype=sum_type(grad))
        known = entry >= 0
        to = m.col.long()[entry.clamp(min=0).long()] if m.col.numel() else entry.long()
        out.scatter_add_(0, to.clamp(min=0), torch.where(known, grad, 0).to(out.dtype))
        return out[:num_rows].to(grad.dtype)
    out = empty(num_rows, grad.size(1), grad)
    side = native_transpose(m, num_rows)
    run_typed("extreme_backward", grad, side, grad, entry, grad.size(1), out)
    return out


@extreme_backward.register_fake
def _(matrix: Sequence[Tensor], grad: Tensor, entry: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.size(1))


def _extreme_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, _, entry, ctx.num_rows = inputs
    ctx.save_for_backward(*matrix, entry)


def _extreme_backward_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, entry = ctx.saved_tensors
    col = F.pad(Matrix(*parts).col.long(), (0, 1), value=ctx.num_rows)  # Of no entry, -1: zeros.
    row = col[entry.long()].clamp(max=ctx.num_rows)
    return NONE, F.pad(grad, (0, 0, 0, 1)).gather(0, row), None, None


extreme_backward.register_autograd(_extreme_backward_grad, setup_context=_extreme_backward_setup)
