"""Staleness of the rows of a history."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gas.history.history import History


class Staleness(NamedTuple):
    """Staleness of one history, from :meth:`gas.ScalableGNN.staleness`.

    * ``layer``: the layer whose outputs it holds, from 0.
    * ``mean_age``, ``max_age``: the number of pushes since a row was written, of written rows only.
    * ``unwritten``: the fraction of rows that were never written.
    * ``error``: ``|h - h*| / |h*|`` over all rows, Frobenius norms, against the exact embeddings
      ``h*`` of the current weights; ``None`` if it wasn't requested.
    """

    layer: int
    mean_age: float
    max_age: int
    unwritten: float
    error: float | None


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ``|found - expected| / |expected|``, Frobenius norms."""
    true = expected.double().cpu()
    norm = torch.linalg.vector_norm(true).clamp(min=1e-300)
    return float(torch.linalg.vector_norm(found.double().cpu() - true) / norm)


def measure_staleness(layer: int, history: History, exact: History | None = None) -> Staleness:
    """Measure the staleness of a history, with its error if the exact embeddings are given."""
    age = history.age[history.written]
    mean, largest = (float(age.float().mean()), int(age.max())) if len(age) else (0.0, 0)
    unwritten = 1 - age.numel() / max(history.num_embeddings, 1)
    error = None
    if exact is not None:
        error = relative_error(history.emb, exact.emb)
    return Staleness(layer, mean, largest, unwritten, error)
