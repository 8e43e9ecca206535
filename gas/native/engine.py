"""The engine that runs jobs: that of csrc/transfer/engine.h, or its twin without the extension."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

from gas.native import extension as native


class JobPolicy(enum.Enum):
    """The threads that may run a job: workers, waiting threads, or both."""

    ANYONE = "ANYONE"
    WORKERS = "WORKERS"
    WAITERS = "WAITERS"


class _SynchronousEngine:
    """Run every job when it is submitted: the pure-torch twin of csrc/transfer/engine.h."""

    def __init__(self) -> None:
        self._running = threading.RLock()  # Of all lanes.
        # Errors by ticket, for the call that waits for it; of detached jobs for the next call.
        self._failed: dict[int | None, Exception] = {}
        self._last = 0
        self._closed = False

    def submit(self, lane: int, work: Callable[[], None], by: JobPolicy, detached: bool) -> int:
        with self._running:
            self.wait(None, 0)
            if self._closed:
                raise RuntimeError("this transfer engine has been closed")
            self._last += 1
            try:
                work()
            except Exception as error:
                self._failed[None if detached else self._last] = error
            return self._last

    def done(self, ticket: int) -> bool:
        return True

    def wait(self, ticket: int | None, threads: int) -> None:
        with self._running:
            for failed in (None, ticket):
                if failed in self._failed:
                    raise self._failed.pop(failed)

    def wait_lane(self, lane: int, threads: int) -> None:
        self.wait(None, threads)

    def cancel(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            self._failed.pop(ticket, None)

    def close(self) -> None:
        self._closed = True
        self.cancel([ticket for ticket in self._failed if ticket is not None])
        self.wait(None, 0)


def make_engine(threads: int, capacity: int) -> tuple[Any, dict[JobPolicy, Any]]:
    """Make an engine that runs jobs in lanes; return it and the values that it takes as policies.

    Args:
        threads: The number of workers; without workers, waiting threads run all jobs.
        capacity: The number of unfinished jobs above which ``submit`` blocks.
    """
    if native.C is None:
        return _SynchronousEngine(), {by: by for by in JobPolicy}
    policies = {by: getattr(native.C.By, by.name) for by in JobPolicy}
    return native.C.Engine(threads, capacity), policies
