"""Options of an experiment, and checks for options that exclude each other."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch_geometric.data import Data

import gas
from gas.training import check_known_targets, is_real, known_target_mask

MODELS: dict[str, type[gas.models.LayeredGNN]] = {
    "appnp": gas.models.APPNP,
    "gat": gas.models.GAT,
    "gcn": gas.models.GCN,
    "gcn2": gas.models.GCN2,
    "gin": gas.models.GIN,
    "pna": gas.models.PNA,
    "pna_jk": gas.models.PNA_JK,
    "sage": gas.models.GraphSAGE,
}
NORMALISED = tuple(name for name in MODELS if name not in ("appnp", "gat"))
DENSE = 30  # Edges per node from which a hint recommends batch norm.
REFRESHES = ("none", "full", "layerwise")
EVALUATIONS = ("full", "layerwise")


def check_modes(model: str, evaluation: str, refresh: str, full_batch: bool) -> None:
    """Refuse unknown names, and options of histories with a full batch."""
    for name, value, known in (
        ("model", model, tuple(MODELS)),
        ("evaluation", evaluation, EVALUATIONS),
        ("refresh", refresh, REFRESHES),
    ):
        if value not in known:
            raise ValueError(f"'{name}' is {value!r}, expected one of {', '.join(known)}")
    if full_batch and (refresh != "none" or evaluation != "full"):
        raise ValueError(
            "'full_batch' is True, which has no histories and no mini-batches: leave "
            "'evaluation' and 'refresh' out"
        )


def check_labels(data: Data) -> None:
    """Refuse missing labels, a single class, labels but 0 and 1, and unknown training labels."""
    y, mask = data.get("y"), data.get("train_mask")
    if y is None:
        raise ValueError("'data' has no 'y': expected classes [N], labels [N, C] or real numbers")
    known = known_target_mask(y)
    if y.dim() == 2 and not is_real(y):
        wrong = y[known & (y != 0) & (y != 1)]
        if wrong.numel():
            raise ValueError(
                f"'data.y' has shape {list(y.shape)} and holds {float(wrong.max()):g}, expected 0 "
                "and 1 for several labels, or real numbers of shape [N]"
            )
    if y.dim() == 1 and not is_real(y) and int(y.max()) == 0:
        raise ValueError(
            "'data.y' holds a single class, expected at least two: check the labels, or give real "
            "numbers"
        )
    if mask is not None and mask.numel():
        check_known_targets(y, mask)


def set_real_targets(data: Any, nodes: Any) -> None:
    """Replace integer targets of shape ``[N]`` by real numbers; negative ones, unknown, by NaN.

    Args:
        data: The graph. If it has ``classes``, which are numbers, they replace their positions.
        nodes: What has the targets ``y``: the graph, or its nodes of a type.

    Raises:
        ValueError: If classes are texts.
    """
    classes = getattr(data, "classes", None)
    if classes is None:
        nodes.y = nodes.y.float().masked_fill(nodes.y < 0, math.nan)
        return
    if not are_numbers(classes):
        raise ValueError(
            f"'metric' is r2, but the targets are classes such as {classes[0]!r}: choose accuracy "
            "or micro_f1"
        )
    values = torch.tensor([*map(float, classes), math.nan])
    nodes.y = values[nodes.y.long().clamp(min=-1)]
    del data.classes


def are_numbers(classes: Any) -> bool:
    """Return whether the names of classes are numbers."""
    return all(isinstance(name, numbers.Real) for name in classes)


def check_splits(data: Data, name: str = "data") -> None:
    """Refuse a graph without masks of training, validation and test nodes."""
    for key in ("train_mask", "val_mask", "test_mask"):
        if data.get(key) is None:
            raise ValueError(
                f"{name!r} has no {key!r}, by which models are trained and scored: set it, such as "
                "by PyG's RandomNodeSplit"
            )
