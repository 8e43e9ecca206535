"""Moves what a module computes of the edges alone to the whole graph."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

from gas.convert.edge_dropout import AFTER_DROP, SCALED, check_scale
from gas.convert.edge_values import EdgeValues, has_rows
from gas.convert.kinds import Values, function_name
from gas.convert.known import assign, is_close
from gas.convert.preparation import PREPARED, Preparation
from gas.convert.rewrite import erase_unused, exchange


def _are_equal(one: Any, other: Any) -> bool:
    same = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype
    return same and one.shape == other.shape and is_close(one, other)


class _Extractor:
    """Moves what a traced graph computes of edges alone into a transform."""

    def __init__(self, finder: EdgeValues) -> None:
        self._finder = finder
        self._values: dict[Node, Any] = {node: finder.records[0][node] for node in finder.inside}
        self._made: list[Node] = []  # The attributes.
        self._checks: list[tuple[Node, int | str | None]] = []
        self._edges = self._find_edges()

    def _find_edges(self) -> Node:
        """Find the edges that the values that are read belong to."""
        finder = self._finder
        original = finder.records[0][finder.edges]
        candidates = [
            node for node in finder.inside
            if isinstance(value := self._values[node], Tensor) and not value.is_floating_point()
            and value.dtype == torch.long and value.dim() == 2 and value.size(0) == 2
        ]  # fmt: skip
        chosen: list[Node] = []
        for node in finder.read:
            value = self._values[node]
            if not isinstance(value, Tensor) or value.dtype != torch.long:
                continue
            for edges in [*candidates, finder.edges]:
                whole: Any = self._values.get(edges, original)
                parts = (whole, whole[0], whole[1])
                if any(_are_equal(value, part) for part in parts):
                    chosen.append(edges)
                    break
        kept = [node for node in finder.found if node not in finder.moved]
        uses_original = any(
            user not in finder.found for node in kept for user in node.users
            if node is finder.edges or node.op != "placeholder"
        )  # fmt: skip
        if uses_original or not chosen:
            chosen.append(finder.edges)
        wholes: list[Any] = [self._values.get(edges, original) for edges in chosen]
        if any(not _are_equal(wholes[0], other) for other in wholes[1:]):
            raise ValueError(
                "layers take different graphs, some the edges as they are, and some those of "
                f"'{chosen[0].name}': use layers that all take the same ones"
            )
        for node in finder.read:
            self._check_place(node, wholes[0])
            if self._reduces_left(node):
                check_scale(node, self._values[node], wholes[0], finder.counts[0][0])
        return chosen[0]

    def _check_place(self, node: Node, edges: Any) -> None:
        """Refuse a value that can't be an attribute of the graph."""
        value = self._values[node]
        if isinstance(value, int) and value == edges.size(1):
            return
        is_ends = any(_are_equal(value, part) for part in (edges, edges[0], edges[1]))
        sizes = (edges.size(1), self._finder.counts[0][0])
        if not is_ends and not any(has_rows(value, size) for size in sizes):
            raise ValueError(
                f"'{node.name}' ({function_name(node)}) is computed of the edges, and isn't a row "
                "for each node or edge: compute it before, and give it as an attribute"
            )

    def run(self) -> Preparation:
        """Change the graph, and return the transform."""
        finder = self._finder
        replaced: dict[Node, Any] = {node: self._replace(node) for node in finder.read}
        replaced |= {node: self._values[node] for node in finder.moved if finder.is_plain(node)}
        function = self._write()
        for node, other in replaced.items():
            exchange(node, other, lambda user: user not in finder.moved)
        names = [str(node.target) for node in finder.inputs if node is not finder.edges]
        for node in reversed(finder.inside):
            if node in finder.moved:
                node.users.clear()  # Such as an assignment, which follows what it changes.
                finder.graph.erase_node(node)
        erase_unused(finder.graph)
        for node in finder.inputs:
            if node is not finder.edges and not node.users:
                finder.graph.erase_node(node)
        called = dict.fromkeys(map(function_name, finder.inside))
        described = ", ".join(list(called)[:4]) + (", ..." if len(called) > 4 else "")
        marks = [] if self._made else [f"{PREPARED}edge_0"]
        for name in marks:
            self._placeholder(name)
        names_made = [*map(self._name, self._made), *marks]
        tag = hashlib.sha1(function.code.encode(), usedforsecurity=False).hexdigest()[:6]
        own = {name: name.replace(PREPARED, f"{PREPARED}{tag}_") for name in names_made}
        for node in finder.graph.nodes:
            if node.op == "placeholder" and node.target in own:
                node.target = own[node.target]
        checks = [own.get(str(where), where) for _, where in self._checks]
        keeps_loops = AFTER_DROP in self._edges.meta
        return Preparation(function, names, list(own.values()), checks, described, keeps_loops)

    def _replace(self, node: Node) -> Node:
        """Return the node that gives the value to the rest of the graph."""
        finder, graph = self._finder, self._finder.graph
        value = self._values[node]
        edges: Any = self._values.get(self._edges, finder.records[0][finder.edges])
        for part, position in ((edges, None), (edges[0], 0), (edges[1], 1)):
            if _are_equal(value, part):
                self._checks.append((node, position))
                if position is None:
                    return finder.edges
                with graph.inserting_before(node):
                    return graph.call_function(operator.getitem, (finder.edges, position))
        if (column := self._as_column(value, edges)) is not None:
            position, shape = column
            self._checks.append((node, position))
            with graph.inserting_before(node):
                end = graph.call_function(operator.getitem, (finder.edges, position))
                made = graph.call_method("view", (end, -1, *[1] * len(shape)))
                return graph.call_method("expand", (made, -1, *shape))
        if isinstance(value, int) and value == edges.size(1):
            with graph.inserting_before(node):
                return graph.call_method("size", (finder.edges, 1))
        for other in self._made:
            if _are_equal(self._values[other], value):
                self._checks.append((node, self._name(other)))
                return self._placeholder(self._name(other), node)
        self._made.append(node)
        return self._placeholder(self._name(node), node)

    def _name(self, node: Node) -> str:
        """Return the name of an attribute, by which its rows are those of nodes or edges."""
        edges: Any = self._values.get(self._edges, self._finder.records[0][self._finder.edges])
        kind = "edge" if has_rows(self._values[node], edges.size(1)) else "node"
        return f"{PREPARED}{kind}_{self._made.index(node)}"

    def _as_column(self, value: Any, edges: Tensor) -> tuple[int, tuple[int, ...]] | None:
        """Return which end of the edges a value repeats, and its shape besides the rows."""
        if not has_rows(value, edges.size(1)) or value.dtype != torch.long or not value.numel():
            return None
        for position in (0, 1):
            shape = (-1, *[1] * (value.dim() - 1))
            if torch.equal(value, edges[position].view(shape).expand_as(value)):
                return position, tuple(value.shape[1:])
        return None

    def _placeholder(self, name: str, value: Node | None = None) -> Node:
        """Return the input of a name, which notes what the value notes."""
        graph = self._finder.graph
        found = [node for node in graph.nodes if node.op == "placeholder"]
        made = next((node for node in found if node.target == name), None)
        if made is None:
            with graph.inserting_after(found[-1]):
                made = graph.placeholder(name)
        if value is not None and self._reduces_left(value):
            made.meta[SCALED] = True
        return made

    def _reduces_left(self, node: Node) -> bool:
        """Return whether a value needs a sum over the edges that are left of a dropout."""
        if AFTER_DROP not in node.meta:
            return False
        is_of_nodes = node in self._finder.moved and self._has_rows_of_nodes(node)
        return is_of_nodes or any(map(self._reduces_left, node.all_input_nodes))

    def _has_rows_of_nodes(self, node: Node) -> bool:
        size = self._finder.counts[0][0]
        return any(has_rows(leaf, size) for leaf in tree_leaves(self._values.get(node)))

    def _write(self) -> GraphModule:
        """Write the function that the transform calls."""
        finder, graph = self._finder, Graph()
        edges, count, device = map(graph.placeholder, ("edges", "num_nodes", "device"))
        made: dict[Node, Any] = {finder.edges: edges}
        for node in finder.inputs:
            if node is not finder.edges:
                made[node] = graph.placeholder(str(node.target))

        def value_of(node: Node) -> Any:
            if node in made:
                return made[node]
            if finder.is_count(node):
                return count
            value = finder.records[0][node]
            return device if isinstance(value, torch.device) else value

        for node in finder.inside:
            made[node] = graph.node_copy(node, value_of)
        checked = [node for node, _ in self._checks]
        graph.output(map_arg((self._edges, *self._made, *checked), made.__getitem__))
        return GraphModule(torch.nn.Module(), graph, "Preparation")


def move_preparation(
    graph: Graph, edges: str, records: Sequence[Values], graphs: Sequence[Data]
) -> Preparation | None:
    """Move what a traced graph computes of the edges alone to a transform of the whole graph.

    Args:
        graph: The traced graph of a module, which is changed: it gets the results as inputs.
        edges: The input that is the adjacency.
        records: The values of the graph's nodes on several small graphs.
        graphs: These graphs.

    Returns:
        The transform; ``None`` if a mini-batch has all that it takes.

    Raises:
        ValueError: If layers take different edges.
    """
    try:
        return _extract(EdgeValues(graph, edges, records, graphs, False))
    except ValueError:
        finder = EdgeValues(graph, edges, records, graphs, True)
        if finder.keeps_nothing:
            raise
        return _extract(finder)


def _extract(finder: EdgeValues) -> Preparation | None:
    return _Extractor(finder).run() if finder.read else None


def refuse_assignments(graph: Graph) -> None:
    """Refuse assignments of items outside of a preparation.

    Raises:
        ValueError: Naming the value.
    """
    for node in graph.nodes:
        if node.target is assign:
            raise ValueError(
                f"'{node.args[0]}' is changed by an assignment, [...] = ..., which can't be "
                "followed: use torch.where or masked_fill"
            )
