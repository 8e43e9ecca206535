"""A call of a model, from top to bottom.

1. :meth:`BatchModel.__call__` is given a mini-batch, or a full batch.
2. :func:`arrange` looks at it, makes the :class:`Call` and starts what is pulled.
3. :func:`run` runs forward, the user's own code.
4. Forward calls :meth:`BatchModel.push_and_pull` after each layer: :meth:`Call.exchange`.
5. :meth:`Call.end` checks that every history was filled, and gives back what the call held.

A full batch, a read-only call, a view, a sweep of layer-wise inference and a call on one of many
ranks are calls with other fields, see :class:`Call`.

Only forward can be compiled by ``torch.compile``: the other functions check values, take locks and
move rows. They are excluded by ``disable_compile``, or by ``skip_frame`` if they call forward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import Adjacency
from gas.history import BatchPulls, Features, History, Rows, dequantize, first_rows
from gas.loader import SubData, to_device
from gas.native import custom_op, disable_compile, is_compiling, is_sparse, skip_frame
from gas.scalable.base import HistoryModel, set_banks
from gas.scalable.checks import (
    adjacency,
    check_call,
    check_graph,
    check_halo,
    check_whole,
    explain,
    named_arguments,
    wrong_calls,
)
from gas.scalable.ranks import Ranks, check_connected

BANKS = ("original", "per_view")
Where = tuple[int | None, Tensor | None, Tensor | None, Tensor | None]
"""``batch_size``, ``n_id``, ``offset`` and ``count``, as forward is given them."""


class Reached(BaseException):
    """Ends a forward pass at the history that layer-wise inference is filling."""


class BatchModel(HistoryModel):
    """A model that is called on mini-batches: its ``forward`` pushes rows and pulls them."""

    pool_size: int | None
    buffer_size: int | None
    ranks: Ranks | None
    _calls: Calls
    _ahead: list[tuple[Tensor, BatchPulls]]
    _chosen: Any  # What finds the outputs of chosen nodes.

    @skip_frame
    def __call__(
        self,
        x: Tensor | SubData | None = None,
        adj_t: Any = None,
        batch_size: int | None = None,
        n_id: Tensor | None = None,
        offset: Tensor | None = None,
        count: Tensor | None = None,
        loader: Iterable[SubData] | None = None,
        *,
        fill: bool | None = None,
        push: bool = True,
        views: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model on a mini-batch, on the full graph, or layer by layer over a loader.

        * ``model(batch)`` returns the ``[batch_size, out_channels]`` outputs of the in-batch nodes;
          the batch is pushed to the histories and its halo pulled. ``forward`` is given what the
          batch has of its parameters: see :meth:`inputs_of`.
        * ``model(batch.x, batch.adj_t, *args)`` is the same, of a batch taken apart.
        * ``model(x, adj_t)`` is plain full batch and leaves the histories alone; with ``fill=True``
          it writes them.
        * ``model(loader=loader)`` computes every node's output layer by layer, in evaluation mode
          and without gradient, at the memory of one batch. It returns ``[num_nodes, out_channels]``
          on the CPU and leaves the histories equal to the full-batch hidden states.

        Args:
            x: A mini-batch, or node features, of shape ``[N, F]`` or
                ``[batch_size + halo, F]``.
            adj_t: The adjacency, in any layout that the model's layers take.
            batch_size: The number of in-batch nodes, which come first.
            n_id: Global ids of in-batch nodes, then of the halo, of shape
                ``[batch_size + halo]``.
            offset: First global row of each part in the batch.
            count: Number of nodes of each part in the batch.
            loader: Batches that cover every node once, to compute layer by layer.
            fill: Write the histories from a full batch. (default: ``False``)
            push: Write the rows of a mini-batch to the histories. Without, nothing is changed, for
                explanations, perturbed inputs or several passes with dropout; the halo's rows are
                read as they are, however old. (default: ``True``)
            views: Also run the views of a mini-batch, with these histories: it is
                :meth:`views` for what wraps the model, such as ``DistributedDataParallel``.
                (default: no views)
            **kwargs: Passed on to ``forward``, such as ``edge_weight``.
        """
        if loader is not None:
            if x is not None or adj_t is not None or fill or kwargs or not push:
                raise ValueError("'loader' brings its own batches: pass nothing else with it")
            return self._infer(loader)
        if views is not None:
            return self.views(cast(SubData, x), views)
        where = batch_size, n_id, offset, count
        if fill is None:
            fill = self._should_fill(x, batch_size, n_id)
        call = (_arrange if is_compiling() else arrange)(self, x, adj_t, where, fill, push, kwargs)
        return run(call)

    def _should_fill(self, x: Any, batch_size: int | None, n_id: Tensor | None) -> bool:
        """Return whether a call writes the histories from a full batch by default."""
        return False

    def _infer(self, loader: Iterable[SubData]) -> Tensor:
        """Compute every node's output by layer-wise inference."""
        raise NotImplementedError

    def views(self, batch: SubData, bank: str = "original") -> tuple[Tensor, ...]:
        """Run the model on a mini-batch and on each of its views.

        Batches have views if they come from a loader with an augmentation,
        ``SubgraphLoader(..., epoch_transform=gas.MHAug(...))``.

        Args:
            batch: The mini-batch.
            bank: Which histories the views have. ``"original"``: those of the original graph, which
                the batch itself writes and views only read; each is pulled once for all of them.
                ``"per_view"``: a set of histories for each view, which it reads and writes. They
                are made when they are first needed, as copies, and take as much memory again per
                view. (default: ``"original"``)

        Returns:
            The outputs of the in-batch nodes, each of shape ``[batch_size, out_channels]``: of the
            batch itself, then of its views.

        Raises:
            ValueError: If the batch has no views, or an argument is unusable.
        """
        outs = tuple(run(call) for call in arrange_views(self, batch, bank))
        return outs if self.ranks is None else (outs[0], *map(self.ranks.weighed, outs[1:]))

    def inputs_of(self, data: Data) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the arguments of ``forward`` from a batch, in any layout.

        Returns:
            The features, the adjacency (``adj_t`` or ``edge_index``), and what the batch has of the
            other parameters that ``forward`` names: ``edge_weight``, ``edge_attr``, ``pos``, ...
        """
        return data.x, adjacency(data), named_arguments(self.forward, data)

    def _given(self, batch: SubData) -> tuple[Tensor | Features, Any, dict[str, Any]]:
        """Return what ``forward`` is given; the features where they lie, if it takes them."""
        return self.inputs_of(batch.data)

    def forward_layer(self, layer: int, x: Tensor, adj_t: Any, state: dict[str, Any]) -> Tensor:
        """Compute one layer, for inference in a single pass over the data. Optional.

        Without it, inference runs ``forward`` up to each history in turn, which is right for every
        model and costs about ``num_layers / 2`` times as much.

        Args:
            layer: The layer, from 0.
            x: Input features for the first layer, else the rows of history ``layer - 1``, of shape
                ``[batch_size + halo, width]``.
            adj_t: The batch's adjacency.
            state: Kept per batch between layers; what is put here for every batch takes memory.
                ``state["batch"]`` is the batch itself, a :class:`gas.SubData`, during the call:
                features to compute something of again, or ids to pull from an earlier history.

        Any other parameter, such as ``edge_weight`` or ``pos``, here and in ``forward``, is given
        what the batch has under its name.

        Returns:
            What is pushed to history ``layer``, or the output of the model; rows after the first
            ``batch_size`` are ignored.
        """
        raise NotImplementedError

    @property
    def _has_forward_layer(self) -> bool:
        """Return whether the model defines :meth:`forward_layer`."""
        return type(self).forward_layer is not BatchModel.forward_layer

    @overload
    def push_and_pull(
        self,
        history: History,
        x: Tensor,
        batch_size: int | None = ...,
        n_id: Tensor | None = ...,
        offset: Tensor | None = ...,
        count: Tensor | None = ...,
    ) -> Tensor: ...

    @overload
    def push_and_pull(
        self,
        history: History,
        x: Tensor,
        batch_size: int | None = ...,
        n_id: Tensor | None = ...,
        offset: Tensor | None = ...,
        count: Tensor | None = ...,
        *,
        rows: bool,
    ) -> Tensor | Rows: ...

    def push_and_pull(
        self,
        history: History,
        x: Tensor,
        batch_size: int | None = None,
        n_id: Tensor | None = None,
        offset: Tensor | None = None,
        count: Tensor | None = None,
        *,
        rows: bool = False,
    ) -> Tensor | Rows:
        """Push the in-batch rows of a layer's output and pull the halo's.

        Args:
            history: One of ``self.histories``.
            x: The layer's output, of shape ``[rows, width]``; rows after the first ``batch_size``
                are replaced.
            batch_size: See :meth:`__call__`; this and the rest are what ``forward`` was given.
            n_id: See :meth:`__call__`.
            offset: See :meth:`__call__`.
            count: See :meth:`__call__`.
            rows: Return :class:`gas.history.Rows` of a batch, which the layers of :mod:`gas.nn`
                take: sums and means read the halo's rows from the history itself, nothing walks the
                halo's edges backward, and :func:`gas.nn.dropout` spares the halo.
                (default: ``False``)

        Returns:
            The in-batch rows, with gradient, then the halo's rows, without: of shape
            ``[batch_size + halo, width]``, a tensor that is the caller's. On a full batch, ``x``.
        """
        if torch.compiler.is_compiling():
            return _exchange_in_graph(self, history, x, (batch_size, n_id, offset, count), rows)
        return _exchange_now(self, history, x, (batch_size, n_id, offset, count), rows)


# Before forward -----------------------------------------------------------------------------------


def arrange(
    model: BatchModel,
    x: Tensor | SubData | None,
    adj_t: Any,
    where: Where,
    fill: bool,
    push: bool,
    kwargs: dict[str, Any],
) -> Call:
    """Check what a call is given, and start what it pulls; see :class:`gas.ScalableGNN`."""
    features: Tensor | Features | None
    batch = None
    if isinstance(x, SubData):
        if adj_t is not None or where[0] is not None or where[1] is not None:
            raise ValueError(
                "a mini-batch brings its own adjacency and ids: pass nothing else with it, "
                "model(batch)"
            )
        batch = to_device(x, model.device)
        features, adj_t, given = model._given(batch)
        where, kwargs = batch[1:], {**given, **kwargs}
    else:
        if where[0] is None and where[1] is None:
            check_whole(adj_t)
        # A full batch looks at all of them.
        features = dequantize(x)
        kwargs = {name: dequantize(value) for name, value in kwargs.items()}
    batch_size, n_id, offset, count = where
    call = Call(model, features, adj_t, where, kwargs)
    call.fill, call.pushes = fill, push
    ranks = model.ranks
    if ranks is not None and fill:
        raise ValueError(
            "'fill' is True, but other ranks have the rest of the graph: model(loader=loader) "
            "fills the histories of all"
        )
    if ranks is not None and n_id is not None:
        ranks.bind_to(model, n_id)
        call.histories = tuple(model.histories)  # They may be others now.
    elif n_id is not None and push:
        check_connected(n_id)
    check_call(features, batch_size, n_id, fill, model.num_nodes, model.buffer_size)
    if batch_size is not None and n_id is not None:
        if ranks is not None and push:
            ranks.begin(n_id, offset, count, batch)
            call.ranks = ranks
        call.pulls = pulls_of(model, batch_size, n_id)
    return call


_arrange = disable_compile(arrange)


@disable_compile
def arrange_views(model: BatchModel, batch: SubData, bank: str) -> list[Call]:
    """Make the calls of a batch and of its views; see :meth:`gas.ScalableGNN.views`."""
    if bank not in BANKS:
        raise ValueError(f"'bank' is {bank!r}, expected one of {', '.join(map(repr, BANKS))}")
    if batch.data.get("views") is None:
        raise ValueError(
            "'batch' has no views: load with gas.SubgraphLoader(..., epoch_transform=...), an "
            "augmentation such as gas.MHAug"
        )
    data, batch_size, n_id = to_device(batch, model.device)[:3]
    inputs = [model.inputs_of(view) for view in (data, *data.views)]
    ranks = model.ranks
    if ranks is not None:
        ranks.bind_to(model, n_id)
    else:
        check_connected(n_id)
    for x, _, _ in inputs:
        check_call(x, batch_size, n_id, False, model.num_nodes, model.buffer_size)
    if ranks is not None:
        if bank != "original":
            raise ValueError(
                "'bank' is 'per_view', but histories of views aren't sent to other ranks: use "
                "bank='original'"
            )
        ranks.begin(batch.n_id, batch.offset, batch.count, batch)
    own, *views = [Call(model, x, adj_t, batch[1:], kwargs) for x, adj_t, kwargs in inputs]
    if bank == "per_view":
        if len(model.view_histories or ()) < len(views):
            set_banks(model, len(views))
        for call, histories in zip(views, model.view_histories or (), strict=False):
            call.bank = dict(zip(model.histories, histories, strict=True))
    own.ranks, own.pulls = ranks, pulls_of(model, batch_size, n_id)
    if bank == "original":
        pulls = own.pulls = own.pulls or BatchPulls([], batch_size, n_id)
        pulls.readers += len(views)
        for call in views:
            call.pushes, call.pulls = False, pulls
    return [own, *views]


def pulls_of(model: BatchModel, batch_size: int, n_id: Tensor) -> BatchPulls | None:
    """Start the pulls of a batch; return ``None`` where each is to begin when it is needed."""
    pulls = take_ahead(model, n_id)
    if pulls is None and model._engine.io == "concurrent":
        read_ahead(model, batch_size, n_id)
        ahead = [history for history in model.histories if history.supports_overlap]
        pulls = BatchPulls(ahead, batch_size, n_id, model.pool_size) if ahead else None
    if pulls is None and model.device.type != "cpu":  # The ids go to the device once.
        pulls = BatchPulls([], batch_size, n_id)
    return pulls


def start_pulls(model: BatchModel, batch: SubData) -> BatchPulls:
    """Start the pulls of a batch that will be computed after the next one.

    Rows are those at this call, of every history, whatever ``pool_size`` is: a pull that began
    later would see what was pushed until then. :class:`gas.PrefetchLoader` calls this; without it,
    calling the model starts the pulls.
    """
    if model.ranks is not None:
        model.ranks.bind_to(model, batch.n_id)
    check_halo(batch.batch_size, batch.n_id, model.buffer_size)
    pulls = BatchPulls(model.histories, batch.batch_size, batch.n_id)
    model._ahead.append((batch.n_id, pulls))
    return pulls


def cancel_pulls(model: BatchModel, pulls: BatchPulls) -> None:
    """Take back what :func:`start_pulls` started, unless the model has used it."""
    model._ahead = [item for item in model._ahead if item[1] is not pulls]
    pulls.cancel()


def take_ahead(model: BatchModel, n_id: Tensor) -> BatchPulls | None:
    """Take the pulls of a batch that :class:`gas.PrefetchLoader` has started, if it has."""
    for position, (ids, pulls) in enumerate(model._ahead):
        if ids is n_id:
            del model._ahead[position]
            return pulls
    return None


def read_ahead(model: BatchModel, batch_size: int, n_id: Tensor) -> None:
    """Have the system read ahead what a batch will pull of packed histories; wait for nothing."""
    packed = [history for history in model.histories if history.is_packed]
    if packed:
        n_id = n_id.cpu()
        own, halo = n_id[:batch_size], n_id[batch_size:]
        for history in packed:
            history.read_ahead(halo, own)


# Forward ------------------------------------------------------------------------------------------


@skip_frame
def run(call: Call) -> Any:
    """Run forward."""
    model = call.model
    call.compiled = is_compiling() or model._compiled_call_impl is not None
    begin, end = (_begin, _end) if call.compiled else (Call.begin, Call.end)
    begin(call)
    try:
        if call.compiled and not call.takes_compiler:
            out = _run_uncompiled(call)
        else:
            out = torch.nn.Module.__call__(model, call.x, call.adj_t, *call.where, **call.kwargs)
    except BaseException as error:
        _fail(call, error)
        raise
    return end(call, out)


@disable_compile
def _run_uncompiled(call: Call) -> Any:
    return call.model._call_impl(call.x, call.adj_t, *call.where, **call.kwargs)


@disable_compile
def _fail(call: Call, error: BaseException) -> None:
    """End a forward pass that raised; say with the cure what PyTorch says without."""
    call.close()
    if call.ranks is not None:
        call.ranks.fail()
    if (explained := explain(error, call.x, call.adj_t)) is not None:
        raise explained from error


# Push and pull ------------------------------------------------------------------------------------


class Call:
    """State of one call of a model.

    * ``x``, ``adj_t``, ``where``, ``kwargs``: what forward is given.
    * ``histories``: the model's; ``bank``: others, to be used in their place by a view.
    * ``pulls``: the halo's rows; ``None`` to read them when they are asked for.
    * ``pushes``: whether in-batch rows are stored; a read-only call stores none.
    * ``fill``: a full batch that stores its rows.
    * ``layer``: in layer-wise inference, the history to fill, where forward ends.
    * ``ranks``: whom the pushed rows are sent to.
    * ``compiled``: forward is compiled. Graphs can't ask whether rows in a history have changed.
    * ``pushed``: the histories that were filled; ``held_back``: pushes, until forward has ended.
    """

    def __init__(
        self, model: BatchModel, x: Any, adj_t: Any, where: Where, kwargs: dict[str, Any]
    ) -> None:
        self.model, self.x, self.adj_t, self.where, self.kwargs = model, x, adj_t, where, kwargs
        self.batch = where[1] is not None
        self.histories: Sequence[History] = tuple(model.histories)
        self.bank: Mapping[History, History] = {}
        self.pulls: BatchPulls | None = None
        self.pushes, self.fill = True, False
        self.layer: int | None = None
        self.ranks: Ranks | None = None
        self.compiled = self.takes_compiler = False
        self.pushed: list[History] = []
        self.held_back: list[Callable[[], None]] | None = None
        self._watched: contextlib.AbstractContextManager[None] | None = None
        self._outer: tuple[Call | None, Call | None, bool] | None = None

    def begin(self) -> None:
        """Enter the call, before forward."""
        model = self.model
        if self.compiled and isinstance(self.x, Rows):
            self.x = self.x.tensor()
        try:
            if not model._is_proven:
                self.held_back = []
            self.adj_t = model._to_supported(self.adj_t)
            watched = model._watch_layers(self.adj_t, *self.where[:2])
            if self.compiled and watched is None:
                self.takes_compiler = self._takes_compiler()
            if self.takes_compiler and isinstance(self.adj_t, Adjacency):
                _complete(model, self.adj_t)
            self._outer = model._calls.enter(self)
            if watched is not None:
                watched.__enter__()
                self._watched = watched
        except BaseException:
            self.close()
            raise

    def _takes_compiler(self) -> bool:
        """Return whether a forward pass whose layers aren't watched can be a graph.

        The compiler knows no matrices of ``torch.sparse``. A graph knows only what a batch does.
        """
        adj_t = self.adj_t
        is_strided = isinstance(adj_t, Tensor) and adj_t.layout == torch.strided
        is_known = is_strided or isinstance(adj_t, Adjacency)
        return is_known and not is_sparse(self.x) and not self.fill and self.layer is None

    def exchange(self, history: History, x: Tensor, where: Where, rows: bool) -> Tensor | Rows:
        """Push a layer's in-batch rows and pull its halo's; see ``push_and_pull``."""
        batch_size, n_id, offset, count = where
        if n_id is None or batch_size is None:
            if self.batch:
                raise ValueError(
                    "push_and_pull was not told which batch this is: pass on what forward was "
                    "given, self.push_and_pull(history, x, *args)"
                )
            if self.fill:
                self.check(history, x, self.model.num_nodes)
                self.push(history, x)
            return x
        history = self.bank.get(history, history)
        self.check(history, x, batch_size)
        own = first_rows(x, batch_size)
        if self.layer is None or self.layer == len(self.pushed):
            self.push(history, own, n_id[:batch_size], offset, count)
            if self.layer is not None:
                raise Reached
        else:  # Filled by an earlier sweep.
            self.pushed.append(history)
        pulls = self.pulls or BatchPulls([], batch_size, n_id)
        if rows:
            return pulls.rows(history, own, in_place=not self.compiled)
        return pulls.tensor(history, own)

    def check(self, history: History, x: Tensor, num_rows: int) -> None:
        """Refuse what can't be pushed to a history."""
        width = history.embedding_dim
        if x.dim() != 2 or x.size(0) < num_rows or x.size(1) != width:
            raise ValueError(
                f"'x' has shape {list(x.shape)}, expected the rows of the {num_rows} in-batch "
                f"nodes, of the history's width {width}: [{num_rows}, {width}], or more rows"
            )
        for pushed in self.pushed:
            if pushed is history:
                raise RuntimeError(
                    "forward called push_and_pull twice with the same history, expected once for "
                    f"each of the model's {len(self.histories)}: every layer needs a history of "
                    "its own"
                )

    def push(self, history: History, x: Tensor, *where: Tensor | None) -> None:
        """Store rows, now or when forward has ended."""
        self.pushed.append(history)
        if not self.pushes:
            return
        if self.held_back is None:
            history.push(x, *where)
        else:
            self.held_back.append(partial(history.push, x.detach().clone(), *where))

    def end(self, out: Any) -> Any:
        """Check a forward pass that has ended, and return the in-batch rows of its output."""
        model = self.model
        try:
            if self.batch or self.fill:
                if len(self.pushed) < len(self.histories):
                    raise wrong_calls(len(self.pushed), len(self.histories))
                for push in self.held_back or ():
                    push()
                if not model._is_proven:
                    model._is_proven = True
            if self.ranks is not None:
                self.ranks.end(model.histories)
        finally:
            self.close()
        out = first_rows(out, self.where[0]) if isinstance(out, Tensor) else out
        return out if self.ranks is None else self.ranks.weighed(out)

    def close(self) -> None:
        """Give back what the call held."""
        try:
            if self._watched is not None:
                self._watched.__exit__(None, None, None)
        finally:
            if self._outer is not None:
                self.model._calls.leave(self._outer)
            if self.pulls is not None:
                self.pulls.cancel()


