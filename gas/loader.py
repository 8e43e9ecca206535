"""Mini-batches: some parts of a graph, their one-hop halo, and every edge between them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from gas import _native
from gas.augment import Augmentation, Views
from gas.nn.adjacency import Adjacency
from gas.partition import check_ptr
from gas.subgraph import (
    check_finite,
    check_layout,
    csr_matrix,
    is_row_per_edge,
    is_row_per_node,
    is_sparse_tensor,
    read_graph,
    row_ids,
    sparse_tensor,
    to_csr,
)

CACHE_BYTES = 1 << 30  # What a loader keeps of its batches unless told.
GRAPH_SIZE = "graph_size"  # An attribute of n_id: of how many nodes the graph is.
ADJACENCY_KEYS = ("edge_index", "adj_t", "num_nodes")  # What a batch gets anew.


class SubData(NamedTuple):
    """One mini-batch.

    * ``data``: node-level tensors of the in-batch nodes, then of the halo; edge-level tensors in
      the order of ``data.e_id``; the adjacency in the loader's layout, whose values share memory
      with ``data.edge_weight``, where they are made of it. With an augmentation,
      ``data.views`` are two further ``Data`` of the same nodes.
    * ``batch_size``: the number of in-batch nodes.
    * ``n_id``: global node ids, of shape ``[batch_size + halo]``, in-batch nodes first.
    * ``offset``, ``count``: the in-batch nodes are the global rows ``offset[i]`` to
      ``offset[i] + count[i] - 1`` of each part ``i``, of shape ``[parts]``.
    """

    data: Data
    batch_size: int
    n_id: Tensor
    offset: Tensor
    count: Tensor  # type: ignore[assignment]  # The field's name, and also a method of tuple.

    def to(self, *args: Any, **kwargs: Any) -> SubData:
        """Moves ``data``; the ids stay where the histories look for them."""
        return self._replace(data=self.data.to(*args, **kwargs))


class SubgraphLoader(DataLoader):
    """Loads mini-batches of a partitioned graph, each with its one-hop halo.

    Args:
        data: The graph, permuted by :func:`gas.permute`. It is never modified.
        ptr: The parts, of shape ``[num_parts + 1]``, from :func:`gas.metis`.
        batch_size: Parts per mini-batch; a batch lists them in increasing order. (default: ``1``)
        bipartite: Make the adjacency ``[batch_size, batch_size + halo]``; otherwise square, with
            empty halo rows. The layout ``"edge_index"`` has no such shape. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        layout: ``"csr"`` puts a ``torch.sparse_csr`` matrix into ``data.adj_t``;
            ``"sparse_tensor"`` a ``torch_sparse.SparseTensor``; ``"fused"`` a
            :class:`gas.nn.Adjacency`, for the layers of :mod:`gas.nn`; ``"edge_index"`` sets
            ``data.edge_index``. (default: ``"csr"``, or ``"sparse_tensor"`` for a graph given as
            one)
        edge_weight: Make ``data.edge_weight`` the values of ``adj_t``. (default: ``True``)
        cache: Keep batches, features included, for the next epoch. They must not be modified in
            place then. Only fixed batches can be kept: those of one part, or in a fixed order.
            (default: keep ids and edges of fixed batches, up to 1 GiB, and no features)
        check: Refuse NaN and infinite features. (default: ``False``)
        epoch_transform: An augmentation of ``data``, which runs on the whole graph at the start of
            every epoch. Batches then have ``data.views``: two of PyG's ``Data`` with ``x``, the
            adjacency and attributes of edges, for its previous and its current state; see
            :class:`gas.augment.Views`. (default: none)
        graph_transform: Normalises the whole graph, such as ``T.GCNNorm()``: what is loaded is
            ``graph_transform(data)``, and views have weights by their own degrees.
            (default: nothing)
        **kwargs: Further arguments of ``torch.utils.data.DataLoader``, such as ``shuffle``.

    Raises:
        ValueError: If the graph, ``ptr`` or an option is unusable, naming the argument.
    """

    def __init__(
        self,
        data: Data,
        ptr: Tensor,
        batch_size: int = 1,
        bipartite: bool = True,
        log: bool = True,
        *,
        layout: str | None = None,
        edge_weight: bool = True,
        cache: bool | None = None,
        check: bool = False,
        epoch_transform: Augmentation | None = None,
        graph_transform: Callable[[Data], Data] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_batch_size(batch_size)
        self._views: Views | None = None
        if epoch_transform is not None:
            if kwargs.get("persistent_workers"):
                raise ValueError(
                    "'persistent_workers' is True, but workers that stay don't see the next "
                    "epoch's views: leave it out, or 'epoch_transform'"
                )
            self._views = Views(epoch_transform, data, graph_transform)
            data = self._views.graph
        elif graph_transform is not None:
            data = graph_transform(copy.copy(data))
        if layout is None:
            layout = "sparse_tensor" if is_sparse_tensor(data.get("adj_t")) else "csr"
        check_layout(layout)
        edges = read_graph(data, edge_weight)
        check_ptr(ptr, edges.num_nodes)
        if check:
            check_finite(data)

        if log:
            print(f"Loading {len(ptr) - 1} parts, {batch_size} per batch", file=sys.stderr)
        self.data = data
        self.ptr = ptr
        self.bipartite = bipartite
        self.layout = layout
        self.num_nodes = edges.num_nodes
        rowptr, col, e_id = to_csr(edges)
        weight = edges.weight
        self._weighted = weight is not None
        self._weight_key = (
            "edge_weight" if weight is not None and data.get("adj_t") is None else None
        )
        if weight is not None and e_id is not None:
            weight = _native.gather_rows(weight, e_id)
        self._rowptr = rowptr
        self._bounds: list[int] = ptr.tolist()
        self._relabel = _native.Relabeler(rowptr, col, e_id, weight)
        keys = data.keys()
        self._node_keys = [key for key in keys if is_row_per_node(data, key)]
        self._edge_keys = [key for key in keys if is_row_per_edge(data, key)]
        self._cached: dict[tuple[int, ...], SubData] = {}
        self._cached_bytes = 0

        super().__init__(
            range(len(ptr) - 1),  # type: ignore[arg-type]
            batch_size=batch_size,
            collate_fn=self._collate,
            **kwargs,
        )
        in_order = isinstance(self.sampler, torch.utils.data.SequentialSampler)
        fixed = "batch_sampler" not in kwargs and (batch_size == 1 or in_order)
        self._cache_features = bool(cache)
        self._cache_limit = _cache_limit(cache, fixed)

    def cut(self, parts: Sequence[int]) -> SubData:
        """The mini-batch of some parts, in increasing order.

        Raises:
            ValueError: If a part doesn't exist, or is named twice.
        """
        num_parts = self.ptr.numel() - 1
        key = tuple(sorted(parts))
        if not key or key[0] < 0 or key[-1] >= num_parts or len(set(key)) < len(key):
            raise ValueError(
                f"'parts' is {list(parts)}, expected different parts between 0 and {num_parts - 1}"
            )
        batch = self._cut(key)
        self._add_features(batch)
        self._add_views(batch)
        return self._signed(batch)

    def edges_per_part(self) -> Tensor:
        """The number of edges into the nodes of each part, of shape ``[num_parts]``."""
        return self._rowptr[self.ptr].diff()

    def __iter__(self) -> Iterator[SubData]:  # type: ignore[override]
        if self._views is not None:
            self._views.run()
        for batch in super().__iter__():
            yield self._signed(batch)

    def _signed(self, batch: SubData) -> SubData:
        """Notes the graph's size beside the ids; on their way from a worker they would lose it."""
        setattr(batch.n_id, GRAPH_SIZE, self.num_nodes)
        return batch

    def _collate(self, parts: list[int]) -> SubData:
        # Tensors made in inference mode would be of no use to a later epoch of training.
        with torch.inference_mode(False), torch.no_grad():
            key = tuple(sorted(parts))
            batch = self._cached.get(key)
            if batch is None:
                batch = self._cut(key)
                if self._cache_features:
                    self._add_features(batch)
                if self._cache_limit >= 0:
                    self._keep(key, batch)
            if self._cached:  # It may be one of them: what comes now isn't kept.
                batch = batch._replace(data=copy.copy(batch.data))
            if not self._cache_features:
                self._add_features(batch)
            self._add_views(batch)
        return batch

    def _keep(self, key: tuple[int, ...], batch: SubData) -> None:
        """Keeps a batch for the next epoch, while there is room."""
        size = num_bytes(batch)
        if self._cached_bytes + size <= self._cache_limit:
            self._cached[key] = batch
            self._cached_bytes += size

    def _cut(self, parts: tuple[int, ...]) -> SubData:
        """Cuts the edges of some parts out of the graph; features come later."""
        ranges = [(self._bounds[part], self._bounds[part + 1]) for part in parts]
        nodes = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        dtype = torch.int32 if self.layout == "fused" else torch.int64
        rowptr, col, e_id, n_id, weight = self._relabel(nodes, dtype)

        data = self.data.__class__()
        rows = {*self._node_keys, *self._edge_keys, *ADJACENCY_KEYS}
        for key, value in self.data:
            if key == self._weight_key and weight is not None:
                data[key] = weight.view(-1, *value.shape[1:])  # Cut already, with the edges.
            elif key in self._edge_keys:
                data[key] = _native.gather_rows(value, e_id)
            elif key not in rows:
                data[key] = value
        data.e_id = e_id
        data.num_nodes = n_id.numel()
        self._set_adjacency(data, rowptr, col, weight, n_id.numel())
        offset = torch.tensor([begin for begin, _ in ranges])
        count = torch.tensor([end - begin for begin, end in ranges])
        return SubData(data, nodes.numel(), n_id, offset, count)

    def _add_features(self, batch: SubData) -> None:
        for key in self._node_keys:
            batch.data[key] = _native.gather_rows(self.data[key], batch.n_id)

    def _add_views(self, batch: SubData) -> None:
        if self._views is not None:
            batch.data.views = self._views.cut(batch.data, batch.n_id, self._weighted)

    def _set_adjacency(
        self, data: Data, rowptr: Tensor, col: Tensor, value: Tensor | None, num_cols: int
    ) -> None:
        if self.layout == "edge_index":
            data.edge_index = torch.stack([col, row_ids(rowptr)])
            if value is not None and "edge_weight" not in data:
                data.edge_weight = value
            return
        if not self.bipartite:
            halo_rows = num_cols - rowptr.numel() + 1
            rowptr = torch.nn.functional.pad(rowptr, (0, halo_rows), value=col.numel())
        size = (rowptr.numel() - 1, num_cols)
        if self.layout == "fused":
            data.adj_t = Adjacency(rowptr, col, value, num_cols)
            return
        if self.layout == "sparse_tensor":
            data.adj_t = sparse_tensor(rowptr, col, value, size)
            return
        if value is None:
            x = self.data.get("x")
            dtype = x.dtype if x is not None and x.is_floating_point() else None
            value = torch.ones(col.numel(), dtype=dtype)
        data.adj_t = csr_matrix(rowptr, col, value, size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": {}, "_cached_bytes": 0}

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}(num_parts={len(self.ptr) - 1}, "
            f"batch_size={self.batch_size}, layout={self.layout!r})"
        )


