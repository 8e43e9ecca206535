"""Jobs that read and write rows of tables in host memory, and the engine that runs them.

If the extension was built, jobs run natively and can overlap with the computation. Else their
pure-torch twins run when they are submitted, with equal results.
"""

from __future__ import annotations

import enum
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.checks import check_index, check_range

# Rows of a table: an index, or ranges (first, count) in order.
RowIndex = Tensor | Sequence[tuple[int, int]]
# The formats of stored rows in csrc/transfer/codec.h.
CODECS = {"bfloat16": 1, "float16": 2, "int8": 3}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_ranges(ranges: Sequence[tuple[int, int]], num_rows: int) -> None:
    """Raise ``IndexError`` unless every range, its first row and its size, is in ``num_rows``."""
    for first, size in ranges:
        if first < 0 or size < 0 or first + size > num_rows:
            raise IndexError(
                f"'offset' and 'count' hold the range {first} to {first + size}, which is outside "
                f"[0, {num_rows})"
            )


# Codecs -------------------------------------------------------------------------------------------


def num_stored_columns(codec: str, width: int) -> int:
    """Return the number of elements of a stored row: bytes for ``int8``."""
    return (4 + width + 3) // 4 * 4 if codec == "int8" else width


def encode_torch(codec: str, x: Tensor) -> Tensor:
    """Encode float32 rows of shape ``[n, width]`` as csrc/transfer/codec.h describes."""
    if codec != "int8":
        return x.to(_DTYPES[codec])
    n, width = x.shape
    if x.numel() == 0:
        return x.new_zeros(n, num_stored_columns(codec, width), dtype=torch.uint8)
    scale = x.abs().amax(1, keepdim=True) / 127
    usable = (scale > 0) & scale.isfinite()
    quotient = (x / scale).clamp(-127, 127).round()
    values = torch.where(usable, quotient, 0).to(torch.int8)
    pad = x.new_zeros(n, num_stored_columns(codec, width) - 4 - width, dtype=torch.uint8)
    return torch.cat([scale.view(torch.uint8), values.view(torch.uint8), pad], dim=1)


def decode_torch(codec: str, rows: Tensor, width: int) -> Tensor:
    """Decode stored rows to float32 rows of shape ``[n, width]``."""
    if codec != "int8":
        return rows.float()
    scale = rows[:, :4].contiguous().view(torch.float32)
    return rows[:, 4 : 4 + width].view(torch.int8) * scale


