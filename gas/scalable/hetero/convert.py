"""A module of typed graphs as a model with histories, tried on a small graph first."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import HeteroData
from torch_geometric.nn import MessagePassing

from gas.graph import (
    PartitionOptions,
    cluster_heterogeneous,
    is_edge_row,
    is_node_row,
    types_of,
    with_csr_types,
)
from gas.loader import HeteroLoader
from gas.native import is_sparse
from gas.nn import deep_copy, fuse, reason_inexact, twin
from gas.scalable.hetero.model import HeteroModel, evaluating
from gas.scalable.hetero.plan import EDGES, Plan, given, inputs_of, plan_of, with_ids
from gas.scalable.hetero.semantic import ask_for_means

SMALLEST = 23  # Nodes of a type of the small graph; those of the next have two more.
DEGREE = 3
PARTS = 3
TOLERANCE = 1e-8
DOUBLE = torch.double


def to_typed(net: Module, data: HeteroData, **options: Any) -> HeteroModel:
    """:func:`gas.to_scalable` of a module of typed graphs.

    The model has the parameters of ``net``, and calls it. Its ``forward`` takes dictionaries by
    type, named as PyG names them: ``x_dict``, ``edge_index_dict``, ``edge_attr_dict``, or without
    ``_dict`` as those of ``to_hetero`` are; ``n_id_dict`` for embeddings of nodes that have no
    features. A history stands wherever a layer reads rows that another layer has computed, before
    dropout. On a small random graph with the same types, mini-batches have to give what a full
    batch gives; a module of which they don't is refused.

    Args:
        net: The module: ``to_hetero(net, data.metadata())``, or one with ``HeteroConv``,
            ``HGTConv`` or layers of single relations.
        data: The graph, as it is or of :func:`gas.cluster`.
        **options: Those of :class:`gas.scalable.hetero.HeteroModel`.

    Raises:
        ValueError: If ``net`` can't be followed, or isn't exact on mini-batches.
    """
    if isinstance(net, HeteroModel):
        raise ValueError("'net' is a HeteroModel already: use it as it is, or convert its 'net'")
    data = with_csr_types(data)
    types = types_of(data)
    for name, layer in net.named_modules():
        reason = reason_inexact(layer)
        if reason:
            raise ValueError(
                f"'{name}' ({type(layer).__name__}) isn't exact on mini-batches: it "
                f"{reason.split(': ')[0]}. Use one that looks at the edges into a node alone, such "
                "as SAGEConv, GATConv or GraphConv, or a norm of each node"
            )
        if isinstance(layer, MessagePassing) and getattr(layer, "cached", False):
            raise ValueError(
                f"'{name}' ({type(layer).__name__}) has cached=True, which keeps what it computes "
                "of the first edges that it is given: build it with cached=False"
            )
    inputs = inputs_of(net, data)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        _initialise(net, _small(data, inputs), inputs)
        torch.default_generator.manual_seed(0)  # That of a GPU stays as it is.
        small = _small(data, inputs)
        trial = ask_for_means(fuse(_trial(net)))
        sizes = types_of(small).num_nodes
        num_parts = min(PARTS, sum(sizes.values()))
        quick = PartitionOptions(method="random", cache=False, log=False)
        graph = _as(cluster_heterogeneous(small, num_parts, quick, check=False), DOUBLE)
        plan, expected, rows = plan_of(trial, with_ids(graph), inputs)
        is_narrow, norms = _try_out(trial, plan, graph, sizes, expected, rows)
    model = HeteroModel(ask_for_means(fuse(twin(net))), plan, types.num_nodes, is_narrow, **options)
    model.norms_of_halo = norms
    return model


def _small(data: HeteroData, inputs: Mapping[str, str]) -> HeteroData:
    """Return a random graph of the same types, with as wide attributes of those that are read."""
    out, types = HeteroData(), types_of(data)
    keys = {key for key in inputs.values() if key not in (EDGES, "num_nodes")}

    def like(value: Tensor, size: int) -> Tensor:
        if not value.size(0):
            return torch.zeros(size, *value.shape[1:], dtype=value.dtype)
        if value.is_floating_point():
            return torch.randn(size, *value.shape[1:], dtype=value.dtype)
        if is_sparse(value):
            return torch.ones(size, *value.shape[1:], dtype=value.dtype)
        return value[torch.randint(value.size(0), (size,))].cpu()

    for number, (kind, most) in enumerate(types.num_nodes.items()):
        size = SMALLEST + 2 * number
        if "n_id" in inputs.values():  # Of tables that have no more rows.
            size = min(size, most)
        out[kind].num_nodes = size
        for key in keys & set(data[kind].keys()):
            value = data[kind][key]
            out[kind][key] = like(value, size) if is_node_row(data, kind, key, most) else value
    for key in keys & set(data._global_store.keys()):
        out[key] = data[key]
    for relation in types.edges:
        ends = out[relation[0]].num_nodes, out[relation[2]].num_nodes
        size = DEGREE * max(ends) if min(ends) else 0
        store = out[relation]
        src, dst = (torch.randint(max(end, 1), (size,)) for end in ends)
        store.edge_index = torch.stack([src, dst.sort().values])  # As those of mini-batches are.
        num_edges = data[relation].edge_index.size(1)
        for key in keys & set(data[relation].keys()):
            value = data[relation][key]
            is_row = is_edge_row(data, relation, key, num_edges)
            store[key] = like(value, size) if is_row else value
    return out


def _as(data: HeteroData, dtype: torch.dtype) -> HeteroData:
    """Return the graph with numbers of another type."""
    return copy.copy(data).apply(
        lambda value: value.to(dtype) if value.is_floating_point() else value
    )


def _initialise(net: Module, small: HeteroData, inputs: Mapping[str, str]) -> None:
    """Initialise lazy parameters, by running the module, which changes nothing else."""
    if any(torch.nn.parameter.is_lazy(p) for p in net.parameters()):
        device = next((p.device for p in net.parameters()), torch.device("cpu"))
        with torch.no_grad(), evaluating(net):
            net(**given(with_ids(small).to(device), inputs))


def _trial(net: Module) -> Module:
    """Return a copy of the module in evaluation mode, none of whose parameters happens to be 0."""
    trial = deep_copy(net).cpu().to(DOUBLE).eval()
    with torch.no_grad():
        for parameter in trial.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return trial


def _try_out(
    trial: Module,
    plan: Plan,
    graph: HeteroData,
    num_nodes: dict[str, int],
    expected: Any,
    rows: list[Tensor],
) -> tuple[bool, frozenset[str]]:
    """Return whether what layers return can be cut to in-batch nodes; refuses what isn't exact.

    Also which batch norms are given rows of the halo.
    """
    failed: Exception | None = None
    for is_narrow in (True, False):
        model = HeteroModel(trial, plan, num_nodes, is_narrow, dtype=DOUBLE, io="serial")
        try:
            loader = HeteroLoader(graph, log=False)
            with torch.no_grad():
                out = model.swept(loader)
                norms = _norms_of_halo(model, loader)
            histories = [history.emb.clone() for history in model.histories]
        except Exception as error:  # Of whatever the module does of rows that it didn't expect.
            failed = failed or error
            continue
        finally:
            model.close()
        found = [*histories, *_flat(out)]
        names = [f"what '{p.layer}' reads of '{p.kind}'" for p in plan.places]
        names += [f"the output for {kind!r}" if kind else "the output" for kind in _kinds(out)]
        for name, mine, true in zip(names, found, [*rows, *_flat(expected)], strict=True):
            _check_close(trial, name, mine, true)
        return is_narrow, norms
    raise ValueError(
        f"{type(trial).__name__} can't be run on mini-batches: {type(failed).__name__}: {failed}"
    ) from failed


def _norms_of_halo(model: HeteroModel, loader: HeteroLoader) -> frozenset[str]:
    """Return the batch norms whose input has the rows of a type with the halo."""
    found: set[str] = set()
    sizes: set[int] = set()

    def look(name: str, _: Module, args: tuple[Any, ...]) -> None:
        if args[0].size(0) in sizes:
            found.add(name)

    norms = [(n, each) for n, each in model.net.named_modules() if isinstance(each, _BatchNorm)]
    with contextlib.ExitStack() as hooks:
        for name, norm in norms:
            hooks.callback(norm.register_forward_pre_hook(partial(look, name)).remove)
        for batch in cast("Iterable[HeteroData]", loader):
            sizes = {batch[kind].n_id.numel() for kind in model.num_nodes}
            sizes -= {batch[kind].batch_size for kind in model.num_nodes}
            model(batch)
    return frozenset(found)


def _kinds(out: Any) -> list[str | None]:
    return sorted(k for k in out if out[k] is not None) if isinstance(out, Mapping) else [None]


def _flat(out: Any) -> list[Tensor]:
    return [out[k] for k in _kinds(out)] if isinstance(out, Mapping) else [out]


def _check_close(trial: Module, name: str, found: Tensor, expected: Tensor) -> None:
    if found.shape == expected.shape and torch.allclose(found, expected, TOLERANCE, TOLERANCE):
        return
    why = (
        "a layer before looks at more than the edges into a node, such as at degrees or means; or "
        "rows are detached, or computed without gradient, between layers, which hides where "
        "histories have to stand"
    )
    raise ValueError(
        f"{type(trial).__name__} isn't exact on mini-batches: {name} differs from a full batch, "
        f"once all histories have been filled. {why[0].upper()}{why[1:]}"
    )
