"""A folder that a graph is being written into: empty, unfinished, or whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gas.graph.folder.description import NAME, Array, Description, read_json
from gas.graph.folder.npy import write_array
from gas.history.memory import free_disk
from gas.native.memory import human

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out. mypy takes a name to be a module for ever.
    fcntl = None  # type: ignore[assignment]

MARK = "unfinished.json"  # There as long as graph.json isn't; lists the files that are ours.
MARK_FORMAT = "unfinished gas graph"
SHAPE = re.compile(r"\[\n[\d,\s]+\]")  # Lists of numbers: in one line.
OURS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.(npy|part)")  # The files that may be.


class NewFolder:
    """A folder for a graph, which is whole when ``graph.json`` is there.

    Before, ``unfinished.json`` names the files that were begun; they alone are ever removed. Making
    one only looks; :meth:`begin` is the first to write.

    Args:
        path: The folder: one that isn't there, an empty one, or one that was left unfinished.
        by: Who writes it, in words; what somebody else left isn't taken up.

    Raises:
        ValueError: If the folder holds something else.
    """

    def __init__(self, path: str | Path, by: str) -> None:
        self.path, self.by = Path(path), by
        self._look()

    def _look(self) -> None:
        """Reads what was left, and refuses anything else."""
        self.mark: dict[str, Any] = {}
        if not self.path.is_dir():
            if self.path.exists() or self.path.is_symlink():
                raise ValueError(f"'out' is {str(self.path)!r}, which is a file: name a folder")
            return
        names = {entry.name for entry in self.path.iterdir()} - {_new(MARK)}
        if MARK in names and NAME not in names:
            self.mark = self._read_mark()
            names -= {MARK, _new(NAME), *self.mark["files"]}
        if NAME in names or names:
            found = NAME if NAME in names else min(names)
            raise ValueError(
                f"'out' is {str(self.path)!r}, which holds {found}: name a new folder, or an empty "
                "one"
            )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """In this context no other process, or thread, writes into the folder by this function.

        Raises:
            ValueError: If one does, or has finished it since.
        """
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if is_new:  # If nothing comes of it.
                stack.callback(_remove_empty, self.path)
            if fcntl is not None:  # Not on Windows.
                handle = os.open(self.path, os.O_RDONLY)
                stack.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise ValueError(
                        f"'out' is {str(self.path)!r}, which another process is writing: wait for "
                        "it, or name another folder"
                    ) from error
            self._look()
            yield

    def _read_mark(self) -> dict[str, Any]:
        """What an unfinished folder says of itself."""
        path = self.path / MARK
        mark = read_json(path)
        files = mark.get("files") if isinstance(mark, dict) else None
        if (
            not isinstance(files, list)
            or not all(isinstance(name, str) and OURS.fullmatch(name) for name in files)
            or mark.get("format") != MARK_FORMAT
            or mark.get("by") != self.by
        ):
            by = mark.get("by") if isinstance(mark, dict) else mark
            raise ValueError(
                f"'out' is {str(self.path)!r}, which {by!r} left unfinished, not {self.by}: name "
                "another folder, or remove it"
            )
        return mark

    def begin(self, files: Iterable[str], num_bytes: int, **more: Any) -> None:
        """Makes the folder and says whose it is; removes what was left of these files.

        Args:
            files: The names of the files that will be written.
            num_bytes: What they will take.
            **more: What else ``unfinished.json`` is to say.

        Raises:
            OSError: If the disk has no room; nothing has been written then.
        """
        free = free_disk(self.path.absolute())
        if num_bytes > free:
            raise OSError(
                errno.ENOSPC,
                f"the graph takes {human(num_bytes)}, and {human(free)} are free: choose another "
                "'out'",
                str(self.path),
            )
        self.path.mkdir(parents=True, exist_ok=True)
        for name in [*self.mark.get("files", ()), _new(NAME), _new(MARK)]:
            (self.path / name).unlink(missing_ok=True)
        self.note(files=sorted(files), **more)

    def note(self, **said: Any) -> None:
        """Changes what ``unfinished.json`` says, durably."""
        self.mark = {**self.mark, "format": MARK_FORMAT, "by": self.by, **said}
        write_json(self.path / MARK, self.mark)

    def write(self, array: Array, blocks: Iterable[np.ndarray]) -> None:
        """Writes an array, durably."""
        write_array(self.path / array.file, array, blocks)

    def finish(self, description: Description, arrays: dict[str, Any] | None = None) -> None:
        """Makes the folder whole.

        Args:
            description: What ``graph.json`` is to say.
            arrays: What it is to say of arrays, as JSON. (default: what the description does)
        """
        said = description.to_json()
        write_json(self.path / NAME, said if arrays is None else {**said, "arrays": arrays})
        (self.path / MARK).unlink()
        sync_folder(self.path)


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _new(name: str) -> str:
    """What a file is called before it is whole."""
    return f"{name}.new"


def write_json(path: Path, content: Any) -> None:
    """Writes or replaces a file, durably: there is the old one, or the whole new one."""
    new = path.with_name(_new(path.name))
    with new.open("w", encoding="utf-8") as stream:
        text = json.dumps(content, indent=1, allow_nan=False)
        stream.write(SHAPE.sub(lambda found: " ".join(found[0].split()), text) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable, where the system can."""
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
