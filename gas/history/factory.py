"""Make the histories of one model on one graph, all of them or none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.disk import DiskStore
from gas.history.history import History
from gas.history.store import StoreFactory, check_fits, check_fits_disk
from gas.history.tiers import check_tier, default_tier, pick_tier, table_device
from gas.history.transfer import TransferEngine
from gas.native import process_rank

ROWS_PER_COPY = 65536


@dataclass(frozen=True)
class HistoryFactory:
    """Store and precision of a model's histories; see :class:`gas.ScalableGNN`."""

    widths: Sequence[int]
    device: torch.device | str | None
    codec: Codec
    store: str | StoreFactory | None
    path: str | Path | None

    def make(self, num_nodes: int, engine: TransferEngine, folder: str = "") -> list[History]:
        """Make a history for every width.

        Args:
            num_nodes: The number of rows of each.
            engine: The engine that moves the rows.
            folder: The folder of their files, relative to ``path``. (default: ``""``)

        Raises:
            MemoryError: If there is no room for all of them; none has been made then.
            OSError: If the disk has no room for all of them; none has been made then.
        """
        store = self.store
        check_tier(store, self.path)
        num_bytes = [num_nodes * self.codec.row_bytes(width) for width in self.widths]
        if store == "auto":
            store, why = pick_tier(sum(num_bytes), self.path)
            print(f"Histories: store={store!r}, because {why}", file=sys.stderr)
        tier = default_tier(self.device) if store is None else store
        files: list[Path | None] = [None] * len(self.widths)
        place = None if self.path is None else _process_folder(self.path) / folder
        if tier == "disk" and place is not None:
            files = [place / f"history_{layer}" for layer in range(len(self.widths))]
        if tier == "device":
            check_fits(sum(num_bytes), table_device(self.device))
        elif tier in ("host", "pinned"):
            check_fits(sum(num_bytes))
        elif tier == "disk":
            new = [
                size
                for size, file in zip(num_bytes, files, strict=True)
                if file is None or not file.exists()
            ]
            check_fits_disk(sum(new), self.path)
        made: list[History] = []
        try:
            for width, file in zip(self.widths, files, strict=True):
                made.append(
                    History(
                        num_nodes, width, self.device, self.codec, store=store, path=file,
                        engine=engine,
                    )
                )  # fmt: skip
        except BaseException:
            for history in made:
                history.close()
            raise
        if any(getattr(history.store, "resumed", False) for history in made):
            print(
                f"Histories: resuming with the rows in {place}. If they are of another graph "
                "of the same size, or of other parts, name another 'path', or call "
                "model.reset_parameters()",
                file=sys.stderr,
            )
        return made

    def discard(self, histories: Sequence[History]) -> None:
        """Close histories and remove the files that were made for them; files from before stay."""
        for history in histories:
            store = history.store
            history.close()
            if self.path is not None and isinstance(store, DiskStore) and not store.resumed:
                store.path.unlink()
                store.path.with_name(f"{store.path.name}.age").unlink()

    def clone(self, histories: Sequence[History], engine: TransferEngine) -> list[History]:
        """Make histories with the written rows of others.

        Raises:
            MemoryError: If there is no room for all of them; none has been made then.
            OSError: If the disk has no room for all of them; none has been made then.
        """
        made = self.make(histories[0].num_embeddings, engine) if histories else []
        for old, new in zip(histories, made, strict=True):
            copy_written_rows(old, new)
        return made


def copy_written_rows(source: History, target: History, nodes: Tensor | None = None) -> None:
    """Push the written rows of a history to another one.

    Args:
        source: The history to read.
        target: The history to write.
        nodes: The row of ``source`` for each row of ``target``. (default: the same rows)
    """
    written = source.written if nodes is None else source.written[nodes]
    for rows in written.nonzero().view(-1).split(ROWS_PER_COPY):
        target.push(source.pull(rows if nodes is None else nodes[rows]), rows)


def _process_folder(path: str | Path) -> Path:
    """Return the folder of this process: processes that train together share one path."""
    rank, size = process_rank()
    return Path(path) if size == 1 else Path(path) / f"rank_{rank}"
