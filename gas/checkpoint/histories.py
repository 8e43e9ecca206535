"""Histories in checkpoints: all rows, or those that changed since an earlier checkpoint.

If less than half of a history has changed since an earlier checkpoint, its file is hard-linked, and
a second file has the changed rows. Changes by pushes are tracked by row; a history that was changed
by other means is written as a whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from gas.checkpoint.files import FolderWriter, KnownFile, file_identity
from gas.checkpoint.tensors import (
    BLOCK,
    Blocks,
    CheckpointError,
    Checksum,
    TensorFile,
    write_tensors,
)
from gas.scalable import HeteroModel, ScalableGNN

if TYPE_CHECKING:
    from gas.history import History

MODELS = (ScalableGNN, HeteroModel)  # Models with histories.
SHARE = 0.5  # All rows are written if at least this fraction has changed.


class _Base(NamedTuple):
    """A file with all rows of a history at an earlier time."""

    file: KnownFile
    by_others: tuple[int, int, int]  # The numbers of changes of the history at that time, without
    pushes: int  # pushes, and of pushes.


# The last such file of each history of this process.
_bases: weakref.WeakKeyDictionary[History, _Base] = weakref.WeakKeyDictionary()

HistoryWriter = Callable[[FolderWriter], dict[str, Any]]


def name_histories(model: ScalableGNN | HeteroModel) -> dict[str, History]:
    """Return the histories of a model and its views, by the names of their files."""
    found = {f"history_{number}": history for number, history in enumerate(model.histories)}
    for view, bank in enumerate(model.view_histories or ()):
        for number, history in enumerate(bank):
            found[f"view_{view}_history_{number}"] = history
    return found


def history_writer(name: str, history: History, at_once: bool) -> HistoryWriter:
    """Return a function that writes the current state of a history.

    Args:
        name: The name of its files.
        history: The history.
        at_once: Whether it is called before the history changes. Otherwise all rows are copied now.
    """
    history.wait()
    base = _bases.get(history)
    pushes, every = history.num_pushes, history.num_embeddings
    by_others = _count_other_changes(history)
    written_at = history.written_at if at_once else history.written_at.clone()
    changed = None
    if at_once and base is not None and base.by_others == by_others:
        later = (written_at > base.pushes).nonzero().view(-1)
        changed = later if later.numel() < SHARE * every else None
    pieces = None if at_once else [block.clone() for block in _read_in_blocks(history, None)]
    about = {
        "num_rows": every,
        "width": history.embedding_dim,
        "codec": str(history.codec),
        "pushes": pushes,
    }

    def rows(index: Tensor | None) -> Blocks:
        size = every if index is None else index.numel()
        blocks = _read_in_blocks(history, index) if pieces is None else iter(pieces)
        return Blocks(history.store.dtype, (size, history.store.columns), blocks)

    def write(writer: FolderWriter) -> dict[str, Any]:
        whole, part = f"{name}.safetensors", f"{name}_changes.safetensors"
        if changed is not None and base is not None and writer.link(whole, base.file):
            part_of = {"index": changed, "rows": rows(changed), "written_at": written_at}
            writer.write(part, _make_content(part_of, about))
            return {**about, "files": [whole, part]}
        known = writer.write(
            whole, _make_content({"rows": rows(None), "written_at": written_at}, about)
        )
        _bases[history] = _Base(known, by_others, pushes)
        return {**about, "files": [whole]}

    return write


def _count_other_changes(history: History) -> tuple[int, int, int]:
    """Return the numbers of changes of a history that aren't pushes."""
    by_hand, _, received = history.changes
    return by_hand, received, history.num_resets


def _make_content(tensors: dict[str, Any], about: dict[str, Any]) -> Callable[[BinaryIO], Checksum]:
    metadata = {key: str(value) for key, value in about.items()}
    return lambda stream: write_tensors(stream, tensors, metadata)


