"""Record of a training, epoch by epoch, and the progress of the current epoch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from gas.scalable import moved_bytes

if TYPE_CHECKING:
    from gas.scalable import ScalableGNN
    from gas.training.measure import MemoryAccount

PER_EPOCH = ("loss", "train_acc", "val_acc", "test_acc", "age", "seconds", "moved_bytes")


class Best(NamedTuple):
    """A model of its best epoch, from 0: its ``state_dict`` on the CPU, and outputs, ``[N, C]``."""

    epoch: int
    state: dict[str, Tensor]
    out: Tensor


@dataclass
class Run:
    """Record of one run, one entry per epoch.

    ``train_acc``, ``val_acc`` and ``test_acc`` are accuracies, as fractions, or another score where
    the data asks for one.
    ``age`` is the mean number of pushes since a history's rows were written, at the epoch's end;
    ``moved_bytes`` are those of stored rows that were read and written in training.
    ``chain`` is what MH-Aug's chain did in the whole run, see :class:`gas.augment.Statistics`;
    empty without one. ``best`` and ``memory`` are there if they were asked for.
    ``peak_rss_bytes`` is the peak of resident memory; ``peak_own_bytes`` and ``peak_mapped_bytes``
    are those of its two kinds, as they were sampled; see :class:`gas.native.memory.PeakMemory`.
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
    best: Best | None = field(default=None, repr=False)
    memory: MemoryAccount | None = field(default=None, repr=False)
    peak_own_bytes: float = 0
    peak_mapped_bytes: float = 0
    split: int = 0  # Of the masks.

    def __len__(self) -> int:
        """Return the number of epochs that have ended."""
        return len(self.test_acc)

    def forget_unfinished(self) -> None:
        """Drop what an epoch that was interrupted has left."""
        epochs = len(self)
        for name in PER_EPOCH:
            del getattr(self, name)[epochs:]
        if self.best is not None and self.best.epoch != self.best_epoch:  # Not kept any more.
            self.test_acc.pop()
            self.forget_unfinished()

    @property
    def best_epoch(self) -> int:
        """The first epoch, from 0, of the highest validation score; NaN is lower than any."""
        scores = [-math.inf if math.isnan(score) else score for score in self.val_acc]
        return scores.index(max(scores))

    def has_stalled(self, patience: int | None) -> bool:
        """Say whether the validation score has not risen for this many epochs."""
        return (
            patience is not None and len(self) > 0 and len(self) - 1 - self.best_epoch >= patience
        )

    @property
    def epoch_seconds(self) -> float:
        """The median time of a training epoch, evaluation apart."""
        return statistics.median(self.seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the epochs that have ended, and the best, for a checkpoint."""
        best = None if self.best is None else self.best._asdict()
        return {**{name: getattr(self, name)[: len(self)] for name in PER_EPOCH}, "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        for name in PER_EPOCH:
            getattr(self, name)[:] = state[name]
        self.best = None if state["best"] is None else Best(**state["best"])


@dataclass
class Progress:
    """Progress of an epoch, between two of its steps; ``loss`` is summed over ``labelled``."""

    loss: Tensor | float = 0.0
    labelled: int = 0
    batches: int = 0
    steps: int = 0
    seconds: float = 0.0
    moved_bytes: int = 0
    epoch: int | None = None  # From 1, for errors, as far as it is known.

    def watch(self, model: ScalableGNN, start: float, moved: int, epoch: int) -> None:
        """Note the begin of an epoch, and the bytes that had been moved until then."""
        self._began, self.epoch = (model, start, moved), epoch

    def add(self, loss: Tensor, count: int) -> None:
        """Add the mean loss of a batch, over its labelled nodes."""
        self.loss = self.loss + loss * count
        self.labelled += count

    def reset(self) -> None:
        """Forget the epoch, which has ended."""
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
        """Go on from :meth:`state_dict`."""
        for key in PROGRESS:
            setattr(self, key, state[key])


PROGRESS = tuple(one.name for one in fields(Progress) if one.name != "epoch")
