"""A dynamic graph, which gets nodes and edges and loses edges, and its model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas import SubData, SubgraphLoader
from gas.contrib.dynamic.attributes import (
    EDGES,
    IDS,
    WEIGHT,
    append_rows,
    check_classes,
    check_pairs,
    check_row_counts,
    check_rows,
    complete_rows,
    extend_ids,
    set_edges,
    to_layout,
)
from gas.contrib.dynamic.histories import HistoryUpdater, find_changed_nodes
from gas.graph import (
    PARTS,
    PERM,
    check_finite,
    check_weight,
    cluster,
    entry_rows,
    find_entries,
    has_entry,
    insert_entries,
    invert_permutation,
    is_row_per_edge,
    is_row_per_node,
    read_csr,
    remove_entries,
    with_edge_index,
)
from gas.native import check_integer, is_sparse, renamed

if TYPE_CHECKING:
    from gas.scalable import ScalableGNN

UNSUPPORTED_OPTIONS = ("shards", "out", "memory", "in_place")


class DynamicGraph:
    """A graph that is partitioned once, then gets nodes and edges, and loses edges.

    New nodes are appended, in parts of their own of the average size; edges are merged into the
    compressed rows. Nothing is partitioned or sorted again. The histories of the model grow, and
    rows with changed neighbours, within the model's hops, count as the oldest until
    :meth:`update_histories` or training writes them::

        live = DynamicGraph(data, num_parts=40, model=model)
        model.predict(live.graph)  # Fills the histories.
        new = live.update(nodes={"x": x, "y": y}, edge_index=edges)
        live.update_histories()
        out = model.predict(live.graph, nodes=new)

    Ids are those of ``data``; new nodes get the next ones. An update copies everything with a row
    per node or edge, including histories in memory, and applies the model's ``transform`` to the
    whole graph again.

    Args:
        data: The graph, as :func:`gas.cluster` takes it; it is not modified.
        num_parts: The initial number of parts.
        model: The model whose histories grow with the graph. Its parameters with a row per node,
            such as embeddings, don't. (default: none)
        **kwargs: Further arguments of :func:`gas.cluster`: ``method``, ``seed``, ``recursive``,
            ``cache``, ``log``; and ``check``, which :meth:`update` follows, too.

    Raises:
        ValueError: If the graph or an option is unusable, naming it.
    """

    def __init__(
        self, data: Data, num_parts: int, *, model: ScalableGNN | None = None, **kwargs: Any
    ) -> None:
        for name in UNSUPPORTED_OPTIONS:
            if name in kwargs:
                raise ValueError(
                    f"{name!r} is given, which graphs that grow don't have: leave it out"
                )
        if isinstance(data, HeteroData):
            raise ValueError(
                "'data' is a HeteroData, which can't grow: make it homogeneous, "
                "data.to_homogeneous()"
            )
        self._checks: bool = kwargs.get("check", True)
        self._updater = HistoryUpdater(model)
        self._updater.check()
        self._updater.check_size(data)
        raw = cluster(data, num_parts, **kwargs)
        keys = [key for key, _ in raw if key not in EDGES]
        rowptr, col, edges = _read_edge_rows(raw)
        self._rowptr, self._col, self._edges = rowptr, col, edges
        self._nodes: dict[str, Any] = {k: raw[k] for k in keys if is_row_per_node(raw, k)}
        self._others = {k: raw[k] for k in keys if k not in edges and k not in self._nodes}
        for key, value in self._nodes.items():
            if type(value) is not Tensor or not (value.layout == torch.strided or is_sparse(value)):
                raise ValueError(
                    f"'{key}' is encoded, an array or sparse in another layout than CSR "
                    f"({type(value).__name__}), and can't get rows: pass an ordinary tensor, or "
                    "torch.sparse_csr"
                )
        self._parts = raw[PARTS]
        self._part_size = -(-int(self._parts[-1]) // num_parts)
        self._fills_last = False  # Whether the last part has new nodes.
        self.graph: Data
        """The current graph, clustered, with an ``adj_t`` of compressed rows.

        Attributes assigned to it are kept. An update replaces it, and removes the edges of the old
        one.
        """
        graph = self._prepare(rowptr, col, edges, self._nodes, self._others)
        graph[PARTS] = self._parts
        self.graph, self._published = graph, graph.to_dict()
        self._base = SubgraphLoader(graph, log=False, cache=False)

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes, which is the id of the next one."""
        return self._rowptr.numel() - 1

    def loader(self, **kwargs: Any) -> SubgraphLoader:
        """Return a loader of the current graph, which the next update invalidates.

        Args:
            **kwargs: See :class:`gas.SubgraphLoader`.
        """
        others = ("graph_transform", "epoch_transform")
        if kwargs.get("edge_weight", True) and not any(kwargs.get(name) for name in others):
            kwargs = {"like": self._base, **kwargs}
        return _LiveLoader(self.graph, **kwargs)

    @torch.inference_mode(False)  # Inference tensors can't be trained with later.
    def update(
        self,
        nodes: Mapping[str, Any] | Data | int | None = None,
        edge_index: Tensor | None = None,
        edges: Mapping[str, Tensor] | None = None,
        remove: Tensor | None = None,
    ) -> Tensor:
        """Add nodes and edges, and remove edges, all at once.

        Args:
            nodes: The attributes of new nodes with a row per node, such as ``x``, each of shape
                ``[n, ...]``; sparse features may be given as dense ones. Without masks, nodes are
                in none; without ``y``, they have no label: -1, or NaN if ``y`` has real numbers.
                If the graph has ``node_id``, the new ids. The number of nodes, if no attribute has
                a row per node. (default: no new nodes)
            edge_index: New edges, of shape ``[2, E]``, by the ids of nodes, including new ones. For
                undirected graphs, both directions. (default: none)
            edges: The attributes of new edges, such as ``edge_attr`` or ``edge_weight``, each of
                shape ``[E, ...]``. (default: none)
            remove: Edges to remove, of shape ``[2, R]``, with all their duplicates.
                (default: none)

        Returns:
            The ids of the new nodes, of shape ``[n]``.

        Raises:
            ValueError: If something is missing or doesn't fit, or ``x`` or ``edge_attr`` isn't
                finite; nothing is changed then.
            MemoryError: If there is no room for the histories.
            OSError: If the disk has no room for the histories.
        """
        self._updater.check()
        self._adopt_attributes()
        new_nodes, count, others = self._check_nodes(nodes)
        before, total = self.num_nodes, self.num_nodes + count
        added = check_pairs("edge_index", edge_index, total)
        new_edges = check_rows("edges", edges or {}, self._edges, added.size(1))
        if WEIGHT in new_edges:
            check_weight(new_edges[WEIGHT])
        if self._checks:
            check_finite("nodes.x", new_nodes.get("x"))
            check_finite("edges.edge_attr", new_edges.get("edge_attr"))
        perm = torch.cat([self._nodes[PERM], torch.arange(before, total)])
        row_of = invert_permutation(perm)

        taken = self._find_entries(check_pairs("remove", remove, before), row_of)
        changed = [torch.arange(before, total), row_of[added[1]], entry_rows(self._rowptr, taken)]
        rowptr, col, mine = self._rowptr, self._col, self._edges
        if taken.numel():
            rowptr, col, kept = remove_entries(rowptr, col, taken)
            mine = {key: value[kept] for key, value in mine.items()}
        src, dst = row_of[added]
        rowptr, col, source = insert_entries(rowptr, col, dst, src, total)
        merged = {key: torch.cat([value, new_edges[key]])[source] for key, value in mine.items()}
        longer = dict(self._nodes)
        if count:
            longer |= {key: append_rows(longer[key], rows) for key, rows in new_nodes.items()}
        longer[PERM] = perm
        parts, fills_last = self._extend_parts(count)
        graph = self._prepare(rowptr, col, merged, longer, others)
        graph[PARTS] = parts
        rows = torch.cat(changed).unique()
        base = SubgraphLoader(graph, log=False, cache=False)
        model = self._updater.model
        if model is not None and model.transform is not None:  # It may change other rows, too.
            rows = torch.cat([rows, find_changed_nodes(self._base, base)]).unique()

        self._updater.extend(total, self.graph)  # From here on, nothing fails.
        old, raw = self.graph, {"_rowptr": rowptr, "_col": col, "_edges": merged, "_nodes": longer}
        raw |= {
            "_others": others,
            "_parts": parts,
            "_fills_last": fills_last,
            "graph": graph,
            "_base": base,
        }
        vars(self).update(raw, _published=graph.to_dict())  # In one step, in case of an interrupt.
        del old.adj_t  # Loaders of the old graph then raise an error.
        self._updater.mark_stale(rows, base)
        return torch.arange(before, total)

    def update_histories(self, **kwargs: Any) -> Tensor:
        """Compute the rows of histories that updates have made stale.

        They are computed in evaluation mode, in mini-batches around them, layer by layer. Histories
        that were exact before are exact again, as after ``model.predict(live.graph)``, which is
        called if more than half of the rows are stale.

        Args:
            **kwargs: Options of the mini-batches, such as ``layout``; see :meth:`loader`.

        Returns:
            The sorted ids of nodes whose outputs have changed, of shape ``[n]``.

        Raises:
            ValueError: If there is no model.
        """
        updater, model = self._updater, self._updater.model
        if model is None:
            raise ValueError("'model' is missing: pass it to DynamicGraph(data, num_parts, model=)")
        loader = self.loader(**{"log": False, "cache": False, **kwargs})

        def fill_all() -> None:
            model.predict(self.graph, **kwargs)

        rows = updater.update(loader, self._part_size, fill_all)
        return self.graph[PERM][rows].sort().values

    refresh = renamed("DynamicGraph.refresh", "update_histories")

    @property
    def stale(self) -> Tensor:
        """Return the ids of nodes whose edges changed since the histories were last updated."""
        return self.graph[PERM][self._updater.stale_rows(self.graph)].sort().values

    def _prepare(
        self,
        rowptr: Tensor,
        col: Tensor,
        edges: Mapping[str, Tensor],
        nodes: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> Data:
        """Return the graph after the model's transform, as compressed rows."""
        data = Data.from_dict({**others, **nodes})
        set_edges(data, rowptr, col, edges)
        check_row_counts(data, nodes, edges)
        model = self._updater.model
        if model is None or model.transform is None:
            return data
        prepared = copy.copy(model.prepare(with_edge_index(data)))
        rowptr, col, found = _read_edge_rows(prepared)
        for key in ("edge_index", WEIGHT, *found):
            if key in prepared:
                del prepared[key]
        set_edges(prepared, rowptr, col, found)
        return prepared

    def _adopt_attributes(self) -> None:
        """Keep attributes that were assigned to ``graph``; refuse those that an update replaces."""
        for key, value in self.graph.to_dict().items():
            before = self._published.get(key)
            if value is before:
                continue
            is_ours = key in (*EDGES, PERM) or is_row_per_edge(self.graph, key)
            known = {**self._others, **self._nodes, **self._edges}
            if is_ours or (before is not None and known.get(key) is not before):
                raise ValueError(
                    f"'{key}' of the graph was replaced, which an update makes anew: give new "
                    "edges to update(), and change the others before DynamicGraph is made"
                )
            if is_row_per_node(self.graph, key):
                self._nodes[key] = value
            else:
                self._others[key] = value

    def _extend_parts(self, count: int) -> tuple[Tensor, bool]:
        """Return the parts with new nodes, which fill the last part if that has new nodes."""
        ends, fills_last = self._parts.tolist(), self._fills_last
        total = ends[-1] + count
        if count and fills_last:
            ends[-1] = min(ends[-2] + self._part_size, total)
        while ends[-1] < total:
            ends.append(min(ends[-1] + self._part_size, total))
            fills_last = True
        return torch.tensor(ends), fills_last

    def _check_nodes(
        self, nodes: Mapping[str, Any] | Data | int | None
    ) -> tuple[dict[str, Tensor], int, dict[str, Any]]:
        """Return the rows and the number of new nodes, and the graph's other attributes."""
        table = {key: value for key, value in self._nodes.items() if key != PERM}
        if isinstance(nodes, Data):
            nodes = nodes.to_dict()
        given = dict(nodes) if isinstance(nodes, Mapping) else {}
        others, known = self._others, self._others.get(IDS)
        has_ids = isinstance(known, np.ndarray | list)
        ids = given.pop(IDS, None) if has_ids else None
        for key in given.keys() & table.keys():
            given[key] = to_layout(key, given[key], table[key])
        sizes = {v.size(0) for v in given.values() if isinstance(v, Tensor) and v.dim()}
        count = max(sizes, default=0 if ids is None else np.size(ids))
        if nodes is not None and not isinstance(nodes, Mapping):
            check_integer("nodes", nodes, 0)
            count = nodes
        rows = complete_rows(given, table, count) if given or count else {}
        if "y" in rows:
            outputs, names = getattr(self._updater.model, "out_channels", 0), others.get("classes")
            num_names = len(names) if isinstance(names, list) else 0
            check_classes(rows["y"], table["y"], max(outputs or 0, num_names))
        if has_ids and (count or ids is not None):
            others = {**others, IDS: extend_ids(known, ids, count)}
        return rows, count, others

    def _find_entries(self, pairs: Tensor, row_of: Tensor) -> Tensor:
        """Return the positions of the edges to remove."""
        src, dst = row_of[pairs]
        missing = ~has_entry(self._rowptr, self._col, dst, src)
        if bool(missing.any()):
            edge = pairs[:, missing][:, 0].tolist()
            raise ValueError(
                f"'remove' has the edge {edge[0]} -> {edge[1]}, which the graph doesn't have: "
                "leave it out, or swap its ends if it is the other direction"
            )
        return find_entries(self._rowptr, self._col, dst, src)


def _read_edge_rows(data: Data) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return ``rowptr``, ``col``, and the attributes and weights of edges in their order."""
    (rowptr, col, e_id), weight = read_csr(data)
    keys = [key for key, _ in data if key not in EDGES and is_row_per_edge(data, key)]
    edges = {key: data[key] if e_id is None else data[key][e_id] for key in keys}
    return rowptr, col, edges if weight is None else {**edges, WEIGHT: weight}


class _LiveLoader(SubgraphLoader):
    """Loader that refuses to continue an epoch after an update of the graph."""

    def _tag_ids(self, batch: SubData) -> SubData:
        self._sync_graph()
        return super()._tag_ids(batch)
