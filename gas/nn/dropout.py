"""Dropout whose random numbers cost no more than reading the tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gas import _native
from gas.nn.halo import in_batch, remember


class _Dropout(torch.autograd.Function):
    """Keeps a seed for the backward pass, not a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return _native.dropout(x, p, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad, ctx.p, ctx.seed), None, None


class _InBatchDropout(torch.autograd.Function):
    """Drops elements of in-batch rows and of a halo, with gradient towards the former alone."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Tensor, p: float, seed: int) -> tuple[Tensor, Tensor]:
        ctx.p, ctx.seed, ctx.size = p, seed, own.size(0)
        ctx.set_materialize_grads(False)
        out = _native.dropout(rows, p, seed)
        return out, out[: ctx.size].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_own: Tensor | None) -> tuple[Any, ...]:
        if grad is not None:
            first = grad[: ctx.size]
            grad_own = first if grad_own is None else grad_own + first
        if grad_own is None:
            return None, None, None, None
        return _Dropout.apply(grad_own, ctx.p, ctx.seed), None, None, None


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Sets each element to zero with probability ``p`` and scales the rest by ``1 / (1 - p)``.

    Like ``torch.nn.functional.dropout``, which on the CPU draws its random numbers one after the
    other and takes most of a small model's epoch. This one computes each from its position, in
    parallel, and again in the backward pass; ``torch.manual_seed`` makes it repeatable. On other
    devices, and for other types than float32 and float64, it is PyTorch's.

    Args:
        x: A tensor of any shape.
        p: The probability of dropping an element, in ``[0, 1]``. (default: ``0.5``)
        training: Whether to drop at all. (default: ``True``)
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"'p' is {p}, expected a probability in [0, 1]")
    if not training or p == 0.0:
        return x
    native = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not native or p == 1.0:
        return F.dropout(x, p)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    own = in_batch(x)
    if own is None:
        return _Dropout.apply(x, p, seed)
    return remember(*_InBatchDropout.apply(own, x.detach(), p, seed))
