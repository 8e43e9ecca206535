"""Losses and metrics of predictions. Higher scores are better."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gas.graph import known_target_mask

METRICS = ("accuracy", "micro_f1", "roc_auc", "r2")
Metric = str | Callable[[Tensor, Tensor], Any]


def is_real(y: Tensor) -> bool:
    """Return whether targets are real numbers: floating-point, of shape ``[N]`` or ``[N, 1]``."""
    return y.is_floating_point() and (y.dim() == 1 or y.size(1) == 1)


def is_binary_or_integer(y: Tensor) -> bool:
    """Return whether targets of shape ``[N, C]`` are labels: integers, or 0, 1 and NaN."""
    return not y.is_floating_point() or bool(((y == 0) | (y == 1) | y.isnan()).all())


def check_known_targets(y: Tensor, train_mask: Tensor, loss_fn: Any = None) -> None:
    """Refuse training nodes, of any split, with an unknown target.

    A loss of the user's own may leave such targets out, and PyTorch's cross entropy those of its
    ``ignore_index``.
    """
    if loss_fn not in (None, loss_of) and ignored_class(loss_fn) is None:
        return
    y = y[train_mask.bool().view(train_mask.size(0), -1).any(dim=1)]
    known = known_target_mask(y) | ~counted_targets(y, loss_fn)
    unknown = int((~known).view(y.size(0), -1).any(dim=1).sum()) if y.numel() else 0
    if unknown:
        raise ValueError(
            f"'train_mask' holds {unknown} nodes with a target that is unknown (NaN or negative), "
            "expected all targets of a node that is trained on: leave these nodes out of it"
        )


def ignored_class(loss_fn: Any) -> int | None:
    """Return the ``ignore_index`` of PyTorch's losses of classes; ``None`` for other losses."""
    if isinstance(loss_fn, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
        return loss_fn.ignore_index
    given = loss_fn if isinstance(loss_fn, partial) else partial(loss_fn or loss_of)
    is_of_classes = given.func in (F.cross_entropy, F.nll_loss)
    return given.keywords.get("ignore_index", -100) if is_of_classes else None


def counted_targets(y: Tensor, loss_fn: Any) -> Tensor:
    """Return which targets count, with the shape of ``y``: a loss may have an ``ignore_index``."""
    ignored = None if y.is_floating_point() else ignored_class(loss_fn)
    return torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored


def metric_of(y: Tensor) -> str:
    """Return the usual metric for targets ``y``.

    It is the accuracy for classes of shape ``[N]``, the micro-averaged F1 score for labels of shape
    ``[N, C]``, and the coefficient of determination for real numbers of shape ``[N]`` or
    ``[N, C]``. Floating-point targets of shape ``[N, C]`` are labels if each is 0, 1 or NaN.
    """
    if is_real(y) or (y.dim() == 2 and not is_binary_or_integer(y)):
        return "r2"
    return "micro_f1" if y.dim() == 2 else "accuracy"


def usual_metric(out: Tensor, y: Tensor) -> str:
    """Return the metric of outputs and targets by default.

    It is that of :func:`metric_of`, except for integer targets of a single output: ROC-AUC for
    classes 0 and 1, and R2 for others, such as counts.
    """
    is_single = all(rows.dim() == 1 or rows.size(1) == 1 for rows in (out, y))
    if not is_single or y.is_floating_point():
        return metric_of(y)
    return "roc_auc" if bool((y < 2).all()) else "r2"


def check_metric_name(metric: Metric | None) -> None:
    """Refuse a metric that is neither one of :data:`METRICS` nor a function."""
    if metric is not None and not callable(metric) and metric not in METRICS:
        raise ValueError(
            f"'metric' is {metric!r}, expected one of {', '.join(METRICS)}, or a function"
        )


def check_metric(metric: str | None, y: Tensor, num_outputs: int) -> None:
    """Refuse a metric that isn't defined for targets ``y``, of shape ``[N]`` or ``[N, C]``.

    Args:
        metric: One of :data:`METRICS`; ``None`` is the usual one.
        y: The targets.
        num_outputs: The number of outputs of the model.

    Raises:
        ValueError: If the metric doesn't fit, naming those that do.
    """
    fits: tuple[str, ...]
    if is_real(y):
        kind, fits = "real numbers", ("r2", "roc_auc")[: 1 + is_binary_or_integer(y)]
    elif y.dim() == 2 and y.size(1) > 1:
        kind, fits = f"{num_outputs} labels per node", ("micro_f1", "r2")
    elif num_outputs > 2:
        kind, fits = f"{num_outputs} classes", ("accuracy", "micro_f1")
    else:
        kind, fits = "two classes", METRICS if num_outputs == 1 else METRICS[:3]  # Without r2.
    if metric is not None and metric not in fits:
        raise ValueError(
            f"'metric' is {metric}, but the targets are {kind}: choose {' or '.join(fits)}"
        )


def split_mask(mask: Tensor, split: int) -> Tensor:
    """Return the mask of one split, of shape ``[N]``, bool.

    ``split`` is taken modulo their number, and numbers count as true unless they are 0.
    """
    mask = mask.bool()
    return mask if mask.dim() == 1 else mask[:, split % mask.size(1)]


def check_usual_loss(y: Tensor) -> None:
    """Refuse targets of shape ``[N, C]`` that aren't labels, which :func:`loss_of` takes them for.

    Raises:
        ValueError: Naming a loss for them.
    """
    if y.dim() == 2 and y.size(1) > 1 and not is_binary_or_integer(y):
        raise ValueError(
            f"'y' holds real numbers of shape {list(y.shape)}, and the usual loss takes columns "
            "for labels, 0 or 1: pass a loss, such as loss=torch.nn.functional.mse_loss"
        )


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """Return the usual loss for targets ``y``, the mean over its rows.

    Cross entropy for classes of shape ``[n]``, binary cross entropy for labels of shape ``[n, C]``,
    squared error for real numbers of shape ``[n]`` or ``[n, 1]``; see :func:`check_usual_loss`.

    Raises:
        ValueError: If targets have another shape than the outputs, or more classes.
    """
    if is_real(y):
        if y.numel() != out.numel():
            raise ValueError(
                f"'y' is of {y.dtype}, numbers to predict, of shape {list(y.shape)}, but outputs "
                f"have {list(out.shape)}: expected an output for each; of classes, "
                "data.y = data.y.long()"
            )
        return F.mse_loss(out.view(-1), y.view(-1).to(out.dtype))
    if y.dim() == 2:
        if y.shape != out.shape:
            raise ValueError(
                f"'y' has shape {list(y.shape)}, but outputs have {list(out.shape)}: expected "
                "labels [n, C], or classes [n], data.y = data.y.view(-1)"
            )
        others = y[(y < 0) | (y > 1)] if y.device.type == "cpu" else y[:0]  # A GPU would wait.
        if others.numel():
            raise ValueError(
                f"'y' holds {others[0].item():g} for a node to train on, expected labels, 0 or "
                "1: leave nodes with unknown labels out of 'train_mask'; of classes, "
                "data.y = data.y.view(-1)"
            )
        return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
    if out.dim() == 1:
        raise ValueError(
            f"'y' holds classes, but outputs have shape {list(out.shape)}, expected one for each "
            "class, [n, C]: of two classes, out.view(-1, 1) and labels, "
            "data.y = data.y.view(-1, 1)"
        )
    try:
        return F.cross_entropy(out, y.long())
    except IndexError as error:
        wrong = int(y[(y < 0) | (y >= out.size(-1))][0])
        raise ValueError(
            f"'y' holds the class {wrong}, but outputs have {out.size(-1)} classes: expected "
            f"classes in [0, {out.size(-1)}); give the model more outputs, or leave such nodes out"
        ) from error


def score(metric: Metric, out: Tensor, y: Tensor, mask: Tensor | None = None) -> float:
    """Compute one of :data:`METRICS`, or a function's value.

    Args:
        metric: Its name; or a function of outputs and targets, of the nodes whose targets are all
            known, such as a metric of torchmetrics.
        out: The model's outputs, of shape ``[N, C]``, or ``[N]``.
        y: The targets, of shape ``[N]`` or ``[N, C]``.
        mask: The nodes to count, of shape ``[N]``. (default: all)

    Returns:
        The score, or NaN if no target is known.

    Raises:
        ValueError: If there is no such metric, or it isn't defined for these targets.
    """
    if callable(metric):
        return _score_by_function(metric, out, y, mask)
    check_metric_name(metric)
    check_metric(metric, y, 1 if out.dim() == 1 else out.size(1))
    known = (~y.isnan() if metric == "r2" else known_target_mask(y)).view(y.size(0), -1).any(dim=1)
    mask = known if mask is None else known & mask
    if not bool(mask.any()):
        return math.nan
    if metric == "r2":
        return compute_r2(out, y, mask)
    if metric == "roc_auc":
        return compute_roc_auc(out, y, mask)
    if y.dim() == 2 and y.size(1) == 1 and metric == "accuracy":
        y = y.view(-1)
    if out.dim() == 1 and out.is_floating_point():  # Integers are classes, not outputs.
        out = out.view(-1, 1)
    return compute_micro_f1(out, y, mask)


def _score_by_function(
    function: Callable[[Tensor, Tensor], Any], out: Tensor, y: Tensor, mask: Tensor | None
) -> float:
    """Return the value of a function of outputs and targets, as a number."""
    counted = known_target_mask(y).view(y.size(0), -1).all(dim=1)
    counted = counted if mask is None else counted & mask
    if not bool(counted.any()):
        return math.nan
    found = function(out[counted], y[counted])
    try:
        value = float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the metric {getattr(function, '__name__', function)} returned a "
            f"{type(found).__name__}, expected one number: the mean over the nodes"
        ) from error
    if callable(reset := getattr(function, "reset", None)):  # Torchmetrics add up all calls.
        reset()
    return value


