"""Sums, means and extremes over neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gas.graph import Adjacency
from gas.history import ROWS_HINT, Features, Rows
from gas.native import TYPES, Matrix, custom_op, gather_rows
from gas.native import sparse as kernels
from gas.nn.half import HALF, compute_dtype, message_dtype

REDUCES = ("sum", "mean", "max", "min")

NONE = [None] * len(Matrix._fields)  # The gradients towards a matrix.


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
    """See :func:`gas.native.sparse.multiply`."""
    # Halo rows, which follow the rows of `x`, are those of `other` at `place`.
    m = matrix if isinstance(matrix, Matrix) else Matrix(*matrix)
    how = mean, transposed, num_rows
    return kernels.multiply(m, weight, x.contiguous(), *how, other, place)


@multiply.register_fake
def _(
    matrix: Sequence[Tensor],
    weight: Tensor | None,
    x: Tensor,
    other: Tensor | None,
    place: Tensor | None,
    mean: bool,
    transposed: bool,
    num_rows: int | None,
) -> Tensor:
    m = Matrix(*matrix)
    if num_rows is None:
        num_rows = m.num_cols if transposed else m.num_rows
    return x.new_empty(num_rows, x.size(1))


@custom_op("gas::dot_rows", "gas.nn.spmm")
def _dot_rows_op(
    matrix: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """Return ``<a[row], b[col]>`` for each entry: the gradient of a product's weights."""
    return kernels.dot_rows(Matrix(*matrix), a.contiguous(), b.contiguous())


@_dot_rows_op.register_fake
def _(
    matrix: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
) -> Tensor:
    return a.new_empty(Matrix(*matrix).col.numel())


def _dot_rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, a, b = inputs
    ctx.save_for_backward(*matrix, a, b)


def _dot_rows_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, a, b = ctx.saved_tensors
    grads = [
        multiply(parts, grad.contiguous(), other, None, None, False, transposed, None)
        if needed
        else None
        for needed, other, transposed in zip(
            ctx.needs_input_grad[1:], (b, a), (False, True), strict=True
        )
    ]
    return NONE, *grads


_dot_rows_op.register_autograd(_dot_rows_backward, setup_context=_dot_rows_setup)


def _multiply_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, weight, x, _, _, mean, transposed, num_rows = inputs
    ctx.mean, ctx.transposed, ctx.num_rows = mean, transposed, x.size(0)
    ctx.padding = 0 if num_rows is None else Matrix(*matrix).num_cols - num_rows
    learns = weight is not None and weight.requires_grad
    ctx.save_for_backward(*matrix, weight, x if learns else None)


def _multiply_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, weight, x = ctx.saved_tensors
    if ctx.padding:
        grad = F.pad(grad, (0, 0, 0, ctx.padding))
    if ctx.mean:
        grad = grad / Matrix(*parts).rowptr.diff().clamp(min=1).to(grad.dtype)[:, None]
    _, needs_weight, needs_x, *_ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if needs_x:
        back = not ctx.transposed
        rows = ctx.num_rows if back else None
        grad_x = multiply(parts, weight, grad, None, None, False, back, rows)
    if needs_weight:
        pair = (x, grad) if ctx.transposed else (grad, x)
        grad_weight = _dot_rows_op(parts, *pair)
    return NONE, grad_weight, grad_x, None, None, None, None, None


multiply.register_autograd(_multiply_backward, setup_context=_multiply_setup)


