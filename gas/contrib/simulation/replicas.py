"""Statistics of a graph that is split among ranks, by counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.contrib.simulation.split import PartitionStatistics
from gas.graph import open_if_path, read_csr
from gas.native import Relabeler


def partition_statistics(graph: Data | str | Path) -> PartitionStatistics:
    """Count the rows, edges and replicas of a graph that is split among ranks.

    It takes a time about linear in the edges, and memory for those of the largest shard.

    Args:
        graph: A clustered graph, or the folder of one, with ``shards``, of shape ``[W + 1]``,
            int64: rank ``r`` owns the rows ``shards[r]`` to ``shards[r + 1] - 1``; and ``parts``,
            of shape ``[P + 1]``, each within a shard. (Without ``parts``, shards are parts.)

    Raises:
        ValueError: If it has no shards, or they or its parts can't be.
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
        replicas[rank] = _count(outside, shards)
        ranges += int(_count(outside, parts).count_nonzero())
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
    """Refuse ranges of rows that don't cover all nodes, or of which one is empty.

    Raises:
        ValueError: If they aren't.
    """
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


def _count(nodes: Tensor, bounds: Tensor) -> Tensor:
    """Count the nodes in each range of rows."""
    where = torch.bucketize(nodes, bounds, right=True) - 1
    return torch.bincount(where, minlength=bounds.numel() - 1)


def _balance(values: Tensor) -> float:
    """Return the largest over the mean; 1 where all are zero."""
    return max(1.0, int(values.max()) * values.numel() / max(int(values.sum()), 1))
