"""A clustered graph that follows what is added to it and taken out of it, with its model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas.graph.cluster import PERM, cluster
from gas.graph.edges import (
    check_ids,
    check_weight,
    is_row_per_edge,
    is_row_per_node,
    read_rows,
    with_edge_index,
)
from gas.graph.entries import (
    changed_rows,
    every_entry,
    has_entry,
    rows_of,
    with_entries,
    without_entries,
)
from gas.graph.layout import no_values
from gas.graph.permute import PARTS
from gas.growing.following import Following
from gas.loader import SubgraphLoader
from gas.native.checks import check_integer
from gas.native.sparse_rows import sparse_csr

if TYPE_CHECKING:
    from gas.scalable import ScalableGNN

WEIGHT = "edge_weight"
EDGES = ("edge_index", "adj_t", WEIGHT, "num_nodes", PARTS)
NOT_THERE = ("shards", "out", "memory", "in_place")


class GrowingGraph:
    """A graph that gets new nodes and edges, or loses edges; it is cut into parts once.

    New nodes get rows behind those that are there, in parts of their own, as large as the others
    are on average; edges are merged into the compressed rows. Nothing is partitioned or sorted
    anew. The model's histories get rows that nobody has written yet, and rows whose neighbours have
    changed, near or far, count as the oldest until :meth:`refresh` or training writes them::

        live = GrowingGraph(data, num_parts=40, model=model)
        model.predict(live.graph)  # Fills the histories.
        new = live.update(nodes={"x": x, "y": y}, edge_index=edges)
        live.refresh()
        out = model.predict(live.graph, nodes=new)

    Ids are those of ``data``; new nodes get the next ones. An update copies what has a row per node
    or edge, histories in memory included, some bytes a nanosecond; ``transform`` of the model is
    applied to the whole graph anew.

    Args:
        data: The graph, as :func:`gas.cluster` takes it; it is not modified.
        num_parts: The number of parts to begin with.
        model: Whose histories are to follow. Parameters of its own with a row per node, such as
            embeddings, do not. (default: none)
        **kwargs: Further arguments of :func:`gas.cluster`: ``method``, ``seed``, ``recursive``,
            ``cache``, ``log``.

    Raises:
        ValueError: If the graph or an option is unusable, naming it.
    """

    def __init__(
        self, data: Data, num_parts: int, *, model: ScalableGNN | None = None, **kwargs: Any
    ) -> None:
        for name in NOT_THERE:
            if name in kwargs:
                raise ValueError(
                    f"{name!r} is given, which graphs that grow don't have: leave it out"
                )
        if isinstance(data, HeteroData):
            raise ValueError(
                "'data' is a HeteroData, which can't grow: make it homogeneous, "
                "data.to_homogeneous()"
            )
        self._following = Following(model)
        self._following.check()
        raw = cluster(data, num_parts, **kwargs)
        (rowptr, col, e_id), weight = read_rows(raw)
        keys = [key for key in raw.keys() if key not in EDGES]  # noqa: SIM118  # It iterates pairs.
        edges = {key: raw[key] for key in keys if is_row_per_edge(raw, key)}
        if e_id is not None:
            edges = {key: value[e_id] for key, value in edges.items()}
        if weight is not None:
            edges[WEIGHT] = weight
        self._rowptr, self._col, self._edges = rowptr, col, edges
        self._nodes: dict[str, Any] = {k: raw[k] for k in keys if is_row_per_node(raw, k)}
        self._others = {k: raw[k] for k in keys if k not in edges and k not in self._nodes}
        for key, value in self._nodes.items():
            if type(value) is not Tensor or value.layout != torch.strided:
                raise ValueError(
                    f"'{key}' is sparse, encoded or an array ({type(value).__name__}), and can't "
                    "get rows: pass an ordinary tensor"
                )
        self._parts = raw[PARTS]
        self._part_size = -(-int(self._parts[-1]) // num_parts)
        self._fills_last = False  # Whether the last part is of new nodes.
        self.graph = Data()
        """What :func:`gas.cluster` returns: the same object after updates, with other tensors."""
        self._publish(self._prepared(rowptr, col, edges, self._nodes))

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, which is the next one's id."""
        return self._rowptr.numel() - 1

    def loader(self, **kwargs: Any) -> SubgraphLoader:
        """Mini-batches of the graph as it is now; after the next update they are refused.

        Args:
            **kwargs: See :class:`gas.SubgraphLoader`.
        """
        if kwargs.get("edge_weight", True):
            kwargs = {"like": self._base, **kwargs}
        return SubgraphLoader(self.graph, **kwargs)

    def update(
        self,
        nodes: Mapping[str, Tensor] | Data | int | None = None,
        edge_index: Tensor | None = None,
        edges: Mapping[str, Tensor] | None = None,
        remove: Tensor | None = None,
    ) -> Tensor:
        """Adds nodes and edges, and takes edges out, all at once.

        Args:
            nodes: Of new nodes whatever has a row per node, such as ``x``, each of shape
                ``[n, ...]``; masks may be left out. Their number, where nothing has. (default: no
                new nodes)
            edge_index: New edges, of shape ``[2, E]``, from and to ids of nodes, new ones included.
                Of an undirected graph both directions. (default: none)
            edges: Of new edges whatever has a row per edge, such as ``edge_attr`` or
                ``edge_weight``, each of shape ``[E, ...]``. (default: none)
            remove: Edges to take out, of shape ``[2, R]``; all that join the same nodes are.
                (default: none)

        Returns:
            The ids of the new nodes, of shape ``[n]``.

        Raises:
            ValueError: If something is missing or doesn't fit; nothing has changed then.
            MemoryError: If there is no room for the histories.
            OSError: If the disk has no room for the histories.
        """
        self._following.check()
        new_nodes, count = self._check_nodes(nodes)
        before, total = self.num_nodes, self.num_nodes + count
        added = _ids("edge_index", edge_index, total)
        new_edges = _rows("edges", edges or {}, self._edges, added.size(1))
        if WEIGHT in new_edges:
            check_weight(new_edges[WEIGHT])
        perm = torch.cat([self._nodes[PERM], torch.arange(before, total)])
        row_of = torch.empty_like(perm)
        row_of[perm] = torch.arange(total)

        taken = self._entries(_ids("remove", remove, before), row_of)
        changed = [torch.arange(before, total), row_of[added[1]], rows_of(self._rowptr, taken)]
        rowptr, col, mine = self._rowptr, self._col, self._edges
        if taken.numel():
            rowptr, col, kept = without_entries(rowptr, col, taken)
            mine = {key: value[kept] for key, value in mine.items()}
        src, dst = row_of[added]
        rowptr, col, source = with_entries(rowptr, col, dst, src, total)
        merged = {key: torch.cat([value, new_edges[key]])[source] for key, value in mine.items()}
        longer = dict(self._nodes)
        if count:
            longer |= {key: torch.cat([longer[key], rows]) for key, rows in new_nodes.items()}
        longer[PERM] = perm
        prepared = self._prepared(rowptr, col, merged, longer)
        rows = torch.cat(changed).unique()
        if self._transforms:  # Which may change rows that are far from those.
            rows = changed_rows(_parts_of(self.graph), _parts_of(prepared))

        self._following.extend(total)
        self._rowptr, self._col, self._edges, self._nodes = rowptr, col, merged, longer
        self._add_parts(count)
        self._publish(prepared)
        self._following.mark(rows, self._base)
        return torch.arange(before, total)

    def refresh(self) -> Tensor:
        """Writes the rows of histories that updates have made stale, and no others.

        They are computed in evaluation mode, in mini-batches around them, layer by layer: as far as
        the histories were exact before, they are again, like after ``model.predict(live.graph)``,
        which it is where more than half of the rows are stale.

        Returns:
            The ids of nodes whose outputs are others than before, of shape ``[n]``, rising.

        Raises:
            ValueError: If there is no model.
        """
        model = self._following.model
        rows = self._following.refresh(
            self._base, self._part_size, lambda: model is not None and model.predict(self.graph)
        )
        return self.graph[PERM][rows].sort().values

    @property
    def stale(self) -> Tensor:
        """The ids of nodes whose edges have changed since the last refresh, of shape ``[n]``."""
        return self.graph[PERM][self._following.changed].sort().values

    @property
    def _transforms(self) -> bool:
        model = self._following.model
        return model is not None and model.transform is not None

    def _prepared(
        self, rowptr: Tensor, col: Tensor, edges: Mapping[str, Tensor], nodes: Mapping[str, Any]
    ) -> Data:
        """The graph as the model's layers take it, as compressed rows."""
        data = Data.from_dict({**self._others, **nodes})
        _set_edges(data, rowptr, col, edges)
        model = self._following.model
        if model is None or model.transform is None:
            return data
        prepared = copy.copy(model.prepare(with_edge_index(data)))
        (rowptr, col, e_id), weight = read_rows(prepared)
        keys = [key for key in prepared.keys() if key not in EDGES]  # noqa: SIM118
        found = {key: prepared[key] for key in keys if is_row_per_edge(prepared, key)}
        if e_id is not None:
            found = {key: value[e_id] for key, value in found.items()}
        for key in ("edge_index", WEIGHT, *found):
            if key in prepared:
                del prepared[key]
        _set_edges(prepared, rowptr, col, found if weight is None else {**found, WEIGHT: weight})
        return prepared

    def _publish(self, prepared: Data) -> None:
        for key in list(self.graph.keys()):
            del self.graph[key]
        for key, value in prepared:
            self.graph[key] = value
        self.graph[PARTS] = self._parts
        self._base = SubgraphLoader(self.graph, log=False, cache=False)

    def _add_parts(self, count: int) -> None:
        """Fills the last part, if it is of new nodes, then makes others."""
        ends = self._parts.tolist()
        total = ends[-1] + count
        if count and self._fills_last:
            ends[-1] = min(ends[-2] + self._part_size, total)
        while ends[-1] < total:
            ends.append(min(ends[-1] + self._part_size, total))
            self._fills_last = True
        self._parts = torch.tensor(ends)

    def _check_nodes(
        self, nodes: Mapping[str, Tensor] | Data | int | None
    ) -> tuple[dict[str, Tensor], int]:
        """What new nodes have, and how many they are."""
        table = {key: value for key, value in self._nodes.items() if key != PERM}
        if isinstance(nodes, Data):
            nodes = nodes.to_dict()
        given = nodes if isinstance(nodes, Mapping) else {}
        sizes = {v.size(0) for v in given.values() if isinstance(v, Tensor) and v.dim()}
        count = max(sizes, default=0)
        if nodes is not None and not isinstance(nodes, Mapping):
            check_integer("nodes", nodes, 0)
            count = nodes
        masks = {
            key: value.new_zeros(count, *value.shape[1:])
            for key, value in table.items()
            if key.endswith("_mask") or not count
        }
        return _rows("nodes", {**masks, **given}, table, count), count

    def _entries(self, pairs: Tensor, row_of: Tensor) -> Tensor:
        """The positions of edges that are to be taken out."""
        src, dst = row_of[pairs]
        missing = ~has_entry(self._rowptr, self._col, dst, src)
        if bool(missing.any()):
            edge = pairs[:, missing][:, 0].tolist()
            raise ValueError(
                f"'remove' has the edge {edge[0]} -> {edge[1]}, which the graph doesn't have: "
                "leave it out, or swap its ends if it is the other direction"
            )
        return every_entry(self._rowptr, self._col, dst, src)


