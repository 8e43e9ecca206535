"""A folder that a graph is written into: empty, unfinished or complete."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gas.graph.folder.description import NAME, Description
from gas.graph.folder.npy import Array, write_array
from gas.native import free_disk, human, lock, make_folder, read_json, sync_folder, write_json

MARK = "unfinished.json"  # Exists until graph.json does; lists the files that were written.
MARK_FORMAT = "unfinished gas graph"
NEW = ".new"  # The ending of a file's name while it is written.
OURS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.(npy|part)")  # Names of files that may be listed.


class NewFolder:
    """A folder for a graph, which is complete when it has ``graph.json``.

    Until then ``unfinished.json`` lists the files that were begun; no other files are ever removed.
    The constructor only reads; :meth:`begin` is the first to write.

    Args:
        path: A new or an empty folder, or one that was left unfinished.
        by: The name of the writer. Only the same writer can continue an unfinished folder.
    """

    def __init__(self, path: str | Path, by: str) -> None:
        self.path, self.by = Path(path), by
        self._check_contents()

    def _check_contents(self) -> None:
        """Read the mark of an unfinished folder, and refuse folders with other files."""
        self.mark: dict[str, Any] = {}
        if not self.path.is_dir():
            if self.path.exists() or self.path.is_symlink():
                raise ValueError(f"'out' is {str(self.path)!r}, which is a file: name a folder")
            return
        names = {entry.name for entry in self.path.iterdir()} - {MARK + NEW}
        if MARK in names and NAME not in names:
            self.mark = self._read_mark()
            names -= {MARK, NAME + NEW, *self.mark["files"]}
        if NAME in names or names:
            found = NAME if NAME in names else min(names)
            raise ValueError(
                f"'out' is {str(self.path)!r}, which holds {found}: name a new folder, or an empty "
                "one"
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder in this context; see :func:`lock_folder`."""
        with lock_folder(self.path):
            self._check_contents()
            yield

    def _read_mark(self) -> dict[str, Any]:
        """Read ``unfinished.json``."""
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
        """Make the folder with ``unfinished.json``; remove files that were left unfinished.

        Args:
            files: The names of the files that will be written.
            num_bytes: Their total size.
            **more: Further entries of ``unfinished.json``.

        Raises:
            OSError: If the free space is insufficient; nothing has been written then.
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
        self.discard()
        self.note(files=sorted(files), **more)

    def discard(self) -> None:
        """Remove the files that were begun; an empty folder is left."""
        for name in [*self.mark.get("files", ()), NAME + NEW, MARK + NEW, MARK]:
            (self.path / name).unlink(missing_ok=True)
        self.mark = {}

    def note(self, **said: Any) -> None:
        """Change entries of ``unfinished.json``, durably."""
        self.mark = {**self.mark, "format": MARK_FORMAT, "by": self.by, **said}
        self._write_json(MARK, self.mark)

    def write(self, array: Array, blocks: Iterable[np.ndarray]) -> None:
        """Write an array, durably."""
        write_array(self.path / array.file, array, blocks)

    def finish(self, description: Description, arrays: dict[str, Any] | None = None) -> None:
        """Write ``graph.json`` and remove ``unfinished.json``.

        Args:
            description: The contents of ``graph.json``.
            arrays: The entries of its arrays, as JSON. (default: those of the description)
        """
        said = description.to_json()
        self._write_json(NAME, said if arrays is None else {**said, "arrays": arrays})
        (self.path / MARK).unlink()
        sync_folder(self.path)

    def _write_json(self, name: str, content: Any) -> None:
        write_json(self.path / name, content, indent=1, temporary=name + NEW)


@contextlib.contextmanager
def lock_folder(path: Path) -> Iterator[None]:
    """Make a folder, and lock it against other processes and threads in this context.

    The system unlocks the folder when the process ends, also if it is killed. A new folder that is
    still empty in the end is removed.
    """
    is_new = not path.exists()
    make_folder("out", path)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(path))
        except BlockingIOError as error:
            raise ValueError(
                f"'out' is {str(path)!r}, which another process is writing: wait for it, or "
                "name another folder"
            ) from error
        except OSError:  # Some file systems, such as network ones, have no locks.
            pass
        try:
            yield
        finally:
            if is_new:  # It is removed if it is empty.
                with contextlib.suppress(OSError):
                    path.rmdir()
