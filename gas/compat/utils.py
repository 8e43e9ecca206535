"""Masks, scores and dropped edges."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

import gas
from gas.datasets import gen_masks, index2mask

compute_micro_f1 = gas.training.compute_micro_f1

__all__ = ["compute_micro_f1", "dropout", "gen_masks", "index2mask"]


def dropout(adj_t: Any, p: float, training: bool = True) -> Any:
    """Drop each edge with probability ``p``.

    Of a ``SparseTensor`` with values, those of dropped edges become zero, the others are scaled by
    ``1 / (1 - p)``, and all edges stay: they count in a mean. In other layouts, and without values,
    dropped edges are taken out, as :func:`gas.drop_edges` does it.

    Args:
        adj_t: The adjacency.
        p: Probability in ``[0, 1)``.
        training: Whether to drop at all. (default: ``True``)
    """
    layout = gas.graph.layout_of(adj_t, "adj_t")
    value = layout.value(adj_t) if layout.name == "sparse_tensor" else None
    if value is None or not training:
        return gas.drop_edges(adj_t, p, training)
    return layout.with_value(adj_t, F.dropout(value, p))
