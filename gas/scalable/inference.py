"""Layer-wise inference: compute every node's output layer by layer, in mini-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map
from torch_geometric.data import Data

from gas.graph import PERM, to_original_order
from gas.history import Features, History
from gas.loader import EvalSubgraphLoader, SubData, to_device, unwrap_loader
from gas.native import check_flags, report_progress, share_cores
from gas.scalable.base import preserve_modes
from gas.scalable.call import BatchModel, Call, StopForward, run_call
from gas.scalable.checks import (
    adjacency,
    check_graph,
    check_output,
    collect_kwargs,
    explain,
    wrong_size_error,
)
from gas.scalable.distributed.ranks import one_shard_error
from gas.scalable.node_predictor import mark_exact
from gas.scalable.norms import GraphNorms, has_equal_variances

Batch = TypeVar("Batch")
Out = TypeVar("Out")
# Each batch with its output, or None if its forward pass ended before.
SweepOutputs = Iterator[tuple[Batch, Out | None]]


def compute_dtype(model: BatchModel, x: Tensor | Features | None) -> torch.dtype:
    """Return the dtype of a model's parameters, or else of its floating-point features."""
    given = (p.dtype for p in model.parameters() if p.is_floating_point())
    floating = x is not None and x.dtype.is_floating_point
    return next(given, x.dtype if floating and x is not None else torch.get_default_dtype())


def plain_loader(loader: Iterable[SubData]) -> Iterable[SubData]:
    """Return a loader of the same batches without running its augmentation, if it has one."""
    plain = getattr(loader, "plain_loader", None)
    return loader if plain is None else plain()


def sweep_layers(
    loader: Iterable[SubData],
    histories: Sequence[History],
    device: torch.device,
    dtype: Callable[[Tensor | Features], torch.dtype],
    forward_layer: Callable[[int, Tensor | Features, SubData, dict[str, Any]], Tensor],
    context: Callable[[SubData, int], contextlib.AbstractContextManager[None]],
    may_end: bool,
) -> Callable[[int], SweepOutputs[SubData, Tensor]]:
    """Return a function that computes a layer of all batches: it pulls inputs and pushes outputs.

    Rows are pulled as ``dtype(x)``. Each layer is computed in ``context(batch, layer)``, which may
    end it early if ``may_end`` is set.
    """
    states: dict[tuple[int, ...], dict[str, Any]] = {}  # By batch, as their order may change.

    def sweep(layer: int) -> SweepOutputs[SubData, Tensor]:
        for batch in loader:
            key = tuple(batch.offset.tolist())
            state = states.setdefault(key, {})
            if may_end:  # The state of a layer that ends early must not change, nor its tensors.
                state = tree_map(lambda v: v.clone() if type(v) is Tensor else v, state)
            batch = to_device(batch, device)
            x = batch.features()
            if layer > 0:
                x = histories[layer - 1].pull(batch.n_id).to(device, dtype(x))
            out = None
            with contextlib.suppress(StopForward), context(batch, layer):
                out = forward_layer(layer, x, batch, state)[: batch.batch_size]
                states[key] = state
                if layer < len(histories):
                    histories[layer].push(
                        out, batch.n_id[: batch.batch_size], batch.offset, batch.count
                    )
            yield batch, out

    return sweep


def sweep_forwards(
    model: BatchModel,
    loader: Iterable[SubData],
    context: Callable[[SubData], contextlib.AbstractContextManager[None]],
    layer: int,
) -> SweepOutputs[SubData, Tensor]:
    """Run forward on all batches up to the history of a layer, each in ``context(batch)``."""
    for batch in loader:
        check_graph(batch.n_id, model.num_nodes)
        x, adj_t, kwargs = model.inputs_of(to_device(batch, model.device).data)
        if not model._is_proven:
            with model._disable_transfers():  # A wrong model raises before histories change.
                model(x, adj_t, *batch[1:], **kwargs)
        call = Call(model, x, adj_t, batch[1:], kwargs)
        call.layer, out = layer, None
        with contextlib.suppress(StopForward), context(batch):
            out = check_output(model, run_call(call))[: batch.batch_size]
        yield batch, out


