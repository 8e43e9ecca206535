"""Sparse products and attention: the native kernels, and their pure-torch twins.

Every function checks nothing but where it runs; :mod:`gas.nn` checks what users pass. Results equal
the twins' to rounding, because sums are added up in another order. On CUDA, kernels run on the
current stream, wait for nothing, and give the same result in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gas import _native
from gas._buffers import empty
from gas._native import C, _use, has_kernels, run_on_device

TYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class Matrix(NamedTuple):
    """A sparse matrix in compressed rows, with its transpose.

    ``rowptr`` of shape ``[rows + 1]``, ``col`` of shape ``[entries]``; of the transpose
    ``t_rowptr`` of shape ``[cols + 1]``, ``t_col`` and ``t_entry``, the place of each entry in
    ``col``, of shape ``[entries]``. All int32. The transpose may lack the last columns: they are
    empty then, and elements that belong to no column have unspecified values.
    """

    rowptr: Tensor
    col: Tensor
    t_rowptr: Tensor
    t_col: Tensor
    t_entry: Tensor

    @property
    def num_rows(self) -> int:
        return self.rowptr.numel() - 1

    @property
    def num_cols(self) -> int:
        return self.t_rowptr.numel() - 1

    @property
    def row(self) -> Tensor:
        """The row of every entry, of shape ``[entries]``, int64."""
        rows = torch.arange(self.num_rows, device=self.rowptr.device)
        return torch.repeat_interleave(rows, self.rowptr.diff())


def _run(name: str, m: Matrix, x: Tensor, *arguments: object) -> None:
    """Calls a kernel for the type of ``x`` where that is."""
    name = f"{name}_{TYPES[x.dtype]}"
    if x.device.type == "cpu":
        getattr(C, name)(*arguments, torch.get_num_threads())
    else:
        run_on_device(name, x.device, m.col.numel(), *arguments)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _forward(m: Matrix) -> object:
    return C.Sparse(m.num_rows, m.rowptr.data_ptr(), m.col.data_ptr(), 0)


def _backward(m: Matrix, num_cols: int | None = None) -> object:
    """The transpose, or its first rows."""
    rows = m.num_cols if num_cols is None else num_cols
    return C.Sparse(rows, m.t_rowptr.data_ptr(), m.t_col.data_ptr(), m.t_entry.data_ptr())


def transpose(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The transpose of a matrix in compressed rows: ``t_rowptr``, ``t_col`` and ``t_entry``.

    Columns from ``kept`` on are left out, as if they were empty; what would be their entries has
    unspecified values.

    Raises:
        IndexError: If a column is outside ``[0, num_cols)``.
    """
    if not _use(rowptr, col):  # On CUDA, too: a stable sort.
        return _transpose_torch(rowptr, col, num_cols, kept)
    t_rowptr, t_col, t_entry = (
        rowptr.new_empty(num_cols + 1),
        torch.empty_like(col),
        torch.empty_like(col),
    )
    matrix = C.Sparse(rowptr.numel() - 1, rowptr.data_ptr(), col.data_ptr(), 0)
    C.transpose(
        matrix,
        num_cols,
        kept,
        t_rowptr.data_ptr(),
        t_col.data_ptr(),
        t_entry.data_ptr(),
        torch.get_num_threads(),
    )
    return t_rowptr, t_col, t_entry


def _transpose_torch(
    rowptr: Tensor, col: Tensor, num_cols: int, kept: int
) -> tuple[Tensor, Tensor, Tensor]:
    _native.check_range("col", col, num_cols)
    entry = torch.sort(col, stable=True).indices
    rows = torch.arange(rowptr.numel() - 1, dtype=torch.int32, device=col.device)
    row = torch.repeat_interleave(rows, rowptr.diff())
    t_rowptr = rowptr.new_zeros(num_cols + 1)
    count = torch.bincount(col, minlength=num_cols)
    count[kept:] = 0
    t_rowptr[1:] = torch.cumsum(count, 0).to(torch.int32)
    return t_rowptr, row[entry], entry.to(torch.int32)


