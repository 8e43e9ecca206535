"""Keep, from epoch to epoch, mini-batches that repeat and sums of features."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import Adjacency, Shard, Versions, copy_graph, get_mapped_rows, version
from gas.history import Encoded
from gas.loader.batch import SubData, num_bytes, tensors_in_memory
from gas.loader.lazy import get_lazy
from gas.native import Relabeler, free_memory

BLOCK_VALUES = 1 << 22  # Quantised values that are summed at once.
CACHE_BYTES = 1 << 30  # The default size of a loader's cache.
MEMORY_DIVISOR = 4  # Sums may take a quarter of the free memory.
EDGE_LIMIT = 2**31  # An Adjacency has fewer edges than this.


class BatchCache:
    """Cache of mini-batches, which callers may modify.

    Node ids, weights and attributes of edges are copied for the caller. Large tensors, namely
    features, edge ids and the structure of an adjacency, are shared: if one was changed in place,
    the batch is removed from the cache.

    Args:
        limit: The size of the cache in bytes, or -1 for none.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_bytes = 0
        self._kept: dict[tuple[int, ...], tuple[SubData, frozenset[str], Versions, int]] = {}

    def get(self, parts: tuple[int, ...]) -> SubData | None:
        """Return a cached batch, unless one of its tensors was changed."""
        if parts not in self._kept:
            return None
        batch, shared, versions, size = self._kept[parts]
        if not versions.has_changed():
            return _copy(batch, shared)
        del self._kept[parts]
        self._num_bytes -= size
        return None

    def put(self, parts: tuple[int, ...], batch: SubData, features: Iterable[str]) -> SubData:
        """Cache a new batch if there is room, and return a batch for the caller.

        Args:
            parts: Its parts.
            batch: The batch.
            features: The names of its node-level tensors.
        """
        size = num_bytes(batch) if self.limit >= 0 else 0
        if self._num_bytes + size > self.limit:
            return batch
        shared = frozenset((*features, "edge_index", "e_id"))
        self._kept[parts] = batch, shared, Versions(tensors_in_memory(batch.data)), size
        self._num_bytes += size
        return _copy(batch, shared)

    def batches(self) -> list[SubData]:
        """Return the cached batches, which must not be changed."""
        return [batch for batch, *_ in self._kept.values()]

    def clear(self) -> None:
        """Forget every batch."""
        self._kept.clear()
        self._num_bytes = 0

    def __reduce__(self) -> tuple[type[BatchCache], tuple[int]]:
        return BatchCache, (self.limit,)  # Other processes begin with an empty cache.


def _copy(batch: SubData, shared: frozenset[str]) -> SubData:
    """Copy a batch, except the shared attributes."""
    data, batch_size, n_id, offset, count = batch
    ids = n_id.clone(), offset.clone(), count.clone()
    return SubData(copy_graph(data, shared), batch_size, *ids)


def make_cache(cache: bool | None, is_fixed: bool) -> BatchCache:
    """Make the cache of a loader.

    Args:
        cache: See :class:`gas.SubgraphLoader`.
        is_fixed: Whether every epoch has the same batches.

    Raises:
        ValueError: If batches that differ between epochs are to be cached.
    """
    if cache and not is_fixed:
        raise ValueError(
            "'cache' is True, but shuffling makes new batches every epoch: use batch_size=1, "
            "with larger parts, or leave 'cache' out"
        )
    if cache is False or not is_fixed:
        return BatchCache(-1)
    return BatchCache(CACHE_BYTES if cache is None else sys.maxsize)


