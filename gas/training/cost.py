"""Predict the bytes and seconds of training, by mini-batches of coarser parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import Edges, PartitionOptions, cluster, find_parts, remove_edges
from gas.history import Codec, StoreFactory
from gas.loader import CACHE_BYTES, SubData, SubgraphLoader, iter_tensors
from gas.native import LARGE_BYTES, MOST_IDLE_BYTES, resident_bytes
from gas.scalable import ScalableGNN
from gas.training.candidates import FREED, Candidate
from gas.training.measure import (
    BatchCosts,
    BatchShape,
    MemoryAccount,
    optimizer_seconds,
    release_freed_memory,
)

MOST_SAMPLED = 4  # Mini-batches whose halo is counted, for each number and size of parts.
EDGES_AT_ONCE = 1 << 22  # Edges that are counted together.
EPOCHS = 5  # The largest mini-batch is that of this many epochs of random ones.

Store = str | StoreFactory | None
Batching = tuple[int, int, int]  # Parts, parts per mini-batch, mini-batches per step.


class BatchSample:
    """Sample the mini-batches of a graph for several numbers of parts.

    The graph is cut into ``finest`` parts. For fewer parts, these are grouped by partitioning the
    graph of parts, weighted by the number of edges between them.
    """

    def __init__(
        self,
        data: Data,
        model: ScalableGNN,
        finest: int,
        layout: str | None,
        edge_weight: bool,
        method: str,
        seed: int,
        cache: bool | str | Path,
        log: bool,
    ) -> None:
        self.graph = cluster(
            data, finest, model=model, method=method, seed=seed, cache=cache, log=log, check=False
        )
        self.num_nodes, self.finest = int(self.graph.parts[-1]), finest
        self._method, self._seed = method, seed
        self.loader = SubgraphLoader(
            self.graph, layout=layout, edge_weight=edge_weight, log=False, cache=False
        )
        self.num_edges = int(self.loader.degree.sum())
        self._edges = self.loader.edges_per_part()
        self._edge_counts = self._count_edges()
        self._groups: dict[int, list[Tensor]] = {}

    def _count_edges(self) -> Tensor:
        """Count the edges from each part to each, of shape ``[finest, finest]``."""
        part = torch.repeat_interleave(self.graph.parts.diff())
        relabel, size = self.loader._relabel, self.finest**2
        row = torch.repeat_interleave(self._edges)
        counts = torch.zeros(size, dtype=torch.long)
        for some, col in zip(
            row.split(EDGES_AT_ONCE), relabel.col.split(EDGES_AT_ONCE), strict=True
        ):
            counts += torch.bincount(some * self.finest + part[col], minlength=size)
        return counts.view(self.finest, self.finest)

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the sample."""
        relabel = self.loader._relabel
        yield from iter_tensors(self.graph)
        yield from (t for t in (relabel.rowptr, relabel.e_id, relabel.weight) if t is not None)
        yield from (relabel.col, self._edge_counts, *self.loader.feature_sums.tensors())

    def groups(self, num_parts: int) -> list[Tensor]:
        """Group the finest parts into fewer ones; return the finest parts of each."""
        if num_parts == self.finest:
            return list(torch.arange(num_parts).split(1))
        if num_parts not in self._groups:
            dst, src = self._edge_counts.nonzero().t()
            weight = self._edge_counts[dst, src]
            method, known = ("random", None) if self._method == "random" else ("metis", weight)
            options = PartitionOptions(method=method, seed=self._seed, cache=False, log=False)
            edges = Edges(src, dst, None, self.finest)
            perm, ptr = find_parts(edges, num_parts, options, known)
            self._groups[num_parts] = [
                perm[begin:end].sort().values
                for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)
            ]
        return self._groups[num_parts]

    def first_batch(self, num_parts: int, batch_size: int) -> SubData:
        """Cut the first of :meth:`batches`."""
        return self.batches(num_parts, batch_size)[0]

    def batches(self, num_parts: int, batch_size: int, most: int = 1) -> list[SubData]:
        """Cut at most ``most`` mini-batches of randomly chosen parts."""
        groups = self.groups(num_parts)
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.randperm(num_parts, generator=generator).split(batch_size)
        return [
            self.loader.cut(torch.cat([groups[part] for part in parts.tolist()]).tolist())
            for parts in order[:most]
            if parts.numel() == batch_size or len(order) == 1
        ]

    def estimate_batch_sizes(
        self, num_parts: int, batch_size: int
    ) -> tuple[BatchShape, BatchShape]:
        """Estimate the size of the mean mini-batch, and of the largest in some epochs."""
        batch_size = min(batch_size, num_parts)
        number = math.ceil(num_parts / batch_size)
        found = [BatchShape.of(b) for b in self.batches(num_parts, batch_size, MOST_SAMPLED)]
        own, halo = (torch.tensor([float(s[i]) for s in found]) for i in (0, 1))
        ratio = float(halo.sum() / own.sum().clamp(min=1))
        mean = self.num_nodes / number
        edges = torch.stack([self._edges[group].sum() for group in self.groups(num_parts)]).double()
        if batch_size == 1:
            most = float(edges.max())
        elif batch_size == num_parts:
            most = float(edges.sum())
        else:  # The expected maximum of that many sums of parts drawn without replacement.
            spread = float(edges.std()) * math.sqrt(batch_size * (1 - batch_size / num_parts))
            beyond = math.sqrt(2 * math.log(max(2, number * EPOCHS)))
            most = min(float(edges.mean()) * batch_size + beyond * spread, self.num_edges)
        average = BatchShape(
            mean, min(ratio * mean, self.num_nodes - mean), self.num_edges / number
        )
        rest = self.num_nodes - mean
        largest = BatchShape(
            max(mean, float(own.max())), min(max(average.halo, float(halo.max())), rest), most
        )
        return average, largest


