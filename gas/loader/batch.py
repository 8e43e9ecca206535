"""One mini-batch, as loaders yield it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from gas.graph import Adjacency, count_nodes_and_edges, is_sized_per_node, layout_of
from gas.history import Features, cache_row_starts, first_rows
from gas.loader.lazy import (
    LazyOwnRows,
    LazyRows,
    get_lazy,
    raw_attributes,
    read_lazy_rows,
    set_rows,
)
from gas.native import explain_missing_cuda, is_sparse, parts

RNG_FINGERPRINT = "drawn"  # An attribute of n_id: which random numbers its views are of.
GRAPH_SIZE = "graph_size"  # An attribute of n_id: of how many nodes the graph is.
# And "shard", of a graph that is one process's: ids are its rows.


class SubData(NamedTuple):
    """One mini-batch.

    * ``data``: node-level tensors of the in-batch nodes, then of the halo; edge-level tensors in
      the order of ``data.e_id``; the adjacency in the loader's layout, whose values share memory
      with ``data.edge_weight``, where they are made of it. Rows are copied from the graph when
      they are first asked for. With an augmentation, ``data.views`` are two further ``Data`` of
      the same nodes.
    * ``batch_size``: the number of in-batch nodes.
    * ``n_id``: global node ids, of shape ``[batch_size + halo]``, in-batch nodes first.
    * ``offset``, ``count``: the in-batch nodes are the global rows ``offset[i]`` to
      ``offset[i] + count[i] - 1`` of each part ``i``, of shape ``[parts]``.

    What the graph has is read through it, too: ``batch.x`` is ``batch.data.x``.
    """

    data: Data
    batch_size: int
    n_id: Tensor
    offset: Tensor
    count: Tensor  # type: ignore[assignment]  # The field's name, and also a method of tuple.

    @property
    def own(self) -> Data:
        """Return the node-level tensors of the in-batch nodes, views of those of the batch."""
        own = empty_graph(self.data)
        new, known = own._store._mapping, dict(raw_attributes(self.data))
        new["n_id"] = self.n_id[: self.batch_size]
        e_id = known.pop("e_id", None)
        # PyG's own counts take 50 calls.
        sizes = None if e_id is None else (self.n_id.numel(), e_id.numel())
        for key, value in known.items():
            if isinstance(value, LazyRows):
                if value.per_node:
                    set_rows(own, key, LazyOwnRows(value, self.batch_size))
                    new = own._store._mapping
            elif isinstance(value, Tensor):
                sizes = sizes or count_nodes_and_edges(self.data)
                if is_sized_per_node(self.data, key, value, sizes):
                    new[key] = first_rows(value, self.batch_size)
        new["num_nodes"] = self.batch_size
        return own

    def __repr__(self) -> str:
        """Name the batch's sizes, its tensors, and the tensors that belong to ``model(batch)``."""
        size = self.batch_size
        tensors = ", ".join(filter(None, (_describe(k, v) for k, v in raw_attributes(self.data))))
        masks = [key for key in ("train_mask", "val_mask", "y") if key in self.data]
        chosen = f": out[batch.own.{masks[0]}], not out[batch.{masks[0]}]" if masks else ""
        return (
            f"SubData of {size} own nodes in {self.offset.numel()} parts, "
            f"and a halo of {self.n_id.numel() - size}\n"
            f"  batch.data, own nodes, then the halo: {tensors}\n"
            f"  batch.own, rows of out = model(batch) [{size}, ...]{chosen}"
        )

    def __getattr__(self, name: str) -> Any:
        # Attributes, not methods: DataLoader would take those of the graph for the batch's.
        if not name.startswith("_") and name in self.data:
            return self.data[name]
        names = ", ".join(sorted(self.data.keys()))
        how = "; layout='edge_index' of the loader gives it" if name == "edge_index" else ""
        raise AttributeError(f"a batch has no {name!r}; its graph has {names}{how}")

    def features(self) -> Tensor | Features:
        """Return ``data.x`` in place, for layers that take it; a tensor if it was read already."""
        rows = get_lazy(self.data, "x")
        if rows is None or not rows.is_table:
            return self.data.get("x")
        rows.check()
        return Features(rows.table, rows.index, self.batch_size)

    def to(self, device: torch.device | str, *names: str, non_blocking: bool = False) -> SubData:
        """Return the batch with its graph on a device; the ids stay on the CPU, for histories.

        Args:
            device: The device.
            *names: The attributes to move. (default: all, views included)
            non_blocking: Don't wait for copies from pinned memory. (default: ``False``)
        """
        if not names and devices(self.data) <= {torch.device(device)}:
            return self

        def move(value: Any) -> Any:
            there = value.to(device=device, non_blocking=non_blocking)
            return cache_row_starts(there, value) if is_sparse(value) else there

        with explain_missing_cuda("the batch"):
            return self._replace(data=apply(self.data, move, *names))