class FeatureSums:
    """Sums over neighbours' features, ``A x``, computed once for a graph.

    Features don't change in training, and neither do these sums: a first layer that begins with
    them reads a row for each in-batch node, instead of the features of the halo and all edges. They
    take as much memory as the features before quantisation, and are computed when training first
    needs them.

    Args:
        relabel: The graph's edges by rows, with their weights.
        shard: The shard that the graph is, whose own nodes have sums. The ranks may share the
            memory of one machine. (default: a whole graph)
    """

    def __init__(self, relabel: Relabeler, shard: Shard | None = None) -> None:
        self._relabel, self._shard = relabel, shard
        self.is_on = True
        self._tables: dict[tuple[bool, str], tuple[Tensor, int, Tensor | None]] = {}

    def share_with(self, known: FeatureSums | None, is_on: bool) -> FeatureSums:
        """Return the sums of another loader of the graph, to share them; else these."""
        self.is_on = is_on
        return known if known is not None and known.is_on == is_on else self

    def add_to(self, batch: Data) -> None:
        """Let layers of a batch find the sums, unless its features are of a kind that has none."""
        rows, adj = get_lazy(batch, "x"), batch._store._mapping.get("adj_t")
        if self.is_on and rows is not None and isinstance(adj, Adjacency) and _has_sums(rows.table):
            rows.find_sums = self._of_batch(adj, rows.table)

    def _of_batch(self, adj: Adjacency, x: Tensor) -> FindSums:
        """Return a function that finds the sums for layers of a batch.

        It takes an adjacency, the aggregation, and :func:`gas.nn.spmm`. It returns the sums of all
        own nodes, ``[num_own, width]``; or ``None`` if there are none yet, or no memory for them,
        or the edges or weights aren't those of the graph.

        Args:
            adj: The adjacency of the batch.
            x: The features of all nodes, ``[N, width]``.
        """
        value = adj.value
        known = None if value is None else version(value)

        def find(other: Adjacency, reduce: str, spmm: Product) -> Tensor | None:
            if other.col is not adj.col:
                return None
            weighted = other.value is not None
            if weighted and (value is None or other.value is not value or known != version(value)):
                return None
            return self._find_sums(x, weighted, reduce, spmm)

        return find

    def _find_sums(self, x: Tensor, weighted: bool, reduce: str, spmm: Product) -> Tensor | None:
        """Return the sums of own nodes, computed at most once; see :meth:`_of_batch`."""
        key, relabel = (weighted, reduce), self._relabel
        known = self._tables.get(key)
        if known is not None and known[0] is x:
            if known[1] != version(x):  # Features that are written to while training have none.
                self._tables[key] = x, version(x), None
            return self._tables[key][2]
        if not torch.is_grad_enabled():
            return None  # They pay from the second pass on.
        sums, shard = None, self._shard
        num_own = relabel.num_nodes if shard is None else shard.num_own
        ranks = 1 if shard is None else shard.num_ranks
        limit = free_memory() // MEMORY_DIVISOR // ranks
        if x.nbytes <= limit and relabel.col.numel() < EDGE_LIMIT:
            weight = relabel.weight if weighted else None
            rowptr = relabel.rowptr[: num_own + 1]
            adj = Adjacency.from_valid_csr(rowptr, relabel.col, weight, relabel.num_nodes)
            with torch.no_grad():
                if isinstance(x, Encoded):
                    sums = _sum_encoded(x, adj, reduce, spmm)
                else:
                    sums = spmm(adj, x, None, reduce)
        self._tables[key] = x, version(x), sums
        return sums

    def tensors(self) -> list[Tensor]:
        """Return the sums that were computed."""
        return [sums for _, _, sums in self._tables.values() if sums is not None]

    def __reduce__(self) -> tuple[type[FeatureSums], tuple[Relabeler, Shard | None]]:
        return FeatureSums, (self._relabel, self._shard)  # Other processes compute their own.


def _has_sums(x: Tensor) -> bool:
    """Return whether features are a dense matrix in memory, of any precision, not learnt."""
    if isinstance(x, Encoded):
        return x.store.tier in ("host", "pinned")
    if x.requires_grad or get_mapped_rows(x) is not None:
        return False
    is_table = x.layout == torch.strided and x.dim() == 2 and x.is_cpu
    return is_table and x.dtype in (torch.float32, torch.float64)


def _sum_encoded(x: Encoded, adj: Adjacency, reduce: str, spmm: Product) -> Tensor:
    """Sum quantised rows by blocks of edges, a row for each of the adjacency's; not quantised."""
    at_once = max(1, BLOCK_VALUES // max(1, x.size(1)))
    entries = torch.arange(0, adj.num_entries, at_once, dtype=adj.rowptr.dtype)
    starts = torch.searchsorted(adj.rowptr, entries, right=True) - 1
    num_rows = adj.size(0)
    sums = torch.empty(num_rows, x.size(1), dtype=x.dtype, device="cpu")
    for first, last in itertools.pairwise(sorted({0, *starts.tolist(), num_rows})):
        begin, end = int(adj.rowptr[first]), int(adj.rowptr[last])
        ids, col = adj.col[begin:end].unique(return_inverse=True)
        value = None if adj.value is None else adj.value[begin:end]
        block = Adjacency.from_valid_csr(
            adj.rowptr[first : last + 1] - begin, col.to(adj.col.dtype), value, ids.numel()
        )
        sums[first:last] = spmm(block, x.read(ids.long()), None, reduce)
    return sums


Product = Callable[[Adjacency, Tensor, None, str], Tensor]
FindSums = Callable[[Adjacency, str, Product], Tensor | None]
