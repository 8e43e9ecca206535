"""Plan how to cut a graph and store histories, so that training fits memory and is fast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from gas.history import Codec
from gas.loader import SubgraphLoader
from gas.native import bytes_of, check_integer, free_memory, human, report_progress, resident_kinds
from gas.scalable import ScalableGNN, activation_bytes
from gas.training.cost import Candidate, Predictor, Sample, Store, Way, bound_bytes, find_ways
from gas.training.measure import Measured, Shape, give_back_freed, measure

STEPS = 8  # Of an epoch, as settings have them that say nothing.
LEVELS = 4  # Numbers of mini-batches that some are measured of.
MOST_EDGES = 3_000_000  # Of a mini-batch that is measured.
SHOWN = 8  # Candidates in the table.
ORDER = attrgetter("epoch_seconds", "peak_bytes")
# How much longer an epoch takes whose freed blocks are given back at once: up to 1.6 times.
GIVING_BACK = 1.5


@dataclass(frozen=True)
class Plan(Candidate):
    """A way to train within some memory; made by :func:`gas.plan`.

    * ``num_parts``: for :func:`gas.cluster`; ``batch_size``: parts per mini-batch;
      ``micro_batches``: mini-batches per step, for :func:`gas.training.train_epoch`;
    * ``dtype``, ``store``: of the histories, for the model;
    * ``peak_bytes``: the predicted peak of the process's resident memory in training;
      ``components``: who holds how much of it; ``epoch_seconds``: the predicted time of an epoch;
    * ``memory``: the bytes that it had to fit; ``why``: why this was chosen, in words;
    * ``gives_back``: whether it surely fits only if freed blocks are given back at once, with
      ``gas.training.keep_little_freed()``, whose time ``epoch_seconds`` has counted;
    * ``candidates``: all that were looked at, the fastest that fit first, then those that don't.

    ``print(plan)`` shows a table.
    """

    memory: int
    why: str
    gives_back: bool
    candidates: list[Candidate] = field(repr=False)

    @property
    def hot_bytes(self) -> int:
        """Of what is predicted to be left of the memory, half: for ``model.pack(loader, memory)``.

        0 where histories fit memory. The other half is for what packed rows pass through.
        """
        return (self.memory - self.peak_bytes) // 2 if self.store == "disk" else 0

    def summary(self) -> dict[str, Any]:
        """Return the choice and the predictions, without the candidates, for JSON."""
        return {key: value for key, value in vars(self).items() if key != "candidates"}

    def __str__(self) -> str:
        head: tuple[str, ...] = ("", "parts", "per batch", "micro", "histories", "peak", "epoch")
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
                )
            )
        rows.append(("",) * len(head))
        held = self.components.items()
        rows += [("", "", "", "", name, human(size), "") for name, size in held if size]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 4) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.why])


def plan(
    data: Data,
    model: ScalableGNN,
    memory: int | str,
    *,
    num_parts: int | None = None,
    batch_size: int | None = None,
    steps: int = STEPS,
    dtype: Codec | torch.dtype | str | Sequence[Codec | torch.dtype | str] | None = None,
    store: Store = None,
    evaluation: str = "layerwise",
    evaluate_apart: bool = False,
    layout: str | None = None,
    edge_weight: bool = True,
    keep_graph: bool = True,
    method: str = "metis",
    seed: int = 0,
    cache: bool | str | Path = True,
    log: bool = True,
) -> Plan:
    """Predict memory and time of training, and choose the fastest way that fits.

    The graph is cut once, and some mini-batches of different sizes are run forward and backward.
    What others would take follows from their nodes, halo and edges. Nothing is changed: not the
    graph, nor the model and its histories, nor PyTorch's generators::

        plan = gas.plan(data, model, "6GB")
        print(plan)
        graph = gas.cluster(data, plan.num_parts, model=model)
        loader = gas.SubgraphLoader(graph, batch_size=plan.batch_size, shuffle=True)
        ...
        train_epoch(model, loader, optimizer, micro_batches=plan.micro_batches)

    The peak is that of the process's resident memory in training and evaluation, on the CPU and
    with the C library as it is, which keeps some blocks that were freed; see ``gives_back``. Pages
    of histories on disk that the system keeps in memory, while it has room, don't count. Measuring
    stays within ``memory``, too; METIS, which cuts the graph before, isn't predicted.

    Args:
        data: The graph, as it was given to nobody else; see :func:`gas.cluster`.
        model: The model, on the CPU.
        memory: What the process may take, in bytes or like ``"6GB"`` (10^9 bytes each; ``"6GiB"``:
            2^30).
        num_parts: The number of parts. (default: powers of two times ``steps``, up to 2,048 or a
            hundred nodes per part)
        batch_size: Parts per step of the optimizer. They are split into micro-batches where they
            don't fit. (default: those that make ``steps`` steps)
        steps: Steps of the optimizer per epoch, which don't change with memory; with ``num_parts``
            and ``batch_size``, those of them. (default: ``8``)
        dtype: How histories may store rows, as a :class:`gas.History` takes it, or several, of
            which a later one is taken only if none before fits: it is less exact. (default: as
            ``model`` does; then, if that is float32, bfloat16)
        store: Where they may store them. (default: as ``model`` does; if it doesn't say, in memory,
            or else on the disk)
        evaluation: How every epoch is evaluated: ``"layerwise"``, ``"full"`` or ``"none"``.
            (default: ``"layerwise"``)
        evaluate_apart: Whether evaluation has histories of its own. (default: ``False``)
        layout: See :class:`gas.SubgraphLoader`.
        edge_weight: See :class:`gas.SubgraphLoader`. (default: ``True``)
        keep_graph: Whether ``data`` and the edges of the clustered graph stay in memory; otherwise
            ``del data`` and ``loader.forget_edges()`` are expected. (default: ``True``)
        method: See :func:`gas.metis`. (default: ``"metis"``)
        seed: See :func:`gas.metis`; of the choice of batches, too. (default: ``0``)
        cache: See :func:`gas.metis`. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)

    Raises:
        ValueError: If an argument is unusable, naming it.
        MemoryError: If nothing fits; it says what takes most.
    """
    limit = _check(data, model, memory, num_parts, batch_size, steps, evaluation)
    codecs, stores = _codecs(model, dtype), _stores(model, store)
    ways = list(find_ways(data.num_nodes, num_parts, batch_size, steps))
    finest = max(way[0] for way in ways)
    sample = Sample(data, model, finest, layout, edge_weight, method, seed, cache, log)
    with report_progress("Planning", log=log):  # Predictions take no time beside measurements.
        shapes = {way: sample.estimate_batch_sizes(*way[:2]) for way in ways}
        pairs = _choose_pairs(shapes)
        measured = _measure_all(model, sample, pairs, codecs[0], stores[0], limit)
    predictor = Predictor(
        list(measured.values()), data, sample, model, evaluation, keep_graph, 1 + evaluate_apart
    )
    compared = max(measured, key=lambda pair: measured[pair].shape.edges)

    def extra(codec: Codec, place: Store) -> tuple[float, float]:
        """Measure seconds and bytes per row of other histories, beyond the first kind's."""
        if (codec, place) == (codecs[0], stores[0]):
            return 0.0, 0.0
        one = measured[compared]
        other = measure(model, partial(sample.first_batch, *compared), codec, place)
        rows = max(1.0, one.shape.own + one.shape.halo)
        seconds = (other.step - one.step) / rows
        if codec == codecs[0]:  # The same rows elsewhere are never read faster: that is noise.
            seconds = max(0.0, seconds)
        return seconds, (other.training.peak - one.training.peak) / rows

    seen: list[Candidate] = []
    for codec in codecs:
        found: list[Candidate] = []
        for place in stores:
            more = extra(codec, place)
            found += [predictor(way, shapes[way], codec, place, more) for way in ways]
            if all(one.peak_bytes <= limit for one in found):
                break  # The disk is no faster.
        seen += [_add_giving_back(one, limit) for one in found]
        fit = [one for one in seen[-len(found) :] if one.peak_bytes <= limit]
        if fit:
            return _make_plan(min(fit, key=ORDER), seen, limit, codecs[0].name)
    raise _nothing_fits(seen, limit)


