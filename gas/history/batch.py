"""The pulls of one mini-batch, one for every history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from gas.history.history import History
from gas.history.host import Pull


class BatchPulls:
    """Reads the halo's rows from every history, in the order in which a model needs them.

    Args:
        histories: The histories, in order.
        batch_size: The number of in-batch nodes, for which space is left in front of the rows.
        n_id: Global ids of the in-batch nodes, then of the halo.
        limit: How many pulls may be under way. (default: all)
    """

    def __init__(
        self, histories: Iterable[History], batch_size: int, n_id: Tensor, limit: int | None = None
    ) -> None:
        self._waiting = deque(histories)
        self._started: dict[History, Pull] = {}
        self._batch_size = batch_size
        self._halo = n_id[batch_size:]
        self._limit = len(self._waiting) if limit is None else limit
        try:
            self._start()
        except BaseException:
            self.cancel()
            raise

    def _start(self) -> None:
        while self._waiting and len(self._started) < self._limit:
            history = self._waiting.popleft()
            self._started[history] = history.start_pull(self._halo, self._batch_size)

    def has_started(self, history: History) -> bool:
        """Whether the rows of a history are being read."""
        return history in self._started

    def rows(self, history: History) -> Tensor:
        """The rows of the halo from a history, behind space for the batch's own."""
        pull = self._started.get(history)
        if pull is None:  # In another order than the model's histories, again, or later.
            if history in self._waiting:
                self._waiting.remove(history)
            return history.start_pull(self._halo, self._batch_size).wait()
        rows = pull.wait()
        del self._started[history]
        self._start()
        return rows

    def cancel(self) -> None:
        """Takes back what nobody waited for."""
        self._waiting.clear()
        while self._started:
            self._started.popitem()[1].cancel()


class SharedPulls:
    """Lets several forward passes of one mini-batch read the same rows, which are pulled once.

    What the first reads is copied for the others at once: it is the caller's then, who may change
    it. Nobody keeps more memory than if each had pulled.

    Args:
        pulls: The pulls of the first.
        batch_size: The number of in-batch nodes.
        others: How many read after it.
    """

    def __init__(self, pulls: BatchPulls, batch_size: int, others: int) -> None:
        self.others = [Copies(pulls) for _ in range(others)]
        self._pulls = pulls
        self._batch_size = batch_size

    def has_started(self, history: History) -> bool:
        """See :meth:`BatchPulls.has_started`."""
        return self._pulls.has_started(history)

    def rows(self, history: History) -> Tensor:
        """See :meth:`BatchPulls.rows`."""
        rows = self._pulls.rows(history)
        for copies in self.others:
            mine = copies[history] = torch.empty_like(rows)
            mine[self._batch_size :] = rows[self._batch_size :]
        return rows

    def cancel(self) -> None:
        """See :meth:`BatchPulls.cancel`."""
        self._pulls.cancel()


class Copies(dict[History, Tensor]):
    """The rows that another forward pass has read from each history."""

    def __init__(self, pulls: BatchPulls) -> None:
        super().__init__()
        self._pulls = pulls

    def has_started(self, history: History) -> bool:
        """See :meth:`BatchPulls.has_started`."""
        return history in self

    def rows(self, history: History) -> Tensor:
        """See :meth:`BatchPulls.rows`; read anew what the other pass had no use for."""
        return self.pop(history) if history in self else self._pulls.rows(history)

    def cancel(self) -> None:
        """Forgets what nobody asked for."""
        self.clear()