_begin, _end = disable_compile(Call.begin), disable_compile(Call.end)


def _complete(model: BatchModel, adj: Adjacency) -> None:
    """Make what an adjacency otherwise makes when a layer first asks for it."""
    _ = adj.matrix
    if any(getattr(layer, "add_self_loops", False) for layer in model.modules()):
        _ = adj.with_self_loops().matrix


def run_sweep(
    model: BatchModel,
    batch: SubData,
    layer: int,
    around: Callable[[SubData], contextlib.AbstractContextManager[None]],
) -> Tensor:
    """Run forward up to the history that a sweep of layer-wise inference fills, in a context."""
    check_graph(batch.n_id, model.num_nodes)
    x, adj_t, kwargs = model.inputs_of(to_device(batch, model.device).data)
    if not model._is_proven:
        with model._without_histories():  # A wrong model should be found before they change.
            model(x, adj_t, *batch[1:], **kwargs)
    call = Call(model, x, adj_t, batch[1:], kwargs)
    call.layer = layer
    with around(batch):
        return cast(Tensor, run(call))


# Calls that are under way -------------------------------------------------------------------------


class _Running(threading.local):
    """Innermost call of each thread, of any model."""

    call: Call | None = None


RUNNING = _Running()


class Calls:
    """The calls of one model that are under way: one for each thread, and one with histories.

    Batches write the histories in an order that has to be known; a plain full batch doesn't.
    """

    def __init__(self) -> None:
        self.running = _Running()
        self._with_histories = threading.Lock()

    def enter(self, call: Call) -> tuple[Call | None, Call | None, bool]:
        """Make a call this thread's current one; return what :meth:`leave` is to be given.

        Raises:
            RuntimeError: If another thread's call uses the histories, as this one would.
        """
        before = self.running.call
        waits = (call.batch or call.fill) and (before is None or not (before.batch or before.fill))
        if waits and not self._with_histories.acquire(blocking=False):
            raise RuntimeError(
                "another thread is calling this model, and both read and write its histories: call "
                "it from one thread, or make model.for_graph(num_nodes) for the other, which "
                "shares the weights and has histories of its own"
            )
        outside, RUNNING.call = RUNNING.call, call
        self.running.call = call
        return before, outside, waits

    def leave(self, entered: tuple[Call | None, Call | None, bool]) -> None:
        """End the current call."""
        self.running.call, RUNNING.call, waits = entered
        if waits:
            self._with_histories.release()

    def __deepcopy__(self, memo: object) -> Calls:
        return Calls()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()


