"""``verify``: compare mini-batches and histories with the uncut graph."""

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
from gas.loader import SubData, SubgraphLoader, batches_in_order
from gas.native import check_integer, free_memory
from gas.scalable.base import preserve_modes
from gas.scalable.distributed.ranks import check_single_process
from gas.scalable.inference import assemble, loader_of, run_inference
from gas.scalable.memory import activation_bytes

if TYPE_CHECKING:
    from gas.scalable.model import ScalableGNN

UNCUT = "the uncut graph"
AS_PREPARED = "as prepared for the model"
MESSAGES = 3  # Tensors with a row for each edge that a layer of PyG holds at once.
NUMBER = 4  # The bytes of a number in them.
SAMPLE = 64  # Nodes, where the full batch doesn't fit.
_TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}


class _Reference(NamedTuple):
    """Rows that those of mini-batches are compared with.

    * ``rows``: those of each history, then the outputs.
    * ``nodes``: their ids; ``None`` for all nodes, in order.
    * ``name``: a description.
    """

    rows: list[Tensor]
    nodes: Tensor | None = None
    name: str = UNCUT


class Verification(NamedTuple):
    """Result of :func:`gas.verify`; true if everything is exact.

    * ``errors``: ``|h - h*| / |h*|`` of every history, then of the outputs: Frobenius norms over
      all nodes, or the sampled ones, of mini-batches (``h``) and the reference (``h*``).
    * ``tolerance``: the largest error that counts as exact.
    * ``reference``: a description of the reference.
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

    With fixed weights every output is exact after one sweep over all mini-batches per layer. That
    many sweeps are run in evaluation mode, on separate histories, and compared with a reference,
    layer by layer; so are the outputs of layer-wise inference. The model and its histories aren't
    changed::

        found = gas.verify(model, graph)
        print(found)  # Names the first layer that differs.

    The reference is one full batch of the whole graph, which needs memory for it and for another
    set of histories. Outputs of a model of :func:`gas.to_scalable` are compared with those of the
    original module, called on the graph before :func:`gas.cluster`, in its layout. If this isn't
    possible, because model or graph is a copy or comes from a folder, something was changed since,
    or messages of all edges don't fit memory, the full batch is the graph as prepared for the
    model, and ``reference`` says so.

    If no full batch fits, the reference is a full batch of the neighbourhood of each of some
    sampled nodes, one after the other: all nodes within ``num_layers`` hops, at least two, with
    their edges. If each layer reads one hop, this is exact for the sampled nodes, and only these
    are compared. A layer that reads further, or by ``n_id``, has other inputs there than in
    mini-batches, and is reported as inexact, even if the mini-batches contain all that it reads.
    Nodes with incoming edges are sampled first; those whose neighbourhood doesn't fit are skipped,
    at most as many as are compared. This needs memory for a mini-batch, one set of histories and
    one neighbourhood: few hops may reach most of a graph.

    Args:
        model: The model.
        graph: The graph of :func:`gas.cluster`, or the path of its folder, or a loader, whose
            parts, layout and weights are used, in order and without views.
        batch_size: Parts per mini-batch. (default: that of the last loader of the graph which was
            given one, or ``1``; or the loader's)
        num_nodes: The number of nodes to sample; that of the graph compares the whole graph.
            (default: the whole graph if its full batch, estimated by a mini-batch, fits half of the
            free memory, or else 64)
        seed: The seed of the sample. (default: ``0``)
        tolerance: The largest relative error that counts as exact. (default: ``1e-5``, or by the
            histories' precision ``2e-3`` for float16, ``2e-2`` for bfloat16 and int8)
        **kwargs: Further arguments of :class:`gas.EvalSubgraphLoader`, such as ``layout``.

    Returns:
        A :class:`gas.scalable.Verification`, which is true if everything is exact.

    Raises:
        ValueError: If the graph isn't that of the histories, or an argument is unusable.
        MemoryError: If not even a neighbourhood fits.
    """
    if hasattr(model, "_verify"):  # A HeteroModel.
        for name in kwargs:
            raise ValueError(
                f"{name!r} is given, which gas.verify doesn't have for heterogeneous graphs: leave "
                "it out"
            )
        return cast(Any, model)._verify(graph, batch_size, num_nodes, tolerance)
    if not hasattr(model, "for_graph"):
        raise ValueError(
            f"'model' is a {type(model).__name__}, expected a gas.ScalableGNN, such as "
            "gas.to_scalable(net, data) makes"
        )
    check_single_process(model, "gas.verify")
    loader = _loader(open_if_path(graph, "graph"), batch_size, kwargs)
    check_integer("seed", seed, 0)
    if num_nodes is not None:
        most = loader.num_nodes
        check_integer("num_nodes", num_nodes, 1, most, f"between 1 and the graph's {most} nodes")
    if tolerance is None:
        tolerance = tolerance_of(model.histories)
    with preserve_modes(model, False), contextlib.ExitStack() as stack:
        stale = stack.enter_context(contextlib.closing(model.for_graph(model.num_nodes)))
        max_size = 0 if num_nodes == loader.num_nodes else _max_graph_size(stale, loader)
        size = loader.num_nodes + int(loader.edges_per_part().sum())
        if num_nodes is None:
            num_nodes = loader.num_nodes if size <= max_size else SAMPLE
        if num_nodes >= loader.num_nodes:
            exact = stack.enter_context(contextlib.closing(model.for_graph(model.num_nodes)))
            reference = _run_graph(model, exact, loader, size)
        else:
            reference = _run_neighbourhoods(model, loader, num_nodes, seed, max_size)
        errors = _find_errors(stale, _OrderedLoader(loader), reference)
    return Verification(errors, tolerance, reference.name)


