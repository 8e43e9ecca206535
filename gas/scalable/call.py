"""A call of a model, from top to bottom.

1. :meth:`BatchModel.__call__` is given a mini-batch, or a full batch.
2. :func:`prepare_call` checks it, and makes the :class:`Call`.
3. :func:`get_pulls` starts to read the halo's rows.
4. :func:`run_call` runs the user's forward.
5. Forward calls :meth:`BatchModel.push_and_pull` after each layer: :meth:`Call.exchange`.
6. :meth:`Call.end` checks that every history was filled, and releases the call's resources.

A full batch, a read-only call, a view, a sweep of layer-wise inference and a call on one of many
ranks differ in the attributes of their :class:`Call`; calls of heterogeneous models are subclasses.

``torch.compile`` compiles forward alone: the other functions check values, take locks and move
rows. They are excluded by ``disable_compile``, or by ``skip_frame`` if they call forward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch_geometric.data import Data

from gas.graph import Adjacency
from gas.history import BatchPulls, Correction, Features, History, Rows, dequantize, first_rows
from gas.loader import NODE_ORDER, SubData, to_device
from gas.native import custom_op, disable_compile, is_compiling, is_sparse, skip_frame
from gas.scalable.base import HistoryModel, set_banks
from gas.scalable.checks import (
    adjacency,
    check_call,
    check_full_batch_adjacency,
    check_halo,
    check_order,
    check_output,
    collect_kwargs,
    explain,
    missing_push_error,
)
from gas.scalable.distributed.ranks import ModelRanks, check_connected

BANKS = ("original", "per_view")
PULLS_AHEAD = 2  # More are no faster, and each takes the memory of a batch's rows.
BatchArgs = tuple[int | None, Tensor | None, Tensor | None, Tensor | None]
"""``batch_size``, ``n_id``, ``offset`` and ``count``, the last arguments of forward."""


class StopForward(BaseException):
    """End a forward pass that has filled the history, or measured the norm, that is needed."""


class BatchModel(HistoryModel):
    """A model that is called on mini-batches, whose ``forward`` pushes and pulls rows."""

    pool_size: int | None
    buffer_size: int | None
    ranks: ModelRanks | None
    _started_pulls: list[tuple[Tensor, BatchPulls]]
    _node_predictor: Any  # Of predict(graph, nodes=...).

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
          their rows are pushed to the histories and those of the halo pulled. The arguments of
          ``forward`` are attributes of the batch: see :meth:`inputs_of`.
        * ``model(batch.x, batch.adj_t, *args)`` is the same, with the parts of a batch.
        * ``model(x, adj_t)`` is a plain full batch and doesn't change the histories; with
          ``fill=True`` it writes them.
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
            fill: Write the histories from a full batch; of the graph of :func:`gas.cluster`, if
                mini-batches are to read them. (default: ``False``)
            push: Write the rows of a mini-batch to the histories. ``False`` leaves them unchanged,
                for explanations, perturbed inputs or several passes with dropout; the halo's rows
                are read as they are, however old. (default: ``True``)
            views: Also run the views of a mini-batch, with these histories: :meth:`views` for
                wrappers of the model, such as ``DistributedDataParallel``. (default: no views)
            **kwargs: Passed on to ``forward``, such as ``edge_weight``.
        """
        if loader is not None:
            others = x, adj_t, batch_size, n_id, offset, count, views
            if any(each is not None for each in others) or fill or kwargs or not push:
                raise ValueError("'loader' brings its own batches: pass nothing else with it")
            out = self._infer(loader)
            return out if self._returns_rows else self._split_outputs(out)
        if views is not None:
            if adj_t is not None or n_id is not None or fill or kwargs or not push:
                raise ValueError(
                    "'views' is given with other arguments, but takes a mini-batch alone: pass "
                    "model(batch, views=...)"
                )
            outs = self.views(cast(SubData, x), views)
            return outs if self._returns_rows else tuple(map(self._split_outputs, outs))
        batch_args = batch_size, n_id, offset, count
        if fill is None:
            fill = self._should_fill(x, batch_size, n_id)
        prepare = _prepare_call if is_compiling() else prepare_call
        out = run_call(prepare(self, x, adj_t, batch_args, fill, push, kwargs))
        return out if self._returns_rows else self._split_outputs(out)

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
            bank: The histories of the views. ``"original"``: those of the original graph, which
                the batch itself writes and views only read; each is pulled once for all views.
                ``"per_view"``: a set of histories for each view, which it reads and writes. They
                are made when they are first needed, as copies, and take as much memory again per
                view. (default: ``"original"``)

        Returns:
            The outputs of the in-batch nodes, each of shape ``[batch_size, out_channels]``: of the
            batch itself, then of its views.

        Raises:
            ValueError: If the batch has no views, or an argument is unusable.
        """
        outs = tuple(run_call(call) for call in prepare_view_calls(self, batch, bank))
        return outs if self.ranks is None else (outs[0], *map(self.ranks.weigh_gradient, outs[1:]))

    def inputs_of(self, data: Data) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the arguments of ``forward`` from a batch, in any layout.

        Returns:
            The features, the adjacency (``adj_t`` or ``edge_index``), and the attributes of the
            batch that are named like other parameters of ``forward``: ``edge_weight``,
            ``edge_attr``, ``pos``, ...
        """
        return data.x, adjacency(data), collect_kwargs(self.forward, data)

    def _split_outputs(self, rows: Tensor) -> Any:
        """Return the rows of outputs as the model returns them."""
        return rows

    def _join_outputs(self, out: Any) -> Tensor:
        """Return what the model returns as one tensor of rows."""
        return check_output(self, out)

    def _forward_inputs(self, batch: SubData) -> tuple[Tensor | Features, Any, dict[str, Any]]:
        """Return the arguments of ``forward``, with features in their store if it supports that."""
        return self.inputs_of(batch.data)

    def forward_layer(self, layer: int, x: Tensor, adj_t: Any, state: dict[str, Any]) -> Tensor:
        """Compute one layer; override it to have inference pass over the data once.

        Without it, inference runs ``forward`` up to each history in turn, which is correct for
        every model and costs about ``num_layers / 2`` times as much.

        Args:
            layer: The layer, from 0.
            x: Input features for the first layer, else the rows of history ``layer - 1``, of shape
                ``[batch_size + halo, width]``.
            adj_t: The batch's adjacency.
            state: A dictionary that is kept for each batch between layers, at the cost of memory.
                ``state["batch"]`` is the batch itself, a :class:`gas.SubData`, during the call:
                for features to compute something from again, or ids to pull from another history.

        Any other parameter, such as ``edge_weight`` or ``pos``, here and in ``forward``, is the
        batch's attribute of that name.

        Returns:
            The rows to push to history ``layer``, or the output of the model; rows after the first
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
            batch_size: See :meth:`__call__`; pass on this and the rest from ``forward``.
            n_id: See :meth:`__call__`.
            offset: See :meth:`__call__`.
            count: See :meth:`__call__`.
            rows: Return :class:`gas.history.Rows` of a batch, which the layers of :mod:`gas.nn`
                take: sums and means read the halo's rows from the history itself, no gradient is
                computed for the halo, and :func:`gas.nn.dropout` leaves the halo's rows unchanged.
                (default: ``False``)

        Returns:
            The in-batch rows, with gradient, then the halo's rows, without: a new tensor of shape
            ``[batch_size + halo, width]``. On a full batch, ``x``.

        Raises:
            ValueError: If ``x`` has fewer than ``batch_size`` rows or another width than the
                history, or arguments of ``forward`` weren't passed on.
            RuntimeError: If ``forward`` has passed the same history before, or runs again in the
                backward pass, as under activation checkpointing.
        """
        if torch.compiler.is_compiling():
            return _exchange_in_graph(self, history, x, (batch_size, n_id, offset, count), rows)
        return _exchange_eager(self, history, x, (batch_size, n_id, offset, count), rows)


