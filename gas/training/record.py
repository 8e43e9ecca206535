"""The record of a training run, and the errors of one that diverges."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gas.native import warn
from gas.scalable import ScalableGNN, moved_bytes
from gas.training.metrics import known_target_mask, metric_of

if TYPE_CHECKING:
    from gas.training.measure import MemoryAccount

PER_EPOCH = (
    "loss", "train_acc", "val_acc", "test_acc", "age", "drift", "seconds", "moved_bytes", "lr",
    "layer_age",
)  # fmt: skip
# A loss has risen if it is 1.3 times the lowest, and above it by a tenth of the first epoch's loss:
# a loss near zero varies by more than 30 % in any training. From a drift of .2 on, rows move far.
RISEN, SMALL, FAR = 1.3, 0.1, 0.2
STUCK, STEADY = 10, 0.01
MOST_LOSS = 1e6  # Largest usable mean loss, in nats or relative to the targets' mean square.
CURE = (
    "training diverged. Take a smaller learning rate, such as lr=0.001, clip gradients "
    "(grad_norm=1), or scale features to about 1; where autocast computes or histories store in "
    "half precision, take float32"
)


def is_true(value: Any) -> bool:
    """Return whether a value is ``True`` of Python, NumPy or PyTorch, not merely truthy."""
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return value is True or (kind == "bool" and bool(value))


class BestEpoch(NamedTuple):
    """The best epoch, from 0: the model's ``state_dict`` on the CPU, and outputs, ``[N, C]``."""

    epoch: int
    state: dict[str, Tensor]
    out: Tensor

    @classmethod
    def copy_from(cls, model: torch.nn.Module, epoch: int, out: Tensor) -> BestEpoch:
        """Make the record of an epoch, with a copy of the model's state on the CPU."""
        state = model.state_dict().items()
        return cls(epoch, {k: v.detach().cpu().clone().contiguous() for k, v in state}, out)


