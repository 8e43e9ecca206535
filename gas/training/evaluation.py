"""Evaluate a model on a clustered graph: scores by split, and a table of predictions by node id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gas.graph import open_if_path, to_original_order
from gas.loader import SubgraphLoader
from gas.native import check_integer
from gas.scalable import PrefetchLoader, graph_of
from gas.training.metrics import (
    Metric,
    check_metric_name,
    known_target_mask,
    score,
    split_mask,
    usual_metric,
)

SPLITS = ("train", "val", "test")


def evaluate(
    model: Any,
    graph: Any,
    metric: Metric | None = None,
    *,
    split: int = 0,
    **options: Any,
) -> dict[str, float]:
    """Score the predictions of a model for the nodes in each of a graph's masks.

    Labels and masks are those of the graph that the model predicts on, so that the order of nodes
    is always right::

        gas.evaluate(model, graph)  # {"train": 0.93, "val": 0.81, "test": 0.82}

    It calls ``model.predict(graph)``, layer-wise inference: the model's mode and the statistics of
    its norms aren't changed; the histories are exact afterwards.

    Args:
        model: The model, of :func:`gas.to_scalable`, :mod:`gas.models` or :func:`gas.distribute`.
        graph: The graph of :func:`gas.cluster`, a loader of it, or the path of its folder; with
            several ranks the whole graph, on every rank. Unknown targets, a negative class or NaN,
            don't count. Floating-point ``y`` of shape ``[N, C]`` are labels if each is 0, 1 or NaN,
            and else real numbers.
        metric: One of :data:`gas.training.METRICS`, or a function of outputs and targets, called
            with those nodes of a split whose targets are all known. (default: accuracy of classes,
            micro-F1 of labels ``[N, C]``, ROC-AUC of a binary target with a single output, R2 of
            real numbers)
        split: Which split of masks of shape ``[N, S]``. (default: ``0``)
        **options: Further arguments of :meth:`gas.ScalableGNN.predict`, such as ``batch_size``.

    Returns:
        The scores by ``"train"``, ``"val"`` and ``"test"``, for the masks that the graph has;
        higher is better, NaN if no node counts.

    Raises:
        ValueError: If the graph isn't clustered, or has no labels or no masks.
    """
    check_metric_name(metric)
    graph = _check(model, graph)
    if _is_known(graph):
        _check_scorable(graph_of(graph), split)  # Before the histories are written.
    found = _predict(model, graph, options)
    _check_scorable(found.stored, split)
    out, y = found.out, found.get("y")
    given = {name: found.mask(name, split) for name in SPLITS}
    masks = {name: mask for name, mask in given.items() if mask is not None}
    metric = metric or usual_metric(out, y)
    return {name: score(metric, out, y, mask) for name, mask in masks.items()}


def predictions(model: Any, graph: Any, *, split: int = 0, **options: Any) -> dict[str, Any]:
    """Return a table of a model's predictions by node id, as ``gas train`` writes it.

    ``pandas.DataFrame(gas.predictions(model, graph))`` has a row for each node, in the order of the
    graph before :func:`gas.cluster`.

    Args:
        model: The model.
        graph: The graph of :func:`gas.cluster`, a loader of it, or the path of its folder.
        split: Which split of masks of shape ``[N, S]``. (default: ``0``)
        **options: Further arguments of :meth:`gas.ScalableGNN.predict`, such as ``batch_size``,
            and ``nodes`` or ``ids`` for a table of some nodes.

    Returns:
        Columns by name, each with an entry for each node, or for each of those chosen:

        * ``node``: its id in ``node_id``, or else its row.
        * ``prediction``: a class, by its name if the graph has ``classes``; a real number, or
          several; or 0 or 1 for each of several labels.
        * ``probability``: that of the predicted class, or of each label; absent for real numbers.
        * ``label``: the target in the same form, ``None`` for an unknown class or label, and NaN
          for an unknown real number; absent without ``y``.
        * ``split``: ``"train"``, ``"val"``, ``"test"`` or ``None``; absent without masks.

    Raises:
        ValueError: If the graph isn't clustered.
    """
    graph = _check(model, graph)
    if _is_known(graph):
        _check_split(graph_of(graph), split)  # Before the histories are written.
    found = _predict(model, graph, options)
    _check_split(found.stored, split)
    return prediction_columns(found, split)


class Predictions:
    """The outputs of a graph's nodes and their attributes, in the original order.

    Args:
        out: The outputs, of shape ``[N, C]``, in the order of the graph before clustering.
        stored: The attributes of the graph.
        to_original_order: Puts rows of these attributes into that order.
        nodes: The nodes of the outputs, of shape ``[B]``, by their rows in that order. (default:
            all)
    """

    def __init__(
        self,
        out: Tensor,
        stored: Any,
        to_original_order: Callable[[Tensor], Tensor],
        nodes: Tensor | None = None,
    ) -> None:
        self.out, self.stored, self._to_original_order = out, stored, to_original_order
        self._nodes = nodes

    def get(self, key: str) -> Any:
        """Return an attribute; tensors have their rows in the order of the outputs."""
        value = self.stored.get(key, None)
        if not isinstance(value, Tensor):
            return value
        value = self._to_original_order(value.cpu())
        return value if self._nodes is None else value[self._nodes]

    @property
    def node_ids(self) -> np.ndarray:
        """The ids of the nodes in ``node_id``, or else their rows."""
        ids = self.get("node_id")
        if isinstance(ids, Tensor):
            return ids.numpy()
        nodes = np.arange(self.out.size(0)) if self._nodes is None else self._nodes.numpy()
        return nodes if ids is None else np.asarray(ids)[nodes]

    @property
    def classes(self) -> Sequence[Any] | None:
        """The names of the classes, if the graph has them."""
        return self.stored.get("classes", None)

    def mask(self, name: str, split: int) -> Tensor | None:
        """Return the nodes of a split, of shape ``[N]``; ``None`` if the graph has no such mask."""
        mask = self.get(f"{name}_mask")
        return None if mask is None else split_mask(mask, split)


def prediction_columns(found: Predictions, split: int) -> dict[str, Any]:
    """Return the columns of :func:`predictions`."""
    out, y = found.out.float(), found.get("y")
    names = found.classes
    columns: dict[str, Any] = {"node": found.node_ids}
    out = out.view(-1, 1) if out.dim() == 1 else out
    if y is not None and y.dim() == 2 and y.size(1) == 1 and out.size(1) > 1:
        y = y.view(-1)
    is_single = out.size(1) == 1
    kind = ("r2" if is_single else "accuracy") if y is None else usual_metric(out, y)
    label: Any = None
    if kind == "r2":
        columns["prediction"] = out.view(-1).numpy() if is_single else list(out.numpy())
        if y is not None:
            y = y.float() if y.is_floating_point() else y
            label = y.view(-1).numpy() if is_single else list(y.numpy())
    elif kind == "micro_f1":
        columns["prediction"] = list((out > 0).int().numpy())
        columns["probability"] = list(out.sigmoid().numpy())
        label = _labels(y)
    else:
        if out.size(1) == 1:  # One output of two classes.
            out = torch.cat([torch.zeros_like(out), out], dim=1)
        best = out.softmax(dim=1).max(dim=1)
        columns["prediction"] = _name_classes(best.indices, names)
        columns["probability"] = best.values.numpy()
        label = None if y is None else _name_classes(y.view(-1), names)
    if label is not None:
        columns["label"] = label
    masks = [found.mask(name, split) for name in SPLITS]
    parts = torch.full((out.size(0),), -1)
    for number, mask in enumerate(masks):
        if mask is not None:
            parts[mask] = number
    if any(mask is not None for mask in masks):
        columns["split"] = _name_classes(parts, SPLITS)
    return columns


def _is_known(graph: Any) -> bool:
    """Return whether :func:`graph_of` returns a homogeneous graph."""
    is_ours = isinstance(graph, Data | SubgraphLoader | PrefetchLoader)
    return is_ours and not hasattr(graph, "hetero_data")


def _check_scorable(stored: Any, split: int) -> None:
    """Refuse a graph without labels, or without any mask of the split, given its attributes."""
    has_masks = any(stored.get(f"{name}_mask", None) is not None for name in SPLITS)
    if stored.get("y", None) is None or not has_masks:
        missing = "'train_mask', 'val_mask' or 'test_mask'" if "y" in stored else "'y'"
        raise ValueError(
            f"'graph' has no {missing}, by which nodes are scored: set it before gas.cluster, or "
            "score model.predict(graph), which is in the order of the graph before"
        )
    _check_split(stored, split)


def _check_split(stored: Any, split: int) -> None:
    """Refuse a split that none of the masks has; some graphs have one mask for tests alone."""
    masks = [stored.get(f"{name}_mask", None) for name in SPLITS]
    numbers = [mask.size(1) for mask in masks if mask is not None and mask.dim() > 1]
    check_integer("split", split, 0, max(numbers) - 1 if numbers else None)


def _check(model: Any, graph: Any) -> Any:
    """Refuse a model that isn't scored; return the graph, opened if it is a path."""
    if not getattr(model, "_returns_rows", True):
        raise ValueError(
            "'model' returns several values, and one is scored: take that of model.predict(graph), "
            "and score it by gas.training.score"
        )
    if not hasattr(model, "predict"):
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a model with histories: convert it, "
            "gas.to_scalable(net, data)"
        )
    return open_if_path(graph, "graph")


