"""Edges that a module drops in training, by ``torch_geometric.utils.dropout_edge``."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node
from torch.nn import Module

from gas.convert.known import is_about_shape
from gas.convert.modes import EDGE_DROPOUTS, TRAINING
from gas.convert.rewrite import exchange
from gas.convert.trace import is_layer

DROP = "drops_edges"  # What a layer's node notes: the position of the call, and its probability.
AFTER_DROP = "after_drop"  # What a value notes that the module computes of the edges that are left.


def take_edge_dropout(net: Module, graph: Graph, edges: str) -> int:
    """Remove the dropout of edges from a traced graph, and note it at the layers that take them.

    What is computed of the edges that are left, such as their normalisation, is then that of all
    edges, and notes it.

    Args:
        net: The module.
        graph: Its traced graph.
        edges: The input that is the adjacency.

    Returns:
        The number of these layers.

    Raises:
        ValueError: If edges are dropped in a way that mini-batches can't.
    """
    calls = [node for node in graph.nodes if node.target in EDGE_DROPOUTS]
    of_rows = _find_rows(graph, edges)
    noted: dict[Node, tuple[int, float]] = {}
    for position, call in enumerate(calls):
        given = _arguments(call)
        if given.get("training", True) is False:
            continue
        _check(call, given)
        drop = position, float(given.get("p", 0.5))
        for layer in _find_layers(net, graph, call, of_rows):
            if layer in noted:
                raise ValueError(
                    f"'{layer.name}' takes edges of several calls of '{call.name}': drop them once"
                )
            noted[layer] = drop
            layer.meta[DROP] = drop
    for call in calls:
        _remove(graph, call, _arguments(call))
    return len(noted)


def _arguments(call: Node) -> dict[str, Any]:
    """Return a call's arguments by name."""
    names = EDGE_DROPOUTS[call.target]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def _check(call: Node, given: dict[str, Any]) -> None:
    if not isinstance(given.get("training", True), Node):
        raise ValueError(f"'{call.name}' drops in evaluation, too: pass training=self.training")
    if isinstance(given.get("p", 0.5), Node):
        raise ValueError(f"'{call.name}' takes a probability that is computed: pass a number")


def _find_rows(graph: Graph, edges: str) -> set[Node]:
    """Find the values that depend on rows of nodes, not only on how many there are."""
    out: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            name = str(node.target)
            if name not in (edges, TRAINING) and not name.startswith("edge_"):
                out.add(node)
        elif not is_about_shape(node) and not out.isdisjoint(node.all_input_nodes):
            out.add(node)
    return out


def _find_layers(net: Module, graph: Graph, call: Node, of_rows: set[Node]) -> list[Node]:
    """Find the layers that take the edges that a call leaves.

    Raises:
        ValueError: If anything else takes them.
    """
    kept, layers = {call}, []
    left: set[Node] = set()  # The edges themselves, and what is computed of them.
    for node in graph.nodes:
        if kept.isdisjoint(node.all_input_nodes) or is_about_shape(node):
            continue
        if is_layer(net, node):
            layers.append(node)
        elif node in of_rows or node.op == "output":
            raise ValueError(
                f"'{node.name}' takes edges after '{call.name}', and isn't a layer: pass messages "
                "by a layer, such as MessagePassing or SimpleConv"
            )
        else:
            kept.add(node)
            if (node.target, *node.args) == (operator.getitem, call, 0):
                left.add(node)
            elif not left.isdisjoint(node.all_input_nodes):
                node.meta[AFTER_DROP] = True
                left.add(node)
    return layers


def _remove(graph: Graph, call: Node, given: dict[str, Any]) -> None:
    """Have readers of a call read all edges, and the attributes of all edges."""
    has_attribute = "edge_attr" in EDGE_DROPOUTS[call.target]
    for part in list(call.users):
        position = part.args[1] if part.target is operator.getitem else None
        if position == 0:
            exchange(part, given["edge_index"])
        elif position == 1 and not has_attribute:
            for user in list(part.users):
                if user.target is not operator.getitem or user.args[1] is not part:
                    raise ValueError(
                        f"'{user.name}' takes the mask of '{call.name}', which selects rows of "
                        "edges alone: edge_weight[mask]"
                    )
                exchange(user, user.args[0])
                graph.erase_node(user)
        elif position == 1:
            exchange(part, given.get("edge_attr"))
        else:
            raise ValueError(f"'{part.name}' takes the pair that '{call.name}' returns")
        graph.erase_node(part)
    graph.erase_node(call)
