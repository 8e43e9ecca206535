"""Linear layers before products with the adjacency, which become one layer."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import Module

from gas.convert.changes import is_in_place
from gas.convert.matrices import FUNCTIONS, METHODS, PRODUCTS, PROJECTED, add_product
from gas.convert.trace import Added, get_module
from gas.convert.traced import OTHER, ROWS, Traced
from gas.nn import LINEAR_LAYERS, ProjectedConv, has_hooks


def merge_projections(traced: Traced) -> Added | None:
    """Merge linear layers into the products that sum up their rows, ``adj_t @ lin(x)``.

    The histories are then those of ``x``, as for the layers of PyG, and the linear layer is
    computed for own rows alone where that is cheaper.

    Returns:
        The layers that the module gets for its own linear layers, as functions of it; ``None`` if
        nothing is merged.
    """
    graph, net = traced.graph, traced.net
    names = {product: name for name, product in PROJECTED.items()}
    found: Added | None = None
    for node in list(graph.nodes):
        name = names.get(PRODUCTS.get(str(node.target), "")) if node.op == "call_module" else None
        rows = node.args[0] if name else None
        if not isinstance(rows, Node) or len(rows.users) > 1 or traced.kinds.get(rows) != ROWS:
            continue
        with graph.inserting_before(node):
            projection = _find_projection(traced, rows)
            if projection is None:
                continue
            x, given = projection
            found = {} if found is None else found
            if rows.op == "call_module":
                reduce, target = PROJECTED[str(name)], str(rows.target)
                name = f"{name}_{len(found)}"
                found[name] = functools.partial(_make_projection, target=target, reduce=reduce)
                net.add_module(name, found[name](net))
            else:
                add_product(net, str(name))
        end, bias = _find_bias(traced, node)
        if bias is not None:
            given["end_bias"] = bias
        with graph.inserting_before(end):
            made = graph.call_module(str(name), (x, *node.args[1:]), given)
        made.meta.update(node.meta)
        traced.exchange(end, made)
        for erased in (rows,) if end is node else (node, rows):
            graph.erase_node(erased)
    return found


def _find_bias(traced: Traced, node: Node) -> tuple[Node, Node | None]:
    """Return the sum of a product and a bias, and the bias; the product if none is added."""
    end = next(iter(node.users), node)
    is_sum = end.target in (operator.add, torch.add) and len(end.args) == 2 and not end.kwargs
    given = [each for each in end.args if each is not node]
    if is_sum and len(node.users) == len(given) == 1 and isinstance(given[0], Node):
        bias, out = traced.values[given[0]], traced.values[node]
        is_plain = traced.kinds[given[0]] == OTHER and isinstance(bias, Tensor)
        if is_plain and bias.dtype == out.dtype and bias.shape == out.shape[1:]:
            return end, given[0]
    return node, None


def _make_projection(net: Module, target: str, reduce: str) -> ProjectedConv:
    """Return the layer of a linear layer of a module."""
    return ProjectedConv(reduce, net, target)


def _find_projection(traced: Traced, rows: Node) -> tuple[Node, dict[str, Any]] | None:
    """Return what rows are a linear function of, and its weight and bias, unless a layer's."""

    def is_matrix(value: Any, kind: str) -> bool:
        is_kind = isinstance(value, Node) and traced.kinds[value] == kind
        found = traced.values[value] if is_kind else None
        return isinstance(found, Tensor) and found.dim() == 2 and found.is_floating_point()

    x: Any = rows.args[0] if rows.args else None
    if isinstance(x, Node) and any(map(is_in_place, x.users)):
        return None  # The layer would read it after the change.
    given: dict[str, Any]
    if not is_matrix(x, ROWS):
        return None
    if rows.op == "call_module":
        layer: Any = get_module(traced.net, rows)
        if type(layer) not in LINEAR_LAYERS or has_hooks(layer) or rows.kwargs:
            return None
        return x, {}
    if rows.target is torch.nn.functional.linear:
        given = dict(zip(("weight", "bias"), rows.args[1:], strict=False)) | rows.kwargs
        given = {name: value for name, value in given.items() if value is not None}
        is_linear = is_matrix(given.get("weight"), OTHER)
        return (x, given) if is_linear else None
    is_method = rows.op == "call_method" and rows.target in METHODS
    if not (is_method or rows.target in FUNCTIONS) or len(rows.args) != 2 or rows.kwargs:
        return None
    if not is_matrix(rows.args[1], OTHER):
        return None
    return x, {"weight": traced.graph.call_method("t", (rows.args[1],))}