def _predict(model: Any, graph: Any, options: Mapping[str, Any]) -> Predictions:
    """Predict on a graph, and return the outputs with the graph's attributes."""
    out = model.predict(graph, **options)
    chosen = {key: options[key] for key in ("nodes", "ids") if options.get(key) is not None}
    nodes = model._node_predictor.choose(**chosen) if chosen else None
    given = getattr(graph, "hetero_data", graph)
    if isinstance(given, HeteroData):
        kind = _scored_type(model, out, given)
        out = out if isinstance(out, Tensor) else out[kind]
        stored = {"classes": getattr(given, "classes", None), **given[kind]}
    else:
        stored = graph_of(graph)
    return Predictions(out, stored, partial(to_original_order, stored), nodes)


def _scored_type(model: Any, out: Any, graph: HeteroData) -> str:
    """Return the type of nodes to score: the only one, or the only one with labels."""
    if isinstance(out, Tensor):
        return str(model.plan.output)
    kinds = [kind for kind in out if "y" in graph[kind]]
    if len(kinds) != 1:
        raise ValueError(
            f"'model' has outputs of {sorted(out)}, and 'graph' labels of {sorted(kinds)} among "
            "them, expected one type with labels: take model.predict(graph)[kind], and score it "
            "by gas.training.score"
        )
    return kinds[0]


