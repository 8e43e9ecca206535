"""Partitions, and renumbering by them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import gas
from gas import permute

__all__ = ["metis", "permute"]


def metis(
    adj_t: Any, num_parts: int, recursive: bool = False, log: bool = True
) -> tuple[Tensor, Tensor]:
    """Partition a graph; see :func:`gas.metis`.

    Args:
        adj_t: The adjacency.
        num_parts: The number of parts.
        recursive: Bisect recursively instead of k-way partitioning. (default: ``False``)
        log: Report progress on standard error. (default: ``True``)

    Returns:
        ``perm`` of shape ``[N]`` and ``ptr`` of shape ``[num_parts + 1]``.
    """
    return gas.metis(adj_t, num_parts, recursive, log)
