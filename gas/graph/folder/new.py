"""A folder that a graph is being written into: empty, unfinished, or whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gas.graph.folder.description import NAME, Description
from gas.io import Array, read_json, sync_folder, write_array, write_json
from gas.native import free_disk, human, make_folder

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out. mypy takes a name to be a module for ever.
    fcntl = None  # type: ignore[assignment]

MARK = "unfinished.json"  # There as long as graph.json isn't; lists the files that are ours.
MARK_FORMAT = "unfinished gas graph"
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
        self._check_contents()

    def _check_contents(self) -> None:
        """Read what was left, and refuse anything else."""
        self.mark: dict[str, Any] = {}
        if not self.path.is_dir():
            if self.path.exists() or self.path.is_symlink():
                raise ValueError(f"'out' is {str(self.path)!r}, which is a file: name a folder")
            return
        names = {entry.name for entry in self.path.iterdir()} - {_temporary_name(MARK)}
        if MARK in names and NAME not in names:
            self.mark = self._read_mark()
            names -= {MARK, _temporary_name(NAME), *self.mark["files"]}
        if NAME in names or names:
            found = NAME if NAME in names else min(names)
            raise ValueError(
                f"'out' is {str(self.path)!r}, which holds {found}: name a new folder, or an empty "
                "one"
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """In this context no other process, or thread, writes into the folder by this function.

        Raises:
            ValueError: If one does, or has finished it since.
        """
        with lock_folder(self.path):
            self._check_contents()
            yield

    def _read_mark(self) -> dict[str, Any]:
        """Read what an unfinished folder says of itself."""
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
        """Make the folder and say whose it is; remove what was left of these files.

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
        make_folder("out", self.path)
        for name in [*self.mark.get("files", ()), _temporary_name(NAME), _temporary_name(MARK)]:
            (self.path / name).unlink(missing_ok=True)
        self.note(files=sorted(files), **more)

    def note(self, **said: Any) -> None:
        """Change what ``unfinished.json`` says, durably."""
        self.mark = {**self.mark, "format": MARK_FORMAT, "by": self.by, **said}
        self._write_json(MARK, self.mark)

    def write(self, array: Array, blocks: Iterable[np.ndarray]) -> None:
        """Write an array, durably."""
        write_array(self.path / array.file, array, blocks)

    def finish(self, description: Description, arrays: dict[str, Any] | None = None) -> None:
        """Make the folder whole.

        Args:
            description: What ``graph.json`` is to say.
            arrays: What it is to say of arrays, as JSON. (default: what the description does)
        """
        said = description.to_json()
        self._write_json(NAME, said if arrays is None else {**said, "arrays": arrays})
        (self.path / MARK).unlink()
        sync_folder(self.path)

    def _write_json(self, name: str, content: Any) -> None:
        write_json(self.path / name, content, indent=1, temporary=_temporary_name(name))


@contextlib.contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Make a folder and keep others that do so out of it, processes and threads, in this context.

    The system lets go of the folder when the process ends, however it does. If nothing comes of a
    folder that wasn't there, it is removed.

    Raises:
        ValueError: If another one writes into it.
    """
    is_new = not path.exists()
    make_folder("out", path)
    with contextlib.ExitStack() as stack:
        if fcntl is not None:  # Not on Windows.
            handle = os.open(path, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"'out' is {str(path)!r}, which another process is writing: wait for it, or "
                    "name another folder"
                ) from error
            except OSError:  # A file system without locks, such as of a network: as on Windows.
                pass
        if is_new:  # It is this one's: another that found no folder either was refused above.
            stack.callback(_remove_empty, path)
        yield


def _remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _temporary_name(name: str) -> str:
    """Return the name of a file before it is whole."""
    return f"{name}.new"
