"""``gas bench``: the time of a training epoch here, with histories and without."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas.cli.command import Signals
from gas.cli.graphs import check_labels, check_splits, model_arguments, remove_edge_features
from gas.cli.settings import MODELS, Settings
from gas.datasets import check_parts
from gas.graph import with_edge_index
from gas.native import PeakMemory, human, report_progress, resident_kinds
from gas.training import (
    Candidate,
    FullBatch,
    Plan,
    align_columns,
    loss_of,
    release_freed_memory,
    train_epoch,
)

FULL, HISTORIES, NO_TRANSFERS, DROPPED = (
    "full batch", "histories", "histories, moving no rows", "same batches, no histories",
)  # fmt: skip
NAMES = (FULL, HISTORIES, NO_TRANSFERS, DROPPED)
SHAPE = ("num_parts", "batch_size")
SAMPLE = 0.005  # Seconds between samples of memory.


class Contender(NamedTuple):
    """A way to train: a model, the steps of an epoch, and a function that trains for one."""

    model: gas.ScalableGNN
    steps: int
    epoch: Callable[[], float]


class Measured(NamedTuple):
    """Measurements of a contender; of one that couldn't run, the reason."""

    seconds: list[float]
    steps: int
    memory: float  # Bytes that an epoch takes beyond what is held between epochs; may be NaN.
    profile: gas.training.Profile | None
    reason: str = ""