@custom_op("gas::extreme", "gas.nn.spmm")
def _extreme(
    matrix: Sequence[Tensor],
    x: Tensor,
    own: Tensor | None,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    return kernels.extreme(Matrix(*matrix), x.contiguous(), largest)


@_extreme.register_fake
def _(
    matrix: Sequence[Tensor],
    x: Tensor,
    own: Tensor | None,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(Matrix(*matrix).num_rows, x.size(1))
    return out, torch.empty_like(out, dtype=torch.int32)


@custom_op("gas::extreme_backward", "gas.nn.spmm")
def _extreme_backward(
    matrix: Sequence[Tensor],
    grad: Tensor,
    entry: Tensor,
    num_rows: int,
) -> Tensor:
    return kernels.extreme_backward(Matrix(*matrix), grad.contiguous(), entry, num_rows)


@_extreme_backward.register_fake
def _(
    matrix: Sequence[Tensor],
    grad: Tensor,
    entry: Tensor,
    num_rows: int,
) -> Tensor:
    return grad.new_empty(num_rows, grad.size(1))


def _extreme_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, _, entry, ctx.num_rows = inputs
    ctx.save_for_backward(*matrix, entry)


def _extreme_backward_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, entry = ctx.saved_tensors
    col = F.pad(Matrix(*parts).col.long(), (0, 1), value=ctx.num_rows)  # Of no entry, -1: zeros.
    row = col[entry.long()].clamp(max=ctx.num_rows)
    return NONE, F.pad(grad, (0, 0, 0, 1)).gather(0, row), None, None


_extreme_backward.register_autograd(_extreme_backward_grad, setup_context=_extreme_backward_setup)


def _extreme_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    matrix, x, own, _ = inputs
    ctx.num_rows = x.size(0) if own is None else own.size(0)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*matrix, output[1])


def _extreme_grad(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    *parts, entry = ctx.saved_tensors
    grad_x = _extreme_backward(parts, grad, entry, ctx.num_rows)
    needs_own = ctx.needs_input_grad[2]
    return NONE, None if needs_own else grad_x, grad_x if needs_own else None, None


_extreme.register_autograd(_extreme_grad, setup_context=_extreme_setup)


def spmm(
    adj: Adjacency, x: Tensor | Rows, weight: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """Aggregate the rows of each node's neighbours: ``out[i]`` from ``x[j]`` for edges ``j -> i``.

    Deterministic: each row of the output, and of the gradient, is added up in one order. In
    :class:`gas.history.Rows`, halo rows get no gradient; sums and means read them in place, unless
    ``weight`` needs a gradient. On a GPU where
    :func:`gas.native.measure_costs.measure` found cuSPARSE faster, cuSPARSE computes sums in
    float32, unless ``torch.use_deterministic_algorithms`` is set.

    Args:
        adj: The edges, of shape ``[rows, cols]``.
        x: Features of the sources, of shape ``[cols, width]``, float32, float64, or bfloat16 or
            float16, which are added up in float32; a tensor or :class:`gas.history.Rows`.
        weight: The weight of each edge, of shape ``[E]``, of the type of ``x``; gradients reach it.
            (default: ``adj.value``; none for ``"max"`` and ``"min"``)
        reduce: ``"sum"``, ``"mean"`` (over the number of edges), ``"max"`` or ``"min"``; nodes
            without edges get zero. Of equal extremes, the first takes the gradient.
            (default: ``"sum"``)

    Returns:
        Of shape ``[rows, width]`` and the type of ``x``; of float16, the type of a message, which
        is that of an edge's weight if that is wider.

    Raises:
        ValueError: If shapes or types don't fit, naming the argument.
    """
    if reduce not in REDUCES:
        raise ValueError(f"'reduce' is {reduce!r}, expected one of {', '.join(REDUCES)}")
    check_features(adj, x, 2, takes_rows=True)
    if x.dtype == HALF:
        kind = HALF
        if weight is not None:
            check_tensors(adj, weight=weight)
            kind = message_dtype(x, weight)
            weight = weight.to(compute_dtype(kind))
        elif adj.value is not None and reduce in ("sum", "mean"):
            kind = message_dtype(x, adj.value)
        x = (x.tensor() if isinstance(x, Rows) else x).to(compute_dtype(kind))
        return spmm(adj, x, weight, reduce).to(kind)
    if reduce in ("max", "min"):
        if weight is not None:
            raise ValueError(f"'weight' is given, but reduce={reduce!r} has no use for it")
        if not isinstance(x, Rows):
            return _extreme(adj.matrix_for(x), x, None, reduce == "max")[0]
        values = torch.cat([x.own.detach(), x.halo_tensor()])
        return _extreme(adj.matrix_for(x.own), values, x.own, reduce == "max")[0]
    if weight is None and (sums := find_sums(adj, x, reduce)) is not None:
        assert isinstance(x, Features)
        return gather_rows(sums, x.index[: x.num_own])
    if weight is None and adj.value is not None:
        weight = adj.value.to(x.dtype)
    if weight is not None:
        check_tensors(adj, weight=weight)
        if weight.shape != adj.col.shape or weight.dtype != x.dtype:
            raise ValueError(
                f"'weight' is {weight.dtype} of shape {list(weight.shape)}, expected {x.dtype} of "
                f"shape [{adj.num_entries}]: one for each edge"
            )
        weight = weight.contiguous()
    other = place = None
    if isinstance(x, Rows):
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            x = x.tensor()  # The backward pass needs a copy, as rows may change.
        else:
            x, other, place = x.kernel_inputs()
    return multiply(adj.matrix_for(x), weight, x, other, place, reduce == "mean", False, None)


def find_sums(adj: Adjacency, x: Tensor | Rows, reduce: str = "sum") -> Tensor | None:
    """Return the sums of all nodes, if they were computed for the whole graph."""
    if not isinstance(x, Features) or x.find_sums is None or adj.size(0) != x.num_own:
        return None
    return x.find_sums(adj, reduce, spmm)


def check_features(
    adj: Adjacency, x: Tensor | Rows, dims: int, name: str = "x", takes_rows: bool = False
) -> None:
    """Raise ``ValueError`` unless ``x`` has a row for each source, of a dtype of the kernels.

    Raise ``TypeError`` for :class:`Rows`, unless ``takes_rows``.
    """
    if isinstance(x, Rows) and not takes_rows:
        raise TypeError(f"{name!r} is Rows, expected a tensor: {ROWS_HINT}")
    if not isinstance(adj, Adjacency):
        raise ValueError(
            f"'adj' is a {type(adj).__name__}, expected a gas.nn.Adjacency: use Adjacency.of(adj), "
            "or a loader with layout='fused'"
        )
    shape, num_cols = x.shape, adj.size(1)
    if len(shape) != dims or shape[0] != num_cols:
        raise ValueError(
            f"'{name}' has shape {list(shape)}, expected {dims} dimensions and one row for each "
            f"of the {num_cols} columns of 'adj'"
        )
    stored = x.prototype() if isinstance(x, Rows) else x
    check_tensors(adj, **{name: stored})
    if stored.dtype not in TYPES and stored.dtype != HALF:
        names = ", ".join((*TYPES.values(), "float16"))
        raise ValueError(f"'{name}' has dtype {stored.dtype}, expected one of {names}")


def check_tensors(adj: Adjacency, **tensors: Tensor) -> None:
    """Raise ``ValueError`` unless tensors are dense, real and on the adjacency's device."""
    device = adj.col.device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"'{name}' is on {tensor.device}, but 'adj' is on {device}: move one to the "
                "other, adj.to(device)"
            )
        if tensor.layout != torch.strided or tensor.is_complex():
            raise ValueError(
                f"'{name}' is {tensor.dtype} and {tensor.layout}, expected real numbers in a dense "
                "tensor"
            )
