"""How to cut a graph and store histories, so that training fits memory and is fast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from gas.graph.copies import without_edges
from gas.history import Codec
from gas.history.store import StoreFactory
from gas.loader.batch import SubData, tensors
from gas.native.checks import check_integer
from gas.native.memory import bytes_of, human, resident_bytes
from gas.scalable.model import ScalableGNN
from gas.training.account import MemoryAccount
from gas.training.candidates import Candidate, Extra, Predictor, Way
from gas.training.cost import Cost, Measured, measure, optimizer_seconds
from gas.training.freed import give_back_freed
from gas.training.sample import Sample, Shape

STEPS = 8  # Of an epoch, as settings have them that say nothing.
MOST_PARTS = 2048
LEAST_NODES = 100  # Of a part.
LEVELS = 4  # Numbers of mini-batches that some are measured of.
MOST_EDGES = 3_000_000  # Of a mini-batch that is measured.
SHOWN = 8  # Candidates in the table.


@dataclass(frozen=True)
class Plan(Candidate):
    """How to train within some memory; made by :func:`gas.plan`.

    * ``num_parts``: for :func:`gas.cluster`; ``batch_size``: parts per mini-batch;
      ``micro_batches``: mini-batches per step, for :func:`gas.training.train_epoch`;
    * ``dtype``, ``store``: of the histories, for the model;
    * ``peak_bytes``: the predicted peak of the process's resident memory in training;
      ``components``: who holds how much of it; ``epoch_seconds``: the predicted time of an epoch;
    * ``memory``: the bytes that it had to fit; ``why``: why this was chosen, in words;
    * ``candidates``: all that were looked at, the fastest that fit first, then those that don't.

    ``print(plan)`` shows a table.
    """

    memory: int
    why: str
    candidates: list[Candidate] = field(repr=False)

    @property
    def hot_bytes(self) -> int:
        """Of what is predicted to be left of the memory, half: for ``model.pack(loader, memory)``.

        0 where histories fit memory. The other half is for what packed rows pass through.
        """
        return (self.memory - self.peak_bytes) // 2 if self.store == "disk" else 0

    def summary(self) -> dict[str, Any]:
        """What was chosen and predicted, without the candidates, for JSON."""
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
        for name, size in self.components.items():
            if size:
                rows.append(("", "", "", "", name, human(size), ""))
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
    store: str | StoreFactory | None = None,
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
    """Predicts memory and time of training, and picks the fastest way that fits.

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
    with the C library as it is, which keeps some blocks that were freed. Preparing the graph comes
    before, and its peak isn't predicted. Pages of histories on disk that the system keeps in
    memory, while it has room, don't count.

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
    ways = list(_ways(data.num_nodes, num_parts, batch_size, steps))
    finest = max(way[0] for way in ways)
    sample = Sample(data, model, finest, layout, edge_weight, method, seed, cache, log)
    shapes = {way: sample.shapes(*way[:2]) for way in ways}

    pairs = _measured_pairs(shapes)
    measured = _measured(model, sample, pairs, codecs[0], stores[0])
    cost = Cost(list(measured.values()))
    stays = _stays(data, sample, model, cost, evaluation, keep_graph)
    predictor = Predictor(
        model, cost, stays, Shape(sample.num_nodes, 0, sample.num_edges), optimizer_seconds(model),
        evaluation, 1 + evaluate_apart,
    )  # fmt: skip
    compared = max(pairs, key=lambda pair: measured[pair].shape.edges)

    def extra(codec: Codec, place: str | StoreFactory | None) -> Extra:
        if (codec, place) == (codecs[0], stores[0]):
            return Extra()
        other = measure(model, partial(_first_batch, sample, compared), codec, place)
        return Extra.between(measured[compared], other, exact=codec == codecs[0])

    seen: list[Candidate] = []
    for codec in codecs:
        found: list[Candidate] = []
        for place in stores:
            more = extra(codec, place)
            found += [predictor(way, shapes[way], codec, place, more) for way in ways]
            if all(one.peak_bytes <= limit for one in found):
                break  # The disk is no faster.
        seen += found
        fit = [one for one in found if one.peak_bytes <= limit]
        if fit:
            best = min(fit, key=_order)
            return _chosen(best, seen, limit, codecs[0].name)
    raise _nothing_fits(seen, limit)


def _check(
    data: Data,
    model: ScalableGNN,
    memory: int | str,
    num_parts: int | None,
    batch_size: int | None,
    steps: int,
    evaluation: str,
) -> int:
    """The bytes of ``memory``; refuses what can't be planned."""
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


def _measured(
    model: ScalableGNN,
    sample: Sample,
    pairs: list[tuple[int, int]],
    codec: Codec,
    store: str | StoreFactory | None,
) -> dict[tuple[int, int], Measured]:
    """What mini-batches take, by parts and parts per batch."""
    found: dict[tuple[int, int], Measured] = {}
    for pair in [pairs[-1], *pairs]:  # The first is measured twice: once to load what it takes.
        found[pair] = measure(model, partial(_first_batch, sample, pair), codec, store)
    return found


