"""Attention scored by both ends together (GATv2): the native kernel, and its pure-torch twin."""

from __future__ import annotations

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.attention import Dropout, native_attention, softmax_torch
from gas.native.matrix import TYPES, Matrix, native_matrix, native_transpose, run_typed


def attention_v2(
    m: Matrix, source: Tensor, target: Tensor, att: Tensor, slope: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention over the entries of each row; see ``csrc/operators/attention_v2.h``.

    Args:
        m: The matrix.
        source: Features of the sources, of shape ``[cols, heads, width]``, contiguous.
        target: Features of the destinations, of shape ``[rows, heads, width]``, contiguous.
        att: Of shape ``[heads, width]``, contiguous, float32 for bfloat16.
        slope: Of the leaky ReLU below zero.
        dropout: Of attention weights.

    Returns:
        The output of shape ``[rows, heads, width]``, then what :func:`attention_v2_backward` needs.
    """
    if not native.has_kernels(source, target, att, m.col):
        return _attention_v2_torch(m, source, target, att, slope, dropout)
    out = torch.empty_like(target)
    maximum, total = (att.new_empty(m.num_rows, att.size(0)) for _ in range(2))
    layer = _layer(source, target, att, slope, dropout)
    run_typed("attention_v2", source, native_matrix(m), layer, out, maximum, total)
    return out, maximum, total


def _layer(source: Tensor, target: Tensor, att: Tensor, slope: float, dropout: Dropout) -> object:
    addresses = source.data_ptr(), target.data_ptr(), att.data_ptr()
    options = native_attention(att.size(0), att.size(1), slope, dropout)
    return getattr(native.C, f"AttentionV2_{TYPES[source.dtype]}")(options, *addresses)


def attention_v2_backward(
    m: Matrix,
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    dropout: Dropout,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`attention_v2` towards ``source``, ``target`` and ``att``."""
    if not native.has_kernels(source, target, att, m.col):
        return _attention_v2_backward_torch(m, source, target, att, slope, dropout, grad)
    # Without rows, nothing runs on CUDA that would write zeros to att's.
    grads = torch.empty_like(source), torch.empty_like(target), torch.zeros_like(att)
    scratch = maximum.new_empty(4 * maximum.numel())  # The CPU needs three of four.
    settings = native_matrix(m), native_transpose(m), _layer(source, target, att, slope, dropout)
    run_typed(
        "attention_v2_backward", source, *settings, out, grad, maximum, total, scratch, *grads
    )
    return grads


def _weights_torch(
    m: Matrix, source: Tensor, target: Tensor, att: Tensor, slope: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every entry and head: the weight, dropout's factor, what leaky takes, its derivative."""
    raw = source[m.col.long()].to(att.dtype) + target[m.row].to(att.dtype)
    bend = torch.where(raw > 0, raw.new_ones(()), raw.new_tensor(slope))
    return *softmax_torch(m, (raw * bend * att).sum(dim=-1), dropout), raw, bend


def _attention_v2_torch(
    m: Matrix, source: Tensor, target: Tensor, att: Tensor, slope: float, dropout: Dropout
) -> tuple[Tensor, Tensor, Tensor]:
    weight, keep, _, _ = _weights_torch(m, source, target, att, slope, dropout)
    rows = source[m.col.long()].to(att.dtype) * (weight * keep)[:, :, None]
    out = rows.new_zeros(target.shape).index_add_(0, m.row, rows)
    return out.to(source.dtype), att.new_empty(0), att.new_empty(0)


def _attention_v2_backward_torch(
    m: Matrix,
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    dropout: Dropout,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = m.row, m.col.long()
    weight, keep, raw, bend = _weights_torch(m, source, target, att, slope, dropout)
    g = grad[row].to(att.dtype)
    through = (g * source[col].to(att.dtype)).sum(dim=-1) * keep
    dot = g.new_zeros(m.num_rows, att.size(0)).index_add_(0, row, weight * through)
    score = (weight * (through - dot[row]))[:, :, None] * bend
    ends = score * att
    to_source = g * (weight * keep)[:, :, None] + ends
    grad_source = g.new_zeros(source.shape).index_add_(0, col, to_source)
    grad_target = g.new_zeros(target.shape).index_add_(0, row, ends)
    return (
        grad_source.to(source.dtype),
        grad_target.to(target.dtype),
        (score * raw).sum(dim=0),
    )
