"""Choose and make the store of a history."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from gas.history.codec import Codec
from gas.history.disk import DiskStore
from gas.history.store import MemoryStore, Store, StoreFactory
from gas.native import check_path, free_disk, free_memory, human

TIERS = ("device", "pinned", "host", "disk", "auto")
# The share of the free memory that "auto" uses: the rest is for batches and the graph.
MAX_SHARE = 0.5


def pick_tier(num_bytes: int, path: str | Path | None = None) -> tuple[str, str]:
    """Return the fastest tier with room for ``num_bytes`` of histories, and why it was picked.

    Memory has room if they take at most half of what is free. Then comes the disk of ``path``, by
    default that of temporary files.

    Raises:
        MemoryError: If they fit neither memory nor the disk.
    """
    free = free_memory()
    need = human(num_bytes)
    if torch.cuda.is_available():
        on_device = free_memory(torch.device("cuda"))
        if num_bytes <= MAX_SHARE * on_device:
            return "device", f"{need} fit the GPU, {human(on_device)} are free"
    if num_bytes <= MAX_SHARE * free:
        tier = "pinned" if torch.cuda.is_available() else "host"
        return tier, f"{need} fit memory, {human(free)} are free"
    on_disk = free_disk(Path(path or tempfile.gettempdir()).absolute())
    if num_bytes > on_disk:
        raise MemoryError(
            f"histories of {need} fit neither memory, {human(free)} free, nor the disk, "
            f"{human(on_disk)} free: use a narrower 'dtype' such as torch.int8, or a 'path' on a "
            "larger disk"
        )
    return "disk", f"{need} are too much for memory, {human(free)} are free"


def default_tier(device: torch.device | str | None) -> str:
    """Return the tier of histories by default."""
    try:
        place = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"'device' is {device!r}, expected a device of PyTorch, such as 'cpu' or 'cuda:0'"
        ) from error
    if place.type != "cpu":
        return "device"
    return "pinned" if torch.cuda.is_available() else "host"


def check_tier(store: str | StoreFactory | None, path: str | Path | None) -> None:
    """Raise ``ValueError`` for an unknown ``store``, or a ``path`` for a store without files."""
    if isinstance(store, str) and store not in TIERS:
        raise ValueError(
            f"'store' is {store!r}, expected one of {', '.join(TIERS)}, or a function that makes a "
            "store"
        )
    if store in ("pinned", "device") and not torch.cuda.is_available():
        raise ValueError(f"'store' is {store!r}, but there is no CUDA device: use 'host'")
    if path is not None:
        check_path("path", path, "a file, or a folder for the histories of a model")
    if path is not None and store not in ("disk", "auto"):
        raise ValueError(f"'path' is for store='disk', not for store={store!r}")


def table_device(device: torch.device | str | None) -> torch.device:
    """Return the device of a store on a ``"device"``: the current GPU unless another is given."""
    if device is None or torch.device(device).type == "cpu":
        return torch.device("cuda")
    return torch.device(device)


def make_store(
    store: str | StoreFactory | None,
    num_rows: int,
    width: int,
    codec: Codec,
    device: torch.device | str | None = None,
    path: str | Path | None = None,
) -> Store:
    """Make the store of one history; see :class:`gas.History` for the arguments."""
    check_tier(store, path)
    columns = codec.columns(width)
    if callable(store):
        made = store(num_rows, columns, codec.dtype)
        if (made.num_rows, made.columns, made.dtype) != (num_rows, columns, codec.dtype):
            raise ValueError(
                f"'store' made {made!r}, expected {num_rows} rows of {columns} {codec.dtype}"
            )
        return made
    if store == "auto":
        store, _ = pick_tier(num_rows * codec.row_bytes(width), path)
    tier = default_tier(device) if store is None else store
    if tier == "disk":
        return DiskStore(num_rows, columns, codec.dtype, path, f"{codec} x {width}")
    if tier == "device":
        return MemoryStore(num_rows, columns, codec.dtype, table_device(device))
    return MemoryStore(num_rows, columns, codec.dtype, pin=tier == "pinned")
