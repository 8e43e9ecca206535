"""Sums of an activation over edges: the operator, its derivative, and its pure-torch twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.custom_op import custom_op
from gas.native.matrix import (
    NONE,
    Matrix,
    divide_by_degree,
    empty_like,
    native_matrix,
    native_transpose,
    run_typed,
    sum_type,
)


@custom_op("gas::edge_conv", "gas.nn.edge_conv")
def edge_conv(
    matrix: Sequence[Tensor],
    target: Tensor,
    source: Tensor,
    activation: str,
    parameter: float,
    mean: bool,
    keep_state: bool,
) -> tuple[Tensor, Tensor]:
    """Sum, or average, ``act(target[row] + source[col])`` over the entries of each row.

    Args:
        matrix: The fields of a :class:`Matrix`.
        target: Of shape ``[rows, width]``.
        source: Of shape ``[cols, width]``.
        activation: ``"relu"``, ``"leaky_relu"``, ``"elu"``, ``"sigmoid"`` or ``"tanh"``.
        parameter: The slope below zero of ``"leaky_relu"``, alpha of ``"elu"``.
        mean: Divide by the number of entries.
        keep_state: Whether a backward pass will follow.

    Returns:
        The sums, and the sums of the activation's derivative, each of shape ``[rows, width]``. The
        second is empty without ``keep_state``. Multiplied by the gradient of the first, it is the
        gradient of ``target``.
    """
    m, target, source = Matrix(*matrix), target.contiguous(), source.contiguous()
    if not native.has_kernels(target, source, m.col):
        out, slope = _edge_conv_torch(m, target, source, activation, parameter, mean)
        return out, slope if keep_state else out.new_empty(0)
    made = _new_sums(m, target, source, activation, parameter, mean, keep_state)
    options = _native_edge_conv(activation, parameter, target.size(1), mean)
    run_typed("edge_conv", target, native_matrix(m), options, target, source, *made)
    return made


@edge_conv.register_fake
def _new_sums(
    matrix: Sequence[Tensor], target: Tensor, source: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    (out,) = empty_like(target)
    return out, torch.empty_like(out) if how[-1] else out.new_empty(0)


@custom_op("gas::edge_conv_backward", "gas.nn.edge_conv")
def edge_conv_backward(
    matrix: Sequence[Tensor],
    target: Tensor,
    source: Tensor,
    activation: str,
    parameter: float,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of :func:`edge_conv` towards ``source``; ``grad``: its output's."""
    m, target, source = Matrix(*matrix), target.contiguous(), source.contiguous()
    grad = grad.contiguous()
    if not native.has_kernels(target, source, m.col):
        return _edge_conv_backward_torch(m, target, source, activation, parameter, grad)
    out = torch.empty_like(source)
    options = _native_edge_conv(activation, parameter, target.size(1), False)
    run_typed("edge_conv_backward", target, native_transpose(m), options, target, source, grad, out)
    return out


@edge_conv_backward.register_fake
def _(matrix: Sequence[Tensor], target: Tensor, source: Tensor, *_: Any) -> Tensor:
    return empty_like(source)[0]


@custom_op("gas::edge_conv_scale", "gas.nn.edge_conv")
def _scale_gradient(grad: Tensor, slope: Tensor, target: Tensor, source: Tensor) -> Tensor:
    # An operator of its own: the slope depends on target and source in a second derivative.
    return grad * slope


@_scale_gradient.register_fake
def _(grad: Tensor, slope: Tensor, target: Tensor, source: Tensor) -> Tensor:
    return torch.empty_like(slope)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    matrix, target, source, ctx.activation, ctx.parameter, ctx.mean, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*matrix, target, source, output[1])


def _grad(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    *parts, target, source, slope = ctx.saved_tensors
    grad_target = grad_source = None
    if ctx.needs_input_grad[1]:
        is_bent = ctx.activation not in ("relu", "leaky_relu")
        grad_target = _scale_gradient(grad, slope, target, source) if is_bent else grad * slope
    if ctx.needs_input_grad[2]:
        grad = divide_by_degree(Matrix(*parts), grad) if ctx.mean else grad
        grad_source = edge_conv_backward(parts, target, source, ctx.activation, ctx.parameter, grad)
    return NONE, grad_target, grad_source, None, None, None, None


edge_conv.register_autograd(_grad, setup_context=_setup)


def _native_edge_conv(activation: str, parameter: float, width: int, mean: bool) -> object:
    """Return the C++ struct of settings that the kernels take."""
    kind = getattr(native.C.Activation, activation.upper())
    return native.C.EdgeConv(kind, parameter, width, mean)


def _activate_torch(
    m: Matrix, target: Tensor, source: Tensor, activation: str, parameter: float
) -> tuple[Tensor, Tensor]:
    """Return the activation of every entry and its derivative, ``[entries, width]``."""
    kind = sum_type(target)
    x = target[m.row].to(kind) + source[m.col.long()].to(kind)
    if activation == "relu":
        return x.relu(), (x > 0).to(kind)
    if activation == "leaky_relu":
        slope = torch.where(x > 0, x.new_ones(()), parameter)
        return x * slope, slope
    if activation == "elu":
        below = x.clamp(max=0)
        return torch.where(x > 0, x, parameter * below.expm1()), torch.where(
            x > 0, x.new_ones(()), parameter * below.exp()
        )
    out = x.sigmoid() if activation == "sigmoid" else x.tanh()
    return out, out * (1 - out) if activation == "sigmoid" else 1 - out * out


def _edge_conv_torch(
    m: Matrix, target: Tensor, source: Tensor, activation: str, parameter: float, mean: bool
) -> tuple[Tensor, Tensor]:
    count = m.rowptr.diff().clamp(min=1)[:, None]

    def add_up(rows: Tensor) -> Tensor:
        out = rows.new_zeros(target.shape).index_add_(0, m.row, rows)
        return (out / count if mean else out).to(target.dtype)

    value, slope = _activate_torch(m, target, source, activation, parameter)
    return add_up(value), add_up(slope)


def _edge_conv_backward_torch(
    m: Matrix, target: Tensor, source: Tensor, activation: str, parameter: float, grad: Tensor
) -> Tensor:
    _, slope = _activate_torch(m, target, source, activation, parameter)
    rows = slope * grad[m.row].to(slope)
    out = rows.new_zeros(source.shape).index_add_(0, m.col.long(), rows)
    return out.to(source.dtype)
