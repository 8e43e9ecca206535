"""Places of histories in a traced graph, and the graph that reads and writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module

from gas.convert.module.inputs import copy_value
from gas.convert.rewriting.edge_dropout import SCALED
from gas.convert.rewriting.layers import WEIGHT, LayerCall
from gas.convert.rewriting.rewrite import changes_in_training
from gas.convert.tracing.outputs import Outputs
from gas.convert.tracing.scope import (
    dense,
    drop_edges,
    dropout,
    gcn_weights,
    join,
    kept_edges,
    own_rows,
    pull,
    select_edges,
    sources,
    weights,
)
from gas.convert.tracing.trace import get_module, is_dropout, is_layer
from gas.convert.tracing.traced import EDGES, ROWS, Traced
from gas.convert.values.known import evaluate_node, is_close
from gas.convert.values.modes import IN_ONE_MODE, TRAINING
from gas.nn import LINEAR_LAYERS, Dropout, FusedConv, has_hooks
from gas.scalable import preserve_modes


class Placement:
    """Placement of histories in a traced graph.

    There is one before each layer; if its input is of dropout, and of single rows since, before the
    dropout. A sum of rows with dropout and others is stored as it is.

    * ``whole``: nodes that are computed for all rows of a mini-batch, halo included.
    * ``pulled``: nodes that are computed for own rows; their halo is pulled from a history.
    """

    def __init__(self, traced: Traced, calls: Sequence[LayerCall]) -> None:
        self._traced, graph = traced, traced.graph
        self.whole = {node for node in graph.nodes if node.op == "placeholder"}
        self.pulled: list[Node] = []
        self._exact = self._find_nodes_of_own_rows()
        for call in calls:
            for node in call.rows():
                self._require(node)
        self._share_histories()
        order = {node: position for position, node in enumerate(graph.nodes)}
        self.pulled.sort(key=order.__getitem__)

    def _require(self, node: Node) -> None:
        """Provide all rows of a value in a batch: compute them, or pull the halo's."""
        if node in self.whole or node in self.pulled:
            return
        # What depends on features only, which batches have for the halo, too; and what is drawn,
        # as the noise of one mini-batch isn't stored.
        is_drawn = IN_ONE_MODE in node.meta and not is_layer(self._traced.net, node)
        if node in self._exact or is_drawn or isinstance(self._traced.values[node], int):
            self.whole.add(node)
            for argument in self._find_row_arguments(node):
                self._require(argument)
            return
        chain = self._chain_to_dropout(node)
        self.whole.update(chain)
        source = self._find_row_arguments(chain[-1])[0] if chain else node
        if source not in self.pulled and source not in self.whole:
            self.pulled.append(source)

    def _share_histories(self) -> None:
        """Replace histories by one of the value that they are computed from, if it isn't wider."""
        values = self._traced.values

        def width(node: Node) -> int:
            return values[node].numel()

        chains = {node: self._chain_of_functions(node) for node in self.pulled}
        for source in dict.fromkeys(each for chain in chains.values() for each in chain):
            group = [node for node in self.pulled if source in chains[node]]
            is_tensor = isinstance(values[source], Tensor) and values[source].is_floating_point()
            if len(group) < 2 or not is_tensor or width(source) > sum(map(width, group)):
                continue
            for node in group:
                self.pulled.remove(node)
                self.whole.update(chains[node][: chains[node].index(source)])
            self.pulled.append(source)
            chains[source] = self._chain_of_functions(source)

    def _chain_of_functions(self, node: Node) -> list[Node]:
        """Return a value and those before it, each computed of single rows of the one before."""
        chain, net = [node], self._traced.net
        while not is_layer(net, node) and not changes_in_training(net, node):
            rows = self._find_row_arguments(node)
            if len(rows) != 1 or rows[0].op == "placeholder":
                break
            node = rows[0]
            chain.append(node)
        return chain

    def _find_row_arguments(self, node: Node) -> list[Node]:
        """Return the inputs of a value that have a row for each node."""
        return [each for each in node.all_input_nodes if self._traced.kinds[each] == ROWS]

    def _find_nodes_of_own_rows(self) -> set[Node]:
        """Find the nodes of the trace whose rows depend on the same row of the features alone."""
        out: set[Node] = set()
        for node in self._traced.graph.nodes:
            is_rows = self._traced.kinds.get(node) == ROWS and not is_layer(self._traced.net, node)
            if is_rows and out.issuperset(self._find_row_arguments(node)):
                out.add(node)
        return out

    def _is_random(self, node: Node) -> bool:
        """Return whether a value is drawn anew in training, such as by a module with dropout."""
        net, values = self._traced.net, self._traced.values

        def value_of(each: Node) -> Any:
            return True if each.target == TRAINING else copy_value(values[each])

        with preserve_modes(net, True), torch.no_grad():
            found = [evaluate_node(net, node, value_of) for _ in range(2)]
        return not is_close(*found)

    def _chain_to_dropout(self, node: Node) -> list[Node]:
        """Return the nodes from a value back to the first dropout before it, if there is one.

        Of rows that are computed of single other rows alone: it ends at a sum of two.
        """
        chain: list[Node] = []
        until = 0
        while not is_layer(self._traced.net, node) and node not in self._exact:
            rows = self._find_row_arguments(node)
            if len(rows) != 1:
                break
            chain.append(node)
            if is_dropout(self._traced.net, node) or self._is_random(node):
                until = len(chain)
            node = rows[0]
        return chain[:until]


