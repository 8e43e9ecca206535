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
from gas.loader import SubgraphLoader
from gas.native.checks import check_range

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


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
        _report(model, batch.n_id[batch.batch_size :])
        return out.cpu()[place]


# What each model computed with when its histories were last made exact.
_exact: weakref.WeakKeyDictionary[ScalableGNN, Any] = weakref.WeakKeyDictionary()


def made_exact(model: ScalableGNN) -> None:
    """Notes that the histories are what the model gives, as it is now."""
    _exact[model] = state_of(model)


def is_exact(model: ScalableGNN) -> bool:
    """Whether nothing has changed since the histories were made exact."""
    return _exact.get(model) == state_of(model)


def state_of(model: ScalableGNN) -> Any:
    """Tells weights and histories from what they are after any change."""
    tensors = [*model.parameters(), *model.buffers()]
    changes = [history.changes for history in model.histories]
    return [(id(tensor), tensor._version) for tensor in tensors], changes


def _report(model: ScalableGNN, halo: Tensor) -> None:
    """Warns of rows that were read and aren't exact, with their age."""
    if not model.histories or not halo.numel() or is_exact(model):
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
