"""Write files so that they are there as a whole or not at all, whenever the power fails."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn


def refuse(path: Path, what: str, found: object, expected: str) -> NoReturn:
    """Raise ``ValueError``: of a file of a folder that isn't what it should be."""
    shown = found if isinstance(found, str) else repr(found)
    shown = shown if len(shown) <= 120 else f"{shown[:100]} ..."
    raise ValueError(f"{path}: {what} is {shown}, expected {expected}")


def flush_to_disk(stream: IO[bytes]) -> None:
    """Wait until what was written to a stream has reached the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows can't open a folder.
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Of a file system that has none.
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def replace_file(path: Path, temporary: str | None = None) -> Iterator[Path]:
    """Write a file that takes the place of ``path``, durably, when the context ends, or never.

    Args:
        path: The file, which may be there; its folder is made.
        temporary: The name in its folder until then; what a crash left there is overwritten.
            (default: one that no other process has)

    Yields:
        The file to write to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if temporary is None:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}", suffix=path.suffix)
        os.close(handle)
        os.chmod(name, 0o644)
    else:
        name = str(path.parent / temporary)
    try:
        yield Path(name)
        with open(name, "r+b") as stream:
            flush_to_disk(stream)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