class Bench:
    """Epochs of several ways to train a model on a graph, measured in turn.

    ``memory`` is the limit of :func:`gas.plan`; ``signals`` are checked after each step.
    """

    def __init__(
        self,
        data: Data,
        out_channels: int,
        model: str,
        settings: Settings,
        memory: str | None = None,
        log: bool = True,
        signals: Signals | None = None,
    ) -> None:
        check_labels(data)
        check_parts(data)
        check_splits(data)
        self.data = data = remove_edge_features(data)
        self.settings, self.log = settings, log
        self.signals = Signals() if signals is None else signals
        self.interrupted = False  # By Ctrl-C, while epochs were measured.
        self._make: Callable[..., gas.models.LayeredGNN] = partial(
            MODELS[model], in_channels=data.x.size(1), out_channels=out_channels,
            **model_arguments(settings.architecture, data),
        )  # fmt: skip
        shape: dict[str, Any] = {key: getattr(settings, key) for key in SHAPE}
        with contextlib.closing(self._make(num_nodes=data.num_nodes)) as made:
            self.plan: Plan = gas.plan(data, made, memory, log=log)
            given = self.plan
            if any(shape.values()):
                given = gas.plan(data, made, memory, **shape, log=log)
        several = [one for one in given.candidates if one.steps > 1]
        fit = [one for one in several if one.peak_bytes <= self.plan.memory]
        self.chosen: Candidate | None = next(iter(fit), None)
        self._reasons = {FULL: self._explain(c for c in self.plan.candidates if c.steps == 1)}
        why = self._explain(several) or "there is one mini-batch, which is the full batch"
        self._reasons |= {} if fit else dict.fromkeys((HISTORIES, NO_TRANSFERS, DROPPED), why)
        self.partition: gas.PartitionReport | None = None

    def _explain(self, candidates: Any) -> str:
        """Return why none of some ways to train fits memory, or "" if one does."""
        least = min((one.peak_bytes for one in candidates), default=0)
        if least <= self.plan.memory:
            return ""
        return f"needs about {human(least)}, the limit is {human(self.plan.memory)}"

    def __str__(self) -> str:
        if self.chosen is None or self.partition is None:
            return f"memory limit {human(self.plan.memory)}"
        one = self.chosen
        return (
            f"memory limit {human(self.plan.memory)}; {one.num_parts} parts, {one.batch_size} per "
            f"mini-batch, histories of {one.dtype}, {one.store}\n{self.partition}"
        )

    def summary(self) -> dict[str, Any]:
        """Return what was chosen, for JSON."""
        chosen = None if self.chosen is None else vars(self.chosen)
        return {
            "memory": self.plan.memory,
            "chosen": chosen,
            "interrupted": self.interrupted or bool(self.signals.received),
        }

    def measure(self, repeats: int) -> dict[str, Measured]:
        """Measure ``repeats`` epochs of each way of training, in turn.

        One epoch before warms up. Memory and phases are measured in two epochs of their own. After
        Ctrl-C there are the epochs that ended before.
        """
        found = {
            name: Measured([], 0, math.nan, None, self._reasons.get(name) or "interrupted")
            for name in NAMES
        }
        with contextlib.ExitStack() as models, report_progress("Measuring", log=self.log):
            try:
                self._measure(repeats, models, found)
            except KeyboardInterrupt:
                self.interrupted = True
        return found

    def _measure(
        self, repeats: int, models: contextlib.ExitStack, found: dict[str, Measured]
    ) -> None:
        """Measure each contender, and write into ``found`` what was measured."""
        running: dict[str, Contender] = {}
        if self.chosen is not None:
            self._partition_graph(self.chosen)
        for name in NAMES:
            if self._reasons.get(name):
                continue
            try:
                running[name] = one = self._make_contender(name, models)
                one.epoch()
                found[name] = found[name]._replace(steps=one.steps)
            except (MemoryError, RuntimeError) as error:  # PyTorch's allocator raises these.
                running.pop(name, None)
                text = str(error).strip().splitlines()
                found[name] = found[name]._replace(reason=text[0] if text else "no memory")
        for _ in range(repeats):
            for name, one in running.items():
                start = time.perf_counter()
                one.epoch()
                found[name].seconds.append(time.perf_counter() - start)
        for name, one in running.items():
            memory = _epoch_bytes(one.epoch)
            with gas.profile(one.model) as profile:
                one.epoch()
            found[name] = found[name]._replace(memory=memory, profile=profile)

    def _partition_graph(self, chosen: Candidate) -> None:
        """Partition the graph, and draw the mini-batches, which are the same in every epoch."""
        with contextlib.closing(self._make(num_nodes=1)) as model:
            options: dict[str, Any] = {"log": self.log, "check": False}
            self._graph: Data = gas.cluster(self.data, chosen.num_parts, model=model, **options)
        self.partition = gas.partition_report(self._graph)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(chosen.num_parts, generator=generator).split(chosen.batch_size)
        self._batches = [parts.sort().values.tolist() for parts in order]

    def _make_contender(self, name: str, models: contextlib.ExitStack) -> Contender:
        """Make a way to train; its model is closed with the stack."""
        settings, chosen = self.settings, self.chosen
        has_histories = name in (HISTORIES, NO_TRANSFERS)
        stored = {}
        if chosen is not None and has_histories:
            stored = {"dtype": chosen.dtype, "store": chosen.store}
        model = self._make(num_nodes=self.data.num_nodes if has_histories else 1, **stored)
        models.callback(model.close)
        groups = model.param_groups(settings.reg_weight_decay, settings.nonreg_weight_decay)
        optimizer = torch.optim.Adam(groups, lr=settings.lr, fused=True)
        options: dict[str, Any] = {"layout": "fused", "edge_weight": model.needs_weights}
        if chosen is None or name == FULL:
            graph = gas.cluster(self.data, 1, model=model, log=False, check=False)
            batches: Any = FullBatch(graph, check=False, **options)
            steps = micro_batches = 1
        else:  # As batches may be shuffled, they are cut again.
            graph = self._drop_edges_between_batches() if name == DROPPED else self._graph
            options |= {"batch_sampler": self._batches, "check": False, "log": False}
            batches = gas.SubgraphLoader(graph, **options)
            steps, micro_batches = chosen.steps, chosen.micro_batches
        if has_histories:
            model.refresh(batches, log=False)
        if name == NO_TRANSFERS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Its results are wrong, its time is measured.
                model.io = "none"
        epoch = partial(
            train_epoch, model, batches, optimizer, grad_norm=settings.grad_norm,
            full_batch=not has_histories, micro_batches=micro_batches,
            correct_drift=has_histories and settings.correct_drift,
            loss_fn=_finite_loss if name == NO_TRANSFERS else loss_of, on_step=self.signals.check,
        )  # fmt: skip
        return Contender(model, steps, epoch)

    def _drop_edges_between_batches(self) -> Data:
        """Return the graph without edges between mini-batches, as ClusterLoader drops them."""
        batch_of_part = torch.empty(self._graph.parts.numel() - 1, dtype=torch.long)
        for number, parts in enumerate(self._batches):
            batch_of_part[parts] = number
        batch = batch_of_part.repeat_interleave(self._graph.parts.diff())
        graph = with_edge_index(self._graph)
        src, dst = batch[graph.edge_index]
        return graph.edge_subgraph(src == dst)