def plan_micro_batches(
    model: ScalableGNN, loader: SubgraphLoader, budget_bytes: int
) -> tuple[int, int]:
    """Split a loader's mini-batches into micro-batches that fit a budget of memory.

    A micro-batch has a divisor of the parts; the gradients of several are accumulated before each
    step, with ``train_epoch(..., micro_batches=...)``. The halo between the micro-batches of one
    step comes from the histories.

    Args:
        model: The model.
        loader: The loader of mini-batches.
        budget_bytes: The most that :func:`activation_bytes` may be, of the parts with most edges.

    Returns:
        Parts per micro-batch, and micro-batches per step.

    Raises:
        MemoryError: If not even one part fits.
    """
    if budget_bytes < 1:
        raise ValueError(f"'budget_bytes' is {budget_bytes}, expected a number of bytes")
    parts = loader.batch_size or 1
    largest = loader.edges_per_part().argsort(descending=True, stable=True)
    need = 0
    for size in (size for size in range(parts, 0, -1) if parts % size == 0):
        need = activation_bytes(model, loader.cut(largest[:size].tolist()))
        if need <= budget_bytes:
            return size, parts // size
    raise MemoryError(
        f"'budget_bytes' is {budget_bytes}, but one part needs {human(need)}: cut the graph into "
        "more parts, or raise the budget"
    )


