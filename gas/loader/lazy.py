"""Attributes of a mini-batch whose rows are gathered on first access."""

from __future__ import annotations

import copy
import math
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import version
from gas.history import Encoded, first_rows
from gas.native import csr_parts, gather_rows, gather_sparse_rows, is_sparse


def gather(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]``, of a dense, a sparse or an encoded tensor."""
    if isinstance(table, Encoded):
        return table.read(index)
    is_csr = table.layout == torch.sparse_csr
    return gather_sparse_rows(table, index) if is_csr else gather_rows(table, index)


class LazyRows:
    """Rows of a graph's tensor, which are gathered on first access.

    Args:
        name: The name of the tensor in the graph.
        table: The tensor, of shape ``[rows, ...]``.
        index: The rows, of shape ``[n]``, int64.
        per_node: Whether the batch has a row for each node, or for each edge.
        whole: The rows of which these are the first, read together. (default: none)
    """

    def __init__(
        self,
        name: str,
        table: Tensor,
        index: Tensor,
        per_node: bool,
        whole: LazyRows | None = None,
    ) -> None:
        self.name = name
        self.table = table
        self.index = index
        self.per_node = per_node
        self.find_sums: Any = None  # Of features: see gas.loader.FeatureSums.
        self._whole = whole
        self._versions: tuple[int, int] = (
            (version(table), version(index)) if whole is None else whole._versions
        )
        self._rows: Tensor | None = None  # Copies of the batch share it.

    def check(self) -> None:
        """Raise ``RuntimeError`` if the tensor or the ids were changed since the batch was cut."""
        if (version(self.table), version(self.index)) != self._versions:
            raise RuntimeError(
                f"'{self.name}' of the graph, or the ids of the batch, were changed in place since "
                f"the batch was cut: read batch.{self.name} before, or cut the batch anew"
            )

    def read(self, pinned: bool = False) -> Tensor:
        """Gather the rows, of shape ``[n, ...]``, and keep them for later calls.

        Args:
            pinned: Whether to gather plain rows in host memory into pinned memory.
                (default: ``False``)
        """
        if self._whole is not None:
            return first_rows(self._whole.read(pinned), self.index.numel())
        if self._rows is None:
            self.check()
            table, index = self.table, self.index
            if self.is_learnt:
                return table.index_select(0, index)  # Each copy has its autograd graph.
            if torch.is_inference_mode_enabled():  # Training can't use inference tensors.
                with torch.inference_mode(False), torch.no_grad():
                    self._rows = self._gather(pinned)
            else:
                self._rows = self._gather(pinned)
        return self._rows

    def _gather(self, pinned: bool) -> Tensor:
        table, index = self.table, self.index
        is_plain = not isinstance(table, Encoded) and table.layout == torch.strided
        if not pinned or not is_plain or table.device.type != "cpu":
            return gather(table, index)
        shape = (index.numel(), *table.shape[1:])
        out = torch.empty(shape, dtype=table.dtype, device="cpu", pin_memory=True)
        return gather_rows(table, index, out)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows, once they are read."""
        if is_sparse(self.table):
            return sum(
                part.nbytes for part in csr_parts(gather_sparse_rows(self.table, self.index))
            )
        return self.index.numel() * math.prod(self.table.shape[1:]) * self.table.element_size()

    @property
    def is_table(self) -> bool:
        """Return whether the rows can be read in place."""
        table = self.table
        is_dense = table.layout == torch.strided and table.dim() == 2
        is_read = self._rows is not None or self.is_learnt
        return not is_read and is_dense and table.is_floating_point()

    @property
    def is_learnt(self) -> bool:
        """Return whether reading the rows needs a gradient."""
        return self.table.requires_grad and torch.is_grad_enabled()


class LazyAttributes(dict[str, Any]):
    """Attribute store of a batch's graph, which gathers lazy rows on first access.

    ``items()`` and ``values()`` gather all rows, and return views of another dictionary.
    """

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, LazyRows):
            value = self[key] = value.read()
        return value

    get = Mapping.get  # type: ignore[assignment]  # It calls __getitem__.

    def pop(self, key: str, *default: Any) -> Any:
        """See :meth:`dict.pop`."""
        if key in self:
            self[key]
        return super().pop(key, *default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Gather all lazy rows, and return the items."""
        return self._read().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Gather all lazy rows, and return the values."""
        return self._read().values()

    def _read(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    def raw_items(self) -> Iterator[tuple[str, Any]]:
        """Iterate over names and values without gathering lazy rows."""
        return iter(super().items())

    def __iter__(self) -> Iterator[str]:  # Overridden so that dict(self) calls __getitem__.
        return super().__iter__()

    def __copy__(self) -> LazyAttributes:
        return LazyAttributes(self.raw_items())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        rows = self._read()
        for value in rows.values():
            if is_sparse(value):  # PyTorch can clone a CSR matrix, not deep-copy it.
                memo.setdefault(id(value), value.clone())
        return copy.deepcopy(rows, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._read(),)  # Send the rows to other processes, not the table.

    def __eq__(self, other: object) -> bool:
        return self._read() == other

    __hash__ = None


def set_rows(data: Data, name: str, rows: Tensor | LazyRows) -> None:
    """Set an attribute of a graph to rows, which may be lazy."""
    mapping = data._store._mapping
    if not isinstance(rows, Tensor) and not isinstance(mapping, LazyAttributes):
        mapping = data._store._mapping = LazyAttributes(mapping)
    mapping[name] = rows


def get_lazy(data: Data, key: str) -> LazyRows | None:
    """Return the lazy rows of an attribute; ``None`` if there are none, or they were accessed."""
    mapping = data._store._mapping
    value = dict.get(mapping, key)
    return value if isinstance(value, LazyRows) else None


def raw_attributes(data: Data) -> Iterator[tuple[str, Any]]:
    """Iterate over the attributes of a graph without gathering :class:`LazyRows`."""
    mapping = data._store._mapping
    return mapping.raw_items() if isinstance(mapping, LazyAttributes) else iter(mapping.items())


def prefetch_rows(data: Data) -> None:
    """Ask the operating system to read ahead the lazy rows of a graph that are packed on disk."""
    for _, rows in raw_attributes(data):
        if isinstance(rows, LazyRows) and isinstance(rows.table, Encoded):
            rows.table.read_ahead(rows.index)


def read_lazy_rows(data: Data, pinned: bool = False) -> None:
    """Gather all lazy rows of a graph.

    Args:
        data: The graph.
        pinned: See :meth:`LazyRows.read`. (default: ``False``)
    """
    for _, rows in raw_attributes(data):
        if isinstance(rows, LazyRows):
            rows.read(pinned)
    for _ in data:  # Each access replaces the lazy rows by the tensor.
        pass
