"""The errors of a training that diverges: it stops, and says where and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gas.scalable import ScalableGNN
from gas.training.metrics import known_targets, metric_of

MOST_LOSS = 1e6  # Of a mean loss, in nats, or relative to the mean square of real targets.
CURE = (
    "training diverged. Take a smaller learning rate, such as lr=0.001, clip gradients "
    "(grad_norm=1), or scale features to about 1; where autocast computes or histories store in "
    "half precision, take float32"
)


def diverged(epoch: int | None, batch: int | None, loss: float) -> FloatingPointError:
    """Make the error of a loss that isn't finite, in an epoch and at a batch that count from 1."""
    where = " in" * (epoch is not None or batch is not None)
    where += "" if epoch is None else f" epoch {epoch}"
    where += "," * (epoch is not None and batch is not None)
    where += "" if batch is None else f" batch {batch}"
    return FloatingPointError(f"the loss is {loss}{where}: {CURE}")


def first_not_finite(losses: Sequence[tuple[int, Tensor]]) -> tuple[int, float] | None:
    """Return the number and the loss of the first batch whose loss isn't finite."""
    if not losses:
        return None
    values = torch.stack([loss for _, loss in losses]).tolist()
    return next(
        (
            (number, value)
            for (number, _), value in zip(losses, values, strict=True)
            if not math.isfinite(value)
        ),
        None,
    )


def check_converged(model: ScalableGNN, loss: float, y: Tensor, epoch: int) -> None:
    """Refuse what a training has ended with, if it is of no use.

    Args:
        model: The model.
        loss: The mean loss of the last epoch.
        y: The targets that were trained on.
        epoch: The number of that epoch, from 1.

    Raises:
        FloatingPointError: If a weight isn't finite, or the loss is a million times that of
            predicting zero, which no training ends with.
    """
    name = name_not_finite(dict(model.named_parameters()))
    if name is not None:
        raise FloatingPointError(f"{name!r} isn't finite after epoch {epoch}: {CURE}")
    if not is_usable(loss, y):
        raise FloatingPointError(f"the loss is {loss:.3g} after epoch {epoch}: {CURE}")


def name_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a value that isn't finite.

    A device is waited for once.
    """
    real = {key: value for key, value in tensors.items() if value.is_floating_point()}
    if not real:
        return None
    is_finite = torch.stack([torch.isfinite(value.detach()).all() for value in real.values()])
    return next((key for key, good in zip(real, is_finite.tolist(), strict=True) if not good), None)


def is_usable(loss: float, y: Tensor) -> bool:
    """Return whether a mean loss is below the largest that a training ends with; NaN isn't."""
    known = y[known_targets(y)].double()
    has_scale = known.numel() > 0 and metric_of(y) == "r2"
    scale = float(known.square().mean()) if has_scale else 1.0
    return loss <= MOST_LOSS * (scale or 1.0)