def _finite_loss(out: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a model that has read no rows, whose outputs may be anything."""
    return torch.nan_to_num(loss_of(out, y), posinf=0.0)


def _epoch_bytes(epoch: Callable[[], float]) -> float:
    """Return the bytes of the process's own that an epoch takes beyond those before it."""
    release_freed_memory()
    before = resident_kinds()[0]
    with PeakMemory(SAMPLE) as peak:
        epoch()
    return peak.own - before


# Tables -------------------------------------------------------------------------------------------


def summarise(found: Mapping[str, Measured]) -> dict[str, Any]:
    """Return what was measured, for JSON: seconds, ratios, bytes, and seconds of each phase."""
    base = found[FULL].seconds
    contenders: dict[str, dict[str, Any]] = {}
    for name, one in found.items():
        if not one.seconds:
            contenders[name] = {"not measured": one.reason}
            continue
        # Within each round, of which the last may have been interrupted.
        ratios = [a / b for a, b in zip(one.seconds, base, strict=False)]
        contenders[name] = {
            "seconds": one.seconds,
            "median": statistics.median(one.seconds),
            "to_full_batch": statistics.median(ratios) if ratios else None,
            "steps": one.steps,
            "epoch_bytes": one.memory if math.isfinite(one.memory) else None,
            "phases": {} if one.profile is None else one.profile.seconds,
            "moved_bytes": None if one.profile is None else one.profile.moved_bytes,
        }
    times, still = found[HISTORIES].seconds, found[NO_TRANSFERS].seconds
    rounds = [time / other - 1 for time, other in zip(times, still, strict=False)]
    return {
        "contenders": contenders,
        "transfer_overhead": statistics.median(rounds) if rounds else None,
        "transfer_overhead_range": [min(rounds), max(rounds)] if rounds else None,
    }


def show(summary: Mapping[str, Any]) -> str:
    """Return the tables of :func:`summarise`, as text."""
    rows: list[tuple[str, ...]] = [
        ("", "an epoch", "lowest - highest", "to full batch", "steps", "memory of an epoch")
    ]
    phases: dict[str, dict[str, float]] = {}
    for name, one in summary["contenders"].items():
        if "not measured" in one:
            rows.append((name, f"not measured: {one['not measured']}"))
            continue
        ratio, memory = one["to_full_batch"], one["epoch_bytes"]
        rows.append((
            name, _time(one["median"]), " - ".join(map(_time, (min(one["seconds"]),
            max(one["seconds"])))), "-" if ratio is None else f"{ratio:.2f}x", str(one["steps"]),
            "-" if memory is None else human(max(0, int(memory))),
        ))  # fmt: skip
        for phase, seconds in one["phases"].items():
            phases.setdefault(phase, {})[name] = seconds
    lines = [align_columns(rows)]
    if (overhead := summary["transfer_overhead"]) is not None:
        low, high = summary["transfer_overhead_range"]
        noise = ", which is within noise" * (low <= 0 <= high)
        lines.append(
            f"\nPulls and pushes of rows add {overhead:+.1%} to an epoch with histories, in single "
            f"rounds {low:+.1%} to {high:+.1%}{noise}."
        )
    names = [name for name, one in summary["contenders"].items() if one.get("phases")]
    if names:
        order = sorted(phases, key=lambda phase: -max(phases[phase].values()))
        table = [("phase", *names)]
        for phase in order:
            cells = (phases[phase].get(name) for name in names)
            table.append((phase, *("-" if cell is None else _time(cell) for cell in cells)))
        lines += [
            "\nTime by phase of one more epoch, which the profiler slows down:",
            align_columns(table),
        ]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
