"""A learning rate that rises in the first epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gas.training.record import Progress

SHARE = 10  # At most one in so many epochs.


@contextlib.contextmanager
def raise_rate(
    optimizer: torch.optim.Optimizer,
    warm_up: int,
    epochs: int,
    progress: Progress,
    steps: float,
) -> Iterator[None]:
    """Raise the learning rate linearly over the first epochs of a training in this context.

    Weights move most in the first steps. All stored rows are stale then at once, and at a high
    learning rate a model without a norm can end where it predicts one class, and stay there.

    A step's rate is that of the optimizer, which a scheduler may change, times a factor.

    Args:
        optimizer: The optimizer.
        warm_up: The number of epochs until its own rate is reached, at most a tenth of all; ``0``
            leaves it as it is.
        epochs: The number of all epochs.
        progress: The progress of the epoch, with its number.
        steps: The number of steps per epoch; infinity if it isn't known.
    """
    rising = min(warm_up, epochs // SHARE)
    rates: list[Any] = []

    def scale_rates(*_: object) -> None:
        if rates:  # The step of a base class, within that of a subclass.
            return
        done = (progress.epoch or 1) - 1 + (progress.steps + 1) / steps
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * min(1.0, max(done, 1 / SHARE) / rising)

    def restore_rates(*_: object) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=False):  # None if not scaled.
            group["lr"] = rate
        rates.clear()

    with contextlib.ExitStack() as hooks:
        if rising > 0:
            hooks.callback(restore_rates)  # After a step that raised an error.
            hooks.callback(optimizer.register_step_pre_hook(scale_rates).remove)
            hooks.callback(optimizer.register_step_post_hook(restore_rates).remove)
        yield
