"""Choose parts, batch size and histories such that training fits memory and is fast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch_geometric.data import Data, HeteroData

from gas.graph import check_is_graph
from gas.history import Codec
from gas.loader import SubgraphLoader
from gas.native import (
    bytes_of,
    check_flags,
    check_integer,
    free_memory,
    human,
    report_progress,
    resident_bytes,
    resident_kinds,
)
from gas.scalable import ScalableGNN, activation_bytes
from gas.training.candidates import Candidate, Plan, choose_candidate, make_plan, no_fit_error
from gas.training.cost import Batching, BatchSample, Predictor, Store, bound_bytes
from gas.training.full_batch import fits_one_batch
from gas.training.measure import BatchCosts, BatchShape, measure, release_freed_memory

LEVELS = 4  # Numbers of mini-batches per epoch for which some are measured.
MOST_MEASURED_EDGES = 3_000_000  # Most edges of a mini-batch that is measured.
# Factor of the time of an epoch if freed blocks are released at once; measured: up to 1.6.
RELEASE_TIME = 1.5
MOST_PARTS = 2048
LEAST_NODES = 100  # Nodes per part.
# Of up to 64 parts per step, of 25 nodes at least: many small ones make batches alike.
MIXED, LEAST_MIXED = 64, 25


@check_flags
def plan(
    data: Data,
    model: ScalableGNN,
    memory: int | str | None = None,
    *,
    num_parts: int | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    dtype: Codec | torch.dtype | str | Sequence[Codec | torch.dtype | str] | None = None,
    store: Store = None,
    evaluation: str | None = None,
    evaluate_apart: bool = False,
    layout: str | None = None,
    edge_weight: bool = True,
    keep_graph: bool = True,
    method: str = "auto",
    seed: int = 0,
    cache: bool | str | Path = True,
    log: bool = True,
) -> Plan:
    """Predict memory and time of training, and choose the fastest way to accuracy that fits.

    With more steps per epoch, a model learns more in an epoch, up to eight or so; but batches then
    read more rows, which are staler. The time of an epoch is measured here. The epochs that each
    number of steps needs were measured on another graph (``benchmarks/time_to_accuracy.py``), and
    may be several times as many on yours. So a single part, which :func:`gas.fit` trains as a full
    batch, is chosen where it fits, unless the graph has at least 50,000 nodes and histories are
    expected to take at most half its time. Give ``num_parts`` to train with histories anyway.

    The graph is cut once, and some mini-batches of different sizes are run forward and backward.
    The costs of others are estimated from their nodes, halo and edges. The graph, the model, its
    histories and PyTorch's generators aren't changed::

        plan = gas.plan(data, model, "6GB")
        print(plan)
        graph = gas.cluster(data, plan.num_parts, model=model)
        loader = gas.SubgraphLoader(graph, batch_size=plan.batch_size, shuffle=True)
        ...
        train_epoch(model, loader, optimizer, micro_batches=plan.micro_batches)

    The peak is that of the process's resident memory in training and evaluation, on the CPU,
    including freed blocks that the C library keeps; see ``gives_back``. Pages of histories on disk
    that the system caches in memory don't count. Measuring stays within ``memory``, too; the memory
    of METIS, which cuts the graph before, isn't predicted.

    Args:
        data: The graph before clustering; see :func:`gas.cluster`.
        model: The model, on the CPU.
        memory: The memory limit of the process, in bytes or like ``"6GB"`` (10^9 bytes each;
            ``"6GiB"``: 2^30). (default: what it has, and what is free)
        num_parts: The number of parts. (default: up to 64 per step, at most 2,048, and at least 25
            nodes each; with ``steps``, powers of two times ``steps``, at least a hundred nodes
            each)
        batch_size: Parts per step of the optimizer. If ``steps`` or ``num_parts`` is given, too,
            they are split into micro-batches where they don't fit.
            (default: the number that makes ``steps`` steps)
        steps: Steps of the optimizer per epoch, which don't depend on memory; ignored if
            ``num_parts`` and ``batch_size`` are given. (default: the best power of two up to 2,048;
            1 is the full batch)
        dtype: The precision of the histories, see :class:`gas.History`, or several, of which a
            later, less exact one is chosen only if none before fits. (default: that of ``model``;
            then, if it is float32, bfloat16)
        store: The place of the histories. (default: that of ``model``; if it has none, in memory,
            or else on the disk)
        evaluation: The evaluation after every epoch: ``"layerwise"``, ``"full"`` or ``"none"``.
            (default: that of :func:`gas.fit`, ``"full"`` up to 20,000 nodes and 3 million edges)
        evaluate_apart: Whether evaluation has separate histories. (default: ``False``)
        layout: See :class:`gas.SubgraphLoader`.
        edge_weight: See :class:`gas.SubgraphLoader`. (default: ``True``)
        keep_graph: Whether ``data`` and the edges of the clustered graph stay in memory; otherwise
            ``del data`` and ``loader.forget_edges()`` are expected. (default: ``True``)
        method: See :func:`gas.metis`. (default: ``"auto"``)
        seed: See :func:`gas.metis`; also the seed of the choice of batches. (default: ``0``)
        cache: See :func:`gas.metis`. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)

    Returns:
        The choice, a :class:`gas.training.Plan`; printed, it shows all candidates.

    Raises:
        ValueError: If an argument is unusable, naming it.
        MemoryError: If nothing fits; it names the largest component.
    """
    limit = _check_arguments(data, model, memory, num_parts, batch_size, steps, evaluation)
    is_small = fits_one_batch(data.num_nodes, data.num_edges)
    evaluation = evaluation or ("full" if is_small else "layerwise")
    codecs, stores = _codecs(model, dtype), _stores(model, store)
    batchings = list_batchings(data.num_nodes, num_parts, batch_size, steps)
    finest = max(batching[0] for batching in batchings)
    sample = BatchSample(data, model, finest, layout, edge_weight, method, seed, cache, log)
    with report_progress("Planning", log=log):  # Predictions take little time.
        shapes = {batching: sample.estimate_batch_sizes(*batching[:2]) for batching in batchings}
        pairs = _choose_pairs(shapes)
        measured = _measure_all(model, sample, pairs, codecs[0], stores[0], limit)
    costs, sets = list(measured.values()), 1 + evaluate_apart
    predictor = Predictor(costs, data, sample, model, evaluation, keep_graph, sets)
    compared = max(measured, key=lambda pair: measured[pair].shape.edges)

    def measure_extra(codec: Codec, place: Store) -> tuple[float, float]:
        """Measure additional seconds and bytes per row, compared with the first histories."""
        if (codec, place) == (codecs[0], stores[0]):
            return 0.0, 0.0
        one = measured[compared]
        other = measure(model, partial(sample.first_batch, *compared), codec, place)
        rows = max(1.0, one.shape.own + one.shape.halo)
        seconds = (other.step - one.step) / rows
        if codec == codecs[0]:  # The second store is slower; a negative difference is noise.
            seconds = max(0.0, seconds)
        return seconds, (other.training.peak - one.training.peak) / rows

    seen: list[Candidate] = []
    for codec in codecs:
        found: list[Candidate] = []
        for place in stores:
            more = measure_extra(codec, place)
            found += [predictor(each, shapes[each], codec, place, more) for each in batchings]
            if all(one.peak_bytes <= limit for one in found):
                break  # The disk is no faster.
        seen += [_add_release_time(one, limit) for one in found]
        fit = [one for one in seen[-len(found) :] if one.peak_bytes <= limit]
        if fit:
            return make_plan(choose_candidate(fit, data.num_nodes), seen, limit, codecs[0].name)
    raise no_fit_error(seen, limit)


def plan_micro_batches(
    model: ScalableGNN, loader: SubgraphLoader, budget_bytes: int | str
) -> tuple[int, int]:
    """Split a loader's mini-batches into micro-batches that fit a budget of memory.

    A micro-batch has a divisor of the parts; the gradients of several are accumulated before each
    step, with ``train_epoch(..., micro_batches=...)``. The halo between the micro-batches of one
    step comes from the histories.

    Args:
        model: The model.
        loader: The loader of mini-batches.
        budget_bytes: The upper bound of :func:`activation_bytes`, for the parts with most edges;
            in bytes, or like ``"500MB"``.

    Returns:
        Parts per micro-batch, and micro-batches per step.

    Raises:
        MemoryError: If not even one part fits.
    """
    limit = bytes_of("budget_bytes", budget_bytes)
    parts = loader.parts_per_batch
    largest = loader.edges_per_part().argsort(descending=True, stable=True)
    need = 0
    for size in (size for size in range(parts, 0, -1) if parts % size == 0):
        need = activation_bytes(model, loader.cut(largest[:size].tolist()))
        if need <= limit:
            return size, parts // size
    raise MemoryError(
        f"'budget_bytes' is {budget_bytes}, but one part needs {human(need)}: cut the graph into "
        "more parts, or raise the budget"
    )


def _check_arguments(
    data: Data,
    model: ScalableGNN,
    memory: int | str | None,
    num_parts: int | None,
    batch_size: int | None,
    steps: int | None,
    evaluation: str | None,
) -> int:
    """Refuse arguments that can't be planned; return the bytes of ``memory``."""
    check_is_graph(data)
    if isinstance(data, HeteroData):
        raise ValueError(
            "'data' is a HeteroData, of which gas.plan knows nothing: cut it into some parts, and "
            "into more if a mini-batch doesn't fit"
        )
    if getattr(model, "ranks", None) is not None:
        raise ValueError(
            "'model' is distributed, and gas.plan measures one process: plan before gas.distribute"
        )
    if not isinstance(getattr(model, "_orig_mod", model), ScalableGNN):  # Also a compiled one.
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a gas.ScalableGNN: convert it, "
            "gas.to_scalable(net, data)"
        )
    if memory is None:
        memory = resident_bytes() + free_memory()
    limit = bytes_of("memory", memory)
    if steps is not None:
        check_integer("steps", steps, 1)
    for name, value in (("num_parts", num_parts), ("batch_size", batch_size)):
        if value is not None:
            check_integer(name, value, 1, data.num_nodes)
    if evaluation not in (None, "layerwise", "full", "none"):
        raise ValueError(f"'evaluation' is {evaluation!r}, expected one of layerwise, full, none")
    if model.device.type != "cpu":
        raise ValueError(
            f"'model' is on {model.device}, but what is predicted is memory of the host: plan with "
            "the model on the CPU, or cut by a part's bytes, gas.cluster(data, 'auto', memory=...)"
        )
    return limit


