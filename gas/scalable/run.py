"""One forward pass of a model, and what is done before and after it.

Everything around it looks at values, takes locks and moves rows, so it is kept out of what
``torch.compile`` compiles: a function here is ``apart`` and runs as it is or, where it calls
``forward``, it is ``between``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from gas.graph.adjacency import Adjacency
from gas.history.batch import BatchPulls
from gas.history.features import Features
from gas.history.rows import Rows, first_rows
from gas.loader.batch import SubData
from gas.loader.moving import moved
from gas.native.compiler import apart, between, is_compiling
from gas.native.encoded_rows import decoded
from gas.native.sparse_rows import is_sparse
from gas.nn.conv import FusedConv
from gas.nn.fuse import fuse
from gas.scalable.call import Call, Sweep, check_call, check_graph, lacks_product
from gas.scalable.exact import Watch
from gas.scalable.ranks import check_connected

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN


# How PyTorch calls what it can't do with a matrix of torch.sparse_csr.
SPARSE = re.compile(r"sparse|layout|strides", re.IGNORECASE)


@apart
def arrange(
    model: ScalableGNN,
    x: Tensor | SubData | None,
    adj_t: Any,
    where: tuple[int | None, Tensor | None, Tensor | None, Tensor | None],
    fill: bool,
    push: bool,
    kwargs: dict[str, Any],
) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
    """What a call of the model does, and the arguments of ``forward``.

    See :meth:`gas.ScalableGNN.__call__`; ``where`` is ``batch_size``, ``n_id``, ``offset``,
    ``count``.
    """
    batch_size, n_id, offset, count = where
    features: Tensor | Features | None
    whole = None
    if isinstance(x, SubData):
        if adj_t is not None or batch_size is not None or n_id is not None:
            raise ValueError(
                "a mini-batch brings its own adjacency and ids: pass nothing else with it, "
                "model(batch)"
            )
        whole = batch = moved(x, model.device)
        features, adj_t, given = model._given(batch)
        batch_size, n_id, offset, count = batch[1:]
        kwargs = {**given, **kwargs}
    else:
        if n_id is None and batch_size is None:
            _check_whole(adj_t)
        # A full batch looks at all of them.
        features, kwargs = decoded(x), {name: decoded(value) for name, value in kwargs.items()}
    call = Call(batch=n_id is not None, fill=fill, pushes=push)
    ranks = model.ranks
    if ranks is not None and fill:
        raise ValueError(
            "'fill' is True, but other ranks have the rest of the graph: model(loader=loader) "
            "fills the histories of all"
        )
    if ranks is not None and n_id is not None:
        ranks.bind_to(model, n_id)
    elif n_id is not None and push:
        check_connected(n_id)
    check_call(features, batch_size, n_id, fill, model.num_nodes, model.buffer_size)
    if batch_size is not None and n_id is not None:
        if ranks is not None and push:
            ranks.begin(n_id, offset, count, whole)
            call.ranks = ranks
        call.pulls = pulls_of(model, batch_size, n_id)
    return call, (features, adj_t, batch_size, n_id, offset, count), kwargs


def _check_whole(adj_t: Any) -> None:
    """Refuses the adjacency of a mini-batch whose ids were forgotten."""
    if (isinstance(adj_t, Adjacency) or is_sparse(adj_t)) and adj_t.size(0) != adj_t.size(1):
        raise ValueError(
            f"'adj_t' has shape {list(adj_t.shape)}, that of a mini-batch, which comes with ids: "
            "pass all that the loader yields, model(batch.x, batch.adj_t, *args), or model(batch)"
        )


class _Around:
    """What surrounds a forward pass that has begun: ``stack`` ends it."""

    def __init__(
        self, model: ScalableGNN, call: Call, x: Any, adj_t: Any, where: tuple[Any, ...]
    ) -> None:
        self.model, self.call, self.x = model, call, x
        with contextlib.ExitStack() as stack:
            if call.pulls is not None:
                stack.callback(call.pulls.cancel)
            if not model._is_proven:
                call.held_back = []
            self.adj_t = taken(model, adj_t)
            self.takes_compiler = (
                call.compiled
                and not is_sparse(x)
                and _takes_compiler(model, call, self.adj_t, *where[:2])
            )
            if self.takes_compiler and isinstance(self.adj_t, Adjacency):
                _complete(model, self.adj_t)
            call.histories = model.histories
            stack.enter_context(model._calls.enter(call))
            if not self.takes_compiler:
                stack.enter_context(exact(model, self.adj_t, *where))
            self.stack = stack.pop_all()


@between
def run(
    model: ScalableGNN,
    call: Call,
    x: Tensor | Rows | None,
    adj_t: Any,
    *where: Any,
    **kwargs: Any,
) -> Tensor:
    """Runs forward.

    Args:
        model: The model.
        call: What the call does.
        x: The features.
        adj_t: The adjacency.
        *where: ``batch_size``, ``n_id``, ``offset`` and ``count``.
        **kwargs: Further arguments of ``forward``.
    """
    call.compiled = is_compiling() or model._compiled_call_impl is not None
    if call.compiled and isinstance(x, Rows):
        x = _read(x)
    around = _begin(model, call, x, adj_t, where)
    try:
        if call.compiled and not around.takes_compiler:
            out = _run_uncompiled(model, x, around.adj_t, *where, **kwargs)
        else:
            out = torch.nn.Module.__call__(model, x, around.adj_t, *where, **kwargs)
    except BaseException as error:
        _fail(around, error)
        raise
    return _end(around, out, where)


_begin = apart(_Around)


@apart
def _read(x: Rows) -> Tensor:
    return x.tensor()


@apart
def _run_uncompiled(model: ScalableGNN, *args: Any, **kwargs: Any) -> Tensor:
    return model._call_impl(*args, **kwargs)


@apart
def _fail(around: _Around, error: BaseException) -> None:
    """Ends a forward pass that didn't; says in words what PyTorch says in others."""
    around.stack.close()
    if around.call.ranks is not None:
        around.call.ranks.fail()
    if isinstance(error, RuntimeError) and lacks_product(around.adj_t, error):
        raise RuntimeError(
            "'adj_t' is a torch.sparse_csr matrix, which PyTorch can't multiply by "
            f"bfloat16 or float16 ({error}): load with layout='edge_index'"
        ) from error
    if is_sparse(around.x) and isinstance(error, RuntimeError) and SPARSE.search(str(error)):
        raise RuntimeError(
            "'x' is a torch.sparse_csr matrix, of which PyTorch can't do what forward does "
            f"({str(error).split('. ')[0]}): use gas.nn.dropout for F.dropout, gas.nn.Linear or a "
            "layer of gas.nn (gas.fuse(model) makes them of PyTorch's and PyG's), or x.to_dense(), "
            "of the batch alone"
        ) from error


