"""What an experiment can be told, and what of it doesn't go together."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.data import Data

from gas import models
from gas.training.metrics import is_real
from gas.training.settings import Settings

MODELS: dict[str, type[models.LayeredGNN]] = {
    "appnp": models.APPNP,
    "gat": models.GAT,
    "gcn": models.GCN,
    "gcn2": models.GCN2,
    "gin": models.GIN,
    "pna": models.PNA,
    "pna_jk": models.PNA_JK,
    "sage": models.GraphSAGE,
}
REFRESHES = ("none", "full", "layerwise")
EVALUATIONS = ("full", "layerwise")


def check_modes(model: str, evaluation: str, refresh: str, full_batch: bool) -> None:
    """Refuses unknown names, and histories of a full batch."""
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


def check_labels(y: Tensor | None) -> None:
    """Refuses no labels, and several per node that aren't 0 and 1."""
    if y is None:
        raise ValueError("'data' has no 'y': expected classes [N], labels [N, C] or real numbers")
    several = y.dim() == 2 and not is_real(y)
    if several and bool(((y != 0) & (y != 1)).any()):
        raise ValueError(
            f"'data.y' has shape {list(y.shape)} and holds {float(y.max()):g}, expected 0 and 1 "
            "for several labels, or real numbers of shape [N]"
        )


def check_splits(data: Data) -> None:
    """Refuses a graph without masks of training, validation and test nodes."""
    for name in ("train_mask", "val_mask", "test_mask"):
        if data.get(name) is None:
            raise ValueError(f"'data' has no {name!r}, by which models are trained and scored")


def check_predictable(
    memory: int | str,
    full_batch: bool,
    memory_budget: int | None,
    is_augmented: bool,
    inductive: bool,
) -> None:
    """Refuses ``memory`` for what :func:`gas.plan` can't predict."""
    for name, given, why in (
        ("full_batch", full_batch, "has no mini-batches to choose"),
        ("memory_budget", memory_budget is not None, "splits mini-batches itself"),
        ("augment", is_augmented, "makes views, which aren't predicted"),
        ("inductive", inductive, "evaluates another graph, which isn't predicted"),
    ):
        if given:
            raise ValueError(
                f"'memory' is {memory!r}, but '{name}' is given, which {why}: leave one out"
            )


def check_augment(data: Data, settings: Settings, full_batch: bool, inductive: bool) -> None:
    """Refuses ``augment`` where there are no views, or no loss for them."""
    reason = ""
    if full_batch:
        reason = "'full_batch' has no mini-batches: use num_parts=1, which computes the same"
    elif inductive:
        reason = "'inductive' evaluates another graph than the one that is augmented: leave one out"
    elif data.y.dim() != 1 or is_real(data.y):
        reason = (
            f"'data.y' is {data.y.dtype} of shape {list(data.y.shape)}, expected one class per "
            "node: leave 'augment' out"
        )
    elif settings.edge_dropout > 0:
        reason = (
            f"'edge_dropout' is {settings.edge_dropout} and views lack edges already: leave one out"
        )
    if reason:
        raise ValueError(f"'augment' is given, but {reason}")
