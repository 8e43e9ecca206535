"""Changes of a traced graph that keep what it computes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from gas.convert.module.changes import VIEWS, is_in_place, is_of_table, views_of
from gas.convert.tracing.scope import dropout, pull, with_own
from gas.convert.tracing.trace import get_module, is_dropout, keeps_statistics
from gas.convert.tracing.traced import Values
from gas.convert.values.known import assign, is_edge_list
from gas.convert.values.modes import TRAINING
from gas.nn import BATCH_NORMS, Dropout, has_hooks, relu_dropout

COMPARISONS = (
    operator.getitem, operator.invert, operator.and_, operator.or_, operator.lt, operator.gt,
    operator.le, operator.ge, operator.eq, operator.ne,
)  # fmt: skip
RELUS = (torch.relu, torch.relu_, torch.nn.functional.relu, "relu", "relu_")
COPIES = ("to", "long", "contiguous", "clone", "cpu", "cuda", "detach")


def redirect_in_place_changes(net: Module, graph: Graph) -> None:
    """Let the nodes of a trace that read a tensor after an in-place change read its result.

    Such a change is ``count.scatter_add_(0, index, one)``, of a tensor that ``forward`` has made.

    Raises:
        ValueError: If a view of a tensor is changed by dropout, or the tensor is read afterwards.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        changed: Any = node.args[0] if node.args else None
        drops, assigns = _drops_in_place(net, node), node.target is assign
        if (assigns or is_in_place(node)) and not drops:
            _check_view(order, node)
        if drops and changed.target in VIEWS:
            raise ValueError(
                f"'{node.name}' applies dropout to a view of a tensor in place, which can't be "
                "followed: leave out 'inplace'"
            )
        is_unread = is_in_place(node) and not node.users and isinstance(changed, Node)
        is_made = is_unread and changed.op in ("call_function", "call_method", "call_module")
        if is_made:
            _replace_in_place(node, changed)
        if drops or assigns or is_made:
            changed.replace_all_uses_with(node, functools.partial(_comes_after, order, node))


def _check_view(order: dict[Node, int], node: Node) -> None:
    """Refuse a change in place of a view of what is read afterwards."""
    views = views_of(node.args[0]) if isinstance(node.args[0], Node) else []
    for source in views[1:]:
        readers = [user for user in source.users if order.get(user, 0) > order[node]]
        if readers:
            raise ValueError(
                f"'{views[0].name}', a part of '{source.name}', is changed in place, and "
                f"'{readers[0].name}' reads '{source.name}' afterwards, which can't be followed: "
                "change the whole tensor, such as x[:, :4] = 0, or compute a new one"
            )


def spread_selected_rows(net: Module, graph: Graph, record: Callable[[], Values]) -> None:
    """Have assignments such as ``x[mask] = f(y[mask])`` take ``f(y)``, of which they select rows.

    Not of a module that takes statistics of rows, such as a batch norm, nor by indices.
    """
    for node in graph.nodes:
        key = node.args[1] if node.target is assign else None
        if not isinstance(key, Node) or getattr(record()[key], "dtype", None) is not torch.bool:
            continue
        for rows in [each for each in graph.nodes if each.target is operator.getitem]:
            whole, index = rows.args
            mask, *columns = index if isinstance(index, tuple) and index else (index,)
            is_row = isinstance(whole, Node) and _is_same_mask(mask, key)
            if is_row and all(map(_is_number, columns)) and _leads_to(net, rows, node):
                node.args = (*node.args[:3], True)
                with graph.inserting_before(rows):
                    every = (whole, (slice(None), *columns))
                    of_all = graph.call_function(operator.getitem, every) if columns else whole
                rows.replace_all_uses_with(of_all)
    erase_unused(graph)


def _is_number(index: Any) -> bool:
    """Return whether an index is a number, or adds a dimension: it doesn't depend on rows."""
    return index is None or type(index) is int


def _is_same_mask(mask: Any, other: Any) -> bool:
    """Return whether two masks are one, or the same comparisons of the same values."""
    if not isinstance(mask, Node) or not isinstance(other, Node):
        return bool(mask == other)
    is_alike = mask.target is other.target and mask.target in COMPARISONS
    return mask is other or (is_alike and all(map(_is_same_mask, mask.args, other.args)))


def _leads_to(net: Module, node: Node, end: Node) -> bool:
    """Return whether all that is computed of a value goes into the values of an assignment."""
    if keeps_statistics(get_module(net, node)):
        return False
    readers = [user is end or _leads_to(net, user, end) for user in node.users]
    return bool(readers) and all(readers)


def replace_node(node: Node, other: Any, readers: Callable[[Node], bool] = lambda _: True) -> None:
    """Replace a node by another node or a constant, for all of its readers or some."""
    for user in list(node.users):
        if readers(user):
            user.replace_input_with(node, other)


