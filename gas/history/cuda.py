"""Rows on their way between a store and a computation on a CUDA device.

Every history has a stream of its own: what is submitted to it happens in order, beside the streams
of the computation and of other histories. The computation's stream waits for rows by an event, and
a push waits for the computation by an event; the host waits for neither.

A table on the device or in pinned memory is read and written by that stream alone. Rows of any
other store pass through pinned buffers, chunk by chunk: a worker fills one while the bus empties
the other. There the host waits for the worker, which has to read the rows itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.engine import TransferEngine
from gas.history.host import HostLink, Pull, Where, as_index
from gas.history.packing import Plan
from gas.history.store import Store, TableStore
from gas.native import device as kernels
from gas.native.engine import By
from gas.native.transfer import Job, Table

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
        self.stream = torch.cuda.Stream(device)
        self.staged = not (
            isinstance(store, TableStore)
            and store.direct
            and (
                store.table.device == device
                or (store.table.is_pinned() and kernels.reads_host_memory())
            )
        )
        self._buffers: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._behind = True  # Whether the current stream may have changed the table.

    def wait(self) -> None:
        """Waits for everything that was submitted, the host too."""
        super().wait()
        self.stream.synchronize()

    def catch_up(self) -> None:
        """See :meth:`HostLink.catch_up`: the next transfer waits for the current stream."""
        self._behind = True

    def _follow(self) -> None:
        if self._behind:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self._behind = False

    def in_place(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """See :meth:`HostLink.in_place`: rows and ids on this device."""
        here = not self.staged and self._rows.device == self.device
        if not here or self.engine.io == "none" or self.codec.dtype != dtype:
            return None
        ids = self._on_device(index)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)  # For the ids, and for what was pushed.
        ids.record_stream(current)
        return self._rows, ids

    @property
    def beside(self) -> bool:
        """See :class:`HostLink`: on a stream of its own."""
        return True

    def pull(
        self,
        index: Tensor,
        space: int,
        dtype: torch.dtype,
        ahead: bool = False,
        own: Tensor | None = None,
    ) -> Pull:
        """See :meth:`HostLink.pull`; the result is on the device."""
        encoded = self._encoded(dtype)
        out_dtype = torch.float32 if encoded else self.codec.dtype
        self._follow()
        ids = index if self.staged else self._on_device(index)
        with torch.inference_mode(False), torch.cuda.stream(self.stream):  # Whose memory is used.
            shape = (space + index.numel(), self.width)
            out = torch.empty(shape, dtype=out_dtype, device=self.device)
            if self.engine.io == "none":
                return Pull(self.engine, None, out.zero_(), self.stream.record_event())
            if not self.staged:
                rows = kernels.gather_rows(self._rows, ids)
                self._decode(rows, out[space:], encoded)
                return Pull(self.engine, None, out, self.stream.record_event())
        event = torch.cuda.Event()
        index = index.to("cpu", copy=True)
        plan = self._plan(index, own)
        job = Job.calling(lambda: self._pull_staged(index, plan, out[space:], encoded, event))
        ticket = self.engine.jobs.submit(self.lane, job, By.WORKERS)
        return Pull(self.engine, ticket, out, event)

    def push(self, x: Tensor, where: Where) -> None:
        """See :meth:`HostLink.push`."""
        if self.engine.io == "none":
            return
        # What is pushed is fixed here, on the computation's stream: it may change x afterwards.
        self._follow()
        x = x.to(self.device)
        with torch.cuda.device(self.device):
            if self._encoded(x.dtype):
                rows = kernels.encode(self.codec.name, x.float().contiguous())
            else:
                rows = x.to(self.codec.dtype, copy=True, memory_format=torch.contiguous_format)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        rows.record_stream(self.stream)
        if self.staged:
            job = Job.calling(lambda: self._push_staged(rows, where))
            self._submit_push(job)
            return
        ids = self._on_device(where) if isinstance(where, Tensor) else None
        table = self._rows.data  # The history counts pushes; the tensor counts other changes.
        with torch.cuda.stream(self.stream):
            if ids is not None:
                kernels.scatter_rows(table, ids, rows)
                return
            begin = 0
            for first, size in where:
                target = table[first : first + size]
                target.copy_(rows[begin : begin + size], non_blocking=True)
                begin += size

    def _on_device(self, index: Tensor) -> Tensor:
        """Row ids on the device, on this link's stream."""
        if index.device.type == "cpu":
            pinned = index.pin_memory()
            with torch.cuda.stream(self.stream):
                return pinned.to(self.device, non_blocking=True)
        index = index.contiguous()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        index.record_stream(self.stream)
        return index

    def _decode(self, rows: Tensor, out: Tensor, encoded: bool) -> None:
        if encoded:
            kernels.decode(self.codec.name, rows, out)
        else:
            out.copy_(rows)

    # Through pinned buffers; these run in a worker -----------------------------------------------

    def _pull_staged(
        self, index: Tensor, plan: Plan | None, out: Tensor, encoded: bool, event: torch.cuda.Event
    ) -> None:
        packed = None
        if plan is not None and self._packed is not None:
            packed, index = self._packed.stage(plan), plan.places
        with torch.cuda.stream(self.stream):
            rows = torch.empty(
                index.numel(), self.store.columns, dtype=self.store.dtype, device=self.device
            )
        for begin, end, buffer, free in self._chunks(index.numel()):
            if packed is not None:
                Table(packed).pull(index[begin:end], buffer).run()
            else:
                self._read_stored(index[begin:end], buffer)
            with torch.cuda.stream(self.stream):
                rows[begin:end].copy_(buffer, non_blocking=True)
                free.record(self.stream)
        with torch.cuda.stream(self.stream):
            self._decode(rows, out, encoded)
            event.record(self.stream)

    def _push_staged(self, rows: Tensor, where: Where) -> None:
        if self._packed is not None:
            with torch.cuda.stream(self.stream):
                on_host = rows.cpu()
            self._packed.write(where, on_host)
            return
        index = as_index(where)
        for begin, end, buffer, free in self._chunks(rows.size(0)):
            with torch.cuda.stream(self.stream):
                buffer.copy_(rows[begin:end], non_blocking=True)
                free.record(self.stream)
            free.synchronize()  # This worker waits, for one copy.
            self.store.write(index[begin:end], buffer)

    def _read_stored(self, index: Tensor, out: Tensor) -> None:
        if self._native:
            self._table(encoded=False).pull(index, out).run()
        else:
            self.store.read(index, out)

    def _chunks(self, n: int) -> Iterator[tuple[int, int, Tensor, torch.cuda.Event]]:
        """Pieces of ``[0, n)``, each with a pinned buffer that no copy uses any more."""
        columns, dtype = self.store.columns, self.store.dtype
        size = max(1, CHUNK_BYTES // max(1, columns * dtype.itemsize))
        for begin in range(0, n, size):
            if len(self._buffers) < min(2, self.engine.pool_size or 2):
                buffer = torch.empty(size, columns, dtype=dtype, pin_memory=True)
                free = torch.cuda.Event()
            else:
                buffer, free = self._buffers.popleft()
                free.synchronize()
            end = min(n, begin + size)
            yield begin, end, buffer[: end - begin], free
            self._buffers.append((buffer, free))
