"""Layer-wise inference: every node's output, one layer after the other, at one batch's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch_geometric.data import Data

from gas.graph import PERM, to_original_order
from gas.history import Features, History
from gas.loader import EvalSubgraphLoader, SubData, to_device
from gas.native import report_progress, share_cores
from gas.scalable.call import BatchModel, Reached, run_sweep
from gas.scalable.checks import adjacency, check_graph, named_arguments
from gas.scalable.chosen import made_exact, without_prefetch
from gas.scalable.norms import GraphNorms
from gas.scalable.ranks import of_one_shard

# Each batch with its output, or None where its forward pass was ended before.
Sweeping = Iterator[tuple[SubData, Tensor | None]]


def compute_dtype(model: BatchModel, x: Tensor | Features | None) -> torch.dtype:
    """In which type a model computes: that of its parameters, or else of floating features."""
    given = (p.dtype for p in model.parameters() if p.is_floating_point())
    floating = x is not None and x.dtype.is_floating_point
    return next(given, x.dtype if floating and x is not None else torch.get_default_dtype())


def plain_loader(loader: Iterable[SubData]) -> Iterable[SubData]:
    """Return the batches of a loader; if it has an augmentation, that isn't run for them."""
    plain = getattr(loader, "plain_loader", None)
    return loader if plain is None else plain()


def sweep_layers(
    loader: Iterable[SubData],
    histories: Sequence[History],
    device: torch.device,
    dtype: Callable[[Tensor | Features], torch.dtype],
    forward_layer: Callable[[int, Tensor | Features, SubData, dict[str, Any]], Tensor],
    around: Callable[[SubData, int], contextlib.AbstractContextManager[None]],
    may_end: bool,
) -> Callable[[int], Sweeping]:
    """Make a sweep that computes one layer alone, of rows of the type ``dtype(x)``.

    ``around(batch, layer)`` is entered while a layer is computed, which it ``may_end`` early.
    """
    states: dict[tuple[int, ...], dict[str, Any]] = {}  # By batch: the order may change.

    def sweep(layer: int) -> Sweeping:
        for batch in loader:
            key = tuple(batch.offset.tolist())
            state = states.setdefault(key, {})
            if may_end:  # It stays as it was then.
                state = _copied(state)
            batch = to_device(batch, device)
            x = batch.features()
            if layer > 0:
                x = histories[layer - 1].pull(batch.n_id).to(device, dtype(x))
            out = None
            with contextlib.suppress(Reached), around(batch, layer):
                out = forward_layer(layer, x, batch, state)[: batch.batch_size]
                states[key] = state
                if layer < len(histories):
                    histories[layer].push(
                        out, batch.n_id[: batch.batch_size], batch.offset, batch.count
                    )
            yield batch, out

    return sweep


