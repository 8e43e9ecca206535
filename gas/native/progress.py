"""Report the progress of long operations on standard error, every ten seconds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

EVERY = 10.0  # Seconds between two lines, and before the first.
# A program for a second process, which prints until its input is closed.
_PROGRAM = """
import select, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
what, every, start = sys.argv[1], float(sys.argv[2]), time.monotonic()
while not select.select([sys.stdin], [], [], every)[0]:
    print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
"""


class Ticker:
    """The progress that :func:`report_progress` prints: ``done`` of ``total``, and a ``note``."""

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total = what, total
        self.done = 0
        self.note = ""
        self._start = time.monotonic()

    def __str__(self) -> str:
        of = "" if self.total is None else f" {self.done:,} of {self.total:,},"
        note = f", {self.note}" if self.note else ""
        return f"{self.what}:{of} {time.monotonic() - self._start:.0f} s{note}"


@contextlib.contextmanager
def report_progress(what: str, total: int | None = None, log: bool = True) -> Iterator[Ticker]:
    """Print a line every ten seconds in this context."""
    ticker, ended = Ticker(what, total), threading.Event()

    def tick() -> None:
        while not ended.wait(EVERY):
            print(ticker, file=sys.stderr, flush=True)

    thread = threading.Thread(target=tick, daemon=True)
    if log:
        thread.start()
    try:
        yield ticker
    finally:
        ended.set()
        if log:
            thread.join()


@contextlib.contextmanager
def report_blocking(what: str, log: bool = True) -> Iterator[None]:
    """Print a line every ten seconds from a second process: METIS blocks all threads of this one.

    Nothing is printed if standard error isn't a file, or no process can be started.
    """
    beside = None
    if log and sys.executable:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # A stream without a file.
            beside = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, what, str(EVERY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=sys.stderr.fileno(),
            )
    try:
        yield
    finally:
        if beside is not None:
            beside.communicate()
