"""Small graphs with the attributes of a large one, on which a module is run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from gas.convert.module.inputs import Inputs
from gas.convert.tracing.outputs import flatten
from gas.graph import WEIGHT, is_row_per_edge, is_row_per_node, layout_of, select_rows, to_dense

# Nodes and edges of the random graphs: primes, which differ from usual widths.
SAMPLES = ((61, 241), (67, 263))
# Features of random graphs: random ones, those of the graph scaled at random (which keeps signs
# and zeros), or those of the graph.
FEATURES = ("random", "scaled", "real")
MOST_SEARCHED = 2**22  # Numbers to search for the largest.
HOPS = 4


def make_sample(
    data: Data,
    names: Sequence[str],
    num_nodes: int,
    num_edges: int,
    features: str,
    are_unique: bool,
) -> Data:
    """Make a random graph with attributes like those of another.

    Edge weights are random; other attributes, such as edge types, are taken from the graph.

    Args:
        data: The graph.
        names: The attributes.
        num_nodes: The number of nodes.
        num_edges: The number of edges, sorted by destination; the last node has none.
        features: One of :data:`FEATURES`.
        are_unique: Whether no edge is there twice, as in a matrix, whose values PyG adds up.
    """
    random = torch.Generator().manual_seed(1)
    src = torch.randint(num_nodes, (num_edges,), generator=random)
    dst = torch.randint(num_nodes - 1, (num_edges,), generator=random).sort().values
    first = (dst[1:] == dst[:-1]).nonzero()[0]  # Two self-loops, of which some functions leave one.
    src[first], src[first + 1] = dst[first], dst[first]
    if are_unique:
        pairs = torch.randperm(num_nodes * (num_nodes - 1), generator=random)[:num_edges]
        src, dst = pairs.sort().values % num_nodes, pairs.sort().values // num_nodes
    out = Data(edge_index=torch.stack([src, dst]), num_nodes=num_nodes)
    for name in names:
        if name == "edge_weight" and name not in data:  # They are the values of an adj_t.
            adj_t = data.get("adj_t")
            value = None if adj_t is None else layout_of(adj_t).value(adj_t)
            dtype = value.dtype if value is not None and value.is_floating_point() else None
            out[name] = torch.rand(num_edges, generator=random, dtype=dtype) + 0.1
            continue
        value = data[name]
        if is_row_per_node(data, name):
            out[name] = _make_like(name, value, num_nodes, random, features)
        elif is_row_per_edge(data, name):
            out[name] = _make_like(name, value, num_edges, random, features)
        else:
            out[name] = value
    return out


def _make_like(
    name: str, value: Tensor, rows: int, random: torch.Generator, features: str
) -> Tensor:
    floating = value.is_floating_point()
    if name == "x" and floating and features == "random":
        return torch.randn(rows, *value.shape[1:], generator=random, dtype=value.dtype)
    if name == "edge_weight" and floating:
        return torch.rand(rows, *value.shape[1:], generator=random, dtype=value.dtype) + 0.1
    if value.size(0) == 0:
        return torch.zeros(rows, *value.shape[1:], dtype=value.dtype)
    out = _read_rows(value, torch.randint(value.size(0), (rows,), generator=random))
    if name == "x" and floating and features == "scaled":
        out = out * (torch.rand(out.shape, generator=random, dtype=out.dtype) + 0.5)
    return out


def subsample(data: Data, names: Sequence[str], num_nodes: int, num_edges: int) -> Data:
    """Select some nodes of a graph, most of them connected, with their attributes and edges.

    The search starts at the node with the largest feature, so that large values are tested, and at
    random nodes. The edges are an ``edge_index``, in the order of the graph.

    Args:
        data: The graph, with a list of edges.
        names: The attributes.
        num_nodes: The most nodes; the number becomes a prime, which differs from usual widths.
        num_edges: The most edges, likewise; others are dropped at random.
    """
    random = torch.Generator().manual_seed(1)
    src, dst = data.edge_index.cpu()
    size = int(data.num_nodes or 0)
    first = _choose_first_nodes(data, size, random)
    nodes = _grow_neighbourhood(src, dst, size, first, largest_prime(min(size, num_nodes)), random)
    inside = torch.zeros(size, dtype=torch.bool)
    inside[nodes] = True
    entry = (inside[src] & inside[dst]).nonzero().view(-1)
    kept = torch.randperm(entry.numel(), generator=random)[
        : largest_prime(min(entry.numel(), num_edges))
    ]
    entry = entry[kept.sort().values]
    rows = inside.cumsum(0) - 1
    out = Data(edge_index=rows[torch.stack([src[entry], dst[entry]])], num_nodes=nodes.numel())
    for name in names:
        value = data[name]
        if is_row_per_node(data, name):
            out[name] = _read_rows(value, nodes)
        elif is_row_per_edge(data, name):
            out[name] = _read_rows(value, entry)
        else:
            out[name] = value
    return out


def largest_prime(size: int) -> int:
    """Return the largest prime up to a number."""
    while any(size % factor == 0 for factor in range(2, math.isqrt(size) + 1)):
        size -= 1
    return size


def _read_rows(value: Tensor, ids: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value[ids] if value.layout == torch.strided else to_dense(select_rows(value, ids))


def _choose_first_nodes(data: Data, size: int, random: torch.Generator) -> Tensor:
    """Draw random nodes, and add the one with the largest feature among the first rows."""
    out = torch.randint(size, (8,), generator=random)
    x = data.get("x")
    if not (isinstance(x, Tensor) and x.is_floating_point()) or x.layout != torch.strided:
        return out
    if x.dim() != 2 or not x.numel():
        return out
    searched = x[: max(MOST_SEARCHED // x.size(1), 1)].detach()
    largest = searched.abs().amax(dim=1).nan_to_num(0, 0, 0).argmax()
    return torch.cat([largest.view(1).cpu(), out])


def _grow_neighbourhood(
    src: Tensor, dst: Tensor, size: int, nodes: Tensor, num_nodes: int, random: torch.Generator
) -> Tensor:
    """Collect nodes and their in-neighbours, hop by hop, and fill up with random nodes."""
    chosen = torch.zeros(size, dtype=torch.bool)
    chosen[nodes] = True
    for _ in range(HOPS):
        found = torch.zeros(size, dtype=torch.bool)
        found[src[chosen[dst]]] = True
        new = (found & ~chosen).nonzero().view(-1)
        room = num_nodes - int(chosen.sum())
        chosen[new[torch.randperm(new.numel(), generator=random)[:room]]] = True
        if new.numel() >= room:
            break
    else:
        others = (~chosen).nonzero().view(-1)
        room = num_nodes - int(chosen.sum())
        chosen[others[torch.randperm(others.numel(), generator=random)[:room]]] = True
    return chosen.nonzero().view(-1)


def _run_with_inputs(net: Module, inputs: Inputs, data: Data) -> tuple[Any, Inputs]:
    """Run the module, without edge features if only the signature of PyG's model has them.

    Raises:
        ValueError: If it can't be run, naming an attribute without which it could.
    """
    try:
        return inputs.run(net, data)
    except ValueError as error:
        for name in inputs.names:
            if inputs.defaults.get(name, inspect.Parameter.empty) is inspect.Parameter.empty:
                continue
            fewer = replace(inputs, names=[other for other in inputs.names if other != name])
            try:
                out, _ = fewer.run(net, data)
            except ValueError:
                continue
            if name == "edge_attr" and _ignores_edge_attr(net, inputs.method):
                return out, fewer
            raise ValueError(
                f"{error}; without {name!r} it can: give it as the layers take it, or leave it "
                f"out of the graph, del data.{name}"
            ) from error
        raise


def _ignores_edge_attr(net: Module, method: str) -> bool:
    """Return whether a model of PyG has the parameter, but no layer that uses it."""
    is_pyg = getattr(net, method).__module__.startswith("torch_geometric.")
    return is_pyg and all(getattr(layer, "edge_dim", None) is None for layer in net.modules())


def find_sample_graphs(net: Module, inputs: Inputs, data: Data) -> tuple[list[Data], Any, Inputs]:
    """Return small graphs on which a module's outputs are finite, and the first output."""
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    failure: ValueError | None = None
    variants = [inputs]
    if inputs.matrix and WEIGHT not in inputs.names:  # If it takes a list all the same.
        variants.append(replace(inputs, edges=inputs.matrix, matrix="", layout=""))
    elif inputs.edges != "edge_index" and inputs.has_edges:
        variants.append(inputs.takes_matrix("csr", False))  # If it multiplies by it.
    for variant in variants:
        for features in FEATURES:
            are_unique = variant.layout == "csr"
            graphs = [
                make_sample(data, variant.names, *size, features, are_unique).to(device)
                for size in SAMPLES
            ]
            try:
                out, used = _run_with_inputs(net, variant, graphs[0])
            except ValueError as error:
                failure = failure or error
                continue
            if variant.matrix and not inputs.matrix:
                has = inputs.edges in data
                cure = (
                    f"the graph's is called 'adj_t': set data.adj_t = data.{inputs.edges}, whose "
                    "rows are destinations" if has else
                    "the graph has none: T.ToSparseTensor(layout=torch.sparse_csr)(data) makes one"
                )  # fmt: skip
                raise ValueError(
                    f"{type(net).__name__} takes {inputs.edges!r} as a matrix, and {cure}"
                )
            rows = [leaf for leaf in flatten(out) if isinstance(leaf, Tensor)]
            if all(bool(torch.isfinite(each).all()) for each in rows):
                return graphs, out, used
    raise failure or ValueError(
        f"{type(net).__name__} gives NaN or infinite numbers on a small graph like this one, on "
        "which it would be tried"
    )
