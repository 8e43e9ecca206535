"""Statistics of a graph that is split among ranks, counted or extrapolated."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import open_if_path, read_csr
from gas.native import Relabeler, check_integer, renamed

BALANCES = ("rows_balance", "edges_balance", "replicas_balance", "sent_balance")


@dataclasses.dataclass(frozen=True)
class PartitionStatistics:
    """Statistics of a graph that is split among ranks.

    :func:`partition_statistics` counts them.

    Rank ``r`` owns the rows of shard ``r``. Its *replicas* are the distinct nodes of other shards
    with an edge into its own. A *subscriber* of a row is a rank that holds a replica of it.
    ``dataclasses.asdict(statistics)`` can be written as JSON, and
    ``PartitionStatistics(**values)`` is what was written.

    Args:
        num_nodes: The number of nodes.
        num_edges: The number of edges.
        num_ranks: The number of ranks, ``W``, at most one for each node.
        num_parts: The total number of parts: ``W`` if shards aren't partitioned.
        replicas: Replicas, summed over ranks: the rows that are sent per history and epoch.
        cut: Edges between ranks.
        pairs: Pairs of a rank and a subscriber of its rows, at most ``W * (W - 1)``.
        halo: Nodes outside a part with an edge into it, summed over parts.
        ranges: Pairs of a part and a subscriber of its rows: ranges of rows that are sent in an
            epoch.
        rows_balance: Rows of the rank that has most, over the mean. (default: ``1.0``)
        edges_balance: Edges into the rows of the rank that has most, over the mean.
            (default: ``1.0``)
        replicas_balance: Replicas of the rank that has most, over the mean. (default: ``1.0``)
        sent_balance: Rows that the rank sends that sends most, over the mean. (default: ``1.0``)
        part_spread: Standard deviation of the edges into a part around the mean of its shard, over
            the mean of all parts. (default: ``0.0``)
        feature_bytes: Bytes of a row of input features. (default: ``0``)
        is_extrapolated: Whether a number was not counted. (default: ``False``)

    Raises:
        ValueError: If a number is impossible, naming it.
    """

    num_nodes: int
    num_edges: int
    num_ranks: int
    num_parts: int
    replicas: int
    cut: int
    pairs: int
    halo: int
    ranges: int
    rows_balance: float = 1.0
    edges_balance: float = 1.0
    replicas_balance: float = 1.0
    sent_balance: float = 1.0
    part_spread: float = 0.0
    feature_bytes: int = 0
    is_extrapolated: bool = False

    def __post_init__(self) -> None:
        nodes, ranks, others = self.num_nodes, self.num_ranks, self.num_ranks - 1
        check_integer("num_nodes", nodes, 1)
        check_integer("num_edges", self.num_edges, 0)
        check_ranks("num_ranks", ranks, nodes)
        check_integer("num_parts", self.num_parts, ranks, nodes)
        check_integer("cut", self.cut, 0, self.num_edges if others else 0)
        check_integer("replicas", self.replicas, 0, min(self.cut, nodes * others))
        check_integer("pairs", self.pairs, 0, ranks * others)
        check_integer("halo", self.halo, 0, self.num_edges)
        check_integer("ranges", self.ranges, 0, self.num_parts * others)
        check_integer("feature_bytes", self.feature_bytes, 0)
        for name in BALANCES:
            if not 1 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"'{name}' is {getattr(self, name)}, expected a number of at least 1: the "
                    "largest over the mean"
                )
        if not 0 <= self.part_spread < math.inf:
            raise ValueError(f"'part_spread' is {self.part_spread}, expected a number from 0 on")

    @property
    def replicas_per_node(self) -> float:
        """Return the replicas of all ranks over the number of nodes."""
        return self.replicas / self.num_nodes

    @property
    def halo_per_node(self) -> float:
        """Return the halo nodes of all parts over the number of nodes."""
        return self.halo / self.num_nodes

    scaled = renamed("PartitionStatistics.scaled", "extrapolate")

    def extrapolate(
        self,
        *,
        nodes: int | None = None,
        edges: int | None = None,
        ranks: int | None = None,
        parts: int | None = None,
        others: Sequence[PartitionStatistics] = (),
    ) -> PartitionStatistics:
        """Extrapolate to another graph of this kind, or to another split.

        Cut edges per edge, replicas per edge, pairs and ranges of those that there can be, and each
        balance follow a power law of the number of ranks between each two numbers of these
        statistics and ``others``; beyond them, that of the nearest two. Where some are of graphs of
        several sizes, cut into as many shards, it is a power law of the number of nodes as well, by
        least squares of logarithms; otherwise a larger graph is taken to have as many of each per
        edge. No number becomes larger than it can be.

        Args:
            nodes: The number of nodes. (default: as it is)
            edges: The number of edges. (default: as many per node)
            ranks: The number of ranks. (default: as it is)
            parts: The number of parts, whose halo is taken from the replicas of as many ranks.
                (default: parts of as many nodes, with as large a halo per edge; or one for each
                rank, if it is so here)
            others: Statistics of this graph, or this kind of graph, for other numbers of ranks.

        Returns:
            Statistics with ``is_extrapolated=True``, unless nothing but ``ranks=1`` is asked for,
            which is known.

        Raises:
            ValueError: If a number can't be, or there is no second number of ranks to fit to.
        """
        nodes = self.num_nodes if nodes is None else nodes
        check_integer("nodes", nodes, 1)
        edges = round(self.num_edges * nodes / self.num_nodes) if edges is None else edges
        check_integer("edges", edges, 0)
        ranks = self.num_ranks if ranks is None else ranks
        check_ranks("ranks", ranks, nodes)
        given = parts is not None
        if parts is None:
            per_node = self.num_parts / self.num_nodes
            one_each = self.num_parts == self.num_ranks > 1
            parts = ranks if one_each else min(nodes, max(ranks, round(per_node * nodes)))
        check_integer("parts", parts, ranks, nodes)
        same = (nodes, edges, parts) == (self.num_nodes, self.num_edges, self.num_parts)
        if same and ranks == self.num_ranks:
            return self

        counted = [one for one in (self, *others) if one.num_ranks > 1]
        found: dict[str, Any] = dataclasses.asdict(self)
        found |= {"num_nodes": nodes, "num_edges": edges, "num_ranks": ranks, "num_parts": parts}
        found |= _extrapolate_split(counted, nodes, edges, ranks, parts)
        if not given and parts != ranks:
            found["halo"] = min(edges, round(self.halo * edges / max(self.num_edges, 1)))
        elif parts != self.num_parts or not same:
            found["halo"] = _extrapolate_split(counted, nodes, edges, parts, parts)["replicas"]
        known = same and ranks == 1  # Nothing is cut.
        return PartitionStatistics(**found | {"is_extrapolated": self.is_extrapolated or not known})

    def __str__(self) -> str:
        ranks, cut = self.num_ranks, self.cut / max(self.num_edges, 1)
        rows = [
            ("ranks", f"{ranks:,}"),
            ("nodes, edges", f"{self.num_nodes:,}, {self.num_edges:,}"),
            ("edges between ranks", f"{self.cut:,} ({100 * cut:.1f} %)"),
            ("replicas", f"{self.replicas:,} ({self.replicas_per_node:.2f} per node)"),
            ("pairs of ranks that talk", f"{self.pairs:,} of {ranks * (ranks - 1):,}"),
            ("largest rank over the mean", f"{self.rows_balance:.3f} rows"),
            ("", f"{self.edges_balance:.3f} edges"),
            ("", f"{self.replicas_balance:.3f} replicas"),
            ("", f"{self.sent_balance:.3f} rows sent"),
            ("parts", f"{self.num_parts:,}, with {self.halo_per_node:.2f} halo nodes per node"),
        ]
        lines = [f"{name:<28}{value}" for name, value in rows]
        told = ["extrapolated: no graph was partitioned this way"] * self.is_extrapolated
        return "\n".join([*lines, *told])


def check_ranks(name: str, ranks: int, num_nodes: int) -> None:
    """Refuse fewer ranks than 1, and more than nodes."""
    expected = f"an integer between 1 and {num_nodes}, the number of nodes: a rank owns one or more"
    check_integer(name, ranks, 1, num_nodes, expected)


def _extrapolate_split(
    counted: Sequence[PartitionStatistics], nodes: int, edges: int, ranks: int, parts: int
) -> dict[str, Any]:
    """Extrapolate the numbers that depend on the ranks, by power laws fitted to counts."""
    if ranks == 1:
        none: dict[str, Any] = {"replicas": 0, "cut": 0, "pairs": 0, "ranges": 0}
        return none | dict.fromkeys(BALANCES, 1.0)

    def interpolate(value: Callable[[PartitionStatistics], float]) -> float:
        return _interpolate(counted, value, nodes, ranks)

    others = ranks - 1
    cut = round(edges * min(1.0, interpolate(lambda s: s.cut / max(s.num_edges, 1))))
    replicas = round(edges * interpolate(lambda s: s.replicas / max(s.num_edges, 1)))
    pairs = interpolate(lambda s: s.pairs / (s.num_ranks * (s.num_ranks - 1)))
    pairs = round(ranks * others * min(1.0, pairs))
    ranges = interpolate(lambda s: s.ranges * s.num_ranks / max(s.num_parts * s.pairs, 1))
    balances = {name: max(1.0, interpolate(operator.attrgetter(name))) for name in BALANCES}
    return {
        "cut": cut,
        "replicas": min(replicas, cut, nodes * others),
        "pairs": pairs,
        "ranges": round(parts * pairs / ranks * min(1.0, ranges)),
        **balances,
    }


def _interpolate(
    counted: Sequence[PartitionStatistics],
    value: Callable[[PartitionStatistics], float],
    nodes: int,
    ranks: int,
) -> float:
    """Interpolate a value for some nodes and ranks, linearly in logarithms."""
    numbers = sorted({one.num_ranks for one in counted})
    if ranks not in numbers and len(numbers) < 2:
        raise ValueError(
            f"'ranks' is {ranks}, but a power law is fitted to several numbers of ranks, and known "
            f"are those of {numbers or 'none'}: pass statistics of other cuts, others=[...]"
        )

    by_nodes = _fit_exponent_of_nodes(counted, value)
    points = []
    for number in numbers:
        logs = [
            math.log(value(one)) + by_nodes * math.log(nodes / one.num_nodes)
            for one in counted
            if one.num_ranks == number and value(one) > 0
        ]
        if not logs:
            return 0.0
        points.append((math.log(number), sum(logs) / len(logs)))
    if len(points) == 1:
        return math.exp(points[0][1])
    here = math.log(ranks)
    after = min(max(1, sum(x < here for x, _ in points)), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return math.exp(y0 + (y1 - y0) * (here - x0) / (x1 - x0))


def _fit_exponent_of_nodes(
    counted: Sequence[PartitionStatistics], value: Callable[[PartitionStatistics], float]
) -> float:
    """Return the exponent of the number of nodes at equal numbers of ranks; 0 if unknown."""
    products = squares = 0.0
    for number in {one.num_ranks for one in counted}:
        same = [one for one in counted if one.num_ranks == number and value(one) > 0]
        x = [math.log(one.num_nodes) for one in same]
        y = [math.log(value(one)) for one in same]
        mean = sum(x) / max(len(x), 1)
        products += sum((a - mean) * b for a, b in zip(x, y, strict=True))
        squares += sum((a - mean) ** 2 for a in x)
    return products / squares if squares > 0 else 0.0


def partition_statistics(graph: Data | str | Path) -> PartitionStatistics:
    """Count the rows, edges and replicas of a graph that is split among ranks.

    Time is about linear in the edges; memory holds those of the largest shard.

    Args:
        graph: A clustered graph, or the folder of one, with ``shards``, of shape ``[W + 1]``,
            int64: rank ``r`` owns the rows ``shards[r]`` to ``shards[r + 1] - 1``; and ``parts``,
            of shape ``[P + 1]``, each within a shard. (Without ``parts``, shards are parts.)

    Raises:
        ValueError: If it has no shards, or shards or parts are invalid.
    """
    return count_split(graph, "graph")


def count_split(graph: object, name: str) -> PartitionStatistics:
    """Compute :func:`partition_statistics`; ``name`` stands for the graph in errors."""
    data = open_if_path(graph, name)
    if not isinstance(data, Data):
        raise ValueError(f"'{name}' is a {type(data).__name__}, expected a clustered graph")
    (rowptr, col, _), _ = read_csr(data, edge_weight=False)
    num_nodes = rowptr.numel() - 1
    shards = data.get("shards")
    if shards is None:
        raise ValueError(
            f"'{name}' has no 'shards', the first row of each rank: cut it by gas.cluster(data, "
            "num_parts, shards=W)"
        )
    _check_bounds("shards", shards, num_nodes)
    parts = shards if data.get("parts") is None else data.parts
    _check_bounds("parts", parts, num_nodes)
    shards, parts = shards.contiguous(), parts.contiguous()
    if not bool(torch.isin(shards, parts).all()):
        raise ValueError(
            f"'{name}' has a part that lies in several shards: cut both at once, by gas.cluster("
            "data, num_parts, shards=W)"
        )
    ranks, sizes = shards.numel() - 1, parts.numel() - 1
    relabel = Relabeler(rowptr, col)
    replicas = torch.zeros(ranks, ranks, dtype=torch.long)  # Of a rank, by their owner.
    cut = ranges = 0
    for rank, (begin, end) in enumerate(_ranges(shards)):
        batch = relabel(torch.arange(begin, end))
        outside = batch.n_id[end - begin :]
        replicas[rank] = _count_nodes(outside, shards)
        ranges += int(_count_nodes(outside, parts).count_nonzero())
        cut += int((batch.col >= end - begin).sum())
    one_each = torch.equal(parts, shards)
    halos = (relabel(torch.arange(*r)).n_id.numel() - (r[1] - r[0]) for r in _ranges(parts))
    edges = rowptr[parts].diff().double()
    shard = torch.bucketize(parts[:-1], shards, right=True) - 1
    mean = torch.zeros(ranks, dtype=torch.double).index_add_(0, shard, edges)
    mean /= torch.bincount(shard, minlength=ranks)
    spread = float((edges - mean[shard]).square().mean().sqrt() / edges.mean().clamp(min=1e-300))
    x = data.get("x")
    return PartitionStatistics(
        num_nodes=num_nodes,
        num_edges=col.numel(),
        num_ranks=ranks,
        num_parts=sizes,
        replicas=int(replicas.sum()),
        cut=cut,
        pairs=int(replicas.count_nonzero()),
        halo=int(replicas.sum()) if one_each else sum(halos),
        ranges=ranges,
        rows_balance=_balance(shards.diff()),
        edges_balance=_balance(rowptr[shards].diff()),
        replicas_balance=_balance(replicas.sum(dim=1)),
        sent_balance=_balance(replicas.sum(dim=0)),
        part_spread=spread,
        feature_bytes=x.nbytes // num_nodes if isinstance(x, Tensor) else 0,
    )


def _check_bounds(name: str, bounds: Any, num_nodes: int) -> None:
    """Refuse ranges of rows that don't cover all nodes, and empty ranges."""
    expected = f"[n + 1], rising from 0 to the number of nodes, {num_nodes}, with no range empty"
    if not isinstance(bounds, Tensor) or bounds.dtype != torch.long or bounds.dim() != 1:
        what = f"{bounds.dtype}, {list(bounds.shape)}" if isinstance(bounds, Tensor) else bounds
        raise ValueError(f"'{name}' is {what}, expected an int64 tensor of shape {expected}")
    ends = bounds.numel() > 1 and (int(bounds[0]), int(bounds[-1])) == (0, num_nodes)
    if not ends or not bool((bounds.diff() > 0).all()):
        raise ValueError(
            f"'{name}' has {bounds.numel()} values, {bounds[:3].tolist()} ..., expected them of "
            f"shape {expected}"
        )


def _ranges(bounds: Tensor) -> list[tuple[int, int]]:
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


def _count_nodes(nodes: Tensor, bounds: Tensor) -> Tensor:
    """Count the nodes in each range of rows."""
    where = torch.bucketize(nodes, bounds, right=True) - 1
    return torch.bincount(where, minlength=bounds.numel() - 1)


def _balance(values: Tensor) -> float:
    """Return the largest value over the mean; 1 if all are zero."""
    return max(1.0, int(values.max()) * values.numel() / max(int(values.sum()), 1))