# What a call is given -----------------------------------------------------------------------------


def prepare_call(
    model: BatchModel,
    x: Tensor | SubData | None,
    adj_t: Any,
    batch_args: BatchArgs,
    fill: bool,
    push: bool,
    kwargs: dict[str, Any],
) -> Call:
    """Check the arguments of a call, and start its pulls; see :class:`gas.ScalableGNN`."""
    features: Tensor | Features | None
    batch = None
    if isinstance(x, SubData):
        if adj_t is not None or batch_args[0] is not None or batch_args[1] is not None:
            raise ValueError(
                "a mini-batch brings its own adjacency and ids: pass nothing else with it, "
                "model(batch)"
            )
        batch = to_device(x, model.device)
        features, adj_t, given = model._forward_inputs(batch)
        batch_args, kwargs = batch[1:], {**given, **kwargs}
    else:
        if x is None and adj_t is None and not kwargs:
            raise ValueError(
                "the model was called without a graph: pass a mini-batch of gas.SubgraphLoader, "
                "model(batch), or features and edges of the whole graph, model(x, edge_index)"
            )
        if batch_args[0] is None and batch_args[1] is None:
            check_full_batch_adjacency(adj_t)
        # A full batch reads every row, so that they are decoded at once.
        features = dequantize(x)
        kwargs = {name: dequantize(value) for name, value in kwargs.items()}
    batch_size, n_id, offset, count = batch_args
    ranks = model.ranks
    if ranks is not None and fill:
        raise ValueError(
            "'fill' is True, but other ranks have the rest of the graph: model(loader=loader) "
            "fills the histories of all"
        )
    if ranks is not None and n_id is not None:
        ranks.bind_batch(model, n_id)  # It may replace the histories.
    elif n_id is not None and push:
        check_connected(n_id)
    check_call(features, batch_size, n_id, fill, model.num_nodes, model.buffer_size)
    if n_id is not None:
        check_order(model, getattr(n_id, NODE_ORDER, None))
    elif fill:
        model._calls.order = None  # Its rows may be in any order.
    call = Call(model, features, adj_t, batch_args, kwargs)
    call.fill, call.pushes = fill, push
    if batch_size is not None and n_id is not None:
        if ranks is not None and push:
            ranks.begin(n_id, offset, count, batch)
            call.ranks = ranks
        call.pulls = get_pulls(model, batch_size, n_id)
    return call


