"""Update of a model's histories as its graph changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

import gas
from gas.contrib.dynamic.attributes import find_differing_rows
from gas.graph import PERM, entry_rows, find_changed_rows
from gas.native import share_cores
from gas.scalable import (
    NodePredictor,
    NotedState,
    ScalableGNN,
    has_state,
    is_exact,
    mark_exact,
    note_state,
    preserve_modes,
)

if TYPE_CHECKING:
    from gas import SubgraphLoader


class HistoryUpdater:
    """The histories of a model, and their rows whose neighbours have changed.

    Args:
        model: The model, or ``None``.

    Raises:
        ValueError: If it isn't a model of one graph in one process.
    """

    def __init__(self, model: ScalableGNN | None) -> None:
        model = getattr(model, "_orig_mod", model)  # The model that torch.compile was given.
        if model is not None and not isinstance(model, ScalableGNN):
            raise ValueError(
                f"'model' is a {type(model).__name__}, expected a ScalableGNN: convert it, "
                "gas.to_scalable(net, data)"
            )
        self.model = model
        # Rows changed since the last update of histories.
        self.changed = torch.empty(0, dtype=torch.long)
        # Of a model that was exact before the first change: the state since the last change.
        self._noted: NotedState | None = None

    def check(self) -> None:
        """Raise an error if the model spans ranks, or a history's store can't be resized."""
        if self.model is None:
            return
        if self.model.ranks is not None:
            raise ValueError(
                "'model' is one of several ranks, whose graphs don't grow: use it in one process"
            )
        for history in self.model.histories:
            if type(history.store).resize is gas.history.Store.resize:
                raise ValueError(
                    f"'store' is a {type(history.store).__name__}, which can't grow: write its "
                    "resize(num_rows), or use store='host' or 'disk'"
                )

    def check_size(self, data: Data) -> None:
        """Refuse a graph with another number of nodes than the model's."""
        if self.model is not None and data.num_nodes != self.model.num_nodes:
            raise ValueError(
                f"'model' has histories of {self.model.num_nodes} nodes, but the graph has "
                f"{data.num_nodes}: use model.for_graph(num_nodes), which shares the weights"
            )

    def extend(self, num_nodes: int, graph: Data) -> None:
        """Add rows for new nodes to the histories.

        Args:
            num_nodes: The new number of nodes.
            graph: The graph before the update.
        """
        model = self.model
        if model is None:
            return
        self.changed = self.stale_rows(graph)
        was_exact = is_exact(model, graph) or has_state(model, graph, self._noted)
        before = model.num_nodes
        try:
            for history in model._all_histories():
                history.resize(num_nodes)
        except BaseException:
            for history in model._all_histories():
                history.resize(before)
            raise
        model.num_nodes = num_nodes
        self._noted = note_state(model, None) if was_exact else None  # mark_stale has the graph.

    def stale_rows(self, graph: Data) -> Tensor:
        """Return rows whose neighbours changed since the histories were exact."""
        is_fresh = self.model is not None and is_exact(self.model, graph)
        return self.changed[:0] if is_fresh else self.changed

    def mark_stale(self, changed: Tensor, loader: SubgraphLoader) -> None:
        """Mark changed rows, and rows that are computed from them, as the oldest.

        Args:
            changed: Further rows whose neighbours have changed, of shape ``[n]``.
            loader: A loader of the current graph.
        """
        self.changed = torch.cat([self.changed, changed]).unique()
        model = self.model
        if model is None:
            return
        model._started_pulls = []
        model._node_predictor = NodePredictor(loader)
        rows = self.changed
        for layer, history in enumerate(model.histories):
            history.mark_stale(rows)
            for bank in model.view_histories or ():
                bank[layer].mark_stale(rows)
            rows = find_reached(loader, rows)
        self._noted = None if self._noted is None else note_state(model, loader.data)

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, loader: SubgraphLoader, size: int, fill_all: Callable[[], Any]) -> Tensor:
        """Compute the stale rows of histories, and those that depend on them.

        Args:
            loader: A loader of the current graph.
            size: The number of nodes to compute at once.
            fill_all: A function that writes all rows.

        Returns:
            The rows of nodes whose outputs have changed.
        """
        model, graph, rows = self.model, loader.data, self.stale_rows(loader.data)
        if model is None:
            return rows
        was_exact = is_exact(model, graph) or has_state(model, graph, self._noted)
        warned = [history._warned for history in model.histories]
        try:
            for history in model.histories:  # New rows are read before they are written.
                history._warned = True
            with preserve_modes(model, False):
                for _ in model.histories:  # Each sweep updates one more layer.
                    if 2 * rows.numel() > loader.num_nodes:
                        fill_all()
                        rows = torch.arange(loader.num_nodes)
                        break
                    for nodes in rows.split(size) if rows.numel() else ():
                        with share_cores(loader.leave_cores):
                            model(loader.cut_nodes(nodes))
                    rows = find_reached(loader, rows)
        finally:
            for history, before in zip(model.histories, warned, strict=True):
                history._warned = before
        self.changed = self.changed[:0]
        self._noted = None
        if was_exact:
            mark_exact(model, graph)
        return rows


def find_reached(loader: SubgraphLoader, rows: Tensor) -> Tensor:
    """Return nodes and all targets of their edges, in rising order."""
    if not rows.numel():
        return rows
    is_reached = torch.zeros(loader.num_nodes, dtype=torch.bool)
    is_reached[rows] = True
    leads = is_reached.index_select(0, loader._relabel.col)
    is_reached[entry_rows(loader._rowptr, torch.from_numpy(np.flatnonzero(leads.numpy())))] = True
    return is_reached.nonzero().view(-1)


def find_changed_nodes(before: SubgraphLoader, after: SubgraphLoader) -> Tensor:
    """Return nodes whose edges, or attributes of these, itself or a neighbour, differ."""
    keys = sorted(before._edge_keys)
    sides = []
    for loader in (before, after):
        relabel = loader._relabel
        values = [loader.data[key] for key in keys]
        values += [] if relabel.weight is None else [relabel.weight]
        sides.append((loader._rowptr, relabel.col, values))
    rows = find_changed_rows(*sides)
    for key in before._node_keys:
        old, new = before.data[key], after.data[key]
        if old is not new and key != PERM:
            rows = torch.cat([rows, find_reached(after, find_differing_rows(old, new))])
    return rows