# Products -----------------------------------------------------------------------------------------


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
    """``A x``, or ``A^T x``: rows of ``x`` summed over the entries of each row.

    Args:
        m: The matrix ``A``.
        weight: Its entries' values, of shape ``[entries]``. (default: ones)
        x: Of shape ``[cols, width]``, contiguous; ``[rows, width]`` if ``transposed``.
        mean: Divide by the number of entries. (default: ``False``)
        transposed: Multiply by the transpose. (default: ``False``)
        num_rows: Of a product by the transpose, how many rows to compute. (default: all)
        other: A table with the rows that follow those of ``x``, contiguous.
        place: Their places in it, of shape ``[cols - rows of x]``, int64, contiguous.
            (default: as they lie)
    """
    if not has_kernels(x, weight, other, place, m.col):
        if other is not None:
            x = torch.cat([x, other if place is None else other[place]])
        return _multiply_torch(m, weight, x, mean, transposed)[:num_rows]
    if num_rows is None:
        num_rows = m.num_cols if transposed else m.num_rows
    matrix = _backward(m, num_rows) if transposed else _forward(m)
    out = empty(num_rows, x.size(1), x)
    num_others = 0 if other is None else m.num_cols - x.size(0)
    rows = x.data_ptr(), x.size(0), _address(other), _address(place), num_others
    _run("multiply", m, x, matrix, _address(weight), rows, x.size(1), mean, out.data_ptr())
    return out


def _multiply_torch(
    m: Matrix, weight: Tensor | None, x: Tensor, mean: bool, transposed: bool
) -> Tensor:
    to, source = (m.col.long(), m.row) if transposed else (m.row, m.col.long())
    rows = x[source].to(_sum_type(x))
    if weight is not None:
        rows = rows * weight.to(rows)[:, None]
    out = rows.new_zeros(m.num_cols if transposed else m.num_rows, x.size(1))
    out.index_add_(0, to, rows)
    if mean:
        count = torch.bincount(to, minlength=out.size(0)).clamp(min=1)
        out = out / count[:, None]
    return out.to(x.dtype)