_prepare_call = disable_compile(prepare_call)


@disable_compile
def prepare_view_calls(model: BatchModel, batch: SubData, bank: str) -> list[Call]:
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
        ranks.bind_batch(model, n_id)
    else:
        check_connected(n_id)
    for x, _, _ in inputs:
        check_call(x, batch_size, n_id, False, model.num_nodes, model.buffer_size)
    check_order(model, getattr(n_id, NODE_ORDER, None))
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
    own.ranks, own.pulls = ranks, get_pulls(model, batch_size, n_id)
    if bank == "original":
        pulls = own.pulls = own.pulls or BatchPulls([], batch_size, n_id)
        pulls.readers += len(views)
        for call in views:
            call.pushes, call.pulls = False, pulls
    return [own, *views]


# What is pulled -----------------------------------------------------------------------------------


def get_pulls(model: BatchModel, batch_size: int, n_id: Tensor) -> BatchPulls | None:
    """Return the pulls of a batch, prefetched or started now.

    ``None`` if each pull starts when forward needs its rows.
    """
    pulls = take_started_pulls(model, n_id)
    if pulls is None and model._engine.io == "concurrent":
        read_ahead(model, batch_size, n_id)
        ahead = [history for history in model.histories if history.supports_overlap]
        limit = model.pool_size or PULLS_AHEAD
        pulls = BatchPulls(ahead, batch_size, n_id, limit) if ahead else None
    if pulls is None and model.device.type != "cpu":  # The ids go to the device once.
        pulls = BatchPulls([], batch_size, n_id)
    return pulls


def start_pulls(model: BatchModel, batch: SubData) -> BatchPulls:
    """Start the pulls of a batch that will be computed after the current one.

    They read every history as it is at this call, whatever ``pool_size`` is: later pulls would see
    rows that were pushed in the meantime. :class:`gas.PrefetchLoader` calls this; without it,
    calling the model starts the pulls.
    """
    if model.ranks is not None:
        model.ranks.bind_batch(model, batch.n_id)
    check_halo(batch.batch_size, batch.n_id, model.buffer_size)
    pulls = BatchPulls(model.histories, batch.batch_size, batch.n_id)
    model._started_pulls.append((batch.n_id, pulls))
    return pulls


def cancel_pulls(model: BatchModel, pulls: BatchPulls) -> None:
    """Cancel the pulls of :func:`start_pulls`, unless the model has used them."""
    model._started_pulls = [item for item in model._started_pulls if item[1] is not pulls]
    pulls.cancel()


