"""Durable and atomic writes of files; strict JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

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
        path: The file, which may exist, and then keeps its mode; its folder is made.
        temporary: The name of the temporary file in the same folder, which is overwritten.
            (default: a unique name)

    Yields:
        The temporary file.
    """
    path = Path(os.path.realpath(path))  # A symbolic link stays one.
    path.parent.mkdir(parents=True, exist_ok=True)
    if temporary is None:
        name = path.parent / f".{path.stem}{secrets.token_hex(4)}{path.suffix}"
        os.close(os.open(name, os.O_CREAT | os.O_EXCL, 0o666))  # Less the umask.
    else:
        name = path.parent / temporary
    try:
        yield name
        with open(name, "r+b") as stream:
            flush_to_disk(stream)
        if path.exists():
            shutil.copymode(path, name)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


# JSON ---------------------------------------------------------------------------------------------

NUMBERS = re.compile(r"\[\n[\d,\s]+\]")  # Lists of integers, which are written in one line.


def parse_json(text: bytes) -> Any:
    """Parse JSON; refuse duplicate names, NaN and infinite numbers."""
    try:
        return json.loads(
            text.decode(), object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of pairs; refuse duplicate names."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no number")


def read_json(path: Path) -> Any:
    """Read a file of a graph folder; see :func:`parse_json`."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        refuse(path, "its text", str(error), "JSON, as gas writes it: write the folder again")


def write_json(
    path: Path, content: Any, indent: int | None = 2, temporary: str | None = None
) -> None:
    """Write or replace a JSON file, atomically and durably.

    Args:
        path: The file.
        content: The content.
        indent: The spaces of each level. (default: ``2``)
        temporary: See :func:`replace_file`.
    """
    text = json.dumps(content, indent=indent, allow_nan=False)
    text = NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    with replace_file(path, temporary) as file:
        file.write_text(text + "\n", encoding="utf-8")
