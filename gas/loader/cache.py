"""Mini-batches that come again every epoch, and what is theirs alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from gas.graph import Versions, copy_graph
from gas.loader.batch import SubData, num_bytes, tensors_in_memory

CACHE_BYTES = 1 << 30  # Cached batches of a loader, unless told.


class BatchCache:
    """Batches for the next epoch, while there is room; what is handed out is the caller's.

    Ids of nodes, weights and attributes of edges are copies, which hides changes that PyTorch
    doesn't count as well. A change of what is large and isn't copied, features, ids of edges and
    the structure of an adjacency, is noticed: that batch isn't kept any longer.

    Args:
        limit: How many bytes to keep, or -1 for no batch at all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_bytes = 0
        self._kept: dict[tuple[int, ...], tuple[SubData, frozenset[str], Versions, int]] = {}

    def take(self, parts: tuple[int, ...]) -> SubData | None:
        """Return a batch that was kept, unless it was changed."""
        if parts not in self._kept:
            return None
        batch, shared, versions, size = self._kept[parts]
        if not versions.has_changed():
            return _copy(batch, shared)
        del self._kept[parts]
        self._num_bytes -= size
        return None

    def keep(self, parts: tuple[int, ...], batch: SubData, features: Iterable[str]) -> SubData:
        """Keep a new batch, and return what to hand out.

        Args:
            parts: The parts that it is made of.
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
        return BatchCache, (self.limit,)  # The batches stay in their process.


def _copy(batch: SubData, shared: frozenset[str]) -> SubData:
    data, batch_size, n_id, offset, count = batch
    ids = n_id.clone(), offset.clone(), count.clone()
    return SubData(copy_graph(data, shared), batch_size, *ids)


def make_cache(cache: bool | None, is_fixed: bool) -> BatchCache:
    """Make the cache of a loader, whose batches come again if they are fixed.

    Raises:
        ValueError: If batches that are not fixed have to be cached.
    """
    if cache and not is_fixed:
        raise ValueError(
            "'cache' is True, but shuffling makes new batches every epoch: use batch_size=1, "
            "with larger parts, or leave 'cache' out"
        )
    if cache is False or not is_fixed:
        return BatchCache(-1)
    return BatchCache(CACHE_BYTES if cache is None else sys.maxsize)