class Linear:
    """A linear function of a mini-batch's size, with nonnegative coefficients.

    Args:
        shapes: Sizes of mini-batches.
        values: The value for each size; relative errors are minimised.
        halo_is_cheaper: A halo node adds at most as much as an in-batch node. Otherwise batches
            with about as many of both may give all to the halo, and nothing to a full batch.
            (default: ``False``)
    """

    def __init__(
        self, shapes: Sequence[BatchShape], values: Sequence[float], halo_is_cheaper: bool = False
    ) -> None:
        rows = torch.tensor([[1.0, *shape] for shape in shapes], dtype=torch.double)
        if halo_is_cheaper:
            rows[:, 2] += rows[:, 1]  # What each node adds; the column before: in-batch nodes more.
        wanted = torch.tensor(values, dtype=torch.double)
        weight = 1 / wanted.clamp(min=1e-9 + 1e-3 * float(wanted.max()))
        self.coefficients = _solve_nonnegative(rows * weight[:, None], wanted * weight)
        if halo_is_cheaper:
            self.coefficients[1] += self.coefficients[2]

    def __call__(self, shape: BatchShape) -> float:
        """Return the value for a size."""
        one, own, halo, edges = self.coefficients.tolist()
        return one + own * shape.own + halo * shape.halo + edges * shape.edges


def _solve_nonnegative(rows: Tensor, values: Tensor) -> Tensor:
    """Solve nonnegative least squares: try all sets of columns."""
    best, least = torch.zeros(rows.size(1), dtype=torch.double), float(values.square().sum())
    # A single size is fitted by its edges alone, so that costs are proportional to edges.
    order = range(rows.size(1))[:: -1 if rows.size(0) == 1 else 1]
    scale = rows.abs().amax(dim=0).clamp(min=1e-300)
    for size in range(1, min(rows.shape) + 1):
        for chosen in itertools.combinations(order, size):
            columns = list(chosen)
            found = torch.linalg.lstsq(
                rows[:, columns] / scale[columns], values[:, None], driver="gelsd"
            ).solution.view(-1)
            error = float((rows[:, columns] / scale[columns] @ found - values).square().sum())
            if bool((found >= 0).all()) and error < least * (1 - 1e-9):
                best, least = torch.zeros_like(best), error
                best[columns] = found / scale[columns]
    return best


