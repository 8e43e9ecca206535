"""Whether histories fit memory, or the disk."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import torch

from gas.native.memory import free_memory, human

# What the system says of a disk, a file or a user's share that is full.
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def free_disk(path: Path) -> int:
    """The bytes that are free where ``path`` is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_fits(num_bytes: int, device: torch.device | None = None) -> None:
    """Raises ``MemoryError`` where ``num_bytes`` of histories can't be allocated."""
    free = free_memory(device)
    if num_bytes > free:
        where = "the device" if device is not None and device.type == "cuda" else "memory"
        raise MemoryError(
            f"histories of {human(num_bytes)} do not fit {where}, {human(free)} are free: use "
            "store='disk', a narrower 'dtype' such as torch.int8, or fewer 'hidden_channels'"
        )


def check_fits_disk(num_bytes: int, path: str | Path | None = None) -> None:
    """Raises ``OSError`` where the disk of ``path`` has no room for new files of histories."""
    folder = Path(path or tempfile.gettempdir()).absolute()
    free = free_disk(folder)
    if num_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"histories of {human(num_bytes)} do not fit the disk, {human(free)} are free: choose "
            "another 'path', a narrower 'dtype' such as torch.int8, or fewer 'hidden_channels'",
            str(folder),
        )
