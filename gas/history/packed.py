"""Copies of a table's rows in an order in which the halo of a mini-batch needs few long reads.

The halo of a batch is spread over the whole table: its rows, of 256 bytes, are on nearly as many
pages of 4 KiB. A second file therefore stores the halo of each part contiguously: a row is in it
once for each part that reads it, and writing the row updates these copies. The rows that most parts
read are kept in memory instead. The table itself stays complete.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gas.history.packing import Packing, Plan
from gas.native import (
    BufferPool,
    Job,
    RowIndex,
    explain_full_disk,
    padded_sizes,
    read_bytes,
    read_segments,
    write_bytes,
    write_segments,
)

# The name of a codec and the width of decoded rows; empty if rows are moved unchanged.
CodecOfRows = tuple[str, int] | tuple[()]
AHEAD = 1 << 20  # Bytes per request to read ahead: the system ignores the rest of longer ones.


class PackedRows:
    """Copies of rows in the order of a packing.

    Args:
        table: All rows, contiguous, of shape ``[N, columns]``, mapped from a file.
        packing: The rows to copy, and their order.
        folder: The folder of the copies, a file without a name.
        pool: The pool of memory for rows that are read.
        file: The file of the table, and the offset of its rows. (default: the table is read-only,
            and read by its mapping)

    Raises:
        OSError: If the disk has no room for the copies.
    """

    def __init__(
        self,
        table: Tensor,
        packing: Packing,
        folder: str | Path,
        pool: BufferPool,
        file: tuple[int, int] | None = None,
    ) -> None:
        self.table = table
        self.packing = packing
        self._rows_file = file
        self._row_bytes = table.size(1) * table.element_size()
        sizes = padded_sizes(np.diff(packing.starts) * self._row_bytes)
        self._offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._process = os.getpid()
        with torch.inference_mode(False):  # Inference tensors are read-only outside of the mode.
            size = len(packing.hot), table.size(1)
            self.hot = torch.empty(size, dtype=table.dtype, device="cpu")
        self.moved_bytes = 0
        """The bytes read from files so far, those between rows included."""
        self.hot_rows_read = 0
        """The number of rows read from memory so far."""
        self.rows_read = 0
        """The number of rows read so far."""
        self._pool = pool
        self._stale = set(range(len(packing.bounds) - 1))  # Parts whose copies are outdated.
        self._version = self._changes
        self._lock = threading.Lock()
        self.file = _make_unnamed_file(Path(folder), int(self._offsets[-1]))
        self._finalizer = weakref.finalize(self, os.close, self.file)
        self._update_stale()

    @property
    def _changes(self) -> int:
        """The number of in-place changes of the table; inference tensors don't count them."""
        return 0 if self.table.is_inference() else self.table._version

    @property
    def nbytes(self) -> int:
        """The bytes of the copies on disk, those between segments included."""
        return int(self._offsets[-1])

    def close(self) -> None:
        """Close the file of the copies."""
        self._finalizer()
        self.hot = self.hot[:0]

    # Reading --------------------------------------------------------------------------------------

    def plan(self, index: Tensor, own: Tensor | None = None) -> Plan | None:
        """Plan how to read the rows of a batch; see :meth:`Packing.plan`."""
        return self.packing.plan(index.cpu(), None if own is None else own.cpu())

    def gather(self, plan: Plan, out: Tensor, codec: CodecOfRows = ()) -> None:
        """Read the rows of a plan, and decode them, into ``out``.

        Args:
            plan: The plan, from :meth:`plan`.
            out: The tensor to write to, of shape ``[n, width]``.
            codec: The codec of the rows, and their width. (default: they aren't decoded)
        """
        if plan.in_order and not codec:
            self.read_staged(plan, out)
        else:
            Job.pull(self.read_staged(plan), plan.places, out, *codec).run()

    def read_staged(self, plan: Plan, out: Tensor | None = None) -> Tensor:
        """Read the staged rows of a plan, of shape ``[plan.num_rows, columns]``.

        Args:
            plan: The plan.
            out: The tensor to write to. (default: memory of the pool)
        """
        self._update_stale()
        if out is None:
            out = self._allocate(plan.num_rows)
        at = plan.hot.numel()
        if at:
            Job.pull(self.hot, plan.hot, out[:at]).run()
        for first, end in plan.ranges:
            self._read_range(first, end, out[at : at + end - first])
            at += end - first
        for first, end in plan.runs:
            starts = self.packing.starts[first : end + 1]
            to = out[at : at + int(starts[-1] - starts[0])]
            offset = int(self._offsets[first])
            self.moved_bytes += read_segments(self.file, offset, starts, self._row_bytes, to)
            at += to.size(0)
        self.rows_read += plan.index.numel()
        self.hot_rows_read += plan.hot.numel()
        return out

    def _allocate(self, num_rows: int) -> Tensor:
        return self._pool.allocate(num_rows, self.table.size(1), self.table.dtype)

    def _read_range(self, first: int, end: int, out: Tensor) -> None:
        """Read consecutive rows of the table."""
        if self._rows_file is None:
            out.copy_(self.table[first:end])
        else:
            file, start = self._rows_file
            read_bytes(file, start + first * self._row_bytes, out)
        self.moved_bytes += (end - first) * self._row_bytes

    def read_ahead(self, index: Tensor, own: Tensor | None = None) -> None:
        """Let the system read ahead the rows of a batch; see :meth:`Packing.plan`."""
        plan = self.plan(index, own)
        if plan is None or not hasattr(os, "posix_fadvise"):
            return
        where = [(self.file, self._offsets[a], self._offsets[b]) for a, b in plan.runs]
        if self._rows_file is not None:
            file, start = self._rows_file
            size = self._row_bytes
            where += [(file, start + a * size, start + b * size) for a, b in plan.ranges]
        with contextlib.suppress(OSError):  # The call is only advice.
            for file, first, end in where:
                for start in range(int(first), int(end), AHEAD):
                    size = min(AHEAD, int(end) - start)
                    os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)

    # Writing --------------------------------------------------------------------------------------

    def write(self, where: RowIndex, rows: Tensor, codec: CodecOfRows = ()) -> None:
        """Write rows and their copies.

        Args:
            where: The rows, of shape ``[n]``, or ranges, as the first row and the number of rows.
            rows: Stored rows, contiguous, of shape ``[n, columns]``; values if ``codec`` is given.
            codec: The codec of the values, and their width. (default: rows are encoded already)
        """
        assert self._rows_file is not None
        if codec:
            encoded = self._allocate(rows.size(0))
            Job.push(encoded, rows, [(0, rows.size(0))], *codec).run()
            rows = encoded
        if os.getpid() != self._process:
            raise RuntimeError(
                "packed rows were written in a process that was forked from the one that packed "
                "them, which wouldn't know: call model.pack(loader) in the process that trains"
            )
        if isinstance(where, Tensor):
            # Before writing, which may fail.
            self._stale.update(self.packing.parts_of_rows(where))
            Job.push(self.table, rows, where).run()
            return
        file, start = self._rows_file
        begin = 0
        for first, size in where:
            new = rows[begin : begin + size]
            whole, cut = self.packing.parts_in_range(first, first + size)
            self._stale.update(whole, cut)
            write_bytes(file, start + first * self._row_bytes, new)
            for part in whole:
                low, high = self.packing.bounds[part : part + 2]
                self._write_copies(part, new[low - first : high - first])
                self._stale.discard(part)
            begin += size

    def _update_stale(self) -> None:
        """Update outdated copies: of rows that the caller changed, or that were pushed in part."""
        if not self._stale and self._version == self._changes:
            return
        with self._lock:  # Several threads read features.
            if self._version != self._changes:  # The caller has changed the table in place.
                self._stale.update(range(len(self.packing.bounds) - 1))
                self._version = self._changes
            while self._stale:
                part = min(self._stale)
                first, end = self.packing.bounds[part : part + 2]
                rows = self._allocate(end - first)
                self._read_range(first, end, rows)
                self._write_copies(part, rows)
                self._stale.discard(part)

    def _write_copies(self, part: int, rows: Tensor) -> None:
        """Write the copies of a part's own rows."""
        packing = self.packing
        base = packing.bounds[part]
        low, high = packing.hot_slots[part]
        if high > low:
            hot = torch.from_numpy(packing.hot[low:high] - base)
            Job.pull(rows, hot, self.hot[low:high]).run()
        segments = packing.written_by[part]
        starts, ends = packing.starts[segments], packing.starts[segments + 1]
        offsets = self._offsets[segments]
        write_segments(self.file, rows, packing.rows, base, starts, ends, offsets)


def _make_unnamed_file(folder: Path, num_bytes: int) -> int:
    """Make a file without a name, with ``num_bytes`` reserved; closing it removes it."""
    file, name = tempfile.mkstemp(prefix=".gas-packed-", dir=folder)
    os.unlink(name)
    with explain_full_disk(
        folder,
        lambda free: (
            f"the disk has no room for {num_bytes:,} bytes of packed rows ({free:,} are free): "
            "give more 'memory', cut the graph into fewer parts, or leave the rows unpacked"
        ),
    ):
        try:
            if num_bytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, num_bytes)
        except OSError:
            os.close(file)
            raise
    if hasattr(os, "posix_fadvise"):  # Don't read pages around the requested ones.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    return file