class GraphWriter:
    """Writer of the graph of a model with histories, ``graph(scope, *inputs)``.

    Values of all rows are cut to the batch's own rows, except for layers, so that all uses of a
    dropout have the same mask. ``dims`` are the dimensions of the rows in each node's value, nested
    as the value is, and ``shapes`` those of the rows of the nodes with histories.
    """

    def __init__(
        self, traced: Traced, placed: Placement, calls: Sequence[LayerCall], outputs: Outputs,
        dims: Mapping[Node, Any], shapes: Mapping[Node, Sequence[int]], transform: Any,
    ) -> None:  # fmt: skip
        self._shapes, self._dims, self._transform = shapes, dims, transform
        self._outputs, self._traced, self._plan = outputs, traced, placed
        self._net, self._kinds = traced.net, traced.kinds
        self._calls = {call.node: call for call in calls}
        self.graph = Graph()
        self._scope = self.graph.placeholder("scope")
        # Scopes without edges that are dropped in training, and with some of the edges.
        self._dropped: dict[int | str, Node] = {}
        self._selected: dict[tuple[Node, Node], Node] = {}
        self._written: dict[Node, Node] = {}  # For all rows, if the placement says so.
        self._own: dict[Node, Node] = {}
        self._all: dict[Node, Node] = {}

    def _make(self, function: Any, *args: Any) -> Node:
        return self.graph.call_function(function, (self._scope, *args))

    def _own_rows(self, node: Node) -> Node:
        """Return a value's own rows."""
        written = self._written[node]
        if self._kinds[node] != ROWS or node not in self._plan.whole:
            return written
        if node not in self._own:
            self._own[node] = self._cut(node, written)
        return self._own[node]

    def _cut(self, node: Node, written: Node) -> Node:
        """Cut a value to the batch's own rows."""
        dims = self._dims[node]
        return self._make(own_rows, written, *([] if dims == 0 else [dims]))

    def _all_rows(self, node: Node) -> Node:
        """Return a value's rows, those of the halo included."""
        return self._all.get(node, self._written[node])

    def write(self) -> Graph:
        """Write the graph for the traced one."""
        for node in self._traced.graph.nodes:
            self._write(node)
        self.graph.lint()
        return self.graph

    def _write(self, node: Node) -> None:
        if node.op == "output":
            rows = [self._own_rows(each) for each in self._outputs.nodes]
            single = self._outputs.is_single
            self.graph.output(rows[0] if single else self._make(join, rows))
            return
        if node is self._traced.edges:
            return  # The scope provides the edges.
        made = self._write_layer(node) if node in self._calls else self._write_value(node)
        self._written[node] = made
        if node in self._plan.pulled:
            self._write_history(node, made)

    def _write_history(self, node: Node, made: Node) -> None:
        """Write the push and pull of a value, as rows of two dimensions."""
        position, dim = self._plan.pulled.index(node), self._dims[node]
        shape = self._shapes[node]
        if dim == 0 and len(shape) == 1:
            self._all[node] = self._make(pull, position, made, self._readers_take_rows(node))
            return
        call = self.graph.call_method
        rows = made if dim == 0 else call("movedim", (made, dim, 0))
        flat = call("reshape", (rows, -1, math.prod(shape)))
        whole = self._make(pull, position, flat, False)
        shaped = [call("reshape", (each, -1, *shape)) for each in (flat, whole)]
        if dim != 0:
            shaped = [call("movedim", (each, 0, dim)) for each in shaped]
        self._written[node], self._all[node] = shaped

    def _write_layer(self, node: Node) -> Node:
        call = self._calls[node]
        given = self._scope if call.dropped is None else self._drop_edges(*call.dropped)

        def value_of(argument: Any) -> Any:
            if not isinstance(argument, Node):
                return argument
            rows = self._all_rows(argument)
            if call.dropped is None or self._kinds[argument] != EDGES:
                return rows
            scaled = call.dropped[-1] or self._is_scaled(argument)
            return self.graph.call_function(kept_edges, (given, rows, scaled))

        scope = given
        if call.selected is not None:
            key = given, call.selected
            if key not in self._selected:
                scope = self.graph.call_function(select_edges, (given, value_of(call.selected)))
                self._selected[key] = scope
            scope = self._selected[key]

        def make(function: Any, *args: Any) -> Node:
            return self.graph.call_function(function, (scope, *args))

        (_, first), *rest = call.arguments(call.form, make, value_of).items()
        out = self.graph.call_module(call.name, (first,), dict(rest))
        return self._cut(node, out) if self._kinds[node] == ROWS else out

    def _is_scaled(self, node: Node) -> bool:
        """Return whether rows of edges are weights that grow as edges are dropped."""
        inputs = [each for each in node.all_input_nodes if self._kinds[each] == EDGES]
        return SCALED in node.meta or any(map(self._is_scaled, inputs))

    def _drop_edges(self, position: int | str, p: float, of_weights: bool) -> Node:
        """Return the scope without the edges that a call drops, the same for all its layers."""
        if position not in self._dropped:
            (training,) = [each for each in self._written if each.target == TRAINING]
            adds_loops = self._transform is not None and self._transform.keeps_loops
            flags = adds_loops and not of_weights, of_weights
            self._dropped[position] = self._make(drop_edges, p, self._written[training], *flags)
        return self._dropped[position]

    def _write_value(self, node: Node) -> Node:
        """Write a value that isn't the output of a layer."""
        if node.op == "placeholder" and node.target == WEIGHT:
            is_made = WEIGHT in getattr(self._transform, "made", ())
            return self._make(gcn_weights if is_made else weights)
        value_of = self._all_rows if node in self._plan.whole else self._own_rows
        made = self.graph.node_copy(node, value_of)
        if node.op == "placeholder" and not self._readers_take_sparse(node):
            made = self.graph.call_function(dense, (made,))
        if node.target is torch.nn.functional.dropout:
            made.target = dropout
        return made

    def _readers_take_rows(self, node: Node) -> bool:
        """Return whether all readers of the whole value take :class:`gas.history.Rows`."""
        return all(
            user in self._calls
            or user not in self._plan.whole
            or (self._is_dropout(user) and self._readers_take_rows(user))
            for user in node.users
        )

    def _readers_take_sparse(self, node: Node) -> bool:
        """Return whether all readers of a value take sparse features."""
        return all(
            type(module := get_module(self._net, user)) in LINEAR_LAYERS
            or isinstance(module, FusedConv)
            or (self._is_dropout(user) and self._readers_take_sparse(user))
            for user in node.users
        )

    def _is_dropout(self, node: Node) -> bool:
        if node.target is torch.nn.functional.dropout:
            return True
        module = get_module(self._net, node)
        return isinstance(module, Dropout) and not module.inplace


