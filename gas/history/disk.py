"""Store rows in a file that is mapped into memory."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import struct
import tempfile
import weakref
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from gas.history.packed import PackedRows
from gas.history.packing import Packing
from gas.history.store import TableStore
from gas.native import BufferPool, explain_full_disk

try:
    import fcntl
except ImportError:  # Windows: a DiskStore refuses.
    fcntl = None  # type: ignore[assignment]

MAGIC = b"gas-hist"
VERSION = 1
HEADER_BYTES = 4096  # A page, so that rows start at one.
ZEROS_BYTES = 1 << 20  # Written at once if the system can't reserve space.
# Magic, version, rows, columns, bytes of an element, description of the content.
HEADER = struct.Struct("<8sIQQI32s")


class DiskStore(TableStore):
    """A table in a file that is mapped into memory and cached by the system.

    The file is a header of 4096 bytes (magic, version, shape, content), then the rows. An existing
    file is opened with its rows, and ``resumed`` is true.

    Args:
        num_rows: The number of rows, zeros in a new file.
        columns: The number of elements of a row.
        dtype: Their type.
        path: The file. (default: a file in a temporary directory, removed by :meth:`close`, when
            the store is garbage, or when Python ends)
        content: A description of the rows, which an existing file must have, too.
            (default: the dtype's name)

    Raises:
        ValueError: If the file exists and has other rows, with the difference.
        OSError: If the disk is full, or the directory can't be written; nothing has changed then.
        RuntimeError: If the system can't lock files.
    """

    tier = "disk"

    def __init__(
        self,
        num_rows: int,
        columns: int,
        dtype: torch.dtype,
        path: str | Path | None = None,
        content: str | None = None,
    ) -> None:
        if fcntl is None:
            raise RuntimeError(
                "histories on disk need a system that can lock files (POSIX), which "
                f"{platform.system()} isn't: use store='host'"
            )
        content = content or str(dtype).removeprefix("torch.")
        directory = None
        if path is None:
            directory = tempfile.mkdtemp(prefix="gas-history-")
            path = Path(directory) / "rows"
        self.path = Path(path)
        self.content = content
        self._file: int | None = None
        header = HEADER.pack(MAGIC, VERSION, num_rows, columns, dtype.itemsize, content.encode())
        try:
            self._file, self.resumed = _open(self.path, header, num_rows * columns * dtype.itemsize)
            table = _map_rows(self._file, num_rows, columns, dtype)
        except BaseException:
            _release(os.getpid(), self._file, directory)
            raise
        super().__init__(table)
        self._finalizer = weakref.finalize(self, _release, os.getpid(), self._file, directory)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a history on disk can't be pickled: its file would have two owners")

    def flush(self) -> None:
        """Write cached changes to the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def make_packed(self, packing: Packing, pool: BufferPool) -> PackedRows:
        """Return copies of the rows for ``packed``; see :class:`PackedRows`."""
        assert self._file is not None
        file = self._file, HEADER_BYTES
        return PackedRows(self.table, packing, self.path.parent, pool, file)

    def close(self) -> None:
        """Close the file, and remove it if it is temporary."""
        if self.packed is not None:
            self.packed.close()
            self.packed = None
        self.table = torch.empty(0, self.columns, dtype=self.dtype)
        self._finalizer()
        self._file = None

    def resize(self, num_rows: int) -> None:
        """See :class:`Store`. Packed copies of rows are removed.

        Raises:
            OSError: If the disk has no room; nothing has changed then.
        """
        assert self._file is not None
        if self.packed is not None:
            self.packed.close()
            self.packed = None
        element = self.dtype.itemsize
        num_bytes = HEADER_BYTES + num_rows * self.columns * element
        if num_rows < self.num_rows:
            self.table = self.table[:num_rows]
            os.ftruncate(self._file, num_bytes)
        else:
            _extend(self._file, self.path, num_bytes)
        named = self.content.encode()
        header = HEADER.pack(MAGIC, VERSION, num_rows, self.columns, element, named)
        os.pwrite(self._file, header, 0)
        self.table = _map_rows(self._file, num_rows, self.columns, self.dtype)
        self.num_rows = num_rows

    def clone(self) -> DiskStore:
        """Copy the store into a temporary file."""
        other = DiskStore(self.num_rows, self.columns, self.dtype, content=self.content)
        other.table.copy_(self.table)
        return other


def _release(process: int, file: int | None, directory: str | None) -> None:
    if os.getpid() != process:  # A forked process doesn't own the file.
        return
    if file is not None:
        fcntl.flock(file, fcntl.LOCK_UN)  # The mapping has a copy of the file's descriptor.
        os.close(file)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _open(path: Path, header: bytes, num_bytes: int) -> tuple[int, bool]:
    """Open a file with this header, or make one; return it, and whether it existed.

    A new file gets its name after its header was written to the disk, so that a process that is
    killed leaves no incomplete file.
    """
    unfinished = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = os.open(unfinished if is_new else path, flags, 0o644)
    except OSError as error:
        raise type(error)(
            error.errno, f"histories can't be stored here ({error.strerror}): choose a 'path' that "
            "can be written", str(path),
        ) from error  # fmt: skip
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use_error(path) from error
        size = 0 if is_new else os.fstat(file).st_size
        if size:
            _check_header(path, os.pread(file, HEADER.size, 0), header, size, num_bytes)
            return file, True
        if is_new and path.exists():  # Another process has made it in the meantime.
            raise _in_use_error(path)
        try:  # Reserve space: a write to a mapped file on a full disk would kill the process.
            os.ftruncate(file, 0)  # A process that was killed may have left some.
            _extend(file, path, HEADER_BYTES + num_bytes)
        except OSError:
            (unfinished if is_new else path).unlink()
            raise
        os.pwrite(file, header, 0)
        os.fsync(file)
        if is_new:
            os.rename(unfinished, path)
    except BaseException:
        os.close(file)
        raise
    return file, False


def _in_use_error(path: Path) -> ValueError:
    return ValueError(
        f"'path' {str(path)!r} is in use: two models can't share the file of a history. Processes "
        "that train together share a path if torch.distributed.init_process_group is called before "
        "the model is made"
    )


def _extend(file: int, path: Path, num_bytes: int) -> None:
    """Extend a file to ``num_bytes``, with zeros at its end."""
    before = os.fstat(file).st_size
    with explain_full_disk(
        path,
        lambda free: (
            f"the disk has no room for a history of {num_bytes:,} bytes ({free:,} are free): "
            "choose another 'path' or a narrower 'dtype'"
        ),
    ):
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, num_bytes)
            else:  # As on macOS.
                for start in range(before, num_bytes, ZEROS_BYTES):
                    os.pwrite(file, bytes(min(ZEROS_BYTES, num_bytes - start)), start)
        except OSError:
            os.ftruncate(file, before)
            raise


