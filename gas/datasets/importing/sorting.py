"""External sort of edges by destination and source.

Edges are written to one file in the order of reading, while edges into each node are counted. They
are then distributed to one file per range of destinations, which is sorted in memory. A destination
with too many edges is divided further by ranges of sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

# Bytes per edge while sorting, besides three copies of the edge: keys, orders, flags.
SORT_BYTES = 64
PAIR = ("dst", "src")
FILE_BYTES = 1 << 20  # The largest block that is read from a file.
Progress = Callable[[int], None]


def edge_record(
    num_nodes: int, has_weight: bool, width: int, undirected: bool, has_types: bool = False
) -> np.dtype:
    """Return the record of an edge in a temporary file."""
    index = "<i4" if num_nodes < 2**31 else "<i8"
    fields: list[tuple[str, str] | tuple[str, str, tuple[int]]] = [("dst", index), ("src", index)]
    fields += [("types", "<i4")] if has_types else []
    fields += [("weight", "<f4")] if has_weight else []
    fields += [("attr", "<f4", (width,))] if width else []
    return np.dtype(fields + ([("added", "?")] if undirected else []))


class EdgeSorter:
    """External sort of the edges in a file.

    Args:
        folder: The folder of temporary files ``edges-*.part``.
        kind: The record of an edge, from :func:`edge_record`.
        num_nodes: The number of nodes.
        memory: The bytes for sorting.
        progress: Called with the number of edges after each block.
        announce: Called with the names of files before they are created.
    """

    def __init__(
        self,
        folder: Path,
        kind: np.dtype,
        num_nodes: int,
        memory: int,
        progress: Progress,
        announce: Callable[[list[str]], None],
    ) -> None:
        self._folder, self._kind, self._num_nodes = folder, kind, num_nodes
        self.capacity = max(16, memory // (3 * kind.itemsize + SORT_BYTES))
        self._step = max(1, min(FILE_BYTES, memory // 4) // kind.itemsize)
        self._progress = progress
        self._announce = announce
        self._number = 0

    def sort(self, file: Path, counts: np.ndarray) -> Iterator[np.ndarray]:
        """Yield blocks of sorted edges; the sort is stable.

        Reverses that were added are left out if the same edge was read.

        Args:
            file: The file of edges, which isn't removed.
            counts: The number of edges into each node, of shape ``[N]``.
        """
        found, wanted = file.stat().st_size, int(counts.sum()) * self._kind.itemsize
        if found != wanted:
            raise ValueError(
                f"{file} has {found:,} bytes, expected {wanted:,}: it was changed since the import "
                "was interrupted; remove its folder to start over"
            )
        yield from self._sort_by(file, "dst", counts, keep=True)

    def _sort_by(
        self, file: Path, key: str, counts: np.ndarray, keep: bool = False
    ) -> Iterator[np.ndarray]:
        """Sort the edges of a file, which may not fit into memory, and yield them in blocks.

        Args:
            file: The file.
            key: The end by which edges are split among smaller files, ``"dst"`` or ``"src"``.
            counts: The number of edges of each id of ``key``.
            keep: Keep the file. (default: ``False``)
        """
        total = int(counts.sum())
        if total <= self.capacity:
            yield self._sort_in_memory(np.fromfile(file, self._kind))
            if not keep:
                file.unlink()
            return
        bounds = self._bounds(counts)
        files = self._new_files(len(bounds) - 1)
        for block in self._read_blocks(file):
            which = np.searchsorted(bounds, block[key], side="right") - 1
            order = np.argsort(which, kind="stable")
            ends = np.searchsorted(which[order], np.arange(len(files) + 1))
            for part, begin, end in zip(files, ends[:-1], ends[1:], strict=True):
                if end > begin:
                    with part.open("ab") as stream:
                        block[order[begin:end]].tofile(stream)
        if not keep:
            file.unlink()
        for part, begin, end in zip(files, bounds[:-1], bounds[1:], strict=True):
            if not part.exists():
                continue
            if int(counts[begin:end].sum()) <= self.capacity:
                yield self._sort_in_memory(np.fromfile(part, self._kind))
                part.unlink()
            elif key == "dst":  # A single node with too many edges.
                yield from self._sort_by(part, "src", self._count_sources(part))
            else:
                yield from self._parallel_edges(part)

    def _bounds(self, counts: np.ndarray) -> np.ndarray:
        """Return the bounds of ranges of ids whose edges fit memory, or of single ids."""
        ends, bounds = counts.cumsum(), [0]
        while bounds[-1] < len(counts):
            begin = bounds[-1]
            before = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, before + self.capacity, side="right"))
            bounds.append(max(end, begin + 1))
        return np.array(bounds)

    def _count_sources(self, file: Path) -> np.ndarray:
        """Count the edges from each node, of shape ``[N]``."""
        counts = np.zeros(self._num_nodes, np.int64)
        for block in self._read_blocks(file):
            np.add.at(counts, block["src"], 1)
        return counts

    def _read_blocks(self, file: Path) -> Iterator[np.ndarray]:
        with file.open("rb") as stream:
            while len(block := np.fromfile(stream, self._kind, self._step)):
                yield block

    def _sort_in_memory(self, edges: np.ndarray) -> np.ndarray:
        """Sort edges, without redundant reverses."""
        order = np.lexsort((edges["src"], edges["dst"]))
        edges = edges[order]
        del order
        if "added" in edges.dtype.names:  # type: ignore[operator]
            edges = edges[~self._is_redundant(edges)]
        self._progress(len(edges))
        return edges

    @staticmethod
    def _is_redundant(edges: np.ndarray) -> np.ndarray:
        """Return a mask of added reverses that were read as edges, too."""
        starts = np.ones(len(edges), bool)
        starts[1:] = is_new(edges, PAIR)
        if not len(edges):
            return starts
        given = np.bitwise_or.reduceat(~edges["added"], np.flatnonzero(starts))
        return edges["added"] & given[np.cumsum(starts) - 1]

    def _parallel_edges(self, file: Path) -> Iterator[np.ndarray]:
        """Yield edges between the same two nodes, in the order of reading."""
        undirected = "added" in self._kind.names  # type: ignore[operator]
        given = undirected and any(bool((~b["added"]).any()) for b in self._read_blocks(file))
        for block in self._read_blocks(file):
            if given:
                block = block[~block["added"]]
            self._progress(len(block))
            yield block
        file.unlink()

    def _new_files(self, count: int) -> list[Path]:
        """Name new temporary files; those of an interrupted import are overwritten."""
        numbers = range(self._number, self._number + count)
        self._number += count
        files = [self._folder / f"edges-{number}.part" for number in numbers]
        self._announce([file.name for file in files])
        return files


def is_new(edges: np.ndarray, fields: Sequence[str]) -> np.ndarray:
    """Return whether each edge differs from the previous one, of shape ``[edges - 1]``."""
    return np.logical_or.reduce([edges[field][1:] != edges[field][:-1] for field in fields])


class Duplicates:
    """Counter of duplicate edges, of the same type if they have types."""

    def __init__(self) -> None:
        self.count = 0
        self._last: np.ndarray | None = None  # The distinct edges between the last two nodes.

    def add(self, edges: np.ndarray) -> None:
        """Count the duplicates of the next edges, in the order of :class:`EdgeSorter`."""
        if not len(edges):
            return
        last, pair = self._last, list(PAIR)
        if last is not None and (last[pair][0] == edges[pair][0]):
            edges = np.concatenate([last, edges])
        has_types = "types" in (edges.dtype.names or ())
        if has_types:
            edges = edges[np.lexsort((edges["types"], edges["src"], edges["dst"]))]
        new = np.ones(len(edges), bool)
        new[1:] = is_new(edges, (*PAIR, "types") if has_types else PAIR)
        self.count += int((~new).sum())
        begin = len(edges) - 1
        if has_types:
            ends = edges[pair] == edges[pair][-1]
            begin = len(edges) - int(ends.sum())
        self._last = edges[begin:][new[begin:] | (not has_types)].copy()
