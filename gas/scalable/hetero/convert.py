"""Convert a module for heterogeneous graphs to a model, checked on a small graph first."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.data import HeteroData
from torch_geometric.nn import MessagePassing

from gas.graph import (
    PartitionOptions,
    cluster_heterogeneous,
    is_row,
    types_of,
    with_hetero_csr_features,
)
from gas.loader import HeteroLoader
from gas.native import is_sparse
from gas.nn import deep_copy, fuse, reason_inexact, twin
from gas.scalable.base import preserve_modes
from gas.scalable.hetero.layers import replace_han_convs
from gas.scalable.hetero.model import HeteroModel
from gas.scalable.hetero.plan import EDGES, Plan, add_ids, collect_inputs, make_plan, match_inputs

SMALL, LARGE = (23, 3), (499, 9)
"""Nodes of the first type of a random graph, each further type having two more, and its parts."""
MOST_VALUES = 2**22  # Of a type's features.
DEGREE = 3
TOLERANCE = 1e-8
DOUBLE = torch.double


def to_hetero_model(net: Module, data: HeteroData, **options: Any) -> HeteroModel:
    """Convert a module for heterogeneous graphs; see :func:`gas.to_scalable`.

    The model has the parameters of ``net``, and calls it. ``forward`` of ``net`` takes dictionaries
    by type, with the names of PyG: ``x_dict``, ``edge_index_dict``, ``edge_attr_dict``, or without
    ``_dict`` like modules of ``to_hetero``; ``n_id_dict`` for embeddings of nodes without features.
    There is a history wherever a layer reads rows that another layer has computed, before dropout.
    On a small random graph with the same types, mini-batches are compared with a full batch; a
    module for which they differ is refused.

    Args:
        net: The module: ``to_hetero(net, data.metadata())``, or one with ``HeteroConv``,
            ``HGTConv`` or layers of single relations.
        data: The graph, before or after :func:`gas.cluster`.
        **options: Options of :class:`gas.scalable.hetero.HeteroModel`.

    Raises:
        ValueError: If ``net`` isn't supported, or isn't exact on mini-batches.
    """
    if isinstance(net, HeteroModel):
        raise ValueError("'net' is a HeteroModel already: use it as it is, or convert its 'net'")
    data = with_hetero_csr_features(data)
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
    inputs = match_inputs(net, data)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        with _explain_plain(net, inputs):
            _initialise(net, _make_random_graph(data, inputs), inputs)
        torch.default_generator.manual_seed(0)  # The generator of a GPU isn't changed.
        trial = replace_han_convs(fuse(_perturb_copy(net)))
        plan, is_narrow, norms = _try_on_random_graph(trial, data, inputs, SMALL)
        _try_on_random_graph(trial, data, inputs, LARGE)  # It may depend on how large one is.
    model = HeteroModel(
        replace_han_convs(fuse(twin(net))), plan, types.num_nodes, is_narrow, **options
    )
    model.norms_of_halo = norms
    return model


def _try_on_random_graph(
    trial: Module, data: HeteroData, inputs: Mapping[str, str], size: tuple[int, int]
) -> tuple[Plan, bool, frozenset[str]]:
    """Plan the histories of a module on a random graph, and check it on mini-batches of that.

    Returns:
        The plan, and what :func:`_check_on_mini_batches` returns.
    """
    graph = _make_random_graph(data, inputs, size[0])
    sizes = types_of(graph).num_nodes
    num_parts = min(size[1], sum(sizes.values()))
    quick = PartitionOptions(method="random", cache=False, log=False)
    graph = _cast(cluster_heterogeneous(graph, num_parts, quick, check=False), DOUBLE)
    with _explain_plain(trial, inputs):
        plan, expected, rows = make_plan(trial, add_ids(graph), inputs)
    return plan, *_check_on_mini_batches(trial, plan, graph, sizes, expected, rows)


def _make_random_graph(
    data: HeteroData, inputs: Mapping[str, str], smallest: int = SMALL[0]
) -> HeteroData:
    """Return a random graph of the same types, with the attributes that are inputs."""
    out, types = HeteroData(), types_of(data)
    keys = {key for key in inputs.values() if key not in (EDGES, "num_nodes")}
    values = [store[key] for store in data.node_stores for key in keys & set(store.keys())]
    columns = max([1, *(math.prod(v.shape[1:]) for v in values if isinstance(v, Tensor))])
    most = MOST_VALUES // columns
    if "n_id" in inputs.values():  # Embedding tables have no more rows.
        most = min(most, min(types.num_nodes.values()) - 2 * len(types.num_nodes))
    smallest = min(smallest, max(most, SMALL[0]))

    def random_like(value: Tensor, size: int) -> Tensor:
        if not value.size(0):
            return torch.zeros(size, *value.shape[1:], dtype=value.dtype)
        if value.is_floating_point():
            return torch.randn(size, *value.shape[1:], dtype=value.dtype)
        if is_sparse(value):
            return torch.ones(size, *value.shape[1:], dtype=value.dtype)
        return value[torch.randint(value.size(0), (size,))].cpu()

    for number, (kind, most) in enumerate(types.num_nodes.items()):
        size = smallest + 2 * number
        if "n_id" in inputs.values():  # Embedding tables have no more rows.
            size = min(size, most)
        out[kind].num_nodes = size
        for key in keys & set(data[kind].keys()):
            value = data[kind][key]
            out[kind][key] = random_like(value, size) if is_row(data, kind, key, most) else value
    for key in keys & set(data._global_store.keys()):
        out[key] = data[key]
    for relation in types.edges:
        ends = out[relation[0]].num_nodes, out[relation[2]].num_nodes
        size = DEGREE * max(ends) if min(ends) else 0
        store = out[relation]
        src, dst = (torch.randint(max(end, 1), (size,)) for end in ends)
        store.edge_index = torch.stack([src, dst.sort().values])  # Sorted as in mini-batches.
        num_edges = data[relation].edge_index.size(1)
        for key in keys & set(data[relation].keys()):
            value = data[relation][key]
            has_rows = is_row(data, relation, key, num_edges)
            store[key] = random_like(value, size) if has_rows else value
    return out


def _cast(data: HeteroData, dtype: torch.dtype) -> HeteroData:
    """Return the graph with floating-point attributes of another dtype."""
    return copy.copy(data).apply(
        lambda value: value.to(dtype) if value.is_floating_point() else value
    )


def _initialise(net: Module, small: HeteroData, inputs: Mapping[str, str]) -> None:
    """Initialise lazy parameters, by running the module in evaluation mode."""
    if any(torch.nn.parameter.is_lazy(p) for p in net.parameters()):
        device = next((p.device for p in net.parameters()), torch.device("cpu"))
        with torch.no_grad(), preserve_modes(net, False):
            net(**collect_inputs(add_ids(small).to(device), inputs))


@contextlib.contextmanager
def _explain_plain(net: Module, inputs: Mapping[str, str]) -> Iterator[None]:
    """Return the cure for a module of one node type, which fails for dictionaries."""
    try:
        yield
    except Exception as error:  # A module may raise anything for them.
        if EDGES not in inputs or isinstance(net, GraphModule):
            raise
        raise ValueError(
            f"{type(net).__name__} can't be run with 'edge_index' and others in dictionaries by "
            f"type ({type(error).__name__}: {error}): if it is for one type of nodes, make it one "
            "for all of them, torch_geometric.nn.to_hetero(net, data.metadata())"
        ) from error


def _perturb_copy(net: Module) -> Module:
    """Copy a module in evaluation mode, with noise on its parameters: zeros would hide errors."""
    trial = deep_copy(net).cpu().to(DOUBLE).eval()
    with torch.no_grad():
        for parameter in trial.parameters():
            if parameter.is_floating_point() and not torch.nn.parameter.is_lazy(parameter):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return trial


def _check_on_mini_batches(
    trial: Module,
    plan: Plan,
    graph: HeteroData,
    num_nodes: dict[str, int],
    expected: Any,
    rows: list[Tensor],
) -> tuple[bool, frozenset[str]]:
    """Refuse a module that isn't exact on mini-batches.

    Returns:
        Whether outputs of layers can be cut to in-batch nodes, and the names of the batch norms
        that get rows of the halo.
    """
    failed: Exception | None = None
    for is_narrow in (True, False):
        model = HeteroModel(trial, plan, num_nodes, is_narrow, dtype=DOUBLE, io="serial")
        try:
            loader = HeteroLoader(graph, log=False)
            with torch.no_grad():
                out = model.run_sweeps(loader)
                norms = _find_norms_of_halo(model, loader)
            histories = [history.emb.clone() for history in model.histories]
        except Exception as error:  # The module may raise anything for unexpected shapes.
            failed = failed or error
            continue
        finally:
            model.close()
        found = [*histories, *_output_tensors(out)]
        names = [f"what '{p.layer}' reads of '{p.kind}'" for p in plan.places]
        names += [
            f"the output for {kind!r}" if kind else "the output" for kind in _output_types(out)
        ]
        for name, mine, true in zip(names, found, [*rows, *_output_tensors(expected)], strict=True):
            _check_close(trial, name, mine, true)
        return is_narrow, norms
    raise ValueError(
        f"{type(trial).__name__} can't be run on mini-batches: {type(failed).__name__}: {failed}"
    ) from failed


def _find_norms_of_halo(model: HeteroModel, loader: HeteroLoader) -> frozenset[str]:
    """Return the names of the batch norms whose input has a row for each node, halo included."""
    found: set[str] = set()
    sizes: set[int] = set()

    def record(name: str, _: Module, args: tuple[Any, ...]) -> None:
        if args[0].size(0) in sizes:
            found.add(name)

    norms = [(n, each) for n, each in model.net.named_modules() if isinstance(each, _BatchNorm)]
    with contextlib.ExitStack() as hooks:
        for name, norm in norms:
            hooks.callback(norm.register_forward_pre_hook(partial(record, name)).remove)
        for batch in cast("Iterable[HeteroData]", loader):
            sizes = {batch[kind].n_id.numel() for kind in model.num_nodes}
            sizes -= {batch[kind].batch_size for kind in model.num_nodes}
            model(batch)
    return frozenset(found)


def _output_types(out: Any) -> list[str | None]:
    """Return the node types of an output, or ``[None]`` for a tensor."""
    return sorted(k for k in out if out[k] is not None) if isinstance(out, Mapping) else [None]


def _output_tensors(out: Any) -> list[Tensor]:
    """Return the tensors of an output, by node type."""
    return [out[k] for k in _output_types(out)] if isinstance(out, Mapping) else [out]


def _check_close(trial: Module, name: str, found: Tensor, expected: Tensor) -> None:
    """Refuse a module for which rows of mini-batches and of a full batch differ."""
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
