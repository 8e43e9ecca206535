"""Comparison of mini-batches and histories with the uncut graph."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch_geometric.data import Data

from gas.graph import open_if_path
from gas.history import History, relative_error
from gas.loader import EvalSubgraphLoader, SubData, SubgraphLoader, batches_in_order
from gas.native import check_integer, free_memory
from gas.scalable.inference import assemble, layer_wise
from gas.scalable.memory import activation_bytes
from gas.scalable.ranks import check_alone

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN

UNCUT = "the uncut graph"
AS_PREPARED = "as prepared for the model"
MESSAGES = 3  # Tensors with a row for each edge that a layer of PyG holds at once.
NUMBER = 4  # The bytes of a number in them.
SAMPLE = 64  # Nodes, where the full batch doesn't fit.
_TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}


class Verification(NamedTuple):
    """Result of :func:`gas.verify`; true if everything is exact.

    * ``errors``: ``|h - h*| / |h*|`` of every history, then of the outputs: Frobenius norms over
      all nodes, or over those that were sampled, of what mini-batches give and what the reference
      gives (``h*``).
    * ``tolerance``: the largest error that counts as exact.
    * ``reference``: what mini-batches were compared with, in words.
    """

    errors: tuple[float, ...]
    tolerance: float
    reference: str = UNCUT

    @property
    def first(self) -> int | None:
        """The first layer, from 0, whose outputs differ; ``None`` if none does."""
        wrong = [layer for layer, error in enumerate(self.errors) if not error <= self.tolerance]
        return wrong[0] if wrong else None

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        names = [f"history {layer}" for layer in range(len(self.errors) - 1)] + ["outputs"]
        lines = [f"reference: {self.reference}"]
        lines += [f"{name:<11}{error:.1e}" for name, error in zip(names, self.errors, strict=True)]
        if self.first is None:
            verdict = f"exact: relative errors are at most {self.tolerance:.0e}"
        else:
            verdict = (
                f"not exact: {names[self.first]} is the first to differ, so look at what forward "
                f"does before it"
            )
            if not self.reference.startswith(UNCUT):
                verdict += (
                    ", such as reading further than one hop per layer, or by a node's id, which "
                    "'num_nodes' of the whole graph leaves room for"
                )
        return "\n".join([*lines, verdict])


@torch.no_grad()
def verify(
    model: ScalableGNN,
    graph: Data | SubgraphLoader | str | Path,
    batch_size: int | None = None,
    *,
    num_nodes: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    **kwargs: Any,
) -> Verification:
    """Compare mini-batches and histories with the uncut graph, at the model's current weights.

    With fixed weights every output is exact after one sweep over all mini-batches per layer. Here
    that many are made, on histories of their own, and compared, layer by layer, with a reference,
    in evaluation mode; so are the outputs of layer-wise inference. The model and its histories stay
    as they are::

        found = gas.verify(model, graph)
        print(found)  # Names the first layer that differs.

    The reference is one full batch of the whole graph, at its memory and that of a further set of
    histories. Outputs of a model of :func:`gas.to_scalable` are compared with those of the module
    itself, called on the graph that :func:`gas.cluster` was given, in the layout that it has. Where
    this isn't possible, because model or graph is a copy or comes from a folder, something was
    changed since, or messages of all edges don't fit, ``reference`` says that it is the graph as
    prepared for the model. Where no full batch fits, it is one of the neighbourhood of each of some
    sampled nodes, one after the other: all nodes within ``num_layers`` hops, at least two, with
    their edges. Layers that read one hop each can't see further, so this is exact for the sampled
    nodes, which alone are compared. A layer that reads further gives something else there than
    mini-batches do, and is called inexact, even where these happen to hold all that it reads; so is
    one that looks something up by ``n_id``. Nodes are sampled among those that edges lead to; those
    whose neighbourhood doesn't fit either are passed over, at most as many as are taken. It takes
    the memory of a mini-batch and of one set of histories, and that of one neighbourhood: few hops
    may reach most of a graph.

    Args:
        model: The model.
        graph: What :func:`gas.cluster` has returned, or the path of its folder, or a loader, whose
            parts, layout and weights are taken, in order and without views.
        batch_size: Parts per mini-batch. (default: that of the last loader of the graph which was
            given one, or ``1``; or the loader's)
        num_nodes: How many nodes to sample; as many as the graph has: the whole graph.
            (default: the whole graph if its full batch, estimated by a mini-batch, fits half of the
            memory that is free, or else 64)
        seed: Of the sample. (default: ``0``)
        tolerance: The largest relative error that counts as exact. (default: ``1e-5``, or what
            histories of fewer bits allow: ``2e-3`` for float16, ``2e-2`` for bfloat16 and int8)
        **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

    Raises:
        ValueError: If the graph isn't that of the histories, or an argument is unusable.
        MemoryError: If not even a neighbourhood fits.
    """
    if hasattr(model, "verified"):  # Of typed graphs.
        return cast(Any, model).verified(graph, batch_size, num_nodes, tolerance, **kwargs)
    if not hasattr(model, "for_graph"):
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a gas.ScalableGNN, such as "
            "gas.to_scalable(net, data) makes"
        )
    check_alone(model, "gas.verify")
    loader = _loader(open_if_path(graph, "graph"), batch_size, kwargs)
    check_integer("seed", seed, 0)
    if num_nodes is not None:
        most = loader.num_nodes
        check_integer("num_nodes", num_nodes, 1, most, f"between 1 and the graph's {most} nodes")
    if tolerance is None:
        tolerance = tolerance_of(model.histories)
    with contextlib.ExitStack() as after:
        for module in model.modules():
            after.callback(setattr, module, "training", module.training)
        model.eval()
        stale = after.enter_context(contextlib.closing(model.for_graph(model.num_nodes)))
        room = 0 if num_nodes == loader.num_nodes else _room(stale, loader)
        whole = loader.num_nodes + int(loader.edges_per_part().sum())
        if num_nodes is None:
            num_nodes = loader.num_nodes if whole <= room else SAMPLE
        if num_nodes >= loader.num_nodes:
            nodes, reference = None, UNCUT
            exact = after.enter_context(contextlib.closing(model.for_graph(model.num_nodes)))
            expected = _full_batch(exact, loader.cut(range(loader.ptr.numel() - 1)).data)
            if hasattr(model, "run_module"):
                own = _by_module(model, loader, whole)
                expected[-1] = expected[-1] if own is None else own
                reference = UNCUT if own is not None else f"{UNCUT}, {AS_PREPARED}"
        else:
            num_hops = max(model.num_layers, 2)
            drawn = _drawn(loader, seed)
            nodes, larger, expected = _neighbourhoods(
                model, loader, drawn, num_nodes, num_hops, room
            )
            reference = f"{num_hops}-hop neighbourhoods of {nodes.numel()} sampled nodes"
            if larger:
                reference += f" ({larger} with too large ones passed over)"
        batches = _InOrder(loader)
        found = _by_mini_batches(stale, batches, nodes)
        errors = [relative_error(rows, true) for rows, true in zip(found, expected, strict=True)]
        inferred = relative_error(_of(layer_wise(stale, batches), nodes), expected[-1])
        errors[-1] = math.nan if math.isnan(inferred) else max(inferred, errors[-1])
    return Verification(tuple(errors), tolerance, reference)


def tolerance_of(histories: Iterable[History]) -> float:
    """Return the largest relative error that counts as exact with such histories."""
    return max((_TOLERANCES.get(h.codec.name, 1e-5) for h in histories), default=1e-5)


def _loader(
    graph: Data | SubgraphLoader, batch_size: int | None, options: dict[str, Any]
) -> SubgraphLoader:
    """Return the mini-batches that are compared."""
    if isinstance(graph, Data):
        return EvalSubgraphLoader(graph, None, batch_size, log=False, **options)
    if not isinstance(graph, SubgraphLoader):
        raise ValueError(
            f"'graph' is a {type(graph).__name__}, expected what gas.cluster has returned, or a "
            "gas.SubgraphLoader"
        )
    given = [*([] if batch_size is None else ["batch_size"]), *options]
    if given:
        raise ValueError(
            f"{', '.join(map(repr, given))} given with a loader, which has its own: pass the "
            "graph, gas.verify(model, graph, ...)"
        )
    return graph.plain_loader()


class _InOrder:
    """The mini-batches of a loader, in the order of their nodes; none of them is kept."""

    def __init__(self, loader: SubgraphLoader) -> None:
        self._loader = loader
        self.num_nodes = loader.num_nodes

    def __iter__(self) -> Iterator[SubData]:
        return batches_in_order(self._loader)


def _room(model: ScalableGNN, loader: SubgraphLoader) -> int:
    """Return the nodes and edges of a full batch that fit half of the free memory.

    It is judged by the mini-batch of the part with most edges.
    """
    batch = loader.cut([int(loader.edges_per_part().argmax())])
    size = batch.n_id.numel() + batch.data.e_id.numel()
    need = activation_bytes(model, batch, training=False)
    return free_memory(model.device) // 2 * size // need


def _drawn(loader: SubgraphLoader, seed: int) -> Tensor:
    """Return all nodes in random order; nodes without edges, exact for any model, come last."""
    order = torch.randperm(loader.num_nodes, generator=torch.Generator().manual_seed(seed))
    lonely = loader.degree[order] == 0
    return torch.cat([order[~lonely], order[lonely]])


def _full_batch(exact: ScalableGNN, data: Data) -> list[Tensor]:
    """Return histories (those of ``exact``) and outputs of a full batch."""
    x, adj_t, given = exact.inputs_of(copy.copy(data).to(exact.device))
    out = exact(x, adj_t, fill=True, **given)
    return [*(history.emb for history in exact.histories), out]


def _by_module(model: Any, loader: SubgraphLoader, size: int) -> Tensor | None:
    """Return the outputs of the original module on the original graph.

    Returns:
        ``None`` if the module or that graph isn't known any more, or there is no room: PyG's layers
        make a message for every edge.
    """
    x = loader.data.get("x")
    widths = [history.embedding_dim for history in model.histories]
    if isinstance(x, Tensor) and x.dim() == 2:
        widths.append(x.size(1))
    needed = MESSAGES * NUMBER * size * max(widths, default=1)
    return None if needed > free_memory(model.device) // 2 else model.run_module(loader.data)


def _neighbourhoods(
    model: ScalableGNN,
    loader: SubgraphLoader,
    drawn: Tensor,
    num_nodes: int,
    num_hops: int,
    room: int,
) -> tuple[Tensor, int, list[Tensor]]:
    """Return the first nodes whose neighbourhoods fit, and what a full batch of each gives for it.

    Also how many nodes were passed over.
    """
    nodes: list[Tensor] = []
    rows: list[list[Tensor]] = []
    larger: list[MemoryError] = []
    for node in drawn[: 2 * num_nodes].split(1):
        try:
            rows.append(_neighbourhood(model, loader, node, num_hops, room))
        except MemoryError as error:
            larger.append(error)
            continue
        nodes.append(node)
        if len(nodes) == num_nodes:
            break
    if len(larger) > len(nodes):  # What the few say, that may have no neighbours, says little.
        raise MemoryError(
            f"the neighbourhoods of {len(larger)} of {len(larger) + len(nodes)} nodes don't fit "
            f"half of the memory that is free: {larger[-1]}. Verify a model of fewer layers, or a "
            "narrower one"
        ) from larger[-1]
    return torch.cat(nodes), len(larger), [torch.cat(layer) for layer in zip(*rows, strict=True)]


def _neighbourhood(
    model: ScalableGNN, loader: SubgraphLoader, node: Tensor, num_hops: int, room: int
) -> list[Tensor]:
    data = loader.neighbourhood(node, num_hops, room)
    with contextlib.redirect_stderr(io.StringIO()):  # Where each has its histories.
        twin = model.for_graph(data.n_id.numel())
    with contextlib.closing(twin) as exact:
        return [layer[:1].clone() for layer in _full_batch(exact, data)]


def _by_mini_batches(
    model: ScalableGNN, loader: _InOrder, nodes: Tensor | None
) -> Iterator[Tensor]:
    """Return every history and the outputs of mini-batches after a sweep per layer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A history was read before it was filled")
        for _ in range(model.num_layers - 1):
            for batch in loader:
                model(batch)
        out = assemble(((batch, model(batch)) for batch in loader), model.num_nodes)
    for history in model.histories:
        yield history.emb if nodes is None else history.pull(nodes)
    yield _of(out, nodes)


def _of(rows: Tensor, nodes: Tensor | None) -> Tensor:
    return rows if nodes is None else rows[nodes]
