"""Threads for the cores that other processes leave: no thread is waited for that can't run."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

# Seconds between two looks. The system counts in hundredths of a second: less would be noise.
INTERVAL = 0.2
PAUSE = 1.0  # What was seen longer ago counts no more.


def num_cores() -> int:
    """Return the number of cores of this process; all cores if the system doesn't tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_seconds() -> float | None:
    """Return seconds that this process's cores have computed since the start, for whatever process.

    ``None`` where the system doesn't tell: only Linux does.
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


class Cores:
    """Looks now and then at how many cores other processes use.

    ``free`` is what they have left lately, rounded; infinite until that is known.
    """

    def __init__(self) -> None:
        self.free = math.inf
        self._last: tuple[float, float, float] | None = None

    def begin(self) -> None:
        """Forget what was seen before a pause, in which others may have computed instead."""
        if not self._has_news():
            self.free, self._last = math.inf, None
        self.look()

    def free_recently(self) -> float:
        """Return ``free`` if it was seen within ``PAUSE``, else infinity."""
        return self.free if self._has_news() else math.inf

    def _has_news(self) -> bool:
        return self._last is not None and time.monotonic() - self._last[0] <= PAUSE

    def look(self) -> None:
        """Bring ``free`` up to date; nearly free of cost where that has just been done."""
        now = time.monotonic()
        if self._last is not None and now - self._last[0] < INTERVAL:
            return
        busy, own = busy_seconds(), time.process_time()
        if busy is None:
            return
        if self._last is not None:
            then, busy_then, own_then = self._last
            others = ((busy - busy_then) - (own - own_then)) / (now - then)
            self.free = round(num_cores() - max(0.0, others))
        self._last = now, busy, own


_cores = Cores()  # Of the process: an epoch may be shorter than the time between two looks.


def has_idle_cores() -> bool:
    """Return whether computing on the CPU leaves cores to others.

    Where it doesn't, work beside the computation would only interrupt it. Cores that other
    processes keep busy aren't idle, as far as :func:`share_cores` has just seen them.
    """
    return torch.get_num_threads() < min(num_cores(), _cores.free_recently())


class _Threads:
    """The number of threads that one thread of Python computes on, in all contexts that are open.

    OpenMP's number is a thread's own. Contexts may overlap in any order, as generators are closed:
    the first to begin finds the number that the last to end sets again.
    """

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._wanted = self._current = 0  # What the caller has set, and what is set here.
        self.contexts = self._keeping = 0  # Those that are open, and those that share nothing.

    def enter(self, share: bool) -> None:
        """Begin a context."""
        if not self.contexts and share:
            _cores.begin()
        self.contexts += 1
        self._keeping += not share
        self.follow()

    def leave(self, share: bool) -> None:
        """End a context, perhaps in another thread, such as that of the garbage collector.

        Others may be open, of loops that were left for good: each of them that goes on follows.
        """
        self.contexts -= 1
        self._keeping -= not share
        # At its end Python starts no thread any more, and would wait for one for ever.
        if threading.get_ident() == self._owner and not sys.is_finalizing():
            self._choose(math.inf)

    def follow(self) -> None:
        """Set the number of threads by what other processes leave now."""
        if threading.get_ident() != self._owner:
            return
        shares = self.contexts and not self._keeping
        if shares and max(torch.get_num_threads(), self._wanted) > 1:
            _cores.look()
            self._choose(_cores.free)
        else:
            self._choose(math.inf)

    def _choose(self, free: float) -> None:
        """Set the caller's number of threads, or as many as there are free cores."""
        if torch.get_num_threads() != self._current:  # The caller has set it.
            self._wanted = self._current = torch.get_num_threads()
        threads = int(max(1, min(self._wanted, free)))
        if threads == self._current:
            return
        if self._current < self._wanted and _of_new_threads() == self._current:
            self._wanted = self._current  # The caller has set the very number that was set here.
            threads = min(threads, self._wanted)
        torch.set_num_threads(threads)
        if threads < self._wanted:
            _of_new_threads(self._wanted)
        self._current = threads


def _of_new_threads(number: int = 0) -> int:
    """Return the number of PyTorch's threads that a new thread of Python gets; set it if given.

    It is what was set last, in whatever thread; the number of this one stays.
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
        self.threads = _Threads()


_local = _Local()


@contextlib.contextmanager
def share_cores(share: bool = True) -> Iterator[Callable[[], None]]:
    """Compute on as many threads as there are cores that no other process keeps busy.

    Every parallel loop of PyTorch waits until each of its threads has run. Where another process
    has taken a core that is some milliseconds, in each of an epoch's hundreds of loops; one thread
    less waits for nobody. The number is between one and the caller's, which is set again at the
    end. With one thread, and on systems other than Linux, nothing is done. Loaders and inference
    do this by themselves. Contexts may be nested: one of them that doesn't share keeps all threads.
    A loop that is left early ends with its iterator, or when another such context ends: where the
    iterator is kept, ``iterator.close()`` sets the caller's number again.

    Args:
        share: Whether to. (default: ``True``)

    Yields:
        A function to call now and then, such as after every batch, which follows the changes.
    """
    threads = _local.threads
    threads.follow()  # Sets the caller's number, if the last context has ended in another thread.
    if not threads.contexts and torch.get_num_threads() == 1:
        yield lambda: None
        return
    threads.enter(share)
    try:
        yield threads.follow
    finally:
        threads.leave(share)