class _CompleteLoader:
    """A loader whose batches have to contain each of the first ``num_nodes`` nodes."""

    def __init__(self, loader: Iterable[SubData], num_nodes: int) -> None:
        self._loader, self._num_nodes = loader, num_nodes

    def __iter__(self) -> Iterator[SubData]:
        done = torch.zeros(self._num_nodes, dtype=torch.bool)
        for batch in self._loader:
            yield batch
            done[batch.n_id[: batch.batch_size].cpu()] = True
        if not bool(done.all()):
            raise ValueError(
                f"'loader' yields {int(done.sum())} of the graph's {done.numel()} nodes: inference "
                "goes over it once for each layer and needs all of them each time, as "
                "EvalSubgraphLoader(data, ptr) yields"
            )


def assemble(outputs: SweepOutputs[SubData, Tensor], num_nodes: int) -> Tensor:
    """Copy the outputs of batches into one tensor of ``num_nodes`` rows on the CPU.

    Together the batches have every node.
    """
    out: Tensor | None = None
    for batch, rows in outputs:
        assert rows is not None
        if out is None:
            out = rows.new_zeros(num_nodes, *rows.shape[1:], device="cpu")
        out[batch.n_id[: batch.batch_size].cpu()] = rows.cpu()
    assert out is not None
    return out


@contextlib.contextmanager
def fill_layers(
    model: Module,
    sweep: Callable[[int], Iterable[tuple[Any, Any]]],
    num_layers: int,
    norms: GraphNorms,
    log: bool,
    on_layer: Callable[[int], None] = lambda _: None,
) -> Iterator[None]:
    """Fill the histories layer by layer; the model is in evaluation mode in this context.

    ``on_layer(layer)`` is called after the history of a layer has been filled. The statistics of
    norms behind the last history are gathered, too.
    """
    progress = report_progress("Layer-wise inference, layers", num_layers + 1, log)
    with preserve_modes(model, False), norms.install(), progress as ticker:
        for layer in range(num_layers):
            norms.gather(partial(sweep, layer))
            ticker.done += 1
            on_layer(layer)
        if norms:
            norms.gather(partial(sweep, num_layers), stop_at_output=True)
        yield


@contextlib.contextmanager
def _fill_histories(
    model: BatchModel,
    loader: Iterable[SubData],
    training: bool,
    log: bool = False,
    as_evaluation: bool = False,
) -> Iterator[tuple[Callable[[int], SweepOutputs[SubData, Tensor]], GraphNorms]]:
    """Fill all histories of a model, layer by layer, on entering this context.

    The model is in evaluation mode until the context ends.

    Args:
        model: The model.
        loader: Its mini-batches.
        training: See :class:`gas.scalable.norms.GraphNorms`.
        log: Report progress on standard error.
        as_evaluation: See :class:`gas.scalable.norms.GraphNorms`.

    Yields:
        A function that runs a sweep for a layer, the last of which computes the outputs; and the
        norms.
    """
    if isinstance(loader, Data):
        raise ValueError(
            "'loader' is a graph, expected a gas.EvalSubgraphLoader or SubgraphLoader of it; "
            "model.predict(graph) makes one"
        )
    ranks, shard = model.ranks, getattr(loader, "shard", None)
    if ranks is not None:
        ranks.bind(model, shard)
        ranks.receive_pending()
        ranks.share_buffers(model)
    elif shard is not None:
        raise one_shard_error("'loader'")
    graph = getattr(loader, "num_nodes", model.num_nodes)
    if graph != model.num_nodes:
        raise wrong_size_error(f"'loader' has a graph of {graph} nodes", model.num_nodes)
    num_own = model.num_nodes if shard is None else shard.num_own
    plain = plain_loader(loader)
    model._calls.order = getattr(plain, "node_order", None)
    loader = _CompleteLoader(plain, num_own)
    group = None if ranks is None or shard is None else ranks.group
    norms = GraphNorms(model, group, training, as_evaluation)

    def context(batch: SubData, layer: int = 0) -> contextlib.AbstractContextManager[None]:
        is_whole = shard is None and batch.batch_size == model.num_nodes
        return norms.watch_batch(layer, batch.batch_size, batch.n_id.numel(), is_whole)

    def on_layer(layer: int) -> None:
        if ranks is not None:
            ranks.exchange_layer(model.histories[layer], layer)

    if model._has_forward_layer:
        run_layer, dtype = partial(_run_layer, model), partial(compute_dtype, model)
        sweep = sweep_layers(
            loader, model.histories, model.device, dtype, run_layer, context, bool(norms)
        )
    else:
        sweep = partial(sweep_forwards, model, loader, context)
    with fill_layers(model, sweep, len(model.histories), norms, log, on_layer):
        yield sweep, norms