def _labels(y: Tensor) -> list[Any]:
    """Return the labels of each node, of shape ``[C]``; unknown ones are ``None``."""
    known = known_target_mask(y)
    rows: list[Any] = list(torch.where(known, y, 0).int().numpy())
    for node in (~known).any(dim=1).nonzero().view(-1).tolist():
        of_node = zip(rows[node].tolist(), known[node].tolist(), strict=True)
        labels = [label if is_known else None for label, is_known in of_node]
        rows[node] = labels if bool(known[node].any()) else None
    return rows


def _name_classes(classes: Tensor, names: Sequence[Any] | None) -> np.ndarray:
    """Return the names of classes; ``None`` for negative ones, which are unknown."""
    codes = classes.long().numpy()
    are_known = not (codes < 0).any()
    if names is None and are_known:
        return codes
    most = int(codes.max(initial=-1)) + 1
    known = list(range(most) if names is None else names)[:most]
    if len(known) < most:
        raise ValueError(
            f"'classes' of the graph has {len(known)} names, but there is the class {most - 1}: "
            "give it a name for each output of the model"
        )
    if are_known:
        return np.array(known)[codes]
    table = np.empty(most + 1, dtype=object)  # The last entry, at -1, stays None.
    table[:most] = known
    return table[np.maximum(codes, -1)]