def tolerance_of(histories: Iterable[History]) -> float:
    """Return the largest relative error that counts as exact for histories of this precision."""
    return max((_TOLERANCES.get(h.codec.name, 1e-5) for h in histories), default=1e-5)


def _loader(
    graph: Data | SubgraphLoader, batch_size: int | None, options: dict[str, Any]
) -> SubgraphLoader:
    """Return a loader of the mini-batches to compare."""
    if not isinstance(graph, Data | SubgraphLoader):
        raise ValueError(
            f"'graph' is a {type(graph).__name__}, expected what gas.cluster has returned, or a "
            "gas.SubgraphLoader"
        )
    return loader_of(graph, batch_size, options, "gas.verify(model, graph, ...)").plain_loader()


class _OrderedLoader:
    """The mini-batches of a loader in the order of their nodes, none of which is cached."""

    def __init__(self, loader: SubgraphLoader) -> None:
        self._loader = loader
        self.num_nodes = loader.num_nodes

    def __iter__(self) -> Iterator[SubData]:
        return batches_in_order(self._loader)


def _max_graph_size(model: ScalableGNN, loader: SubgraphLoader) -> int:
    """Return the number of nodes and edges of a full batch that fit half of the free memory.

    It is estimated by the mini-batch of the part with most edges.
    """
    batch = loader.cut([int(loader.edges_per_part().argmax())])
    size = batch.n_id.numel() + batch.data.e_id.numel()
    need = activation_bytes(model, batch, training=False)
    return free_memory(model.device) // 2 * size // need


def _shuffle_nodes(loader: SubgraphLoader, seed: int) -> Tensor:
    """Return all nodes in random order; those without edges, which are always exact, come last."""
    order = torch.randperm(loader.num_nodes, generator=torch.Generator().manual_seed(seed))
    is_isolated = loader.degree[order] == 0
    return torch.cat([order[~is_isolated], order[is_isolated]])


def _run_graph(
    model: ScalableGNN, exact: ScalableGNN, loader: SubgraphLoader, size: int
) -> _Reference:
    """Run a full batch of ``exact`` on the whole graph, and the original module, if there is one.

    Args:
        model: The model.
        exact: A copy of it, whose histories are filled.
        loader: A loader of the graph.
        size: The number of its nodes and edges.
    """
    rows = _run_full_batch(exact, loader.cut(range(loader.ptr.numel() - 1)).data)
    if not hasattr(model, "run_module"):
        return _Reference(rows)
    out = _run_module(model, loader, size)
    if out is None:
        return _Reference(rows, name=f"{UNCUT}, {AS_PREPARED}")
    return _Reference([*rows[:-1], out])