class Predictor:
    """Predict memory and time of training, with some sets of histories, from measured batches."""

    def __init__(
        self,
        measured: Sequence[BatchCosts],
        data: Data,
        sample: BatchSample,
        model: ScalableGNN,
        evaluation: str,
        keep_graph: bool,
        sets: int,
    ) -> None:
        shapes = [one.shape for one in measured]

        def fit(value: Callable[[BatchCosts], float], **options: bool) -> Linear:
            return Linear(shapes, [value(one) for one in measured], **options)

        self._cut = fit(lambda one: one.cut)
        self._step = fit(lambda one: one.step, halo_is_cheaper=True)
        self._batch = fit(lambda one: one.training.batch)
        self._untrained = fit(lambda one: one.evaluation.batch)  # Without transposes.
        self._cached_bytes = fit(lambda one: one.cached_bytes)
        self._kept = fit(lambda one: one.training.kept)
        self._peak = fit(lambda one: one.training.peak)
        self._evaluated = fit(lambda one: one.evaluation.peak)
        widths = [one.embedding_dim for one in model.histories]
        self._row_bytes = 4 * max(widths, default=0)
        self._out_bytes = measured[0].training.out / max(measured[0].shape.own, 1)
        self._model, self._evaluation, self._sets = model, evaluation, sets
        self._graph = BatchShape(sample.num_nodes, 0, sample.num_edges)
        self._constant = self._constant_bytes(data, sample, keep_graph)
        self._per_step = optimizer_seconds(model)

    def __call__(
        self,
        batching: Batching,
        shapes: tuple[BatchShape, BatchShape],
        codec: Codec,
        store: Store,
        extra: tuple[float, float] = (0.0, 0.0),
    ) -> Candidate:
        """Predict the cost of training one way, with mini-batches of a mean and a largest size.

        Histories of this codec and store take ``extra`` seconds and bytes per row, compared with
        those that were measured.
        """
        (num_parts, batch_size, micro), (mean, largest) = batching, shapes
        number = math.ceil(num_parts / batch_size)
        cached_bytes = number * self._cached_bytes(mean)
        components = dict(self._constant)
        is_whole = num_parts == 1
        if is_whole:
            components["full batch"] = self._whole_bytes(components["features"])
        elif batch_size == 1:
            components["kept batches"] = int(min(cached_bytes, CACHE_BYTES))
        components |= self._history_bytes(codec, store)
        components |= self._batch_bytes(largest, extra[1], is_whole)
        is_kept = num_parts == 1 or (batch_size == 1 and cached_bytes <= CACHE_BYTES)
        seconds = self._step(mean) + (0 if is_kept else self._cut(mean))
        seconds += extra[0] * (mean.own + mean.halo)
        return Candidate(
            num_parts,
            batch_size,
            micro,
            codec.name,
            store if isinstance(store, str) else "custom",
            sum(components.values()),
            number * seconds + number / micro * self._per_step,
            components,
        )

    def _history_bytes(self, codec: Codec, store: Store) -> dict[str, int]:
        """Predict the bytes of the histories."""
        widths = [history.embedding_dim for history in self._model.histories]
        rows = self._sets * int(self._graph.own)
        held = {"ages of histories": rows * 4 * len(widths)}
        if store != "disk":
            held["histories"] = rows * sum(map(codec.row_bytes, widths))
        return held

    def _whole_bytes(self, features: int) -> int:
        """Predict the bytes of the graph as one batch, which has a copy of the features."""
        return int(self._untrained(self._graph)) + features

    def _batch_bytes(self, largest: BatchShape, per_row: float, is_whole: bool) -> dict[str, int]:
        """Predict the bytes of the largest mini-batch, or of evaluation, if that is more.

        The graph as one batch is the same in every epoch; training adds its transposes.
        """
        more = per_row * (largest.own + largest.halo)
        batch, kept = self._batch(largest), self._kept(largest) + more
        peak = max(kept, self._peak(largest) + more)
        batch = max(0.0, batch - self._untrained(largest)) if is_whole else batch
        before = 0.0 if is_whole else batch
        training, evaluating = batch + before + peak, 0.0
        if is_whole:
            evaluating = batch + self._evaluated(largest)
        elif self._evaluation == "full":
            evaluating = self._evaluated(self._graph)
        elif self._evaluation == "layerwise":
            evaluating = 2 * batch + self._evaluated(largest) + more
        evaluating += self._constant.get("outputs", 0)  # In addition to those of the best epoch.
        freed = FREED * max(training, evaluating)
        if largest.own * self._row_bytes >= LARGE_BYTES:
            freed = min(freed, MOST_IDLE_BYTES / 2)  # Measured: 155 to 240 MiB.
        return {
            "batch": int(batch),
            "batch before": int(before),
            "activations": int(kept),
            "gradients of activations": int(peak - kept),
            "evaluation, beyond training": int(max(0, evaluating - training)),
            "freed, not given back": int(freed),
        }

    def _constant_bytes(self, data: Data, sample: BatchSample, keep_graph: bool) -> dict[str, int]:
        """Count the bytes that are held during all of the training, for any number of parts."""
        model, now, account = self._model, MemoryAccount(), MemoryAccount()
        now.enter("given", iter_tensors(data))
        now.enter("sample", sample.held_tensors())
        account.enter("interpreter and libraries", _library_bytes(model, now.total))
        if keep_graph:
            account.enter("graph given", now.held["given"])
        graph, relabel = sample.graph, sample.loader._relabel
        account.enter("features", [graph.get("x")])
        account.enter("sums of features", sample.loader.feature_sums.tensors())
        account.enter(
            "graph, clustered", iter_tensors(graph if keep_graph else remove_edges(graph))
        )
        account.enter("loader", (relabel.rowptr, relabel.col, relabel.e_id, relabel.weight))
        account.enter("loader", relabel.scratch_bytes)
        if self._evaluation == "full":
            account.enter("full batch", self._whole_bytes(account.held["features"]))
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        account.enter("parameters and optimizer", 4 * parameters)  # Adam's.
        if self._evaluation != "none":
            account.enter("outputs", int(self._out_bytes * sample.num_nodes))
        return account.held


def bound_bytes(model: ScalableGNN, codec: Codec, known: BatchCosts, shape: BatchShape) -> float:
    """Bound the bytes of measuring a mini-batch by the measured bytes of a smaller one."""
    rows = known.shape.own + known.shape.halo
    histories = rows * sum(codec.row_bytes(one.embedding_dim) for one in model.histories)
    taken = (1 + FREED) * (2 * known.training.batch + known.training.peak) + histories
    return taken * max(1, *(b / a for a, b in zip(known.shape, shape, strict=True) if a))


def _library_bytes(model: ScalableGNN, given: int) -> int:
    """Count the resident bytes besides the graph and the model's own histories."""
    release_freed_memory()
    filled = sum(
        history.store.nbytes
        for history in model.histories
        if history.store.tier == "host" and bool(history.written.any())
    )
    return max(0, resident_bytes() - given - filled)
