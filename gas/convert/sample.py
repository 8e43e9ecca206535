"""Small graphs with the attributes of a large one, on which a model is tried."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.nn import Module
from torch_geometric.data import Data

from gas.graph import is_row_per_edge, is_row_per_node, layout_of
from gas.native import gather_sparse_rows, is_sparse


def sample(
    data: Data,
    names: Sequence[str],
    num_nodes: int,
    num_edges: int,
    how: str,
    self_loops: bool = True,
) -> Data:
    """Return a random graph with attributes like those of another.

    Weights of edges are random; everything else but features, such as types of edges, is taken from
    the graph.

    Args:
        data: The graph.
        names: The attributes.
        num_nodes: How many nodes it gets.
        num_edges: How many edges, sorted by destination; a node has none.
        how: How features are made: ``"random"`` ones, those of the graph ``"scaled"`` at random,
            which keeps signs and zeros, or as they are, ``"real"``.
        self_loops: Whether there are any. (default: ``True``)
    """
    random = torch.Generator().manual_seed(1)
    src = torch.randint(num_nodes, (num_edges,), generator=random)
    dst = torch.randint(num_nodes - 1, (num_edges,), generator=random).sort().values
    if not self_loops:
        src = torch.where(src == dst, (src + 1) % num_nodes, src)
    out = Data(edge_index=torch.stack([src, dst]), num_nodes=num_nodes)
    for name in names:
        if name == "edge_weight" and name not in data:  # They are the values of an adj_t.
            value = layout_of(data.adj_t).value(data.adj_t)
            dtype = value.dtype if value is not None and value.is_floating_point() else None
            out[name] = torch.rand(num_edges, generator=random, dtype=dtype) + 0.1
            continue
        value = data[name]
        if is_row_per_node(data, name):
            out[name] = _make_like(name, value, num_nodes, random, how)
        elif is_row_per_edge(data, name):
            out[name] = _make_like(name, value, num_edges, random, how)
        else:
            out[name] = value
    return out


def _make_like(name: str, value: Tensor, rows: int, random: torch.Generator, how: str) -> Tensor:
    floating = value.is_floating_point()
    if name == "x" and floating and how == "random":
        return torch.randn(rows, *value.shape[1:], generator=random, dtype=value.dtype)
    if name == "edge_weight" and floating:
        return torch.rand(rows, *value.shape[1:], generator=random, dtype=value.dtype) + 0.1
    if value.size(0) == 0:
        return torch.zeros(rows, *value.shape[1:], dtype=value.dtype)
    taken = torch.randint(value.size(0), (rows,), generator=random)
    out = _rows(value, taken)
    if name == "x" and floating and how == "scaled":
        out = out * (torch.rand(out.shape, generator=random, dtype=out.dtype) + 0.5)
    return out


def subsample(data: Data, names: Sequence[str], num_nodes: int, num_edges: int) -> Data:
    """Select some nodes of a graph, most of them connected, with their attributes and edges.

    They are found from the row of features with the largest number, and some random ones, on: what
    a layer does of large values is done there. Edges are a list, in the order of the graph.

    Args:
        data: The graph, with a list of edges.
        names: The attributes.
        num_nodes: The most nodes, of which there is a prime number, which no width is.
        num_edges: The most edges, too; others are left out at random.
    """
    random = torch.Generator().manual_seed(1)
    src, dst = data.edge_index.cpu()
    size = int(data.num_nodes or 0)
    first = _first_nodes(data, size, random)
    nodes = _grow_neighbourhood(src, dst, size, first, prime(min(size, num_nodes)), random)
    inside = torch.zeros(size, dtype=torch.bool)
    inside[nodes] = True
    entry = (inside[src] & inside[dst]).nonzero().view(-1)
    kept = torch.randperm(entry.numel(), generator=random)[: prime(min(entry.numel(), num_edges))]
    entry = entry[kept.sort().values]
    rows = inside.cumsum(0) - 1
    out = Data(edge_index=rows[torch.stack([src[entry], dst[entry]])], num_nodes=nodes.numel())
    for name in names:
        value = data[name]
        if is_row_per_node(data, name):
            out[name] = _rows(value, nodes)
        elif is_row_per_edge(data, name):
            out[name] = _rows(value, entry)
        else:
            out[name] = value
    return out


def prime(size: int) -> int:
    """Return the largest prime up to a number."""
    while any(size % factor == 0 for factor in range(2, math.isqrt(size) + 1)):
        size -= 1
    return size


def _rows(value: Tensor, ids: Tensor) -> Tensor:
    value = value.detach().cpu()
    return gather_sparse_rows(value, ids).to_dense() if is_sparse(value) else value[ids]


def _first_nodes(data: Data, size: int, random: torch.Generator) -> Tensor:
    """Draw random nodes, and add the one with the largest feature among the first rows."""
    out = torch.randint(size, (8,), generator=random)
    x = data.get("x")
    if not (isinstance(x, Tensor) and x.is_floating_point()) or is_sparse(x):
        return out
    if x.dim() != 2 or not x.numel():
        return out
    looked_at = x[: max(LOOKED_AT // x.size(1), 1)].detach()
    largest = looked_at.abs().amax(dim=1).nan_to_num(0, 0, 0).argmax()
    return torch.cat([largest.view(1).cpu(), out])


def _grow_neighbourhood(
    src: Tensor, dst: Tensor, size: int, nodes: Tensor, num_nodes: int, random: torch.Generator
) -> Tensor:
    """Collect nodes and their in-neighbours, hop by hop; then random ones if these are too few."""
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


LOOKED_AT = 2**22  # Numbers among which the largest is looked for.
HOPS = 4
HOW = ("random", "scaled", "real")


class _Recorder(Interpreter):
    """Interpreter that runs a graph and records the value of each node."""

    def __init__(self, net: Module, graph: Graph, weight: Tensor | None, weighted: Any) -> None:
        super().__init__(net, graph=graph)
        self._weight, self._weighted = weight, weighted
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n] = copy_value(value)
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in self._weighted:
            return super().call_module(target, args, kwargs)
        layer = self.fetch_attr(target)
        given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        return layer(**{**given, "edge_weight": self._weight})


def copy_value(value: Any) -> Any:
    """Copy values, so that nothing changes them in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(copy_value, value)) if type(value) in (tuple, list) else value


def record(
    net: Module,
    graph: Graph,
    inputs: dict[str, Any],
    weight: Tensor | None = None,
    weighted: Collection[str] = (),
) -> dict[Node, Any]:
    """Return the value of each node of a graph, in evaluation mode.

    Args:
        net: The module that was traced.
        graph: The graph.
        inputs: Its inputs by name.
        weight: The weight of each edge. (default: none)
        weighted: The names of the layers that are given it. (default: none)
    """
    recorder = _Recorder(net, graph, weight, weighted)
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    with eval_mode(net):
        recorder.run(*[copy_value(inputs[name]) for name in names])
    return recorder.values


@contextlib.contextmanager
def eval_mode(net: Module) -> Iterator[None]:
    """Set evaluation mode, without gradients, in this context."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
