"""Measure the staleness of the rows of a history, and correct stale rows by their drift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gas.history.history import History

MOST_ROWS = 1024  # Rows of a batch that are compared with the stored ones, and whose age is read.
MOST_SCALE = 5.0  # A channel is scaled by at most this, and at least its inverse.
ROUNDING = 1e-5  # A smaller change, relative to the channel's values, isn't one of the weights.


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


@dataclass(frozen=True)
class Correction:
    """A correction per channel, ``rows * scale + offset``, not below ``lowest``."""

    scale: Tensor
    offset: Tensor
    lowest: Tensor

    def __call__(self, rows: Tensor) -> None:
        """Correct rows, of shape ``[n, width]``, in place."""
        scale, offset, lowest = (x.to(rows.dtype) for x in (self.scale, self.offset, self.lowest))
        torch.maximum(torch.addcmul(offset, rows, scale, out=rows), lowest, out=rows)


def _sample(rows: Tensor) -> Tensor:
    """Return at most ``MOST_ROWS`` rows, evenly spaced, so that nothing is drawn at random."""
    return rows[:: max(1, -(-rows.size(0) // MOST_ROWS))]


def _share_of_drift(history: History, own: Tensor, halo: Tensor) -> float:
    """Return the mean age of the halo's rows over that of a batch's own, at most 1, by their ids.

    Ages are counted from the push that comes next, so that none is 0.
    """
    if halo.numel() == 0:
        return 0.0
    now, written_at = history.num_pushes + 1, history.written_at
    ids = own.cpu(), halo.cpu()
    own_age, halo_age = (now - float(written_at[n_id].double().mean()) for n_id in ids)
    return min(1.0, halo_age / own_age)


def _std_mean(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``torch.std_mean(rows, 0)`` does, in a tenth of its time on a CPU."""
    mean = rows.mean(0)
    return ((rows - mean).square_().sum(0) / (rows.size(0) - 1)).sqrt_(), mean


class DriftCorrection:
    """Measure how far rows move between two pushes, and correct the halo's stale rows by it.

    A batch's own rows are known twice: as the last push has stored them, and as they are computed
    now. The change of their mean and standard deviation, per channel, is what training has done to
    all rows of the layer in the meantime. The halo's rows are younger on average, and are moved by
    a share of it: their mean age over that of the batch's own rows, which falls from 1 to a third
    in an epoch. Uncorrected, the common part of the change feeds back through the histories, and
    training without a norm oscillates or diverges.

    Channels that have changed by rounding alone are left exactly as they are: with fixed weights,
    and without dropout, nothing is corrected. (A history of fewer bits rounds what it stores.)
    """

    def __init__(self) -> None:
        self._measured: dict[History, list[Tensor]] = {}

    @torch.no_grad()
    def measure(self, history: History, own: Tensor, n_id: Tensor) -> Correction | None:
        """Compare a batch's own rows with the stored ones, before they are pushed.

        Args:
            history: The history.
            own: The rows as computed now, of shape ``[batch_size, width]``.
            n_id: Global ids of the batch's nodes, then of its halo.

        Returns:
            The correction of the halo's rows; ``None`` if some rows have never been written, or
            the batch has fewer than two.
        """
        if own.size(0) < 2 or not history.is_written:
            return None
        own_id, halo = _sample(n_id[: own.size(0)]), _sample(n_id[own.size(0) :])
        new = _sample(own).detach().float()
        old = history.pull(own_id).to(new)
        (std, mean), (old_std, old_mean) = _std_mean(new), _std_mean(old)
        # The rows' own changes are left out: dropout alone makes them a third of the rows' norm.
        now, change = torch.cat([std, mean]), torch.cat([std - old_std, mean - old_mean])
        change = torch.linalg.vector_norm(change) / torch.linalg.vector_norm(now)
        self._measured.setdefault(history, []).append(change)
        moved = torch.maximum((std - old_std).abs(), (mean - old_mean).abs())
        is_same = moved <= ROUNDING * (old_std + old_mean.abs())
        scale = torch.where(old_std > 0, std / old_std, 1.0).clamp(1 / MOST_SCALE, MOST_SCALE)
        scale.masked_fill_(is_same, 1.0)
        share = _share_of_drift(history, own_id, halo)
        offset = (share * (mean - scale * old_mean)).masked_fill_(is_same, 0.0)
        scale = 1 + share * (scale - 1)
        # Rows after a ReLU stay at least 0; channels that haven't changed have no bound.
        lowest = torch.minimum(new.amin(0), old.amin(0))
        return Correction(scale, offset, lowest.masked_fill(is_same, -torch.inf))

    def mean(self) -> float:
        """Return the mean change of the channels' means and standard deviations between two pushes.

        It is relative to their norm, and that of the history that changes most; NaN if nothing was
        measured.
        """
        means = [float(torch.stack(changes).nanmean()) for changes in self._measured.values()]
        return max(means, default=math.nan)
