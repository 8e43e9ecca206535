"""Proposals of the numbers of edges and nodes to drop, with their exact masses.

Everything is float64, broadcasts, and runs where its tensors are. Vectors of two hold one number
for edges and one for nodes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtri


def log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Compute ``log C(n, k)``, the number of subsets of size ``k`` of ``n`` elements; float64."""
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def log_interval_mass(low: Tensor, high: Tensor) -> Tensor:
    """Compute ``log P(low < z < high)`` of a standard normal ``z``, accurate in both tails."""
    right = low + high > 0  # Intervals in the right tail are mirrored, for accuracy.
    low, high = torch.where(right, -high, low), torch.where(right, -low, high)
    top = log_ndtr(high)
    return top + (-torch.expm1(log_ndtr(low) - top)).log()


def _tail(z: Tensor) -> Tensor:
    """Compute ``P(x > z)`` of a standard normal ``x``; ``ndtr`` is off in the tails."""
    return 0.5 * torch.erfc(z * math.sqrt(0.5))


def truncated_normal(mean: Tensor, sd: Tensor, u: Tensor, high: Tensor) -> Tensor:
    """Draw normal numbers in ``[0, high]``, by the inverse of their distribution function.

    Args:
        mean: The mean before truncation, in ``[0, high]``.
        sd: The standard deviation before truncation.
        u: Uniform in ``[0, 1)``.
        high: The upper end.
    """
    below, above = _tail(mean / sd), _tail((high - mean) / sd)
    inside = 1.0 - below - above
    left, right = below + u * inside, above + (1.0 - u) * inside  # Each tail from its own side.
    z = torch.where(left < right, ndtri(left), -ndtri(right))
    return torch.minimum((mean + sd * z).clamp(min=0.0), high)


class BinnedProposal:
    """Proposal of ``size`` times a truncated normal around ``k / size``, rounded.

    Args:
        size: The number of elements, of shape ``[2]``, float64.
        most: The largest number that may be proposed, of shape ``[2]``, float64.
    """

    def __init__(self, size: Tensor, most: Tensor) -> None:
        self.size, self.most = size, most
        self.high = ((most + 0.5) / size).clamp(max=1.0)

    def draw(self, k: Tensor, sd: Tensor, u: Tensor) -> Tensor:
        """Draw the next number, by a uniform ``u``."""
        share = truncated_normal(k / self.size, sd, u, self.high)
        return torch.minimum((self.size * share + 0.5).floor(), self.most)

    def log_mass(self, new: Tensor, old: Tensor, sd: Tensor) -> Tensor:
        """Compute ``log q(new | old)``."""
        mean = old / self.size
        low = ((new - 0.5) / self.size).clamp(min=0.0)
        high = torch.minimum((new + 0.5) / self.size, self.high)
        ends = torch.stack(torch.broadcast_tensors(low, high, torch.zeros_like(low), self.high))
        low, high, first, last = (ends - mean) / sd
        return log_interval_mass(low, high) - log_interval_mass(first, last)


class WalkProposal:
    """Random walk: ``k`` plus a rounded normal; numbers outside are proposed, and rejected.

    Args:
        size: The number of elements, of shape ``[2]``, float64.
        most: The largest number that may be accepted, of shape ``[2]``, float64.
    """

    def __init__(self, size: Tensor, most: Tensor) -> None:
        self.size, self.most = size, most

    def draw(self, k: Tensor, sd: Tensor, u: Tensor) -> Tensor:
        """Draw the next number, by a uniform ``u``; -1 or ``most + 1`` stand for those outside."""
        step = (self.size * sd * ndtri(u)).round()
        return torch.minimum((k + step).clamp(min=-1.0), self.most + 1.0)

    def log_mass(self, new: Tensor, old: Tensor, sd: Tensor) -> Tensor:
        """Compute ``log q(new | old)``, for numbers that may be accepted."""
        unit = self.size * sd
        return log_interval_mass((new - old - 0.5) / unit, (new - old + 0.5) / unit)


PROPOSALS: dict[str, type[BinnedProposal | WalkProposal]] = {
    "binned": BinnedProposal,
    "walk": WalkProposal,
}