@apart
def _end(around: _Around, out: Any, where: tuple[Any, ...]) -> Any:
    """Ends a forward pass."""
    with around.stack:
        call, model = around.call, around.model
        if call.batch or call.fill:
            call.finish(len(model.histories))
            model._is_proven = True
        if call.ranks is not None:
            call.ranks.end(model.histories)
    out = first_rows(out, where[0]) if isinstance(out, Tensor) else out
    return out if call.ranks is None else call.ranks.weighed(out)


def run_sweep(model: ScalableGNN, batch: SubData, sweep: Sweep) -> Tensor:
    """Runs forward up to the history that a sweep of layer-wise inference fills."""
    check_graph(batch.n_id, model.num_nodes)
    x, adj_t, kwargs = model.inputs_of(moved(batch, model.device).data)
    if not model._is_proven:
        with model.without_histories():  # A wrong model should be found before they change.
            model(x, adj_t, *batch[1:], **kwargs)
    return run(model, Call(batch=True, sweep=sweep), x, adj_t, *batch[1:], **kwargs)


def exact(
    model: ScalableGNN,
    adj_t: Any,
    batch_size: int | None,
    n_id: Tensor | None = None,
    *_: Tensor | None,
) -> contextlib.AbstractContextManager[None]:
    """Watches over a batch that isn't the whole graph."""
    if batch_size is None or n_id is None or batch_size == model.num_nodes:
        return contextlib.nullcontext()
    return _watch_of(model).batch(batch_size, n_id.numel(), _kind(model, adj_t))


def _kind(model: ScalableGNN, adj_t: Any) -> Hashable:
    """What decides which rows a norm is given, in every forward pass; ``None`` if more does."""
    if not model._is_static or not type(model).__module__.startswith("gas."):  # Or a subclass.
        return None
    if isinstance(adj_t, Tensor) and adj_t.layout == torch.strided:
        return "edge_index"
    return type(adj_t).__name__, adj_t.size(0) == adj_t.size(1)


def _watch_of(model: ScalableGNN) -> Watch:
    if model._watch is None or not model._is_proven:
        model._watch = Watch(model)
    return model._watch


def taken(model: ScalableGNN, adj_t: Any) -> Any:
    """The adjacency as a model's layers take it; PyG's that can be become fused ones."""
    if not isinstance(adj_t, Adjacency):
        return adj_t
    if model._takes_fused is None:
        layers = [layer for layer in fuse(model).modules() if isinstance(layer, MessagePassing)]
        model._takes_fused = all(isinstance(layer, FusedConv) for layer in layers)
    return adj_t if model._takes_fused else adj_t.to_torch_sparse()


def _takes_compiler(
    model: ScalableGNN, call: Call, adj_t: Any, batch_size: int | None, n_id: Tensor | None
) -> bool:
    """Whether a forward pass can be a graph.

    The compiler knows no matrices of ``torch.sparse``. A graph knows only what a batch does, and
    not who watches over a layer of the model.
    """
    is_known = isinstance(adj_t, Tensor) and adj_t.layout == torch.strided
    if not (is_known or isinstance(adj_t, Adjacency)) or call.fill or call.sweep is not None:
        return False
    if batch_size is None or n_id is None or batch_size == model.num_nodes:
        return True
    return not _watch_of(model).is_needed(batch_size, n_id.numel(), _kind(model, adj_t))


def _complete(model: ScalableGNN, adj: Adjacency) -> None:
    """Makes what an adjacency otherwise makes when a layer first asks for it."""
    _ = adj.matrix
    if any(getattr(layer, "add_self_loops", False) for layer in model.modules()):
        _ = adj.with_self_loops().matrix


def pulls_of(model: ScalableGNN, batch_size: int, n_id: Tensor) -> BatchPulls | None:
    """The pulls of a batch, under way; ``None`` where each is to begin when it is needed."""
    pulls = model._take_ahead(n_id)
    if pulls is None and model.io == "concurrent":
        model.expect(batch_size, n_id)
        ahead = [history for history in model.histories if history.pulls_beside]
        pulls = BatchPulls(ahead, batch_size, n_id, model.pool_size) if ahead else None
    if pulls is None and model.device.type != "cpu":  # The ids go to the device once.
        pulls = BatchPulls([], batch_size, n_id)
    return pulls
