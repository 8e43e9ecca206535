"""Messages that a module passes by itself: gathered by edges, and summed up by nodes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from gas.convert.rewriting.rewrite import changes_in_training, erase_unused
from gas.convert.tracing.trace import is_layer
from gas.convert.tracing.traced import EDGES, ROWS, SELECTED, Traced, function_name
from gas.convert.values.edge_layers import DirectionError, EdgeLayer
from gas.convert.values.known import FACTORIES

MESSAGES = "_messages_"  # The prefix of the names of such layers.
# Functions of tensors whose numbers they don't read.
SHAPED = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, *FACTORIES)
SHAPED_METHODS = ("new_zeros", "new_ones", "new_full", "new_empty")


class MessageLayer(EdgeLayer):
    """Layer that computes messages along edges, and reduces them for every node.

    Its function, of the edges and of further values by name, is a ``graph`` of modules of ``net``.
    """

    def __init__(self, net: Module, graph: Graph, output: str) -> None:
        super().__init__()
        self.output = output
        # Not a child: its modules are those of ``net``, under their names there.
        object.__setattr__(self, "function", GraphModule(net, graph, "Messages"))

    def extra_repr(self) -> str:
        """Return the name of the result."""
        return self.output

    def forward(self, edge_index: Any, **given: Any) -> Any:
        """Return a row for every node."""
        function: Any = self.function
        return function(edge_index, **given)


class _Writer:
    """Writer of the functions of a traced graph's messages."""

    def __init__(self, traced: Traced) -> None:
        self._net, self._edges, self._kinds = traced.net, traced.edges, traced.kinds
        self._record, self._num_nodes = traced.values, traced.counts[0][0]
        self._order = {node: position for position, node in enumerate(traced.graph.nodes)}
        self.reduced = {node for node in traced.graph.nodes if self._is_reduction(node)}
        self.shared: set[Node] = set()
        self.shared = self._find_shared()

    def _is_reduction(self, node: Node) -> bool:
        """Return whether a node makes rows of nodes from rows of edges, or is a layer on some."""
        if node.op == "output" or self._kinds[node] != ROWS:
            return False
        kinds = {self._kinds[argument] for argument in node.all_input_nodes}
        reduced = {SELECTED} if is_layer(self._net, node) else {EDGES, SELECTED}
        return not kinds.isdisjoint(reduced) and isinstance(self._record[node], Tensor)

    def _is_inside(self, node: Node, readers: set[Node]) -> bool:
        """Return whether a value is computed in the function that the readers are part of."""
        if node.op not in ("call_function", "call_method", "call_module"):
            return False
        if is_layer(self._net, node) or node in self.shared:
            return False
        if self._kinds[node] == SELECTED:
            return True
        if self._kinds[node] == EDGES and isinstance(self._record[node], Tensor):
            return self._follows_from_nodes(node)
        if not isinstance(self._record[node], Tensor):
            return True  # A size.
        if self._is_blank(node):
            return True
        # Own rows that are gathered by the destination, such as the largest of a node's messages.
        is_gathered = any(
            is_layer(self._net, user)
            or (
                self._kinds.get(user) in (EDGES, SELECTED)
                and not any(self._is_end(each, 1) for each in user.all_input_nodes)
            )
            for user in node.users
        )
        return (
            self._kinds[node] == ROWS and self._is_reduced(node) and not is_gathered
            and not any(map(self._is_sized, readers))
        )  # fmt: skip

    def _is_blank(self, node: Node) -> bool:
        """Return whether a value follows from shapes alone, such as zeros of another type."""
        if node.target in (*SHAPED, *SHAPED_METHODS):
            return True
        return node.op in ("call_function", "call_method") and all(
            not isinstance(self._record[each], Tensor) or self._is_blank(each)
            for each in node.all_input_nodes
        )

    def _is_sized(self, node: Node) -> bool:
        """Return whether a node reads the shape of its argument, not the values."""
        is_tensor = isinstance(self._record.get(node), Tensor)
        return not is_tensor or node.target in (*SHAPED, *SHAPED_METHODS)

    def _is_count(self, node: Node) -> bool:
        value = self._record[node]
        return type(value) is int and value == self._num_nodes

    def _follows_from_nodes(self, node: Node) -> bool:
        """Return whether a row of an edge needs rows of nodes, or the edge's ends."""
        return any(
            argument is self._edges or self._kinds[argument] == ROWS
            or (argument.op != "placeholder" and self._kinds[argument] == EDGES
                and self._follows_from_nodes(argument))
            for argument in node.all_input_nodes
        )  # fmt: skip

    def _is_reduced(self, node: Node) -> bool:
        """Return whether rows of nodes come from messages, by functions alone."""
        if node in self.reduced:
            return True
        is_function = node.op in ("call_function", "call_method")
        rows = [each for each in node.all_input_nodes if self._kinds[each] == ROWS]
        return is_function and bool(rows) and any(map(self._is_reduced, rows))

    def _is_end(self, node: Node, end: int) -> bool:
        """Return whether a value is the sources, or destinations, of edges, all or selected."""
        value = self._record[node]
        if not isinstance(value, Tensor) or value.dtype != torch.long or node is self._edges:
            return False
        if self._kinds[node] == SELECTED:
            source, *rest = node.args
            is_end = node.target is operator.getitem and rest == [end] and value.dim() == 1
            return is_end or (isinstance(source, Node) and self._is_end(source, end))
        ends = self._record[self._edges][end]
        return (
            self._kinds[node] == EDGES and value.numel() > 0
            and value.numel() % ends.numel() == 0
            and torch.equal(value.reshape(ends.numel(), -1)[:, 0], ends)
        )  # fmt: skip

    def sums_at_sources(self, node: Node) -> bool:
        """Return whether a value has a row for each source of edges, not for each destination."""
        sources, destinations = self._record[self._edges]
        return not torch.equal(sources, destinations) and any(
            self._is_end(each, 0) for each in node.all_input_nodes
        )

    def _find_shared(self) -> set[Node]:
        """Find the rows of edges that several sums need, or a layer, computed once for all."""
        sums: dict[Node, set[Node]] = {}
        given = {node for node in self._order if self._is_given(node)}
        for output in self.in_order(self.reduced):
            if output in sums and all(user in sums for user in output.users):
                continue  # It is part of another's function.
            for node in self.collect(output):
                sums.setdefault(node, set()).add(output)
        return given | {
            node for node, found in sums.items()
            if len(found) > 1 and self._kinds[node] == EDGES and self._is_floating(node)
            and (changes_in_training(self._net, node)
                or any(sums.get(user) != found for user in node.users))
        }  # fmt: skip

    def _is_given(self, node: Node) -> bool:
        """Return whether a layer is given rows of edges that are computed of rows of nodes."""
        return (
            node.op in ("call_function", "call_method", "call_module")
            and self._kinds[node] == EDGES and not is_layer(self._net, node)
            and self._is_floating(node) and self._follows_from_nodes(node)
            and any(is_layer(self._net, user) for user in node.users)
        )  # fmt: skip

    def in_order(self, outputs: set[Node]) -> list[Node]:
        """Return outputs from last to first, so that a function comes before its own inputs."""
        return sorted(outputs, key=self._order.__getitem__, reverse=True)

    def _is_floating(self, node: Node) -> bool:
        value = self._record[node]
        return isinstance(value, Tensor) and value.is_floating_point()

    def collect(self, output: Node) -> list[Node]:
        """Return the nodes of the function that computes a value, in order."""
        inside, left = {output}, [output]
        while left:
            reader = left.pop()
            for node in reader.all_input_nodes:
                if node not in inside and self._is_inside(node, {reader}):
                    inside.add(node)
                    left.append(node)
        return sorted(inside, key=self._order.__getitem__)

    def write(self, output: Node, inside: list[Node]) -> tuple[Graph, dict[str, Node]]:
        """Return the function that computes a value, and its arguments besides the edges."""
        graph = Graph()
        made = {self._edges: graph.placeholder("edge_index")}
        inputs: dict[str, Node] = {}
        sized = [node for node in inside if not self._is_count(node)]  # Others are its rows'.
        needed = self.inputs_of(inside, sized)
        if not any(map(self._has_rows, needed)):  # Nodes are counted by what they are counted by.
            needed = self.inputs_of(inside)
        counts = [node for node in needed if self._is_count(node)]
        for node in needed:
            if node not in counts and node is not self._edges:
                made[node] = graph.placeholder(node.name)
                inputs[node.name] = node
        rows = [node for node in inputs.values() if self._has_rows(node)]
        for node in [*counts, *inside]:
            if self._is_count(node) and rows:  # Of a mini-batch, its halo included.
                made[node] = graph.call_method("size", (made[rows[0]], 0))
            elif node in counts:
                made[node] = graph.placeholder(node.name)
                inputs[node.name] = node
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(made[output])
        graph.lint()
        return graph, inputs

    def inputs_of(self, inside: list[Node], nodes: list[Node] | None = None) -> dict[Node, None]:
        """Return the nodes outside of a function that it, or some of its nodes, reads, in order."""
        return dict.fromkeys(
            node for each in (inside if nodes is None else nodes) for node in each.all_input_nodes
            if node not in inside
        )  # fmt: skip

    def _has_rows(self, node: Node) -> bool:
        value = self._record[node]
        return (
            self._kinds[node] == ROWS and isinstance(value, Tensor)
            and value.dim() > 0 and value.size(0) == self._num_nodes
        )  # fmt: skip


