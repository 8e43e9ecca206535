"""MH-Aug: augmented graphs from a target distribution, by a Markov chain over masks.

Source: Park et al., *Metropolis-Hastings Data Augmentation for Graph Neural Networks*, NeurIPS
2021. Symbols are those of the paper; vectors of two have a number for edges and one for nodes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.augment.base import Augmentation
from gas.augment.distributions import PROPOSALS, Target, log_choose
from gas.augment.statistics import Statistics, Tally
from gas.augment.units import (
    GraphState,
    check_fraction,
    check_not_negative,
    check_positive,
    check_rate,
)
from gas.native import check_flags, check_integer, check_probability, on_host, subset


class _State(NamedTuple):
    """State of the chain: masks, and the terms of the target that belong to them.

    ``edges`` of shape ``[units]`` and ``nodes`` of shape ``[N]``, bool, true for what is kept;
    ``k`` of shape ``[2]``, how many are dropped; ``delta`` of shape ``[N, 2]``, the changes of the
    ego-graphs; ``log_p`` of shape ``[]``. All float64 but the masks.
    """

    edges: Tensor
    nodes: Tensor
    k: Tensor
    delta: Tensor
    log_p: Tensor


class MHAug(Augmentation):
    """Augments a graph by a Metropolis-Hastings chain over masks of edges and nodes.

    With ``m`` edges (pairs, if ``undirected``) of which ``k_E`` are dropped, ``n`` nodes of which
    ``k_V`` are masked, and the changes ``Delta_i`` of each node's ego-graph, the target is::

        log P =   lam1 sum_i -(Delta_i,E - mu_e)^2 / (2 sigma_i,E^2) - lam2 log C(m, k_E)
                + lam3 sum_i -(Delta_i,V - mu_v)^2 / (2 sigma_i,V^2) - lam4 log C(n, k_V) + const

        Delta_E = 1 - (A' + I)^hops 1 / (A + I)^hops 1      sigma_i = a eps_i + b
        Delta_V = 1 - (A + I)^hops M_V / (A + I)^hops 1

    where ``A`` counts edges with multiplicity, ``A'`` those that are kept, ``M_V`` is the mask of
    nodes, and ``eps_i`` in [0, 1] the entropy of the model's prediction (:meth:`update_entropy`).
    States that mask every node have probability zero. A transition proposes new ``k`` around the
    old ones and fresh uniform subsets of those sizes; a rejected one leaves the state, which counts
    again. The chain starts at the graph itself.

    Args:
        data: The graph, with ``edge_index``, unnormalised.
        mu_e: The wanted change of ego-graphs by dropped edges, in ``[0, 1]``.
        mu_v: The wanted change by masked nodes, in ``[0, 1]``.
        sigma_delta_e: Standard deviation of the proposed fraction of dropped edges.
        sigma_delta_v: Standard deviation of the proposed fraction of masked nodes.
        a_e: How much a node's entropy widens ``sigma_E``, at least 0.
        b_e: ``sigma_E`` without entropy, above 0.
        a_v: How much a node's entropy widens ``sigma_V``, at least 0.
        b_v: ``sigma_V`` without entropy, above 0.
        lam1: Weight of the ego-graphs' changes by edges, at least 0.
        lam2: Weight of the normaliser of ``k_E``, in ``[0, 1]``: 1 makes every ``k_E`` alike, 0
            every mask. Published code has options ``lam2_e`` for ``1 - lam2``, ``lam2_v`` for
            ``1 - lam4``.
        lam3: Weight of the ego-graphs' changes by nodes, at least 0.
        lam4: Weight of the normaliser of ``k_V``, in ``[0, 1]``.
        hops: The radius of ego-graphs, at least 1. (default: ``2``)
        undirected: Drop an edge and its reverse together. (default: ``False``)
        num_steps: Transitions of each call. (default: ``1``)
        generator: A generator of the CPU. (default: one of its own, seeded from PyTorch's)
        proposal: ``"binned"``, a truncated normal in bins, or ``"walk"``, a symmetric random walk.
            (default: ``"binned"``)
        local: The probability of swapping a few kept and dropped edges, and nodes, instead: a
            move that keeps both ``k``. (default: ``0.0``)
        swaps: How many are swapped of edges and of nodes, where there are so many. (default: ``8``)
        reference_size: Tempers the target to that of a graph with so many nodes: ``lam1``,
            ``lam3``, ``1 - lam2`` and ``1 - lam4`` are multiplied by ``reference_size / n``. The
            target's logarithm is a sum over nodes, so that large graphs accept little without.
            (default: no tempering)
        target_acceptance: During ``burn_in`` transitions, adapt both ``sigma_delta`` by one factor
            towards this rate of acceptance; then they stay as they are. (default: no adaptation)
        burn_in: Transitions that adapt, and that statistics leave out. (default: ``0``)

    Raises:
        ValueError: If the graph or an option is unusable, naming the argument.
    """

    _state: _State
    _fingerprint: Tensor

    @check_flags
    def __init__(
        self,
        data: Data,
        mu_e: float,
        mu_v: float,
        sigma_delta_e: float,
        sigma_delta_v: float,
        a_e: float,
        b_e: float,
        a_v: float,
        b_v: float,
        lam1: float,
        lam2: float,
        lam3: float,
        lam4: float,
        hops: int = 2,
        undirected: bool = False,
        num_steps: int = 1,
        generator: torch.Generator | None = None,
        *,
        proposal: str = "binned",
        local: float = 0.0,
        swaps: int = 8,
        reference_size: int | None = None,
        target_acceptance: float | None = None,
        burn_in: int = 0,
    ) -> None:
        check_fraction(mu_e=mu_e, mu_v=mu_v, lam2=lam2, lam4=lam4)
        check_probability("local", local)
        check_not_negative(a_e=a_e, a_v=a_v, lam1=lam1, lam3=lam3)
        check_positive(sigma_delta_e=sigma_delta_e, sigma_delta_v=sigma_delta_v, b_e=b_e, b_v=b_v)
        check_integer("hops", hops, 1)
        check_integer("swaps", swaps, 1)
        if reference_size is not None:
            check_integer("reference_size", reference_size, 1)
        check_integer("burn_in", burn_in, 0)
        if not isinstance(proposal, str) or proposal not in PROPOSALS:
            names = ", ".join(map(repr, PROPOSALS))
            raise ValueError(f"'proposal' is {proposal!r}, expected one of {names}")
        if target_acceptance is not None:
            check_rate(target_acceptance=target_acceptance)
        if (target_acceptance is not None) != (burn_in > 0):
            raise ValueError(
                f"'target_acceptance' is {target_acceptance} and 'burn_in' is {burn_in}: expected "
                "both, or neither; steps are adapted during the burn-in alone"
            )
        super().__init__(data, undirected=undirected, num_steps=num_steps, generator=generator)
        self.units.check_size()

        self.local, self.swaps = local, swaps
        self.reference_size = reference_size
        self.target_acceptance, self.burn_in = target_acceptance, burn_in
        m, n = self.units.size, self.units.num_nodes
        heat = 1.0 if reference_size is None else reference_size / n
        self._size, self._most = self._pair(m, n), self._pair(m, n - 1)
        self._sigma_delta = self._pair(sigma_delta_e, sigma_delta_v)
        self._proposal = PROPOSALS[proposal](self._size, self._most)
        self._target = Target(
            self.units,
            self._size,
            mu=self._pair(mu_e, mu_v),
            a=self._pair(a_e, a_v),
            b=self._pair(b_e, b_v),
            lam_delta=self._pair(lam1, lam3) * heat,
            lam_choose=1.0 - (1.0 - self._pair(lam2, lam4)) * heat,
            hops=hops,
        )
        self._log_scale = self._size.new_zeros(())  # The adapted factor of sigma_delta.
        self._time = 0  # The number of transitions, including the burn-in.
        self._tally = Tally(self.units)
        self._set_state(self._current)

    # The target -----------------------------------------------------------------------------------

    def _pair(self, edges: float, nodes: float) -> Tensor:
        """Return a tensor of one number for edges and one for nodes."""
        return torch.tensor([edges, nodes], dtype=torch.double, device=self.units.device)

    def _state_of(self, view: GraphState, k: Tensor) -> _State:
        """Return the state of the chain for some masks."""
        delta = self._target.delta(view)
        return _State(view.edges, view.node_mask, k, delta, self._target.log_prob(delta, k))

    def delta(self, edge_mask: Tensor, node_mask: Tensor) -> Tensor:
        """Return how far each node's ego-graph changes, by edges and by nodes, of shape ``[N, 2]``.

        Args:
            edge_mask: Of shape ``[E]``, bool, true for what is kept.
            node_mask: Of shape ``[N]``, bool, likewise.
        """
        return self._target.delta(self._state_of_masks(edge_mask, node_mask))

    def log_prob(self, edge_mask: Tensor, node_mask: Tensor) -> Tensor:
        """Compute the target's ``log P`` of a state, up to a constant, of shape ``[]``, float64.

        Args:
            edge_mask: Of shape ``[E]``, bool, true for what is kept.
            node_mask: Of shape ``[N]``, bool, true for what is kept.

        Raises:
            ValueError: If a mask is that of another graph, or drops every node.
        """
        view = self._state_of_masks(edge_mask, node_mask)
        return self._state_of(view, _count_dropped(view)).log_p

    def update_entropy(self, logits: Tensor, n_id: Tensor | None = None) -> None:
        """Set ``eps`` from outputs for the original graph; before, every ``eps`` is 1.

        The chain then has another target: ``log P`` of its state is computed again.

        Args:
            logits: Of shape ``[nodes, classes]``.
            n_id: Which nodes they are for, of shape ``[nodes]``. (default: all)

        Raises:
            ValueError: If shapes don't fit, or a logit is NaN or infinite.
        """
        # Tensors made in inference mode can't be changed later.
        with torch.inference_mode(False), torch.no_grad():
            self._target.set_logits(logits, n_id)
            state = self._state
            log_p = self._target.log_prob(state.delta, state.k)
            self._state = state._replace(log_p=log_p)

    # The chain ------------------------------------------------------------------------------------

    @property
    def sigma_delta(self) -> Tensor:
        """Return the adapted standard deviations of the proposals, of shape ``[2]``."""
        return self._sigma_delta * self._log_scale.exp()

    def log_proposal(self, k_new: Tensor, k_old: Tensor) -> Tensor:
        """Compute ``log q(k_new | k_old)``, of edges and nodes together.

        Masks being uniform given their sizes, that of a pair of masks is smaller by
        ``log C(m, k_E) + log C(n, k_V)`` of the new sizes.

        Args:
            k_new: Of shape ``[..., 2]``, float64.
            k_old: Of shape ``[..., 2]``, float64.
        """
        return self._proposal.log_mass(k_new, k_old, self.sigma_delta).sum(dim=-1)

    def log_acceptance(
        self, log_p_new: Tensor, log_p_old: Tensor, k_new: Tensor, k_old: Tensor
    ) -> Tensor:
        """Compute the logarithm of the Metropolis-Hastings ratio; a proposal above 0 is accepted.

        Args:
            log_p_new: ``log P`` of the proposed state, of shape ``[...]``.
            log_p_old: ``log P`` of the present state, of shape ``[...]``.
            k_new: How many it drops, of shape ``[..., 2]``; where impossible, the ratio is 0.
            k_old: How many are dropped, of shape ``[..., 2]``.
        """
        both = torch.stack(torch.broadcast_tensors(k_new, k_old))
        there, back = self.log_proposal(both, both.flip(0))
        new, old = log_choose(self._size, both).sum(dim=-1)
        ratio = log_p_new - log_p_old + back - there + new - old
        possible = ((k_new >= 0) & (k_new <= self._most)).all(dim=-1)
        return torch.where(possible, ratio, -math.inf)

    def _propose(self, u: Tensor, seeds: list[int]) -> tuple[GraphState, Tensor]:
        """Propose masks of other sizes; return them and the sizes, which may be impossible."""
        k = self._proposal.draw(self._state.k, self.sigma_delta, u)
        keep = self._size - torch.minimum(k.clamp(min=0.0), self._most)
        sizes, device = (self.units.size, self.units.num_nodes), self.units.device
        edges, nodes = (
            subset(size, count, seed, device)
            for size, count, seed in zip(sizes, keep, seeds, strict=True)
        )
        return GraphState(self.units, edges, nodes), k

    def _swap(self, seeds: list[int]) -> GraphState:
        """Propose masks of the same sizes, with a few elements exchanged."""
        device, state = self.units.device, self._state
        masks = []
        for kept, k, size, seed in zip(state[:2], state.k, self._size, seeds, strict=True):
            count = torch.minimum(k, size - k).clamp(max=self.swaps)
            out = subset(kept.numel(), count, seed, device, kept, size - k)
            back = subset(kept.numel(), count, seed, device, ~kept, k)
            masks.append(kept ^ out ^ back)
        return GraphState(self.units, *masks)

    def _step(self) -> Tensor:
        """Propose a state, and accept or reject it."""
        drawn = torch.rand(4, dtype=torch.double, generator=self.generator)
        seeds = self._seeds(2)
        local = drawn.tolist()[3] < self.local  # On the CPU, so that nothing synchronises.
        u = drawn.to(self.units.device, non_blocking=True)
        old = self._state
        view, k = (self._swap(seeds), old.k) if local else self._propose(u[:2], seeds)
        new = self._state_of(view, k)
        ratio = self.log_acceptance(new.log_p, old.log_p, k, old.k)
        accept = u[2].log() < ratio

        if on_host(accept):
            if bool(accept):
                self._state, self._current = new, view
                self._fingerprint = self._tally.visited.fingerprint(*new[:2])
        else:
            pairs = zip(new, old, strict=True)
            self._state = _State(*(torch.where(accept, a, b) for a, b in pairs))
            self._current = GraphState(self.units, *self._state[:2])
            self._fingerprint = self._tally.visited.fingerprint(*self._state[:2])
        self._time += 1
        if self._time <= self.burn_in:
            self._adapt(ratio, local)
        else:
            self._tally.add(accept, self._state.k / self._size, self._fingerprint)
        return accept

    def _adapt(self, ratio: Tensor, local: bool) -> None:
        """Adapt the step sizes by Robbins and Monro; no deviation grows beyond 1."""
        if local or self.target_acceptance is None:
            return
        error = ratio.clamp(max=0.0).exp() - self.target_acceptance
        most = -self._sigma_delta.max().log()
        self._log_scale = torch.minimum(self._log_scale + error / self._time**0.5, most)

    def step(self) -> bool:
        """Make one transition, synchronise, and return whether the proposal was accepted."""
        accepted = super().step()
        self._tally.warn_if_stuck()
        return accepted

    def run(self, num_steps: int | None = None) -> None:
        """Make some transitions, without synchronising a GPU.

        The rate of acceptance is checked, which synchronises, once in a thousand transitions.

        Args:
            num_steps: The number of transitions. (default: ``self.num_steps``)
        """
        super().run(num_steps)
        self._tally.warn_if_stuck()

    def _set_state(self, view: GraphState) -> None:
        self._current = view
        self._state = self._state_of(view, _count_dropped(view))
        self._fingerprint = self._tally.visited.fingerprint(view.edges, view.node_mask)

    # Statistics -----------------------------------------------------------------------------------

    @property
    def acceptance_rate(self) -> float:
        """Return the fraction of accepted transitions, without those of the burn-in."""
        return self._tally.acceptance_rate

    def statistics(self) -> Statistics:
        """Return statistics of the chain since its burn-in."""
        return self._tally.statistics()

    # Checkpoints ----------------------------------------------------------------------------------

    _any_length = ("visited",)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state from which the chain continues, random numbers included."""
        return {
            **super().state_dict(),
            "eps": self._target.eps,
            "log_scale": self._log_scale,
            "time": torch.tensor(self._time),
            **self._tally.state_dict(),
        }

    def _load(self, state: dict[str, Tensor]) -> None:
        self._target.eps = state["eps"].clone()
        super()._load(state)
        self._log_scale = state["log_scale"].clone()
        self._time = int(state["time"])
        self._tally.load(state, max(self._time - self.burn_in, 0))


def _count_dropped(view: GraphState) -> Tensor:
    """Count dropped edges and nodes, of shape ``[2]``, float64."""
    return torch.stack([(~mask).sum().double() for mask in (view.edges, view.node_mask)])