def _check(
    data: Data,
    model: ScalableGNN,
    memory: int | str,
    num_parts: int | None,
    batch_size: int | None,
    steps: int,
    evaluation: str,
) -> int:
    """Return the bytes of ``memory``, and refuse what can't be planned."""
    if isinstance(data, HeteroData):
        raise ValueError(
            "'data' is a HeteroData, of which gas.plan knows nothing: cut it into some parts, and "
            "into more if a mini-batch doesn't fit"
        )
    limit = bytes_of("memory", memory)
    check_integer("steps", steps, 1)
    for name, value in (("num_parts", num_parts), ("batch_size", batch_size)):
        if value is not None:
            check_integer(name, value, 1, data.num_nodes)
    if evaluation not in ("layerwise", "full", "none"):
        raise ValueError(f"'evaluation' is {evaluation!r}, expected one of layerwise, full, none")
    if model.device.type != "cpu":
        raise ValueError(
            f"'model' is on {model.device}, but what is predicted is memory of the host: plan with "
            "the model on the CPU, or cut by a part's bytes, gas.cluster(data, 'auto', memory=...)"
        )
    return limit


def _measure_all(
    model: ScalableGNN,
    sample: Sample,
    pairs: dict[tuple[int, int], Shape],
    codec: Codec,
    store: Store,
    limit: int,
) -> dict[tuple[int, int], Measured]:
    """Measure mini-batches, by parts and parts per batch, as far as that fits the limit itself.

    ``pairs`` has the size of each, the smallest last.
    """
    found: dict[tuple[int, int], Measured] = {}
    smallest, *larger = reversed(pairs)
    known = measure(model, partial(sample.first_batch, *smallest), codec, store)  # Loads code.
    for pair in (smallest, *larger):
        taken = bound_bytes(model, codec, known, pairs[pair])
        if found and _room(limit) < taken:
            give_back_freed()
            if _room(limit) < taken:
                break  # Those that are larger don't fit, either.
        known = found[pair] = measure(model, partial(sample.first_batch, *pair), codec, store)
    return found


def _room(limit: int) -> float:
    """Count what the process may allocate now within the limit, and within what the system has."""
    return min(limit - resident_kinds()[0], free_memory())


def _add_giving_back(one: Candidate, limit: int) -> Candidate:
    """Return the candidate, slower if freed blocks have to be given back at once."""
    factor = GIVING_BACK if one.may_exceed(limit) else 1
    return replace(one, epoch_seconds=one.epoch_seconds * factor)


