"""Count the cores that other processes leave idle, and compute on as many threads."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

# Seconds between two measurements. The system counts in hundredths of a second.
INTERVAL = 0.2
MAX_AGE = 1.0  # Seconds after which a measurement is outdated.


def num_cores() -> int:
    """Return the number of cores of this process; all cores if the system doesn't tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def process_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, 0 and 1 outside of a group."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return 0, 1
    return group.get_rank(), group.get_world_size()


def busy_seconds() -> float | None:
    """Return the processor seconds that this process's cores have worked since the system started.

    The work of every process counts. ``None`` on systems other than Linux.
    """
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        with open("/proc/stat") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
        ticks = 0
        for name, *fields in lines:
            if name in cores:
                user, nice, system, _, _, irq, softirq, *_ = map(int, fields)
                ticks += user + nice + system + irq + softirq
        return ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return None


class CoreUsage:
    """Measure how many cores other processes leave idle.

    * ``free``: that number at the last measurement, rounded; infinite until it is known.
    * ``measured_at``: the time of the last measurement, by ``time.monotonic()``.
    """

    def __init__(self) -> None:
        self.free = math.inf
        self.measured_at = -math.inf
        self._busy = self._own = 0.0  # Seconds of all processes and of this one until then.

    def start(self) -> None:
        """Measure, without regard to an outdated measurement."""
        if time.monotonic() - self.measured_at > MAX_AGE:
            self.free, self.measured_at = math.inf, -math.inf
        self.update()

    def update(self) -> None:
        """Measure ``free`` anew, at most once in ``INTERVAL`` seconds."""
        now = time.monotonic()
        if now - self.measured_at < INTERVAL:
            return
        busy, own = busy_seconds(), time.process_time()
        if busy is None:
            return
        if math.isfinite(self.measured_at):
            seconds = now - self.measured_at
            others = ((busy - self._busy) - (own - self._own)) / seconds
            self.free = round(num_cores() - max(0.0, others))
        self.measured_at, self._busy, self._own = now, busy, own


_usage = CoreUsage()  # Shared by the process: an epoch may be shorter than INTERVAL.


def has_idle_cores() -> bool:
    """Return whether PyTorch's threads leave a core idle, for transfers beside the computation.

    Cores that other processes keep busy aren't idle, by the last measurement of
    :func:`share_cores`.
    """
    is_recent = time.monotonic() - _usage.measured_at <= MAX_AGE
    return torch.get_num_threads() < (min(num_cores(), _usage.free) if is_recent else num_cores())


class _ThreadLimit:
    """Limits PyTorch's threads for one Python thread while contexts are open.

    OpenMP's number belongs to one thread. Contexts may overlap in any order, because generators
    may be closed in any. The first that opens saves the number, and the last that closes sets it
    again.
    """

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._wanted = self._current = 0  # The number that the caller has set, and the present one.
        self.contexts = self._unshared = 0  # Open contexts, and those that leave none.

    def enter(self, leave_cores: bool) -> None:
        """Open a context, which leaves cores to other processes unless another one doesn't."""
        if not self.contexts and leave_cores:
            _usage.start()
        self.contexts += 1
        self._unshared += not leave_cores
        self.update()

    def leave(self, leave_cores: bool) -> None:
        """Close a context, perhaps in another thread, such as that of the garbage collector.

        Contexts that are still open adjust the number again at their next update.
        """
        self.contexts -= 1
        self._unshared -= not leave_cores
        # While Python shuts down no thread can start: waiting for one would never end.
        if threading.get_ident() == self._owner and not sys.is_finalizing():
            self._set(math.inf)

    def update(self) -> None:
        """Set the number of threads to the number of cores that other processes leave idle."""
        if threading.get_ident() != self._owner:
            return
        shares = self.contexts and not self._unshared
        if shares and max(torch.get_num_threads(), self._wanted) > 1:
            _usage.update()
            self._set(_usage.free)
        else:
            self._set(math.inf)

    def _set(self, free: float) -> None:
        """Set the caller's number of threads, or the number of free cores if that is smaller."""
        if torch.get_num_threads() != self._current:  # The caller has set it.
            self._wanted = self._current = torch.get_num_threads()
        threads = int(max(1, min(self._wanted, free)))
        if threads == self._current:
            return
        if self._current < self._wanted and _threads_of_new_thread() == self._current:
            self._wanted = self._current  # The caller has set the same number as this class.
            threads = min(threads, self._wanted)
        torch.set_num_threads(threads)
        if threads < self._wanted:
            _threads_of_new_thread(self._wanted)
        self._current = threads


def _threads_of_new_thread(number: int = 0) -> int:
    """Return the number of PyTorch's threads that a new thread of Python gets; set it if given.

    It is the number that any thread has set last. The number of this thread doesn't change.
    """
    found: list[int] = []

    def run() -> None:
        if number:
            torch.set_num_threads(number)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class _Local(threading.local):
    def __init__(self) -> None:
        self.threads = _ThreadLimit()


_local = _Local()


@contextlib.contextmanager
def share_cores(share: bool = True) -> Iterator[Callable[[], None]]:
    """Compute on as many threads as there are cores that no other process keeps busy.

    Every parallel loop of PyTorch waits for a thread whose core another process uses. The number is
    between one and the caller's, which is set again at the end. With one thread, and on systems
    other than Linux, nothing is done. Loaders and inference use this context themselves. Contexts
    may be nested: one with ``share=False`` keeps all threads. A loop that is left early ends the
    context when its iterator is deleted, or when another such context ends; ``iterator.close()``
    ends it at once.

    Args:
        share: Adjust the number of threads. (default: ``True``)

    Yields:
        A function to call regularly, such as after every batch: it adjusts the number.
    """
    threads = _local.threads
    threads.update()  # Sets the caller's number, if the last context has ended in another thread.
    if not threads.contexts and torch.get_num_threads() == 1:
        yield lambda: None
        return
    threads.enter(share)
    try:
        yield threads.update
    finally:
        threads.leave(share)
