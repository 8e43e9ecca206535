"""Arrange the rows that mini-batches read so that a batch needs few reads."""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_PLANS = 4  # Plans of the last batches, for the other histories of a model.
UNKNOWN, HOT = -1, -2  # Values of a row's place: slots of hot rows count down from HOT.


@dataclass(frozen=True, eq=False)
class Plan:
    """Plan to stage the rows of a batch: reads into memory, and the gather from there.

    * ``index``: the rows, of shape ``[n]``, int64;
    * ``hot``: slots of the rows in memory, of shape ``[num_hot]``, int64, which are staged first;
    * ``ranges``: rows of the table, as pairs of the first and the end, staged next;
    * ``runs``: segments of copies, as pairs of the first and the end, staged last;
    * ``num_rows``: the number of staged rows;
    * ``places``: the staged row of each of ``index``, of shape ``[n]``, int64;
    * ``in_order``: the staged rows are in the order of ``index``.
    """

    index: Tensor
    hot: Tensor
    ranges: list[tuple[int, int]]
    runs: list[tuple[int, int]]
    num_rows: int
    places: Tensor
    in_order: bool


class Packing:
    """The halo of every part in segments: the rows of one part that are in the halo of another.

    A packed store has a copy of each segment in addition to its rows. The segments of one reading
    part are contiguous, in the order of the rows. The rows that most parts read may be kept in
    memory instead, and are in no segment.

    * ``rows``: the rows of all segments; ``starts``: where each segment starts in them, and their
      number; ``writers``: the part whose rows a segment has.
    * ``written_by``: the segments of each part's own rows, one for each part that reads some.
    * ``hot``: the rows in memory; ``hot_slots``: the first and the end of each part's own in it.

    It takes four bytes for each row of the graph and of the halos, about three times as much while
    it is made, and the plans of the last batches.

    Args:
        bounds: The first row of each part, and the number of rows, of shape ``[num_parts + 1]``,
            int64.
        halos: The halo of every part, in order: rows outside the part, each of shape ``[h]``.
        num_hot: The number of rows to keep in memory: those in most halos. (default: ``0``)
    """

    def __init__(self, bounds: Tensor, halos: Iterable[Tensor], num_hot: int = 0) -> None:
        self.bounds: list[int] = bounds.tolist()
        self.num_rows = self.bounds[-1]
        self._starts = {first: part for part, first in enumerate(self.bounds[:-1])}
        dtype = np.int32 if 2 * self.num_rows < 2**31 else np.int64
        rows = [np.sort(halo.numpy()).astype(dtype) for halo in halos]
        read = np.zeros(self.num_rows, np.int32)  # The number of parts that read each row.
        for halo in rows:
            read[halo] += 1
        self.halo_rows = int(read.sum(dtype=np.int64))
        self.hot = self._find_hot_rows(read, num_hot)
        self.hot_reads = int(read[self.hot].sum(dtype=np.int64))
        # The place where each row is staged, while a plan is made.
        self._place = np.full(self.num_rows, UNKNOWN, dtype)
        self._place[self.hot] = HOT - np.arange(len(self.hot), dtype=dtype)
        rows = [halo[self._place[halo] == UNKNOWN] for halo in rows]
        self._make_segments(rows)
        self._reset_plans()

    def _reset_plans(self) -> None:
        """Start without plans, here or in a forked process."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._plans: OrderedDict[tuple[int, ...], Plan] = OrderedDict()
        self._place[self.rows] = UNKNOWN

    @staticmethod
    def _find_hot_rows(read: np.ndarray, num_hot: int) -> np.ndarray:
        """Return the rows that most parts read, in order; at least one part reads each."""
        num_hot = min(num_hot, int((read > 0).sum()))
        if num_hot == 0:
            return np.zeros(0, np.int64)
        return np.sort(np.argpartition(-read, num_hot - 1)[:num_hot])

    def _make_segments(self, halos: Sequence[np.ndarray]) -> None:
        """Find the bounds of segments, and the parts that write them."""
        num_parts = len(self.bounds) - 1
        starts, writers, self._first_of = [], [], [0]
        before = 0
        for halo in halos:
            cuts = np.searchsorted(halo, self.bounds)
            filled = np.nonzero(np.diff(cuts))[0]
            starts.append(before + cuts[filled])
            writers.append(filled)
            before += len(halo)
            self._first_of.append(self._first_of[-1] + len(filled))
        none = [np.zeros(0, np.int64)]
        self.rows = np.concatenate([*halos, np.zeros(0, self._place.dtype)])
        self.starts = np.concatenate([*none, *starts, [before]])
        self.writers = np.concatenate([*none, *writers])
        order = np.argsort(self.writers, kind="stable")
        ends = np.searchsorted(self.writers[order], np.arange(num_parts + 1))
        self.written_by = [order[a:b] for a, b in itertools.pairwise(ends)]
        hot_ends = np.searchsorted(self.hot, self.bounds)
        self.hot_slots = list(itertools.pairwise(hot_ends.tolist()))

    @property
    def nbytes(self) -> int:
        """The size of this object in memory, without plans."""
        return self.rows.nbytes + self._place.nbytes + self.hot.nbytes + 3 * self.starts.nbytes

    # Writing --------------------------------------------------------------------------------------

    def parts_in_range(self, first: int, end: int) -> tuple[range, list[int]]:
        """Return the parts inside a range of rows, and those of which it has only some rows."""
        low = int(np.searchsorted(self.bounds, first, "left"))
        high = max(low, int(np.searchsorted(self.bounds, end, "right")) - 1)
        cut = []
        if first < end:
            of_first = int(np.searchsorted(self.bounds, first, "right")) - 1
            of_last = int(np.searchsorted(self.bounds, end - 1, "right")) - 1
            cut = [part for part in {of_first, of_last} if not low <= part < high]
        return range(low, high), cut

    def parts_of_rows(self, index: Tensor) -> list[int]:
        """Return the parts of some rows."""
        parts = np.searchsorted(self.bounds, index.numpy(), "right") - 1
        return np.unique(parts).tolist()

    # Reading --------------------------------------------------------------------------------------

    def plan(self, index: Tensor, own: Tensor | None = None) -> Plan | None:
        """Plan how to read the rows of a batch; ``None`` if it isn't one of whole parts.

        Args:
            index: The rows, of shape ``[n]``, int64: the halo's or, without ``own``, the batch's
                own and then the halo's.
            own: The batch's own rows, which aren't read. (default: they are)
        """
        parts, size = self._leading_parts(index if own is None else own)
        if not parts or (own is not None and size < own.numel()):
            return None
        rows = index.numpy()
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows):
            return None  # The caller reads them from the table, which raises the error.
        if os.getpid() != self._process:  # Another thread may have had the lock at the fork.
            self._reset_plans()
        with self._lock:
            key = (own is None, *parts)
            plan = self._plans.get(key)
            if plan is None or not torch.equal(plan.index, index):
                plan = self._plan(index, parts, size if own is None else 0)
                if plan is None:
                    return None
                self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return plan

    def _leading_parts(self, index: Tensor) -> tuple[list[int], int]:
        """Return the complete parts at the beginning of some rows, and the number of their rows."""
        rows, at, parts = index.numpy(), 0, []
        while at < len(rows):
            part = self._starts.get(int(rows[at]))
            if part is None or part in parts:
                break
            size = self.bounds[part + 1] - self.bounds[part]
            if not np.array_equal(rows[at : at + size], np.arange(first := rows[at], first + size)):
                break
            parts.append(part)
            at += size
        return parts, at

    def _plan(self, index: Tensor, parts: list[int], own: int) -> Plan | None:
        rows = index.numpy()
        ranges = [(self.bounds[p], self.bounds[p + 1]) for p in parts] if own else []
        runs = list(self._segment_runs(parts))
        places = np.empty(len(rows), np.int64)
        places[:own] = np.arange(own)
        staged = own
        try:
            for first, end in runs:
                copies = self.rows[self.starts[first] : self.starts[end]]
                self._place[copies] = np.arange(staged, staged + len(copies))
                staged += len(copies)
            halo = self._place[rows[own:]]
        finally:
            for first, end in runs:
                self._place[self.rows[self.starts[first] : self.starts[end]]] = UNKNOWN
        if (halo == UNKNOWN).any():
            return None  # The halo has other rows, such as that of another graph.
        if staged >= self.num_rows:  # Reading the whole table takes fewer rows.
            ranges, runs, staged = [(0, self.num_rows)], [], self.num_rows
            return self._put_hot_first(index, index.clone(), ranges, runs, staged)
        places[own:] = halo
        return self._put_hot_first(index, torch.from_numpy(places), ranges, runs, staged)

    def _segment_runs(self, parts: list[int]) -> Iterable[tuple[int, int]]:
        """Yield the segments that some parts read and don't write themselves."""
        for part in parts:
            first, end = self._first_of[part], self._first_of[part + 1]
            own = np.nonzero(np.isin(self.writers[first:end], parts))[0]
            for stop in (*(first + own).tolist(), end):
                if stop > first:
                    yield first, stop
                first = stop + 1

    @staticmethod
    def _put_hot_first(
        index: Tensor,
        places: Tensor,
        ranges: list[tuple[int, int]],
        runs: list[tuple[int, int]],
        staged: int,
    ) -> Plan:
        """Make a plan in which hot rows are staged before the others."""
        is_hot = places <= HOT
        hot = HOT - places[is_hot]
        places += hot.numel()
        places[is_hot] = torch.arange(hot.numel(), device="cpu")
        staged += hot.numel()
        in_order = staged == index.numel() and torch.equal(
            places, torch.arange(staged, device="cpu")
        )
        return Plan(index.clone(), hot, ranges, runs, staged, places, in_order)
