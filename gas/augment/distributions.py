"""The distributions of MH-Aug: its target, and proposals of the numbers of edges and nodes to drop.

Everything is float64, and runs where its tensors are. Proposals broadcast. Vectors of two hold one
number for edges and one for nodes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtri

from gas.augment.loss import entropy
from gas.augment.units import GraphState, Units
from gas.native import check_index, check_range, ego_hop


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


class Target:
    """``log P`` of augmented states, up to a constant; see :class:`gas.MHAug`.

    Args:
        units: The edges and nodes that may be dropped.
        size: The numbers of edges and nodes, of shape ``[2]``.
        mu: The wanted changes of ego-graphs, of shape ``[2]``.
        a: How much entropy widens ``sigma``, of shape ``[2]``.
        b: ``sigma`` without entropy, of shape ``[2]``.
        lam_delta: ``lam1`` and ``lam3``, of shape ``[2]``.
        lam_choose: ``lam2`` and ``lam4``, of shape ``[2]``.
        hops: The radius of ego-graphs.
    """

    def __init__(
        self,
        units: Units,
        size: Tensor,
        mu: Tensor,
        a: Tensor,
        b: Tensor,
        lam_delta: Tensor,
        lam_choose: Tensor,
        hops: int,
    ) -> None:
        self.units, self.size, self.hops = units, size, hops
        self.mu, self.a, self.b = mu, a, b
        self.lam_delta, self.lam_choose = lam_delta, lam_choose
        everything = torch.ones(units.size, dtype=torch.bool, device=units.device)
        self._total = self._count(everything, torch.ones_like(everything[:1]))
        self.eps = self._total.new_ones(units.num_nodes)

    @property
    def eps(self) -> Tensor:
        """Return the entropy of each node's prediction, in ``[0, 1]``, of shape ``[N]``."""
        return self._eps

    @eps.setter
    def eps(self, eps: Tensor) -> None:
        self._eps = eps
        sigma = self.a * eps[:, None] + self.b
        self._precision = self.lam_delta / (2.0 * sigma * sigma)

    def set_logits(self, logits: Tensor, n_id: Tensor | None) -> None:
        """Compute :attr:`eps` from outputs; see :meth:`gas.MHAug.update_entropy`."""
        n = self.units.num_nodes
        rows = n if n_id is None else n_id.numel()
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            what = logits.dtype if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"'logits' is {what}, expected outputs of the model, floating-point numbers of "
                f"shape [{rows}, classes]"
            )
        if logits.dim() != 2 or logits.size(0) != rows or logits.size(1) < 2:
            raise ValueError(
                f"'logits' has shape {list(logits.shape)}, expected [{rows}, classes] with at "
                "least 2 classes: one row for each node, or for each of 'n_id'"
            )
        if n_id is not None:
            check_index("n_id", n_id)
            check_range("n_id", n_id, n)
        found = entropy(logits.to(self.units.device)).double() / math.log(logits.size(1))
        if not bool(found.isfinite().all()):
            raise ValueError(
                "'logits' holds NaN or infinite values, expected finite ones: training has "
                "diverged; try a smaller learning rate"
            )
        eps = self.eps.clone()
        eps[slice(None) if n_id is None else n_id.to(eps.device)] = found.clamp_(0.0, 1.0)
        self.eps = eps

    def _count(self, edges: Tensor, nodes: Tensor) -> Tensor:
        """Count nodes and edges of ego-graphs after dropping, of shape ``[N, 2]``."""
        x = self.size.new_ones(self.units.num_nodes, 2)
        x[:, 1] = nodes
        for _ in range(self.hops):
            x = ego_hop(self.units.graph, edges, x)
        return x

    def delta(self, view: GraphState) -> Tensor:
        """Compute the changes of each node's ego-graph, of shape ``[N, 2]``."""
        return self._count(view.edges, view.node_mask).div_(self._total).neg_().add_(1.0)

    def log_prob(self, delta: Tensor, k: Tensor) -> Tensor:
        """Compute ``log P`` of a state with these changes that drops ``k``, of shape ``[2]``."""
        fit = (delta - self.mu).square_().mul_(self._precision).sum()
        return -fit - (self.lam_choose * log_choose(self.size, k)).sum()
