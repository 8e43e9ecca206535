"""Mini-batches: :class:`SubData`, and functions on its tensors."""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from gas.graph import PERM, Adjacency, count_nodes_and_edges, has_row_per_node, layout_of
from gas.history import Features, cache_row_starts, first_rows
from gas.loader.lazy import LazyRows, get_lazy, raw_attributes, read_lazy_rows, set_rows
from gas.native import csr_parts, explain_missing_cuda, is_sparse

# Attributes of n_id, besides "shard": a fingerprint of the random state of views, and the number of
# nodes of the graph and their order, see find_node_order.
RNG_FINGERPRINT = "drawn"
GRAPH_SIZE = "graph_size"
NODE_ORDER = "node_order"
OF_BATCH = "of_batch"  # Of a square adjacency.


class SubData(NamedTuple):
    """One mini-batch.

    * ``data``: node-level tensors of the in-batch nodes, then of the halo; edge-level tensors in
      the order of ``data.e_id``; the adjacency in the loader's layout, whose values share memory
      with ``data.edge_weight`` if there is one. Rows are gathered from the graph on first access.
      With an augmentation, ``data.views`` are two further ``Data`` of the same nodes.
    * ``batch_size``: the number of in-batch nodes.
    * ``n_id``: global node ids, of shape ``[batch_size + halo]``, in-batch nodes first.
    * ``offset``, ``count``: the in-batch nodes are the global rows ``offset[i]`` to
      ``offset[i] + count[i] - 1`` of each part ``i``, of shape ``[parts]``.

    Attributes of the graph are also those of the batch: ``batch.x`` is ``batch.data.x``.
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
        n_id = new["n_id"] = self.n_id[: self.batch_size]
        known.pop("n_id", None)  # The graph's own, as a sampler sets, stays in ``batch.data``.
        e_id = known.pop("e_id", None)
        # num_nodes and num_edges of PyG take 50 Python calls.
        sizes = None if e_id is None else (self.n_id.numel(), e_id.numel())
        for key, value in known.items():
            if isinstance(value, LazyRows):
                if value.per_node:
                    set_rows(own, key, LazyRows(key, value.table, n_id, True, value))
                    new = own._store._mapping
            elif isinstance(value, Tensor):
                sizes = sizes or count_nodes_and_edges(self.data)
                if has_row_per_node(self.data, key, value, sizes):
                    new[key] = first_rows(value, self.batch_size)
        new["num_nodes"] = self.batch_size
        return own

    def __repr__(self) -> str:
        """Describe the sizes and tensors of the batch, and which rows ``model(batch)`` returns."""
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

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a batch can't be changed, its graph can: batch.data.{name} = ...")

    def __getattr__(self, name: str) -> Any:
        # Attributes alone: DataLoader would call methods such as pin_memory.
        if not name.startswith("_") and name in self.data:
            return self.data[name]
        names = ", ".join(sorted(self.data.keys()))
        how = "; layout='edge_index' of the loader gives it" if name == "edge_index" else ""
        raise AttributeError(f"a batch has no {name!r}; its graph has {names}{how}")

    def features(self) -> Tensor | Features:
        """Return features that layers read in place; a tensor if they were gathered already."""
        rows = get_lazy(self.data, "x")
        if rows is None or not rows.is_table:
            return self.data.get("x")
        rows.check()
        return Features(rows.table, rows.index, self.batch_size, find_sums=rows.find_sums)

    def to(self, device: torch.device | str, *names: str, non_blocking: bool = False) -> SubData:
        """Return the batch with its graph on a device; the ids stay on the CPU, for histories.

        Args:
            device: The device.
            *names: The attributes to move. (default: all, views included)
            non_blocking: Don't wait for copies from pinned memory. (default: ``False``)
        """
        if not names and find_devices(self.data) <= {torch.device(device)}:
            return self

        def move(value: Any) -> Any:
            there = value.to(device=device, non_blocking=non_blocking)
            if getattr(value, OF_BATCH, False):
                setattr(there, OF_BATCH, True)
            return cache_row_starts(there, value) if is_sparse(value) else there

        with explain_missing_cuda("the batch"):
            return self._replace(data=apply(self.data, move, *names))


def _describe(key: str, value: Any) -> str:
    """Return the name and shape of a tensor, without reading lazy rows; else an empty text."""
    if isinstance(value, LazyRows):
        return f"{key} {[value.index.numel(), *value.table.shape[1:]]}"
    shape = getattr(value, "shape", None)
    return "" if shape is None else f"{key} {list(shape)}"


def apply(data: Data, function: Callable[[Any], Any], *names: str) -> Data:
    """Apply a function to the tensors and adjacencies of a graph and of its views.

    Args:
        data: The graph.
        function: The function.
        *names: The attributes. (default: all)
    """

    def apply_to_value(value: Any) -> Any:
        if isinstance(value, Data):  # PyG's apply changes the graph in place.
            return copy.copy(value).apply(apply_to_value)
        return function(value)

    return copy.copy(data).apply(apply_to_value, *names)


def empty_graph(data: Data) -> Data:
    """Return an empty graph of the same class; of a ``Batch`` of PyG, of the class of its graphs.

    A mini-batch of a ``Batch`` doesn't consist of whole graphs, and PyG's dynamic subclasses of
    ``Batch`` can't be pickled.
    """
    cls = type(data)
    return (cls.__bases__[-1] if issubclass(cls, Batch) else cls)()


def check_sendable(attributes: Mapping[str, Any]) -> None:
    """Refuse attributes that can't be pickled: workers of PyTorch would hang.

    Raises:
        ValueError: Naming the attribute.
    """
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            continue
        try:
            pickle.dumps(value)
        except Exception as error:  # Pickling may raise any error.
            raise ValueError(
                f"'{name}' is a {type(value).__name__}, which workers can't send with their "
                f"batches ({error}): take it out of the graph, or leave 'num_workers' out"
            ) from error


def find_devices(data: Data) -> set[torch.device]:
    """Return the devices of a graph's tensors, and of the tables that lazy rows are read from."""
    found = set()
    for key, value in raw_attributes(data):
        if isinstance(value, LazyRows):
            found.add(value.table.device)
        elif type(value) is Tensor and value.layout == torch.strided:
            found.add(value.device)
        elif isinstance(value, Adjacency):
            found.add(value.col.device)  # All of its tensors are on one device.
        else:
            for tensor in _tensors_of(key, value):
                found.add(tensor.device)
    return found


