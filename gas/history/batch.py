"""The pulls of one mini-batch, one for every history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gas.history.engine import Copies
from gas.history.history import History
from gas.history.rows import Rows, StoredRows
from gas.history.transfer import Pull


class BatchPulls:
    """Read the halo's rows from every history, in the order in which a model needs them.

    Several forward passes of the batch may share them, such as those of its views: every row is
    pulled once. Tensors of what the first reads are copied for the others at once, because it is
    the caller's then; nobody keeps more memory than if each had pulled.

    Args:
        histories: The histories whose pulls begin at once, in order.
        batch_size: The number of in-batch nodes, for which space is left in front of the rows.
        n_id: Global ids of the in-batch nodes, then of the halo.
        limit: How many pulls may be under way. (default: all)
    """

    def __init__(
        self, histories: Iterable[History], batch_size: int, n_id: Tensor, limit: int | None = None
    ) -> None:
        self.readers = 1
        """How many forward passes read each history."""
        self._waiting = deque(histories)
        self._started: dict[History, Pull] = {}
        self._copies: dict[History, list[Tensor]] = {}  # For those who read after the first.
        self._stored: dict[History, StoredRows] = {}
        self._batch_size = batch_size
        self._own, self._halo = n_id[:batch_size], n_id[batch_size:]
        self._ids: Copies = {}  # The halo's, once for all histories.
        self._limit = len(self._waiting) if limit is None else limit
        try:
            self._start()
        except BaseException:
            self.cancel()
            raise

    def _start(self) -> None:
        while self._waiting and len(self._started) < self._limit:
            history = self._waiting.popleft()
            self._started[history] = self._start_one(history)

    def _start_one(self, history: History) -> Pull:
        return history.start_pull(self._halo, self._batch_size, self._own, self._ids)

    def tensor(self, history: History, own: Tensor) -> Tensor:
        """Return the batch's own rows and its halo's, in a tensor that is the caller's."""
        return join(own, self._pull(history))

    def rows(self, history: History, own: Tensor, in_place: bool = True) -> Rows:
        """Return the same in two parts; the halo's are read in place, where that is possible.

        They can't if they have been pulled already, or ``in_place`` is false.
        """
        own = own if torch.is_grad_enabled() else own.detach()
        stored = self._stored.get(history)
        pulled = history in self._started or history in self._copies
        if stored is None and in_place and not pulled:
            stored = history.in_place(self._halo, own.dtype, self._ids)
        if stored is None:
            return Rows(own, self._pull(history)[self._batch_size :].to(own))
        if self.readers > 1:
            self._stored[history] = stored
        return Rows(own, stored)

    def _pull(self, history: History) -> Tensor:
        """Pull the rows of the halo from a history, behind space for the batch's own."""
        if self._copies.get(history):
            return self._copies[history].pop()
        pull = self._started.get(history)
        if pull is None:  # In another order than the model's histories, again, or later.
            if history in self._waiting:
                self._waiting.remove(history)
            rows = self._start_one(history).wait()
        else:
            rows = pull.wait()
            del self._started[history]
            self._start()
        if self.readers > 1 and history not in self._copies:
            self._copies[history] = [torch.empty_like(rows) for _ in range(self.readers - 1)]
            for copy in self._copies[history]:
                copy[self._batch_size :] = rows[self._batch_size :]
        return rows

    def cancel(self) -> None:
        """Take back pulls that nothing has waited for; copies stay for their readers."""
        self._waiting.clear()
        while self._started:
            self._started.popitem()[1].cancel()


class _Join(torch.autograd.Function):
    """Write rows in front of others, in place; the others get no gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Tensor) -> Tensor:
        ctx.size = own.size(0)
        ctx.mark_dirty(rows)
        rows[: own.size(0)] = own
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[: ctx.size], None


def join(own: Tensor, rows: Tensor) -> Tensor:
    """Join the batch's own rows, with gradient, and the halo's, without.

    Args:
        own: The batch's own rows, of shape ``[batch_size, width]``.
        rows: The halo's rows behind space for them, of shape ``[batch_size + halo, width]``; it is
            written to.
    """
    if own.dtype != rows.dtype or own.device != rows.device:
        return torch.cat([own, rows[own.size(0) :].to(own)])
    return _Join.apply(own, rows)