def _replace_in_place(node: Node, changed: Node) -> None:
    """Replace an in-place method by its out-of-place form, unless a view of its input is read."""
    views = {changed.target, *(user.target for user in changed.users)}
    name = str(node.target).removesuffix("_")
    if node.op == "call_method" and len(changed.users) > 1 and views.isdisjoint(VIEWS):
        node.target = name if callable(getattr(Tensor, name, None)) else node.target


def erase_unused(graph: Graph, modules: Collection[Node] = ()) -> None:
    """Remove functions without side effects that nothing needs, and such calls of these modules."""
    functions = "call_function", "call_method", "get_attr"
    needed: set[Node] = set()
    found = [each for each in graph.nodes if each.op not in functions and each not in modules]
    writers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if is_in_place(node) and isinstance(node.args[0], Node):
            writers.setdefault(_storage_of(node), []).append(node)
    found += [node for value, nodes in writers.items() if value.op == "get_attr" for node in nodes]
    while found:
        node = found.pop()
        if node not in needed:
            needed.add(node)
            found += [*node.all_input_nodes, *writers.get(_storage_of(node), ())]
    for node in reversed(list(graph.nodes)):
        if node not in needed:
            graph.erase_node(node)


def _storage_of(node: Node) -> Node:
    """Return the value of whose numbers another is a view, or a change in place; or itself."""
    value = views_of(node)[-1]
    while is_in_place(value) and isinstance(value.args[0], Node):
        value = views_of(value.args[0])[-1]
    return value


def changes_in_training(net: Module, node: Node) -> bool:
    """Return whether a function draws numbers, or keeps statistics, in training."""
    module = get_module(net, node)
    parts = () if module is None else tuple(module.modules())
    keeps = keeps_statistics(module)
    drops = any(isinstance(part, torch.nn.modules.dropout._DropoutNd) for part in parts)
    return keeps or drops or is_dropout(net, node)


def _drops_in_place(net: Module, node: Node) -> bool:
    """Return whether a node is a dropout that changes what it is given."""
    if not is_dropout(net, node):
        return False
    module: Any = get_module(net, node)
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False))
    return bool({"inplace": getattr(module, "inplace", False), **given, **node.kwargs}["inplace"])


def read_masks(graph: Graph) -> None:
    """Replace ``x[torch.where(mask)]`` by ``x[mask]``."""
    for node in list(graph.nodes):
        is_where = node.target is torch.where and len(node.args) == 1
        is_nonzero = node.target in (torch.nonzero, "nonzero") and node.kwargs == {"as_tuple": True}
        for user in list(node.users) if is_where or is_nonzero else ():
            if user.target in (operator.getitem, assign) and user.args[1] is node:
                user.update_arg(1, node.args[0])


def is_table_lookup(node: Node) -> bool:
    """Return whether a node looks up rows of a table with a row for each node."""
    return node.target is torch.nn.functional.embedding and is_of_table(node.args[1])


def replace_full_lookups(graph: Graph, values: Mapping[Node, Any]) -> None:
    """Replace ``embedding(arange(num_nodes))`` in a trace by ``embedding(n_id)``."""
    for node in filter(is_table_lookup, graph.nodes):
        ids, rows = node.args
        all_ids = torch.arange(len(values[rows]), device=values[rows].device)
        if torch.equal(values[ids], all_ids):
            node.args = rows.args[-1], rows.args[0]  # Of the layer's own gradient.


