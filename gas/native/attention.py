"""Attention with scores of either end (GAT): the native kernels, and their pure-torch twins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.dropout import dropout as drop
from gas.native.matrix import Matrix, native_matrix, native_transpose, run_typed


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
    """Compute attention over the entries of each row; see ``csrc/operators/attention.h``.

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
    if not native.has_kernels(x, source, target, m.col):
        return _attention_torch(m, x, source, target, slope, dropout)
    options = native_attention(heads, width, slope, dropout)
    state = [maximum, total, weight, positive]
    run_typed("attention", x, native_matrix(m), options, x, source, target, out, state)
    return out, maximum, total, weight, positive


def native_attention(heads: int, width: int, slope: float, dropout: Dropout) -> object:
    """Return the settings of attention for the kernels."""
    threshold, keep = round(dropout.p * 2**32), 1.0 / (1.0 - dropout.p)
    return native.C.Attention(heads, width, slope, threshold, keep, dropout.seed)


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
    """Return the gradients of :func:`attention` towards ``x``, ``source`` and ``target``."""
    if not native.has_kernels(x, source, target, m.col):
        return _attention_backward_torch(m, x, source, target, slope, dropout, grad)
    heads, width = x.size(1), x.size(2)
    grad_x, grad_source = torch.empty_like(x), torch.empty_like(source)
    grad_target = torch.empty_like(target)
    scratch = target.new_empty(4 * target.numel())
    settings = m.num_rows, native_attention(heads, width, slope, dropout)
    given = x, source, target, out, grad, list(state), scratch
    grads = grad_x, grad_source, grad_target
    run_typed("attention_backward", x, native_transpose(m), *settings, *given, *grads)
    return grads


def _weights_torch(
    m: Matrix, source: Tensor, target: Tensor, slope: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every entry and head, the weight, dropout's factor and leaky's derivative."""
    raw = source[m.col.long()] + target[m.row]
    bend = torch.where(raw > 0, raw.new_ones(()), raw.new_tensor(slope))
    return *softmax_torch(m, raw * bend, dropout), bend


def softmax_torch(m: Matrix, score: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """Return the weight of every entry and head by its score, and dropout's factor."""
    row = m.row
    index = row[:, None].expand_as(score)
    maximum = score.new_zeros(m.num_rows, score.size(1))
    maximum.scatter_reduce_(0, index, score, "amax", include_self=False)
    power = (score - maximum[row]).exp()
    total = torch.zeros_like(maximum).index_add_(0, row, power)
    ones = torch.ones_like(power, dtype=torch.float64)
    keep = ones if dropout.p == 0 else drop(ones, dropout.p, dropout.seed)
    return power / total[row], keep.to(power)


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