def take_started_pulls(model: BatchModel, n_id: Tensor) -> BatchPulls | None:
    """Return and remove the pulls that :func:`start_pulls` started for a batch, if any."""
    for position, (ids, pulls) in enumerate(model._started_pulls):
        if ids is n_id:
            del model._started_pulls[position]
            return pulls
    return None


def read_ahead(model: BatchModel, batch_size: int, n_id: Tensor) -> None:
    """Tell the system to read ahead the packed rows that a batch will pull, without waiting."""
    packed = [history for history in model.histories if history.is_packed]
    if packed:
        n_id = n_id.cpu()
        own, halo = n_id[:batch_size], n_id[batch_size:]
        for history in packed:
            history.read_ahead(halo, own)


# Forward ------------------------------------------------------------------------------------------


@skip_frame
def run_call(call: Call) -> Any:
    """Run forward in a call, and return the in-batch rows of its output."""
    model = call.model
    call.compiled = is_compiling() or model._compiled_call_impl is not None
    begin, end = (_begin, _end) if call.compiled else (Call.begin, Call.end)
    begin(call)
    try:
        if call.compiled and not call.supports_compiler:
            out = _run_uncompiled(call)
        else:
            out = torch.nn.Module.__call__(model, *call.inputs, **call.kwargs)
    except BaseException as error:
        _fail(call, error)
        raise
    return end(call, out)


@disable_compile
def _run_uncompiled(call: Call) -> Any:
    return call.model._call_impl(*call.inputs, **call.kwargs)


@disable_compile
def _fail(call: Call, error: BaseException) -> None:
    """End a forward pass that raised; replace PyTorch's error by one that names the cure."""
    call.close()
    if call.ranks is not None:
        call.ranks.fail()
    if (explained := explain(error, call.x, call.adj_t, *call.batch_args[:2])) is not None:
        raise explained from error


# Push and pull of a layer, and checks after the last ----------------------------------------------


