"""A graph cut once, finely: what mini-batches of coarser parts would be like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.cluster import cluster
from gas.graph.edges import Edges
from gas.graph.partition import find_parts
from gas.loader import SubData, SubgraphLoader
from gas.loader.batch import tensors
from gas.scalable.model import ScalableGNN

MOST_SAMPLED = 4  # Mini-batches whose halo is counted, for one number and size of parts.
ROWS = 1 << 22  # Edges that are looked at together.
EPOCHS = 5  # Of random mini-batches: the largest is that of so many epochs.


class Shape(NamedTuple):
    """The size of a mini-batch: in-batch nodes, halo nodes, edges."""

    own: float
    halo: float
    edges: float

    @staticmethod
    def of(batch: SubData) -> Shape:
        """That of a batch."""
        own = batch.batch_size
        return Shape(own, batch.n_id.numel() - own, batch.data.e_id.numel())


class Sample:
    """Mini-batches of a graph as they would be if it were cut into some number of parts.

    The graph is cut into the most parts; fewer are some of these together, found by cutting the
    graph of parts, whose edges weigh what runs between them.

    Args:
        data: The graph.
        model: The model that it is cut for.
        finest: The most parts.
        layout: See :class:`gas.SubgraphLoader`.
        edge_weight: See :class:`gas.SubgraphLoader`.
        method: See :func:`gas.metis`.
        seed: See :func:`gas.metis`; of the choice of batches, too.
        cache: See :func:`gas.metis`.
        log: Report progress on standard error.
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
            data, finest, model=model, method=method, seed=seed, cache=cache, log=log
        )
        self.num_nodes, self.finest = int(self.graph.parts[-1]), finest
        self._method, self._seed = method, seed
        self.loader = SubgraphLoader(
            self.graph, layout=layout, edge_weight=edge_weight, log=False, cache=False
        )
        self.num_edges = int(self.loader.degree.sum())
        self._edges = self.loader.edges_per_part()
        self._between = self._edges_between()
        self._groups: dict[int, list[Tensor]] = {}

    def _edges_between(self) -> Tensor:
        """How many edges run from each part to each, of shape ``[finest, finest]``."""
        part = torch.repeat_interleave(self.graph.parts.diff())
        relabel, size = self.loader._relabel, self.finest**2
        row = torch.repeat_interleave(self._edges)
        counts = torch.zeros(size, dtype=torch.long)
        for some, col in zip(row.split(ROWS), relabel.col.split(ROWS), strict=True):
            counts += torch.bincount(some * self.finest + part[col], minlength=size)
        return counts.view(self.finest, self.finest)

    def held(self) -> Iterator[Tensor]:
        """The tensors that it holds."""
        relabel = self.loader._relabel
        yield from tensors(self.graph)
        yield from (t for t in (relabel.rowptr, relabel.e_id, relabel.weight) if t is not None)
        yield from (relabel.col, self._between)

    def groups(self, num_parts: int) -> list[Tensor]:
        """The finest parts that each of fewer parts consists of."""
        if num_parts == self.finest:
            return list(torch.arange(num_parts).split(1))
        if num_parts not in self._groups:
            dst, src = self._between.nonzero().t()
            weight = self._between[dst, src]
            method, known = ("random", None) if self._method == "random" else ("metis", weight)
            perm, ptr = find_parts(
                Edges(src, dst, None, self.finest), num_parts, False, False, known, method,
                self._seed, False,
            )  # fmt: skip
            self._groups[num_parts] = [
                perm[begin:end].sort().values
                for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)
            ]
        return self._groups[num_parts]

    def batches(self, num_parts: int, batch_size: int, most: int = 1) -> list[SubData]:
        """Some mini-batches, of parts that are chosen at random."""
        groups = self.groups(num_parts)
        generator = torch.Generator().manual_seed(self._seed)
        order = torch.randperm(num_parts, generator=generator).split(batch_size)
        return [
            self.loader.cut(torch.cat([groups[part] for part in parts.tolist()]).tolist())
            for parts in order[:most]
            if parts.numel() == batch_size or len(order) == 1
        ]

    def shapes(self, num_parts: int, batch_size: int) -> tuple[Shape, Shape]:
        """The mean mini-batch, and the largest that comes up in some epochs."""
        batch_size = min(batch_size, num_parts)
        number = math.ceil(num_parts / batch_size)
        found = [Shape.of(b) for b in self.batches(num_parts, batch_size, MOST_SAMPLED)]
        own, halo = (torch.tensor([float(s[i]) for s in found]) for i in (0, 1))
        ratio = float(halo.sum() / own.sum().clamp(min=1))
        mean = self.num_nodes / number
        edges = torch.stack([self._edges[group].sum() for group in self.groups(num_parts)]).double()
        if batch_size == 1:
            most = float(edges.max())
        elif batch_size == num_parts:
            most = float(edges.sum())
        else:  # The largest of so many sums of random parts, none of which comes twice.
            spread = float(edges.std()) * math.sqrt(batch_size * (1 - batch_size / num_parts))
            beyond = math.sqrt(2 * math.log(max(2, number * EPOCHS)))
            most = min(float(edges.mean()) * batch_size + beyond * spread, self.num_edges)
        average = Shape(mean, min(ratio * mean, self.num_nodes - mean), self.num_edges / number)
        rest = self.num_nodes - mean
        largest = Shape(
            max(mean, float(own.max())), min(max(average.halo, float(halo.max())), rest), most
        )
        return average, largest