@dataclass
class Run:
    """Record of one run, one entry per epoch.

    ``train_acc``, ``val_acc`` and ``test_acc`` are accuracies, as fractions, or the usual score of
    other targets; NaN in epochs that weren't evaluated.
    ``age`` is the mean number of pushes since a history's rows were written, at the epoch's end;
    ``drift`` is how far the channels' means and standard deviations have moved between two pushes,
    on average, relative to their norm, in the history that changes most; NaN where it isn't
    measured.
    ``moved_bytes`` are those of stored rows that were read and written in training.
    ``chain`` has the statistics of MH-Aug's chain, see :class:`gas.augment.Statistics`; empty
    without a chain. ``best`` and ``memory`` are optional.
    ``peak_rss_bytes`` is the peak of resident memory; ``peak_own_bytes`` and ``peak_mapped_bytes``
    are sampled peaks of its two kinds; see :class:`gas.native.memory.PeakMemory`.
    ``lr`` is the learning rate of the first group of parameters, without the factor of a warm-up.
    ``metrics`` has the curves of further scores, by names such as ``"val_f1"``. ``layer_age`` has
    the age of each history's rows.
    """

    loss: list[float] = field(default_factory=list)
    train_acc: list[float] = field(default_factory=list)
    val_acc: list[float] = field(default_factory=list)
    test_acc: list[float] = field(default_factory=list)
    age: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_rss_bytes: float = 0
    history_bytes: int = 0
    moved_bytes: list[int] = field(default_factory=list)
    chain: dict[str, float] = field(default_factory=dict)
    best: BestEpoch | None = field(default=None, repr=False)
    memory: MemoryAccount | None = field(default=None, repr=False)
    peak_own_bytes: float = 0
    peak_mapped_bytes: float = 0
    split: int = 0  # The split of the masks.
    drift: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    layer_age: list[list[float]] = field(default_factory=list)
    metric: str = "accuracy"  # The name of the score.

    def __str__(self) -> str:
        if not len(self):
            return "Run of 0 epochs"
        best = self.best_epoch
        return (
            f"Run of {len(self)} epochs of {self.epoch_seconds:.2f} s: "
            f"best validation {self.metric} {self.val_acc[best]:.4f} in epoch {best + 1} "
            f"(test {self.test_acc[best]:.4f})"
        )

    def __len__(self) -> int:
        """Return the number of epochs that have ended."""
        return len(self.test_acc)

    def forget_unfinished(self) -> None:
        """Remove the entries of an epoch that was interrupted."""
        epochs = len(self)
        for name in PER_EPOCH:
            del getattr(self, name)[epochs:]
        for curve in self.metrics.values():
            del curve[epochs:]
        if (
            self.best is not None and self.best.epoch != self.best_epoch
        ):  # The best epoch wasn't kept.
            self.test_acc.pop()
            self.forget_unfinished()

    @property
    def best_epoch(self) -> int:
        """The first epoch, from 0, of the highest validation score; the last, if all are NaN."""
        if all(map(math.isnan, self.val_acc)):
            return len(self.val_acc) - 1
        scores = [-math.inf if math.isnan(score) else score for score in self.val_acc]
        return scores.index(max(scores))

    def has_stalled(self, patience: int | None) -> bool:
        """Return whether the validation score has not risen for this many epochs.

        It is always ``False`` after an epoch that wasn't evaluated.
        """
        if patience is None or not len(self) or math.isnan(self.val_acc[-1]):
            return False
        return len(self) - 1 - self.best_epoch >= patience

    @property
    def epoch_seconds(self) -> float:
        """The median time of a training epoch, without evaluation."""
        return statistics.median(self.seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the finished epochs, and the best one, for a checkpoint."""
        best = None if self.best is None else self.best._asdict()
        curves = {name: getattr(self, name)[: len(self)] for name in PER_EPOCH}
        metrics = {name: curve[: len(self)] for name, curve in self.metrics.items()}
        return {**curves, "metrics": metrics, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for name in PER_EPOCH:
            getattr(self, name)[:] = state.get(name, [])  # Older checkpoints have no drift.
        self.metrics = {name: [*curve] for name, curve in state.get("metrics", {}).items()}
        self.best = None if state["best"] is None else BestEpoch(**state["best"])


@dataclass
class Progress:
    """Progress of an epoch, between two of its steps; ``loss`` is summed over ``labelled``."""

    loss: Tensor | float = 0.0
    labelled: int = 0
    batches: int = 0
    steps: int = 0
    seconds: float = 0.0
    moved_bytes: int = 0
    epoch: int | None = None  # From 1, for error messages, if it is known.
    drift: float = math.nan  # Of the epoch; see Run.

    def start_epoch(self, model: ScalableGNN, start: float, moved: int, epoch: int) -> None:
        """Record the start of an epoch, and the bytes moved until then."""
        self._began, self.epoch = (model, start, moved), epoch

    def add(self, loss: Tensor, count: int) -> None:
        """Add the loss of a mini-batch: the mean over ``count`` labelled nodes."""
        if not isinstance(self.loss, Tensor):
            self.loss = torch.tensor(self.loss, dtype=torch.float32)
        self.loss = self.loss + loss * count
        self.labelled += count

    def reset(self) -> None:
        """Reset the progress after an epoch."""
        self.load_state_dict(Progress().state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the progress for a checkpoint."""
        state = {key: getattr(self, key) for key in PROGRESS}
        if self.steps and hasattr(self, "_began"):
            model, start, moved = self._began
            state["seconds"] = time.perf_counter() - start
            state["moved_bytes"] = moved_bytes(model) - moved
        return {**state, "loss": float(self.loss)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for key in PROGRESS:
            setattr(self, key, state[key])


PROGRESS = tuple(one.name for one in fields(Progress) if one.name not in ("epoch", "drift"))


def mean_age(model: ScalableGNN) -> float:
    """Return the mean age of all rows of all histories, in pushes; 0 without histories."""
    return statistics.fmean(layer_ages(model) or [0.0])


def layer_ages(model: ScalableGNN) -> list[float]:
    """Return the mean age of each history's rows, in pushes."""
    return [stale.mean_age for stale in model.staleness()]


def warn_if_unstable(run: Run) -> bool:
    """Warn, and return True, if training fails while the rows of histories move far.

    ``run.drift`` must be at least .2, and one of these must hold:

    * The loss has risen: each of the last three is above 1.3 times the lowest before, and above it
      by more than a tenth of the first, and none of the last three validation scores is as good as
      the best before.
    * Training is stuck: the last ten losses, and validation scores, differ by less than 1 %.
    """
    if len(run) < 4:
        return False
    lowest, now = min(run.loss[:-3]), min(run.loss[-3:])
    drift = run.drift[-1] if run.drift else math.nan
    has_risen = now > max(RISEN * lowest, lowest + SMALL * run.loss[0])
    scores = _evaluated(run.val_acc)
    has_fallen = len(scores) < 4 or max(scores[-3:]) < max(scores[:-3])
    is_stuck = len(run) >= STUCK and _is_steady(run.loss) and _is_steady(run.val_acc)
    if not drift >= FAR or not ((has_risen and has_fallen) or is_stuck):
        return False
    first = 1 + run.loss.index(lowest)
    what = f"risen from {lowest:.3g} in epoch {first} to {now:.3g} or more in the last three epochs"
    if is_stuck:
        what = f"stayed at {now:.3g} for {STUCK} epochs"
    warn(
        f"the loss has {what}, and stored rows move by {drift:.0%} on average "
        "between two pushes: training follows stale rows. Take a smaller learning rate, add "
        "BatchNorm or LayerNorm to the model, or take fewer batches per epoch (a larger "
        "'batch_size')"
    )
    return True


def _evaluated(scores: Sequence[float]) -> list[float]:
    """Return the scores that aren't NaN."""
    return [score for score in scores if not math.isnan(score)]


def _is_steady(values: Sequence[float]) -> bool:
    """Return whether the last ten values, of which some may be NaN, hardly differ."""
    last = _evaluated(values[-STUCK:])
    return len(last) > 1 and max(last) - min(last) < STEADY * max(last)


def divergence_error(epoch: int | None, batch: int | None, loss: float) -> FloatingPointError:
    """Return the error of a loss that isn't finite, at an epoch and a batch, both from 1."""
    numbers = {"epoch": epoch, "batch": batch}
    places = [f"{name} {number}" for name, number in numbers.items() if number is not None]
    where = f" in {', '.join(places)}" if places else ""
    return FloatingPointError(f"the loss is {loss}{where}: {CURE}")


def find_nonfinite_loss(losses: Sequence[tuple[int, Tensor]]) -> tuple[int, float] | None:
    """Return the number and the loss of the first batch whose loss isn't finite."""
    if not losses:
        return None
    values = torch.stack([loss for _, loss in losses]).tolist()
    for (number, _), value in zip(losses, values, strict=True):
        if not math.isfinite(value):
            return number, value
    return None


def check_not_diverged(model: ScalableGNN, loss: float, y: Tensor, epoch: int) -> None:
    """Raise an error if a weight isn't finite after an epoch, or its mean loss isn't usable.

    ``y`` are the targets that were trained on.
    """
    name = find_nonfinite_tensor(dict(model.named_parameters()))
    if name is not None:
        raise FloatingPointError(f"{name!r} isn't finite after epoch {epoch}: {CURE}")
    if not is_usable(loss, y):
        raise FloatingPointError(f"the loss is {loss:.3g} after epoch {epoch}: {CURE}")


def find_nonfinite_tensor(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a value that isn't finite, with one device sync."""
    real = {key: value for key, value in tensors.items() if value.is_floating_point()}
    if not real:
        return None
    is_finite = torch.stack([torch.isfinite(value.detach()).all() for value in real.values()])
    return next((key for key, good in zip(real, is_finite.tolist(), strict=True) if not good), None)


def is_usable(loss: float, y: Tensor) -> bool:
    """Return whether a mean loss is at most 1e6, for real numbers times their mean square."""
    known = y[known_target_mask(y)].double()
    has_scale = known.numel() > 0 and metric_of(y) == "r2"
    scale = float(known.square().mean()) if has_scale else 1.0
    return loss <= MOST_LOSS * (scale or 1.0)
