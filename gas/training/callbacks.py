"""Callbacks of :func:`gas.fit`: what is called during training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gas.training.record import Progress, Run, is_true


class Callback:
    """Base class of callbacks of :func:`gas.fit`; a subclass overrides the methods it needs.

    ::

        class StopAt(gas.training.Callback):
            def __init__(self, score):
                self.score = score

            def on_epoch_end(self, run):
                return run.val_acc[-1] >= self.score  # True ends the training.
    """

    def on_fit_start(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for a training.

        Args:
            model: The model.
            optimizer: Its optimizer.
        """

    def on_step_end(self, progress: Progress) -> None:
        """Handle the end of an optimizer's step, for example to step a scheduler.

        The model has the weights of training, not their average.

        Args:
            progress: The progress of the epoch: its batches and steps so far, and the sum of the
                losses.
        """

    def on_epoch_end(self, run: Run) -> bool | None:
        """Handle the end of an epoch, after its evaluation, if any; ``True`` ends the training.

        Args:
            run: The record so far. The model has the weights that are scored: their average,
                unless ``average_weights=False``. Changes of an average aren't kept. Norms have the
                statistics of the last evaluation.
        """

    def on_fit_end(self, run: Run) -> None:
        """Handle the end of a training; an error or Ctrl-C ends it, too.

        Args:
            run: The record.
        """


class MetricLogger(Callback):
    """Log of every epoch's losses, scores, learning rate and staleness, for an experiment tracker.

    ::

        gas.fit(..., callbacks=[MetricLogger(wandb.log)])  # After wandb.init(...).
        gas.fit(..., callbacks=[MetricLogger(trackio.log)])
        gas.fit(..., callbacks=[MetricLogger(mlflow.log_metrics)])
        gas.fit(..., callbacks=[MetricLogger(SummaryWriter("events"))])  # TensorBoard.

    Args:
        log: A function of values by name, and of ``step``, the number of the epoch from 1; or a
            ``torch.utils.tensorboard.SummaryWriter``.
    """

    NAMES = ("loss", "train_acc", "val_acc", "test_acc", "age", "drift", "seconds", "lr")

    def __init__(self, log: Any) -> None:
        self._add_scalar = getattr(log, "add_scalar", None)
        if self._add_scalar is None and not callable(log):
            raise ValueError(
                f"'log' is a {type(log).__name__}, expected a function such as wandb.log, or a "
                "SummaryWriter"
            )
        self._log = log

    def on_epoch_end(self, run: Run) -> None:
        """Log the last entries of the record; those that aren't finite are left out."""
        curves = {name: getattr(run, name) for name in self.NAMES} | run.metrics
        values = {name: curve[-1] for name, curve in curves.items() if curve}
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if self._add_scalar is None:
            self._log(values, step=len(run))
            return
        for name, value in values.items():
            self._add_scalar(name, value, len(run))


class CallbackList(Callback):
    """All callbacks of a training as one: the given ones, functions, and the scheduler at last."""

    def __init__(
        self,
        callbacks: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        on_epoch: Callable[[Run], Any] | None,
        on_step: Callable[[], Any] | None,
    ) -> None:
        is_list = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
        for each in callbacks if is_list else [callbacks]:
            if each is callbacks or not isinstance(each, Callback):
                what = "is" if each is callbacks else "has"
                raise ValueError(
                    f"'callbacks' {what} a {type(each).__name__}, expected a list of instances of "
                    "gas.training.Callback; a function of the run so far is 'on_epoch'"
                )
        for name, function in (("on_epoch", on_epoch), ("on_step", on_step)):
            if function is not None and not callable(function):
                raise ValueError(f"'{name}' is {function!r}, expected a function")
        if scheduler is not None:
            check_scheduler(scheduler, optimizer)
        self._callbacks, self._scheduler = list(callbacks), scheduler
        self._optimizer, self._on_epoch, self._on_step = optimizer, on_epoch, on_step
        self._started: list[Callback] = []

    def on_fit_start(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Call all."""
        for each in self._callbacks:
            self._started.append(each)
            each.on_fit_start(model, optimizer)

    def on_step_end(self, progress: Progress) -> None:
        """Call all."""
        if self._on_step is not None:
            self._on_step()
        for each in self._callbacks:
            each.on_step_end(progress)

    def on_epoch_end(self, run: Run) -> bool:
        """Record the learning rate, call all, and step the scheduler; return whether one stops."""
        run.lr.append(float(self._optimizer.param_groups[0]["lr"]))
        if self._on_epoch is not None:
            self._on_epoch(run)
        ends = [each.on_epoch_end(run) for each in self._callbacks]
        if isinstance(self._scheduler, ReduceLROnPlateau):
            if not math.isnan(run.val_acc[-1]):  # Else this epoch wasn't evaluated.
                self._scheduler.step(run.val_acc[-1])
        elif self._scheduler is not None:
            self._scheduler.step()
        return any(map(is_true, ends))

    def on_fit_end(self, run: Run) -> None:
        """Call all that were started, also if one of them fails."""
        with contextlib.ExitStack() as ends:
            for each in reversed(self._started):
                ends.callback(each.on_fit_end, run)


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a learning rate scheduler of another optimizer, or one that waits for a decrease."""
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise ValueError(
            f"'scheduler' is a {type(scheduler).__name__}, expected one of torch.optim.lr_scheduler"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("'scheduler' is of another optimizer: make it of 'optimizer'")
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != "max":
        raise ValueError(
            "'scheduler' has mode='min', but it gets the validation score, which rises: pass "
            "mode='max'"
        )


def check_metrics(metrics: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse metrics that aren't functions by name; ``"acc"`` is the name of the score."""
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"'metrics' is a {type(metrics).__name__}, expected a dictionary of functions by name"
        )
    for name, function in metrics.items():
        if name == "acc" or not isinstance(name, str) or not callable(function):
            raise ValueError(
                f"'metrics' has {name!r}: {function!r}, expected functions of outputs and targets "
                "by name, such as {'f1': torchmetrics.F1Score('multiclass', num_classes=3)}; 'acc' "
                "is the score of 'metric'"
            )
