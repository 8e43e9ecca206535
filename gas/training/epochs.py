"""The loop over epochs: training, evaluation and a record, by functions of the caller."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.native import check_integer, share_cores
from gas.scalable import ScalableGNN, moved_bytes
from gas.training.metrics import Metric, score, split_mask, usual_metric
from gas.training.optimizer_hooks import AveragedWeights
from gas.training.record import (
    BestEpoch,
    Progress,
    Run,
    check_not_diverged,
    find_nonfinite_tensor,
    is_true,
    is_usable,
    layer_ages,
    warn_if_unstable,
)


def run_epochs(
    model: ScalableGNN,
    data: Data,
    epoch: Callable[[], float],
    evaluate: Callable[[ScalableGNN], Tensor],
    epochs: int,
    split: int = 0,
    on_epoch: Callable[[Run], bool | None] | None = None,
    metric: Metric | None = None,
    patience: int | None = None,
    leave_cores: bool = True,
    keep: bool = False,
    run: Run | None = None,
    progress: Progress | None = None,
    average: AveragedWeights | None = None,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Any]] | None = None,
    evaluate_every: int = 1,
) -> Run:
    """Train and evaluate by functions of the caller; :func:`gas.fit` is for the usual ones.

    Args:
        model: The model.
        data: The whole graph, for its labels and masks.
        epoch: Trains one epoch and returns its loss.
        evaluate: Returns every node's output, of shape ``[N, C]``; it may refresh the histories.
        epochs: The number of epochs, including those of ``run``.
        split: The split of the masks. (default: ``0``)
        on_epoch: Called after each epoch with the run so far; ``True`` ends the training.
        metric: The score; see :func:`gas.training.score`. (default: the usual one for ``data.y``)
        patience: Stop once the validation score has not risen for this many epochs.
            (default: never)
        leave_cores: For the evaluation; see :func:`train_epoch`. (default: ``True``)
        keep: Keep the model and the outputs of the best epoch. (default: ``False``)
        run: The record to fill, with the epochs before an interruption. (default: a new one)
        progress: The progress that ``epoch`` fills; see :func:`train_epoch`.
            (default: the epoch starts anew)
        average: Averaged weights, which are evaluated and kept. (default: the model's)
        metrics: Further scores, by name; see :func:`gas.fit`. (default: none)
        evaluate_every: See :func:`gas.fit`. (default: ``1``)

    Raises:
        FloatingPointError: If training diverges: raised by ``epoch``, or at the end, if weights
            aren't finite or the loss is too large to be usable. ``run`` then has the finished
            epochs, and the best of them if its loss, weights and outputs are usable.
    """
    check_integer("evaluate_every", evaluate_every, 1)
    if patience is not None and patience < 1:
        raise ValueError(f"'patience' is {patience}, expected at least 1 epoch")
    run = Run() if run is None else run
    done = Progress() if progress is None else progress
    masks = {key: split_mask(data[f"{key}_mask"], split).cpu() for key in ("train", "val", "test")}
    y, has_warned = data.y.cpu(), False
    run.metric = metric if isinstance(metric, str) else getattr(metric, "__name__", "score")
    scores = [(metric, getattr(run, f"{key}_acc"), masks[key]) for key in masks]
    for name, further in (metrics or {}).items():
        for key, mask in masks.items():
            scores.append((further, run.metrics.setdefault(f"{key}_{name}", []), mask))
    try:
        while len(run) < epochs and not run.has_stalled(patience):
            _run_epoch(model, epoch, run, done)
            number = len(run) + 1
            is_due = number % evaluate_every == 0 or number == epochs
            with contextlib.nullcontext() if average is None else average.in_model():
                found, out = [math.nan] * len(scores), None
                if is_due:
                    with torch.no_grad(), share_cores(leave_cores):
                        out = evaluate(model.eval()).cpu()
                    run.metric = run.metric if metric else usual_metric(out, y)
                    if find_nonfinite_tensor(dict(model.named_parameters())) is None:
                        found = [score(f or run.metric, out, y, mask) for f, _, mask in scores]
                for (_, curve, _), value in zip(scores, found, strict=True):
                    curve.append(value)  # NaN is lower than any score.
                if keep and out is not None and run.best_epoch == number - 1:
                    run.best = BestEpoch.copy_from(model, number - 1, out)
            has_warned = has_warned or warn_if_unstable(run)
            if on_epoch is not None and is_true(on_epoch(run)):
                break
        if len(run):
            check_not_diverged(model, run.loss[-1], y[masks["train"]], len(run))
    except FloatingPointError as error:
        _drop_useless_best(run, y[masks["train"]])
        if run.best is None:
            raise
        raise FloatingPointError(
            f"{error}. The best model before is that of epoch {run.best.epoch + 1}"
        ) from error
    return run


def _run_epoch(
    model: ScalableGNN, epoch: Callable[[], float], run: Run, progress: Progress
) -> None:
    """Train one epoch, and record its loss, time and moved bytes."""
    start = time.perf_counter() - progress.seconds
    moved = moved_bytes(model) - progress.moved_bytes
    progress.start_epoch(model, start, moved, len(run) + 1)
    run.loss.append(epoch())
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    run.seconds.append(time.perf_counter() - start)
    run.moved_bytes.append(moved_bytes(model) - moved)
    progress.reset()
    run.layer_age.append(layer_ages(model))
    run.age.append(statistics.fmean(run.layer_age[-1] or [0.0]))
    run.drift.append(progress.drift)


def _drop_useless_best(run: Run, y: Tensor) -> None:
    """Remove the best model of a run that diverged unless it is usable."""
    run.forget_unfinished()
    best = run.best
    if best is None:
        return
    is_finite = find_nonfinite_tensor({**best.state, "outputs": best.out}) is None
    if not is_finite or not is_usable(run.loss[best.epoch], y):
        run.best = None