def wrap_messages(traced: Traced) -> bool:
    """Make layers of the messages that a module passes by itself, and return whether it does.

    The module gets the layers, and its traced graph calls them.
    """
    writer, graph, kinds = _Writer(traced), traced.graph, traced.kinds
    modules = [
        node for node in graph.nodes
        if node.op == "call_module" and kinds[node] in (EDGES, SELECTED)
    ]  # fmt: skip
    once: set[Node] = set()
    count = 0
    for output in writer.in_order(writer.reduced | writer.shared):
        if not output.users:
            continue
        if output in writer.reduced and writer.sums_at_sources(output):
            raise DirectionError(f"'{output.name}' ({function_name(output)})")
        inside = writer.collect(output)
        if all(
            kinds[each] == EDGES and each is not traced.edges for each in writer.inputs_of(inside)
        ):
            continue  # Of single edges.
        for node in inside:
            if node in once:
                raise ValueError(
                    f"'{node.name}' is computed for several sums of messages, which would draw, or "
                    "gather statistics, for each of them: put them into one sum, or take dropout "
                    "and batch norms of rows of nodes"
                )
            if changes_in_training(traced.net, node):
                once.add(node)
        function, inputs = writer.write(output, inside)
        name = f"{MESSAGES}{count}"
        traced.add_layer(name, MessageLayer, graph=function, output=output.name)
        count += 1
        with graph.inserting_after(output):
            traced.replace_node(output, graph.call_module(name, (traced.edges,), dict(inputs)))
        erase_unused(graph, [*inside, *modules])
    return count > 0
