"""The history: the last known embedding of every node, after one layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.cuda import CudaLink
from gas.history.disk import DiskStore
from gas.history.store import StoreFactory, TableStore
from gas.history.tiers import make_store
from gas.history.transfer import Copies, HostLink, Pull, TransferEngine
from gas.native import (
    RowIndex,
    check_index,
    check_integer,
    check_range,
    check_row_index,
    renamed,
    warn,
)


class History(torch.nn.Module):
    """A table with the last embedding that was pushed for every node.

    The table is neither part of ``state_dict`` nor moved by ``.to()``: it can be larger than the
    device that the model lives on. ``pull`` returns rows on the model's device.

    Args:
        num_embeddings: The number of rows, one per node.
        embedding_dim: The width of a row.
        device: The device of the table. (default: the CPU)
        dtype: How rows are stored: ``torch.float64``, ``float32``, ``bfloat16``, ``float16``, or
            ``int8`` with one scale per row; see :class:`gas.history.Codec`. Pushes are rounded.
            (default: ``torch.float32``)
        store: ``"device"``, ``"pinned"`` (host memory that a GPU reads directly), ``"host"``,
            ``"disk"`` (a file mapped into memory), ``"auto"`` (the fastest with room), or a
            function ``(num_rows, columns, dtype) -> Store``. (default: ``"device"`` where
            ``device`` is one, else ``"pinned"`` with CUDA and ``"host"`` without)
        path: The file of a ``"disk"`` store; an existing one is opened with its rows. Their ages
            are stored in a second file, with ``.age`` appended to the name. Every process needs its
            own file. (default: a temporary file)
        engine: The engine that moves the rows; the histories of a model share one. (default: a new
            one with ``io="serial"``)

    Raises:
        ValueError: If an argument is unusable, naming it.
        MemoryError: If there is no room for the table; nothing has been allocated then.
        OSError: If ``path`` can't be written, or the disk is full.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str | None = None,
        dtype: Codec | torch.dtype | str = torch.float32,
        *,
        store: str | StoreFactory | None = None,
        path: str | Path | None = None,
        engine: TransferEngine | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            check_integer(name, value, 0)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.codec = Codec.of(dtype)
        self._row_bytes = self.codec.row_bytes(embedding_dim)
        self._value_dtype = self.codec.value_dtype
        with torch.inference_mode(False):  # Rows can be changed outside of that mode, too.
            self.store = make_store(store, num_embeddings, embedding_dim, self.codec, device, path)
            # The number of the push that wrote each row, from 1; 0 for rows never written.
            self._written_at = torch.zeros(num_embeddings, dtype=torch.int32, device="cpu")
        self.engine = TransferEngine("serial") if engine is None else engine
        self._device = torch.device("cpu")
        self._link = self._make_link()
        self._ages = None
        if isinstance(self.store, DiskStore) and path is not None:
            try:
                self._ages = DiskStore(num_embeddings, 1, torch.int32, f"{path}.age", "age")
            except BaseException:
                self.store.close()
                raise
            if not self.store.resumed:  # The ages belong to rows that no longer exist.
                self._ages.table.zero_()
            self._written_at = self._ages.table.view(-1)
            if num_embeddings and int(self._written_at.min()) < 0:
                self.store.close()
                self._ages.close()
                raise ValueError(
                    f"'path' {f'{path}.age'!r} holds ages that can't be: remove the file, and the "
                    "rows count as never written"
                )
        self._num_pushes = int(self._written_at.max()) if num_embeddings else 0
        self._num_unwritten = int((self._written_at == 0).sum())
        self.num_resets = 0  # Resets and restorations, which aren't counted as pushes.
        self._num_received = 0
        self._warned = False
        self._closed = False
        self._dtype = self._value_dtype  # The type of the last pushed rows: that of the model.

    def _make_link(self) -> HostLink:
        """Make the link between the store and the model's device."""
        options = (self.store, self.codec, self.embedding_dim, self.engine)
        if self._device.type == "cuda":
            return CudaLink(*options, self._device)
        return HostLink(*options)

    @property
    def device(self) -> torch.device:
        """The device of the table."""
        table = getattr(self.store, "table", None)
        return torch.device("cpu") if table is None else table.device

    @property
    def emb(self) -> Tensor:
        """Every row, of shape ``[N, embedding_dim]``.

        It is the table itself, which may be changed in place, or a copy if rows are stored as
        ``int8`` or in a store without a table. After :meth:`gas.ScalableGNN.pack`, change it by
        operators of PyTorch only.
        """
        self._check_open()
        self._link.wait()
        if isinstance(self.store, TableStore) and self.codec.dtype == self._value_dtype:
            self._link.note_changes()
            return self.store.table
        every = torch.arange(self.num_embeddings, device="cpu")
        return self._link.pull(every, 0, self._value_dtype).wait()

    def reset_parameters(self) -> None:
        """Reset all rows to zeros that count as never written."""
        self._check_open()
        self._link.wait()
        if isinstance(self.store, TableStore):
            self.store.table.zero_()
            self._link.note_changes()
        else:
            zeros = torch.zeros(self.num_embeddings, self.embedding_dim)
            self._link.push(zeros, [(0, self.num_embeddings)])
        self._written_at.zero_()
        self._num_pushes = 0
        self._num_unwritten = self.num_embeddings
        self.num_resets += 1
        self._warned = False

    def wait(self) -> None:
        """Wait until all pushed rows are stored, and raise errors of the transfers."""
        self._check_open()
        self._link.wait()

    def close(self) -> None:
        """Write pending pushes and close the store. The history can't be used afterwards."""
        if self._closed:
            return
        self._closed = True
        try:
            self._link.wait()
        finally:
            self.store.close()
            if self._ages is not None:
                self._written_at = self._written_at.clone()
                self._ages.close()

    def _check_open(self) -> None:
        """Refuse a history that has been closed."""
        if self._closed:
            raise RuntimeError("this history has been closed: make a new one to go on")

    @property
    def age(self) -> Tensor:
        """The number of pushes to this history since each row was written, of shape ``[N]``, int32.

        0 means written by the last push, -1 never written.
        """
        age = self._num_pushes - self._written_at
        return age.masked_fill_(self._written_at == 0, -1)

    @property
    def is_written(self) -> bool:
        """Return whether every row was pushed at least once."""
        return self._num_unwritten == 0

    @property
    def written(self) -> Tensor:
        """Return whether each row was ever pushed, of shape ``[N]``, bool."""
        return self._written_at > 0

    expect = renamed("History.expect", "read_ahead")
    in_place = renamed("History.in_place", "stored_rows")
    stored = renamed("History.stored", "read_stored")

    # Rows as they are stored ----------------------------------------------------------------------

    def read_stored(self, index: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows as they are stored, on the CPU, read-only.

        Args:
            index: The rows, of shape ``[n]``, int64, on the CPU; consecutive rows are fastest.
            out: The tensor to write to, of shape ``[n, columns]``. (default: a view of the table if
                rows are consecutive, else a new tensor)
        """
        self.wait()
        size, store = index.numel(), self.store
        if out is None:
            first = int(index[0]) if size else 0
            if store.direct and (size == 0 or int(index[-1]) - first == size - 1):
                return store.table[first : first + size].cpu()
            out = torch.empty(size, store.columns, dtype=store.dtype, device="cpu")
        self._link.read_stored(index, out)
        return out

    @torch.no_grad()
    def restore(
        self, blocks: Iterable[tuple[Tensor, Tensor]], written_at: Tensor, num_pushes: int
    ) -> None:
        """Restore saved rows.

        Args:
            blocks: Pairs of an index of shape ``[n]`` and the stored rows, ``[n, columns]``.
            written_at: The number of the push that wrote each row, from 1; 0 for rows that were
                never written; of shape ``[N]``, int32.
            num_pushes: The number of pushes at that time.
        """
        self.wait()
        for index, rows in blocks:
            self.store.write(index, rows)
        if isinstance(self.store, TableStore):
            self._link.note_changes()
        self._written_at.copy_(written_at)
        self._num_pushes = num_pushes
        self._num_unwritten = int((written_at == 0).sum())
        self.num_resets += 1
        self._warned = False

    def resize(self, num_embeddings: int) -> None:
        """Add rows at the end, which count as never written, or remove rows there.

        Args:
            num_embeddings: The new number of rows.

        Raises:
            ValueError: If ``num_embeddings`` isn't a number of rows.
            MemoryError: If there is no room for them.
            OSError: If the disk has no room for them.
        """
        check_integer("num_embeddings", num_embeddings, 0)
        self.wait()
        more = num_embeddings - self.num_embeddings
        if not more:
            return
        self.store.resize(num_embeddings)
        if self._ages is not None:
            self._ages.resize(num_embeddings)
            self._written_at = self._ages.table.view(-1)
        else:
            with torch.inference_mode(False):
                self._written_at = torch.nn.functional.pad(self._written_at, (0, more))
        self.num_embeddings = num_embeddings
        self._num_unwritten = int((self._written_at == 0).sum())
        self._num_received += 1  # Earlier rows and their copies are outdated.
        self._warned = False
        self._link = self._make_link()

    def mark_stale(self, index: Tensor) -> None:
        """Set the age of rows to the maximum, so that they are the first to be written again.

        Args:
            index: The rows, of shape ``[n]``, int64; rows never written stay unwritten.
        """
        self.wait()
        check_range("index", index, self.num_embeddings)
        if self._num_pushes == 1:  # All written rows have the number 1, and 0 means unwritten.
            self._written_at *= 2
            self._num_pushes = 2
        self._written_at[index] = self._written_at[index].clamp(max=1)
        self._num_received += 1  # See resize().

    @torch.no_grad()
    def receive(
        self, rows: Tensor, ranges: Sequence[tuple[int, int]], pushes: int, is_stored: bool
    ) -> None:
        """Store rows that another process has pushed, without counting a push.

        Args:
            rows: The rows, of shape ``[n, columns]`` or ``[n, embedding_dim]``, on the CPU.
            ranges: The first row and the number of rows of each range that they fill, in order.
            pushes: The number of pushes when the other process pushed, for the rows' age.
            is_stored: Whether the rows are encoded already.
        """
        self.wait()
        if is_stored:
            self._link.store_rows(rows, ranges)
        else:
            self._link.push(rows, ranges)
        self._num_received += 1
        self._note_written(ranges, max(pushes, 1))

    @property
    def num_pushes(self) -> int:
        """The number of pushes so far."""
        return self._num_pushes

    @property
    def written_at(self) -> Tensor:
        """The number of the push that wrote each row, from 1; 0 for none; ``[N]``, int32."""
        return self._written_at

    @property
    def changes(self) -> tuple[int, int, int]:
        """The numbers of changes by the caller, pushes, and changes by other processes."""
        table = getattr(self.store, "table", None)
        by_hand = 0 if table is None or table.is_inference() else table._version
        return by_hand, self._num_pushes, self._num_received

    @property
    def is_packed(self) -> bool:
        """Return whether rows were arranged by :meth:`gas.ScalableGNN.pack`."""
        return self.store.packed is not None

    # Pushing --------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(
        self,
        x: Tensor,
        n_id: Tensor | None = None,
        offset: Tensor | Sequence[int] | None = None,
        count: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Store rows; the values are those at the call.

        Args:
            x: The rows, of shape ``[n, embedding_dim]``, of any floating-point type and device.
            n_id: The node of each row, of shape ``[n]``, int64, without duplicates. (default: every
                node, in order)
            offset: First row of each contiguous range; used instead of ``n_id`` when given,
                because ranges are copied faster. Of ``n_id``, the ends of each are compared.
            count: Number of rows of each range, with ``offset``.

        Raises:
            ValueError: If a shape doesn't fit; nothing was stored then.
            IndexError: If a row doesn't exist; nothing was stored then.
        """
        self._check_open()
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            what = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"'x' is a {what}, expected a dense tensor of rows")
        if x.dim() != 2 or x.size(1) != self.embedding_dim:
            raise ValueError(
                f"'x' has shape {list(x.shape)}, expected [rows, {self.embedding_dim}], the width "
                "of this history"
            )
        if not x.is_floating_point():
            raise ValueError(
                f"'x' has dtype {x.dtype}, expected a floating-point type: pass x.float()"
            )
        where = check_row_index(x.size(0), n_id, offset, count, self.num_embeddings)
        self._link.push(x.detach(), where)
        if self.engine.io == "none":
            return
        self.engine.pushed_bytes += x.size(0) * self._row_bytes
        self._dtype = x.dtype
        self._num_pushes += 1
        self._note_written(where, self._num_pushes)

    def _note_written(self, where: RowIndex, number: int) -> None:
        """Note that rows were written by the push of a number."""
        written_at = self._written_at.numpy()  # Short slices are written faster in numpy.
        if isinstance(where, Tensor):
            written_at[where.numpy()] = number
            if self._num_unwritten:
                self._num_unwritten = int((written_at == 0).sum())
            return
        for first, size in where:
            rows = written_at[first : first + size]
            if self._num_unwritten:
                self._num_unwritten -= int((rows == 0).sum())
            rows[:] = number

    # Pulling --------------------------------------------------------------------------------------

    @torch.no_grad()
    def pull(self, n_id: Tensor | None = None) -> Tensor:
        """Read rows into a new tensor on the model's device.

        Args:
            n_id: The nodes to read, of shape ``[n]``, int64. (default: every node)

        Returns:
            A tensor of shape ``[n, embedding_dim]``, of the stored type (float32 for ``int8``),
            which is never overwritten while it is referenced.

        Raises:
            IndexError: If a row doesn't exist.
        """
        if n_id is None:
            n_id = torch.arange(self.num_embeddings, device="cpu")
        pull = self.start_pull(n_id, ahead=False, dtype=self._value_dtype)
        return pull.wait().to(self._value_dtype)

    @torch.no_grad()
    def start_pull(
        self,
        n_id: Tensor,
        space: int = 0,
        own: Tensor | None = None,
        copies: Copies | None = None,
        ahead: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Pull:
        """Begin to read rows; ``wait()`` on the result returns them.

        They are the rows at this call: later pushes don't change them.

        Args:
            n_id: The nodes to read, of shape ``[n]``, int64.
            space: The result has this many rows in front, with unspecified values: of shape
                ``[space + n, embedding_dim]``. (default: ``0``)
            own: The batch's own nodes, if ``n_id`` is its halo: the rows that
                :meth:`gas.ScalableGNN.pack` has arranged for the batch are found by them.
                (default: rows are read from the table)
            copies: Copies of ``n_id`` on devices. A new copy is added, for the other histories
                that read the same rows. (default: none are kept)
            ahead: Overlap with the computation, in an engine with ``io="concurrent"``. ``False`` if
                ``wait()`` follows at once. (default: ``True``)
            dtype: The type that the caller computes with. (default: that of the last pushed rows)
        """
        self._check_open()
        check_index("n_id", n_id)
        if self._device.type == "cpu":
            n_id = n_id.cpu()
        elif n_id.device.type == "cpu":  # Only the loader checks ids on a device.
            check_range("n_id", n_id, self.num_embeddings)
        self._warn_unwritten(n_id)
        ahead = ahead and self.engine.io == "concurrent"
        pull = self._link.pull(n_id, space, dtype or self._dtype, ahead, own, copies)
        if self.engine.io != "none":
            self.engine.pulled_bytes += n_id.numel() * self._row_bytes
        return pull

    def read_ahead(self, n_id: Tensor, own: Tensor) -> None:
        """Let the system read ahead the rows of a pull, if they are packed.

        Args:
            n_id: The halo of a batch, of shape ``[n]``, int64.
            own: The batch's own nodes.
        """
        if not self._closed and self.engine.io != "none" and self.store.packed is not None:
            self.store.packed.read_ahead(n_id, own)

    @property
    def supports_overlap(self) -> bool:
        """Return whether started pulls overlap with the computation."""
        return self._link.supports_overlap

    def stored_rows(
        self, n_id: Tensor, dtype: torch.dtype, copies: Copies | None = None
    ) -> StoredRows | None:
        """Return rows to be read in place instead of being pulled; ``None`` if that isn't possible.

        It is possible if the table is on the device of the model, and of the type ``dtype``.

        Args:
            n_id: The nodes to read, of shape ``[n]``, int64.
            dtype: The type that the caller computes with.
            copies: See :meth:`start_pull`.
        """
        self._check_open()
        check_index("n_id", n_id)
        where = self._link.table_and_index(n_id, dtype, copies)
        if where is None:
            return None
        if n_id.device.type == "cpu":  # Only the loader checks ids on a device.
            check_range("n_id", n_id, self.num_embeddings)
        self._warn_unwritten(n_id)
        return StoredRows(self, *where, self.changes)

    def has_changed(self, index: Tensor, version: tuple[int, int, int]) -> bool:
        """Return whether rows may have changed since an earlier version of :attr:`changes`."""
        by_hand, pushes, received = version
        if self._closed or self.changes[0] != by_hand or self._num_received != received:
            return True
        return self._num_pushes != pushes and bool((self._written_at[index.cpu()] > pushes).any())

    def _warn_unwritten(self, n_id: Tensor) -> None:
        """Warn once if rows are read that were never written."""
        if self._num_unwritten == 0 or self._warned or self.engine.io == "none":
            return
        check_range("n_id", n_id, self.num_embeddings)
        missing = int((self._written_at[n_id.cpu()] == 0).sum())
        if missing:
            self._warned = True
            warn(
                f"A history was read before it was filled: {missing} of {n_id.numel()} rows are "
                "zeros that were never pushed. Training recovers after the first epoch; to start "
                "without them, call model.refresh(graph) first.",
            )

    # Module protocol ------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> History:
        device = fn(torch.empty(0, device=self._device)).device
        if device != self._device:
            self._link.wait()
            self._device = device
            self._link = self._make_link()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        self._link.wait()
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        memo[id(self.store)] = self.store.clone()
        memo[id(self._ages)] = None
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    def __getstate__(self) -> dict[str, Any]:
        # Pending transfers and streams belong to this object only.
        return {name: value for name, value in self.__dict__.items() if name != "_link"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link = self._make_link()

    def extra_repr(self) -> str:
        """Return the sizes and the store of the table."""
        place = f"store={self.store.tier!r}"
        if isinstance(self.store, TableStore) and self.store.tier == "device":
            place = f"device={self.store.table.device}"
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.codec}, {place}"


@dataclass(eq=False)
class StoredRows:
    """Rows of a history that are read in place.

    * ``table``: all rows, of shape ``[N, width]``, read-only.
    * ``index``: the rows to read, of shape ``[n]``, int64, on the table's device.
    * ``version``: the version of the history at the call of :meth:`gas.History.stored_rows`.
    """

    history: History
    table: Tensor
    index: Tensor
    version: tuple[int, int, int]
    _copy: Tensor | None = None

    def check(self) -> None:
        """Raise ``RuntimeError`` if the rows may have changed since ``version``."""
        if self.history.has_changed(self.index, self.version):
            raise RuntimeError(
                "these Rows are read where a history stores them, and it has changed since "
                "push_and_pull(..., rows=True): read them before the next batch is pushed (a "
                "checkpointed block reads them in the backward pass), or ask for a tensor, without "
                "rows=True"
            )

    def pull(self) -> Tensor:
        """Copy the rows, of shape ``[n, width]``, once; the copy is read-only."""
        if self._copy is None:
            self.check()
            self._copy = self.history.pull(self.index)
        return self._copy