@torch.no_grad()
def run_inference(
    model: BatchModel, loader: Iterable[SubData], gather: bool = True, log: bool = False
) -> Tensor:
    """Compute every node's output, of shape ``[num_nodes, out_channels]``, layer by layer.

    Args:
        model: The model.
        loader: Mini-batches of all nodes.
        gather: On one of several ranks, return the outputs of all nodes, not of its own alone.
        log: Report progress on standard error.
    """
    with _fill_histories(model, loader, training=False, log=log) as (sweep, _):
        shard = getattr(loader, "shard", None)
        num_own = model.num_nodes if shard is None else shard.num_own
        out = assemble(sweep(len(model.histories)), num_own)
        if model.ranks is None:
            mark_exact(model, getattr(loader, "data", None))
            return out
        return model.ranks.gather_rows(out) if gather else out


@check_flags
@torch.no_grad()
def refresh(
    model: BatchModel, loader: Iterable[SubData], norms: bool = True, log: bool = False
) -> None:
    """Fill the histories and set running statistics; see :meth:`gas.ScalableGNN.refresh`."""
    with _fill_histories(model, loader, training=norms, log=log) as (_, gathered):
        gathered.write()
    if not gathered:
        mark_exact(model, getattr(loader, "data", None))


@torch.no_grad()
def refresh_and_predict(model: BatchModel, loader: Iterable[SubData]) -> Tensor:
    """Set the running statistics of norms in training mode, and compute every node's output.

    It is :func:`refresh`, and then :func:`run_inference` in evaluation mode, of one process. From
    10,000 nodes on, both are one inference if each norm is called once.

    Returns:
        Of shape ``[num_nodes, out_channels]``, in the order of the loader.
    """
    if not has_equal_variances(model.num_nodes):
        refresh(model, loader)
        return run_inference(model, loader)
    with _fill_histories(model, loader, training=True, as_evaluation=True) as (sweep, gathered):
        out = assemble(sweep(len(model.histories)), model.num_nodes)
        if gathered.write():
            mark_exact(model, getattr(loader, "data", None))
            return out
    return run_inference(model, loader)


def loader_of(graph: Any, batch_size: int | None, options: Mapping[str, Any], call: str) -> Any:
    """Return a loader of a clustered graph, or the given loader; ``call`` is shown in errors."""
    if isinstance(graph, Data):
        return EvalSubgraphLoader(graph, None, batch_size, log=False, **options)
    given = [*([] if batch_size is None else ["batch_size"]), *options]
    if given:
        raise ValueError(
            f"{', '.join(map(repr, given))} given with a loader, which has its own: pass the "
            f"graph, {call}"
        )
    return unwrap_loader(graph)


@check_flags
def predict_every_node(
    model: BatchModel,
    graph: Any,
    batch_size: int | None,
    gather: bool,
    log: bool,
    options: Mapping[str, Any],
) -> Tensor:
    """Compute every node's output, in the order before clustering.

    See :meth:`gas.ScalableGNN.predict`.
    """
    leave_cores = getattr(unwrap_loader(graph), "leave_cores", options.get("leave_cores", True))
    with share_cores(leave_cores):  # Also while the loader is made.
        loader = loader_of(graph, batch_size, options, "model.predict(graph, ...)")
        data = loader.data
        if PERM not in data:
            raise ValueError(
                "the graph has no 'perm', by which outputs are put into the original order: use "
                "gas.cluster(data, num_parts), or model(loader=loader), in the order of the loader"
            )
        out = run_inference(model, loader, gather, log)
        if model.ranks is not None:
            if not gather:
                return out
            data = Data(perm=model.ranks.gather_rows(data[PERM][: loader.num_own]))
        return to_original_order(data, out)


def _run_layer(
    model: BatchModel, layer: int, x: Tensor | Features, batch: SubData, state: dict[str, Any]
) -> Tensor:
    """Run ``forward_layer`` on a mini-batch."""
    check_graph(batch.n_id, model.num_nodes)
    state["batch"] = batch
    if layer == 0:
        x, *_ = model._forward_inputs(batch)
    kwargs = collect_kwargs(model.forward_layer, batch.data)
    adj_t = model._to_supported_layout(adjacency(batch.data))
    try:
        with model._watch_layers(adj_t, *batch[1:3]) or contextlib.nullcontext():
            out = model.forward_layer(layer, cast(Tensor, x), adj_t, state, **kwargs)
    except (RuntimeError, ValueError) as error:
        explained = explain(error, x if layer == 0 else None, adj_t)
        if explained is None:
            raise
        raise explained from error
    del state["batch"]  # Otherwise it would be kept until the next layer.
    return out
