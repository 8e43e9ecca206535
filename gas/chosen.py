"""Outputs of chosen nodes: one mini-batch around them, with what histories have of the rest."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph.cluster import PERM
from gas.graph.folder.opening import MAPPED
from gas.graph.permute import PARTS
from gas.graph.versions import version
from gas.loader import SubgraphLoader
from gas.native.checks import check_range

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN

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

    @torch.no_grad()
    def predict(self, model: ScalableGNN, nodes: Tensor) -> Tensor:
        """See :meth:`gas.ScalableGNN.predict`."""
        if not isinstance(nodes, Tensor):
            raise ValueError(f"'nodes' is {nodes!r}, expected a tensor of ids, or a mask")
        check_range("nodes", nodes, self.row_of.numel())
        rows, place = self.row_of[nodes].unique(return_inverse=True)
        batch = self.loader.around(rows)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            out = model(batch, push=False)
        finally:
            for module, mode in modes:
                module.training = mode
        _report(model, self.loader.data, batch.n_id[batch.batch_size :])
        return out.cpu()[place]


# What each model computed with, and on which graph, when its histories were last made exact.
_exact: weakref.WeakKeyDictionary[ScalableGNN, tuple[Any, _Seen]] = weakref.WeakKeyDictionary()


def made_exact(model: ScalableGNN, graph: Data | None) -> None:
    """Notes that histories are what the model gives, as it is now, on a graph, if it is known."""
    _exact[model] = state_of(model), {} if graph is None else _seen(graph)


def is_exact(model: ScalableGNN, graph: Data) -> bool:
    """Whether neither model nor graph have changed since the histories were made exact."""
    state, seen = _exact.get(model, (None, {}))
    return state is not None and state == state_of(model) and _is_seen(graph, seen)


def state_of(model: ScalableGNN) -> Any:
    """Tells weights and histories from what they are after any change."""
    tensors = [*model.parameters(), *model.buffers()]
    changes = [history.changes for history in model.histories]
    return [(id(tensor), tensor._version) for tensor in tensors], changes


def _seen(graph: Data) -> _Seen:
    """The tensors that outputs may depend on, as they are now, without keeping them.

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


def _report(model: ScalableGNN, graph: Data, halo: Tensor) -> None:
    """Warns of rows that were read and aren't exact, with their age."""
    if not model.histories or not halo.numel() or is_exact(model, graph):
        return
    ages = [h.num_pushes - int(h.written_at[halo.cpu()].min()) for h in model.histories]
    warnings.warn(
        f"the outputs of chosen nodes read rows of histories up to {max(ages)} pushes old, and "
        "something has changed since they were exact: model.predict(graph) makes them so",
        stacklevel=4,
    )


def predict_nodes(
    model: ScalableGNN, graph: Any, nodes: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """See :meth:`gas.ScalableGNN.predict`.

    Raises:
        ValueError: If the graph isn't clustered, or the model or an option isn't for some nodes.
        IndexError: If a node doesn't exist.
    """
    if options or model.ranks is not None:
        what = "the model is one of several ranks" if not options else f"{min(options)!r} is given"
        raise ValueError(
            f"'nodes' are chosen, but {what}: pass a loader with its options, to a model of one "
            "process"
        )
    known = model._chosen
    if known is None or not any(graph is each for each in (known.loader, known.loader._first)):
        loader = graph
        if isinstance(graph, Data):
            loader = SubgraphLoader(graph, log=False, cache=False)
        if PERM not in loader.data:
            raise ValueError(
                "the graph has no 'perm', by which nodes are found: use gas.cluster(data, "
                "num_parts), or model(loader.around(nodes)), by their rows in the loader"
            )
        known = model._chosen = ChosenNodes(loader)
    return known.predict(model, nodes)
