"""A small graph with the attributes of a large one, on which a model is tried."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.nn import Module
from torch_geometric.data import Data

from gas.graph.edges import is_row_per_edge, is_row_per_node
from gas.native.sparse_rows import gather_sparse_rows, is_sparse


def sample(
    data: Data,
    names: Sequence[str],
    num_nodes: int,
    num_edges: int,
    how: str,
    self_loops: bool = True,
) -> Data:
    """A random graph with attributes like those of another.

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
            out[name] = torch.rand(num_edges, generator=random) + 0.1
            continue
        value = data[name]
        if is_row_per_node(data, name):
            out[name] = _like(name, value, num_nodes, random, how)
        elif is_row_per_edge(data, name):
            out[name] = _like(name, value, num_edges, random, how)
        else:
            out[name] = value
    return out


def _like(name: str, value: Tensor, rows: int, random: torch.Generator, how: str) -> Tensor:
    floating = value.is_floating_point()
    if name == "x" and floating and how == "random":
        return torch.randn(rows, *value.shape[1:], generator=random, dtype=value.dtype)
    if name == "edge_weight" and floating:
        return torch.rand(rows, *value.shape[1:], generator=random, dtype=value.dtype) + 0.1
    if value.size(0) == 0:
        return torch.zeros(rows, *value.shape[1:], dtype=value.dtype)
    taken = torch.randint(value.size(0), (rows,), generator=random)
    value = value.cpu()
    out = gather_sparse_rows(value, taken).to_dense() if is_sparse(value) else value[taken]
    if name == "x" and floating and how == "scaled":
        out = out * (torch.rand(out.shape, generator=random, dtype=out.dtype) + 0.5)
    return out


HOW = ("random", "scaled", "real")


class _Recorder(Interpreter):
    """Runs a graph and remembers what each node gave."""

    def __init__(self, net: Module, graph: Graph, weight: Tensor | None, weighted: Any) -> None:
        super().__init__(net, graph=graph)
        self._weight, self._weighted = weight, weighted
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n] = copied(value)
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in self._weighted:
            return super().call_module(target, args, kwargs)
        layer = self.fetch_attr(target)
        given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        return layer(**{**given, "edge_weight": self._weight})


def copied(value: Any) -> Any:
    """The same values, which nobody changes in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(copied, value)) if type(value) in (tuple, list) else value


def record(
    net: Module,
    graph: Graph,
    inputs: dict[str, Any],
    weight: Tensor | None = None,
    weighted: Collection[str] = (),
) -> dict[Node, Any]:
    """What each node of a graph gives, in evaluation mode.

    Args:
        net: The module that was traced.
        graph: The graph.
        inputs: Its inputs by name.
        weight: The weight of each edge. (default: none)
        weighted: The names of the layers that are given it. (default: none)
    """
    recorder = _Recorder(net, graph, weight, weighted)
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    with evaluating(net):
        recorder.run(*[copied(inputs[name]) for name in names])
    return recorder.values


@contextlib.contextmanager
def evaluating(net: Module) -> Iterator[None]:
    """In this context a module is in evaluation mode, and nothing takes a gradient."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