def _describe(key: str, value: Any) -> str:
    """Return a tensor's name and shape, without reading its rows; nothing of other attributes."""
    if isinstance(value, LazyRows):
        return f"{key} {[value.index.numel(), *value.table.shape[1:]]}"
    shape = getattr(value, "shape", None)
    return "" if shape is None else f"{key} {list(shape)}"


def apply(data: Data, function: Callable[[Any], Any], *names: str) -> Data:
    """Apply a function to the tensors and adjacencies of a graph and of its views.

    Args:
        data: The graph.
        function: What to do with each.
        *names: The attributes. (default: all)
    """

    def apply_to_value(value: Any) -> Any:
        if isinstance(value, Data):  # It would change itself, and is another's.
            return copy.copy(value).apply(apply_to_value)
        return function(value)

    return copy.copy(data).apply(apply_to_value, *names)


def empty_graph(data: Data) -> Data:
    """Return a graph of the same class with nothing in it.

    Some nodes of several graphs, which PyG's ``Batch`` holds, are several graphs no more. (It could
    not be pickled either: each class of ``Batch`` that is called makes another.)
    """
    cls = type(data)
    return (cls.__bases__[-1] if issubclass(cls, Batch) else cls)()


def devices(data: Data) -> set[torch.device]:
    """Return the devices of a graph's tensors, unread ones included."""
    found = set()
    for key, value in raw_attributes(data):
        if isinstance(value, LazyRows):
            found.add(value.table.device)
        elif type(value) is Tensor and value.layout == torch.strided:
            found.add(value.device)
        elif isinstance(value, Adjacency):
            found.add(value.col.device)  # That of all of its tensors.
        else:
            for tensor in _tensors_of(key, value):
                found.add(tensor.device)
    return found


def tensors(data: Data) -> Iterator[Tensor]:
    """Iterate over all tensors of a graph, those of its adjacency and of its views included."""
    read_lazy_rows(data)
    yield from tensors_in_memory(data)


def tensors_in_memory(data: Data) -> Iterator[Tensor]:
    """Return the tensors of a graph without rows that weren't read, which take no memory."""
    for key, value in raw_attributes(data):
        yield from _tensors_of(key, value)


def _tensors_of(key: str, value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of an attribute."""
    if key == "adj_t":
        yield from layout_of(value).tensors(value)
    elif is_sparse(value):
        yield from parts(value)
    elif isinstance(value, Tensor):
        yield value
    elif key == "views":
        for view in value:
            yield from tensors_in_memory(view)


def num_bytes(batch: SubData) -> int:
    """Return the bytes of a mini-batch's tensors, those of rows that weren't read included."""
    values = (value for _, value in raw_attributes(batch.data))
    later = sum(value.nbytes for value in values if isinstance(value, LazyRows))
    return (
        batch.n_id.nbytes + later + sum(tensor.nbytes for tensor in tensors_in_memory(batch.data))
    )
