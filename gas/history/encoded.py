"""Features in the stores and codecs of histories: :func:`encode`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gas.history.codec import Codec
from gas.history.packed import PackedRows
from gas.history.packing import Packing
from gas.history.store import Store, StoreFactory, TableStore
from gas.history.tiers import check_tier, default_tier, make_store, pick_tier
from gas.native import buffers, transfer
from gas.native.checks import check_index, check_range
from gas.native.dropout import dropout, gather_decode_dropout, gather_dropout
from gas.native.encoded_rows import EncodedRows
from gas.native.memory import free_memory, human
from gas.native.rows import gather_rows

BLOCK = 1 << 22  # Values that are encoded at once: 16 MiB of float32.


def encode(
    x: Tensor,
    dtype: Codec | torch.dtype | str = "int8",
    store: str | StoreFactory | None = None,
    path: str | Path | None = None,
) -> Tensor:
    """Stores features as histories are stored: in fewer bytes, or on disk.

    What it returns is a tensor, of the shape of ``x``, to PyTorch, PyG and everything of gas::

        data.x = gas.encode(data.x, "int8")
        data.edge_attr = gas.encode(data.edge_attr, "float16", store="disk")
        graph = gas.cluster(data, num_parts=40, model=model)

    Rows of it, ``x[index]``, are decoded alone: mini-batches read theirs where they lie. They are
    float32, and float64 where they are stored so. Renumbering the graph moves them as they are, to
    a store of the same kind. Whatever else is done with it decodes all. It can't be written to.

    Rows are encoded a few at a time, so that ``x`` may be a mapped file larger than memory.

    Args:
        x: The features, of shape ``[rows, width]``, of any floating-point type, on the CPU: of
            nodes, or of edges.
        dtype: How rows are stored: ``"float64"``, ``"float32"``, ``"bfloat16"``, ``"float16"``, or
            ``"int8"`` with one scale per row; see :class:`gas.history.Codec`. (default: ``"int8"``)
        store: ``"host"``, ``"pinned"``, ``"disk"`` (a file mapped into memory), ``"auto"`` (memory
            if it has room), or a function ``(num_rows, columns, dtype) -> Store``.
            (default: ``"pinned"`` with CUDA, else ``"host"``)
        path: The file of a ``"disk"`` store, which mustn't be there. (default: a temporary one,
            removed with the features)

    Raises:
        ValueError: If an argument is unusable, or a value is too large for ``dtype``, naming it.
        MemoryError: If there is no room; nothing has been allocated then.
        OSError: If ``path`` can't be written, or the disk is full.
    """
    codec = Codec.of(dtype)
    _check_features(x)
    kind = _kind(store, path, x.size(0) * codec.row_bytes(x.size(1)))
    if path is not None and Path(path).exists():
        raise ValueError(f"'path' is {str(path)!r}, which is there: remove it, or name another")
    out = Encoded.of(make_store(kind, x.size(0), x.size(1), codec, None, path), codec, x, kind)
    try:
        for first, last in _blocks(x.size(0), x.size(1)):
            out._write(first, _stored_values(x[first:last].detach(), codec, first))
    except BaseException:
        out.store.close()
        if path is not None:
            Path(path).unlink(missing_ok=True)
        raise
    return out


def _check_features(x: Any) -> None:
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        what = x.layout if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(
            f"'x' is {what}, expected a dense tensor of shape [rows, width]: leave sparse features "
            "as they are, or pass x.to_dense()"
        )
    if x.dim() != 2 or not x.is_floating_point() or x.device.type != "cpu":
        raise ValueError(
            f"'x' is {x.dtype} of shape {list(x.shape)} on {x.device}, expected floating-point "
            "features of shape [rows, width] on the CPU: pass x.float(), x.view(-1, 1) or x.cpu()"
        )


def _kind(
    store: str | StoreFactory | None, path: str | Path | None, num_bytes: int
) -> str | StoreFactory:
    """The store that is meant, if it has room."""
    if store == "device":
        raise ValueError(
            "'store' is 'device', but mini-batches are cut on the CPU, which reads features: use "
            "'pinned', 'host' or 'disk'"
        )
    check_tier(store, path)
    if store == "auto":
        tier, _ = pick_tier(num_bytes, path)
        store = "pinned" if tier == "device" else tier
    kind = default_tier(None) if store is None else store
    free = free_memory()
    if kind in ("host", "pinned") and num_bytes > free:
        raise MemoryError(
            f"'x' takes {human(num_bytes)} encoded, and {human(free)} are free: use store='disk', "
            "or a narrower 'dtype'"
        )
    return kind


def _blocks(num_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are looked at together."""
    step = max(1, BLOCK // max(1, width))
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def _stored_values(x: Tensor, codec: Codec, first: int) -> Tensor:
    """Some rows in the type that their codec takes.

    Raises:
        ValueError: If a finite value becomes infinite.
    """
    given, dtype = x, torch.float32 if codec.name == "int8" else codec.dtype
    x = given.to(dtype)
    lost = x.isinf() & given.isfinite()
    if bool(lost.any()):
        row, column = lost.nonzero()[0].tolist()
        raise ValueError(
            f"'x' holds {float(given[row, column]):g} in row {first + row}, but {codec} ends at "
            f"{torch.finfo(dtype).max:g}: scale the features, or choose another 'dtype'"
        )
    return x.float() if codec.name in transfer.CODECS else x


class Encoded(EncodedRows):
    """Features that :func:`encode` has stored: a tensor whose rows are decoded when they are read.

    * ``store``: the stored rows; ``store.nbytes`` are their bytes.
    * ``codec``: how they are stored.
    """

    store: Store
    codec: Codec
    kind: str | StoreFactory

    @staticmethod
    def of(store: Store, codec: Codec, like: Tensor, kind: str | StoreFactory) -> Encoded:
        """Stored rows as a matrix as wide as another."""
        dtype = torch.float64 if codec.name == "float64" else torch.float32
        out = Encoded.make(store.num_rows, like.size(1), dtype)
        out.store, out.codec, out.kind = store, codec, kind
        return out

    @property
    def _table(self) -> Tensor | None:
        """The stored rows, where they are a table that native code may read and write."""
        store = self.store
        return store.table if isinstance(store, TableStore) and store.direct else None

    @property
    def plain(self) -> Tensor | None:
        """See :class:`EncodedRows`: the table, where it holds float32 or float64."""
        table = self._table
        if table is None or self.packed is not None or self.codec.dtype != self.dtype:
            return None
        return table

    @property
    def packed(self) -> PackedRows | None:
        """Copies of rows for those who read a mini-batch's; see :meth:`gas.ScalableGNN.pack`."""
        return self.store.packed if isinstance(self.store, TableStore) else None

    @property
    def _version(self) -> int:  # type: ignore[override]  # An attribute of tensors.
        """How often the table was changed in place, as a mapped one may be beneath its copies."""
        table = self._table if self.packed is not None else None
        return 0 if table is None or table.is_inference() else table._version

    def packed_by(self, packing: Packing, folder: str | Path) -> PackedRows:
        """Copies rows to where few reads find those of a mini-batch; nothing has changed then.

        Args:
            packing: What is copied.
            folder: Where the copies lie, in a file without a name.

        Raises:
            OSError: If the disk has no room for the copies.
        """
        assert isinstance(self.store, TableStore)
        return PackedRows(self.store.table, packing, folder, buffers.SHARED)

    @property
    def in_memory(self) -> list[Tensor]:
        """See :class:`EncodedRows`: nothing of what is mapped, or elsewhere."""
        table = self._table
        return [] if table is None or self.store.tier == "disk" else [table]

    def read(self, index: Tensor, p: float = 0.0, seed: int = 0) -> Tensor:
        """See :class:`EncodedRows`."""
        check_index("index", index)
        index, name, width = index.cpu(), self.codec.name, self.size(1)
        table = self._table
        packed = self.packed  # Which another thread may replace.
        if packed is not None:
            plan = packed.packing.plan(index)
            if plan is not None:
                table, index = packed.stage(plan), plan.places
        if table is None:
            check_range("index", index, self.size(0))
            rows = self._stored(index)
            if name in transfer.CODECS:
                rows = transfer.decode_torch(name, rows, width)
            return dropout(rows, p, seed) if p else rows
        if name not in transfer.CODECS:
            return gather_dropout(table, index, p, seed) if p else gather_rows(table, index)
        if p:
            return gather_decode_dropout(table, name, width, index, p, seed)
        return transfer.gather_decode(table, name, width, index)

    def pack(self, packed: PackedRows) -> None:
        """Reads rows by their copies from now on.

        Args:
            packed: From :meth:`packed_by`.
        """
        cast(TableStore, self.store).packed = packed

    def expect(self, index: Tensor) -> None:
        """See :class:`EncodedRows`: of those that lie packed."""
        packed = self.packed
        plan = None if packed is None else packed.packing.plan(index.cpu())
        if packed is not None and plan is not None:
            packed.expect(plan)

    def rearranged(self, index: Tensor) -> Encoded:
        """See :class:`EncodedRows`."""
        check_index("index", index)
        index, width = index.cpu(), self.size(1)
        check_range("index", index, self.size(0))
        store = make_store(self.kind, index.numel(), width, self.codec)
        for first, last in _blocks(index.numel(), self.store.columns):
            store.write(torch.arange(first, last, device="cpu"), self._stored(index[first:last]))
        return Encoded.of(store, self.codec, self, self.kind)

    def _stored(self, index: Tensor) -> Tensor:
        """Rows as they are stored, of shape ``[n, columns]``."""
        out = torch.empty(index.numel(), self.store.columns, dtype=self.store.dtype, device="cpu")
        self.store.read(index, out)
        return out

    def _write(self, first: int, rows: Tensor) -> None:
        """Stores rows, of shape ``[n, width]``, from the row ``first`` on."""
        name, table = self.codec.name, self._table
        encoded = name in transfer.CODECS
        if table is None:
            rows = transfer.encode_torch(name, rows) if encoded else rows
            self.store.write(torch.arange(first, first + rows.size(0), device="cpu"), rows)
        else:
            codec = (name, self.size(1)) if encoded else ()
            to = transfer.Table(table, *codec)
            to.push_ranges(rows.contiguous(), [first], [rows.size(0)]).run()

    def __reduce_ex__(self, _: Any) -> Any:
        rows: Any = self._table
        if rows is None or self.store.tier == "disk":  # Of the file, each has one of its own.
            rows = self._stored(torch.arange(self.size(0), device="cpu")).view(torch.uint8).numpy()
        return _restore, (rows, self.codec, self.size(1), self.kind)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Encoded({list(self.shape)}, {self.codec}, store={self.store.tier!r})"


def _restore(
    rows: Tensor | np.ndarray, codec: Codec, width: int, kind: str | StoreFactory
) -> Encoded:
    """What was pickled: a table in memory, which processes may share, or bytes of rows."""
    store: Store
    if isinstance(rows, Tensor):
        store = TableStore(rows)
        store.tier = kind = "host"
    else:
        store = make_store(kind, len(rows), width, codec)
        store.write(torch.arange(len(rows), device="cpu"), torch.from_numpy(rows).view(codec.dtype))
    return Encoded.of(store, codec, torch.empty(0, width), kind)
