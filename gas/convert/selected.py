"""Layers that take some of the edges, ``edge_index[:, mask]``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module

from gas.convert.edge_layers import WrappedLayer, bind
from gas.convert.matrices import add_product
from gas.convert.rewrite import erase_unused
from gas.convert.trace import Added, is_layer

SELECTED_EDGES = "_selected_"  # The prefix of the names of such layers.


class OnSomeEdges(WrappedLayer):
    """A layer that takes some of the edges, and their rows.

    A converted model calls the layer itself, on a neighbourhood with these edges.

    Args:
        net: The module that has the layer.
        target: The name of the layer.
        edges: The name of its parameter for the edges.
        rows: The names of its parameters for rows of these edges.
    """

    def __init__(self, net: Module, target: str, edges: str, rows: Collection[str] = ()) -> None:
        super().__init__(net, target, edges)
        self.rows = tuple(rows)

    def forward(self, edge_index: Tensor, edge_mask: Tensor, **given: Any) -> Any:
        """Return what the layer gives."""
        layer: Any = self.layer
        given |= {name: given[name][edge_mask] for name in self.rows}
        return layer(**given, **{self.edges: edge_index[:, edge_mask]})


def wrap_selecting_layers(net: Module, graph: Graph, edges: str) -> Added:
    """Have layers that are given ``edge_index[:, mask]`` select these edges themselves.

    Args:
        net: The module, which gets layers that select edges.
        graph: Its traced graph, which is changed to call them.
        edges: The input that is the adjacency.
    """
    added: Added = {}
    source = next(node for node in graph.nodes if node.target == edges)
    for node in list(graph.nodes):
        if not is_layer(net, node):
            continue
        given = bind(net.get_submodule(str(node.target)), node.args, node.kwargs)
        taken = {
            name: value.args for name, value in given.items()
            if isinstance(value, Node) and value.target is operator.getitem
        }  # fmt: skip
        masks = {name: index for name, (rows, index) in taken.items() if rows is source}
        for name, index in masks.items():
            if len(masks) > 1 or not isinstance(index, tuple) or len(index) != 2:
                continue
            whole, mask = index
            if whole != slice(None) or not isinstance(mask, Node) or _follows(mask, source):
                continue  # Batches have ends of edges in layers alone.
            rows = {key: each for key, (each, index) in taken.items() if index is mask}
            given = {**given, **rows}
            given.pop(name)
            how = functools.partial(
                OnSomeEdges, target=str(node.target), edges=name, rows=tuple(rows)
            )
            key = f"{SELECTED_EDGES}{len(added)}"
            added[key] = how
            replace_layer(net, graph, node, key, how, (source, mask), given)
    if added:
        erase_unused(graph)
    return added


def _follows(node: Node, source: Node) -> bool:
    """Return whether a value is computed of another."""
    return node is source or any(_follows(each, source) for each in node.all_input_nodes)


def call_product(
    net: Module, graph: Graph, target: str, args: Sequence[Node], masks: Sequence[Node],
    added: Added,
) -> Node:  # fmt: skip
    """Write the call of a product with the edges, or with those of a mask.

    Args:
        net: The module, which gets a layer that selects edges.
        graph: The graph to write to.
        target: The name of the product.
        args: The rows, the edges, and their weights, if they have any.
        masks: The mask, if there is one.
        added: Further layers of the module, which that layer is added to.
    """
    if not masks:
        return graph.call_module(target, tuple(args))
    x, edges, *weight = args
    named = dict(zip(("edge_weight",), weight, strict=False))
    name = f"{SELECTED_EDGES}{target}_{len(added)}"
    added[name] = functools.partial(_make_product, target=target, rows=tuple(named))
    net.add_module(name, added[name](net))
    return graph.call_module(name, (edges, *masks), {"x": x, **named})


def _make_product(net: Module, target: str, rows: Collection[str]) -> OnSomeEdges:
    """Return a product with some of the edges, whose layer a module gets."""
    add_product(net, target)
    return OnSomeEdges(net, target, "edge_index", rows)


def replace_layer(
    net: Module, graph: Graph, node: Node, name: str, make: Any, args: tuple[Node, ...],
    given: dict[str, Any],
) -> Node:  # fmt: skip
    """Have a layer that ``make(net)`` returns be called instead of another, under a name."""
    net.add_module(name, make(net))
    with graph.inserting_before(node):
        made = graph.call_module(name, args, given)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made
