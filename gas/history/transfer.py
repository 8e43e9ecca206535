"""Rows on their way between a store and a computation: checked, pushed and pulled on the CPU.

:class:`gas.history.cuda.CudaLink` moves them to and from a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.cores import has_idle_cores
from gas.history.engine import Copies, TransferEngine
from gas.history.packed import CodecOfRows
from gas.history.store import Store, TableStore
from gas.native import (
    CODECS,
    Job,
    JobPolicy,
    RowIndex,
    check_index,
    check_range,
    check_ranges,
    decode_torch,
    encode_torch,
)

PUSHES_UNDER_WAY = 2  # Of one history.
SHORT = 8  # Rows of a range, on average, below which its rows are moved one by one.


def as_index(where: RowIndex) -> Tensor:
    """Return the rows that ranges hold, of shape ``[n]``, int64."""
    if isinstance(where, Tensor):
        return where
    ranges = [torch.arange(first, first + size, device="cpu") for first, size in where]
    return torch.cat([torch.arange(0, device="cpu"), *ranges])


def row_index_of(
    num_rows: int,
    n_id: Tensor | None,
    offset: Tensor | Sequence[int] | None,
    count: Tensor | Sequence[int] | None,
    num_embeddings: int,
) -> RowIndex:
    """Check which rows a push names, and return them; see :meth:`gas.History.push`.

    Raises:
        ValueError: If the number of rows is another, or ids and ranges name different ones.
        IndexError: If a row doesn't exist.
    """
    if (offset is None) != (count is None):
        raise ValueError("'offset' and 'count' describe ranges together: pass both or neither")
    if offset is not None and count is not None and not _has_short_ranges(n_id, offset, count):
        return _ranges(num_rows, n_id, offset, count, num_embeddings)
    if n_id is not None:
        check_index("n_id", n_id)
        if n_id.size(0) != num_rows:
            raise ValueError(f"'x' has {num_rows} rows, but 'n_id' names {n_id.size(0)}")
        index = n_id.cpu().contiguous()
        check_range("n_id", index, num_embeddings)
        return index
    if num_rows != num_embeddings:
        raise ValueError(
            f"'x' has {num_rows} rows, but the history has {num_embeddings}: pass 'n_id' to say "
            "which rows these are"
        )
    return [(0, num_embeddings)]


def _ranges(
    num_rows: int,
    n_id: Tensor | None,
    offset: Tensor | Sequence[int],
    count: Tensor | Sequence[int],
    num_embeddings: int,
) -> list[tuple[int, int]]:
    first = offset.tolist() if isinstance(offset, Tensor) else list(offset)
    size = count.tolist() if isinstance(count, Tensor) else list(count)
    if len(first) != len(size) or sum(size) != num_rows:
        raise ValueError(
            f"'x' has {num_rows} rows, but 'offset' and 'count' describe {sum(size)} rows in "
            f"{len(first)} and {len(size)} ranges"
        )
    ranges = list(zip(first, size, strict=True))
    check_ranges(ranges, num_embeddings)
    if n_id is not None and n_id.numel() != num_rows:
        raise ValueError(f"'x' has {num_rows} rows, but 'n_id' names {n_id.numel()}")
    if n_id is not None and n_id.device.type == "cpu":
        nodes = n_id.numpy()  # Whose elements are read faster, one at a time.
        begin = 0
        for at, rows in ranges:
            if rows and (nodes[begin] != at or nodes[begin + rows - 1] != at + rows - 1):
                raise ValueError(
                    f"'n_id' and the ranges disagree: row {begin} belongs to node "
                    f"{nodes[begin]}, but 'offset' says {at}"
                )
            begin += rows
    return ranges


def _has_short_ranges(
    n_id: Tensor | None, offset: Tensor | Sequence[int], count: Tensor | Sequence[int]
) -> bool:
    """Return whether ranges, whose rows are ``n_id``, are moved faster one row at a time."""
    if n_id is None or not isinstance(offset, Tensor) or not isinstance(count, Tensor):
        return False
    few = offset.numel() * SHORT < n_id.numel()
    if few or n_id.device.type != "cpu" or offset.shape != count.shape or bool((count < 0).any()):
        return False
    before = count.cumsum(0) - count
    rows = torch.repeat_interleave(offset - before, count)
    return torch.equal(rows + torch.arange(rows.numel()), n_id)


class Pull:
    """Rows on their way; see :meth:`gas.History.start_pull`.

    Args:
        engine: What moves them.
        ticket: Of the job that does it, or submits it to a device; ``None`` if that has been done.
        out: Where they go.
        event: What they have arrived with on a device.
    """

    def __init__(
        self,
        engine: TransferEngine,
        ticket: int | None,
        out: Tensor,
        event: torch.cuda.Event | None = None,
    ) -> None:
        self._engine = engine
        self._ticket = ticket
        self._out = out
        self._event = event
        self._cancelled = False

    def wait(self) -> Tensor:
        """Return the rows, behind the space that was asked for.

        Those on a device are there for the current stream, which waits for them; the host doesn't.
        """
        if self._cancelled:
            raise RuntimeError("this pull was taken back: start another one")
        if self._ticket is not None:
            try:
                self._engine.wait(self._ticket)
            except BaseException:
                self.cancel()
                raise
            self._ticket = None
        if self._event is not None:
            current = torch.cuda.current_stream(self._out.device)
            current.wait_event(self._event)
            self._out.record_stream(current)
        return self._out

    def cancel(self) -> None:
        """Take the pull back; the history and its engine stay usable."""
        if self._ticket is not None:
            self._cancelled = True
            self._engine.cancel([self._ticket])
            self._ticket = None


class HostLink:
    """Moves rows between a store and buffers in host memory, one lane of an engine.

    Args:
        store: The stored rows.
        codec: How they are stored.
        width: The width of decoded rows.
        engine: Does the work.
    """

    def __init__(self, store: Store, codec: Codec, width: int, engine: TransferEngine) -> None:
        self.store = store
        self.codec = codec
        self.width = width
        self.engine = engine
        self.lane = engine.new_lane()
        self._pushes: deque[int] = deque()  # Tickets of those under way.
        is_direct = isinstance(store, TableStore) and store.direct
        # Rows may be moved without the store's own functions.
        self._native = is_direct and store.table.device.type == "cpu"
        # Rows are in host memory, and may be read at any time.
        self._in_memory = self._native and store.tier in ("host", "pinned")
        self._dtype = codec.dtype
        # The codec that rows of another type pass, and their width.
        self._codec: CodecOfRows = (codec.name, width) if codec.name in CODECS else ()

    def wait(self) -> None:
        """Wait for everything that was submitted."""
        self.engine.wait_lane(self.lane)

    def in_place(
        self, index: Tensor, dtype: torch.dtype, copies: Copies | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the stored rows and ``index``, if values of a dtype can be read in place."""
        if not self._in_memory or self.engine.io == "none" or self._dtype != dtype:
            return None
        self.wait()
        return self.store.table, index.contiguous()

    def pull(
        self,
        index: Tensor,
        space: int,
        dtype: torch.dtype,
        ahead: bool = False,
        own: Tensor | None = None,
        copies: Copies | None = None,
    ) -> Pull:
        """Start to read rows, in a tensor with ``space`` rows in front of them.

        Args:
            index: The rows, of shape ``[n]``, int64, on the CPU.
            space: Rows to leave free.
            dtype: What the caller computes with. The result has it where that is natively done,
                and the type of the stored values otherwise.
            ahead: Whether a worker may begin at once. (default: only who waits does the work)
            own: The batch's own rows, if ``index`` is its halo; what lies packed is found by them.
            copies: Of ``index`` on devices, those that are made included. (default: none are kept)
        """
        codec = () if dtype == self._dtype else self._codec
        out_dtype = torch.float32 if codec else self._dtype
        out = self.engine.pool.take(space + index.numel(), self.width, out_dtype)
        if self.engine.io == "none":
            return Pull(self.engine, None, out)
        rows = out[space:]
        index = index.clone() if ahead else index.contiguous()  # It may be changed until then.
        packed = self.store.packed
        plan = None if packed is None else packed.plan(index, own)
        if packed is not None and plan is not None:
            job = Job.calling(lambda: packed.gather(plan, rows, codec))
        elif self._native:
            job = Job.pull(self.store.table, index, rows, *codec)
        else:
            job = Job.calling(lambda: self._read(index, rows, codec))
        by = JobPolicy.WAITERS
        if ahead and self.supports_overlap:
            by = JobPolicy.ANYONE if self._native and plan is None else JobPolicy.WORKERS
        ticket = self.engine.submit(self.lane, job, by)
        return Pull(self.engine, ticket, out)

    def push(self, x: Tensor, where: RowIndex) -> None:
        """Store rows of shape ``[n, width]`` in their turn; ``x`` may change afterwards."""
        if self.engine.io == "none":
            return
        codec = () if x.dtype == self._dtype else self._codec
        x = x.to("cpu", torch.float32 if codec else self._dtype).contiguous()
        # Into memory rows are written at once: a copy to write from later costs as much.
        later = self.engine.io == "concurrent" and not self._in_memory and self.supports_overlap
        if later:
            x = self.engine.pool.take(x.size(0), self.width, x.dtype).copy_(x)
            where = where.clone() if isinstance(where, Tensor) else where
        packed = self.store.packed
        if packed is not None:
            job = Job.calling(lambda: packed.write(where, x, codec))
        elif self._native:
            job = Job.push(self.store.table, x, where, *codec)
        else:
            job = Job.calling(lambda: self._write(x, where, codec))
        if later:
            self._submit_push(job)
        else:
            self.engine.run(self.lane, job)

    def _submit_push(self, job: Job) -> None:
        """Queue a push, once there are few enough: each holds the rows of a batch."""
        while len(self._pushes) >= PUSHES_UNDER_WAY:
            self.engine.wait(self._pushes.popleft())
        self._pushes.append(self.engine.submit(self.lane, job, JobPolicy.WORKERS, detached=True))

    def read_stored(self, index: Tensor, out: Tensor) -> None:
        """Copy rows as they are stored; nothing may be under way."""
        if self._native:
            Job.pull(self.store.table, index.contiguous(), out).run()
        else:
            self.store.read(index, out)

    def store_rows(self, rows: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Store rows that are encoded already, at once; nothing may be under way."""
        rows = rows.contiguous()
        if self.store.packed is not None:
            self.store.packed.write(ranges, rows)
        elif self._native:
            Job.push(self.store.table, rows, ranges).run()
        else:
            self.store.write(as_index(ranges), rows)
            self.catch_up()

    def catch_up(self) -> None:
        """Note that the caller has changed the table, or may have."""

    @property
    def supports_overlap(self) -> bool:
        """Return whether work can overlap with the computation.

        Moving rows of memory or of a file takes a core, so one has to be idle. A store of the
        user's may wait for something else.
        """
        return self.engine.has_workers and (not self._native or has_idle_cores())

    def _read(self, index: Tensor, out: Tensor, codec: CodecOfRows) -> None:
        shape = (index.numel(), self.store.columns)
        rows = torch.empty(shape, dtype=self.store.dtype, device="cpu")
        self.store.read(index, rows)
        out.copy_(decode_torch(self.codec.name, rows, self.width) if codec else rows)

    def _write(self, x: Tensor, where: RowIndex, codec: CodecOfRows) -> None:
        rows = encode_torch(self.codec.name, x) if codec else x
        self.store.write(as_index(where), rows)
