"""Durable and atomic writes of files."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NoReturn

try:
    import fcntl
except ImportError:  # Windows has no such locks. (mypy would infer the type of a module.)
    fcntl = None  # type: ignore[assignment]


def refuse(path: Path, what: str, found: object, expected: str) -> NoReturn:
    """Raise ``ValueError`` for the content of a file."""
    shown = found if isinstance(found, str) else repr(found)
    shown = shown if len(shown) <= 120 else f"{shown[:100]} ..."
    raise ValueError(f"{path}: {what} is {shown}, expected {expected}")


def flush_to_disk(stream: IO[bytes]) -> None:
    """Flush a stream, and wait until its content is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, if the system supports it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # Windows can't open a folder.
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some file systems don't support it.
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lock a file or folder in this context, where the system has locks.

    The system removes the lock when the process ends, also if it is killed.

    Raises:
        BlockingIOError: If another process or thread has locked it.
        OSError: If the file system has no locks.
    """
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            handle = os.open(path, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A forked process may keep the handle open.
            stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def replace_file(path: Path, temporary: str | None = None) -> Iterator[Path]:
    """Replace a file atomically and durably at the end of the context, unless it raises an error.

    Args:
        path: The file, which may exist; its folder is made.
        temporary: The name of the temporary file in the same folder, which is overwritten.
            (default: a unique name)

    Yields:
        The temporary file.
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
