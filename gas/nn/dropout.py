"""Dropout with counter-based random numbers, drawn in parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import BatchNorm1d, Module

from gas.history import Features, Rows
from gas.native import (
    check_probability,
    is_plain,
    is_sparse,
    norm_relu_dropout,
    norm_relu_dropout_backward,
    relu_dropout_backward,
)
from gas.native import dropout as drop_elements
from gas.native import relu_dropout as relu_and_drop
from gas.nn.sparse_features import check_layout, has_hooks, replace_values

BATCH_NORMS = (BatchNorm1d, pyg.BatchNorm)


class _Dropout(torch.autograd.Function):
    """Function that saves a seed for the backward pass instead of a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return drop_elements(x, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad, ctx.p, ctx.seed), None, None


class _ReluDropout(torch.autograd.Function):
    """Function that saves its output, as convolutions do, instead of that of ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
        relu, dropped = relu_and_drop(x, p, seed)
        ctx.p = p
        ctx.mark_non_differentiable(relu)
        ctx.set_materialize_grads(False)  # Of `relu`, which has none.
        ctx.save_for_backward(dropped)
        return relu, dropped

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        return _KeepGradient.apply(grad, ctx.saved_tensors[0], ctx.p), None, None


class _KeepGradient(torch.autograd.Function):
    """Gradient of :class:`_ReluDropout`, and its own."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, dropped: Tensor, p: float) -> Tensor:
        ctx.p = p
        ctx.save_for_backward(dropped)
        return relu_dropout_backward(grad, dropped, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _KeepGradient.apply(grad, ctx.saved_tensors[0], ctx.p), None, None


class _NormReluDropout(torch.autograd.Function):
    """Function that saves the input and the output, and nothing in between."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
        eps: float, p: float, seed: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        inverse = (var + eps).rsqrt()
        relu, dropped = norm_relu_dropout(x, mean, inverse * weight, bias, p, seed)
        ctx.eps, ctx.p = eps, p
        ctx.mark_non_differentiable(relu)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dropped, x, mean, inverse, weight, bias)
        return relu, dropped

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        dropped, x, mean, inverse, weight, bias = ctx.saved_tensors
        if not torch.is_grad_enabled():
            grads = norm_relu_dropout_backward(grad, dropped, x, mean, inverse, weight, ctx.p)
            return *grads, *(None,) * 5
        # Of gradients that need gradients, PyTorch's.
        grad = _KeepGradient.apply(grad, dropped, ctx.p)
        inputs = [each if each.requires_grad else None for each in (x, weight, bias)]
        normalised = F.batch_norm(x, None, None, weight, bias, training=True, eps=ctx.eps)
        found = iter(
            torch.autograd.grad(
                normalised, [each for each in inputs if each is not None], grad, create_graph=True
            )
        )
        return *(None if each is None else next(found) for each in inputs), *(None,) * 5


@overload
def dropout(x: Tensor, p: float = ..., training: bool = ...) -> Tensor: ...


@overload
def dropout(x: Rows, p: float = ..., training: bool = ...) -> Rows: ...


def dropout(x: Tensor | Rows, p: float = 0.5, training: bool = True) -> Tensor | Rows:
    """Set each element to zero with probability ``p`` and scale the rest by ``1 / (1 - p)``.

    ``torch.nn.functional.dropout`` draws random numbers sequentially on the CPU, which takes most
    of a small model's epoch. Here each number is computed from its position, in parallel, and again
    in the backward pass; ``torch.manual_seed`` makes it repeatable. PyTorch's function is used on
    other devices, for types other than float32 and float64, and under ``torch.compile`` and
    function transforms.

    For :class:`gas.history.Rows`, see :meth:`gas.ScalableGNN.push_and_pull`, only the batch's own
    rows are dropped; halo rows keep their stored values, which are the expectation under dropout.
    For :class:`gas.history.Features`, a batch's input features, all rows are dropped when they are
    read. For sparse features, a ``torch.sparse_csr`` matrix, stored values are dropped.

    Args:
        x: A tensor of any shape, a ``torch.sparse_csr`` matrix, or :class:`gas.history.Rows`.
        p: The probability of dropping an element, in ``[0, 1]``. (default: ``0.5``)
        training: Whether to drop at all. (default: ``True``)

    Raises:
        ValueError: If ``p`` is no probability, or ``x`` is sparse in another layout.
    """
    check_probability("p", p)
    if not training or p == 0.0:
        return x
    if isinstance(x, Features):
        if _is_native(x) and p < 1.0:
            return x.dropout(p, _seed())
        return Rows(dropout(x.own, p), dropout(x.halo_tensor(), p))
    if isinstance(x, Rows):
        return replace(x, own=dropout(x.own, p))
    if x.layout != torch.strided:
        check_layout(x)
        return replace_values(x, dropout(x.values(), p))
    if not _is_native(x) or p == 1.0 or not is_plain(x):
        return F.dropout(x, p)
    return _Dropout.apply(x, p, _seed())


def relu_dropout(x: Tensor, p: float, norm: Module | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x.relu()`` without gradient, and :func:`dropout` of it with gradient.

    On the CPU, one pass computes both, and another their gradient; results and random numbers are
    those of the two functions. Histories store the first, layers take the second.

    A batch norm in training mode joins them: its outputs and gradients are those of the norm but
    for rounding, and its running statistics are the same.

    Args:
        x: A tensor of any shape.
        p: The probability of dropping an element, in ``[0, 1]``.
        norm: A module that is applied to ``x`` first. (default: none)

    Raises:
        ValueError: If ``p`` is no probability.
    """
    check_probability("p", p)
    in_one_pass = 0.0 < p < 1.0 and _is_native(x) and is_plain(x)
    batch_norm = _find_batch_norm(norm, x) if in_one_pass else None
    if batch_norm is not None:
        mean, var = _update_statistics(batch_norm, x.detach())
        weight = torch.ones_like(mean) if batch_norm.weight is None else batch_norm.weight
        bias = torch.zeros_like(mean) if batch_norm.bias is None else batch_norm.bias
        return _NormReluDropout.apply(x, weight, bias, mean, var, batch_norm.eps, p, _seed())
    if norm is not None:
        x = norm(x)
        in_one_pass = in_one_pass and _is_native(x) and is_plain(x)
    if not in_one_pass:
        relu = x.relu()
        return relu.detach(), dropout(relu, p)
    return _ReluDropout.apply(x, p, _seed())


def _find_batch_norm(norm: Module | None, x: Tensor) -> BatchNorm1d | None:
    """Return the batch norm that is all that a module does to ``x``, by its own statistics."""
    if norm is None or type(norm) not in BATCH_NORMS:
        return None
    found = norm.module if isinstance(norm, pyg.BatchNorm) else norm
    if type(found) is not BatchNorm1d or not found.training:
        return None
    if any(has_hooks(each) or "forward" in vars(each) for each in (norm, found)):
        return None
    state = (found.weight, found.bias, found.running_mean, found.running_var)
    is_alike = all(each.dtype == x.dtype for each in state if each is not None)
    is_alike &= (found.running_mean is None) == (found.running_var is None)
    is_matrix = x.dim() == 2 and x.size(0) > 1 and x.size(1) == found.num_features
    return found if is_matrix and is_alike else None


def _update_statistics(norm: BatchNorm1d, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of columns; update the running ones as the norm does."""
    momentum, running = norm.momentum, (norm.running_mean, norm.running_var)
    if not norm.track_running_stats:
        running = None, None
    elif norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        momentum = 1.0 / float(norm.num_batches_tracked) if momentum is None else momentum
    mean, var = torch.batch_norm_update_stats(x.contiguous(), *running, momentum or 0.0)
    return mean, var


def _is_native(x: Tensor | Rows) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _seed() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


class Dropout(torch.nn.Dropout):
    """:class:`torch.nn.Dropout` by :func:`dropout`; with ``inplace=True`` it is PyTorch's."""

    def forward(self, input: Any) -> Any:
        """See :func:`dropout`."""
        if self.inplace and isinstance(input, Tensor) and not is_sparse(input):
            return super().forward(input)
        return dropout(input, self.p, self.training)
