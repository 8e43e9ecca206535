"""A learning rate that rises in the first steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gas.training.record import Progress


@contextlib.contextmanager
def raise_rate(
    optimizer: torch.optim.Optimizer, warm_up: int, progress: Progress, steps: float
) -> Iterator[None]:
    """Raise the learning rate linearly over the first steps of a training in this context.

    Weights move most in the first steps. All stored rows are stale then at once, and at a high
    learning rate a model without a norm can end where it predicts one class, and stay there.

    A step's rate is that of the optimizer, which a scheduler may change, times a factor.

    Args:
        optimizer: The optimizer.
        warm_up: The number of steps until its own rate is reached; ``0`` leaves it as it is.
        progress: The progress of the epoch, with its number, as :func:`gas.training.run_epochs`
            sets it.
        steps: The number of steps per epoch, see :func:`gas.training.steps_per_epoch`. If it is
            infinity, the rate rises within the first epoch alone.

    Raises:
        ValueError: If ``optimizer`` isn't one of PyTorch's, or a step is taken in an epoch without
            a number.
    """
    rates: list[Any] = []
    depth = 0  # The step of a subclass may call that of its base, which calls the hooks, too.

    def scale_rates(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth > 1:
            return
        if progress.epoch is None:
            raise ValueError(
                "'progress' has no number of the epoch, by which the rate rises: train by "
                "gas.training.run_epochs, or pass warm_up=0"
            )
        before = 0.0 if progress.epoch == 1 else (progress.epoch - 1) * steps
        share = min(1.0, (before + progress.steps + 1) / warm_up)
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * share

    def restore_rates(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            restore_all()

    def restore_all() -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=bool(rates)):
            group["lr"] = rate
        rates.clear()

    check_optimizer(optimizer, warm_up)
    with contextlib.ExitStack() as hooks:
        if warm_up > 0:
            hooks.callback(restore_all)  # After a step that raised an error.
            hooks.callback(optimizer.register_step_pre_hook(scale_rates).remove)
            hooks.callback(optimizer.register_step_post_hook(restore_rates).remove)
        yield


def check_optimizer(optimizer: torch.optim.Optimizer, warm_up: int) -> None:
    """Refuse an optimizer whose steps can't be followed."""
    if warm_up > 0 and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"'optimizer' is of type {type(optimizer).__name__}, whose learning rate can't be "
            "raised step by step: pass a torch.optim.Optimizer, or warm_up=0"
        )
