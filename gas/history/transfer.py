"""Move rows between a store and a computation on the CPU, by an engine that histories share.

:class:`gas.history.cuda.CudaLink` moves them to and from a GPU.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.packed import CodecOfRows
from gas.history.store import Store
from gas.native import (
    CODECS,
    BufferPool,
    Job,
    JobPolicy,
    RowIndex,
    check_range,
    extension,
    has_idle_cores,
    make_engine,
    num_cores,
)

IO_MODES = ("serial", "concurrent", "none")
MAX_PENDING_PUSHES = 2  # For each history.
MAX_PENDING_JOBS = 256  # Of an engine; then submit() blocks.

# Copies of row ids on devices, and the event of their arrival, for several histories to share.
Copies = dict[torch.device, tuple[Tensor, torch.cuda.Event]]


def to_index(where: RowIndex) -> Tensor:
    """Return an index of the rows in ranges, of shape ``[n]``, int64."""
    if isinstance(where, Tensor):
        return where
    ranges = [torch.arange(first, first + size, device="cpu") for first, size in where]
    return torch.cat([torch.arange(0, device="cpu"), *ranges])


def check_io(io: str) -> str:
    """Raise ``ValueError`` unless ``io`` is a mode of transfer."""
    if io not in IO_MODES:
        raise ValueError(f"'io' is {io!r}, expected one of {', '.join(IO_MODES)}")
    return io


class TransferEngine:
    """Run the jobs that move rows for the histories of one model, by csrc/transfer/engine.h.

    The jobs of one lane run in the order of submission. Several threads may use an engine. In a
    forked process it starts without jobs: those in the queue belong to the parent. Without the
    extension a job runs when it is submitted.

    Args:
        io: ``"serial"`` moves rows when they are needed; ``"concurrent"`` overlaps transfers with
            the computation, with equal results; ``"none"`` moves nothing: results are wrong, and
            the speed is the upper bound in benchmarks.
        pool_size: Upper bound of the pinned buffers through which a history's rows are copied to a
            GPU that can't read them directly. (default: 2)
        threads: The number of workers; without workers, waiting threads run all jobs. (default: a
            quarter of the cores, from 2 to 4)
    """

    def __init__(
        self, io: str = "concurrent", pool_size: int | None = None, threads: int | None = None
    ) -> None:
        # At least two lanes can wait for a disk or a network at the same time.
        self.threads = max(2, min(4, num_cores() // 4)) if threads is None else threads
        self.io = check_io(io)
        self.pool_size = pool_size
        self.pulled_bytes = self.pushed_bytes = 0
        self.pool = BufferPool()
        self._lanes = itertools.count()
        self.streams: dict[torch.device, Any] = {}
        """The streams of each CUDA device, which all histories share; see :mod:`.cuda`."""
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._alive: dict[int, Job] = {}  # Unfinished jobs, which keep their tensors alive.
        self._submitting: list[Job] = []
        self._closed = False
        self._engine, self._policies = make_engine(self.threads, MAX_PENDING_JOBS)
        self.has_workers = extension.C is not None  # Then jobs overlap with the computation.
        # The workers must end before Python does, which frees the memory that they write to.
        self._finalizer = weakref.finalize(self, _close, self._engine, self._process, self._alive)

    def new_lane(self) -> int:
        """Return a new lane, for one history."""
        return next(self._lanes)

    def _restart_after_fork(self) -> None:
        if self._process != os.getpid():
            self._finalizer.detach()
            self._start()

    def submit(
        self, lane: int, job: Job, by: JobPolicy = JobPolicy.ANYONE, detached: bool = False
    ) -> int:
        """Queue a job and return its ticket.

        Args:
            lane: The lane. Jobs of the same lane run one after the other.
            job: The job.
            by: The threads that may run it. (default: any)
            detached: No call will wait for this job: the next call that waits or submits raises its
                error. (default: ``False``)
        """
        if self._process != os.getpid():  # No call, which small batches would notice.
            self._restart_after_fork()
        engine = self._engine
        self._submitting.append(job)  # Kept alive if an interrupt comes before the ticket is known.
        try:
            ticket = engine.submit(lane, job.work, self._policies[by], detached)
        except Exception:
            self._submitting.remove(job)
            raise
        with self._lock:
            self._alive[ticket] = job
            self._submitting.remove(job)
            for old in list(self._alive):  # In the order of submission.
                if not engine.done(old):
                    break
                del self._alive[old]
        return ticket

    def wait(self, ticket: int) -> None:
        """Wait for a job, run jobs of its lane meanwhile, and raise its error."""
        if self._closed:
            raise RuntimeError("this transfer engine has been closed")
        if self._process != os.getpid():
            self._restart_after_fork()
        self._engine.wait(ticket, torch.get_num_threads())
        with self._lock:
            self._alive.pop(ticket, None)

    def wait_lane(self, lane: int) -> None:
        """Wait for all jobs of a lane."""
        self._restart_after_fork()
        self._engine.wait_lane(lane, torch.get_num_threads())
        with self._lock:
            for ticket in [ticket for ticket in self._alive if self._engine.done(ticket)]:
                del self._alive[ticket]

    def run(self, lane: int, job: Job, by: JobPolicy = JobPolicy.WAITERS) -> None:
        """Submit a job and wait for it."""
        ticket = self.submit(lane, job, by)
        try:
            self.wait(ticket)
        except BaseException:
            self.cancel([ticket])
            raise

    def cancel(self, tickets: Sequence[int]) -> None:
        """Cancel jobs, and wait for those that have started."""
        if tickets and not self._closed:
            self._restart_after_fork()
            self._engine.cancel(list(tickets))
            with self._lock:
                for ticket in tickets:
                    self._alive.pop(ticket, None)

    def close(self) -> None:
        """Run the remaining detached jobs, cancel the others, and end the workers."""
        if self._process == os.getpid():
            self._closed = True
            self._finalizer()

    def __reduce__(self) -> tuple[type[TransferEngine], tuple[str, int | None, int]]:
        return TransferEngine, (self.io, self.pool_size, self.threads)


def _close(engine: Any, process: int, alive: dict[int, Job]) -> None:
    if process == os.getpid():  # A forked process has no workers.
        try:
            engine.close()
        finally:
            alive.clear()


class Pull:
    """A read of rows that has started; see :meth:`gas.History.start_pull`.

    Args:
        engine: The engine that runs it.
        ticket: The ticket of its job; ``None`` if there is no job to wait for.
        out: The tensor that the rows are written to.
        event: The CUDA event of their arrival on a device.
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
        """Return the rows, behind the requested space.

        On a device, the current stream waits for them; the host doesn't.
        """
        if self._cancelled:
            raise RuntimeError("this pull was cancelled: start another one")
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
        """Cancel the pull; the history and its engine stay usable."""
        if self._ticket is not None:
            self._cancelled = True
            self._engine.cancel([self._ticket])
            self._ticket = None


