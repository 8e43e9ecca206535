"""What a chain has done since its burn-in."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from gas.augment.units import Units
from gas.augment.visited import Visited

CHECK_EVERY = 1000  # Transitions between looks at the acceptance rate ...
LOW_ACCEPTANCE = 0.01  # ... and the rate below which the chain is said to be stuck.


class Statistics(NamedTuple):
    """What a chain has done since its burn-in: rejected transitions count their state again.

    ``mean_edge_drop`` and ``mean_node_drop`` are the means of ``k_E / m`` and ``k_V / n``;
    ``distinct_states`` counts every state once, however often it was visited.
    """

    steps: int
    acceptance_rate: float
    mean_edge_drop: float
    mean_node_drop: float
    distinct_states: int


class Tally:
    """Counts transitions, without making a host wait until somebody asks.

    Args:
        units: What the chain may drop.
    """

    def __init__(self, units: Units) -> None:
        self.steps = 0
        self.visited = Visited(units.size + units.num_nodes, units.device)
        self._accepted = torch.zeros((), dtype=torch.double, device=units.device)
        self._sum_share = torch.zeros(2, dtype=torch.double, device=units.device)
        self._warned, self._next_check = False, CHECK_EVERY

    def add(self, accepted: Tensor, share: Tensor, fingerprint: Tensor) -> None:
        """Counts a transition.

        Args:
            accepted: Whether it was, of shape ``[]``, bool.
            share: The fractions of edges and nodes that the state after it drops, of shape ``[2]``.
            fingerprint: Of that state, see :class:`gas.augment.visited.Visited`.
        """
        self.steps += 1
        self._accepted = self._accepted + accepted
        self._sum_share = self._sum_share + share
        self.visited.add(fingerprint)

    @property
    def acceptance_rate(self) -> float:
        """The fraction of transitions that were accepted."""
        return float(self._accepted) / max(self.steps, 1)

    def statistics(self) -> Statistics:
        """What was counted."""
        edges, nodes = (self._sum_share / max(self.steps, 1)).tolist()
        return Statistics(self.steps, self.acceptance_rate, edges, nodes, len(self.visited))

    def warn_if_stuck(self) -> None:
        """Looks at the rate of acceptance once in a while, because a GPU makes the host wait."""
        if self._warned or self.steps < self._next_check:
            return
        self._next_check = self.steps + CHECK_EVERY
        if self.acceptance_rate < LOW_ACCEPTANCE:
            self._warned = True
            warnings.warn(
                f"MHAug has accepted {100 * self.acceptance_rate:.2g} % of {self.steps} "
                "transitions: its states hardly change; set reference_size, make sigma_delta_e and "
                "sigma_delta_v smaller (target_acceptance with burn_in finds how small), or local "
                "larger",
                stacklevel=3,  # Who called the chain.
            )

    def state_dict(self) -> dict[str, Tensor]:
        """All but the number of steps, which the chain knows."""
        return {
            "accepted": self._accepted,
            "sum_share": self._sum_share,
            "visited": self.visited.state(),
        }

    def load(self, state: dict[str, Tensor], steps: int) -> None:
        """Goes on from :meth:`state_dict`, after some steps."""
        self.steps = steps
        self._accepted = state["accepted"].clone()
        self._sum_share = state["sum_share"].clone()
        self.visited.load(state["visited"])