def _set_edges(data: Data, rowptr: Tensor, col: Tensor, edges: Mapping[str, Tensor]) -> None:
    weight, num_nodes = edges.get(WEIGHT), rowptr.numel() - 1
    value = no_values(col.numel()) if weight is None else weight
    data.num_nodes = num_nodes
    data.adj_t = sparse_csr(rowptr.to(col.dtype), col, value, num_nodes)
    for key, rows in edges.items():
        if key != WEIGHT:
            data[key] = rows


def _parts_of(graph: Data) -> tuple[Tensor, Tensor, Tensor | None]:
    (rowptr, col, _), weight = read_rows(graph)
    return rowptr, col, weight


def _ids(name: str, pairs: Tensor | None, num_nodes: int) -> Tensor:
    """Edges between nodes that are there, of shape ``[2, E]``, int64."""
    if pairs is None:
        return torch.empty(2, 0, dtype=torch.long)
    is_tensor = isinstance(pairs, Tensor)
    are_ids = is_tensor and pairs.dtype in (torch.int64, torch.int32)
    if not are_ids or pairs.dim() != 2 or pairs.size(0) != 2:
        what = f"{pairs.dtype} of shape {list(pairs.shape)}" if is_tensor else type(pairs).__name__
        raise ValueError(f"'{name}' is {what}, expected ids of nodes of shape [2, E]")
    check_ids(pairs, num_nodes, name)
    return pairs.long()


def _rows(
    name: str, given: Mapping[str, Tensor], table: Mapping[str, Tensor], count: int
) -> dict[str, Tensor]:
    """New rows for each attribute of a table.

    Raises:
        ValueError: If an attribute is missing, is new, or has other rows.
    """
    wrong = sorted(given.keys() ^ table.keys()) if count or given else []
    if wrong:
        what = "lacks" if wrong[0] in table else "has"
        raise ValueError(
            f"'{name}' {what} {wrong[0]!r}, expected {', '.join(sorted(table)) or 'nothing'}: what "
            f"the graph has for each {'node' if name == 'nodes' else 'edge'}"
        )
    for key, rows in given.items():
        shape = [count, *table[key].shape[1:]]
        if not isinstance(rows, Tensor) or list(rows.shape) != shape:
            found: Any = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"{key!r} of '{name}' is {found}, expected a tensor of shape {shape}")
    return {
        key: given[key].to(value.dtype) if key in given else value[:0]
        for key, value in table.items()
    }
