"""Encoded features: tensors whose rows are decoded on access, in the stores of histories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gas.history.codec import Codec
from gas.history.packed import PackedRows
from gas.history.packing import Packing
from gas.history.store import Store, StoreFactory, TableStore
from gas.history.tiers import make_store
from gas.native import (
    SHARED,
    check_index,
    check_range,
    dropout,
    gather_decode,
    gather_decode_dropout,
    gather_dropout,
    gather_rows,
    renamed,
    transfer,
)

aten = torch.ops.aten
BLOCK_VALUES = 1 << 22  # Values encoded at once: 16 MiB of float32.


def is_encoded(x: Any) -> bool:
    """Return whether features are :class:`Encoded`."""
    return isinstance(x, Encoded)


def dequantize(x: Any) -> Any:
    """Decode all values of :class:`Encoded` features; return other values unchanged."""
    return x.dequantize() if isinstance(x, Encoded) else x


def row_blocks(num_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, of about ``BLOCK_VALUES`` values each."""
    step = max(1, BLOCK_VALUES // max(1, width))
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


class Encoded(Tensor):
    """A matrix whose rows are decoded when they are read, of shape ``[rows, width]``.

    ``x[index]``, ``x[a:b]``, ``x[mask]`` and ``index_select`` decode the selected rows only; all
    other functions decode all rows. The results are ordinary tensors, copies. Only ``clone`` and
    the module ``copy`` return encoded rows. The values are read-only. :func:`gas.quantize` makes
    such a matrix.

    * ``store``: the stored rows; ``store.nbytes`` is their size.
    * ``codec``: their precision.
    """

    store: Store
    codec: Codec
    kind: str | StoreFactory

    # All functions of PyTorch go through __torch_dispatch__, which decodes.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(store: Store, codec: Codec, width: int, kind: str | StoreFactory) -> Encoded:
        """Wrap a store of encoded rows as a float matrix.

        Args:
            store: The rows.
            codec: Their precision.
            width: The number of values of a row.
            kind: The store of copies of the matrix; see :func:`quantize`.
        """
        dtype = torch.float64 if codec.name == "float64" else torch.float32
        with torch.inference_mode(False):  # Training can't use inference tensors.
            out = Tensor._make_wrapper_subclass(
                Encoded, (store.num_rows, width), dtype=dtype, device=torch.device("cpu")
            )
        out.store, out.codec, out.kind = store, codec, kind
        return out

    @property
    def _table(self) -> Tensor | None:
        """The stored rows if native code can read and write them, else ``None``."""
        return self.store.table if self.store.direct else None

    @property
    def plain_table(self) -> Tensor | None:
        """The stored rows if they need no decoding, float32 or float64, else ``None``."""
        table = self._table
        if table is None or self.packed is not None or self.codec.dtype != self.dtype:
            return None
        return table

    @property
    def packed(self) -> PackedRows | None:
        """The packed copies of rows for mini-batches; see :meth:`gas.ScalableGNN.pack`."""
        return self.store.packed

    @property
    def _version(self) -> int:  # type: ignore[override]  # An attribute of tensors.
        """The number of in-place changes of a mapped table that has packed copies."""
        table = self._table if self.packed is not None else None
        return 0 if table is None or table.is_inference() else table._version

    def make_packed(self, packing: Packing, folder: str | Path) -> PackedRows:
        """Return copies of the rows for ``store.packed``; see :class:`PackedRows`."""
        assert isinstance(self.store, TableStore)
        return PackedRows(self.store.table, packing, folder, SHARED)

    @property
    def resident_tensors(self) -> list[Tensor]:
        """The tensors in memory of this process: none if rows are in a file or elsewhere."""
        table = self._table
        return [] if table is None or self.store.tier == "disk" else [table]

    def read(self, index: Tensor, p: float = 0.0, seed: int = 0) -> Tensor:
        """Decode rows, optionally with dropout.

        Args:
            index: The rows, of shape ``[n]``, int64.
            p: The probability of dropping an element; see :func:`gas.native.dropout.dropout`.
                (default: ``0.0``)
            seed: The seed of the dropout. (default: ``0``)

        Returns:
            A new tensor of shape ``[n, width]``.

        Raises:
            IndexError: If a row doesn't exist.
        """
        check_index("index", index)
        index, name, width = index.cpu(), self.codec.name, self.size(1)
        table = self._table
        packed = self.packed  # Another thread may replace the attribute.
        if packed is not None:
            plan = packed.plan(index)
            if plan is not None:
                table, index = packed.read_staged(plan), plan.places
        if table is None:
            check_range("index", index, self.size(0))
            rows = self.codec.decode(self.read_stored(index), width)
            return dropout(rows, p, seed) if p else rows
        if name not in transfer.CODECS:
            return gather_dropout(table, index, p, seed) if p else gather_rows(table, index)
        if p:
            return gather_decode_dropout(table, name, width, index, p, seed)
        return gather_decode(table, name, width, index)

    def read_ahead(self, index: Tensor) -> None:
        """Let the system read ahead rows, if they are packed.

        Args:
            index: The rows, of shape ``[n]``, int64.
        """
        if self.packed is not None:
            self.packed.read_ahead(index)

    def select_rows(self, index: Tensor) -> Encoded:
        """Copy encoded rows to a store of the same kind.

        Args:
            index: The rows, of shape ``[n]``, int64.

        Raises:
            IndexError: If a row doesn't exist.
        """
        check_index("index", index)
        index, width = index.cpu(), self.size(1)
        check_range("index", index, self.size(0))
        store = make_store(self.kind, index.numel(), width, self.codec)
        for first, last in row_blocks(index.numel(), self.store.columns):
            store.write(
                torch.arange(first, last, device="cpu"), self.read_stored(index[first:last])
            )
        return Encoded.of(store, self.codec, width, self.kind)

    def dequantize(self) -> Tensor:
        """Decode all values, in a new tensor of shape ``[rows, width]``."""
        return self.read(torch.arange(self.size(0), device="cpu"))

    def read_stored(self, index: Tensor) -> Tensor:
        """Read rows as they are stored, of shape ``[n, columns]``."""
        out = torch.empty(index.numel(), self.store.columns, dtype=self.store.dtype, device="cpu")
        self.store.read(index, out)
        return out

    def write(self, first: int, rows: Tensor) -> None:
        """Encode rows of shape ``[n, width]`` and store them, from the row ``first`` on."""
        name, table = self.codec.name, self._table
        if table is None:
            index = torch.arange(first, first + rows.size(0), device="cpu")
            self.store.write(index, self.codec.encode(rows))
        else:
            codec = (name, self.size(1)) if name in transfer.CODECS else ()
            transfer.Job.push(table, rows.contiguous(), [(first, rows.size(0))], *codec).run()

    decoded = renamed("Encoded.decoded", "dequantize")

    # Tensor protocol ------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _check_reads_only(func, args, kwargs)
        x = args[0] if args else None
        if isinstance(x, Encoded):
            if func in (aten.detach.default, aten.alias.default):
                return x._alias()
            if func is aten.clone.default:
                return x.select_rows(torch.arange(x.size(0), device="cpu"))
            if func is aten.index_select.default and args[1] in (0, -2):
                return x.read(args[2].view(-1).long())
            if func is aten.slice.Tensor and len(args) > 3 and args[1] in (0, -2) and not kwargs:
                return x[slice(*args[2:])]
        return func(*tree_map(dequantize, args), **tree_map(dequantize, kwargs))

    def __getitem__(self, index: Any) -> Any:
        rows = self._row_ids(index)
        if rows is None:
            return self.dequantize()[index]
        return self.read(rows.view(-1)).view(*rows.shape, self.size(1))

    def _row_ids(self, index: Any) -> Tensor | None:
        """Return the row ids of an index, of any shape; ``None`` if it doesn't select rows."""
        size = self.size(0)
        if isinstance(index, slice) and (index.step or 1) > 0:
            first, last, step = index.indices(size)
            return torch.arange(first, max(first, last), step, device="cpu")
        if isinstance(index, int) and not isinstance(index, bool):
            index = torch.tensor(index, device="cpu")
        if not isinstance(index, Tensor):
            return None
        index = index.cpu()
        if index.dtype == torch.bool:
            return index.nonzero().view(-1) if index.shape == (size,) else None
        if index.dtype not in (torch.int64, torch.int32):
            return None
        index = index.long()
        return torch.where(index < 0, index + size, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("x[...] = ...")

    def _alias(self) -> Encoded:
        other = Encoded.of(self.store, self.codec, self.size(1), self.kind)
        other.__dict__.update(self.__dict__)
        return other

    def __copy__(self) -> Encoded:
        return self._alias()

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoded:
        return memo.setdefault(id(self), self.clone())

    def requires_grad_(self, requires_grad: bool = True) -> Encoded:
        """Raise an error if they are to be learnt, as the values are read-only."""
        if requires_grad:
            _refuse("x.requires_grad_()")
        return self

    def data_ptr(self) -> int:
        """Raise an error: the values have no address before rows are decoded."""
        raise RuntimeError(
            "these rows are encoded, and have no memory of values: pass rows of them, such as "
            "x[index], or all, x.dequantize()"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Return all values; see :meth:`torch.Tensor.numpy`."""
        return self.dequantize().numpy()

    def tolist(self) -> list[Any]:
        """Return all values; see :meth:`torch.Tensor.tolist`."""
        return self.dequantize().tolist()

    def __reduce_ex__(self, _: Any) -> Any:
        rows: Any = self._table
        if rows is None or self.store.tier == "disk":  # Every copy needs its own file.
            every = torch.arange(self.size(0), device="cpu")
            rows = self.read_stored(every).view(torch.uint8).numpy()
        return _restore, (rows, self.codec, self.size(1), self.kind)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Encoded({list(self.shape)}, {self.codec}, store={self.store.tier!r})"


def _check_reads_only(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ``TypeError`` if an operator would write to encoded rows."""
    if not func._schema.is_mutable:
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        if any(map(is_encoded, given if isinstance(given, list | tuple) else [given])):
            _refuse(func._schema.name.split("::")[-1])


def _refuse(what: str) -> NoReturn:
    """Raise ``TypeError``: encoded rows are read-only, and ``what`` would write to them."""
    raise TypeError(
        f"{what} can't write to encoded rows: change the values, x.dequantize() or those that were "
        "encoded, and encode them anew"
    )


def _restore(
    rows: Tensor | np.ndarray, codec: Codec, width: int, kind: str | StoreFactory
) -> Encoded:
    """Unpickle a table in memory, which processes may share, or the bytes of rows."""
    store: Store
    if isinstance(rows, Tensor):
        store = TableStore(rows)
        store.tier = kind = "host"
    else:
        store = make_store(kind, len(rows), width, codec)
        store.write(torch.arange(len(rows), device="cpu"), torch.from_numpy(rows).view(codec.dtype))
    return Encoded.of(store, codec, width, kind)
