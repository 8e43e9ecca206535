"""What a prediction is worth."""

from __future__ import annotations

from torch import Tensor


def compute_micro_f1(logits: Tensor, y: Tensor, mask: Tensor | None = None) -> float:
    """The micro-averaged F1 score; with one class per node this is the accuracy.

    Args:
        logits: The model's outputs, of shape ``[N, C]``.
        y: Classes of shape ``[N]``, or labels of shape ``[N, C]``, each 0 or 1.
        mask: The nodes to count, of shape ``[N]``. (default: all)

    Returns:
        A fraction in ``[0, 1]``; 0 where nothing was counted.
    """
    if mask is not None:
        logits, y = logits[mask], y[mask]
    if y.dim() == 1:
        return float((logits.argmax(dim=-1) == y).float().mean()) if y.numel() else 0.0
    predicted, actual = logits > 0, y > 0.5
    hits = int((predicted & actual).sum())
    return 2 * hits / max(int(predicted.sum()) + int(actual.sum()), 1)
