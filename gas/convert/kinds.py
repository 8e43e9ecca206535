"""Kinds of the values in a traced graph: rows of nodes, of all edges, of some, or none of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from gas.convert.failures import describe_error
from gas.convert.inputs import copy_value, like_tuple
from gas.convert.known import evaluate_node, is_close
from gas.convert.modes import BY_ROW, IN_ONE_MODE, IN_ORDER, LINE, TRAINING
from gas.convert.trace import get_module, is_layer
from gas.nn import reason_inexact

ROWS = "rows"  # Rows of nodes, or their number.
EDGES = "edges"
SELECTED = "selected"  # Rows of some edges, ``edge_index[:, mask]``.
OTHER = "other"
SELECTIONS = ("nonzero", "argwhere", "masked_select")

# Functions that draw a number for each item.
DRAWS = (
    "bernoulli", "rand", "randn", "rand_like", "randn_like", "normal", "uniform", "exponential",
    "dropout",
)  # fmt: skip

Values = Mapping[Node, Any]


def sizes(value: Any) -> list[Any]:
    """Return all sizes in a value that may depend on the size of the graph."""
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, tuple | list):
        return [size for item in value for size in sizes(item)]
    if isinstance(value, dict):
        return [size for item in value.values() for size in sizes(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def is_selection(node: Node, values: Values) -> bool:
    """Return whether a node selects rows by their values, ``rows[mask]`` or ``nonzero(mask)``."""
    if node.target is operator.getitem:
        index: Any = node.args[1]
        found = [values[each] for each in tree_leaves(index) if isinstance(each, Node)]
        return any(isinstance(mask, Tensor) and mask.dtype == torch.bool for mask in found)
    return str(getattr(node.target, "__name__", node.target)) in SELECTIONS


def find_value_kinds(
    graph: Graph, records: Sequence[Values], counts: Sequence[tuple[int, int]]
) -> dict[Node, str]:
    """Find for each node of a traced graph what its value has a row of.

    Args:
        graph: The graph.
        records: The nodes' values on several graphs of different sizes.
        counts: The numbers of nodes and edges of these graphs.

    Raises:
        ValueError: If a size is neither the number of nodes, nor that of edges or of some of them.
    """
    known = dict(zip(zip(*counts, strict=True), (ROWS, EDGES), strict=True))
    out: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        per_graph = zip(*(sizes(values[node]) for values in records), strict=True)
        changing = [found for found in per_graph if len(set(found)) > 1]
        taken = {out[argument] for argument in node.all_input_nodes} - {OTHER}
        if taken and taken <= {EDGES, SELECTED} and is_selection(node, records[0]):
            known |= dict.fromkeys((size for size in changing if size not in known), SELECTED)
        found = {known.get(size, OTHER) for size in changing}
        if len(found) > 1 or OTHER in found:
            raise ValueError(
                f"'{node.name}' ({function_name(node)}) has a size that is neither the number of "
                "nodes nor of edges: mini-batches have other ones, so its meaning isn't known"
            )
        out[node] = found.pop() if found else OTHER
    return out


def function_name(node: Node) -> str:
    """Return the name of the function that a node calls, or what the user writes for it."""
    return node.meta.get(LINE) or str(getattr(node.target, "__name__", node.target))


def row_dim(value: Any, size: int) -> int | None:
    """Return the dimension of ``size`` rows in a value; ``None`` if there is none."""
    if isinstance(value, tuple | list):
        dims = [row_dim(item, size) for item in value]
        return next((dim for dim in dims if dim is not None), None)
    if isinstance(value, Tensor) and size in value.shape:
        return list(value.shape).index(size)
    return None


def row_dims(value: Any, size: int) -> Any:
    """Return the dimension of ``size`` rows in a value, nested as tuples are; ``None`` for none."""
    if isinstance(value, torch.Size):
        return list(value).index(size) if size in value else None
    if isinstance(value, tuple | list):
        return [row_dims(item, size) for item in value]
    return 0 if isinstance(value, int) else row_dim(value, size)


def select_rows(value: Any, size: int, rows: range) -> Any:
    """Return some of the ``size`` rows in a value."""
    if isinstance(value, torch.Size):
        return torch.Size(len(rows) if item == size else item for item in value)
    if isinstance(value, tuple | list):
        return like_tuple(value, [select_rows(item, size, rows) for item in value])
    if isinstance(value, Tensor):
        dim = row_dim(value, size)
        return copy_value(value if dim is None else value.narrow(dim, rows.start, len(rows)))
    is_count = isinstance(value, int) and not isinstance(value, bool) and value == size
    return len(rows) if is_count else value


# Types that functions of rows of nodes or edges may return, besides tensors.
PLAIN = (int, tuple, list, torch.Size, torch.dtype, torch.device, torch.layout, slice, type(None))


def check_rows(
    net: Module,
    graph: Graph,
    kinds: Mapping[Node, str],
    records: Sequence[Values],
    counts: tuple[int, int],
    mode: str = "",
) -> None:
    """Refuse functions outside of layers that don't treat every node, or every edge, alike.

    Each function is run on the first half of the rows, and on the last: the results must be the
    rows of its result on all of them.

    Args:
        net: The module.
        graph: Its graph.
        kinds: The kind of each node's value.
        records: The nodes' values on several graphs.
        counts: The numbers of nodes and edges of the first of these graphs.
        mode: The mode that the error names, such as " in training". (default: none)

    Raises:
        ValueError: Naming the function.
    """
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_layer(net, node):
            continue
        taken = {kinds[argument] for argument in node.all_input_nodes} - {OTHER}
        if kinds[node] == SELECTED:
            cure = "reduce it to a row for each node, as scatter does"
            if _is_drawn(node, set()):
                cure = f"as it is random, {BY_ROW}"
            raise ValueError(
                f"'{node.name}' ({_call_name(net, node)}) selects edges, and isn't summed up by "
                f"nodes: {cure}"
            )
        if len(taken | ({kinds[node]} - {OTHER})) > 1:
            raise ValueError(
                f"'{node.name}' ({_call_name(net, node)}) mixes rows of nodes with rows of edges "
                "outside of a message passing layer, whose edges mini-batches know"
            )
        if not taken or (IN_ONE_MODE in node.meta and function_name(node).strip("_") in DRAWS):
            continue
        _check_type(net, node, records, kinds[node])
        if kinds[node] == OTHER and not isinstance(records[0][node], Tensor):
            continue  # A width, a type, a device.
        size = counts[taken == {EDGES}]
        for rows in (range(size // 2), range(size - size // 2, size)):
            _check_node(net, node, kinds, records[0], size, rows, mode)


def _is_drawn(node: Node, seen: set[Node]) -> bool:
    """Return whether a value is computed of random numbers."""
    if node in seen:
        return False
    seen.add(node)
    is_drawn = function_name(node).strip("_") in (*DRAWS, *IN_ORDER)
    return is_drawn or any(_is_drawn(each, seen) for each in node.all_input_nodes)


def _call_name(net: Module, node: Node) -> str:
    module = get_module(net, node)
    return type(module).__name__ if module is not None else function_name(node)


def _check_type(net: Module, node: Node, records: Sequence[Values], kind: str) -> None:
    values = [record[node] for record in records]
    value = values[0]
    if isinstance(value, bool | float | str):
        if any(other != value for other in values[1:]):
            raise ValueError(
                f"'{node.name}' ({_call_name(net, node)}) depends on how many nodes or edges there "
                "are, and mini-batches have others: pass the number as a constant"
            )
    elif not isinstance(value, (Tensor, *PLAIN)):
        raise ValueError(
            f"'{node.name}' ({_call_name(net, node)}) returns a {type(value).__name__}, which "
            "can't be followed: return tensors, alone or in a tuple"
        )


def _check_node(
    net: Module,
    node: Node,
    kinds: Mapping[Node, str],
    values: Values,
    size: int,
    rows: range,
    mode: str,
) -> None:
    module = get_module(net, node)
    given: dict[Node, Any] = {}

    def take(argument: Node) -> Any:
        has_rows = kinds[argument] != OTHER  # Others may have as many rows by chance.
        return select_rows(values[argument], size if has_rows else -1, rows)

    def cut(argument: Node) -> Any:
        return given.setdefault(argument, take(argument))

    reason = reason_inexact(module) if module is not None else ""
    why = reason or (
        "looks at more than one node or edge at a time, as attention to all nodes and statistics "
        "of all do: attend along edges, as TransformerConv does, or treat each alike"
    )
    if function_name(node) in IN_ORDER:
        why = f"draws an order of all rows: {BY_ROW}"
    elif not mode and function_name(node).strip("_") in DRAWS:
        why = "draws random numbers in evaluation: draw them in training alone, if self.training"
    try:
        out = evaluate_node(net, node, cut)
        expected = select_rows(values[node], size, rows)
        exact = not reason and kinds[node] != OTHER and is_close(out, expected)
    except Exception as error:
        exact, why = False, f"fails with fewer rows: {describe_error(error)}"
    what = _call_name(net, node)
    draws = (
        not mode and node.meta.get(IN_ONE_MODE) == TRAINING and function_name(node) not in IN_ORDER
    )
    if not exact and draws:
        again = [evaluate_node(net, node, values.__getitem__) for _ in range(2)]
        exact = not is_close(*again)  # It draws; it is checked in training, of fixed numbers.
    if not exact:
        raise ValueError(f"'{node.name}' ({what}) isn't exact on mini-batches{mode}: it {why}")
    for argument, value in given.items():
        if len(argument.users) > 1 and not is_close(value, take(argument)):
            raise ValueError(
                f"'{node.name}' ({what}) changes '{argument.name}' in place, which another "
                "function reads: leave out 'inplace', or use the function that returns a new tensor"
            )
