"""Stores: the rows of a history, in memory or elsewhere."""

from __future__ import annotations

import abc
import errno
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gas.history.packed import PackedRows
from gas.native import (
    allocate_pinned,
    explain_missing_cuda,
    free_disk,
    free_memory,
    human,
    reads_host_memory,
    zeros,
)


def check_fits(num_bytes: int, device: torch.device | None = None) -> None:
    """Raise ``MemoryError`` if ``num_bytes`` of histories can't be allocated."""
    with explain_missing_cuda("histories"):
        free = free_memory(device)
    if num_bytes > free:
        where = "the device" if device is not None and device.type == "cuda" else "memory"
        raise MemoryError(
            f"histories of {human(num_bytes)} do not fit {where}, {human(free)} are free: use "
            "store='disk', a narrower 'dtype' such as torch.int8, or fewer 'hidden_channels'"
        )


def check_fits_disk(num_bytes: int, path: str | Path | None = None) -> None:
    """Raise ``OSError`` if the disk of ``path`` has no room for new files of histories."""
    folder = Path(path or tempfile.gettempdir()).absolute()
    free = free_disk(folder)
    if num_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"histories of {human(num_bytes)} do not fit the disk, {human(free)} are free: choose "
            "another 'path', a narrower 'dtype' such as torch.int8, or fewer 'hidden_channels'",
            str(folder),
        )


class Store(abc.ABC):
    """Stored rows of one history, all of one size.

    A subclass of your own may keep them anywhere. The transfer engine calls it from its threads,
    one call at a time for each store.

    Args:
        num_rows: The number of rows.
        columns: The number of elements of a row.
        dtype: Their type.
    """

    tier = "custom"
    table: Tensor
    """All rows, of a :class:`TableStore` alone."""
    packed: PackedRows | None = None
    """Copies of rows for a mini-batch's halo; see :meth:`gas.ScalableGNN.pack`."""

    def __init__(self, num_rows: int, columns: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows
        self.columns = columns
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self.num_rows * self.columns * self.dtype.itemsize

    @property
    def direct(self) -> bool:
        """Return whether rows are one table that may be moved without ``read`` and ``write``."""
        return False

    @abc.abstractmethod
    def read(self, index: Tensor, out: Tensor) -> None:
        """Read the rows ``index``, of shape ``[n]``, into ``out``, of shape ``[n, columns]``."""

    @abc.abstractmethod
    def write(self, index: Tensor, rows: Tensor) -> None:
        """Write ``rows``, of shape ``[n, columns]``, to the rows ``index``, of shape ``[n]``."""

    def close(self) -> None:  # noqa: B027  # Some stores have nothing to release.
        """Release files and memory. The store can't be used afterwards."""

    def clone(self) -> Store:
        """Return an independent copy, in the same tier."""
        raise NotImplementedError(f"{type(self).__name__} can't be copied: it has no clone()")

    def resize(self, num_rows: int) -> None:
        """Add rows of zeros at the end, or remove rows there."""
        raise NotImplementedError(f"{type(self).__name__} can't grow: it has no resize()")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.num_rows}, {self.columns}, dtype={self.dtype}, "
            f"tier={self.tier!r})"
        )


class TableStore(Store):
    """A store whose rows are one tensor, ``table``, of shape ``[num_rows, columns]``.

    Unless a subclass overrides ``read`` or ``write``, rows are moved natively.
    """

    def __init__(self, table: Tensor) -> None:
        if not table.is_contiguous():
            raise ValueError("'table' is not contiguous: rows are moved as pieces of memory")
        super().__init__(table.size(0), table.size(1), table.dtype)
        self.table = table

    @property
    def direct(self) -> bool:
        """See :class:`Store`."""
        kind = type(self)
        return kind.read is TableStore.read and kind.write is TableStore.write

    def read(self, index: Tensor, out: Tensor) -> None:
        """See :class:`Store`."""
        out.copy_(self.table.index_select(0, index.to(self.table.device)))

    def write(self, index: Tensor, rows: Tensor) -> None:
        """See :class:`Store`."""
        self.table.index_copy_(0, index.to(self.table.device), rows.to(self.table.device))


class MemoryStore(TableStore):
    """A table in host memory, in pinned memory that a GPU reads directly, or on a device.

    Args:
        num_rows: The number of rows, zeros at first.
        columns: The number of elements of a row.
        dtype: Their type.
        device: The device of the table. (default: the CPU)
        pin: Pin host memory; needs CUDA. (default: ``False``)

    Raises:
        MemoryError: If there isn't enough memory; nothing has been allocated then.
    """

    def __init__(
        self,
        num_rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pin: bool = False,
    ) -> None:
        device = torch.device(device)
        if device.type != "cpu":
            self.tier = "device"
        else:
            self.tier = "pinned" if pin else "host"
        num_bytes = num_rows * columns * dtype.itemsize
        check_fits(num_bytes, device)
        is_direct = self.tier == "host" or (self.tier == "pinned" and reads_host_memory())
        if is_direct and num_bytes > 0:
            memory = allocate_pinned(num_bytes) if pin else zeros(num_bytes)
            table = torch.from_numpy(memory).view(dtype).view(num_rows, columns)
        else:
            pin = pin and num_bytes > 0
            table = torch.zeros(num_rows, columns, dtype=dtype, device=device, pin_memory=pin)
        super().__init__(table)

    def clone(self) -> MemoryStore:
        """See :class:`Store`."""
        other = MemoryStore(
            self.num_rows, self.columns, self.dtype, self.table.device, self.tier == "pinned"
        )
        other.table.copy_(self.table)
        return other

    def resize(self, num_rows: int) -> None:
        """See :class:`Store`."""
        with torch.inference_mode(False):  # Inference tensors have no version counter.
            is_pinned, kept = self.tier == "pinned", min(num_rows, self.num_rows)
            other = MemoryStore(num_rows, self.columns, self.dtype, self.table.device, is_pinned)
            other.table[:kept] = self.table[:kept]
        self.table, self.num_rows = other.table, num_rows


StoreFactory = Callable[[int, int, torch.dtype], Store]
