"""Memory and disk space for histories."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import torch

from gas.native import explain_missing_cuda, free_disk, free_memory, human


def check_fits(num_bytes: int, device: torch.device | None = None) -> None:
    """Raise ``MemoryError`` if ``num_bytes`` of histories can't be allocated."""
    with explain_missing_cuda("histories"):
        free = free_memory(device)
    if num_bytes > free:
        where = "the device" if device is not None and device.type == "cuda" else "memory"
        raise MemoryError(
            f"histories of {human(num_bytes)} do not fit {where}, {human(free)} are free: use "
            "store='disk', a narrower 'dtype' such as torch.int8, or fewer 'hidden_channels'"
        )


def check_fits_disk(num_bytes: int, path: str | Path | None = None) -> None:
    """Raise ``OSError`` if the disk of ``path`` has no room for new files of histories."""
    folder = Path(path or tempfile.gettempdir()).absolute()
    free = free_disk(folder)
    if num_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"histories of {human(num_bytes)} do not fit the disk, {human(free)} are free: choose "
            "another 'path', a narrower 'dtype' such as torch.int8, or fewer 'hidden_channels'",
            str(folder),
        )
