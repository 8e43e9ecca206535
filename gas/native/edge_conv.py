"""Sums of an activation over edges: the native kernel, and its pure-torch twin."""

from __future__ import annotations

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.matrix import Matrix, native_matrix, native_transpose, run_typed, sum_type


def edge_conv(
    m: Matrix,
    target: Tensor,
    source: Tensor,
    activation: str,
    parameter: float,
    mean: bool,
    keep_state: bool,
) -> tuple[Tensor, Tensor]:
    """Sum ``act(target[row] + source[col])`` over the entries of each row.

    Args:
        m: The matrix.
        target: Of shape ``[rows, width]``, contiguous.
        source: Of shape ``[cols, width]``, contiguous.
        activation: ``"relu"``, ``"leaky_relu"``, ``"elu"``, ``"sigmoid"`` or ``"tanh"``.
        parameter: The slope below zero of ``"leaky_relu"``, alpha of ``"elu"``.
        mean: Divide by the number of entries.
        keep_state: Whether a backward pass will follow.

    Returns:
        The sums, and those of the derivative, by which the gradient towards ``target`` is the one
        towards the sums; each of shape ``[rows, width]``.
    """
    if not native.has_kernels(target, source, m.col):
        return _edge_conv_torch(m, target, source, activation, parameter, mean)
    out = torch.empty_like(target)
    slope = torch.empty_like(target) if keep_state else target.new_empty(0)
    options = _native_edge_conv(activation, parameter, target.size(1), mean)
    run_typed("edge_conv", target, native_matrix(m), options, target, source, out, slope)
    return out, slope


def edge_conv_backward(
    m: Matrix, target: Tensor, source: Tensor, activation: str, parameter: float, grad: Tensor
) -> Tensor:
    """Return the gradient of :func:`edge_conv` towards ``source``; ``grad``: its output's."""
    if not native.has_kernels(target, source, m.col):
        return _edge_conv_backward_torch(m, target, source, activation, parameter, grad)
    out = torch.empty_like(source)
    options = _native_edge_conv(activation, parameter, target.size(1), False)
    run_typed("edge_conv_backward", target, native_transpose(m), options, target, source, grad, out)
    return out


def _native_edge_conv(activation: str, parameter: float, width: int, mean: bool) -> object:
    """Return the settings of the operator for the kernels."""
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
