"""The transfer engine: jobs that run beside the computation, in lanes.

The front of csrc/transfer/engine.h, and its twin in pure Python where the extension was not built.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gas import native
from gas.native.transfer import Job


class By(enum.Enum):
    """Who may run a job: workers and threads that wait for it, or only one kind of them."""

    ANYONE = "ANYONE"
    WORKERS = "WORKERS"
    WAITERS = "WAITERS"


class Engine:
    """Runs jobs in lanes; see csrc/transfer/engine.h, which this is the front of.

    Jobs of one lane run in the order they were submitted. It may be used by several threads. After
    a fork it starts anew in the child: what was queued is the parent's.

    Args:
        threads: The number of workers; without any, those who wait run all jobs.
        capacity: How many unfinished jobs may be queued before submitting one blocks.
    """

    def __init__(self, threads: int, capacity: int = 256) -> None:
        self.threads = threads
        self.capacity = capacity
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._alive: dict[int, Job] = {}  # Unfinished jobs, with what they refer to.
        self._submitting: list[Job] = []
        self._closed = False
        engine = _ThreadEngine if native.C is None else native.C.Engine
        self._engine: Any = engine(self.threads, self.capacity)

    def _own(self) -> Any:
        if self._process != os.getpid():
            self._start()
        return self._engine

    def submit(
        self,
        lane: int,
        job: Job,
        by: By = By.ANYONE,
        detached: bool = False,
    ) -> int:
        """Queues a job and returns its ticket.

        Args:
            lane: Jobs of the same lane run one after the other.
            job: What to do.
            by: Who may run it. (default: anyone)
            detached: Nobody will wait for it: its error is raised by the next call that waits or
                submits. (default: ``False``)
        """
        engine = self._own()
        self._submitting.append(job)  # An interrupt may come before its ticket is known.
        try:
            ticket = engine.submit(lane, job.work, _who(by), detached)
        except Exception:  # It wasn't queued.
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
        """Waits for a job, helping with its lane, and raises its error."""
        if self._closed:
            raise RuntimeError("this transfer engine has been closed")
        self._own().wait(ticket, torch.get_num_threads())
        with self._lock:
            self._alive.pop(ticket, None)

    def wait_lane(self, lane: int) -> None:
        """Waits for everything in a lane."""
        engine = self._own()
        engine.wait_lane(lane, torch.get_num_threads())
        with self._lock:
            for ticket in [ticket for ticket in self._alive if engine.done(ticket)]:
                del self._alive[ticket]

    def run(self, lane: int, job: Job, by: By = By.WAITERS) -> None:
        """Runs a job in its turn and waits for it."""
        ticket = self.submit(lane, job, by)
        try:
            self.wait(ticket)
        except BaseException:
            self.cancel([ticket])
            raise

    def done(self, ticket: int) -> bool:
        """Whether a job has ended."""
        return self._own().done(ticket)

    def cancel(self, tickets: Sequence[int]) -> None:
        """Takes jobs back; returns when those that had started have ended."""
        if tickets and not self._closed:
            self._own().cancel(list(tickets))
            with self._lock:
                for ticket in tickets:
                    self._alive.pop(ticket, None)

    def close(self) -> None:
        """Runs detached jobs that are left, takes the others back, ends the workers."""
        if self._process == os.getpid():
            self._closed = True
            try:
                self._engine.close()
            finally:
                self._alive.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return Engine(self.threads, self.capacity)

    def __reduce__(self) -> tuple[type[Engine], tuple[int, int]]:
        return Engine, (self.threads, self.capacity)


def _who(by: By) -> Any:
    return by if native.C is None else getattr(native.C.By, by.name)


class _ThreadEngine:
    """The twin of csrc/transfer/engine.h: one thread of Python at most."""

    def __init__(self, threads: int, capacity: int) -> None:
        self._threads = threads
        self._capacity = capacity
        self._changed = threading.Condition()
        self._queue: list[dict[str, Any]] = []  # Unfinished tasks, in order of submission.
        self._failed: dict[int, BaseException] = {}
        self._unseen: list[BaseException] = []
        self._last = 0
        self._worker: threading.Thread | None = None
        self._closing = False

    def submit(self, lane: int, work: Callable[[], None], by: By, detached: bool) -> int:
        by = by if self._threads else By.ANYONE
        with self._changed:
            self._raise_unseen()
            while len(self._queue) >= self._capacity and not self._closing:
                self._step(By.WAITERS)
            if self._closing:
                raise RuntimeError("this transfer engine has been closed")
            self._last += 1
            task = {"ticket": self._last, "lane": lane, "work": work, "by": by}
            self._queue.append({**task, "detached": detached, "running": False})
            if self._threads and self._worker is None and by is not By.WAITERS:
                self._worker = threading.Thread(target=self._work, daemon=True)
                self._worker.start()
            self._changed.notify_all()
            return self._last

    def _step(self, me: By, lane: int | None = None) -> None:
        """Runs the first task that may run, or waits a moment."""
        others = By.WAITERS if me is By.WORKERS else By.WORKERS
        busy: set[int] = set()
        for task in self._queue:
            if lane not in (None, task["lane"]) or task["lane"] in busy:
                continue
            busy.add(task["lane"])
            if not task["running"] and task["by"] is not others:
                task["running"] = True
                self._changed.release()
                error: BaseException | None = None
                try:
                    task["work"]()
                except BaseException as caught:
                    error = caught
                finally:
                    self._changed.acquire()
                self._end(task, error)
                return
        self._changed.wait(0.05)

    def _end(self, task: dict[str, Any], error: BaseException | None) -> None:
        self._queue.remove(task)
        if error is not None:
            if task["detached"]:
                self._unseen.append(error)
            else:
                self._failed[task["ticket"]] = error
        self._changed.notify_all()

    def _work(self) -> None:
        with self._changed:
            while self._queue or not self._closing:
                self._step(By.WORKERS)

    def _raise_unseen(self) -> None:
        if self._unseen:
            raise self._unseen.pop(0)

    def done(self, ticket: int) -> bool:
        with self._changed:
            return all(task["ticket"] != ticket for task in self._queue)

    def wait(self, ticket: int, threads: int) -> None:
        with self._changed:
            self._raise_unseen()
            while any(task["ticket"] == ticket for task in self._queue):
                lane = next(task["lane"] for task in self._queue if task["ticket"] == ticket)
                self._step(By.WAITERS, lane)
            if ticket in self._failed:
                raise self._failed.pop(ticket)
            self._raise_unseen()

    def wait_lane(self, lane: int, threads: int) -> None:
        with self._changed:
            tickets = [task["ticket"] for task in self._queue if task["lane"] == lane]
            while any(task["ticket"] in tickets for task in self._queue):
                self._step(By.WAITERS, lane)
            self._raise_unseen()

    def cancel(self, tickets: Sequence[int]) -> None:
        with self._changed:
            for task in [t for t in self._queue if t["ticket"] in tickets and not t["running"]]:
                self._end(task, None)
            while any(task["ticket"] in tickets for task in self._queue):
                self._changed.wait(0.05)
            for ticket in tickets:
                self._failed.pop(ticket, None)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            waiting = [t for t in self._queue if not t["detached"] and not t["running"]]
            for task in waiting:
                self._end(task, None)
            while self._queue:
                self._step(By.WAITERS) if not self._threads else self._changed.wait(0.05)
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        self._failed.clear()
        self._raise_unseen()
