"""Attention by scores of either end (GAT) or of both together (GATv2), with pure-torch twins.

Each operator calls the kernels of ``csrc/operators``, which store nothing of the size of the edges;
its derivative computes weights again, and draws dropout's random numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.custom_op import custom_op
from gas.native.dropout import dropout
from gas.native.matrix import (
    NONE,
    TYPES,
    Matrix,
    empty_like,
    native_matrix,
    native_transpose,
    run_typed,
)


def _native_attention(heads: int, width: int, slope: float, p: float, seed: Tensor) -> object:
    """Return the settings of attention for the kernels."""
    return native.C.Attention(heads, width, slope, round(p * 2**32), 1.0 / (1.0 - p), int(seed))


def _softmax_torch(m: Matrix, score: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of every entry and head by its score, and dropout's factor."""
    row = m.row
    index = row[:, None].expand_as(score)
    maximum = score.new_zeros(m.num_rows, score.size(1))
    maximum.scatter_reduce_(0, index, score, "amax", include_self=False)
    power = (score - maximum[row]).exp()
    total = torch.zeros_like(maximum).index_add_(0, row, power)
    ones = torch.ones_like(power, dtype=torch.float64)
    keep = ones if p == 0 else dropout(ones, p, int(seed))
    return power / total[row], keep.to(power)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what :func:`_gradients` needs, for both kinds of attention."""
    matrix, *tensors, ctx.slope, ctx.p, seed = inputs[:7]
    ctx.num_options = len(inputs) - 4
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*matrix, *tensors, seed, *output)


def _gradients(ctx: Any, backward: Callable[..., Any], grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the inputs of attention, which ``backward`` computes."""
    saved, size = ctx.saved_tensors, len(Matrix._fields)
    tensors, seed, state = saved[size : size + 3], saved[size + 3], saved[size + 4 :]
    how = ctx.slope, ctx.p, seed
    grads = backward(Matrix(*saved[:size]), *tensors, *how, *state, grad)
    return NONE, *grads, *[None] * ctx.num_options


# GAT ----------------------------------------------------------------------------------------------


