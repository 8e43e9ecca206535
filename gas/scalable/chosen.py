"""Outputs of chosen nodes: one mini-batch around them, with what histories have of the rest."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import MAPPED, PARTS, PERM, Ids, to_original_order, version
from gas.loader import SubgraphLoader
from gas.native import check_range, share_cores, warn
from gas.scalable.call import BatchModel

_Seen = dict[str, tuple["weakref.ref[Tensor]", int]]


class ChosenNodes:
    """Finds the outputs of some nodes of a clustered graph.

    Args:
        loader: A loader of it.
    """

    def __init__(self, loader: SubgraphLoader) -> None:
        self.loader = loader
        perm = loader.data[PERM]
        self.row_of = torch.empty_like(perm)
        self.row_of[perm] = torch.arange(perm.numel())
        self._ids: tuple[Any, Ids] | None = None  # Of the graph's node_id, as it was then.

    def nodes_with(self, ids: Any) -> Tensor:
        """Find nodes by the user's ids, those of ``node_id``.

        Args:
            ids: The ids, a list, or an array or tensor of shape ``[B]``; some may be repeated.

        Returns:
            The rows of the graph as it was given, of shape ``[B]``.

        Raises:
            ValueError: If the graph has no ids, or one of them isn't there.
        """
        data = graph_of(self.loader)
        given = data.get("node_id")
        if given is None:
            raise ValueError(
                "'ids' are given, but the graph has no 'node_id': set data.node_id, an array of "
                "the ids of its nodes, before gas.cluster, or pass their rows, nodes="
            )
        wanted = np.asarray(ids.tolist() if isinstance(ids, Tensor) else ids)
        if wanted.ndim != 1:
            raise ValueError(f"'ids' is {ids!r}, expected a list of ids: pass [id] for one")
        if self._ids is None or self._ids[0] is not given:
            self._ids = given, Ids(_array(data, given), self.row_of.numel())
            twice = self._ids[1].find_duplicate()
            if twice is not None:
                self._ids = None
                raise ValueError(
                    f"'node_id' of the graph has {twice!r} several times, expected an id for each "
                    "node: pass rows instead, nodes="
                )
        rows = self._ids[1].rows(wanted) if wanted.size else np.empty(0, np.int64)
        if (rows < 0).any():
            missing = wanted[rows < 0].tolist()
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"'ids' holds {missing[0]!r}{more}, which no node of the graph has: "
                f"expected ids of its 'node_id', such as {_array(data, given)[:1].tolist()[0]!r}"
            )
        return torch.from_numpy(rows)

    @torch.no_grad()
    def predict(self, model: BatchModel, nodes: Any) -> Tensor:
        """See :meth:`gas.ScalableGNN.predict`."""
        if not isinstance(nodes, Tensor):
            raise ValueError(f"'nodes' is {nodes!r}, expected a tensor of ids, or a mask")
        check_range("nodes", nodes, self.row_of.numel())
        rows, place = self.row_of[nodes].unique(return_inverse=True)
        batch = self.loader.cut_nodes(rows)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with share_cores(self.loader.leave_cores):
                out = model(batch, push=False)
        finally:
            for module, mode in modes:
                module.training = mode
        _report(model, self.loader.data, batch.n_id[batch.batch_size :])
        return out.cpu()[place]


def without_prefetch(graph: Any) -> Any:
    """Return the loader that a :class:`gas.PrefetchLoader` has; anything else as it is."""
    return getattr(graph, "loader", graph)


def graph_of(graph: Any) -> Data:
    """Return a graph, or that of a loader."""
    return graph if isinstance(graph, Data) else without_prefetch(graph).data


def _array(data: Data, ids: Any) -> np.ndarray:
    """Return node ids in the order of the original graph; tensors were permuted."""
    if isinstance(ids, Tensor):
        return to_original_order(data, ids.cpu()).numpy()
    return np.asarray(ids)


# What each model computed with, and on which graph, when its histories were last made exact.
_exact: weakref.WeakKeyDictionary[BatchModel, tuple[Any, _Seen]] = weakref.WeakKeyDictionary()


def made_exact(model: BatchModel, graph: Data | None) -> None:
    """Note that histories are what the model gives, as it is now, on a graph, if it is known."""
    _exact[model] = state_of(model), {} if graph is None else _seen(graph)


def is_exact(model: BatchModel, graph: Data) -> bool:
    """Return whether neither model nor graph have changed since the histories were made exact."""
    state, seen = _exact.get(model, (None, {}))
    return state is not None and state == state_of(model) and _is_seen(graph, seen)


def state_of(model: BatchModel) -> Any:
    """Tell weights and histories from what they are after any change."""
    tensors = [*model.parameters(), *model.buffers()]
    changes = [history.changes for history in model.histories]
    return [(id(tensor), tensor._version) for tensor in tensors], changes


def _seen(graph: Data) -> _Seen:
    """Return the tensors that outputs may depend on, as they are now, without keeping them.

    Those of a graph folder are others each time it is opened, and aren't looked at.
    """
    tensors = {key: value for key, value in graph.to_dict().items() if isinstance(value, Tensor)}
    if any(hasattr(value, MAPPED) for value in tensors.values()):
        return {}
    return {
        key: (weakref.ref(value), version(value))
        for key, value in tensors.items()
        if key not in ("y", PERM, PARTS) and not key.endswith("_mask")
    }


def _is_seen(graph: Data, seen: _Seen) -> bool:
    now = _seen(graph)
    both = ((now[key], seen[key]) for key in now.keys() & seen.keys())
    return all(new[0]() is old[0]() and new[1] == old[1] for new, old in both)


def _report(model: BatchModel, graph: Data, halo: Tensor) -> None:
    """Warn of rows that were read and aren't exact, with their age."""
    if not model.histories or not halo.numel() or is_exact(model, graph):
        return
    ages = [h.num_pushes - int(h.written_at[halo.cpu()].min()) for h in model.histories]
    warn(
        f"the outputs of chosen nodes read rows of histories up to {max(ages)} pushes old, and "
        "something has changed since they were exact: model.predict(graph) makes them so",
    )


def predict_nodes(
    model: BatchModel, graph: Any, nodes: Tensor | None, ids: Any, options: Mapping[str, Any]
) -> Tensor:
    """See :meth:`gas.ScalableGNN.predict`; of ``nodes`` and ``ids`` one is given.

    Raises:
        ValueError: If the graph isn't clustered, or the model or an option isn't for some nodes.
        IndexError: If a node doesn't exist.
    """
    name = "nodes" if ids is None else "ids"
    if nodes is not None and ids is not None:
        raise ValueError("'nodes' and 'ids' are given, which both choose nodes: leave one out")
    if options or model.ranks is not None:
        what = "the model is one of several ranks" if not options else f"{min(options)!r} is given"
        raise ValueError(
            f"'{name}' are chosen, but {what}: pass a loader with its options, to a model of one "
            "process"
        )
    known, graph = model._chosen, without_prefetch(graph)
    if known is None or not any(graph is each for each in (known.loader, known.loader._source)):
        loader = graph
        if isinstance(graph, Data):
            loader = SubgraphLoader(graph, log=False, cache=False)
        if PERM not in loader.data:
            raise ValueError(
                "the graph has no 'perm', by which nodes are found: use gas.cluster(data, "
                "num_parts), or model(loader.cut_nodes(nodes)), by their rows in the loader"
            )
        known = model._chosen = ChosenNodes(loader)
    return known.predict(model, nodes if ids is None else known.nodes_with(ids))
