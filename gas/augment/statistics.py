"""Statistics of a chain since its burn-in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gas.augment.units import Units
from gas.native import random_bits, warn

CHECK_EVERY = 1000  # The number of transitions between checks of the acceptance rate.
LOW_ACCEPTANCE = 0.01  # A lower rate gives a warning.

SEED = 0x5EED  # Seed of the random numbers in fingerprints.
MAX_PENDING = 4096  # The number of fingerprints that are kept on a GPU.


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


class VisitedStates:
    """Counter of distinct states by their fingerprints, which doesn't synchronise a GPU.

    A fingerprint has 64 bits: the scalar product of random numbers and the bytes of the packed
    masks. Two states have the same fingerprint with a probability below 2^-56.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._padding = torch.zeros(-size % 8, dtype=torch.bool, device=device)
        self._key = random_bits((size + 7) // 8, SEED, device)
        self._seen: set[int] = set()
        self._pending: list[Tensor] = []

    def fingerprint(self, edges: Tensor, nodes: Tensor) -> Tensor:
        """Compute the fingerprint of a state, of shape ``[]``, int64."""
        words = torch.cat([edges, nodes, self._padding]).view(torch.int64)
        packed = (words * 0x0102040810204080 >> 56) & 0xFF  # Eight bytes of 0 or 1 become one.
        return (packed * self._key).sum()

    def add(self, fingerprint: Tensor) -> None:
        """Add a state."""
        self._pending.append(fingerprint)
        if len(self._pending) >= MAX_PENDING:
            self._flush_pending()

    def _flush_pending(self) -> None:
        if self._pending:
            self._seen.update(torch.stack(self._pending).tolist())
            self._pending.clear()

    def __len__(self) -> int:
        self._flush_pending()
        return len(self._seen)

    def state(self) -> Tensor:
        """Return the fingerprints, of shape ``[states]``, int64."""
        self._flush_pending()
        return torch.tensor(sorted(self._seen), dtype=torch.int64)

    def load(self, state: Tensor) -> None:
        """Restore a :meth:`state`."""
        self._pending.clear()
        self._seen = set(state.tolist())


class Tally:
    """Counter of transitions that doesn't synchronise with a GPU before it is read."""

    def __init__(self, units: Units) -> None:
        self.steps = 0
        self.visited = VisitedStates(units.size + units.num_nodes, units.device)
        self._accepted = torch.zeros((), dtype=torch.double, device=units.device)
        self._sum_share = torch.zeros(2, dtype=torch.double, device=units.device)
        self._warned, self._next_check = False, CHECK_EVERY

    def add(self, accepted: Tensor, share: Tensor, fingerprint: Tensor) -> None:
        """Count a transition.

        Args:
            accepted: Whether the proposal was accepted, of shape ``[]``, bool.
            share: The fractions of edges and nodes that the new state drops, of shape ``[2]``.
            fingerprint: The fingerprint of the new state; see :class:`VisitedStates`.
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
        """Warn if the acceptance rate is low; it is checked rarely, as this synchronises a GPU."""
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
        """Return all counts except the number of steps, which is the chain's."""
        return {
            "accepted": self._accepted,
            "sum_share": self._sum_share,
            "visited": self.visited.state(),
        }

    def load(self, state: dict[str, Tensor], steps: int) -> None:
        """Restore a :meth:`state_dict`, after some steps."""
        self.steps = steps
        self._accepted = state["accepted"].clone()
        self._sum_share = state["sum_share"].clone()
        self.visited.load(state["visited"])