class HostLink:
    """Move rows between a store and buffers in host memory, in one lane of an engine.

    Args:
        store: The stored rows.
        codec: Their precision.
        width: The width of decoded rows.
        engine: The engine that runs the jobs.
    """

    def __init__(self, store: Store, codec: Codec, width: int, engine: TransferEngine) -> None:
        self.store = store
        self.codec = codec
        self.width = width
        self.engine = engine
        self.lane = engine.new_lane()
        self._pushes: deque[int] = deque()  # Tickets of pending pushes.
        # Native code may move the rows, without read() and write() of the store.
        self._native = store.direct and store.table.device.type == "cpu"
        # Rows are in host memory and can be read in place.
        self._in_memory = self._native and store.tier in ("host", "pinned")
        self._dtype = codec.dtype
        # The codec for values of another type than the stored one, and their width.
        self._codec: CodecOfRows = (codec.name, width) if codec.name in CODECS else ()

    def wait(self) -> None:
        """Wait for all submitted pushes and pulls."""
        self.engine.wait_lane(self.lane)

    def table_and_index(
        self, index: Tensor, dtype: torch.dtype, copies: Copies | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the table and ``index``, or ``None`` if ``dtype`` can't be read in place."""
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
        """Start to read rows, into a tensor with ``space`` rows in front of them.

        Args:
            index: The rows, of shape ``[n]``, int64, on the CPU.
            space: The number of rows in front, with unspecified values.
            dtype: The type that the caller computes with. The result is float32 if stored values
                of another type are decoded natively, and otherwise of the stored type.
            ahead: Let a worker begin at once. (default: ``wait()`` does the work)
            own: The batch's own rows, if ``index`` is its halo: packed rows are found by them.
            copies: Copies of ``index`` on devices; a new copy is added. (default: none are kept)
        """
        codec = () if dtype == self._dtype else self._codec
        out_dtype = torch.float32 if codec else self._dtype
        out = self.engine.pool.allocate(space + index.numel(), self.width, out_dtype)
        if self.engine.io == "none":
            return Pull(self.engine, None, out)
        rows = out[space:]
        index = index.clone() if ahead else index.contiguous()  # The caller may change it later.
        packed = self.store.packed
        plan = None if packed is None else packed.plan(index, own)
        if packed is not None and plan is not None:
            job = Job.from_function(lambda: packed.gather(plan, rows, codec))
        elif self._native:
            job = Job.pull(self.store.table, index, rows, *codec)
        else:
            check_range("n_id", index, self.store.num_rows)  # Not every store does.
            job = Job.from_function(lambda: self._read(index, rows, codec))
        by = JobPolicy.WAITERS
        if ahead and self.supports_overlap:
            by = JobPolicy.ANYONE if self._native and plan is None else JobPolicy.WORKERS
        ticket = self.engine.submit(self.lane, job, by)
        return Pull(self.engine, ticket, out)

    def push(self, x: Tensor, where: RowIndex) -> None:
        """Store rows of shape ``[n, width]`` after earlier pushes; ``x`` may change afterwards."""
        if self.engine.io == "none":
            return
        codec = () if x.dtype == self._dtype else self._codec
        x = x.to("cpu", torch.float32 if codec else self._dtype).contiguous()
        # Rows in memory are written at once: copying them for a worker would take as long.
        later = self.engine.io == "concurrent" and not self._in_memory and self.supports_overlap
        if later:
            x = self.engine.pool.allocate(x.size(0), self.width, x.dtype).copy_(x)
            where = where.clone() if isinstance(where, Tensor) else where
        packed = self.store.packed
        if packed is not None:
            job = Job.from_function(lambda: packed.write(where, x, codec))
        elif self._native:
            job = Job.push(self.store.table, x, where, *codec)
        else:
            job = Job.from_function(lambda: self._write(x, where, codec))
        if later:
            self._submit_push(job)
        else:
            self.engine.run(self.lane, job)

    def _submit_push(self, job: Job) -> None:
        """Queue a push, at most two at a time: each holds the rows of a batch in memory."""
        while len(self._pushes) >= MAX_PENDING_PUSHES:
            self.engine.wait(self._pushes.popleft())
        self._pushes.append(self.engine.submit(self.lane, job, JobPolicy.WORKERS, detached=True))

    def read_stored(self, index: Tensor, out: Tensor, threads: int | None = None) -> None:
        """Copy rows as they are stored; no push may be pending."""
        if self._native:
            Job.pull(self.store.table, index.contiguous(), out).run(threads)
        else:
            self.store.read(index, out)

    def store_rows(self, rows: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Store encoded rows at once; no push or pull may be pending."""
        rows = rows.contiguous()
        if self.store.packed is not None:
            self.store.packed.write(ranges, rows)
        elif self._native:
            Job.push(self.store.table, rows, ranges).run()
        else:
            self.store.write(to_index(ranges), rows)
            self.note_changes()

    def note_changes(self) -> None:
        """Note that the caller may have changed the table."""

    @property
    def supports_overlap(self) -> bool:
        """Return whether transfers can overlap with the computation.

        Moving rows of memory or of a file needs an idle core. A user-defined store may wait for a
        network instead.
        """
        return self.engine.has_workers and (not self._native or has_idle_cores())

    def _read(self, index: Tensor, out: Tensor, codec: CodecOfRows) -> None:
        shape = (index.numel(), self.store.columns)
        rows = torch.empty(shape, dtype=self.store.dtype, device="cpu")
        self.store.read(index, rows)
        out.copy_(self.codec.decode(rows, self.width) if codec else rows)

    def _write(self, x: Tensor, where: RowIndex, codec: CodecOfRows) -> None:
        self.store.write(to_index(where), self.codec.encode(x) if codec else x)
