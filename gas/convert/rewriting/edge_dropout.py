"""Edges that a module drops in training, by ``torch_geometric.utils.dropout_edge``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from gas.convert.rewriting.rewrite import replace_node
from gas.convert.tracing.trace import is_layer
from gas.convert.tracing.traced import Traced, function_name
from gas.convert.values.edge_layers import DROP
from gas.convert.values.known import is_about_shape, is_close
from gas.convert.values.modes import EDGE_DROPOUTS, TRAINING
from gas.graph import is_row_per_edge

AFTER_DROP = "after_drop"  # What a value notes that the module computes of the edges that are left.
SCALED = "scaled"  # What weights note that grow as edges are dropped, as those of a mean do.


def take_edge_dropout(traced: Traced) -> None:
    """Remove the dropout of edges from a traced graph, and note it at the layers that take them.

    What is computed of the edges that are left, such as their normalisation, is then that of all
    edges, and notes it.

    Raises:
        ValueError: If edges are dropped in a way that mini-batches can't.
    """
    calls = [node for node in traced.graph.nodes if node.target in EDGE_DROPOUTS]
    of_rows = _find_rows(traced)
    for position, call in enumerate(calls):
        given = _arguments(call)
        if given.get("training", True) is False:
            continue
        _check(call, given)
        drop = position, float(given.get("p", 0.5)), False
        for layer in _find_layers(traced, call, of_rows):
            if DROP in layer.meta:
                raise ValueError(
                    f"'{layer.name}' takes edges of several calls of '{call.name}': drop them once"
                )
            layer.meta[DROP] = drop
    for call in calls:
        _remove(traced.graph, call, _arguments(call))


def _arguments(call: Node) -> dict[str, Any]:
    """Return a call's arguments by name."""
    names = EDGE_DROPOUTS[call.target]
    return dict(zip(names, call.args, strict=False)) | call.kwargs


def _check(call: Node, given: dict[str, Any]) -> None:
    if not isinstance(given.get("training", True), Node):
        raise ValueError(f"'{call.name}' drops in evaluation, too: pass training=self.training")
    if isinstance(given.get("p", 0.5), Node):
        raise ValueError(f"'{call.name}' takes a probability that is computed: pass a number")


def _find_rows(traced: Traced) -> set[Node]:
    """Find the values that depend on rows of nodes, not only on how many there are."""
    out: set[Node] = set()
    inputs, data = traced.inputs, traced.graphs[0]
    of_edges = [name for name in inputs.names if is_row_per_edge(data, name)]
    others = (inputs.edges, TRAINING, *of_edges)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            if str(node.target) not in others:
                out.add(node)
        elif not is_about_shape(node) and not out.isdisjoint(node.all_input_nodes):
            out.add(node)
    return out


def _find_layers(traced: Traced, call: Node, of_rows: set[Node]) -> list[Node]:
    """Find the layers that take the edges that a call leaves.

    Raises:
        ValueError: If anything else takes them, or a layer takes others as well.
    """
    kept, layers = {call}, []
    left: set[Node] = set()  # The edges themselves, and what is computed of them.
    of_edges: set[Node] = set()  # What is computed of edges before the call, or of those left.
    for node in traced.graph.nodes:
        inputs = node.all_input_nodes
        is_known = node in of_rows or is_about_shape(node)
        if node is traced.edges or not (is_known or of_edges.isdisjoint(inputs)):
            of_edges.add(node)
        if kept.isdisjoint(inputs) or is_about_shape(node):
            continue
        if is_layer(traced.net, node):
            if any(each in of_edges and each not in kept for each in inputs):
                raise ValueError(
                    f"'{node.name}' takes edges, and what '{call.name}' leaves of them: give it "
                    "one or the other"
                )
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
            elif not left.isdisjoint(inputs):
                node.meta[AFTER_DROP] = True
                left.add(node)
    return layers


def _remove(graph: Graph, call: Node, given: dict[str, Any]) -> None:
    """Replace a dropout of edges, for all readers, by all edges and their attributes."""
    has_attribute = "edge_attr" in EDGE_DROPOUTS[call.target]
    for part in list(call.users):
        position = part.args[1] if part.target is operator.getitem else None
        if position == 0:
            replace_node(part, given["edge_index"])
        elif position == 1 and not has_attribute:
            for user in list(part.users):
                if user.target is not operator.getitem or user.args[1] is not part:
                    raise ValueError(
                        f"'{user.name}' takes the mask of '{call.name}', which selects rows of "
                        "edges alone: edge_weight[mask]"
                    )
                replace_node(user, user.args[0])
                graph.erase_node(user)
        elif position == 1:
            replace_node(part, given.get("edge_attr"))
        else:
            raise ValueError(f"'{part.name}' takes the pair that '{call.name}' returns")
        graph.erase_node(part)
    graph.erase_node(call)


def check_scale(node: Node, value: Tensor, edges: Tensor, num_nodes: int) -> None:
    """Refuse weights that a division by ``1 - p`` doesn't correct for dropped edges.

    ``value`` is that of ``node`` on a small graph, computed from the remaining edges.

    Raises:
        ValueError: If it is neither a mean's weight, nor that of a symmetric normalisation.
    """
    src, dst = edges
    ones = torch.ones(src.numel(), dtype=value.dtype, device=value.device)
    known = []
    for ends in (src, dst):
        count = ones.new_zeros(num_nodes).index_add_(0, ends, ones)
        count = count.masked_fill(count == 0, float("inf"))
        known += [1 / count[src], 1 / count[dst], (count[src] * count[dst]).rsqrt()]
    if not any(value.numel() == each.numel() and is_close(value.view(-1), each) for each in known):
        raise ValueError(
            f"'{node.name}' ({function_name(node)}) is computed of the edges that are left of a "
            "dropout, and a mini-batch doesn't have all edges of its halo: compute it of all "
            "edges, before dropout_edge"
        )