def baseline(metric: str, y: Tensor, train_mask: Tensor, mask: Tensor) -> float:
    """Return the score of one prediction for every node: the most frequent training target.

    Args:
        metric: See :func:`score`.
        y: The targets, of shape ``[N]`` or ``[N, C]``.
        train_mask: The nodes whose targets are known, of shape ``[N]``.
        mask: The nodes to count, of shape ``[N]``.
    """
    if metric == "roc_auc":
        return 0.5
    known = y[train_mask]
    if metric == "r2" or y.dim() == 2:
        mean = known.double().mean(dim=0, keepdim=True)
        out = mean if metric == "r2" else mean - 0.5
        return score(metric, out.expand(y.size(0), *out.shape[1:]), y, mask)
    counts = torch.bincount(known[known >= 0], minlength=int(y.max()) + 1)
    return score(metric, counts.expand(y.size(0), -1), y, mask)


def compute_micro_f1(logits: Tensor, y: Tensor, mask: Tensor | None = None) -> float:
    """Compute the micro-averaged F1 score; with one class per node this is the accuracy.

    Args:
        logits: The model's outputs, of shape ``[N, C]``.
        y: Classes of shape ``[N]``, or ``[N, 1]`` if there are several outputs; of two classes, a
            single output is positive for the second. Or labels of shape ``[N, C]``, each 0 or 1.
            Unknown targets, NaN or negative, don't count.
        mask: The nodes to count, of shape ``[N]``. (default: all)

    Returns:
        A fraction in ``[0, 1]``; 0 where nothing was counted.

    Raises:
        ValueError: If the shapes don't fit each other, or classes a single output.
    """
    if y.dim() == 2 and y.size(1) == 1 and logits.dim() == 2 and logits.size(1) > 1:
        y = y.view(-1)
    fits = logits.dim() == 2 and logits.shape[: y.dim()] == y.shape
    if not fits or y.dim() == 0:
        raise ValueError(
            f"'logits' has shape {list(logits.shape)} and 'y' {list(y.shape)}, expected [N, C] and "
            "classes [N], or labels [N, C]"
        )
    if mask is not None:
        logits, y = logits[mask], y[mask]
    known = known_target_mask(y)
    if y.dim() == 1:
        if logits.size(1) == 1 and bool((y > 1).any()):
            raise ValueError(
                f"'y' holds {int(y.max())}, but 'logits' has shape {list(logits.shape)}, an output "
                "for classes 0 and 1: give the model one for each class, or score counts by r2"
            )
        best = logits.view(-1) > 0 if logits.size(1) == 1 else logits.argmax(dim=-1)
        return int((best == y)[known].sum()) / max(int(known.sum()), 1)
    predicted, actual = (logits > 0) & known, (y > 0.5) & known
    hits = int((predicted & actual).sum())
    return 2 * hits / max(int(predicted.sum()) + int(actual.sum()), 1)


