"""Move rows between a store and a computation on a CUDA device.

A table on that device is read and written on the computation's stream: a gather there takes no
longer than a copy, and layers that take :class:`gas.history.rows.Rows` read the rows in place.

Rows of a table in pinned memory are copied while the computation goes on: pulls on one stream,
pushes on another, which all histories of a model share (:class:`Streams`). For every history,

* a pull waits for the last push before it, so that it reads the rows of all earlier pushes;
* a push copies its rows and waits for their computation, and for the last pull before it, which
  reads the old rows;
* the computation's stream waits for the pull whose rows it needs, and for no push;
* after the caller has changed the table, the next transfer waits for the current stream.

Streams wait for events; the host waits for none of them.

Rows of any other store are copied through pinned buffers, chunk by chunk: a worker fills one while
the bus empties the other. There the host waits for the worker, and the pulls and pushes of a
history run in the order of its lane.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.packed import CodecOfRows
from gas.history.packing import Plan
from gas.history.store import Store
from gas.history.transfer import Copies, HostLink, Pull, TransferEngine, to_index
from gas.native import Job, JobPolicy, RowIndex, num_cores
from gas.native import device as kernels

CHUNK_BYTES = 1 << 20  # Size of a pinned buffer: large enough for the bus, small enough to overlap.


class Streams:
    """A stream for all pulls and one for all pushes, so that the bus is used in both directions.

    Each history orders its pulls and pushes by events: see :class:`CudaLink`.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pulls = torch.cuda.Stream(device)
        self.pushes = torch.cuda.Stream(device)

    def copy_ids(self, index: Tensor, stream: torch.cuda.Stream, copies: Copies | None) -> Tensor:
        """Return row ids on the device, for use on a stream.

        Args:
            index: The ids, of shape ``[n]``, int64, there or on the CPU.
            stream: The stream that reads them.
            copies: Earlier copies; a new copy is added. (``None``: none are kept)
        """
        made = None if copies is None else copies.get(self.device)
        if made is None:
            made = self._start_copy(index, stream)
            if copies is not None:
                copies[self.device] = made
        ids, event = made
        stream.wait_event(event)
        ids.record_stream(stream)  # They may have been allocated on another stream.
        return ids

    def _start_copy(
        self, index: Tensor, stream: torch.cuda.Stream
    ) -> tuple[Tensor, torch.cuda.Event]:
        if index.device.type != "cpu":
            current = torch.cuda.current_stream(self.device)
            return index.contiguous(), current.record_event()
        # PyTorch's allocator keeps this pinned memory until the copy has ended.
        pinned = index.pin_memory()
        with torch.inference_mode(False), torch.cuda.stream(stream):
            return pinned.to(self.device, non_blocking=True), stream.record_event()