def list_batchings(
    num_nodes: int, num_parts: int | None, batch_size: int | None, steps: int | None
) -> list[Batching]:
    """Return ways to cut a graph so that an epoch has ``steps`` steps of equal size.

    Without ``steps``, an epoch has any power of two; one step is a full batch.
    """
    if steps is not None or (num_parts is not None and batch_size is not None):
        return list(_iter_batchings(num_nodes, num_parts, batch_size, steps or 1))
    most = min(MOST_PARTS, max(1, num_nodes // LEAST_MIXED))
    batchings: list[Batching] = []
    for number in (2**i for i in range(12)):
        if num_parts is not None:
            batchings.append((num_parts, max(1, num_parts // number), 1))
        elif batch_size is not None:
            if batch_size * number <= max(batch_size, min(MOST_PARTS, num_nodes)):
                batchings.append((batch_size * number, batch_size, 1))
        elif number <= most:
            per_step = min(MIXED, most // number)
            batchings.append((number * per_step, per_step, 1) if number > 1 else (1, 1, 1))
    return list(dict.fromkeys(batchings))


def _iter_batchings(
    num_nodes: int, num_parts: int | None, batch_size: int | None, steps: int
) -> Iterator[Batching]:
    """Yield the batchings with one number of steps."""
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


def _measure_all(
    model: ScalableGNN,
    sample: BatchSample,
    pairs: dict[tuple[int, int], BatchShape],
    codec: Codec,
    store: Store,
    limit: int,
) -> dict[tuple[int, int], BatchCosts]:
    """Measure mini-batches, as long as this fits the limit.

    ``pairs`` has the size of each by parts and parts per batch, the smallest last.
    """
    found: dict[tuple[int, int], BatchCosts] = {}
    smallest, *larger = reversed(pairs)
    known = measure(model, partial(sample.first_batch, *smallest), codec, store)  # Loads code.
    for pair in (smallest, *larger):
        taken = bound_bytes(model, codec, known, pairs[pair])
        if found and _available_bytes(limit) < taken:
            release_freed_memory()
            if _available_bytes(limit) < taken:
                break  # Those that are larger don't fit, either.
        known = found[pair] = measure(model, partial(sample.first_batch, *pair), codec, store)
    return found


def _available_bytes(limit: int) -> float:
    """Return the bytes that the process may allocate now, by the limit and the system."""
    return min(limit - resident_kinds()[0], free_memory())


def _add_release_time(one: Candidate, limit: int) -> Candidate:
    """Return the candidate, with a longer time if freed blocks have to be released at once."""
    factor = RELEASE_TIME if one.may_exceed(limit) else 1
    return replace(one, epoch_seconds=one.epoch_seconds * factor)


def _codecs(
    model: ScalableGNN,
    dtype: Codec | torch.dtype | str | Sequence[Codec | torch.dtype | str] | None,
) -> list[Codec]:
    """Return the precisions to try, in order."""
    if dtype is None:
        own = model._factory.codec
        return [own, *([Codec("bfloat16")] if own.name == "float32" else [])]
    several = dtype if isinstance(dtype, Sequence) and not isinstance(dtype, str) else [dtype]
    if not several:
        raise ValueError("'dtype' is empty, expected a way to store rows, or several")
    return [Codec.of(one) for one in several]


def _stores(model: ScalableGNN, store: Store) -> list[Store]:
    """Return the stores to try, in order."""
    store = model._factory.store if store is None else store
    if store is None or store == "auto":
        return ["host", "disk"]
    if store in ("device", "pinned"):
        return ["host"]
    if isinstance(store, str) and store not in ("host", "disk"):
        raise ValueError(f"'store' is {store!r}, expected host, disk, or a function")
    return [store]


def _choose_pairs(
    shapes: dict[Batching, tuple[BatchShape, BatchShape]],
) -> dict[tuple[int, int], BatchShape]:
    """Choose mini-batches of several sizes and halos to measure.

    Returns:
        The largest sizes, by parts and parts per batch.
    """
    largest = {batching[:2]: each[1] for batching, each in shapes.items()}
    by_number: dict[int, list[tuple[int, int]]] = {}
    for (parts, per_batch, _), (mean, _) in shapes.items():
        if mean.edges <= MOST_MEASURED_EDGES:
            by_number.setdefault(math.ceil(parts / per_batch), []).append((parts, per_batch))
    if not by_number:
        parts, per_batch, _ = min(shapes, key=lambda batching: shapes[batching][0].edges)
        return {(parts, per_batch): largest[parts, per_batch]}
    numbers = sorted(by_number)
    chosen = dict.fromkeys([*numbers[:LEVELS], numbers[-1]])
    ends = ((min(by_number[number]), max(by_number[number])) for number in chosen)
    return {pair: largest[pair] for pair in chain.from_iterable(ends)}


ScalableGNN._planner = plan  # For gas.cluster, whose room is below this one.