def multiplies_sparse(net: Module, node: Node | None) -> bool:
    """Return whether all readers of a value in a written graph multiply only its non-zeros."""

    def multiplies(_: Node, module: Any) -> bool:
        return getattr(module, "multiplies_sparse", type(module) in LINEAR_LAYERS)

    return _is_read_by(multiplies, net, node, (own_rows, sources, dropout))


def reads_in_place(net: Module, node: Node | None) -> bool:
    """Return whether all readers of a value in a written graph take :class:`Rows`."""

    def takes_rows(user: Node, module: Any) -> bool:
        return user.target is own_rows or isinstance(module, FusedConv)

    return _is_read_by(takes_rows, net, node, (sources, dropout))


def _is_read_by(
    function: Callable[[Node, Any], bool], net: Module, node: Node | None, through: Sequence[Any]
) -> bool:
    """Return whether a function holds for all readers of a value, nodes and modules without hooks.

    Those of dropout, and of the functions ``through``, are the readers of their results.
    """
    for user in () if node is None else node.users:
        module: Any = None
        if user.op == "call_module":
            module = net.get_submodule(str(user.target))
            if has_hooks(module):
                return False
        passes = user.target in through or (isinstance(module, Dropout) and not module.inplace)
        if not (_is_read_by(function, net, user, through) if passes else function(user, module)):
            return False
    return node is not None and bool(node.users)