class CudaLink(HostLink):
    """Move rows between a store and a CUDA device; see :class:`HostLink` for the arguments."""

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
        if device not in engine.streams:
            engine.streams[device] = Streams(device)
        self.streams: Streams = engine.streams[device]
        self.on_device = store.direct and store.table.device == device
        over_bus = store.direct and store.table.is_pinned() and kernels.reads_host_memory()
        self.is_staged = not self.on_device and not over_bus
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._num_buffers = 0
        # Workers of several histories run at the same time: together they use all cores at most.
        self._threads = max(1, num_cores() // max(1, engine.threads))
        self._is_behind = True  # Whether the current stream may have changed the table.
        self._users: set[torch.cuda.Stream] = set()  # Of a table on the device.
        self._last: dict[str, torch.cuda.Event] = {}  # The last pull and push over the bus.
        if self.on_device:
            self._wait_for_users(torch.cuda.current_stream(device))  # Which the table was made on.
        if over_bus:
            # Without a reference, the memory of a table may be freed at once.
            done = weakref.finalize(self, _wait_for, self._last, self.store.table)
            done.atexit = False

    def wait(self) -> None:
        """Make the host wait for all submitted pushes and pulls."""
        super().wait()
        _wait_for(self._last)
        for stream in self._users:
            stream.synchronize()

    def note_changes(self) -> None:
        """See :meth:`HostLink.note_changes`: the next transfer waits for the current stream."""
        self._is_behind = True
        if self.on_device:
            self._wait_for_users(torch.cuda.current_stream(self.device))

    def _wait_for_users(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for all others that have used the device's table, and note it."""
        for other in self._users - {stream}:
            stream.wait_stream(other)
        if stream not in self._users:
            self._users.add(stream)
            self.store.table.record_stream(stream)

    def _wait_for_opposite(self, stream: torch.cuda.Stream, other: str) -> None:
        """Make a transfer over the bus wait for the last one in the other direction."""
        if self._is_behind:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            self._is_behind = False
        if other in self._last:
            stream.wait_event(self._last[other])

    def table_and_index(
        self, index: Tensor, dtype: torch.dtype, copies: Copies | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See :meth:`HostLink.table_and_index`: the table and the ids are on this device."""
        if not self.on_device or self.engine.io == "none" or self._dtype != dtype:
            return None
        current = torch.cuda.current_stream(self.device)
        self._wait_for_users(current)
        return self.store.table, self.streams.copy_ids(index, current, copies)

    @property
    def supports_overlap(self) -> bool:
        """See :class:`HostLink`; transfers of a table on the device use the current stream."""
        return not self.on_device

    def pull(
        self,
        index: Tensor,
        space: int,
        dtype: torch.dtype,
        ahead: bool = False,
        own: Tensor | None = None,
        copies: Copies | None = None,
    ) -> Pull:
        """Start to read rows into a tensor on the device.

        The arguments are those of :meth:`HostLink.pull`; ``ahead`` has no effect.
        """
        codec = () if dtype == self._dtype else self._codec
        out_dtype = torch.float32 if codec else self._dtype
        stream = torch.cuda.current_stream(self.device) if self.on_device else self.streams.pulls
        with torch.inference_mode(False), torch.cuda.stream(stream):  # It allocates the memory.
            shape = (space + index.numel(), self.width)
            out = torch.empty(shape, dtype=out_dtype, device=self.device)
            if self.engine.io == "none":
                return Pull(self.engine, None, out.zero_(), stream.record_event())
        if self.is_staged:
            event = torch.cuda.Event()
            index = index.to("cpu", copy=True)
            plan = None if self.store.packed is None else self.store.packed.plan(index, own)
            job = Job.from_function(
                lambda: self._pull_staged(index, plan, out[space:], codec, event)
            )
            ticket = self.engine.submit(self.lane, job, JobPolicy.WORKERS)
            return Pull(self.engine, ticket, out, event)
        ids = self.streams.copy_ids(index, stream, copies)
        if self.on_device:
            self._wait_for_users(stream)
        else:
            self._wait_for_opposite(stream, "push")
        with torch.cuda.stream(stream):
            if codec:
                kernels.decode(self.codec.name, self.store.table, out[space:], ids)
            else:
                kernels.gather_rows(self.store.table, ids, out[space:])
            arrived = stream.record_event()
        if not self.on_device:
            self._last["pull"] = arrived
        return Pull(self.engine, None, out, arrived)

    def push(self, x: Tensor, where: RowIndex) -> None:
        """See :meth:`HostLink.push`."""
        if self.engine.io == "none":
            return
        current = torch.cuda.current_stream(self.device)
        stream = current if self.on_device else self.streams.pushes
        # Copy the values here, on the computation's stream, which may change x afterwards.
        x = x.to(self.device)
        with torch.cuda.device(self.device):
            if self._codec and x.dtype != self._dtype:
                rows = kernels.encode(self.codec.name, x.float().contiguous())
            else:
                rows = x.to(self._dtype)
                if rows is x and not self.on_device:
                    rows = x.clone(memory_format=torch.contiguous_format)
                rows = rows.contiguous()
        if not self.on_device:
            rows.record_stream(stream)
        if self.is_staged:
            made = current.record_event()
            if isinstance(where, Tensor):  # The caller may change it later.
                where = where.to("cpu", copy=True)
            self._submit_push(Job.from_function(lambda: self._push_staged(rows, where, made)))
            return
        if not self.on_device:
            stream.wait_stream(current)
        ids = self.streams.copy_ids(where, stream, None) if isinstance(where, Tensor) else None
        if self.on_device:
            self._wait_for_users(stream)
        else:
            self._wait_for_opposite(stream, "pull")
        # The version counter of the table counts changes by the caller only, not pushes.
        table = self.store.table.data
        with torch.cuda.stream(stream):
            if ids is not None:
                kernels.scatter_rows(table, ids, rows)
            else:
                begin = 0
                for first, size in where:
                    target = table[first : first + size]
                    target.copy_(rows[begin : begin + size], non_blocking=True)
                    begin += size
            if not self.on_device:
                self._last["push"] = stream.record_event()

    # Transfers through pinned buffers, in a worker -----------------------------------------------

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
            packed, index = self.store.packed.read_staged(plan), plan.places
        stream = self.streams.pulls
        rows = out
        if codec:
            with torch.cuda.stream(stream):
                shape = (index.numel(), self.store.columns)
                rows = torch.empty(shape, dtype=self.store.dtype, device=self.device)
        for begin, end in self._chunks(index.numel()):
            buffer, free = self._acquire_buffer()
            part = buffer[: end - begin]
            try:
                if packed is not None:
                    Job.pull(packed, index[begin:end], part).run(self._threads)
                else:
                    self.read_stored(index[begin:end], part, self._threads)
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
        index = to_index(where)
        copied: deque[tuple[int, int, Tensor, torch.cuda.Event]] = deque()

        def write_first() -> None:
            begin, end, buffer, arrived = copied[0]
            arrived.synchronize()  # This worker waits for one copy while the bus moves the next.
            self.store.write(index[begin:end], buffer[: end - begin])
            copied.popleft()
            self._buffers.append((buffer, arrived))

        try:
            for begin, end in self._chunks(rows.size(0)):
                if len(copied) == self._max_buffers:
                    write_first()
                buffer, arrived = self._acquire_buffer()
                copied.append((begin, end, buffer, arrived))
                with torch.cuda.stream(stream):
                    buffer[: end - begin].copy_(rows[begin:end], non_blocking=True)
                    arrived.record(stream)
            while copied:
                write_first()
        finally:  # Buffers that are left after an error.
            self._buffers.extend((buffer, arrived) for _, _, buffer, arrived in copied)

    @property
    def _rows_per_buffer(self) -> int:
        return max(1, CHUNK_BYTES // max(1, self.store.columns * self.store.dtype.itemsize))

    @property
    def _max_buffers(self) -> int:
        return min(2, self.engine.pool_size or 2)

    def _chunks(self, n: int) -> Iterator[tuple[int, int]]:
        """Split ``[0, n)`` into ranges that fit a buffer."""
        size = self._rows_per_buffer
        return ((begin, min(n, begin + size)) for begin in range(0, n, size))

    def _acquire_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        """Return a pinned buffer that is free, and an event for its next copy."""
        if self._num_buffers < self._max_buffers:
            shape = (self._rows_per_buffer, self.store.columns)
            buffer = torch.empty(shape, dtype=self.store.dtype, pin_memory=True)
            self._num_buffers += 1
            return buffer, torch.cuda.Event()
        buffer, free = self._buffers.popleft()
        free.synchronize()
        return buffer, free


def _wait_for(events: dict[str, torch.cuda.Event], _table: Tensor | None = None) -> None:
    """Make the host wait for events; the argument keeps the table alive until then."""
    for event in events.values():
        event.synchronize()