def skip_copies(graph: Graph, source: Node) -> None:
    """Replace copies of the edges, such as ``edge_index.to(device)``, by the edges themselves."""
    for node in list(graph.nodes):
        if (end := _find_end(graph, node, source)) is not None:
            node.replace_all_uses_with(end)
        elif _is_copy(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    erase_unused(graph)


def flip_edge_ends(graph: Graph, values: Mapping[Node, Any]) -> None:
    """Replace the ends ``edges[0]`` and ``edges[1]`` by the same ends of ``edges.flip(0)``."""
    for edges in list(graph.nodes):
        ends = [user for user in edges.users if user.target is operator.getitem]
        ends = [end for end in ends if end.args[1] in (0, 1)]
        if ends and is_edge_list(values.get(edges)):
            with graph.inserting_after(edges):
                turned = graph.call_method("flip", (edges, 0))
            for end in ends:
                end.args = (turned, 0 if end.args[1] == 1 else 1)


def _find_end(graph: Graph, node: Node, source: Node) -> Node | None:
    """Return what ``torch.stack([...])[0]`` and ``edge_index.flip(0)[0]`` are made of."""
    made, position = node.args if node.target is operator.getitem else (None, None)
    if not isinstance(made, Node) or position not in (0, 1):
        return None
    is_first = position == 0
    given: Any = made
    while given.target == "flip" and given.args[1:] in ((0,), ([0],)):
        given, is_first = given.args[0], not is_first
    if given.target is torch.stack and given.args[1:] in ((), (0,)) and not given.kwargs:
        return given.args[0][0 if is_first else 1] if len(given.args[0]) == 2 else None
    if given is not source or made is source:
        return None
    with graph.inserting_before(node):
        return graph.call_function(operator.getitem, (source, 0 if is_first else 1))


def _is_copy(node: Node, source: Node) -> bool:
    given = [*node.args[1:], *node.kwargs.values()]
    if node.op == "call_method" and node.target in COPIES and node.args[0] is source:
        return not any(isinstance(each, torch.dtype) and each != torch.long for each in given) and (
            not any(isinstance(each, Node) and "device" not in each.args for each in given)
        )
    if node.target is not torch.stack or any(each not in (0, "dim") for each in given):
        return False
    ends: Any = node.args[0]
    return [(end.target, *end.args) for end in ends if isinstance(end, Node)] == [
        (operator.getitem, source, 0), (operator.getitem, source, 1)
    ]  # fmt: skip


def _comes_after(order: dict[Node, int], node: Node, other: Node) -> bool:
    return order[other] > order[node]


def find_relu_dropouts(net: GraphModule) -> list[Node]:
    """Find the pulls of a written graph between ReLU and dropout, which alone read its rows.

    The three follow one another, so that random numbers are drawn in the same order in one pass.
    """
    found = []
    for node in net.graph.nodes:
        relu, user = node.args[2] if node.target is pull and node.args[3] else None, node.next
        if isinstance(relu, Node) and list(relu.users) == [relu.next] == [node]:
            is_relu = relu.op == "call_module" or relu.target in RELUS
            is_dropout = user.op == "call_module" or user.target is dropout
            if is_relu and is_dropout and list(node.users) == [user]:
                found.append(node)
    return found


def find_own_norms(net: GraphModule) -> set[Module]:
    """Find the batch norms that are only called before the ReLU of rows that are pushed."""
    before = {node.prev.all_input_nodes[0] for node in find_relu_dropouts(net)}
    own: set[Module] = set()
    others: set[Module] = set()
    for node in net.graph.nodes:
        module = get_module(net, node)
        if node in before and isinstance(module, BATCH_NORMS):
            own.add(module)
        elif module is not None:
            others.update(module.modules())
    return {norm for norm in own if others.isdisjoint(norm.modules())}


def dropout_rates(net: Module, pulls: Sequence[Node]) -> dict[Node, float]:
    """Return the probabilities of dropout of those pulls that one pass can compute now.

    ReLU may be in place: conversion refuses modules that read its input again. ``pulls`` are those
    of :func:`find_relu_dropouts`.
    """
    rates = {}
    for node in pulls:
        (user,) = node.users
        if 0.0 < (p := _dropout_rate(net, user)) < 1.0:
            modules = [get_module(net, node.prev), get_module(net, user)]
            is_relu = modules[0] is None or type(modules[0]) is torch.nn.ReLU
            changed = [
                m for m in modules if m is not None and (has_hooks(m) or "forward" in vars(m))
            ]
            if is_relu and not changed:
                rates[node] = p
    return rates


def _dropout_rate(net: Module, node: Node) -> float:
    """Return the probability of :func:`gas.nn.dropout` in training, or 0 for all else."""
    if node.op == "call_module":
        module: Any = get_module(net, node)
        drops = type(module) is Dropout and module.training and not module.inplace
        return float(module.p) if drops else 0.0
    given: Any = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    switch, p = given.get("training"), given.get("p", 0.5)
    drops = isinstance(switch, Node) and switch.target == TRAINING
    return 0.0 if not drops or isinstance(p, Node) else float(p)


def drop_in_one_pass(net: GraphModule, rates: Mapping[Node, float]) -> Graph:
    """Return a written graph in which :func:`gas.nn.relu_dropout` computes ReLU and dropout.

    A batch norm just before them is computed by it, too. ``rates`` are those of
    :func:`dropout_rates`.
    """
    graph = Graph()
    made: dict[Node, Node] = {}
    graph.output(graph.graph_copy(net.graph, made))
    for node, p in rates.items():
        relu, pulled, dropped = (made[each] for each in (node.prev, node, node.next))
        given = relu.all_input_nodes[0]
        with graph.inserting_before(relu):
            rows, is_norm = given.all_input_nodes, isinstance(get_module(net, given), BATCH_NORMS)
            if is_norm and len(rows) == 1 and list(given.users) == [given.next]:
                norm = graph.get_attr(str(given.target))
                both = graph.call_function(relu_dropout, (rows[0], p, norm))
            else:
                both = graph.call_function(relu_dropout, (given, p))
            kept, own = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
        relu.replace_all_uses_with(kept)
        with graph.inserting_before(dropped):
            dropped.replace_all_uses_with(graph.call_function(with_own, (pulled, own)))
        graph.erase_node(dropped)
        graph.erase_node(relu)
        if not given.users:
            graph.erase_node(given)
    return graph