def compute_roc_auc(logits: Tensor, y: Tensor, mask: Tensor | None = None) -> float:
    """Compute the area under the receiver operating characteristic of a binary target.

    It is the probability that a random positive node scores higher than a random negative one, ties
    counting half: computed from ranks (Mann and Whitney, 1947).

    Args:
        logits: Scores of shape ``[N]`` or ``[N, 1]``, or one output per class, of shape ``[N, 2]``.
        y: 0 or 1, of shape ``[N]`` or ``[N, 1]``.
        mask: The nodes to count, of shape ``[N]``. (default: all)

    Returns:
        A fraction in ``[0, 1]``; 0.5 where only one of the classes was counted.

    Raises:
        ValueError: If the target is not binary, or the shapes don't fit each other.
    """
    if logits.shape[:1] != y.shape[:1]:
        raise ValueError(
            f"'logits' has shape {list(logits.shape)} and 'y' {list(y.shape)}, expected a row of "
            "'logits' for each target"
        )
    for name, value, most, kind in (
        ("y", y, 1, "labels per node"),
        ("logits", logits, 2, "classes"),
    ):
        width = value.shape[1:].numel()
        if not 1 <= width <= most:
            raise ValueError(
                f"roc_auc is for two classes, but '{name}' has shape {list(value.shape)}, of "
                f"{width} {kind}: choose micro_f1 or accuracy"
            )
    if mask is not None:
        logits, y = logits[mask], y[mask]
    if logits.dim() == 2 and logits.size(1) == 2:
        logits = logits[:, 1] - logits[:, 0]
    others = y[(y != 0) & (y != 1)]
    if others.numel():
        raise ValueError(f"'y' holds {float(others[0]):g}, expected 0 and 1: roc_auc is for those")
    positive = y.view(-1) > 0.5
    num_positive = int(positive.sum())
    num_negative = positive.numel() - num_positive
    if num_positive == 0 or num_negative == 0:
        return 0.5
    _, group, size = logits.double().view(-1).unique(return_inverse=True, return_counts=True)
    last = size.cumsum(0)
    rank = (last - (size - 1) / 2)[group]  # The mean rank of equal scores, from 1.
    above = float(rank[positive].sum()) - num_positive * (num_positive + 1) / 2
    return above / (num_positive * num_negative)


