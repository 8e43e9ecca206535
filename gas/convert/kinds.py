"""What each value in a traced graph is: rows of nodes, rows of edges, or neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.nn import Module

from gas.convert.layers import is_close
from gas.convert.sample import copied
from gas.convert.trace import is_layer, module_of
from gas.scalable.exact import why_inexact

ROWS = "rows"  # Of nodes: a tensor with a row for each, or how many there are.
EDGES = "edges"
OTHER = "other"

Values = Mapping[Node, Any]


def sizes(value: Any) -> list[Any]:
    """Everything in a value that may grow with the graph, as far as it can be counted."""
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, tuple | list):
        return [size for item in value for size in sizes(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def kinds_of(
    graph: Graph, records: Sequence[Values], counts: Sequence[tuple[int, int]]
) -> dict[Node, str]:
    """What each node of a graph gives.

    Args:
        graph: The graph.
        records: What the nodes gave on several graphs of different sizes.
        counts: The nodes and edges of each of them.

    Raises:
        ValueError: If something has a size that is neither.
    """
    out = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        per_graph = [sizes(values[node]) for values in records]
        changing = [
            position for position, found in enumerate(zip(*per_graph, strict=True))
            if len(set(found)) > 1
        ]  # fmt: skip
        found = {
            ROWS if all(s[p] == n for s, (n, _) in zip(per_graph, counts, strict=True))
            else EDGES if all(s[p] == e for s, (_, e) in zip(per_graph, counts, strict=True))
            else OTHER
            for p in changing
        }  # fmt: skip
        if len(found) > 1 or OTHER in found:
            raise ValueError(
                f"'{node.name}' ({describe(node)}) has a size that is neither the number of nodes "
                "nor of edges: mini-batches have other ones, so its meaning isn't known"
            )
        out[node] = found.pop() if found else OTHER
    return out


def describe(node: Node) -> str:
    """What a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def row_dim(value: Any, num_nodes: int) -> int | None:
    """In which dimension a value has a row for each node; ``None`` if in none."""
    if isinstance(value, tuple | list):
        dims = [row_dim(item, num_nodes) for item in value]
        return next((dim for dim in dims if dim is not None), None)
    if isinstance(value, Tensor) and num_nodes in value.shape:
        return list(value.shape).index(num_nodes)
    return None


def first(value: Any, num_nodes: int, count: int) -> Any:
    """The first ``count`` of the rows of nodes in a value."""
    if isinstance(value, tuple | list):
        return type(value)(first(item, num_nodes, count) for item in value)
    if isinstance(value, Tensor):
        dim = row_dim(value, num_nodes)
        return copied(value if dim is None else value.narrow(dim, 0, count))
    is_count = isinstance(value, int) and not isinstance(value, bool) and value == num_nodes
    return count if is_count else value


def check_rows(net: Module, graph: Graph, kinds: Mapping[Node, str], values: Values) -> None:
    """Refuses what doesn't treat each node alike, outside of message passing layers.

    Each function is run on the first rows alone, which must give the first rows of its result.

    Raises:
        ValueError: If one doesn't, naming it.
    """
    num_nodes = max(size for node, kind in kinds.items() if kind == ROWS
                    for size in sizes(values[node])[:1])  # fmt: skip
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_layer(net, node):
            continue
        taken = {kinds[argument] for argument in node.all_input_nodes}
        if ROWS not in taken and EDGES not in taken:
            continue
        _check(net, node, taken, kinds, values, num_nodes)


def _check(
    net: Module,
    node: Node,
    taken: set[str],
    kinds: Mapping[Node, str],
    values: Values,
    num_nodes: int,
) -> None:
    module = module_of(net, node)
    what = type(module).__name__ if module is not None else describe(node)
    if EDGES in taken and (ROWS in taken or kinds[node] == ROWS):
        raise ValueError(
            f"'{node.name}' ({what}) mixes rows of nodes with rows of edges outside of a message "
            "passing layer, whose edges mini-batches know"
        )
    if EDGES in taken:
        return  # Every edge is in exactly one mini-batch, with all that belongs to it.
    if kinds[node] == OTHER and not isinstance(values[node], Tensor):
        return  # A width, a type, a device.
    count = num_nodes // 2

    given: dict[Node, Any] = {}

    def cut(argument: Node) -> Any:
        return given.setdefault(argument, first(values[argument], num_nodes, count))

    reason = why_inexact(module) if module is not None else ""
    why = reason or "looks at more than one node at a time"
    try:
        out = run(net, node, cut)
        exact = (
            not reason
            and kinds[node] == ROWS
            and is_close(out, first(values[node], num_nodes, count))
        )
    except Exception as error:
        exact, why = False, f"fails with fewer rows, {type(error).__name__}: {error}"
    if not exact:
        raise ValueError(f"'{node.name}' ({what}) isn't exact on mini-batches: it {why}")
    for argument, value in given.items():
        if len(argument.users) > 1 and not is_close(
            value, first(values[argument], num_nodes, count)
        ):
            raise ValueError(
                f"'{node.name}' ({what}) changes '{argument.name}' in place, which something else "
                "reads: leave out 'inplace', or use the function that returns a new tensor"
            )


def run(net: Module, node: Node, value_of: Callable[[Node], Any]) -> Any:
    """What a node gives for other values of its arguments."""
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    if node.op == "call_module":
        return net.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
