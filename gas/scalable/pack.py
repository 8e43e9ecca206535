"""Arrange rows on disk by the mini-batches that read them; see :meth:`gas.ScalableGNN.pack`."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gas.history import DiskStore, History, PackedRows, Packing
from gas.loader import SubgraphLoader
from gas.native import bytes_of, free_memory, human
from gas.scalable.base import HistoryModel
from gas.scalable.checks import wrong_size_error


@dataclass(frozen=True)
class PackingSummary:
    """Summary of the rows arranged by :meth:`gas.ScalableGNN.pack`.

    * ``num_segments``: contiguous pieces of which the halos of all parts consist;
      ``copied_rows``: their rows;
    * ``disk_bytes``: the bytes of the copies on disk, of all histories and features;
    * ``hot_rows``: the rows of each table that are kept in memory; ``memory_bytes``: the bytes of
      these, and of the positions of the others;
    * ``hit_rate``: the share of the rows of all parts' halos that is kept in memory.
    """

    num_segments: int
    copied_rows: int
    disk_bytes: int
    hot_rows: int
    memory_bytes: int
    hit_rate: float

    def __str__(self) -> str:
        return (
            f"{human(self.disk_bytes)} of copies on disk, in {self.num_segments:,} pieces, and "
            f"{self.hot_rows:,} rows of each table in memory ({human(self.memory_bytes)}), which "
            f"are {self.hit_rate:.0%} of those that halos have"
        )


def is_packed(model: HistoryModel) -> bool:
    """Return whether :meth:`gas.ScalableGNN.pack` has arranged the histories of a model."""
    return any(history.is_packed for history in model.histories)


def pack(
    histories: Sequence[History],
    loader: SubgraphLoader,
    memory: int | str,
    path: str | Path | None,
) -> PackingSummary:
    """Pack histories, and features in a file, by the batches of a loader."""
    if not isinstance(loader, SubgraphLoader):
        raise TypeError(
            f"'loader' is a {type(loader).__name__}, expected a SubgraphLoader: its parts are what "
            "is arranged for"
        )
    limit = 0 if memory in (0, "0") else bytes_of("memory", memory)
    folder = Path(tempfile.gettempdir() if path is None else path)
    if not folder.is_dir():
        raise ValueError(
            f"'path' is {str(path)!r}, which is no directory: make it, or name another"
        )
    for history in histories:
        _packable_store(history, loader.num_nodes)
    table = loader.get_mapped_features()
    if table is None and not histories:
        raise ValueError(
            "'loader' has no features on disk, and the model has no histories: there is nothing to "
            "pack"
        )
    row_bytes = sum(history.codec.row_bytes(history.embedding_dim) for history in histories)
    if table is not None:
        row_bytes += table.store.columns * table.store.dtype.itemsize
    packing = Packing(*_find_reads(loader), limit // max(1, row_bytes))
    if len(packing.hot) * row_bytes > free_memory():
        raise MemoryError(
            f"'memory' is {human(limit)}, but {human(free_memory())} are free: give less"
        )
    made = [pack_rows(history, packing) for history in histories]
    features = None if table is None else table.make_packed(packing, folder)
    for history, packed in zip(histories, made, strict=True):  # Only after all copies were made.
        history.wait()
        history.store.packed = packed
    if table is not None and features is not None:
        table.store.packed = features
        made.append(features)
        loader.use_features(table)
    return PackingSummary(
        len(packing.writers),
        len(packing.rows),
        sum(one.nbytes for one in made),
        len(packing.hot),
        packing.nbytes + sum(one.hot.nbytes for one in made),
        packing.hot_reads / max(1, packing.halo_rows),
    )


def _packable_store(history: History, num_nodes: int) -> DiskStore:
    """Return the disk store of a history, whose rows can be copied in the order of reads.

    Raises:
        ValueError: If the store isn't on disk, or the graph has another number of nodes.
    """
    history.wait()
    store = history.store
    if not isinstance(store, DiskStore) or not store.direct:
        raise ValueError(
            f"'store' is {store!r}, but only rows of a DiskStore are packed: make the model with "
            "store='disk', or leave pack() out"
        )
    if num_nodes != history.num_embeddings:
        what = f"'loader' has a graph of {num_nodes} nodes"
        raise wrong_size_error(what, history.num_embeddings)
    return store


def pack_rows(history: History, packing: Packing) -> PackedRows:
    """Return copies of a history's rows, to be set as ``history.store.packed``.

    Raises:
        ValueError: If the store isn't on disk, or the packing is of another graph.
        OSError: If the disk has no room for the copies.
    """
    return _packable_store(history, packing.num_rows).make_packed(packing, history.engine.pool)


def _find_reads(loader: SubgraphLoader) -> tuple[Tensor, Iterable[Tensor]]:
    """Return the bounds of a loader's parts, and the rows that each part reads.

    The replicas of a shard are further parts, one for each other rank, which read nothing.
    """
    if loader.shard is None:
        return loader.ptr, loader.halos()
    ends = torch.cat([loader.ptr, loader.num_own + loader.shard.replica_ptr])
    bounds = ends.unique_consecutive()
    others = [torch.empty(0, dtype=torch.long)] * (bounds.numel() - loader.ptr.numel())
    return bounds, itertools.chain(loader.halos(), others)