def check_not_recomputing() -> None:
    """Refuse to push and pull again in a backward pass.

    Raises:
        RuntimeError: If autograd is running this thread's code, as activation checkpointing has it.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "push_and_pull was called in the backward pass, by activation checkpointing: it would "
            "read what has been pushed since, and push again. Checkpoint the layers alone, "
            "x = checkpoint(conv, x, adj_t, use_reentrant=False), and call push_and_pull outside"
        )


@disable_compile
def _exchange_now(
    model: BatchModel, history: History, x: Tensor, where: Where, rows: bool
) -> Tensor | Rows:
    check_not_recomputing()
    call = model._calls.running.call or Call(model, None, None, where, {})
    return call.exchange(history, x, where, rows)


def _exchange_in_graph(
    model: BatchModel, history: History, x: Tensor, where: Where, rows: bool
) -> Tensor | Rows:
    """Do the same where the compiler looks: by an operator that doesn't break the graph."""
    batch_size, n_id, offset, count = where
    if n_id is None or batch_size is None:  # Of a batch, its end finds that nothing was pushed.
        return x
    own = first_rows(x, batch_size)
    known = [i for i, one in enumerate(model.histories) if one is history]
    if not known:
        return _exchange_now(model, history, x, where, rows)
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
    """Push a batch's own rows to a history of the model that is running, and pull its halo's.

    Its own rows come out as well, so that the compiler can't leave it out where they are used.
    """
    check_not_recomputing()
    call = RUNNING.call
    assert call is not None  # Graphs run in the call of their model.
    where = batch_size, n_id, offset, count
    return cast(Tensor, call.exchange(call.histories[position], own, where, False))


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