def compute_r2(out: Tensor, y: Tensor, mask: Tensor | None = None) -> float:
    """Compute the coefficient of determination of real targets: 1 is perfect, 0 their mean.

    Args:
        out: Predictions of shape ``[N]`` or ``[N, C]``.
        y: Targets of the same shape; those that are NaN don't count. Of several columns it is the
            mean over those with a target.
        mask: The nodes to count, of shape ``[N]``. (default: all)

    Returns:
        A number of at most 1; 0 where no target is known, or all are equal.

    Raises:
        ValueError: If there are several columns, and the shapes differ.
    """
    if mask is not None:
        out, y = out[mask], y[mask]
    if y.dim() == 2 and y.size(1) > 1:
        if out.shape != y.shape:
            raise ValueError(
                f"'out' has shape {list(out.shape)} and 'y' {list(y.shape)}, expected the same: "
                "r2 takes an output for each target"
            )
        columns = zip(out.unbind(1), y.unbind(1), strict=True)
        scores = [compute_r2(*column) for column in columns if not column[1].isnan().all()]
        return sum(scores) / max(len(scores), 1)
    out, y = out.double().reshape(-1), y.double().reshape(-1)
    if bool(y.isnan().any()):
        out, y = out[~y.isnan()], y[~y.isnan()]
    total = float((y - y.mean()).pow(2).sum()) if y.numel() else 0.0
    if total == 0.0:
        return 0.0
    return 1.0 - float((out - y).pow(2).sum()) / total
