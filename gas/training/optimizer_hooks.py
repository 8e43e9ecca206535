"""Hooks of an optimizer's steps: averaged weights, and a learning rate that rises."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gas.scalable import ScalableGNN
from gas.training.record import Progress, Run

WARM_UP = 40  # Steps over which the learning rate of a model without batch norms rises.


def check_hooks(optimizer: object, cure: str) -> None:
    """Refuse an optimizer whose steps can't be followed; ``cure`` is the option without."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"'optimizer' is of type {type(optimizer).__name__}, whose steps can't be followed: "
            f"pass a torch.optim.Optimizer, or {cure}"
        )


class AveragedWeights:
    """Average the weights of a model exponentially, after every step of its optimizer.

    A step of a mini-batch is noisy, and with a constant learning rate the weights jump around a
    point that is better than any of them: their average.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters.
        steps: Average over about this many steps, and over fewer at the start, so that the first
            weights are forgotten, in float32 or better. With 1 step the weights are their own
            average, and nothing is stored.

    Raises:
        ValueError: If ``optimizer`` isn't one of PyTorch's.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: float
    ) -> None:
        self._steps, self._decay = 0, 1 - 1 / max(steps, 1)
        self._weights: list[torch.nn.Parameter] = []
        self._average: list[Tensor] = []
        self._hook: Any = None
        if not self.is_on:
            return
        check_hooks(optimizer, "average_weights=False")
        self._weights = [weight for weight in model.parameters() if weight.is_floating_point()]
        self._average = [_at_least_float32(weight).clone() for weight in self._weights]
        self._hook = optimizer.register_step_post_hook(self._update)

    @property
    def is_on(self) -> bool:
        """Return whether there is anything to average."""
        return self._decay > 0

    def stop(self) -> None:
        """Stop averaging: remove the hook from the optimizer, and keep the average as it is."""
        if self._hook is not None:
            self._hook.remove()

    @torch.no_grad()
    def _update(self, *_: object) -> None:
        """Add the weights after a step to the average."""
        self._steps += 1
        decay = min(self._decay, self._steps / (10 + self._steps))
        update = get_ema_multi_avg_fn(decay)
        update(self._average, [_at_least_float32(weight) for weight in self._weights], self._steps)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the model the averaged weights in this context."""
        before = [weight.detach().clone() for weight in self._weights]
        self.load_into_model()
        try:
            yield
        finally:
            _copy(before, self._weights)

    def load_into_model(self) -> None:
        """Give the model the averaged weights."""
        _copy(self._average, self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps, for a checkpoint."""
        return {"average": self._average, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        _copy(state["average"], self._average)
        self._steps = state["steps"]


def steps_per_epoch(
    loader: Iterable[Any], micro_batches: int = 1, max_steps: int | None = None
) -> float:
    """Return how many steps :func:`gas.training.train_epoch` makes; infinity if it isn't known."""
    steps = math.inf if max_steps is None else max_steps
    if isinstance(loader, Sized):
        steps = min(steps, math.ceil(len(loader) / micro_batches))
    return steps


def choose_warm_up(model: ScalableGNN, warm_up: int | None) -> int:
    """Return the number of steps of :func:`raise_rate` for a model.

    Args:
        model: The model.
        warm_up: The number of steps; if ``None``, 0 for a model with a batch norm for each history,
            which learns at once, and 40 for others.
    """
    if warm_up is not None:
        return warm_up
    norms = sum(isinstance(module, _BatchNorm) for module in model.modules())
    return 0 if norms and norms >= len(model.histories) else WARM_UP


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

    with contextlib.ExitStack() as hooks:
        if warm_up > 0:
            check_hooks(optimizer, "warm_up=0")
            hooks.callback(restore_all)  # After a step that raised an error.
            hooks.callback(optimizer.register_step_pre_hook(scale_rates).remove)
            hooks.callback(optimizer.register_step_post_hook(restore_rates).remove)
        yield


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


@torch.no_grad()
def _copy(values: list[Tensor], to: list[Tensor] | list[torch.nn.Parameter]) -> None:
    for value, target in zip(values, to, strict=True):
        target.copy_(value)


def check_state(model: torch.nn.Module) -> None:
    """Refuse a model whose ``state_dict`` can't be loaded into it at the end of a training.

    Raises:
        ValueError: If it lacks parameters, or has names that the model doesn't have.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    state = {name for name in model.state_dict() if not name.endswith("_extra_state")}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    wrong = sorted(known.keys() - state) + sorted(state - known.keys() - buffers.keys())
    if wrong:
        raise ValueError(
            f"'model' has a state_dict that doesn't fit its parameters, such as {wrong[0]!r}, and "
            "the best weights couldn't be loaded: PyG's Linear doesn't save what weight_norm, "
            "spectral_norm or pruning makes of its weight; put a torch.nn.Linear in its place, or "
            "pass keep_best=False"
        )


def load_kept_weights(
    model: ScalableGNN, run: Run, average: AveragedWeights, inference: Any, has_norms: bool
) -> None:
    """Load the weights of the best epoch, or the average, and fill the histories by them.

    The record forgets an epoch that was interrupted. If the last epoch wasn't evaluated, its norms
    get their statistics now.
    """
    run.forget_unfinished()
    average.stop()
    if run.best is not None:
        model.load_state_dict(run.best.state)
    elif len(run):
        average.load_into_model()
    if len(run):
        is_due = has_norms and run.best is None and math.isnan(run.val_acc[-1])
        model.train(is_due or model.training).refresh(inference, norms=is_due, log=False)
    model.eval()
