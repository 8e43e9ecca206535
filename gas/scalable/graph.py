"""``push_and_pull`` in what ``torch.compile`` compiles: one operator, and no break of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gas.history import History
from gas.history.rows import Rows, first_rows
from gas.scalable.call import RUNNING, check_not_recomputing

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


def exchange_in_graph(
    model: ScalableGNN,
    history: History,
    x: Tensor,
    batch_size: int | None,
    n_id: Tensor | None,
    offset: Tensor | None,
    count: Tensor | None,
    rows: bool,
) -> Tensor | Rows:
    """The same as :meth:`gas.ScalableGNN.push_and_pull`, to the compiler."""
    if n_id is None or batch_size is None:  # Of a batch, its end finds that nothing was pushed.
        return x
    own = first_rows(x, batch_size)
    known = [i for i, one in enumerate(model.histories) if one is history]
    if not known:
        return model._exchange(history, x, batch_size, n_id, offset, count, rows)
    halo = _exchange(own.detach(), n_id, offset, count, batch_size, known[0])
    return Rows(own, halo) if rows else torch.cat([own, halo])


@torch.library.custom_op("gas::exchange", mutates_args=())
def _exchange(
    own: Tensor,
    n_id: Tensor,
    offset: Tensor | None,
    count: Tensor | None,
    batch_size: int,
    position: int,
) -> Tensor:
    """Pushes a batch's own rows to a history of the model that is running, and pulls its halo's."""
    check_not_recomputing()
    call = RUNNING.call
    assert call is not None  # Graphs run in the call of their model.
    num_histories = len(call.histories)
    history = call.histories[position]
    rows = call.exchange(history, own, batch_size, n_id, offset, count, True, 0, num_histories)
    halo = rows.halo
    return halo.contiguous()


@_exchange.register_fake
def _(
    own: Tensor,
    n_id: Tensor,
    offset: Tensor | None,
    count: Tensor | None,
    batch_size: int,
    position: int,
) -> Tensor:
    return own.new_empty(n_id.size(0) - batch_size, own.size(1))
