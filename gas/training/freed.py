"""Memory that was freed, and is resident still: the C library keeps it for the next blocks."""

from __future__ import annotations

import ctypes
import functools
import gc
from typing import Any

from gas.native.memory import resident_bytes

LARGE_BLOCK = 1 << 20  # From here on, blocks are the system's again as soon as they are freed.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # Of GNU's malloc.h.


@functools.cache
def _library() -> Any:
    """The functions of the C library; only that of GNU has those that are asked for here."""
    try:
        library = ctypes.CDLL(None)
        # To look them up raises where they aren't.
        library.malloc_trim, library.mallopt  # noqa: B018
    except (AttributeError, OSError, TypeError):  # TypeError: on Windows.
        return None
    return library


def give_back_freed() -> int:
    """Gives memory that is free back to the system; the bytes that were resident until then.

    Nothing happens where the C library isn't GNU's.
    """
    gc.collect()
    before = resident_bytes()
    if _library() is not None:
        _library().malloc_trim(0)
    return max(0, before - resident_bytes())


def keep_little_freed() -> None:
    """Has large blocks given back to the system when they are freed, in this process from now on.

    Otherwise the C library keeps those of up to 32 MiB. Mini-batches differ in size, so that the
    blocks of one don't fit the next, and holes between them pile up. New blocks are cleared by the
    system, which takes time. Nothing happens where the C library isn't GNU's.
    """
    if _library() is not None:
        _library().mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        _library().mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK)
