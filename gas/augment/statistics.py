"""Statistics of a chain since its burn-in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gas.augment.units import Units
from gas.augment.visited import Visited
from gas.native import warn

CHECK_EVERY = 1000  # Transitions between looks at the acceptance rate ...
LOW_ACCEPTANCE = 0.01  # ... and the rate below which the chain is said to be stuck.


class Statistics(NamedTuple):
    """Statistics of a chain since its burn-in; a rejected transition counts its state again.

    ``mean_edge_drop`` and ``mean_node_drop`` are the means of ``k_E / m`` and ``k_V / n``;
    ``distinct_states`` counts every state once, however often it was visited.
    """

    steps: int
    acceptance_rate: float
    mean_edge_drop: float
    mean_node_drop: float
    distinct_states: int


class Tally:
    """Counter of transitions that doesn't synchronise with a GPU before it is read.

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
        """Count a transition.

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
        """Return the fraction of transitions that were accepted."""
        return float(self._accepted) / max(self.steps, 1)

    def statistics(self) -> Statistics:
        """Return the statistics so far."""
        edges, nodes = (self._sum_share / max(self.steps, 1)).tolist()
        return Statistics(self.steps, self.acceptance_rate, edges, nodes, len(self.visited))

    def warn_if_stuck(self) -> None:
        """Look at the rate of acceptance once in a while, because a GPU makes the host wait."""
        if self._warned or self.steps < self._next_check:
            return
        self._next_check = self.steps + CHECK_EVERY
        if self.acceptance_rate < LOW_ACCEPTANCE:
            self._warned = True
            warn(
                f"MHAug has accepted {100 * self.acceptance_rate:.2g} % of {self.steps} "
                "transitions: its states hardly change; set reference_size, make sigma_delta_e and "
                "sigma_delta_v smaller (target_acceptance with burn_in finds how small), or local "
                "larger",
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return all counts but the number of steps, which the chain has."""
        return {
            "accepted": self._accepted,
            "sum_share": self._sum_share,
            "visited": self.visited.state(),
        }

    def load(self, state: dict[str, Tensor], steps: int) -> None:
        """Go on from :meth:`state_dict`, after some steps."""
        self.steps = steps
        self._accepted = state["accepted"].clone()
        self._sum_share = state["sum_share"].clone()
        self.visited.load(state["visited"])