def iter_tensors(data: Data) -> Iterator[Tensor]:
    """Iterate over all tensors of a graph, those of its adjacency and of its views included."""
    read_lazy_rows(data)
    yield from tensors_in_memory(data)


def tensors_in_memory(data: Data) -> Iterator[Tensor]:
    """Iterate over the tensors of a graph, except lazy rows that weren't gathered."""
    for key, value in raw_attributes(data):
        yield from _tensors_of(key, value)


def _tensors_of(key: str, value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of an attribute."""
    if key == "adj_t":
        yield from layout_of(value).tensors(value)
    elif is_sparse(value):
        yield from csr_parts(value)
    elif isinstance(value, Tensor):
        yield value
    elif key == "views":
        for view in value:
            yield from tensors_in_memory(view)


def num_bytes(batch: SubData) -> int:
    """Return the bytes of a mini-batch's tensors, lazy rows included."""
    values = (value for _, value in raw_attributes(batch.data))
    later = sum(value.nbytes for value in values if isinstance(value, LazyRows))
    return (
        batch.n_id.nbytes + later + sum(tensor.nbytes for tensor in tensors_in_memory(batch.data))
    )


def find_node_order(data: Data | HeteroData) -> tuple[int, int] | None:
    """Return a fingerprint of the order of a clustered graph's nodes; ``None`` if it isn't known.

    It is the number of nodes, and a checksum of some rows of ``perm`` of each type.
    """
    num_nodes = checksum = 0
    for store in data.node_stores:
        perm = store.get(PERM)
        if not isinstance(perm, Tensor):
            return None
        some = perm[:: max(1, perm.numel() // 4096)].cpu().contiguous()
        num_nodes, checksum = num_nodes + perm.numel(), zlib.crc32(some.numpy().data, checksum)
    return num_nodes, checksum


def set_graph_info(
    n_id: Tensor, num_nodes: int, order: tuple[int, int] | None, square: SubData | None = None
) -> None:
    """Attach the number and the order of the graph's nodes to the ids of a batch.

    The adjacency of a square batch with a halo is marked as not being that of a whole graph.
    """
    setattr(n_id, GRAPH_SIZE, num_nodes)
    setattr(n_id, NODE_ORDER, order)
    if square is not None and n_id.numel() > square.batch_size:
        adj = square.data.get("adj_t", square.data.get("edge_index"))
        setattr(adj, OF_BATCH, True)
