"""Rows on their way between a store and a computation on a CUDA device.

A table on that device is read and written by the computation's own stream: a gather there takes no
longer than a copy, and layers that take :class:`gas.history.rows.Rows` read the rows in place.

Rows of a table in pinned memory cross the bus beside the computation: pulls on one stream, pushes
on another, which all histories of a model share (:class:`gas.history.engine.Streams`). For every
history,

* a pull waits for the last push before it, and so sees the rows of all of them;
* a push waits for the computation of its rows, of which it has a copy, and for the last pull before
  it, which has read the old rows by then;
* the computation's stream waits for the pull whose rows it needs, and for no push;
* the first of them after somebody else has changed the table waits for the stream that is current
  then.

All of these are events that streams wait for: the host waits for none.

Rows of any other store pass through pinned buffers, chunk by chunk: a worker fills one while the
bus empties the other. There the host waits for the worker, which has to read the rows itself, and
the order of a history's pulls and pushes is that of its lane.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.cores import num_cores
from gas.history.engine import Copies, TransferEngine
from gas.history.packed import CodecOfRows
from gas.history.packing import Plan
from gas.history.store import Store, TableStore
from gas.history.transfer import HostLink, Pull, as_index
from gas.native import Job, JobPolicy, RowIndex
from gas.native import device as kernels

CHUNK_BYTES = 1 << 20  # Of a pinned buffer: large enough for the bus, small enough to overlap.


class CudaLink(HostLink):
    """Moves rows between a store and a CUDA device; see :class:`HostLink` for the arguments."""

    def __init__(
        self,
        store: Store,
        codec: Codec,
        width: int,
        engine: TransferEngine,
        device: torch.device,
    ) -> None:
        super().__init__(store, codec, width, engine)
        self.device = device
        self.streams = engine.streams(device)
        is_table = isinstance(store, TableStore) and store.direct
        self.here = is_table and store.table.device == device
        over_bus = is_table and store.table.is_pinned() and kernels.reads_host_memory()
        self.staged = not self.here and not over_bus
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._num_buffers = 0
        # Workers of several histories run at a time: together they take no more than all cores.
        self._threads = max(1, num_cores() // max(1, engine.threads))
        self._behind = True  # Whether the current stream may have changed the table.
        self._users: set[torch.cuda.Stream] = set()  # Of a table on the device.
        self._last: dict[str, torch.cuda.Event] = {}  # The last pull and push over the bus.
        if self.here:
            self._use(torch.cuda.current_stream(device))  # Where the table was made.
        if over_bus:
            # The memory of a table that nobody refers to any more may be gone at once.
            done = weakref.finalize(self, _wait_for, self._last, self.store.table)
            done.atexit = False

    def wait(self) -> None:
        """Wait for everything that was submitted, the host too."""
        super().wait()
        _wait_for(self._last)
        for stream in self._users:
            stream.synchronize()

    def catch_up(self) -> None:
        """See :meth:`HostLink.catch_up`: the next transfer waits for the current stream."""
        self._behind = True
        if self.here:
            self._use(torch.cuda.current_stream(self.device))

    def _use(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait for the others that have used a table on the device."""
        for other in self._users - {stream}:
            stream.wait_stream(other)
        if stream not in self._users:
            self._users.add(stream)
            self.store.table.record_stream(stream)

    def _follow(self, stream: torch.cuda.Stream, other: str) -> None:
        """Have a transfer over the bus wait for the last one of the other kind."""
        if self._behind:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            self._behind = False
        if other in self._last:
            stream.wait_event(self._last[other])

    def in_place(
        self, index: Tensor, dtype: torch.dtype, copies: Copies | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See :meth:`HostLink.in_place`: rows and ids on this device."""
        if not self.here or self.engine.io == "none" or self._dtype != dtype:
            return None
        current = torch.cuda.current_stream(self.device)
        self._use(current)
        return self.store.table, self.streams.ids(index, current, copies)

    @property
    def supports_overlap(self) -> bool:
        """See :class:`HostLink`: on a stream of its own, but for a table on the device."""
        return not self.here

    def pull(
        self,
        index: Tensor,
        space: int,
        dtype: torch.dtype,
        ahead: bool = False,
        own: Tensor | None = None,
        copies: Copies | None = None,
    ) -> Pull:
        """See :meth:`HostLink.pull`; the result is on the device."""
        codec = () if dtype == self._dtype else self._codec
        out_dtype = torch.float32 if codec else self._dtype
        stream = torch.cuda.current_stream(self.device) if self.here else self.streams.pulls
        with torch.inference_mode(False), torch.cuda.stream(stream):  # Whose memory is used.
            shape = (space + index.numel(), self.width)
            out = torch.empty(shape, dtype=out_dtype, device=self.device)
            if self.engine.io == "none":
                return Pull(self.engine, None, out.zero_(), stream.record_event())
        if self.staged:
            event = torch.cuda.Event()
            index = index.to("cpu", copy=True)
            plan = None if self.store.packed is None else self.store.packed.plan(index, own)
            job = Job.calling(lambda: self._pull_staged(index, plan, out[space:], codec, event))
            ticket = self.engine.submit(self.lane, job, JobPolicy.WORKERS)
            return Pull(self.engine, ticket, out, event)
        ids = self.streams.ids(index, stream, copies)
        if self.here:
            self._use(stream)
        else:
            self._follow(stream, "push")
        with torch.cuda.stream(stream):
            if codec:
                kernels.decode(self.codec.name, self.store.table, out[space:], ids)
            else:
                kernels.gather_rows(self.store.table, ids, out[space:])
            arrived = stream.record_event()
        if not self.here:
            self._last["pull"] = arrived
        return Pull(self.engine, None, out, arrived)

    def push(self, x: Tensor, where: RowIndex) -> None:
        """See :meth:`HostLink.push`."""
        if self.engine.io == "none":
            return
        current = torch.cuda.current_stream(self.device)
        stream = current if self.here else self.streams.pushes
        # What is pushed is fixed here, on the computation's stream: it may change x afterwards.
        x = x.to(self.device)
        with torch.cuda.device(self.device):
            if self._codec and x.dtype != self._dtype:
                rows = kernels.encode(self.codec.name, x.float().contiguous())
            else:
                rows = x.to(self._dtype)
                if rows is x and not self.here:
                    rows = x.clone(memory_format=torch.contiguous_format)
                rows = rows.contiguous()
        if not self.here:
            rows.record_stream(stream)
        if self.staged:
            made = current.record_event()
            if isinstance(where, Tensor):  # It may change, too.
                where = where.to("cpu", copy=True)
            self._submit_push(Job.calling(lambda: self._push_staged(rows, where, made)))
            return
        if not self.here:
            stream.wait_stream(current)
        ids = self.streams.ids(where, stream, None) if isinstance(where, Tensor) else None
        if self.here:
            self._use(stream)
        else:
            self._follow(stream, "pull")
        table = self.store.table.data  # The history counts pushes; the tensor counts other changes.
        with torch.cuda.stream(stream):
            if ids is not None:
                kernels.scatter_rows(table, ids, rows)
            else:
                begin = 0
                for first, size in where:
                    target = table[first : first + size]
                    target.copy_(rows[begin : begin + size], non_blocking=True)
                    begin += size
            if not self.here:
                self._last["push"] = stream.record_event()

    # Through pinned buffers; these run in a worker -----------------------------------------------

    def _pull_staged(
        self,
        index: Tensor,
        plan: Plan | None,
        out: Tensor,
        codec: CodecOfRows,
        event: torch.cuda.Event,
    ) -> None:
        packed = None
        if plan is not None and self.store.packed is not None:
            packed, index = self.store.packed.stage(plan), plan.places
        stream = self.streams.pulls
        rows = out
        if codec:
            with torch.cuda.stream(stream):
                shape = (index.numel(), self.store.columns)
                rows = torch.empty(shape, dtype=self.store.dtype, device=self.device)
        for begin, end in self._chunks(index.numel()):
            buffer, free = self._buffer()
            part = buffer[: end - begin]
            try:
                if packed is not None:
                    Job.pull(packed, index[begin:end], part).run(self._threads)
                else:
                    self._read_stored(index[begin:end], part)
                with torch.cuda.stream(stream):
                    rows[begin:end].copy_(part, non_blocking=True)
                    free.record(stream)
            finally:
                self._buffers.append((buffer, free))
        with torch.cuda.stream(stream):
            if codec:
                kernels.decode(self.codec.name, rows, out)
            event.record(stream)

    def _push_staged(self, rows: Tensor, where: RowIndex, made: torch.cuda.Event) -> None:
        stream = self.streams.pushes
        stream.wait_event(made)
        if self.store.packed is not None:
            with torch.cuda.stream(stream):
                on_host = rows.cpu()
            self.store.packed.write(where, on_host)
            return
        index = as_index(where)
        copied: deque[tuple[int, int, Tensor, torch.cuda.Event]] = deque()

        def write_first() -> None:
            begin, end, buffer, arrived = copied[0]
            arrived.synchronize()  # This worker waits, for one copy, while the bus has the next.
            self.store.write(index[begin:end], buffer[: end - begin])
            copied.popleft()
            self._buffers.append((buffer, arrived))

        try:
            for begin, end in self._chunks(rows.size(0)):
                if len(copied) == self._most_buffers:
                    write_first()
                buffer, arrived = self._buffer()
                copied.append((begin, end, buffer, arrived))
                with torch.cuda.stream(stream):
                    buffer[: end - begin].copy_(rows[begin:end], non_blocking=True)
                    arrived.record(stream)
            while copied:
                write_first()
        finally:  # What is left when something failed.
            self._buffers.extend((buffer, arrived) for _, _, buffer, arrived in copied)

    def _read_stored(self, index: Tensor, out: Tensor) -> None:
        if self._native:
            Job.pull(self.store.table, index, out).run(self._threads)
        else:
            self.store.read(index, out)

    @property
    def _rows_of_buffer(self) -> int:
        return max(1, CHUNK_BYTES // max(1, self.store.columns * self.store.dtype.itemsize))

    @property
    def _most_buffers(self) -> int:
        return min(2, self.engine.pool_size or 2)

    def _chunks(self, n: int) -> Iterator[tuple[int, int]]:
        """Cut ``[0, n)`` into pieces that fit a buffer."""
        size = self._rows_of_buffer
        return ((begin, min(n, begin + size)) for begin in range(0, n, size))

    def _buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        """Return a pinned buffer that no copy uses any more, and an event for its next one."""
        if self._num_buffers < self._most_buffers:
            shape = (self._rows_of_buffer, self.store.columns)
            buffer = torch.empty(shape, dtype=self.store.dtype, pin_memory=True)
            self._num_buffers += 1
            return buffer, torch.cuda.Event()
        buffer, free = self._buffers.popleft()
        free.synchronize()
        return buffer, free


def _wait_for(events: dict[str, torch.cuda.Event], _table: Tensor | None = None) -> None:
    """Have the host wait for events; until then there is a table."""
    for event in events.values():
        event.synchronize()