def _run_full_batch(exact: ScalableGNN, data: Data) -> list[Tensor]:
    """Run a full batch; return the histories of ``exact``, which it fills, and the outputs."""
    x, adj_t, given = exact.inputs_of(copy.copy(data).to(exact.device))
    out = exact._join_outputs(exact(x, adj_t, fill=True, **given))
    return [*(history.emb for history in exact.histories), out]


def _run_module(model: Any, loader: SubgraphLoader, size: int) -> Tensor | None:
    """Return the outputs of the original module on the original graph.

    Returns:
        ``None`` if the module or that graph isn't known any more, or there is no room for a message
        for every edge, as PyG's layers make them.
    """
    x = loader.data.get("x")
    widths = [history.embedding_dim for history in model.histories]
    if isinstance(x, Tensor) and x.dim() == 2:
        widths.append(x.size(1))
    needed = MESSAGES * NUMBER * size * max(widths, default=1)
    return None if needed > free_memory(model.device) // 2 else model.run_module(loader.data)


def _run_neighbourhoods(
    model: ScalableGNN, loader: SubgraphLoader, num_nodes: int, seed: int, max_size: int
) -> _Reference:
    """Run a full batch of the neighbourhood of each of ``num_nodes`` random nodes.

    Nodes with a neighbourhood of more than ``max_size`` nodes and edges are passed over.
    """
    num_hops = max(model.num_layers, 2)
    nodes: list[Tensor] = []
    rows: list[list[Tensor]] = []
    larger: list[MemoryError] = []
    for node in _shuffle_nodes(loader, seed)[: 2 * num_nodes].split(1):
        try:
            rows.append(_run_neighbourhood(model, loader, node, num_hops, max_size))
        except MemoryError as error:
            larger.append(error)
            continue
        nodes.append(node)
        if len(nodes) == num_nodes:
            break
    if len(larger) > len(nodes):  # The few others may have no neighbours, and show little.
        raise MemoryError(
            f"the neighbourhoods of {len(larger)} of {len(larger) + len(nodes)} nodes don't fit "
            f"half of the memory that is free: {larger[-1]}. Verify a model of fewer layers, or a "
            "narrower one"
        ) from larger[-1]
    name = f"{num_hops}-hop neighbourhoods of {len(nodes)} sampled nodes"
    if larger:
        name += f" ({len(larger)} with too large ones passed over)"
    by_layer = [torch.cat(layer) for layer in zip(*rows, strict=True)]
    return _Reference(by_layer, torch.cat(nodes), name)


def _run_neighbourhood(
    model: ScalableGNN, loader: SubgraphLoader, node: Tensor, num_hops: int, max_size: int
) -> list[Tensor]:
    """Run a full batch of one node's neighbourhood, and return the node's rows."""
    data = loader.neighbourhood(node, num_hops, max_size)
    with contextlib.redirect_stderr(io.StringIO()):  # Hides the place of these histories.
        exact = model.for_graph(data.n_id.numel())
    with contextlib.closing(exact):
        return [layer[:1].clone() for layer in _run_full_batch(exact, data)]


def _find_errors(
    model: ScalableGNN, loader: _OrderedLoader, reference: _Reference
) -> tuple[float, ...]:
    """Return the relative error of each history, then of the outputs, of mini-batches.

    The outputs of layer-wise inference are compared, too.
    """
    nodes, expected = reference.nodes, reference.rows
    found = _run_mini_batches(model, loader, nodes)
    errors = [relative_error(rows, true) for rows, true in zip(found, expected, strict=True)]
    inferred = relative_error(_select_rows(run_inference(model, loader), nodes), expected[-1])
    errors[-1] = math.nan if math.isnan(inferred) else max(inferred, errors[-1])
    return tuple(errors)


def _run_mini_batches(
    model: ScalableGNN, loader: _OrderedLoader, nodes: Tensor | None
) -> Iterator[Tensor]:
    """Run a sweep of mini-batches per layer; yield each history's rows, then the outputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A history was read before it was filled")
        for _ in range(model.num_layers - 1):
            for batch in loader:
                model(batch)
        out = assemble(
            ((batch, model._join_outputs(model(batch))) for batch in loader), model.num_nodes
        )
    for history in model.histories:
        yield history.emb if nodes is None else history.pull(nodes)
    yield _select_rows(out, nodes)


def _select_rows(rows: Tensor, nodes: Tensor | None) -> Tensor:
    return rows if nodes is None else rows[nodes]
