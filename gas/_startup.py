"""Ctrl-C while the command ``gas`` is imported, which takes seconds: end without a traceback.

Imported before everything else, as the command has no code of its own that runs earlier. Nothing
changes in other programs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType


def is_command(argv: list[str], original: list[str]) -> bool:
    """Return whether a process with these arguments is ``gas``, or ``python -m gas``.

    Args:
        argv: The arguments, as in ``sys.argv``.
        original: The arguments of the interpreter, as in ``sys.orig_argv``.
    """
    if argv[:1] == ["-m"]:
        return "-m" in original and original[original.index("-m") + 1 :][:1] == ["gas"]
    script = Path(argv[0]) if argv and argv[0] else None
    if script is None or script.stem != "gas" or argv[0] not in original:
        return False  # Processes that multiprocessing starts have ``argv`` of the first one.
    try:
        return b"gas.cli" in script.read_bytes()
    except OSError:
        return False


def end_process(number: int, frame: FrameType | None) -> None:
    """End with the status of a process that a signal ended.

    An exception would be lost where a library that is imported catches all.
    """
    os._exit(128 + number)


def finish_startup() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again."""
    if signal.getsignal(signal.SIGINT) is end_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command(sys.argv, sys.orig_argv):
    # Not in other threads, nor where Ctrl-C is ignored, as in the background.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_process)
