"""Threads for the cores that other processes leave: no thread is waited for that can't run."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator

import torch

# Seconds between two looks. The system counts in hundredths of a second: less would be noise.
INTERVAL = 0.2
PAUSE = 1.0  # What was seen longer ago counts no more.


def num_cores() -> int:
    """The cores that this process may use; all of the machine's where the system doesn't tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy_seconds() -> float | None:
    """Seconds that this process's cores have computed since the start, for whatever process.

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
        """Forgets what was seen before a pause, in which others may have computed instead."""
        if not self._has_news():
            self.free, self._last = math.inf, None
        self.look()

    def lately(self) -> float:
        """``free`` if that is news, else infinite."""
        return self.free if self._has_news() else math.inf

    def _has_news(self) -> bool:
        return self._last is not None and time.monotonic() - self._last[0] <= PAUSE

    def look(self) -> None:
        """Brings ``free`` up to date; nearly free of cost where that has just been done."""
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
    """Whether computing on the CPU leaves cores to others.

    Where it doesn't, work beside the computation would only interrupt it. Cores that other
    processes keep busy aren't idle, as far as :func:`share_cores` has just seen them.
    """
    return torch.get_num_threads() < min(num_cores(), _cores.lately())


@contextlib.contextmanager
def share_cores(share: bool = True) -> Iterator[Callable[[], None]]:
    """Computes on as many threads as there are cores that no other process keeps busy.

    Every parallel loop of PyTorch waits until each of its threads has run. Where another process
    has taken a core that is some milliseconds, in each of an epoch's hundreds of loops; one thread
    less waits for nobody. The number is between one and the caller's, which is set again at the
    end. With one thread, and on systems other than Linux, nothing is done.

    Args:
        share: Whether to. (default: ``True``)

    Yields:
        A function to call now and then, such as after every batch, which follows the changes.
    """
    wanted = torch.get_num_threads()
    if not share or wanted == 1:
        yield lambda: None
        return
    current = wanted

    def follow() -> None:
        nonlocal current
        _cores.look()
        threads = int(max(1, min(wanted, _cores.free)))
        if threads != current:
            torch.set_num_threads(threads)
            current = threads

    try:
        _cores.begin()
        follow()
        yield follow
    finally:
        if current != wanted:
            torch.set_num_threads(wanted)
