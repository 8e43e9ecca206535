"""The distribution that MH-Aug samples from; vectors of two are for edges and for nodes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gas.augment.loss import entropy
from gas.augment.proposal import log_choose
from gas.augment.units import GraphState, Units
from gas.native import check_index, check_range, ego_hop


class Target:
    """``log P`` of augmented states, up to a constant; see :class:`gas.MHAug`. All float64.

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