@custom_op("gas::gat_attention", "gas.nn.gat_attention")
def attention(
    matrix: Sequence[Tensor],
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute attention over the entries of each row; see ``csrc/operators/attention.h``.

    Args:
        matrix: The fields of a :class:`Matrix`.
        x: Features of the sources, of shape ``[cols, heads, width]``.
        source: Scores of the sources, of shape ``[cols, heads]``, float32 for bfloat16.
        target: Scores of the destinations, of shape ``[rows, heads]``, likewise.
        slope: The slope of the leaky ReLU below zero, at least 0.
        p: The probability of dropping an attention weight.
        seed: The seed of dropout's generator, in ``[0, 2^63)``.
        keep_state: Whether a backward pass will follow.

    Returns:
        The output of shape ``[rows, heads, width]``, then what :func:`attention_backward` needs.
    """
    m, x, source, target = Matrix(*matrix), x.contiguous(), source.contiguous(), target.contiguous()
    if not native.has_kernels(x, source, target, m.col):
        return _attention_torch(m, x, source, target, slope, p, seed)
    out, *state = made = _new_attention(m, x, source, target, slope, p, seed, keep_state)
    options = _native_attention(x.size(1), x.size(2), slope, p, seed)
    run_typed("attention", x, native_matrix(m), options, x, source, target, out, state)
    return made


@attention.register_fake
def _new_attention(
    matrix: Sequence[Tensor], x: Tensor, source: Tensor, target: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty(Matrix(*matrix).num_rows, x.size(1), x.size(2))
    maximum, total, weight = empty_like(target, target, target)
    return out, maximum, total, weight, torch.empty_like(out) if how[-1] else out.new_empty(0)


@custom_op("gas::gat_attention_backward", "gas.nn.gat_attention")
def attention_backward(
    matrix: Sequence[Tensor],
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    weight: Tensor,
    positive: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`attention` towards ``x``, ``source`` and ``target``."""
    m, grad = Matrix(*matrix), grad.contiguous()
    x, source, target = x.contiguous(), source.contiguous(), target.contiguous()
    if not native.has_kernels(x, source, target, m.col):
        return _attention_backward_torch(m, x, source, target, slope, p, seed, grad)
    grads = empty_like(x, source, target)
    state, scratch = [maximum, total, weight, positive], target.new_empty(4 * target.numel())
    settings = m.num_rows, _native_attention(x.size(1), x.size(2), slope, p, seed)
    given = x, source, target, out, grad, state, scratch
    run_typed("attention_backward", x, native_transpose(m), *settings, *given, *grads)
    return grads


@attention_backward.register_fake
def _(
    matrix: Sequence[Tensor], x: Tensor, source: Tensor, target: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return empty_like(x, source, target)


attention.register_autograd(
    lambda ctx, grad, *_: _gradients(ctx, attention_backward, grad), setup_context=_save
)


def _weights_torch(
    m: Matrix, source: Tensor, target: Tensor, slope: float, p: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every entry and head, the weight, dropout's factor and leaky's derivative."""
    raw = source[m.col.long()] + target[m.row]
    bend = torch.where(raw > 0, raw.new_ones(()), raw.new_tensor(slope))
    return *_softmax_torch(m, raw * bend, p, seed), bend


def _attention_torch(
    m: Matrix, x: Tensor, source: Tensor, target: Tensor, slope: float, p: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    weight, keep, _ = _weights_torch(m, source, target, slope, p, seed)
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
    p: float,
    seed: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = m.row, m.col.long()
    weight, keep, bend = _weights_torch(m, source, target, slope, p, seed)
    g = grad[row].to(source.dtype)
    grad_x = g.new_zeros(x.shape).index_add_(0, col, g * (weight * keep)[:, :, None])
    through = (g * x[col].to(g)).sum(dim=-1) * keep
    dot = torch.zeros_like(target).index_add_(0, row, weight * through)
    score = bend * weight * (through - dot[row])
    grad_source = torch.zeros_like(source).index_add_(0, col, score)
    grad_target = torch.zeros_like(target).index_add_(0, row, score)
    return grad_x.to(x.dtype), grad_source, grad_target


# GATv2 --------------------------------------------------------------------------------------------


@custom_op("gas::gatv2_attention", "gas.nn.gatv2_attention")
def attention_v2(
    matrix: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention over the entries of each row; see ``csrc/operators/attention_v2.h``.

    Args:
        matrix: The fields of a :class:`Matrix`.
        source: Features of the sources, of shape ``[cols, heads, width]``.
        target: Features of the destinations, of shape ``[rows, heads, width]``.
        att: Of shape ``[heads, width]``, float32 for bfloat16.
        slope: The slope of the leaky ReLU below zero.
        p: The probability of dropping an attention weight.
        seed: The seed of dropout's generator, in ``[0, 2^63)``.

    Returns:
        The output of shape ``[rows, heads, width]``, then what :func:`attention_v2_backward` needs.
    """
    m = Matrix(*matrix)
    source, target, att = source.contiguous(), target.contiguous(), att.contiguous()
    if not native.has_kernels(source, target, att, m.col):
        return _attention_v2_torch(m, source, target, att, slope, p, seed)
    made = _new_attention_v2(m, source, target, att)
    layer = _layer(source, target, att, slope, p, seed)
    run_typed("attention_v2", source, native_matrix(m), layer, *made)
    return made


@attention_v2.register_fake
def _new_attention_v2(
    matrix: Sequence[Tensor], source: Tensor, target: Tensor, att: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    maximum, total = (att.new_empty(target.shape[:2]) for _ in range(2))
    return *empty_like(target), maximum, total


def _layer(
    source: Tensor, target: Tensor, att: Tensor, slope: float, p: float, seed: Tensor
) -> object:
    addresses = source.data_ptr(), target.data_ptr(), att.data_ptr()
    options = _native_attention(att.size(0), att.size(1), slope, p, seed)
    return getattr(native.C, f"AttentionV2_{TYPES[source.dtype]}")(options, *addresses)


@custom_op("gas::gatv2_attention_backward", "gas.nn.gatv2_attention")
def attention_v2_backward(
    matrix: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`attention_v2` towards ``source``, ``target`` and ``att``."""
    m, grad = Matrix(*matrix), grad.contiguous()
    source, target, att = source.contiguous(), target.contiguous(), att.contiguous()
    if not native.has_kernels(source, target, att, m.col):
        return _attention_v2_backward_torch(m, source, target, att, slope, p, seed, grad)
    # Without rows, nothing runs on CUDA that would write zeros to att's.
    grads = torch.empty_like(source), torch.empty_like(target), torch.zeros_like(att)
    scratch = maximum.new_empty(4 * maximum.numel())  # The CPU needs three of four.
    settings = native_matrix(m), native_transpose(m), _layer(source, target, att, slope, p, seed)
    state = out, grad, maximum, total, scratch
    run_typed("attention_v2_backward", source, *settings, *state, *grads)
    return grads


@attention_v2_backward.register_fake
def _(
    matrix: Sequence[Tensor], source: Tensor, target: Tensor, att: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return empty_like(source, target, att)


attention_v2.register_autograd(
    lambda ctx, grad, *_: _gradients(ctx, attention_v2_backward, grad), setup_context=_save
)


def _weights_v2_torch(
    m: Matrix, source: Tensor, target: Tensor, att: Tensor, slope: float, p: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every entry and head: the weight, dropout's factor, what leaky takes, its derivative."""
    raw = source[m.col.long()].to(att.dtype) + target[m.row].to(att.dtype)
    bend = torch.where(raw > 0, raw.new_ones(()), raw.new_tensor(slope))
    return *_softmax_torch(m, (raw * bend * att).sum(dim=-1), p, seed), raw, bend


def _attention_v2_torch(
    m: Matrix, source: Tensor, target: Tensor, att: Tensor, slope: float, p: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weight, keep, _, _ = _weights_v2_torch(m, source, target, att, slope, p, seed)
    rows = source[m.col.long()].to(att.dtype) * (weight * keep)[:, :, None]
    out = rows.new_zeros(target.shape).index_add_(0, m.row, rows)
    return out.to(source.dtype), att.new_empty(0), att.new_empty(0)


def _attention_v2_backward_torch(
    m: Matrix,
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    row, col = m.row, m.col.long()
    weight, keep, raw, bend = _weights_v2_torch(m, source, target, att, slope, p, seed)
    g = grad[row].to(att.dtype)
    through = (g * source[col].to(att.dtype)).sum(dim=-1) * keep
    dot = g.new_zeros(m.num_rows, att.size(0)).index_add_(0, row, weight * through)
    score = (weight * (through - dot[row]))[:, :, None] * bend
    ends = score * att
    to_source = g * (weight * keep)[:, :, None] + ends
    grad_source = g.new_zeros(source.shape).index_add_(0, col, to_source)
    grad_target = g.new_zeros(target.shape).index_add_(0, row, ends)
    return grad_source.to(source.dtype), grad_target.to(target.dtype), (score * raw).sum(dim=0)
