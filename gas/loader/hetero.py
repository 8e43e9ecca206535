"""Loader of mini-batches of heterogeneous graphs: ``HeteroData`` of some parts and their halo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas.graph import (
    BATCH_SIZE,
    PAIRS,
    PARTS,
    GraphVersions,
    check_features,
    invert_permutation,
    is_row,
    parts_of,
    to_homogeneous_edges,
    types_of,
    with_hetero_csr_features,
)
from gas.loader.batch import SubData, find_node_order, set_graph_info
from gas.loader.batch_sampler import choose_batch_size, remember_batch_size
from gas.loader.subgraph import SubgraphLoader
from gas.native import check_flags, gather_sparse_rows, is_sparse

TYPE, ROW = "type_of_node", "row_of_node"
REPLACED = (PARTS, PAIRS, "num_nodes", "edge_index")  # Or left out of mini-batches.


class HeteroLoader(SubgraphLoader):
    """Loads mini-batches of a heterogeneous graph, each some parts and their halo.

    ``gas.SubgraphLoader(graph)`` makes one if ``graph`` is a ``HeteroData`` of :func:`gas.cluster`.
    A batch is a ``HeteroData``, too. In each type the in-batch nodes come first, then those of the
    halo, from which an edge of any type leads to an in-batch node:

    * ``batch['paper'].batch_size``: how many of them are in-batch nodes, which may be none;
    * ``batch['paper'].n_id``: their rows in the graph, of shape ``[batch_size + halo]``;
    * ``batch['paper'].perm``: their rows in the graph that :func:`gas.cluster` was given;
    * ``batch['paper'].offset``, ``.count``: the in-batch nodes are the rows ``offset[i]`` to
      ``offset[i] + count[i] - 1`` of each part ``i``, of shape ``[parts]``;
    * ``batch['author', 'writes', 'paper'].edge_index``: every edge into an in-batch node, of shape
      ``[2, E]``; ``.e_id``: its position in the graph, of shape ``[E]``;
    * ``x``, ``y``, ``train_mask``, ``edge_attr`` and all other tensors with a row per node or edge.

    Args:
        data: The graph, from :func:`gas.cluster`. Only ``data.batch_size`` is modified. Features
            are read from it when a batch is made.
        ptr: Not supported; the parts are those of the graph.
        batch_size: See :class:`SubgraphLoader`.
        bipartite: Not supported; convolutions of several types take ``edge_index``.
            (default: ``True``)
        log: Report progress on standard error. (default: ``True``)
        layout: ``"edge_index"``. (default: ``"edge_index"``)
        check: Refuse NaN and infinite features. (default: ``False``: :func:`gas.cluster` has)
        **kwargs: ``cache``, ``leave_cores``, and arguments of ``torch.utils.data.DataLoader``, such
            as ``shuffle``; see :class:`gas.SubgraphLoader`.

    Raises:
        ValueError: If the graph or an option is unusable, naming it.
    """

    @check_flags
    def __init__(
        self,
        data: HeteroData,
        ptr: Tensor | None = None,
        batch_size: int | None = None,
        bipartite: bool = True,
        log: bool = True,
        *,
        layout: str | None = None,
        check: bool = False,
        **kwargs: Any,
    ) -> None:
        if layout not in (None, "edge_index"):
            raise ValueError(
                f"'layout' is {layout!r}, but mini-batches of a heterogeneous graph have "
                "'edge_index', which layers of several types take: leave it out"
            )
        for name in ("epoch_transform", "graph_transform", "like"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name!r} is given, which looks at one type of nodes and edges: leave it out, "
                    "or make the graph homogeneous, data.to_homogeneous()"
                )
        if ptr is not None or not bipartite:
            name = "bipartite" if ptr is None else "ptr"
            raise ValueError(
                f"{name!r} is given, but of a heterogeneous graph the parts are those that "
                "gas.cluster has set, and edges are an edge_index: leave it out"
            )
        self.hetero_data = data = with_hetero_csr_features(data)
        """The heterogeneous graph; ``data`` is the same graph without types."""
        self.types = types_of(data)
        parts = parts_of(data, self.types)
        if check:
            check_features(data)
        self._parts = torch.stack(parts)
        one, sizes = _to_homogeneous(data, self.types, self._parts)
        size = choose_batch_size(data, batch_size, False, kwargs)
        super().__init__(
            one, sizes, size, log=log, layout="edge_index", edge_weight=False, **kwargs
        )
        self.node_order = find_node_order(data)
        self._typed_versions = GraphVersions(self._typed_attributes())
        self._copied = {f"{kind}.edge_index" for kind in self.types.edges}
        remember_batch_size(data, batch_size, False)

    def _typed_attributes(self) -> Iterator[tuple[str, Any]]:
        """Iterate over the names and values of all attributes of the heterogeneous graph."""
        for store in self.hetero_data.stores:
            for key, value in store.items():
                yield f"{store._key}.{key}", value

    def _sync_graph(self) -> None:
        """Refuse changes of edges, which were copied, and those that workers can't follow."""
        super()._sync_graph()
        changed = self._typed_versions.find_changes(self._typed_attributes())
        if changed:
            self._check_changes(changed)
            self._typed_versions = GraphVersions(self._typed_attributes())

    def cut(self, parts: Sequence[int]) -> HeteroData:
        """Return the mini-batch of some parts, in increasing order.

        Raises:
            ValueError: If a part doesn't exist, or is named twice.
        """
        return self._tag_ids(self._split_by_type(super().cut(parts)))

    def cut_nodes(self, nodes: Tensor) -> HeteroData:
        """Raise an error: mini-batches of given nodes are for homogeneous graphs."""
        raise ValueError(
            "'nodes' of a heterogeneous graph can't be chosen: cut the parts that have them, "
            "loader.cut(parts)"
        )

    def _collate(self, parts: list[int]) -> HeteroData:
        """Cut the mini-batch of some parts, for ``DataLoader``."""
        return self._split_by_type(super()._collate(parts))

    def _tag_ids(self, batch: Any) -> Any:
        """Attach the order of the graph's nodes to ``n_id`` of each type, in the main process."""
        if isinstance(batch, HeteroData):  # A homogeneous one is split by type afterwards.
            for kind, size in self.types.num_nodes.items():
                set_graph_info(batch[kind].n_id, size, self.node_order)
        return batch

    def _split_by_type(self, batch: SubData) -> HeteroData:
        """Convert a mini-batch of the homogeneous graph to ``HeteroData``."""
        out = HeteroData()
        for key, value in self.hetero_data._global_store.items():
            if key != BATCH_SIZE:
                out[key] = value
        kind, row = batch.data[TYPE], batch.data[ROW]
        parts = torch.searchsorted(self.ptr, batch.offset, right=True) - 1
        local = torch.empty_like(row)
        for number, (name, size) in enumerate(self.types.num_nodes.items()):
            where = (kind == number).nonzero().view(-1)
            local[where] = torch.arange(where.numel())
            n_id, store = row[where], out[name]
            self._add_attributes(store, name, n_id, size)
            store.num_nodes, store.n_id = n_id.numel(), n_id
            store.batch_size = int((where < batch.batch_size).sum())
            begin, end = self._parts[number, parts], self._parts[number, parts + 1]
            store.offset, store.count = begin, end - begin
        ends, e_id = local[batch.data.edge_index], batch.data.e_id
        of = torch.searchsorted(self.types.first_edge, e_id, right=True) - 1
        sizes = torch.bincount(of, minlength=len(self.types.edges)).tolist()
        chosen_edges = of.argsort(stable=True).split(sizes)
        for number, which in enumerate(chosen_edges):
            self._add_edges(out, number, ends[:, which], e_id[which])
        return out

    def _add_edges(self, out: HeteroData, number: int, edge_index: Tensor, e_id: Tensor) -> None:
        """Add the edges of one type, and their attributes."""
        name = self.types.edges[number]
        first, last = self.types.first_edge[number : number + 2].tolist()
        store, e_id = out[name], e_id - first
        self._add_attributes(store, name, e_id, last - first)
        store.edge_index, store.e_id = edge_index, e_id

    def _add_attributes(self, store: Any, name: Any, ids: Tensor, size: int) -> None:
        """Add the attributes of a type; of those with ``size`` rows the rows ``ids``."""
        for key in self.hetero_data[name]:
            if key not in REPLACED:
                value = self.hetero_data[name][key]
                if is_row(self.hetero_data, name, key, size):
                    value = gather_sparse_rows(value, ids) if is_sparse(value) else value[ids]
                store[key] = value


SubgraphLoader._hetero_class = HeteroLoader  # SubgraphLoader.__new__ makes one.


def _to_homogeneous(data: HeteroData, types: Any, parts: Tensor) -> tuple[Data, Tensor]:
    """Return a homogeneous graph, nodes sorted by part, then by type, and where parts begin."""
    edges = to_homogeneous_edges(data, types)
    sizes = parts.diff()
    part = torch.cat([torch.repeat_interleave(size) for size in sizes])
    kind = torch.repeat_interleave(types.first_node.diff())
    order = part.sort(stable=True).indices
    place = invert_permutation(order)
    one = Data(edge_index=torch.stack([place[edges.src], place[edges.dst]]))
    one.num_nodes = order.numel()
    row = torch.cat([torch.arange(size) for size in types.first_node.diff().tolist()])
    one[TYPE], one[ROW] = kind[order].short(), row[order]
    ptr = torch.zeros(sizes.size(1) + 1, dtype=torch.long)
    ptr[1:] = sizes.sum(0).cumsum(0)
    return one, ptr
