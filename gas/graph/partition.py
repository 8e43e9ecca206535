"""Partition a graph into parts, by METIS or KaMinPar or at random, and cache the result.

Neighbours in one part need fewer halo rows, with less staleness (Fey et al., ICML 2021, Section 3).
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.utils import cumsum

from gas.graph.balance import balance_parts, check_classes
from gas.graph.edges import Edges, read_edges
from gas.graph.partitioners import (
    kaminpar_parts,
    metis_parts,
    pick_method,
    random_parts,
    to_integer_weights,
    undirected_graph,
)
from gas.graph.permute import invert_permutation
from gas.native import (
    cache_dir,
    check_flags,
    check_integer,
    check_path,
    replace_file,
    report_blocking,
    warn,
)

# METIS takes less than ten seconds for so many entries of the undirected graph.
MOST_QUIET_ENTRIES = 200_000
METHODS = ("metis", "kaminpar", "random", "auto")
_PARTITIONERS = {"metis": metis_parts, "kaminpar": kaminpar_parts}


class PartitionOptions(NamedTuple):
    """Options of a partitioner; see :func:`metis`."""

    recursive: bool = False
    method: str = "metis"
    seed: int = 0
    cache: bool | str | Path = True
    log: bool = True


@check_flags
def metis(
    edge_index: Any,
    num_parts: int,
    recursive: bool = False,
    log: bool = True,
    *,
    num_nodes: int | None = None,
    edge_weight: Tensor | None = None,
    method: str = "metis",
    seed: int = 0,
    cache: bool | str | Path = True,
    balance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Partition a graph into parts of about equal size with few edges between them.

    Edge directions, duplicate edges and self-loops don't influence the partition. The result is
    cached on disk by the graph's hash, so that it is computed once.

    Args:
        edge_index: ``edge_index`` of shape ``[2, E]``, or ``adj_t``.
        num_parts: The number of parts, between 1 and the number of nodes. No part is empty.
        recursive: Bisect recursively instead of k-way partitioning; METIS only.
            (default: ``False``)
        log: Report progress on standard error. (default: ``True``)
        num_nodes: The number of nodes. (default: what ``edge_index`` says)
        edge_weight: The cost of cutting each edge, of shape ``[E]``: integers or floats, none
            negative. Costs of duplicates and of both directions add up; an edge of weight 0 is
            ignored. Only ratios matter, down to a millionth of the largest. (default: all equal)
        method: ``"metis"``; ``"kaminpar"``, which is parallel and needs ``pip install
            'gas-gnn[kaminpar]'``; ``"random"``, for graphs that are too large for both; or
            ``"auto"``: METIS for graphs that it partitions in a minute or two, then KaMinPar if it
            is installed, else METIS; ``"random"``, with a warning, if both need more memory than
            is free.
            (default: ``"metis"``)
        seed: Seed of the partitioner. METIS may make the same partition of a small graph for all
            seeds. (default: ``0``)
        cache: Whether to cache results, or the folder to cache them in. (default: ``True``, in
            ``$GAS_CACHE_DIR`` or ``~/.cache/gas``)
        balance: A class of each node, of shape ``[N]``, whole numbers or booleans, such as
            ``data.train_mask``; or several, of shape ``[N, K]``. No part gets more nodes, or more
            of a class, than 1.1 times the mean, rounded up: nodes are moved after partitioning.
            (default: the number of nodes is balanced approximately)

    Returns:
        ``perm`` of shape ``[N]``: the old id of every new node, for :func:`gas.permute`; and
        ``ptr`` of shape ``[num_parts + 1]``: part ``p`` is the new nodes ``ptr[p]`` to
        ``ptr[p + 1] - 1``.

    Raises:
        ValueError: If the graph, its weights or the number of parts is unusable.
        ImportError: If ``method`` is ``"kaminpar"``, which isn't installed.
    """
    options = PartitionOptions(recursive, method, seed, cache, log)
    return find_parts(read_edges(edge_index, num_nodes), num_parts, options, edge_weight, balance)