def _first_batch(sample: Sample, pair: tuple[int, int]) -> SubData:
    return sample.batches(*pair)[0]


def _order(one: Candidate) -> tuple[float, int]:
    return one.epoch_seconds, one.peak_bytes


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


def _stores(
    model: ScalableGNN, store: str | StoreFactory | None
) -> list[str | StoreFactory | None]:
    store = model._factory.store if store is None else store
    if store is None or store == "auto":
        return ["host", "disk"]
    if store in ("device", "pinned"):
        return ["host"]
    if isinstance(store, str) and store not in ("host", "disk"):
        raise ValueError(f"'store' is {store!r}, expected host, disk, or a function")
    return [store]


def _ways(
    num_nodes: int, num_parts: int | None, batch_size: int | None, steps: int
) -> Iterator[Way]:
    """The ways to make steps of as many nodes."""
    steps = min(steps, num_nodes)
    if num_parts is not None:
        numbers = [num_parts]
    elif batch_size is not None:
        numbers = [min(steps * batch_size, num_nodes)]
    else:
        most = min(MOST_PARTS, num_nodes // LEAST_NODES)
        doublings = range(max(0, int(math.log2(max(1, most // steps)))) + 1)
        numbers = [steps * 2**i for i in doublings]
    for parts in numbers:
        per_step = min(batch_size or max(1, parts // steps), parts)
        for micro in range(1, per_step + 1):
            if per_step % micro == 0:
                yield parts, per_step // micro, micro


def _measured_pairs(
    shapes: dict[Way, tuple[Shape, Shape]],
) -> list[tuple[int, int]]:
    """Parts and parts per batch of the mini-batches to measure: of several sizes and halos."""
    by_number: dict[int, list[tuple[int, int]]] = {}
    for (parts, per_batch, _), (mean, _) in shapes.items():
        if mean.edges <= MOST_EDGES:
            by_number.setdefault(math.ceil(parts / per_batch), []).append((parts, per_batch))
    if not by_number:
        parts, per_batch, _ = min(shapes, key=lambda way: shapes[way][0].edges)
        return [(parts, per_batch)]
    numbers = sorted(by_number)
    chosen = dict.fromkeys([*numbers[:LEVELS], numbers[-1]])
    return list(
        dict.fromkeys(
            pair for number in chosen for pair in (min(by_number[number]), max(by_number[number]))
        )
    )


def _stays(
    data: Data,
    sample: Sample,
    model: ScalableGNN,
    cost: Cost,
    evaluation: str,
    keep_graph: bool,
) -> dict[str, int]:
    """What is held as long as training goes on, however the graph is cut."""
    now = MemoryAccount()
    now.enter("given", tensors(data))
    now.enter("sample", sample.held())
    account = MemoryAccount()
    account.enter("interpreter and libraries", _libraries(model, now.total))
    if keep_graph:
        account.enter("graph given", now.held["given"])
    graph, relabel = sample.graph, sample.loader._relabel
    account.enter("features", [graph.get("x")])
    account.enter("graph, clustered", tensors(graph if keep_graph else without_edges(graph)))
    account.enter("loader", (relabel.rowptr, relabel.col, relabel.e_id, relabel.weight))
    account.enter("loader", relabel.scratch_bytes)
    if evaluation == "full":
        whole = Shape(sample.num_nodes, 0, sample.num_edges)
        account.enter("full batch", int(cost.looked_at(whole)) + account.held["features"])
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    account.enter("parameters and optimizer", 4 * parameters)  # Adam's.
    if evaluation != "none":
        account.enter("outputs", int(cost.out_bytes * sample.num_nodes))
    return account.held


def _libraries(model: ScalableGNN, given: int) -> int:
    """What the process holds besides the graph and the model's own histories."""
    give_back_freed()
    filled = sum(
        history.store.nbytes
        for history in model.histories
        if history.store.tier == "host" and bool(history.written.any())
    )
    return max(0, resident_bytes() - given - filled)


def _chosen(best: Candidate, seen: list[Candidate], limit: int, first: str) -> Plan:
    """The plan, with its reasons."""
    fit = sorted((one for one in seen if one.peak_bytes <= limit), key=_order)
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
    return Plan(
        **vars(best),
        memory=limit,
        why=why,
        candidates=[*fit, *rest],
    )


def _nothing_fits(seen: list[Candidate], limit: int) -> MemoryError:
    """The error that says what takes most."""
    least = min(seen, key=lambda one: one.peak_bytes)
    most = max(least.components, key=lambda name: least.components[name])
    return MemoryError(
        f"'memory' is {human(limit)}, but the least that training is predicted to take is "
        f"{human(least.peak_bytes)}, with {least.num_parts} parts, {least.batch_size} per batch, "
        f"and histories as {least.dtype} on {least.store}; most of it is {most}, "
        f"{human(least.components[most])}: raise it, or make the model narrower"
    )
