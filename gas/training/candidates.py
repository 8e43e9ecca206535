"""Candidates for the plan of a training, the choice among them, and its reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from gas.native import human

SHOWN = 8  # Candidates in the table.
ORDER = attrgetter("relative_seconds", "peak_bytes")
# Freed blocks that the C library keeps, relative to the bytes of a mini-batch: usually, and at
# most. It was 3.4 for 6 layers of 128 with cached batches, which fragment memory.
FREED, MOST_FREED = 1.0, 4.0
# Epochs until the full batch's best validation score less half a point, relative to those of the
# full batch, by steps per epoch: geometric means of GraphSAGE and GCN in time_to_accuracy.py.
RELATIVE_EPOCHS = {1: 1.0, 2: 0.46, 4: 0.34, 8: 0.25, 16: 0.31, 32: 0.31}
# A full batch that fits is chosen for fewer nodes, or if histories are expected to take more than
# this share of its time. On three graphs of 13,752 to 22,470 nodes, 0.34 to 0.58 was expected; they
# took 0.29 to 1.8 of it, or didn't get as accurate (grid.py).
SURE_NODES = 50_000
MAX_TIME_RATIO = 0.5


def relative_epochs(steps: int) -> float:
    """Return the epochs until a full batch's accuracy, relative to those of the full batch.

    Between measured numbers of steps per epoch, it is that of the next smaller one. Beyond the
    largest, which wasn't measured, it is assumed to grow with the root of the steps.
    """
    largest = max(RELATIVE_EPOCHS)
    known = RELATIVE_EPOCHS[max(number for number in RELATIVE_EPOCHS if number <= steps)]
    return known * math.sqrt(max(1.0, steps / largest))


@dataclass(frozen=True)
class Candidate:
    """A way to train and its predicted cost; see :class:`gas.training.Plan`."""

    num_parts: int
    batch_size: int
    micro_batches: int
    dtype: str
    store: str
    peak_bytes: int
    epoch_seconds: float
    components: dict[str, int] = field(repr=False, compare=False)

    @property
    def steps(self) -> int:
        """Steps of the optimizer per epoch."""
        return math.ceil(self.num_parts / self.batch_size / self.micro_batches)

    @property
    def relative_seconds(self) -> float:
        """Seconds until as much is learned as in an epoch of a full batch."""
        return self.epoch_seconds * relative_epochs(self.steps)

    def may_exceed(self, limit: int) -> bool:
        """Return whether freed blocks that the C library keeps might exceed a limit of memory."""
        freed = self.components["freed, not given back"]
        return self.peak_bytes + (MOST_FREED / FREED - 1) * freed > limit


@dataclass(frozen=True)
class Plan(Candidate):
    """A way to train within a limit of memory; made by :func:`gas.plan`.

    * ``num_parts``: for :func:`gas.cluster`; ``batch_size``: parts per mini-batch;
      ``micro_batches``: mini-batches per step, for :func:`gas.training.train_epoch`;
    * ``dtype``, ``store``: of the histories, for the model;
    * ``peak_bytes``: the predicted peak of the process's resident memory in training;
      ``components``: its parts by name; ``epoch_seconds``: the predicted time of an epoch;
      ``relative_seconds``: the time to learn what a full batch learns in an epoch;
    * ``memory``: the limit in bytes; ``why``: the reason for this choice, in words;
    * ``gives_back``: whether it is sure to fit only with ``gas.training.limit_freed_memory()``,
      whose time ``epoch_seconds`` includes;
    * ``candidates``: all candidates: those that fit, the best first, then those that don't.

    ``print(plan)`` shows a table.
    """

    memory: int
    why: str
    gives_back: bool
    candidates: list[Candidate] = field(repr=False)

    @property
    def hot_bytes(self) -> int:
        """Half of the memory that is predicted to be free: for ``model.pack(loader, memory)``.

        0 if histories are in memory. The other half is for buffers of packed rows.
        """
        return (self.memory - self.peak_bytes) // 2 if self.store == "disk" else 0

    def summary(self) -> dict[str, Any]:
        """Return the choice and the predictions, without the candidates, for JSON."""
        return {key: value for key, value in vars(self).items() if key != "candidates"}

    def __str__(self) -> str:
        head: tuple[str, ...] = (
            "", "parts", "per batch", "micro", "histories", "peak", "epoch", "to accuracy",
        )  # fmt: skip
        least = self.relative_seconds
        rows = [head]
        for number, one in enumerate(self.candidates[:SHOWN]):
            rows.append(
                (
                    "*" if number == 0 else "",
                    str(one.num_parts),
                    str(one.batch_size),
                    str(one.micro_batches),
                    f"{one.dtype}, {one.store}",
                    human(one.peak_bytes) + " (too much)" * (one.peak_bytes > self.memory),
                    f"{one.epoch_seconds:.3g} s",
                    f"{one.relative_seconds / least:.2f}x",
                )
            )
        rows.append(("",) * len(head))
        held = self.components.items()
        rows += [("", "", "", "", name, human(size), "", "") for name, size in held if size]
        return f"{align_columns(rows, left=(0, 4))}\n\n{self.why}"


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Align the cells of a table; rows of fewer cells may be wider than its columns."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    widths[0] = max(len(row[0]) for row in rows)
    lines = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def choose_candidate(fit: list[Candidate], num_nodes: int) -> Candidate:
    """Choose the fastest, or a full batch, unless histories are sure to be faster."""
    best = min(fit, key=ORDER)
    full = min((one for one in fit if one.num_parts == 1), key=ORDER, default=best)
    is_sure = num_nodes >= SURE_NODES
    is_sure &= best.relative_seconds <= MAX_TIME_RATIO * full.relative_seconds
    return best if is_sure else full


def make_plan(best: Candidate, seen: list[Candidate], limit: int, first: str) -> Plan:
    """Make the plan, with its reasons."""
    fit = sorted((one for one in seen if one.peak_bytes <= limit), key=ORDER)
    rest = sorted((one for one in seen if one.peak_bytes > limit), key=lambda x: x.peak_bytes)
    # Candidates of lower precision come last.
    fit = [best, *(one for one in fit if one is not best)]
    why = (
        f"{best.num_parts} parts, {best.batch_size} per batch: the fastest of {len(fit)} "
        f"candidates that fit {human(limit)}, of {len(seen)}; {best.steps} steps per epoch."
    )
    full = min(
        (one for one in seen if one.num_parts == one.batch_size),
        key=lambda one: (one.peak_bytes > limit, *ORDER(one)), default=None,
    )  # fmt: skip
    other = min((one for one in fit if one.steps > 1), key=ORDER, default=None)
    if best.num_parts == best.batch_size:
        why = f"A full batch: the fastest of {len(fit)} candidates that fit {human(limit)}."
        ratio = other.relative_seconds / best.relative_seconds if other else math.inf
        if other and ratio < 1:
            why = (
                f"A full batch, which fits {human(limit)}. Histories are expected to take "
                f"{ratio:.2g} of its time to accuracy, but took up to 5 times as long as expected "
                f"on other graphs: pass num_parts={other.num_parts} to train with them."
            )
        elif other:
            why += f" Histories are expected to take {ratio:.2g} times as long to its accuracy."
    elif full is not None and full.peak_bytes > limit:  # Its time is extrapolated from far away.
        what = "A full batch" if full.num_parts == 1 else "A mini-batch of all parts"
        why += f" {what} isn't expected to fit."
    elif full is not None:
        ratio = best.relative_seconds / full.relative_seconds
        why += f" It is expected to take {ratio:.2g} of the time of a full batch to accuracy."
    if best.micro_batches > 1:
        why += f" A step's batch is split into {best.micro_batches}, which is faster or fits."
    if best.dtype != first:
        least = min(one.peak_bytes for one in seen if one.dtype == first)
        why += (
            f" Histories of {first} take {human(least)} at least, so rows are rounded to "
            f"{best.dtype}, which may cost accuracy."
        )
    if best.store == "disk" and any(one.store == "host" for one in seen):
        why += " Histories are stored on disk: nothing faster fits with them in memory."
    if gives_back := best.may_exceed(limit):
        why += (
            " Freed blocks are given back to the system at once, which takes time, to fit surely: "
            "call gas.training.limit_freed_memory()."
        )
    candidates = [*fit, *rest]
    return Plan(**vars(best), memory=limit, why=why, gives_back=gives_back, candidates=candidates)


def no_fit_error(seen: list[Candidate], limit: int) -> MemoryError:
    """Return the error that names the largest component."""
    least = min(seen, key=lambda one: one.peak_bytes)
    most = max(least.components, key=lambda name: least.components[name])
    parts = "1 part" if least.num_parts == 1 else f"{least.num_parts} parts"
    return MemoryError(
        f"'memory' is {human(limit)}, but the least that training is predicted to take is "
        f"{human(least.peak_bytes)}, with {parts}, {least.batch_size} per batch, "
        f"and histories as {least.dtype} on {least.store}; most of it is {most}, "
        f"{human(least.components[most])}: raise it, or make the model narrower"
    )