def find_parts(
    edges: Edges,
    num_parts: int,
    options: PartitionOptions,
    edge_weight: Tensor | None = None,
    balance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Partition the nodes of a graph; see :func:`metis`. ``edges.weight`` is ignored."""
    method, log = options.method, options.log
    if method not in METHODS:
        raise ValueError(f"'method' is {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    if edge_weight is not None and method == "random":
        raise ValueError(
            "'edge_weight' is given, which method='random' ignores: leave it out, or choose "
            "another 'method'"
        )
    weight = None if edge_weight is None else to_integer_weights(edge_weight, edges.src.numel())
    edges = Edges(edges.src.cpu(), edges.dst.cpu(), weight, edges.num_nodes)
    _check_num_parts(num_parts, edges.num_nodes)
    check_integer("seed", options.seed, -(2**31), 2**31 - 1)
    if not isinstance(options.cache, bool):
        check_path("cache", options.cache, "a folder, or True or False")
    classes = None if balance is None else check_classes(balance, edges.num_nodes)
    if num_parts == 1:
        return torch.arange(edges.num_nodes), torch.tensor([0, edges.num_nodes])

    def file_of(method: str) -> Path | None:
        if not options.cache or method == "random":
            return None
        folder = cache_dir() if options.cache is True else Path(options.cache)
        name = _hash(edges, num_parts, options.recursive, method, options.seed)
        return folder / "partitions" / f"{name}.npy"

    for candidate in ("metis", "kaminpar") if method == "auto" else (method,):
        file = file_of(candidate)
        part = _load(file, edges.num_nodes, num_parts)
        if part is not None:
            if log:
                print(f"Found {num_parts} parts in {file}", file=sys.stderr)
            break
    else:
        part = _compute(edges, num_parts, options, file_of)

    if classes is not None:  # The cache contains the partition before balancing.
        before, all_nodes = part, torch.zeros(edges.num_nodes, 1, dtype=torch.long)
        part = balance_parts(before, num_parts, torch.cat([all_nodes, classes], dim=1), edges)
        if log:
            moved = int((part != before).sum())
            print(f"Moved {moved:,} nodes to balance the parts", file=sys.stderr)
    ptr = cumsum(torch.bincount(part, minlength=num_parts))
    return torch.sort(part, stable=True).indices, ptr


def find_shards(
    edges: Edges,
    num_parts: int,
    shards: int,
    options: PartitionOptions,
    edge_weight: Tensor | None = None,
    balance: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Partition a graph into shards, then each shard into equally many parts.

    The first partition minimises the edges between processes. The second one takes only the edges
    within a shard.

    ``num_parts`` counts the parts of all shards together; see :func:`metis` for other arguments.

    Returns:
        ``perm`` and ``ptr`` as of :func:`metis`, and the first row of every shard, of shape
        ``[shards + 1]``.
    """
    _check_num_parts(num_parts, edges.num_nodes)
    if num_parts % shards:
        raise ValueError(
            f"'num_parts' is {num_parts}, which {shards} shards can't share equally: expected a "
            f"multiple of 'shards', such as {_next_multiple(num_parts, shards)}"
        )
    perm, bounds = find_parts(edges, shards, options, edge_weight, balance)
    weight = None if edge_weight is None else to_integer_weights(edge_weight, edges.src.numel())
    new_id = invert_permutation(perm)
    src, dst = new_id[edges.src.cpu()], new_id[edges.dst.cpu()]
    perms, ptrs = [], [torch.zeros(1, dtype=torch.long)]
    each = num_parts // shards
    for shard, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        if end - begin < each:
            raise ValueError(
                f"'num_parts' is {num_parts}, {each} for each shard, but shard {shard} has "
                f"{end - begin} nodes: ask for fewer parts, or fewer 'shards'"
            )
        inside = ((src >= begin) & (src < end) & (dst >= begin) & (dst < end)).nonzero().view(-1)
        own = Edges(src[inside] - begin, dst[inside] - begin, None, end - begin)
        # If all weights are 0, edges are unweighted.
        heavy = None if weight is None or not bool(weight[inside].any()) else weight[inside]
        classes = None if balance is None else balance[perm[begin:end]]
        order, ptr = find_parts(own, each, options, heavy, classes)
        perms.append(perm[begin:end][order])
        ptrs.append(ptr[1:] + begin)
    return torch.cat(perms), torch.cat(ptrs), bounds


def round_num_parts(num_parts: int, shards: int, num_nodes: int) -> int:
    """Round a number of parts up to a multiple of ``shards``, down if there are fewer nodes."""
    parts = _next_multiple(num_parts, shards)
    return parts if parts <= num_nodes else max(num_nodes // shards, 1) * shards


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _compute(
    edges: Edges,
    num_parts: int,
    options: PartitionOptions,
    file_of: Callable[[str], Path | None],
) -> Tensor:
    """Partition the graph, and cache the parts in the file for the method that did it."""
    recursive, method, seed, _, log = options
    start = time.perf_counter()
    graph = None if method == "random" else undirected_graph(edges)
    if method == "auto" and graph is not None:
        method, why = pick_method(graph)
        if method == "random":
            warn(f"parts are random, which costs accuracy and time: {why}")
        elif why and log:
            print(f"method='auto' takes {method}: {why}", file=sys.stderr)
    if log:
        print(f"Computing {num_parts} parts with {method} ...", file=sys.stderr, flush=True)
    if method == "random" or graph is None:
        part = random_parts(edges.num_nodes, num_parts, seed)
    else:
        with report_blocking(method, log and graph.col.numel() > MOST_QUIET_ENTRIES):
            part = _PARTITIONERS[method](graph, num_parts, recursive, seed)
    part = _fill_empty(part, num_parts)
    if log:
        print(f"Computed them [{time.perf_counter() - start:.2f} s]", file=sys.stderr)
    _save(file_of(method), part)
    return part


def _check_num_parts(num_parts: int, num_nodes: int) -> None:
    check_integer("num_parts", num_parts, 1)
    if num_parts > max(num_nodes, 1):
        raise ValueError(
            f"'num_parts' is {num_parts}, but the graph has {num_nodes} nodes: ask for at most one "
            "part per node"
        )


def _fill_empty(part: Tensor, num_parts: int) -> Tensor:
    """Give every empty part half of the part that is largest then."""
    count = torch.bincount(part, minlength=num_parts)
    for empty in (count == 0).nonzero().view(-1).tolist():
        largest = int(count.argmax())
        nodes = (part == largest).nonzero().view(-1)
        moved = nodes[: nodes.numel() // 2]
        part[moved] = empty
        count[largest] -= moved.numel()
        count[empty] = moved.numel()
    return part


# Cache --------------------------------------------------------------------------------------------


def _hash(edges: Edges, *settings: object) -> str:
    """Return a hash of a graph and the settings of its partition, the name in the cache."""
    digest = hashlib.blake2b(repr((edges.num_nodes, *settings)).encode(), digest_size=16)
    for values in (edges.src, edges.dst, edges.weight):
        if values is not None:
            digest.update(values.contiguous().numpy().data)
    return digest.hexdigest()


def _load(file: Path | None, num_nodes: int, num_parts: int) -> Tensor | None:
    """Read a cached partition; return ``None`` if it is missing, unreadable or of another graph."""
    if file is None or not file.exists():
        return None
    try:
        with file.open("rb") as stream:
            array = np.lib.format.read_array(stream, allow_pickle=False)
        part = torch.from_numpy(array.astype(np.int64))
    except Exception:  # Whatever damaged bytes lead to.
        return None
    if part.shape != (num_nodes,) or bool((part < 0).any()):
        return None
    count = torch.bincount(part, minlength=num_parts)
    return part if count.numel() == num_parts and bool((count > 0).all()) else None


def _save(file: Path | None, part: Tensor) -> None:
    """Write a partition to the cache; warn if the folder isn't writable."""
    if file is None:
        return
    try:
        with replace_file(file) as temporary:
            np.save(temporary, part.numpy().astype(np.int32))
    except OSError as error:
        warn(
            f"the partition could not be cached in {file.parent} ({error}): set GAS_CACHE_DIR to a "
            "writable folder, or pass cache=False",
        )