def _read_in_blocks(history: History, index: Tensor | None) -> Iterator[Tensor]:
    """Yield the rows ``index`` of a history, or all if it is ``None``, as they are stored."""
    row_bytes = max(1, history.store.columns * history.store.dtype.itemsize)
    size, step = history.num_embeddings, max(1, BLOCK // row_bytes)
    for first in range(0, size if index is None else index.numel(), step):
        if index is None:
            yield history.read_stored(torch.arange(first, min(first + step, size)))
        else:
            yield history.read_stored(index[first : first + step])


class StoredHistory:
    """A history in a checkpoint, whose files are checked by the constructor.

    Args:
        path: The checkpoint.
        name: The name of the history.
        about: Its entry in the manifest.
        history: The history to restore, or one with the same width and codec.
        num_rows: The number of rows in the checkpoint. (default: that of ``history``)

    Raises:
        CheckpointError: If its files don't agree with the manifest.
        ValueError: If it doesn't fit ``history``.
    """

    def __init__(
        self, path: Path, name: str, about: Any, history: History, num_rows: int | None = None
    ) -> None:
        found = about if isinstance(about, dict) else {}
        size = history.num_embeddings if num_rows is None else num_rows
        wanted = {"num_rows": size, "width": history.embedding_dim, "codec": str(history.codec)}
        for key, value in wanted.items():
            if found.get(key) != value:
                raise ValueError(
                    f"'model' has {name!r} with {key} {value}, but {path} has it with "
                    f"{found.get(key)}: make the model as it was, or pass histories=False, which "
                    "loads the rest"
                )
        names, pushes = found.get("files"), found.get("pushes")
        whole, part = f"{name}.safetensors", f"{name}_changes.safetensors"
        if names not in ([whole], [whole, part]) or not is_count(pushes):
            raise CheckpointError(f"{path} doesn't say how {name!r} was written: it is damaged")
        self.pushes = cast(int, pushes)
        self.files = [TensorFile(path / file) for file in names]
        columns, dtype = history.store.columns, history.store.dtype
        for file in self.files:
            self._check(file, "rows", dtype, columns, size if file is self.files[0] else None)
            self._check(file, "written_at", torch.int32, None, size)
        self.written_at = self.files[-1].read("written_at")
        if size and not 0 <= int(self.written_at.min()) <= int(self.written_at.max()) <= 2**31 - 2:
            raise CheckpointError(f"{self.files[-1].path} has rows that were written before 0")
        if size and int(self.written_at.max()) > self.pushes:
            raise CheckpointError(
                f"{self.files[-1].path} has rows that were written by push "
                f"{int(self.written_at.max())}, but there were {self.pushes}"
            )
        self.index: Tensor | None = None
        if len(self.files) > 1:
            self.index = index = self.files[1].read("index")
            _, shape = self.files[1].dtype_and_shape("rows")
            fits = index.dtype == torch.int64 and index.dim() == 1 and len(index) == shape[0]
            if not fits or (len(index) and not 0 <= int(index[0]) <= int(index[-1]) < size):
                raise CheckpointError(f"{self.files[1].path} has rows that don't exist")
            if bool((index.diff() <= 0).any()):
                raise CheckpointError(f"{self.files[1].path} has a row twice")

    @staticmethod
    def _check(
        file: TensorFile, name: str, dtype: torch.dtype, columns: int | None, size: int | None
    ) -> None:
        found, shape = file.dtype_and_shape(name)
        dims = 1 if columns is None else 2
        fits = found == dtype and len(shape) == dims and (size is None or shape[0] == size)
        if not fits or (columns is not None and shape[1] != columns):
            raise CheckpointError(
                f"{file.path} has {name!r} of {found} and shape {list(shape)}, expected {dtype} "
                f"and {[size, columns][:dims]}"
            )

    def restore(self, history: History, written: Checksum) -> None:
        """Restore a history; ``written`` is the checksum of the first file."""
        history.restore(self.rows(), self.written_at, self.pushes)
        _bases.pop(history, None)
        if self.index is None:
            known = KnownFile(file_identity(self.files[0].path), written)
            _bases[history] = _Base(known, _count_other_changes(history), self.pushes)

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of row numbers and stored rows; later rows replace earlier ones."""
        for first, rows in self.files[0].blocks("rows"):
            yield torch.arange(first, first + rows.size(0)), rows
        if self.index is not None:
            for first, rows in self.files[1].blocks("rows"):
                yield self.index[first : first + rows.size(0)], rows


def is_count(value: Any) -> bool:
    """Return whether a value is a valid number of pushes or rows."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
