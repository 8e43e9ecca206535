"""Rows on their way between a store and a computation on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.cores import has_idle_cores
from gas.history.engine import TransferEngine
from gas.history.packed import PackedRows
from gas.history.packing import Plan
from gas.history.store import Store, TableStore
from gas.history.streams import Copies
from gas.history.where import Where, as_index
from gas.native import transfer
from gas.native.engine import By
from gas.native.transfer import Job, Table

PUSHES_UNDER_WAY = 2  # Of one history.


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
        """The rows, behind the space that was asked for.

        Those on a device are there for the current stream, which waits for them; the host doesn't.
        """
        if self._cancelled:
            raise RuntimeError("this pull was taken back: start another one")
        if self._ticket is not None:
            try:
                self._engine.jobs.wait(self._ticket)
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
        """Takes the pull back; the history and its engine stay usable."""
        if self._ticket is not None:
            self._cancelled = True
            self._engine.jobs.cancel([self._ticket])
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

    def wait(self) -> None:
        """Waits for everything that was submitted."""
        self.engine.jobs.wait_lane(self.lane)

    def in_place(
        self, index: Tensor, dtype: torch.dtype, copies: Copies | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The stored rows and ``index``, where values of a dtype can be read as they are stored."""
        if not self._in_memory or self.engine.io == "none" or self.codec.dtype != dtype:
            return None
        self.wait()
        return self._rows, index.contiguous()

    def pull(
        self,
        index: Tensor,
        space: int,
        dtype: torch.dtype,
        ahead: bool = False,
        own: Tensor | None = None,
        copies: Copies | None = None,
    ) -> Pull:
        """Starts to read rows, in a tensor with ``space`` rows in front of them.

        Args:
            index: The rows, of shape ``[n]``, int64, on the CPU.
            space: Rows to leave free.
            dtype: What the caller computes with. The result has it where that is natively done,
                and the type of the stored values otherwise.
            ahead: Whether a worker may begin at once. (default: only who waits does the work)
            own: The batch's own rows, if ``index`` is its halo; what lies packed is found by them.
            copies: Of ``index`` on devices, those that are made included. (default: none are kept)
        """
        encoded = self._encoded(dtype)
        out_dtype = torch.float32 if encoded else self.codec.dtype
        out = self.engine.pool.take(space + index.numel(), self.width, out_dtype)
        if self.engine.io == "none":
            return Pull(self.engine, None, out)
        rows = out[space:]
        index = index.clone() if ahead else index.contiguous()  # It may be changed until then.
        packed, plan = self._packed, self._plan(index, own)
        if packed is not None and plan is not None:
            job = Job.calling(lambda: self._gather(packed, plan, rows, encoded))
        elif self._native:
            job = self._table(encoded).pull(index, rows)
        else:
            job = Job.calling(lambda: self._read(index, rows, encoded))
        by = By.WAITERS
        if ahead and self.beside:
            by = By.ANYONE if self._native and plan is None else By.WORKERS
        ticket = self.engine.jobs.submit(self.lane, job, by)
        return Pull(self.engine, ticket, out)

    def push(self, x: Tensor, where: Where) -> None:
        """Stores rows of shape ``[n, width]`` in their turn; ``x`` may change afterwards."""
        if self.engine.io == "none":
            return
        encoded = self._encoded(x.dtype)
        x = x.to("cpu", torch.float32 if encoded else self.codec.dtype).contiguous()
        # Into memory rows are written at once: a copy to write from later costs as much.
        later = self.engine.io == "concurrent" and self.beside and not self._in_memory
        if later:
            x = self.engine.pool.take(x.size(0), self.width, x.dtype).copy_(x)
            where = where.clone() if isinstance(where, Tensor) else where
        if self._packed is not None:
            job = Job.calling(lambda: self._write_packed(x, where, encoded))
        elif not self._native:
            job = Job.calling(lambda: self._write(x, where, encoded))
        elif isinstance(where, Tensor):
            job = self._table(encoded).push(x, where)
        else:
            offset, count = [first for first, _ in where], [size for _, size in where]
            job = self._table(encoded).push_ranges(x, offset, count)
        if later:
            self._submit_push(job)
        else:
            self.engine.jobs.run(self.lane, job)

    def _submit_push(self, job: Job) -> None:
        """Queues a push, once there are few enough: each holds the rows of a batch."""
        while len(self._pushes) >= PUSHES_UNDER_WAY:
            self.engine.jobs.wait(self._pushes.popleft())
        self._pushes.append(self.engine.jobs.submit(self.lane, job, By.WORKERS, detached=True))

    def read_stored(self, index: Tensor, out: Tensor) -> None:
        """Copies rows as they are stored; nothing may be under way."""
        if self._native:
            Table(self._rows).pull(index.contiguous(), out).run()
        else:
            self.store.read(index, out)

    def store_rows(self, rows: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Stores rows that are encoded already, at once; nothing may be under way."""
        rows = rows.contiguous()
        if self._packed is not None:
            self._packed.write(ranges, rows)
        elif self._native:
            offset, count = [first for first, _ in ranges], [size for _, size in ranges]
            Table(self._rows).push_ranges(rows, offset, count).run()
        else:
            self.store.write(as_index(ranges), rows)
            self.catch_up()

    def catch_up(self) -> None:
        """Says that the caller has changed the table, or may have."""

    @property
    def _native(self) -> bool:
        """Whether rows may be moved without the store's own functions."""
        store = self.store
        return isinstance(store, TableStore) and store.direct and store.table.device.type == "cpu"

    @property
    def _in_memory(self) -> bool:
        """Whether rows lie in memory of the host, where anybody may read them."""
        return self._native and self.store.tier in ("host", "pinned")

    @property
    def beside(self) -> bool:
        """Whether work beside the computation is of use.

        Moving rows of memory or of a file takes a core, so one has to be idle. A store of the
        user's may wait for something else.
        """
        return not self._native or has_idle_cores()

    @property
    def _packed(self) -> PackedRows | None:
        return self.store.packed if isinstance(self.store, TableStore) else None

    def expect(self, index: Tensor, own: Tensor) -> None:
        """Has the system read ahead what a pull of these rows will need, if they lie packed."""
        plan = self._plan(index, own)
        if plan is not None and self._packed is not None:
            self._packed.expect(plan)

    def _plan(self, index: Tensor, own: Tensor | None) -> Plan | None:
        """How to read a batch's rows, where they lie packed."""
        if self._packed is None:
            return None
        return self._packed.packing.plan(index.cpu(), None if own is None else own.cpu())

    def _encoded(self, dtype: torch.dtype) -> bool:
        """Whether rows pass a codec on their way to or from values of a dtype."""
        return self.codec.name in transfer.CODECS and dtype != self.codec.dtype

    def _table(self, encoded: bool) -> Table:
        return Table(self._rows, self.codec.name, self.width) if encoded else Table(self._rows)

    @property
    def _rows(self) -> Tensor:
        """The stored rows, where they are a table."""
        return cast(TableStore, self.store).table

    def _read(self, index: Tensor, out: Tensor, encoded: bool) -> None:
        shape = (index.numel(), self.store.columns)
        rows = torch.empty(shape, dtype=self.store.dtype, device="cpu")
        self.store.read(index, rows)
        out.copy_(transfer.decode_torch(self.codec.name, rows, self.width) if encoded else rows)

    def _gather(self, packed: PackedRows, plan: Plan, out: Tensor, encoded: bool) -> None:
        """Stages packed rows, and decodes what of them is asked for."""
        if plan.in_order and not encoded:
            packed.stage(plan, out)
            return
        codec = (self.codec.name, self.width) if encoded else ()
        Table(packed.stage(plan), *codec).pull(plan.places, out).run()

    def _write_packed(self, x: Tensor, where: Where, encoded: bool) -> None:
        assert self._packed is not None
        rows = x
        if encoded:
            rows = self.engine.pool.take(x.size(0), self.store.columns, self.store.dtype)
            Table(rows, self.codec.name, self.width).push_ranges(x, [0], [x.size(0)]).run()
        self._packed.write(where, rows)

    def _write(self, x: Tensor, where: Where, encoded: bool) -> None:
        rows = transfer.encode_torch(self.codec.name, x) if encoded else x
        self.store.write(as_index(where), rows)
