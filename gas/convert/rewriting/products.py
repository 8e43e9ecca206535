"""Replace messages and linear layers by fused products with the adjacency."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn import Module

from gas.convert.module.changes import is_in_place
from gas.convert.rewriting.layers import SELECTED_EDGES, MaskedEdgeLayer
from gas.convert.rewriting.messages import MessageLayer
from gas.convert.tracing.trace import get_module
from gas.convert.tracing.traced import EDGES, OTHER, ROWS, Traced, Values
from gas.convert.values.edge_layers import Propagation
from gas.convert.values.known import is_close
from gas.convert.values.traced_matrix import (
    FUNCTIONS,
    METHODS,
    PRODUCTS,
    PROJECTED,
    add_product,
    add_products,
)
from gas.graph import WEIGHT
from gas.nn import LINEAR_LAYERS, ProjectedConv, SimpleConv, has_hooks
from gas.scalable import preserve_modes


def replace_sums(traced: Traced) -> bool:
    """Replace messages that only weight neighbours' rows by products with the adjacency.

    Products are fused. Messages are compared with each of them for random numbers, in training and
    in evaluation.

    Returns:
        ``True`` if there are such sums.
    """
    is_replaced = False
    graph, kinds, record, edges = traced.graph, traced.kinds, traced.values, traced.edges
    for node in list(graph.nodes):
        module = get_module(traced.net, node)
        inner = module.layer if isinstance(module, MaskedEdgeLayer) else module
        if not isinstance(inner, MessageLayer | Propagation) or node.args[:1] != (edges,):
            continue
        given = [each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, Node)]
        rows = [each for each in given if kinds[each] == ROWS]
        weights = [each for each in given if kinds[each] == EDGES]
        masks = [each for each in weights if getattr(record[each], "dtype", None) is torch.bool][:1]
        weights = [each for each in weights if each not in masks]
        is_sum = kinds[node] == ROWS and len(rows) == 1 and len(weights) <= 1
        if not is_sum or len(given) != len(rows) + len(weights) + len(masks):
            continue
        name = _find_product(node, module, inner, rows + weights, masks, record)
        if name:
            is_replaced = True
            with graph.inserting_before(node):
                flat = [graph.call_method("view", (weight, -1)) for weight in weights]
                made = call_product(traced, name, (rows[0], edges, *flat), masks)
            made.meta.update(node.meta)
            traced.replace_node(node, made)
    add_products(traced.net, graph)
    return is_replaced


def _find_product(
    node: Node, module: Any, inner: Any, given: list[Node], masks: list[Node], record: Values
) -> str:
    """Return the name of the product that equals a layer of messages; "" if none does."""
    edges: Any = node.args[0]
    values = [record[each] for each in (edges, *given)]
    if not all(isinstance(each, Tensor) and each.layout == torch.strided for each in values):
        return ""
    edge_index, x, *weight = values
    if x.dim() != 2 or any(each.numel() != edge_index.size(1) for each in weight):
        return ""
    if not all(each.is_floating_point() for each in (x, *weight)):
        return ""
    parts: Any = inner.layer if isinstance(inner, Propagation) else inner.function
    kept = record[masks[0]] if masks else slice(None)
    names = dict(PRODUCTS)
    try:
        with preserve_modes(parts), torch.no_grad():
            for training, scale in ((True, 1.0), (False, 1e6), (True, 1e-3)):  # Limits would show.
                parts.train(training)
                drawn = [scale * torch.randn_like(each) for each in (x, *weight)]
                new = {**record, **dict(zip(given, drawn, strict=True))}
                out = module(*map_arg(node.args, new.get), **map_arg(node.kwargs, new.get))
                flat = drawn[0], edge_index[:, kept], *(each.view(-1)[kept] for each in drawn[1:])
                for name, reduce in list(names.items()):
                    if not is_close(out, SimpleConv(aggr=reduce)(*flat)):
                        del names[name]
    except Exception:  # Messages may raise anything for random numbers; they are none then.
        return ""
    return next(iter(names), "")


def call_product(traced: Traced, target: str, args: Sequence[Node], masks: Sequence[Node]) -> Node:
    """Insert a call of a product ``target`` with the edges, or with those of a mask.

    ``args`` are the rows, the edges, and their weights, if they have any.
    """
    if not masks:
        return traced.graph.call_module(target, tuple(args))
    x, edges, *weight = args
    named = dict(zip((WEIGHT,), weight, strict=False))
    name = f"{SELECTED_EDGES}{target}_{len(traced.added)}"
    traced.add_layer(name, _make_product, target=target, rows=tuple(named))
    return traced.graph.call_module(name, (edges, *masks), {"x": x, **named})


def _make_product(net: Module, target: str, rows: Collection[str]) -> MaskedEdgeLayer:
    """Return a product with some of the edges, whose layer a module gets."""
    add_product(net, target)
    return MaskedEdgeLayer(net, target, "edge_index", rows)


def merge_projections(traced: Traced) -> bool:
    """Merge each linear layer with the sum over neighbours that follows it, ``adj_t @ lin(x)``.

    The histories are then those of ``x``, as for the layers of PyG, and the linear layer is
    computed for own rows alone where that is cheaper.

    Returns:
        ``True`` if some were merged.
    """
    graph, net = traced.graph, traced.net
    names = {product: name for name, product in PROJECTED.items()}
    count, is_merged = 0, False
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
            if rows.op == "call_module":
                reduce, name = PROJECTED[str(name)], f"{name}_{count}"
                count += 1
                traced.add_layer(name, _make_projection, target=str(rows.target), reduce=reduce)
            else:
                add_product(net, str(name))
        end, bias = _find_bias(traced, node)
        if bias is not None:
            given["end_bias"] = bias
        with graph.inserting_before(end):
            made = graph.call_module(str(name), (x, *node.args[1:]), given)
        made.meta.update(node.meta)
        traced.replace_node(end, made)
        for erased in (rows,) if end is node else (node, rows):
            graph.erase_node(erased)
        is_merged = True
    return is_merged


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