# Jobs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """Work to do now, by :meth:`run`, or in a lane of an :class:`Engine`.

    * ``work``: a native job, or a function without arguments where the extension was not built.
    * ``keep``: tensors that must live until the work is done: native code knows addresses only.
    """

    work: Any
    keep: object = None

    @staticmethod
    def call(function: Callable[[], None]) -> Job:
        """Make a job that calls a Python function once and releases it afterwards."""
        functions = [function]

        def work() -> None:
            functions.pop()()

        return Job(work if native.C is None else native.C.Job(work))

    @staticmethod
    def pull(
        table: Tensor,
        index: Tensor,
        out: Tensor,
        codec: str | None = None,
        width: int | None = None,
    ) -> Job:
        """Make a job of ``out[i] = table[index[i]]``.

        Args:
            table: The stored rows, contiguous, of shape ``[N, columns]``.
            index: The rows to read, of shape ``[n]``, int64.
            out: The tensor to write to, of shape ``[n, width]``: float32 if rows are encoded, else
                of the table's dtype.
            codec: The codec of encoded rows, a key of ``CODECS``. (default: rows aren't encoded)
            width: The width of decoded rows. (default: that of ``table``)

        Raises:
            ValueError: If a shape or a dtype doesn't fit.
            IndexError: If a row doesn't exist.
        """
        check_index("index", index)
        source = _native_table(table, "out", out, index.numel(), codec, width)
        if source is not None:
            work = native.C.pull(source, index.data_ptr(), index.numel(), out.data_ptr())
            return Job(work, (table, index, out))
        check_range("index", index, table.size(0))

        def twin() -> None:
            rows = table.index_select(0, index)
            out.copy_(rows if codec is None else decode_torch(codec, rows, out.size(1)))

        return Job(twin)

    @staticmethod
    def push(
        table: Tensor,
        x: Tensor,
        where: RowIndex,
        codec: str | None = None,
        width: int | None = None,
    ) -> Job:
        """Make a job that writes the rows of ``x`` to the rows ``where`` of a table, in order.

        ``x`` has the shape and type of ``out`` of :meth:`pull`. ``where`` are rows, of shape
        ``[n]``, int64, of which the last of duplicates wins, or ranges: first row and number.
        """
        if isinstance(where, Tensor):
            check_index("index", where)
            num_rows = where.numel()
        else:
            check_ranges(where, table.size(0))
            num_rows = sum([size for _, size in where])
        target = _native_table(table, "x", x, num_rows, codec, width)
        if target is None:
            return Job(_push_torch(table, x, where, codec))
        if isinstance(where, Tensor):
            work = native.C.push_rows(target, x.data_ptr(), where.data_ptr(), num_rows)
        else:
            offset, count = [first for first, _ in where], [size for _, size in where]
            work = native.C.push_ranges(target, x.data_ptr(), offset, count)
        return Job(work, (table, x, where))

    def run(self, threads: int | None = None) -> None:
        """Do the work with at most ``threads`` threads, by default as many as PyTorch."""
        if native.C is None:
            self.work()
        else:
            self.work.run(torch.get_num_threads() if threads is None else threads)


def _push_torch(table: Tensor, x: Tensor, where: RowIndex, codec: str | None) -> Callable[[], None]:
    """Return the pure-torch twin of :meth:`Job.push`."""
    if isinstance(where, Tensor):
        check_range("index", where, table.size(0))

    def twin() -> None:
        rows = x if codec is None else encode_torch(codec, x)
        if isinstance(where, Tensor):
            # numpy assigns in order; in torch any of several rows may win.
            table.view(torch.uint8).numpy()[where.numpy()] = rows.view(torch.uint8).numpy()
            return
        begin, to = 0, table.data  # Native code doesn't change the version counter either.
        for first, size in where:
            to[first : first + size] = rows[begin : begin + size]
            begin += size

    return twin


def _native_table(
    table: Tensor, name: str, buffer: Tensor, n: int, codec: str | None, width: int | None
) -> Any:
    """Check a buffer of ``n`` rows; return the table for native code, ``None`` for the twin."""
    shape = (n, table.size(1) if width is None else width)
    dtype = table.dtype if codec is None else torch.float32
    if buffer.shape != shape or buffer.dtype != dtype or not buffer.is_contiguous():
        raise ValueError(
            f"'{name}' is {buffer.dtype} of shape {list(buffer.shape)}, expected a contiguous "
            f"{dtype} tensor of shape {list(shape)}"
        )
    if native.C is None or not table.is_cpu:
        return None
    num_rows = table.size(0)
    if codec is None:
        return native.C.Table(table.data_ptr(), num_rows, table.size(1) * table.element_size())
    return native.C.Table(table.data_ptr(), num_rows, CODECS[codec], width)


# The engine ---------------------------------------------------------------------------------------


class JobPolicy(enum.Enum):
    """The threads that may run a job: workers, waiting threads, or both."""

    ANYONE = "ANYONE"
    WORKERS = "WORKERS"
    WAITERS = "WAITERS"


class Engine:
    """Run jobs in lanes, by csrc/transfer/engine.h.

    The jobs of one lane run in the order of submission. Several threads may use an engine. In a
    forked process it starts without jobs: those in the queue belong to the parent. Without the
    extension a job runs when it is submitted.

    Args:
        threads: The number of workers; without workers, waiting threads run all jobs.
        capacity: The number of unfinished jobs above which ``submit`` blocks.
    """

    def __init__(self, threads: int, capacity: int = 256) -> None:
        self.threads = threads
        self.capacity = capacity
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._alive: dict[int, Job] = {}  # Unfinished jobs, which keep their tensors alive.
        self._submitting: list[Job] = []
        self._closed = False
        self.has_workers = native.C is not None
        """Whether jobs can overlap with the computation: only with the extension."""
        make = native.C.Engine if self.has_workers else _SynchronousEngine
        self._engine: Any = make(self.threads, self.capacity)
        policies = JobPolicy if native.C is None else native.C.By
        self._policies = {by: getattr(policies, by.name) for by in JobPolicy}
        # The workers must end before Python does, which frees the memory that they write to.
        self._finalizer = weakref.finalize(self, _close, self._engine, self._process, self._alive)

    def _restart_after_fork(self) -> None:
        if self._process != os.getpid():
            self._finalizer.detach()
            self._start()

    def submit(
        self,
        lane: int,
        job: Job,
        by: JobPolicy = JobPolicy.ANYONE,
        detached: bool = False,
    ) -> int:
        """Queue a job and return its ticket.

        Args:
            lane: The lane. Jobs of the same lane run one after the other.
            job: The job.
            by: The threads that may run it. (default: any)
            detached: No call will wait for this job: the next call that waits or submits raises its
                error. (default: ``False``)
        """
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

    def done(self, ticket: int) -> bool:
        """Return whether a job has ended."""
        self._restart_after_fork()
        return self._engine.done(ticket)

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


def _close(engine: Any, process: int, alive: dict[int, Job]) -> None:
    if process == os.getpid():  # A forked process has no workers.
        try:
            engine.close()
        finally:
            alive.clear()


class _SynchronousEngine:
    """Run every job when it is submitted: the pure-torch twin of csrc/transfer/engine.h."""

    def __init__(self, threads: int, capacity: int) -> None:
        self._running = threading.RLock()  # Of all lanes.
        self._failed: dict[int, Exception] = {}
        self._unseen: list[Exception] = []
        self._last = 0
        self._closed = False

    def submit(self, lane: int, work: Callable[[], None], by: JobPolicy, detached: bool) -> int:
        with self._running:
            self._raise_unseen()
            if self._closed:
                raise RuntimeError("this transfer engine has been closed")
            self._last += 1
            ticket = self._last
            try:
                work()
            except Exception as error:
                if detached:
                    self._unseen.append(error)
                else:
                    self._failed[ticket] = error
            return ticket

    def _raise_unseen(self) -> None:
        if self._unseen:
            raise self._unseen.pop(0)

    def done(self, ticket: int) -> bool:
        return True

    def wait(self, ticket: int | None, threads: int) -> None:
        with self._running:
            self._raise_unseen()
            if ticket in self._failed:
                raise self._failed.pop(ticket)

    def wait_lane(self, lane: int, threads: int) -> None:
        self.wait(None, threads)

    def cancel(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            self._failed.pop(ticket, None)

    def close(self) -> None:
        self._closed = True
        self._failed.clear()
        self._raise_unseen()