class EvalSubgraphLoader(SubgraphLoader):
    """Loads the mini-batches of a partitioned graph in order, for evaluation.

    Consecutive parts are joined, so every batch is one range of nodes; the batches are fixed.

    Args:
        data: The graph, permuted by :func:`gas.permute`.
        ptr: The parts, of shape ``[num_parts + 1]``, from :func:`gas.metis`.
        batch_size: Parts per mini-batch. (default: ``1``)
        bipartite: See :class:`SubgraphLoader`. (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        **kwargs: Further arguments of :class:`SubgraphLoader`, ``shuffle`` excepted.
    """

    def __init__(
        self,
        data: Data,
        ptr: Tensor,
        batch_size: int = 1,
        bipartite: bool = True,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("shuffle", False):
            raise ValueError("'shuffle' is True, but evaluation has a fixed order: leave it out")
        _check_batch_size(batch_size)
        check_ptr(ptr, data.num_nodes)
        ptr = torch.unique_consecutive(torch.cat([ptr[::batch_size], ptr[-1:]]))
        super().__init__(data, ptr, 1, bipartite, log, **kwargs)


def _check_batch_size(batch_size: int) -> None:
    if not _native.is_integer(batch_size) or batch_size < 1:
        raise ValueError(f"'batch_size' is {batch_size!r}, expected at least one part per batch")


def _cache_limit(cache: bool | None, fixed: bool) -> int:
    """The bytes of batches that are kept, or -1 for none; only ``fixed`` ones come again."""
    if cache and not fixed:
        raise ValueError(
            "'cache' is True, but shuffling makes new batches every epoch: use batch_size=1, "
            "with larger parts, or leave 'cache' out"
        )
    if cache is False or not fixed:
        return -1
    return CACHE_BYTES if cache is None else sys.maxsize


def tensors(data: Data) -> Iterator[Tensor]:
    """Every tensor of a graph, those of its adjacency and of its views included."""
    for key, value in data:
        if isinstance(value, Adjacency):
            yield from value.tensors()
        elif is_sparse_tensor(value):
            yield from (part for part in value.csr() if part is not None)
        elif isinstance(value, Tensor) and value.layout == torch.sparse_csr:
            yield from (value.crow_indices(), value.col_indices(), value.values())
        elif isinstance(value, Tensor):
            yield value
        elif key == "views":
            for view in value:
                yield from tensors(view)


def num_bytes(batch: SubData) -> int:
    """The bytes of a mini-batch's tensors."""
    return batch.n_id.nbytes + sum(tensor.nbytes for tensor in tensors(batch.data))
