"""Copies of a table's rows, where few long reads find what a mini-batch's halo needs.

The halo of a batch is spread over the whole table: its rows, of 256 bytes, lie on nearly as many
pages of 4 KiB. So those that a part's halo has lie together in a second file, once for each part
that reads them; who writes a row writes its copies. Those that most parts read are kept in memory.
The table itself stays complete.
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
from gas.io import explain_full_disk
from gas.native import (
    BufferPool,
    Job,
    RowIndex,
    padded_sizes,
    read_bytes,
    read_segments,
    write_bytes,
    write_segments,
)

# The name of a codec that rows pass, and their width; nothing where they are moved as they are.
CodecOfRows = tuple[str, int] | tuple[()]
AHEAD = 1 << 20  # Bytes that the system is asked to read at once: what devices take in one go.


class PackedRows:
    """The copies that a packing asks for.

    Args:
        table: All rows, contiguous, of shape ``[N, columns]``, mapped from a file.
        packing: What is copied.
        folder: Where the copies lie, in a file without a name.
        pool: Gives memory to stage rows in.
        file: The file of the table, and where its rows begin there. (default: it is only read,
            where it is mapped)

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
        with torch.inference_mode(False):  # Whose tensors couldn't be written to outside of it.
            size = len(packing.hot), table.size(1)
            self.hot = torch.empty(size, dtype=table.dtype, device="cpu")
        self.moved_bytes = 0
        """The bytes read from files so far, those between rows included."""
        self.hot_rows_read = 0
        """How many rows were found in memory so far."""
        self.rows_read = 0
        """How many rows were asked for so far."""
        self._pool = pool
        self._stale = set(range(len(packing.bounds) - 1))  # Parts whose copies are to be made.
        self._version = self._changes
        self._lock = threading.Lock()
        self.file = _make_unnamed_file(Path(folder), int(self._offsets[-1]))
        self._finalizer = weakref.finalize(self, os.close, self.file)
        self._update_stale()

    @property
    def _changes(self) -> int:
        """Count what others did to the table; nothing does of one made in inference mode."""
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
        """Read the rows that were planned for, and decode them, into ``out``.

        Args:
            plan: From :meth:`plan`.
            out: Of shape ``[n, width]``.
            codec: The codec that rows pass, and their width. (default: they are read as they are)
        """
        if plan.in_order and not codec:
            self.read_staged(plan, out)
        else:
            Job.pull(self.read_staged(plan), plan.places, out, *codec).run()

    def read_staged(self, plan: Plan, out: Tensor | None = None) -> Tensor:
        """Read what a plan says into memory, of shape ``[plan.num_rows, columns]``.

        Args:
            plan: What to read.
            out: Where to. (default: memory that is used again)
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
        """Read rows of the table that follow one another."""
        if self._rows_file is None:
            out.copy_(self.table[first:end])
        else:
            file, start = self._rows_file
            read_bytes(file, start + first * self._row_bytes, out)
        self.moved_bytes += (end - first) * self._row_bytes

    def read_ahead(self, index: Tensor, own: Tensor | None = None) -> None:
        """Have the system begin to read the rows of a batch; see :meth:`Packing.plan`."""
        plan = self.plan(index, own)
        if plan is None or not hasattr(os, "posix_fadvise"):
            return
        where = [(self.file, self._offsets[a], self._offsets[b]) for a, b in plan.runs]
        if self._rows_file is not None:
            file, start = self._rows_file
            size = self._row_bytes
            where += [(file, start + a * size, start + b * size) for a, b in plan.ranges]
        with contextlib.suppress(OSError):  # It is only advice.
            for file, first, end in where:
                for start in range(int(first), int(end), AHEAD):  # Of more it would read a part.
                    size = min(AHEAD, int(end) - start)
                    os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)

    # Writing --------------------------------------------------------------------------------------

    def write(self, where: RowIndex, rows: Tensor, codec: CodecOfRows = ()) -> None:
        """Write rows and their copies.

        Args:
            where: The rows, of shape ``[n]``, or ranges of them, as the first and their number.
            rows: What is stored of them, contiguous, of shape ``[n, columns]``; with a codec their
                values.
            codec: The codec that they pass, and their width. (default: they are stored as they are)
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
        """Copy rows again that were written by others, or in parts."""
        if not self._stale and self._version == self._changes:
            return
        with self._lock:  # Features are read by several threads.
            if self._version != self._changes:  # Somebody has changed the table in place.
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
        low, high = packing.hot_slots(part)
        if high > low:
            hot = torch.from_numpy(packing.hot[low:high] - base)
            Job.pull(rows, hot, self.hot[low:high]).run()
        segments = packing.segments_of(part)
        starts, ends = packing.starts[segments], packing.starts[segments + 1]
        offsets = self._offsets[segments]
        write_segments(self.file, rows, packing.rows, base, starts, ends, offsets)


def _make_unnamed_file(folder: Path, num_bytes: int) -> int:
    """Make a file that is gone when it is closed, with room for so many bytes."""
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
    if hasattr(os, "posix_fadvise"):  # What is read is known: nothing beside it is wanted.
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    return file
