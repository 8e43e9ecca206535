"""Number of distinct states that a chain has visited."""

from __future__ import annotations

import torch
from torch import Tensor

from gas.native import random_bits

SEED = 0x5EED
MOST_PENDING = 4096  # Fingerprints that are on a GPU still.


class Visited:
    """Counts different pairs of masks by their fingerprints, without making a host wait.

    A fingerprint has 64 bits: a sum of random numbers, times the bytes of the packed masks. Two
    masks share theirs with a probability below 2^-56.

    Args:
        size: The number of entries of both masks together.
        device: Where the masks are.
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
        if len(self._pending) >= MOST_PENDING:
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
        """Go on from :meth:`state`."""
        self._pending.clear()
        self._seen = set(state.tolist())
