"""Layer-wise inference: every node's output, one layer after the other, at one batch's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.chosen import made_exact
from gas.graph.cluster import PERM, in_first_order
from gas.history import History
from gas.history.features import Features
from gas.loader import EvalSubgraphLoader
from gas.loader.batch import SubData
from gas.loader.moving import moved
from gas.scalable.call import Reached, Sweep, adjacency, check_graph, named_arguments
from gas.scalable.ranks import of_one_shard
from gas.scalable.run import exact, run_sweep, taken

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN

Outputs = Iterator[tuple[SubData, Tensor]]


def compute_dtype(model: ScalableGNN, x: Tensor | Features | None) -> torch.dtype:
    """In which type a model computes: that of its parameters, or else of floating features."""
    given = (p.dtype for p in model.parameters() if p.is_floating_point())
    floating = x is not None and x.dtype.is_floating_point
    return next(given, x.dtype if floating and x is not None else torch.get_default_dtype())


def without_views(loader: Iterable[SubData]) -> Iterable[SubData]:
    """The batches of a loader; if it has an augmentation, that isn't run for them."""
    plain = getattr(loader, "without_views", None)
    return loader if plain is None else plain()


def run_layers(
    loader: Iterable[SubData],
    histories: Sequence[History],
    device: torch.device,
    dtype: Callable[[Tensor | Features], torch.dtype],
    forward_layer: Callable[[int, Tensor | Features, SubData, dict[str, Any]], Tensor],
    swept: Callable[[int], None],
) -> Outputs:
    """One sweep per layer, each computing that layer alone, of rows of the type ``dtype(x)``.

    ``swept(layer)`` is called once the history of a layer has been filled.
    """
    states: dict[tuple[int, ...], dict[str, Any]] = {}  # By batch: the order may change.
    for layer in range(len(histories) + 1):
        for batch in loader:
            state = states.setdefault(tuple(batch.offset.tolist()), {})
            batch = moved(batch, device)
            x = batch.features()
            if layer > 0:
                x = histories[layer - 1].pull(batch.n_id).to(device, dtype(x))
            out = forward_layer(layer, x, batch, state)[: batch.batch_size]
            if layer < len(histories):
                histories[layer].push(
                    out, batch.n_id[: batch.batch_size], batch.offset, batch.count
                )
            else:
                yield batch, out
        if layer < len(histories):
            swept(layer)


def run_forwards(
    loader: Iterable[SubData],
    num_histories: int,
    forward: Callable[[SubData, Sweep], Tensor],
    swept: Callable[[int], None],
) -> Outputs:
    """One sweep per layer, each running ``forward`` from the start up to that layer."""
    for layer in range(num_histories):
        for batch in loader:
            with contextlib.suppress(Reached):  # Or an error: it fills too few of them.
                forward(batch, Sweep(layer))
        swept(layer)
    for batch in loader:
        yield batch, forward(batch, Sweep(num_histories))[: batch.batch_size]


def assemble(outputs: Outputs, num_nodes: int) -> Tensor:
    """Puts the outputs of batches, of the first so many nodes, into one new tensor on the CPU."""
    out: Tensor | None = None
    done = torch.zeros(num_nodes, dtype=torch.bool)
    for batch, rows in outputs:
        if out is None:
            out = rows.new_zeros(num_nodes, *rows.shape[1:], device="cpu")
        nodes = batch.n_id[: batch.batch_size].cpu()
        out[nodes] = rows.cpu()
        done[nodes] = True
    if out is None or not bool(done.all()):
        raise ValueError(
            f"'loader' yields {int(done.sum())} of the graph's {num_nodes} nodes: inference goes "
            "over it once for each layer and needs all of them each time, as "
            "EvalSubgraphLoader(data, ptr) yields"
        )
    return out


@torch.no_grad()
def layer_wise(model: ScalableGNN, loader: Iterable[SubData], gather: bool = True) -> Tensor:
    """Every node's output, of shape ``[num_nodes, out_channels]``; see :class:`gas.ScalableGNN`.

    On a rank without ``gather``, of its own nodes alone.
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
    loader = without_views(loader)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()

    def swept(layer: int) -> None:
        if ranks is not None:
            ranks.swept(model.histories[layer], layer)

    try:
        if model.has_forward_layer:
            run = partial(_run_layer, model)
            outs = run_layers(
                loader, model.histories, model.device, partial(compute_dtype, model), run, swept
            )
        else:
            outs = run_forwards(loader, len(model.histories), partial(run_sweep, model), swept)
        if ranks is None:
            out = assemble(outs, model.num_nodes)
            made_exact(model, getattr(loader, "data", None))
            return out
        own = assemble(outs, model.num_nodes if shard is None else shard.num_own)
        return ranks.every_row(own) if gather else own
    finally:
        for module, mode in modes:
            module.training = mode


def predict_every_node(
    model: ScalableGNN,
    graph: Any,
    batch_size: int,
    gather: bool,
    options: Mapping[str, Any],
) -> Tensor:
    """Every node's output, in the order of the graph that was clustered.

    See :meth:`gas.ScalableGNN.predict`.
    """
    loader = graph
    if isinstance(graph, Data):
        loader = EvalSubgraphLoader(graph, None, batch_size, log=False, **options)
    elif options:
        raise ValueError(
            f"{', '.join(map(repr, options))} given with a loader, which has its own: pass the "
            "graph, model.predict(graph, ...)"
        )
    data = loader.data
    if PERM not in data:
        raise ValueError(
            "the graph has no 'perm', by which its nodes find back to their order: use "
            "gas.cluster(data, num_parts), or model(loader=loader), in the order of the loader"
        )
    out = layer_wise(model, loader, gather)
    if model.ranks is not None:
        if not gather:
            return out
        data = Data(perm=model.ranks.every_row(data[PERM][: loader.num_own]))
    return in_first_order(data, out)


def _run_layer(
    model: ScalableGNN, layer: int, x: Tensor | Features, batch: SubData, state: dict[str, Any]
) -> Tensor:
    check_graph(batch.n_id, model.num_nodes)
    state["batch"] = batch
    if layer == 0:
        x, *_ = model._given(batch)
    kwargs = named_arguments(model.forward_layer, batch.data)
    adj_t = taken(model, adjacency(batch.data))
    with exact(model, adj_t, *batch[1:]):
        out = model.forward_layer(layer, cast(Tensor, x), adj_t, state, **kwargs)
    del state["batch"]  # It would be kept until the next layer.
    return out