def sweep_forwards(
    loader: Iterable[SubData], forward: Callable[[SubData, int], Tensor]
) -> Callable[[int], Sweeping]:
    """Make a sweep that runs ``forward`` from the start up to a layer."""

    def sweep(layer: int) -> Sweeping:
        for batch in loader:
            out = None
            with contextlib.suppress(Reached):  # Or an error: it fills too few of them.
                out = forward(batch, layer)[: batch.batch_size]
            yield batch, out

    return sweep


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in dictionaries, lists and tuples of its own, and with tensors of its own."""
    return tree_map(lambda value: value.clone() if type(value) is Tensor else value, state)


class _Complete:
    """The batches of a loader, which have all of the first so many nodes each time."""

    def __init__(self, loader: Iterable[SubData], num_nodes: int) -> None:
        self._loader, self._num_nodes = loader, num_nodes

    def __iter__(self) -> Iterator[SubData]:
        done = torch.zeros(self._num_nodes, dtype=torch.bool)
        for batch in self._loader:
            yield batch
            done[batch.n_id[: batch.batch_size].cpu()] = True
        _check_complete(done)


def _check_complete(done: Tensor) -> None:
    if not bool(done.all()):
        raise ValueError(
            f"'loader' yields {int(done.sum())} of the graph's {done.numel()} nodes: inference "
            "goes over it once for each layer and needs all of them each time, as "
            "EvalSubgraphLoader(data, ptr) yields"
        )


def assemble(outputs: Sweeping, num_nodes: int) -> Tensor:
    """Put the outputs of batches, of the first so many nodes, into one new tensor on the CPU."""
    out: Tensor | None = None
    done = torch.zeros(num_nodes, dtype=torch.bool)
    for batch, rows in outputs:
        assert rows is not None
        if out is None:
            out = rows.new_zeros(num_nodes, *rows.shape[1:], device="cpu")
        nodes = batch.n_id[: batch.batch_size].cpu()
        out[nodes] = rows.cpu()
        done[nodes] = True
    _check_complete(done)
    assert out is not None
    return out


def fill_layers(
    sweep: Callable[[int], Iterable[tuple[Any, Any]]],
    num_layers: int,
    norms: GraphNorms,
    swept: Callable[[int], None] | None = None,
) -> None:
    """Fill the histories, one layer after the other, and settles the norms behind the last one.

    ``swept(layer)`` is called once the history of a layer has been filled.
    """
    for layer in range(num_layers):
        norms.settle(partial(sweep, layer))
        if swept is not None:
            swept(layer)
    if norms:
        norms.settle(partial(sweep, num_layers), probe=True)


@contextlib.contextmanager
def _filled(
    model: BatchModel, loader: Iterable[SubData], training: bool, log: bool = False
) -> Iterator[tuple[Callable[[int], Sweeping], GraphNorms]]:
    """Fill all histories of a model; in this context it is in evaluation mode.

    Args:
        model: The model.
        loader: Its mini-batches.
        training: See :class:`gas.scalable.norms.GraphNorms`.
        log: Report a long one on standard error.

    Returns:
        A sweep, whose last one computes the outputs, and the norms.
    """
    if isinstance(loader, Data):
        raise ValueError(
            "'loader' is a graph, expected a gas.EvalSubgraphLoader or SubgraphLoader of it; "
            "model.predict(graph) makes one"
        )
    ranks, shard = model.ranks, getattr(loader, "shard", None)
    if ranks is not None:
        ranks.bind(model, shard)
        ranks.forget()
        ranks.share_buffers(model)
    elif shard is not None:
        raise of_one_shard("'loader'")
    graph = getattr(loader, "num_nodes", model.num_nodes)
    if graph != model.num_nodes:
        raise ValueError(
            f"'loader' has a graph of {graph} nodes, but the histories are for "
            f"{model.num_nodes}: use model.for_graph(num_nodes), which shares the weights"
        )
    loader = _Complete(plain_loader(loader), model.num_nodes if shard is None else shard.num_own)
    norms = GraphNorms(model, None if ranks is None or shard is None else ranks.group, training)

    def around(batch: SubData, layer: int = 0) -> contextlib.AbstractContextManager[None]:
        is_whole = shard is None and batch.batch_size == model.num_nodes
        return norms.batch(layer, batch.batch_size, batch.n_id.numel(), is_whole)

    def swept(layer: int) -> None:
        ticker.done += 1
        if ranks is not None:
            ranks.swept(model.histories[layer], layer)

    if model._has_forward_layer:
        run_layer, dtype = partial(_run_layer, model), partial(compute_dtype, model)
        sweep = sweep_layers(
            loader, model.histories, model.device, dtype, run_layer, around, bool(norms)
        )
    else:
        sweep = sweep_forwards(loader, partial(run_sweep, model, around=around))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    what, layers = "Layer-wise inference, layers", len(model.histories) + 1
    try:
        with norms.installed(), report_progress(what, layers, log) as ticker:
            fill_layers(sweep, len(model.histories), norms, swept)
            yield sweep, norms
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def layer_wise(
    model: BatchModel, loader: Iterable[SubData], gather: bool = True, log: bool = False
) -> Tensor:
    """Every node's output, of shape ``[num_nodes, out_channels]``; see :class:`gas.ScalableGNN`.

    On a rank without ``gather``, of its own nodes alone; with ``log``, report long ones.
    """
    with _filled(model, loader, training=False, log=log) as (sweep, _):
        shard = getattr(loader, "shard", None)
        num_own = model.num_nodes if shard is None else shard.num_own
        out = assemble(sweep(len(model.histories)), num_own)
        if model.ranks is None:
            made_exact(model, getattr(loader, "data", None))
            return out
        return model.ranks.every_row(out) if gather else out


@torch.no_grad()
def refresh(
    model: BatchModel, loader: Iterable[SubData], norms: bool = True, log: bool = False
) -> None:
    """Fill the histories and set running statistics; see :meth:`gas.ScalableGNN.refresh`."""
    with _filled(model, loader, training=norms, log=log) as (_, gathered):
        gathered.write()
    if not gathered:
        made_exact(model, getattr(loader, "data", None))


def loader_of(graph: Any, batch_size: int | None, options: Mapping[str, Any], method: str) -> Any:
    """Return the loader of a clustered graph, or the one that is given, for a method of a model."""
    if isinstance(graph, Data):
        return EvalSubgraphLoader(graph, None, batch_size, log=False, **options)
    if options:
        raise ValueError(
            f"{', '.join(map(repr, options))} given with a loader, which has its own: pass the "
            f"graph, model.{method}(graph, ...)"
        )
    return without_prefetch(graph)


def predict_every_node(
    model: BatchModel,
    graph: Any,
    batch_size: int | None,
    gather: bool,
    log: bool,
    options: Mapping[str, Any],
) -> Tensor:
    """Every node's output, in the order of the graph that was clustered.

    See :meth:`gas.ScalableGNN.predict`.
    """
    loader = without_prefetch(graph)
    leave_cores = getattr(loader, "leave_cores", options.get("leave_cores", True))
    with share_cores(leave_cores):  # While a loader is made, too.
        return _predict(model, graph, batch_size, gather, log, options)


def _predict(
    model: BatchModel,
    graph: Any,
    batch_size: int | None,
    gather: bool,
    log: bool,
    options: Mapping[str, Any],
) -> Tensor:
    loader = loader_of(graph, batch_size, options, "predict")
    data = loader.data
    if PERM not in data:
        raise ValueError(
            "the graph has no 'perm', by which its nodes find back to their order: use "
            "gas.cluster(data, num_parts), or model(loader=loader), in the order of the loader"
        )
    out = layer_wise(model, loader, gather, log)
    if model.ranks is not None:
        if not gather:
            return out
        data = Data(perm=model.ranks.every_row(data[PERM][: loader.num_own]))
    return to_original_order(data, out)


def _run_layer(
    model: BatchModel, layer: int, x: Tensor | Features, batch: SubData, state: dict[str, Any]
) -> Tensor:
    check_graph(batch.n_id, model.num_nodes)
    state["batch"] = batch
    if layer == 0:
        x, *_ = model._given(batch)
    kwargs = named_arguments(model.forward_layer, batch.data)
    adj_t = model._to_supported(adjacency(batch.data))
    with model._watch_layers(adj_t, *batch[1:3]) or contextlib.nullcontext():
        out = model.forward_layer(layer, cast(Tensor, x), adj_t, state, **kwargs)
    del state["batch"]  # It would be kept until the next layer.
    return out