class Call:
    """State of one call of a model.

    * ``x``, ``adj_t``, ``batch_args``, ``kwargs``: the arguments of forward.
    * ``histories``: the model's; ``bank``: those that a view uses in their place.
    * ``pulls``: the pulls of the halo's rows; ``None`` to start each when its rows are needed.
    * ``pushes``: whether in-batch rows are stored; a read-only call stores none.
    * ``fill``: whether a full batch stores its rows.
    * ``layer``: in layer-wise inference, the history to fill, after which forward ends.
    * ``ranks``: the connection to other ranks, which get the pushed rows.
    * ``compiled``: whether forward is compiled: it can't read rows in place then, as a compiled
      graph doesn't notice changes of a history.
    * ``pushed``: the histories filled so far; ``deferred_pushes``: pushes to do after forward.
    """

    def __init__(
        self, model: HistoryModel, x: Any, adj_t: Any, batch_args: BatchArgs, kwargs: dict[str, Any]
    ) -> None:
        self.model, self.x, self.adj_t = model, x, adj_t
        self.batch_args, self.kwargs = batch_args, kwargs
        self.batch = batch_args[1] is not None
        self.histories: Sequence[History] = tuple(model.histories)
        self.bank: Mapping[History, History] = {}
        self.pulls: BatchPulls | None = None
        self.pushes, self.fill = True, False
        self.layer: int | None = None
        self.ranks: ModelRanks | None = None
        self.compiled = self.supports_compiler = False
        self.pushed: list[History] = []
        self.deferred_pushes: list[Callable[[], None]] | None = None
        self._watching: contextlib.AbstractContextManager[None] | None = None
        self._outer: tuple[Call | None, Call | None, bool] | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments of forward."""
        return self.x, self.adj_t, *self.batch_args

    def begin(self) -> None:
        """Convert the adjacency to a layout of the model, and become its current call.

        Raises:
            RuntimeError: If a call in another thread uses the histories.
        """
        model = self.model
        if self.compiled and isinstance(self.x, Rows):
            self.x = self.x.tensor()
        try:
            if not model._is_proven:
                self.deferred_pushes = []
            self.adj_t = model._to_supported_layout(self.adj_t)
            watching = self.watch()
            if self.compiled and watching is None:
                self.supports_compiler = self._supports_compiler()
            if self.supports_compiler and isinstance(self.adj_t, Adjacency):
                _materialise(model, self.adj_t)
            self._outer = model._calls.enter(self)
            if watching is not None:
                watching.__enter__()
                self._watching = watching
        except BaseException:
            self.close()
            raise

    def watch(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context in which layers are refused that aren't exact, or ``None``."""
        return self.model._watch_layers(self.adj_t, *self.batch_args[:2])

    def _supports_compiler(self) -> bool:
        """Return whether forward can be compiled, if no layer has to be checked.

        The compiler doesn't support matrices of ``torch.sparse``. In a compiled graph,
        ``push_and_pull`` works for batches alone, and can't end forward.
        """
        adj_t = self.adj_t
        is_strided = isinstance(adj_t, Tensor) and adj_t.layout == torch.strided
        is_known = is_strided or isinstance(adj_t, Adjacency)
        return is_known and not is_sparse(self.x) and not self.fill and self.layer is None

    def exchange(
        self, history: History, x: Tensor, batch_args: BatchArgs, rows: bool
    ) -> Tensor | Rows:
        """Push a layer's in-batch rows and pull its halo's; see ``push_and_pull``."""
        batch_size, n_id, offset, count = batch_args
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
        if not isinstance(history, History):
            raise ValueError(
                f"'history' is {history!r}, expected one of the model's: "
                "self.push_and_pull(self.histories[0], x, *args)"
            )
        history = self.bank.get(history, history)
        self.check(history, x, batch_size)
        own = first_rows(x, batch_size)
        correct = self.measure_drift(history, own, n_id)
        if self.layer is None or self.layer == len(self.pushed):
            self.push(history, own, n_id[:batch_size], offset, count)
            if self.layer is not None:
                raise StopForward
        else:  # An earlier sweep has filled this history.
            self.pushed.append(history)
        pulls = self.pulls or BatchPulls([], batch_size, n_id)
        if rows:
            return pulls.rows(history, own, in_place=not self.compiled, correct=correct)
        return pulls.tensor(history, own, correct)

    def measure_drift(self, history: History, own: Tensor, n_id: Tensor) -> Correction | None:
        """Return the correction of the halo's rows, if training asks for it and it applies.

        Views and ranks share pulled rows, which are left as they are.
        """
        drift = self.model._drift
        if drift is None or not self.pushes or self.ranks is not None:
            return None
        if self.layer is not None or (self.pulls is not None and self.pulls.readers > 1):
            return None
        return drift.measure(history, own, n_id)

    def check(self, history: History, x: Tensor, num_rows: int) -> None:
        """Refuse rows that can't be pushed to a history."""
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
        if self.deferred_pushes is None:
            history.push(x, *where)
        else:
            self.deferred_pushes.append(partial(history.push, x.detach().clone(), *where))

    def end(self, out: Any) -> Any:
        """Check a forward pass that has ended, and return the in-batch rows of its output."""
        model = self.model
        try:
            if self.batch or self.fill:
                self.check_all_pushed()
                for push in self.deferred_pushes or ():
                    push()
                if not model._is_proven:
                    model._is_proven = True
            if self.ranks is not None:
                self.ranks.end(model.histories)
        finally:
            self.close()
        out = self.own_rows(out)
        return out if self.ranks is None else self.ranks.weigh_gradient(out)

    def check_all_pushed(self) -> None:
        """Refuse a forward pass that has left out a history, whose rows would be stale."""
        missing = {*map(self.bank.get, self.histories, self.histories)} - {*self.pushed}
        if missing:  # Histories of others may have been filled.
            raise missing_push_error(len(self.histories) - len(missing), len(self.histories))

    def own_rows(self, out: Any) -> Any:
        """Return the in-batch rows of what forward has returned."""
        size, n_id = self.batch_args[:2]
        if isinstance(out, Tensor) or n_id is None:
            return first_rows(out, size) if isinstance(out, Tensor) else out

        def own(value: Any) -> Any:
            is_of_all = isinstance(value, Tensor) and value.shape[:1] == n_id.shape
            return first_rows(value, size) if is_of_all else value

        return tree_map(own, out)

    def close(self) -> None:
        """Stop watching the layers, make the outer call current again, and cancel pending pulls."""
        try:
            if self._watching is not None:
                self._watching.__exit__(None, None, None)
        finally:
            if self._outer is not None:
                self.model._calls.leave(self._outer)
            if self.pulls is not None:
                self.pulls.cancel()


