"""The files of checkpoints, which are written atomically and durably; see :func:`gas.save`.

A checkpoint is written under a name that begins with a dot, and renamed when all its files, the
manifest last, are on the disk. When an old one is removed, its manifest is removed first: a folder
without a manifest is no checkpoint. Files of other programs are never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gas.checkpoint.tensors import CheckpointError, Checksum, checksum, read_json
from gas.native import (
    explain_full_disk,
    flush_to_disk,
    human,
    lock,
    make_folder,
    sync_folder,
    write_json,
)

MANIFEST = "manifest.json"
FORMAT, VERSION = "gas checkpoint", 1
NEWEST = "newest.json"
FORMAT_OF_RANKS = "gas checkpoint of ranks"
MOST_MANIFEST = 1 << 30
NAME = re.compile(r"checkpoint_(\d{6,18})")
OF_RANKS = re.compile(r"ranks_([1-9]\d{0,8})")
TEMPORARY = re.compile(r"\.checkpoint_(\d{6,18})\.writing")
# Files of a checkpoint, besides the manifest.
FILE = re.compile(r"(model|state|(view_\d+_)?history_\d+(_changes)?)\.safetensors")


class NewestCheckpoint(NamedTuple):
    """Contents of ``newest.json``: a checkpoint and its number of processes."""

    world_size: int
    number: int


class Source(NamedTuple):
    """The checkpoint to read: of a single process (``world_size`` 0), or of all ranks."""

    root: Path
    world_size: int
    name: str

    def path(self, rank: int) -> Path:
        """Return the checkpoint of a rank."""
        folder = rank_folder(self.root, self.world_size, rank) if self.world_size else self.root
        return folder / self.name


class KnownFile(NamedTuple):
    """A complete file: its identity and checksum."""

    identity: tuple[int, ...]
    written: Checksum


def file_identity(path: Path) -> tuple[int, ...]:
    """Return values that identify a file and its version, whatever its name."""
    about = os.stat(path)
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


class FolderWriter:
    """Writer of the files of a checkpoint; see :func:`write_checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Checksum] = {}

    def write(self, name: str, content: Callable[[BinaryIO], Checksum]) -> KnownFile:
        """Write a file durably."""
        with open(self.folder / name, "xb") as stream:
            self.files[name] = content(stream)
            flush_to_disk(stream)
        return KnownFile(file_identity(self.folder / name), self.files[name])

    def link(self, name: str, known: KnownFile) -> bool:
        """Link a file of an earlier checkpoint; return whether that was possible."""
        for path in reversed(checkpoints(self.folder.parent)):
            try:
                if file_identity(path / name) == known.identity:
                    os.link(path / name, self.folder / name)
                    self.files[name] = known.written
                    return True
            except OSError:  # It lacks the file, was removed, or the disk has no hard links.
                continue
        return False

    def write_manifest(self, content: dict[str, Any]) -> None:
        """Write the manifest, which completes the checkpoint."""
        files = {name: {"bytes": w.nbytes, "crc32": w.crc32} for name, w in self.files.items()}
        content = {"format": FORMAT, "version": VERSION, "files": files, **content}
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        whole = {"crc32": zlib.crc32(text.encode()), "content": content}
        with open(self.folder / MANIFEST, "xb") as stream:
            stream.write(json.dumps(whole, allow_nan=False, separators=(",", ":")).encode())
            flush_to_disk(stream)


@contextlib.contextmanager
def write_checkpoint(folder: Path, number: int) -> Iterator[FolderWriter]:
    """Write a new checkpoint, which gets its name when the context ends without an error.

    Raises:
        OSError: If the disk is full, or the folder isn't writable; no checkpoint has changed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder("folder", folder)
    name = f"checkpoint_{number:06}"
    temporary = folder / f".{name}.writing"
    try:
        temporary.mkdir()
    except FileExistsError as error:
        raise FileExistsError(
            errno.EEXIST,
            "another process is writing a checkpoint there: name another folder",
            str(folder),
        ) from error
    with explain_full_disk(
        folder,
        lambda free: (
            f"the disk has no room for a checkpoint ({human(free)} are free): free some, or name a "
            "folder on another disk. Those written before are unchanged"
        ),
    ):
        try:
            with lock(temporary):
                yield FolderWriter(temporary)
                sync_folder(temporary)
                os.rename(temporary, folder / name)
            sync_folder(folder)
            for path in missing:  # New folders.
                sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(temporary)
            raise


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints of a folder, newest last, without checking their content."""
    found = sorted((int(number), path) for number, path in _find_numbered(Path(folder)))
    return [path for _, path in found if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]


def _find_numbered(folder: Path) -> list[tuple[str, Path]]:
    """Return the numbers and folders of checkpoints, including incomplete ones."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    matches = [(NAME.fullmatch(p.name) or TEMPORARY.fullmatch(p.name), p) for p in paths]
    return [(match[1], path) for match, path in matches if match]


def next_number(folder: Path) -> int:
    """Return the next number, larger than those of all checkpoints, complete or not."""
    newest = read_newest(folder)
    numbers = [0 if newest is None else newest.number]
    return 1 + max([*numbers, *(int(number) for number, _ in _find_numbered(folder))])


def rank_folder(folder: Path, world_size: int, rank: int) -> Path:
    """Return the folder of a rank's checkpoints."""
    return folder / f"ranks_{world_size}" / str(rank)


def read_newest(folder: Path) -> NewestCheckpoint | None:
    """Return the newest checkpoint that all ranks have completed, if there is one."""
    file = folder / NEWEST

    def error(what: str) -> CheckpointError:
        return CheckpointError(f"{file} {what}: it is damaged, or not of gas")

    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as reason:
        raise error(f"can't be read ({reason})") from reason
    found = read_json(text, error)
    found = found if isinstance(found, dict) else {}
    newest = NewestCheckpoint(*(found.get(key, 0) for key in NewestCheckpoint._fields))
    if found.get("format") != FORMAT_OF_RANKS or any(type(n) is not int or n < 1 for n in newest):
        raise error("doesn't say which checkpoint is the newest")
    _check_version(file, found)
    return newest


def _check_version(path: Path, found: dict[str, Any]) -> None:
    """Refuse files of another version of the format."""
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {found.get('version')!r}, and this gas reads version {VERSION}: "
            "use the gas that wrote it, or a newer one"
        )


def find_source(folder: Path) -> Source:
    """Find the newest checkpoint of a folder; the folder may be a checkpoint itself.

    The checkpoint of a rank stands for those of all ranks.

    Raises:
        CheckpointError: If there is none, or ``newest.json`` is damaged.
    """
    if (folder / MANIFEST).exists():
        ranks = OF_RANKS.fullmatch(folder.parents[1].name) if len(folder.parents) > 2 else None
        if ranks is not None and folder.parent.name.isdecimal() and NAME.fullmatch(folder.name):
            return Source(folder.parents[2], int(ranks[1]), folder.name)
        return Source(folder.parent, 0, folder.name)
    newest, others = read_newest(folder), checkpoints(folder)
    if newest is not None and (not others or checkpoint_number(others[-1]) < newest.number):
        return Source(folder, newest.world_size, f"checkpoint_{newest.number:06}")
    if not others:
        raise CheckpointError(
            f"'folder' is {str(folder)!r}, which has no complete checkpoint: expected a folder "
            "that gas.save has written to"
        )
    return Source(folder, 0, others[-1].name)


def checkpoint_number(path: Path) -> int:
    """Return 12 for ``checkpoint_000012``."""
    return int(path.name.removeprefix("checkpoint_"))


def write_newest(folder: Path, newest: NewestCheckpoint) -> None:
    """Write ``newest.json`` for the checkpoint that all ranks have completed."""
    about = {"format": FORMAT_OF_RANKS, "version": VERSION, **newest._asdict()}
    write_json(folder / NEWEST, about, indent=None, temporary=f".{NEWEST}.writing")


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and incomplete ones."""
    sweep(folder)
    ours = [path for path in checkpoints(folder) if _is_ours(path)]
    for path in ours[: max(0, len(ours) - keep)]:
        _discard(path)


def remove_after(folder: Path, after: int) -> None:
    """Remove checkpoints with larger numbers, which not all ranks have completed."""
    for path in checkpoints(folder):
        if checkpoint_number(path) > after and _is_ours(path):
            _discard(path)


def _discard(path: Path) -> None:
    """Rename and remove a checkpoint, unless it has other files."""
    with contextlib.suppress(OSError):  # It has other files.
        if all(FILE.fullmatch(file.name) or file.name == MANIFEST for file in path.iterdir()):
            path = path.rename(path.with_name(f".{path.name}.writing"))
        _remove(path)


def sweep(folder: Path) -> None:
    """Remove incomplete checkpoints."""
    for _, path in _find_numbered(folder):
        if TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):  # It is being written.
                _remove(path)


def _is_ours(path: Path) -> bool:
    """Return whether the manifest has our format; other programs use the same folder names."""
    with contextlib.suppress(OSError), (path / MANIFEST).open("rb") as stream:
        return f'"format":"{FORMAT}"'.encode() in stream.read(200)
    return False


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, without its files."""
    file = path / MANIFEST

    def error(what: str) -> CheckpointError:
        return CheckpointError(f"{file} {what}: it is damaged, or no checkpoint of gas")

    try:
        if file.stat().st_size > MOST_MANIFEST:
            raise error("is longer than a manifest can be")
        text = file.read_bytes()
    except OSError as reason:
        raise CheckpointError(f"{path} is no checkpoint: {reason}") from reason
    whole = read_json(text, error)
    content = whole.get("content") if isinstance(whole, dict) else None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise error("doesn't say that it is one")
    _check_version(path, content)
    again = json.dumps(content, allow_nan=False, separators=(",", ":"))
    if zlib.crc32(again.encode()) != whole.get("crc32"):
        raise error("was changed since it was written")
    return content


def check_files(path: Path, manifest: dict[str, Any]) -> None:
    """Check the files of a checkpoint against the checksums of the manifest."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path / MANIFEST} names no files: it is no checkpoint of gas")
    for name, about in files.items():
        file = path / name
        if not FILE.fullmatch(name) or file.is_symlink():
            raise CheckpointError(f"{path / MANIFEST} names {name!r}, no file of a checkpoint")
        if not isinstance(about, dict) or not file.is_file():
            raise CheckpointError(f"{path} lacks its file {name}: it is damaged")
        size = file.stat().st_size
        if size != about.get("bytes"):
            raise CheckpointError(
                f"{file} has {size:,} bytes, expected {about.get('bytes')}: it is damaged"
            )
        if checksum(file).crc32 != about.get("crc32"):
            raise CheckpointError(f"{file} was changed since it was written: it is damaged")


def _remove(path: Path) -> None:
    """Remove the files of a checkpoint, unless a process is writing it."""
    with lock(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / MANIFEST)
        for file in path.iterdir():
            if FILE.fullmatch(file.name):
                os.unlink(file)
        os.rmdir(path)