def _codecs(
    model: ScalableGNN,
    dtype: Codec | torch.dtype | str | Sequence[Codec | torch.dtype | str] | None,
) -> list[Codec]:
    if dtype is None:
        own = model._factory.codec
        return [own, *([Codec("bfloat16")] if own.name == "float32" else [])]
    several = dtype if isinstance(dtype, Sequence) and not isinstance(dtype, str) else [dtype]
    if not several:
        raise ValueError("'dtype' is empty, expected a way to store rows, or several")
    return [Codec.of(one) for one in several]


def _stores(model: ScalableGNN, store: Store) -> list[Store]:
    store = model._factory.store if store is None else store
    if store is None or store == "auto":
        return ["host", "disk"]
    if store in ("device", "pinned"):
        return ["host"]
    if isinstance(store, str) and store not in ("host", "disk"):
        raise ValueError(f"'store' is {store!r}, expected host, disk, or a function")
    return [store]


def _choose_pairs(shapes: dict[Way, tuple[Shape, Shape]]) -> dict[tuple[int, int], Shape]:
    """Choose mini-batches to measure, of several sizes and halos.

    Returns:
        The largest sizes, by parts and parts per batch.
    """
    largest = {way[:2]: each[1] for way, each in shapes.items()}
    by_number: dict[int, list[tuple[int, int]]] = {}
    for (parts, per_batch, _), (mean, _) in shapes.items():
        if mean.edges <= MOST_EDGES:
            by_number.setdefault(math.ceil(parts / per_batch), []).append((parts, per_batch))
    if not by_number:
        parts, per_batch, _ = min(shapes, key=lambda way: shapes[way][0].edges)
        return {(parts, per_batch): largest[parts, per_batch]}
    numbers = sorted(by_number)
    chosen = dict.fromkeys([*numbers[:LEVELS], numbers[-1]])
    ends = ((min(by_number[number]), max(by_number[number])) for number in chosen)
    return {pair: largest[pair] for pair in chain.from_iterable(ends)}


def _make_plan(best: Candidate, seen: list[Candidate], limit: int, first: str) -> Plan:
    """Make the plan, with its reasons."""
    fit = sorted((one for one in seen if one.peak_bytes <= limit), key=ORDER)
    rest = sorted((one for one in seen if one.peak_bytes > limit), key=lambda x: x.peak_bytes)
    # Less exact ones that were looked at come last.
    fit = [best, *(one for one in fit if one is not best)]
    steps = math.ceil(best.num_parts / best.batch_size / best.micro_batches)
    why = (
        f"{best.num_parts} parts, {best.batch_size} per batch: the fastest of {len(fit)} "
        f"candidates that fit {human(limit)}, of {len(seen)}; {steps} steps per epoch."
    )
    if best.micro_batches > 1:
        why += f" A step's batch is split into {best.micro_batches}, which is faster or fits."
    if best.dtype != first:
        least = min(one.peak_bytes for one in seen if one.dtype == first)
        why += (
            f" Histories of {first} take {human(least)} at least, so rows are rounded to "
            f"{best.dtype}, which may cost accuracy."
        )
    if best.store == "disk" and any(one.store == "host" for one in seen):
        why += " Histories lie on the disk, because less fits with them in memory."
    if gives_back := best.may_exceed(limit):
        why += (
            " Freed blocks are given back to the system at once, which takes time, to fit surely."
        )
    candidates = [*fit, *rest]
    return Plan(**vars(best), memory=limit, why=why, gives_back=gives_back, candidates=candidates)


def _nothing_fits(seen: list[Candidate], limit: int) -> MemoryError:
    """Make the error that names the largest component."""
    least = min(seen, key=lambda one: one.peak_bytes)
    most = max(least.components, key=lambda name: least.components[name])
    return MemoryError(
        f"'memory' is {human(limit)}, but the least that training is predicted to take is "
        f"{human(least.peak_bytes)}, with {least.num_parts} parts, {least.batch_size} per batch, "
        f"and histories as {least.dtype} on {least.store}; most of it is {most}, "
        f"{human(least.components[most])}: raise it, or make the model narrower"
    )