def _check_header(path: Path, found: bytes, wanted: bytes, size: int, num_bytes: int) -> None:
    if len(found) < HEADER.size or not found.startswith(MAGIC):
        raise ValueError(f"'path' {str(path)!r} is not the file of a history: it has no header")
    names = (
        "magic",
        "version",
        "number of rows",
        "number of columns",
        "size of an element",
        "content",
    )
    fields = list(zip(names, HEADER.unpack(wanted), HEADER.unpack(found), strict=True))
    for name, mine, other in [
        *fields[:2],
        fields[-1],
        *fields[2:-1],
    ]:  # The sizes last.
        if mine != other:
            shown = [
                v.rstrip(b"\0").decode(errors="replace") if isinstance(v, bytes) else v
                for v in (other, mine)
            ]
            raise ValueError(
                f"'path' {str(path)!r} holds another history: its {name} is {shown[0]}, expected "
                f"{shown[1]}. Remove the file, or choose another path"
            )
    if size != HEADER_BYTES + num_bytes:
        raise ValueError(
            f"'path' {str(path)!r} has {size:,} bytes, expected {HEADER_BYTES + num_bytes:,}: it "
            "was cut off. Remove it to start over"
        )


def _map_rows(file: int, num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = num_rows * columns * dtype.itemsize
    with torch.inference_mode(False):  # Inference tensors have no version counter.
        if num_bytes == 0:
            return torch.zeros(num_rows, columns, dtype=dtype)
        mapped = mmap.mmap(file, HEADER_BYTES + num_bytes)
        rows = np.frombuffer(mapped, dtype=np.uint8, offset=HEADER_BYTES)
        return torch.from_numpy(rows).view(dtype).view(num_rows, columns)
