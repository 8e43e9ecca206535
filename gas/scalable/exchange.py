"""``push_and_pull``: at once, and as an operator in a graph that ``torch.compile`` makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from gas.history import History
from gas.history.rows import Rows, first_rows
from gas.native.compiler import apart
from gas.native.custom_op import custom_op
from gas.scalable.call import RUNNING, Call, check_not_recomputing

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


@apart
def exchange_now(
    model: ScalableGNN,
    history: History,
    x: Tensor,
    batch_size: int | None,
    n_id: Tensor | None,
    offset: Tensor | None,
    count: Tensor | None,
    rows: bool,
) -> Tensor | Rows:
    """See :meth:`gas.ScalableGNN.push_and_pull`."""
    check_not_recomputing()
    call = model._calls.current or Call(batch=n_id is not None)
    where = batch_size, n_id, offset, count
    return call.exchange(history, x, *where, rows, model.num_nodes, len(model.histories))


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
    """The same where the compiler looks: an operator that doesn't break the graph."""
    if n_id is None or batch_size is None:  # Of a batch, its end finds that nothing was pushed.
        return x
    own = first_rows(x, batch_size)
    known = [i for i, one in enumerate(model.histories) if one is history]
    if not known:
        return exchange_now(model, history, x, batch_size, n_id, offset, count, rows)
    out = _exchange(own, n_id, offset, count, batch_size, known[0])
    return Rows(out[:batch_size], out[batch_size:].detach()) if rows else out


@custom_op("gas::exchange", "push_and_pull")
def _exchange(
    own: Tensor,
    n_id: Tensor,
    offset: Tensor | None,
    count: Tensor | None,
    batch_size: int,
    position: int,
) -> Tensor:
    """Pushes a batch's own rows to a history of the model that is running, and pulls its halo's.

    Its own rows come out as well, so that the compiler can't leave it out where they are used.
    """
    check_not_recomputing()
    call = RUNNING.call
    assert call is not None  # Graphs run in the call of their model.
    where = batch_size, n_id, offset, count
    history, num_histories = call.histories[position], len(call.histories)
    return cast(Tensor, call.exchange(history, own, *where, False, 0, num_histories))


@_exchange.register_fake
def _(
    own: Tensor,
    n_id: Tensor,
    offset: Tensor | None,
    count: Tensor | None,
    batch_size: int,
    position: int,
) -> Tensor:
    return own.new_empty(n_id.size(0), own.size(1))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_own = inputs[0].size(0)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad[: ctx.num_own], None, None, None, None, None


_exchange.register_autograd(_backward, setup_context=_setup)
