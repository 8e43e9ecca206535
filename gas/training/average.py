"""Average of the weights over the steps of about an epoch, and which weights are kept."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from gas.scalable import ScalableGNN
from gas.training.record import Run


class AveragedWeights:
    """Average the weights of a model exponentially, after every step of its optimizer.

    A step of a mini-batch is noisy, and with a constant learning rate the weights jump around a
    point that is better than any of them: their average.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters.
        steps: Average over about this many steps, and over fewer at the start, so that the first
            weights are forgotten, in float32 or better. Of one step, the weights are the average,
            and nothing is kept.

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
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"'optimizer' is of type {type(optimizer).__name__}, whose steps can't be "
                "followed: pass a torch.optim.Optimizer, or average_weights=False"
            )
        self._weights = [weight for weight in model.parameters() if weight.is_floating_point()]
        self._average = [_at_least_float32(weight).clone() for weight in self._weights]
        self._hook = optimizer.register_step_post_hook(self._update)

    @property
    def is_on(self) -> bool:
        """Return whether there is anything to average."""
        return self._decay > 0

    def stop(self) -> None:
        """Ignore further steps of the optimizer."""
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


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


@torch.no_grad()
def _copy(values: list[Tensor], to: list[Tensor] | list[torch.nn.Parameter]) -> None:
    for value, target in zip(values, to, strict=True):
        target.copy_(value)


def load_kept_weights(
    model: ScalableGNN, run: Run, average: AveragedWeights, inference: Any, has_norms: bool
) -> None:
    """Load the weights of the best epoch, or the average, and fill the histories by them.

    If the last epoch wasn't evaluated, its norms get their statistics now.
    """
    average.stop()
    if run.best is not None:
        model.load_state_dict(run.best.state)
    elif len(run):
        average.load_into_model()
    if len(run):
        is_due = has_norms and run.best is None and math.isnan(run.val_acc[-1])
        model.train(is_due or model.training).refresh(inference, norms=is_due, log=False)
    model.eval()
