"""Changes of a traced graph that keep what it computes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection

import torch
from torch.fx import Graph, Node
from torch.nn import Module

from gas.convert.known import assign
from gas.nn import SimpleConv

PRODUCT = "_product"  # The name of the layer that multiplies by the adjacency.
PRODUCTS = (operator.matmul, torch.matmul, torch.mm, torch.sparse.mm, torch.spmm)
PRODUCT_METHODS = ("matmul", "mm", "spmm")


def replace_products(net: Module, graph: Graph, edges: str) -> None:
    """Replace products with the adjacency, ``adj_t @ x``, by calls of a layer.

    Args:
        net: The module, which gets the layer.
        graph: Its traced graph.
        edges: The input that is the adjacency.
    """
    for node in list(graph.nodes):
        is_product = (node.op == "call_function" and node.target in PRODUCTS) or (
            node.op == "call_method" and node.target in PRODUCT_METHODS
        )
        if not is_product or len(node.args) != 2 or node.kwargs:
            continue
        matrix, x = node.args
        if isinstance(matrix, Node) and (matrix.op, matrix.target) == ("placeholder", edges):
            with graph.inserting_before(node):
                made = graph.call_module(PRODUCT, (x, matrix))
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            add_product(net)


def add_product(net: Module) -> None:
    """Give a module the layer that multiplies by the adjacency."""
    setattr(net, PRODUCT, SimpleConv(aggr="add"))


def follow_changes(graph: Graph) -> None:
    """Have later functions read what a function has changed in place from its result.

    Such as ``count.scatter_add_(0, index, one)``, of a tensor that was made before.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        name = str(node.target)
        in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
        if not in_place or node.users or not isinstance(node.args[0], Node):
            continue
        changed = node.args[0]
        if changed.op in ("call_function", "call_method"):
            changed.replace_all_uses_with(node, functools.partial(_comes_after, order, node))


def erase_unused(graph: Graph, modules: Collection[Node] = ()) -> None:
    """Remove functions whose results nobody reads, and that change nothing.

    Args:
        graph: A traced graph.
        modules: Calls of modules that may be removed, too.
    """
    for node in reversed(list(graph.nodes)):
        changes = node.target is assign or (
            node.op == "call_method" and str(node.target).endswith("_")
        )
        changed = node.args[0] if changes else None
        is_read = isinstance(changed, Node) and (
            changed.op in ("placeholder", "get_attr") or len(changed.users) > 1
        )
        is_function = node.op in ("call_function", "call_method", "get_attr")
        if (is_function or node in modules) and not node.users and not is_read:
            graph.erase_node(node)


def _comes_after(order: dict[Node, int], node: Node, other: Node) -> bool:
    return order[other] > order[node]