def _sum_type(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def dot_rows(m: Matrix, a: Tensor, b: Tensor) -> Tensor:
    """``<a[row], b[col]>`` of every entry, of shape ``[entries]``."""
    if not has_kernels(a, b, m.col):
        left, right = a[m.row].to(_sum_type(a)), b[m.col.long()].to(_sum_type(a))
        return (left * right).sum(dim=1).to(a.dtype)
    out = a.new_empty(m.col.numel())
    address = a.data_ptr(), b.data_ptr(), a.size(1), out.data_ptr()
    _run("dot_rows", m, a, _forward(m), *address)
    return out


def extreme(m: Matrix, x: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """The largest or smallest element over the entries of each row, zero for none.

    Returns:
        Of shape ``[rows, width]`` each: the elements, and the entry that each came from, the first
        of equals, -1 for none, int32.
    """
    if not has_kernels(x, m.col):
        return _extreme_torch(m, x, largest)
    out = empty(m.num_rows, x.size(1), x)
    entry = torch.empty(out.shape, dtype=torch.int32, device=x.device)
    address = x.data_ptr(), x.size(1), out.data_ptr(), entry.data_ptr()
    _run("extreme", m, x, _forward(m), largest, *address)
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
    """The gradient of :func:`extreme` towards the first rows of ``x``: ``[num_rows, width]``."""
    if not has_kernels(grad, entry, m.col):
        out = grad.new_zeros(m.num_cols, grad.size(1), dtype=_sum_type(grad))
        known = entry >= 0
        to = m.col.long()[entry.clamp(min=0).long()] if m.col.numel() else entry.long()
        out.scatter_add_(0, to.clamp(min=0), torch.where(known, grad, 0).to(out.dtype))
        return out[:num_rows].to(grad.dtype)
    out = empty(num_rows, grad.size(1), grad)
    address = grad.data_ptr(), entry.data_ptr(), grad.size(1), out.data_ptr()
    _run("extreme_backward", m, grad, _backward(m, num_rows), *address)
    return out


# Attention ----------------------------------------------------------------------------------------


class Dropout(NamedTuple):
    """Dropout by a counter-based generator: the probability, and a seed in ``[0, 2^63)``."""

    p: float = 0.0
    seed: int = 0


def attention(
    m: Matrix,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    dropout: Dropout,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention over the entries of each row; see ``csrc/attention.h``.

    Args:
        m: The matrix.
        x: Features of the sources, of shape ``[cols, heads, width]``, contiguous.
        source: Scores of the sources, of shape ``[cols, heads]``, contiguous, float32 for bfloat16.
        target: Scores of the destinations, of shape ``[rows, heads]``, likewise.
        slope: Of the leaky ReLU below zero, at least 0.
        dropout: Of attention weights.
        keep_state: Whether a backward pass will follow.

    Returns:
        The output of shape ``[rows, heads, width]``, then what :func:`attention_backward` needs.
    """
    heads, width = x.size(1), x.size(2)
    out = x.new_empty(m.num_rows, heads, width)
    maximum, total, weight = (source.new_empty(m.num_rows, heads) for _ in range(3))
    positive = torch.empty_like(out) if keep_state else out.new_empty(0)
    if not has_kernels(x, source, target, m.col):
        return _attention_torch(m, x, source, target, slope, dropout)
    _run(
        "attention",
        m,
        x,
        _forward(m),
        _attention_of(heads, width, slope, dropout),
        x.data_ptr(),
        source.data_ptr(),
        target.data_ptr(),
        out.data_ptr(),
        [maximum.data_ptr(), total.data_ptr(), weight.data_ptr(), _state_address(positive)],
    )
    return out, maximum, total, weight, positive


def _state_address(positive: Tensor) -> int:
    return positive.data_ptr() if positive.numel() else 0


def _attention_of(heads: int, width: int, slope: float, dropout: Dropout) -> object:
    threshold, keep = round(dropout.p * 2**32), 1.0 / (1.0 - dropout.p)
    return C.Attention(heads, width, slope, threshold, keep, dropout.seed)


def attention_backward(
    m: Matrix,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    dropout: Dropout,
    out: Tensor,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`attention` towards ``x``, ``source`` and ``target``."""
    if not has_kernels(x, source, target, m.col):
        return _attention_backward_torch(m, x, source, target, slope, dropout, grad)
    heads, width = x.size(1), x.size(2)
    maximum, total, weight, positive = state
    grad_x, grad_source = torch.empty_like(x), torch.empty_like(source)
    grad_target = torch.empty_like(target)
    scratch = target.new_empty(4 * target.numel())
    _run(
        "attention_backward",
        m,
        x,
        _backward(m),
        m.num_rows,
        _attention_of(heads, width, slope, dropout),
        x.data_ptr(),
        source.data_ptr(),
        target.data_ptr(),
        out.data_ptr(),
        grad.data_ptr(),
        [maximum.data_ptr(), total.data_ptr(), weight.data_ptr(), _state_address(positive)],
        scratch.data_ptr(),
        grad_x.data_ptr(),
        grad_source.data_ptr(),
        grad_target.data_ptr(),
    )
    return grad_x, grad_source, grad_target


def _weights_torch(
    m: Matrix, source: Tensor, target: Tensor, slope: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every entry and head: the attention weight, dropout's factor, the derivative of leaky."""
    row, col = m.row, m.col.long()
    raw = source[col] + target[row]
    bend = torch.where(raw > 0, raw.new_ones(()), raw.new_tensor(slope))
    score = raw * bend
    index = row[:, None].expand_as(score)
    maximum = score.new_zeros(target.shape)
    maximum.scatter_reduce_(0, index, score, "amax", include_self=False)
    power = (score - maximum[row]).exp()
    total = torch.zeros_like(target).index_add_(0, row, power)
    ones = torch.ones_like(power, dtype=torch.float64)
    keep = ones if dropout.p == 0 else _native.dropout(ones, dropout.p, dropout.seed)
    return power / total[row], keep.to(power), bend


def _attention_torch(
    m: Matrix, x: Tensor, source: Tensor, target: Tensor, slope: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    weight, keep, _ = _weights_torch(m, source, target, slope, dropout)
    rows = x[m.col.long()].to(source.dtype) * (weight * keep)[:, :, None]
    out = rows.new_zeros(m.num_rows, *x.shape[1:]).index_add_(0, m.row, rows)
    none = [target.new_empty(0) for _ in range(3)]
    return out.to(x.dtype), none[0], none[1], none[2], x.new_empty(0)


def _attention_backward_torch(
    m: Matrix,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    dropout: Dropout,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = m.row, m.col.long()
    weight, keep, bend = _weights_torch(m, source, target, slope, dropout)
    g = grad[row].to(source.dtype)
    grad_x = g.new_zeros(x.shape).index_add_(0, col, g * (weight * keep)[:, :, None])
    through = (g * x[col].to(g)).sum(dim=-1) * keep
    dot = torch.zeros_like(target).index_add_(0, row, weight * through)
    score = bend * weight * (through - dot[row])
    grad_source = torch.zeros_like(source).index_add_(0, col, score)
    grad_target = torch.zeros_like(target).index_add_(0, row, score)
    return grad_x.to(x.dtype), grad_source, grad_target
