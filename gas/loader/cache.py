"""Cache of the mini-batches that repeat every epoch."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gas.graph import Versions, copy_graph
from gas.loader.batch import SubData, num_bytes, tensors_in_memory

CACHE_BYTES = 1 << 30  # The default size of a loader's cache.


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

    def take(self, parts: tuple[int, ...]) -> SubData | None:
        """Return a cached batch, unless one of its tensors was changed."""
        if parts not in self._kept:
            return None
        batch, shared, versions, size = self._kept[parts]
        if not versions.has_changed():
            return _copy(batch, shared)
        del self._kept[parts]
        self._num_bytes -= size
        return None

    def keep(self, parts: tuple[int, ...], batch: SubData, features: Iterable[str]) -> SubData:
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