_begin, _end = disable_compile(Call.begin), disable_compile(Call.end)


def _materialise(model: HistoryModel, adj: Adjacency) -> None:
    """Compute what an adjacency otherwise computes at the first use in a layer."""
    _ = adj.matrix
    if any(getattr(layer, "add_self_loops", False) for layer in model.modules()):
        _ = adj.with_self_loops().matrix


# The operator of push_and_pull --------------------------------------------------------------------


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
def _exchange_eager(
    model: BatchModel, history: History, x: Tensor, batch_args: BatchArgs, rows: bool
) -> Tensor | Rows:
    check_not_recomputing()
    call = model._calls.running.call or Call(model, None, None, batch_args, {})
    return call.exchange(history, x, batch_args, rows)


def _exchange_in_graph(
    model: BatchModel, history: History, x: Tensor, batch_args: BatchArgs, rows: bool
) -> Tensor | Rows:
    """Push and pull in a compiled graph, by an operator that doesn't break it."""
    batch_size, n_id, offset, count = batch_args
    if n_id is None or batch_size is None:  # Call.end raises if the call has a batch.
        return x
    own = first_rows(x, batch_size)
    known = [i for i, one in enumerate(model.histories) if one is history]
    if not known:
        return _exchange_eager(model, history, x, batch_args, rows)
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
    """Push in-batch rows to history ``position`` of the model that is run, and pull the halo's.

    The output contains the in-batch rows, too, so that the compiler can't remove the operator.
    """
    check_not_recomputing()
    call = _CURRENT.call
    assert call is not None  # A compiled graph runs in the call of its model.
    batch_args = batch_size, n_id, offset, count
    return cast(Tensor, call.exchange(call.histories[position], own, batch_args, False))


@_exchange.register_fake
def _(own: Tensor, n_id: Tensor, *_: Any) -> Tensor:
    return own.new_empty(n_id.size(0), own.size(1))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_own = inputs[0].size(0)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return grad[: ctx.num_own], None, None, None, None, None


_exchange.register_autograd(_backward, setup_context=_setup_context)


# Calls that are under way -------------------------------------------------------------------------


class _CurrentCall(threading.local):
    """The innermost call of each thread."""

    call: Call | None = None


_CURRENT = _CurrentCall()  # Of any model.


class Calls:
    """The current calls of one model: one in each thread, of which one uses the histories.

    Several threads would write the histories in an unknown order. A plain full batch doesn't use
    them.
    """

    def __init__(self, order: tuple[int, int] | None = None) -> None:
        self.running = _CurrentCall()
        self.order = order  # Of the histories' rows: see check_order.
        self._with_histories = threading.RLock()

    def enter(self, call: Call) -> tuple[Call | None, Call | None, bool]:
        """Make a call this thread's current one; return the arguments of :meth:`leave`.

        Raises:
            RuntimeError: If another thread's call uses the histories, as this one would.
        """
        uses_histories = call.batch or call.fill
        if uses_histories and not self._with_histories.acquire(blocking=False):
            raise _two_threads_error()
        before, outside = self.running.call, _CURRENT.call
        self.running.call = _CURRENT.call = call
        return before, outside, uses_histories

    def leave(self, entered: tuple[Call | None, Call | None, bool]) -> None:
        """End the current call, and restore what :meth:`enter` has returned."""
        self.running.call, _CURRENT.call, used_histories = entered
        if used_histories:
            self._with_histories.release()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other threads from using the histories in this context, between calls, too.

        Raises:
            RuntimeError: If another thread uses them.
        """
        if not self._with_histories.acquire(blocking=False):
            raise _two_threads_error()
        try:
            yield
        finally:
            self._with_histories.release()

    def __reduce__(self) -> tuple[type[Calls], tuple[Any]]:
        return Calls, (self.order,)


def _two_threads_error() -> RuntimeError:
    return RuntimeError(
        "another thread is calling this model, and both read and write its histories: call it from "
        "one thread, or make a model for the other that shares the weights and has histories of "
        "its own: model.for_graph(num_nodes), or gas.to_scalable(net, data) again"
    )
