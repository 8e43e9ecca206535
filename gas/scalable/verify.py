"""Whether mini-batches and histories give what the uncut graph gives."""

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

from gas.graph.folder import opened
from gas.history import History
from gas.history.staleness import relative_error
from gas.loader import EvalSubgraphLoader, SubgraphLoader
from gas.loader.batch import SubData
from gas.native.checks import check_integer
from gas.native.memory import free_memory
from gas.scalable.inference import assemble, layer_wise
from gas.scalable.memory import activation_bytes
from gas.scalable.ranks import check_alone

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN

UNCUT = "the uncut graph"
SAMPLE = 64  # Nodes, where the full batch doesn't fit.
_TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}


class Verification(NamedTuple):
    """What :func:`gas.verify` found; true if everything is exact.

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
            if self.reference != UNCUT:
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
    """Compares mini-batches and histories with the uncut graph, at the model's current weights.

    With fixed weights every output is exact after one sweep over all mini-batches per layer. Here
    that many are made, on histories of their own, and compared, layer by layer, with a reference,
    in evaluation mode; so are the outputs of layer-wise inference. The model and its histories stay
    as they are::

        found = gas.verify(model, graph)
        print(found)  # Names the first layer that differs.

    The reference is one full batch of the whole graph, at its memory and that of a further set of
    histories. Where that doesn't fit, it is a full batch of the neighbourhood of each of some
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
        batch_size: Parts per mini-batch. (default: ``1``, or the loader's)
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
    loader = _loader(opened(graph, "graph"), batch_size, kwargs)
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
    """The largest relative error that counts as exact with such histories."""
    return max((_TOLERANCES.get(h.codec.name, 1e-5) for h in histories), default=1e-5)


def _loader(
    graph: Data | SubgraphLoader, batch_size: int | None, options: dict[str, Any]
) -> SubgraphLoader:
    """The mini-batches that are compared."""
    if isinstance(graph, Data):
        size = 1 if batch_size is None else batch_size
        return EvalSubgraphLoader(graph, None, size, log=False, **options)
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
    return graph.without_views()


class _InOrder:
    """The mini-batches of a loader, in the order of their nodes; none of them is kept."""

    def __init__(self, loader: SubgraphLoader) -> None:
        self._loader = loader
        self.num_nodes = loader.num_nodes

    def __iter__(self) -> Iterator[SubData]:
        num_parts = self._loader.ptr.numel() - 1
        size = self._loader.batch_size or 1  # None where a sampler of batches was given.
        for first in range(0, num_parts, size):
            yield self._loader.cut(range(first, min(first + size, num_parts)))


def _room(model: ScalableGNN, loader: SubgraphLoader) -> int:
    """How many nodes and edges may be in a full batch, for half of the memory that is free.

    It is judged by the mini-batch of the part with most edges.
    """
    batch = loader.cut([int(loader.edges_per_part().argmax())])
    size = batch.n_id.numel() + batch.data.e_id.numel()
    need = activation_bytes(model, batch, training=False)
    return free_memory(model.device) // 2 * size // need


def _drawn(loader: SubgraphLoader, seed: int) -> Tensor:
    """All nodes in random order, those without an edge, of which any model is right, at the end."""
    order = torch.randperm(loader.num_nodes, generator=torch.Generator().manual_seed(seed))
    lonely = loader.degree[order] == 0
    return torch.cat([order[~lonely], order[lonely]])


def _full_batch(exact: ScalableGNN, data: Data) -> list[Tensor]:
    """What a full batch gives: the histories, which are those of ``exact``, and the outputs."""
    x, adj_t, given = exact.inputs_of(copy.copy(data).to(exact.device))
    out = exact(x, adj_t, fill=True, **given)
    return [*(history.emb for history in exact.histories), out]


def _neighbourhoods(
    model: ScalableGNN,
    loader: SubgraphLoader,
    drawn: Tensor,
    num_nodes: int,
    num_hops: int,
    room: int,
) -> tuple[Tensor, int, list[Tensor]]:
    """The first nodes whose neighbourhoods fit, and what a full batch of each gives for it.

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
    """What mini-batches give after a sweep per layer: every history, then the outputs."""
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
