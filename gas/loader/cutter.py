"""Cut mini-batches out of a partitioned graph: some parts, their one-hop halo, and the edges."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import (
    BATCH_SIZE,
    PAIRS,
    PARTS,
    SHARD,
    SHARDS,
    GraphVersions,
    Shard,
    check_nodes,
    clone_unless_learnable,
    find_layout,
    get_mapped_rows,
    keys_by_row,
    remove_edges,
    with_csr_features,
)
from gas.history import Encoded
from gas.loader.batch import RNG_FINGERPRINT, SubData, empty_graph, find_node_order, set_graph_info
from gas.loader.cache import BatchCache, FeatureSums
from gas.loader.lazy import LazyRows, gather, read_lazy_rows, set_rows
from gas.native import Relabeler, check_integer, check_range, renamed

FEATURES = ("x", "edge_attr")  # Attributes whose rows are gathered on first access.
ADJACENCY_KEYS = ("edge_index", "adj_t", "num_nodes")  # Made for every batch.


class BatchCutter:
    """Cuts mini-batches out of a partitioned graph; the base of :class:`SubgraphLoader`.

    It has that loader's arguments, and ``relabel``, the graph's edges by rows, with their weights.
    """

    def __init__(
        self,
        data: Data,
        ptr: Tensor,
        relabel: Relabeler,
        layout: str,
        bipartite: bool,
        edge_weight: bool,
    ) -> None:
        self.data = data
        self.ptr = ptr
        self.bipartite = bipartite
        self.layout = layout
        self.edge_weight = edge_weight
        self.num_nodes: int = relabel.num_nodes
        self.shard: Shard | None = get_shard(data)
        """The shard that ``data`` is; ``None`` for a whole graph."""
        self.node_order = None if self.shard is not None else find_node_order(data)
        self._source = data  # Before transforms; ``like`` of a loader compares it.
        self._views: Any = None  # A gas.augment.Views, or the EpochViews of an epoch.
        self.augmentation: Any = None
        self._layout = find_layout(layout)
        self._relabel = relabel
        self.feature_sums = FeatureSums(relabel, self.shard)
        self._rowptr = relabel.rowptr
        self._weighted = relabel.weight is not None
        self._weight_key = "edge_weight" if self._weighted and data.get("adj_t") is None else None
        self._bounds: list[int] = ptr.tolist()
        self._copied = {"edge_index", "adj_t", *(["edge_weight"] if edge_weight else [])}
        self._cache, self._cache_features = BatchCache(-1), False
        self._fingerprint: int | None = None
        self._classify_attributes()

    def cut(self, parts: Sequence[int]) -> SubData:
        """Return the mini-batch of some parts, in increasing order.

        Raises:
            ValueError: If a part doesn't exist, or is named twice.
        """
        num_parts = self.ptr.numel() - 1
        key = tuple(sorted(parts))
        if not key or key[0] < 0 or key[-1] >= num_parts or len(set(key)) < len(key):
            raise ValueError(
                f"'parts' is {list(parts)}, expected different parts between 0 and {num_parts - 1}"
            )
        self._sync_graph()
        batch = self._cut(key)
        self._add_rows(batch)
        self._add_others(batch)
        return self._tag_ids(batch)

    def cut_nodes(self, nodes: Tensor) -> SubData:
        """Return the mini-batch of given nodes of any parts; its halo is their neighbours.

        ``model(loader.cut_nodes(nodes))`` computes and pushes these nodes alone, and pulls the
        histories of their neighbours. Its time doesn't depend on the size of the graph.

        Args:
            nodes: Their rows in ``loader.data``, of shape ``[B]``, each listed once.

        Raises:
            IndexError: If a node doesn't exist.
            ValueError: If there is none, or one is listed twice.
        """
        check_range("nodes", nodes, self.num_own)
        if nodes.numel() == 0:
            raise ValueError("'nodes' is empty, expected at least one node")
        self._sync_graph()
        return self._cut_nodes(nodes)

    around = renamed("loader.around", "cut_nodes")

    def _cut_nodes(self, nodes: Tensor) -> SubData:
        """Return the mini-batch of checked nodes."""
        data, n_id = self._cut_edges(nodes, self.bipartite)
        starts = torch.ones(nodes.numel(), dtype=torch.bool)
        starts[1:] = nodes.diff() != 1
        first = starts.nonzero().view(-1)
        count = torch.diff(first, append=first.new_tensor([nodes.numel()]))
        batch = SubData(data, nodes.numel(), n_id, nodes[first], count)
        self._add_rows(batch)
        self._add_others(batch)
        return self._tag_ids(batch)

    def neighbourhood(self, nodes: Tensor, num_hops: int, most: int | None = None) -> Data:
        """Return the ``num_hops``-hop neighbourhood of given nodes, from which they are computed.

        Args:
            nodes: The nodes, of shape ``[B]``, each listed once.
            num_hops: The number of hops, at least 1.
            most: The largest number of nodes and edges together. (default: no limit)

        Returns:
            ``nodes``, then all nodes with a path of at most ``num_hops`` edges to them, by the
            length of the path, with all edges but those into the farthest nodes. ``n_id`` holds the
            nodes' ids in the graph.

        Raises:
            ValueError: If a node is named twice, or there is no hop, or the graph is a shard.
            IndexError: If a node doesn't exist.
            MemoryError: If there are more nodes and edges than ``most``, before features are read.
        """
        check_integer("num_hops", num_hops, 1)
        if self.shard is not None:
            raise ValueError(
                "'loader' has a shard of a graph, whose replicas of nodes have no edges into them: "
                "make a loader of the whole graph, in a process of its own"
            )
        check_range("nodes", nodes, self.num_nodes)
        self._sync_graph()
        for _ in range(num_hops - 1):
            nodes = self._relabel(nodes).n_id
        data, n_id = self._cut_edges(nodes, bipartite=False)
        size = n_id.numel() + data.e_id.numel()
        if most is not None and size > most:
            raise MemoryError(
                f"there are {size} nodes and edges within {num_hops} hops, expected at most {most}"
            )
        batch = SubData(data, n_id.numel(), n_id, n_id[:0], n_id[:0])
        self._add_rows(batch)
        self._add_others(batch)
        read_lazy_rows(data)
        data.n_id = n_id
        return data

    @property
    def num_own(self) -> int:
        """Number of nodes in the loader's parts, which come first; all nodes but for a shard."""
        return self._bounds[-1]

    @property
    def degree(self) -> Tensor:
        """The number of edges into each node, of shape ``[num_nodes]``."""
        return self._rowptr.diff()

    def edges_per_part(self) -> Tensor:
        """Return the number of edges into the nodes of each part, of shape ``[num_parts]``."""
        return self._rowptr[self.ptr].diff()

    def halos(self) -> Iterator[Tensor]:
        """Return the halo of every part, in order, each of shape ``[h]``, int64."""
        for begin, end in itertools.pairwise(self._bounds):
            yield self._relabel(torch.arange(begin, end)).n_id[end - begin :]

    def get_cached_batches(self) -> list[SubData]:
        """Return the cached batches, which must not be changed."""
        return self._cache.batches()

    def get_mapped_features(self) -> Encoded | None:
        """Return the features of nodes if they are mapped from a file, else ``None``."""
        self._sync_graph()
        return get_mapped_rows(self.data.get("x"))

    def use_features(self, x: Tensor) -> None:
        """Read the features of nodes from another tensor of the same values.

        ``loader.data`` is then another graph than the one that was passed.
        """
        self._sync_graph()
        if x is not self.data.x:
            self.data = copy.copy(self.data)
            self.data.x = x
            self._classify_attributes()

    def forget_edges(self) -> None:
        """Remove edges and weights from ``loader.data``; the loader has a copy.

        Batches then have weights in ``adj_t`` only. Edges stay if another attribute has a row per
        edge. ``loader.data`` is then another graph than the one that was passed.
        """
        self._sync_graph()
        self.data = self._source = remove_edges(self.data)
        self._classify_attributes()
        self._cache.clear()

    def _classify_attributes(self) -> None:
        """Sort the attributes of the graph into those of nodes, of edges, and others."""
        # Pairs are by the graph's rows, those of LinkLoader by the batch's.
        ours = {PARTS, SHARDS, BATCH_SIZE, PAIRS, *([] if self.shard is None else [SHARD])}
        keys = [key for key in self.data.keys() if key not in ours]  # noqa: SIM118  # A graph iterates pairs.
        self._node_keys, self._edge_keys = keys_by_row(self.data, keys)
        rows = {*self._node_keys, *self._edge_keys, *ADJACENCY_KEYS}
        self._other_keys = [key for key in keys if key not in rows]
        self._versions = GraphVersions(self.data)
        self._trainable = [  # A SparseTensor's "requires_grad" is a method.
            key
            for key in keys
            if key in rows and getattr(self.data[key], "requires_grad", False) is True
        ]

    def _sync_graph(self) -> None:
        """Apply changes of the graph's features and attributes; its edges were copied.

        Raises:
            ValueError: If edges were changed, or workers can't follow.
        """
        changed = self._versions.find_changes(self.data)
        if not changed:
            return
        self._check_changes(changed)
        check_nodes(self.data, self.num_nodes)
        self.data = with_csr_features(self.data)
        edge_keys = set(self._edge_keys)
        self._classify_attributes()
        if self._cache_features or changed & edge_keys.union(self._edge_keys):
            self._cache.clear()

    def is_outdated(self) -> bool:
        """Return whether edges or weights of the graph have changed since they were copied."""
        return bool(self._versions.find_changes(self.data) & self._copied)

    def _check_changes(self, changed: set[str]) -> None:
        """Refuse changes of attributes that were copied."""
        if changed & self._copied:
            raise ValueError(
                f"'{min(changed & self._copied)}' of the graph was changed after the loader was "
                "made, which has its own copy of edges and weights: make a new loader"
            )

    def _collate(self, parts: list[int]) -> SubData:
        """Return the mini-batch of some parts, perhaps a cached one."""
        # Training can't use cached tensors that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            key = tuple(sorted(parts))
            batch = self._cache.get(key)
            keeps_rows = self._cache_features and not self._trainable
            if batch is None:
                batch = self._cut(key)
                if keeps_rows:
                    self._add_rows(batch)
                    read_lazy_rows(batch.data)
                batch = self._cache.put(key, batch, self._node_keys)
            if not keeps_rows:
                self._add_rows(batch)
            self._add_others(batch)
        return batch

    def _cut(self, parts: tuple[int, ...]) -> SubData:
        """Make the mini-batch of some parts, without attributes of nodes and edges."""
        ranges = [(self._bounds[part], self._bounds[part + 1]) for part in parts]
        nodes = torch.cat([torch.arange(begin, end) for begin, end in ranges])
        data, n_id = self._cut_edges(nodes, self.bipartite)
        offset = torch.tensor([begin for begin, _ in ranges])
        count = torch.tensor([end - begin for begin, end in ranges])
        return SubData(data, nodes.numel(), n_id, offset, count)

    def _cut_edges(self, nodes: Tensor, bipartite: bool) -> tuple[Data, Tensor]:
        """Return a graph of the edges into some nodes, and the ids of these and of their halo."""
        dtype = torch.int32 if self.layout == "fused" else torch.int64
        rowptr, col, e_id, n_id, weight = self._relabel(nodes, dtype)

        data = empty_graph(self.data)
        if weight is not None and self._weight_key in self._edge_keys:
            # The relabeler has selected them.
            data[self._weight_key] = weight.view(-1, *self.data[self._weight_key].shape[1:])
        data.e_id = e_id
        data.num_nodes = n_id.numel()
        self._set_adjacency(data, rowptr, col, weight, n_id.numel(), bipartite)
        return data, n_id

    def _add_rows(self, batch: SubData) -> None:
        """Add the attributes of nodes and edges; rows of features are gathered on first access."""
        tables, data = self.data._store._mapping, batch.data  # Data takes seven calls per access.
        for keys, index, per_node in (
            (self._node_keys, batch.n_id, True),
            (self._edge_keys, data._store._mapping["e_id"], False),
        ):
            for key in keys:
                if key == self._weight_key:  # The relabeler has selected them.
                    continue
                table = tables[key]
                later = key in FEATURES or table.requires_grad  # Gradients are disabled here.
                if later and not table.is_inference():  # Lazy rows need a version counter.
                    set_rows(data, key, LazyRows(key, table, index, per_node))
                else:
                    data._store._mapping[key] = gather(table, index)
        self.feature_sums.add_to(data)

    def _add_others(self, batch: SubData) -> None:
        """Add other attributes, and the views of the epoch."""
        for key in self._other_keys:
            value = self.data._store._mapping[key]
            value = clone_unless_learnable(value) if isinstance(value, Tensor) else value
            batch.data._store._mapping[key] = value
        if self._views is not None:
            n_id, e_id, shard = batch.n_id, batch.data.e_id, self.shard
            if shard is not None:  # Views take ids of the whole graph.
                n_id, e_id = shard.nodes[n_id], shard.edges[e_id]
            batch.data.views = self._views.cut(batch.data, n_id, self._weighted, e_id)

    def _set_adjacency(
        self,
        data: Data,
        rowptr: Tensor,
        col: Tensor,
        value: Tensor | None,
        num_cols: int,
        bipartite: bool,
    ) -> None:
        """Set the adjacency of a batch in the layout of the loader."""
        if self.layout == "edge_index":
            data.edge_index = self._layout.make(rowptr, col, None, num_cols)
            if value is not None and "edge_weight" not in data:
                data.edge_weight = value
            return
        if not bipartite:
            halo_rows = num_cols - rowptr.numel() + 1
            rowptr = torch.nn.functional.pad(rowptr, (0, halo_rows), value=col.numel())
        if value is None and self.layout == "csr":  # Such a matrix must have values.
            x = self.data.get("x")
            dtype = x.dtype if x is not None and x.is_floating_point() else None
            value = torch.ones(col.numel(), dtype=dtype)
        data.adj_t = self._layout.make(rowptr, col, value, num_cols)

    def _tag_ids(self, batch: SubData) -> SubData:
        """Attach size, order, shard and random state to ``n_id``, which worker processes lose."""
        square = batch if not self.bipartite or self.layout == "edge_index" else None
        set_graph_info(batch.n_id, self.num_nodes, self.node_order, square)
        if self.shard is not None:
            setattr(batch.n_id, SHARD, self.shard)
            chain = self.augmentation
            setattr(batch.n_id, RNG_FINGERPRINT, 0 if chain is None else chain.rng_fingerprint())
        return batch

    def _graph_fingerprint(self) -> int:
        """Return a checksum of the edges, to recognise a graph and its order of nodes."""
        if self._fingerprint is None:
            crc = 0
            for ids in (self._rowptr, self._relabel.col):
                for block in ids.split(1 << 20):
                    crc = zlib.crc32(block.long().numpy().data, crc)
            self._fingerprint = crc
        return self._fingerprint


def get_parts(data: Data, ptr: Tensor | None) -> Tensor:
    """Return ``ptr``, or else the parts of the graph."""
    if ptr is not None:
        return ptr
    parts = data.get(PARTS)
    if parts is None:
        raise ValueError(
            "'ptr' is missing, and the graph has no 'parts': cut it, "
            "data = gas.cluster(data, num_parts), or pass the ptr of gas.metis"
        )
    return parts


def get_shard(data: Data) -> Shard | None:
    """Return the shard that a graph is; ``None`` for a whole graph."""
    shard = data.get(SHARD)
    return shard if isinstance(shard, Shard) else None
