"""Moves what a module computes of the edges alone to the whole graph."""

from __future__ import annotations

import hashlib
import operator
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from gas.convert.module.changes import is_in_place
from gas.convert.module.preparation import Preparation, join_lists
from gas.convert.rewriting.edge_dropout import AFTER_DROP, SCALED, check_scale
from gas.convert.rewriting.edge_values import EdgeValues, has_rows
from gas.convert.rewriting.rewrite import erase_unused, replace_node
from gas.convert.tracing.traced import Traced, function_name
from gas.convert.values.edge_layers import DROP
from gas.convert.values.known import is_close, is_edge_list, walk_back
from gas.convert.values.matrices import gcn_norm
from gas.graph import PREPARED, WEIGHT

# Names of functions in the code have those of their folders, which graphs on disk mustn't know.
_FOLDERS = re.compile("gas_convert_(module|rewriting|tracing|values)_")
TRIVIAL = ("getitem", "getattr", "size")  # Functions that the description leaves out.


def _is_normalised(node: Node) -> bool:
    """Return whether a value is the weights of a symmetric normalisation."""
    made: Any = node.args[0] if node.target is operator.getitem else None
    return isinstance(made, Node) and made.target is gcn_norm


class _Extractor:
    """Moves the nodes of a traced graph that depend on the edges alone into a transform.

    If it ``allows_several`` lists of edges that layers take, the transform joins them. ``given`` is
    the parameter for a matrix, its layout, and whether weights are taken.
    """

    def __init__(
        self, finder: EdgeValues, allows_several: bool, given: tuple[str, str, bool]
    ) -> None:
        self._finder, self._given = finder, given
        self._dtype: torch.dtype | None = None
        self._values: dict[Node, Any] = {
            node: finder.records[0][node] for node in (*finder.inputs, *finder.inside)
        }
        self._made: dict[Node, int | None] = {}  # The attributes, and the list of their rows.
        self._checks: list[tuple[Node, int | None, int | str | None]] = []
        self._lists = self._find_edge_lists(allows_several)
        self._masks = self._name_masks()
        self._selected: dict[Node, Node] = {}  # Edges and attributes of one of the lists.
        self._read = list(finder.read)
        self._is_original = is_close(self._edges(0), self._values[finder.edges])
        if self._masks[0] or not self._is_original:  # Attributes don't follow otherwise.
            attributes = [node for node in finder.inputs if node is not finder.edges]
            self._read += [node for node in attributes if self._is_read(node)]
        for node in self._read:
            self._check_place(node)
            if self._reduces_left(node) and not _is_normalised(node):
                check_scale(node, self._values[node], self._edges(0), finder.counts[0][0])

    def _find_edge_lists(self, allows_several: bool) -> list[Node]:
        """Return the different lists of edges that layers read, the original first.

        Raises:
            ValueError: If there are several, which can't be joined.
        """
        finder = self._finder
        candidates = [node for node in finder.inside if is_edge_list(self._values[node])]
        chosen: list[Node] = []
        for node in finder.read:
            found = [each for each in (*candidates, finder.edges) if self._is_part(node, each)]
            chosen += ([each for each in found if each in node.all_input_nodes] or found)[:1]
        kept = [node for node in finder.found if node not in finder.moved]
        read = [node for node in kept if any(user not in finder.found for user in node.users)]
        if any(allows_several or finder.uses_edges(node) for node in read) or not chosen:
            chosen.append(finder.edges)
        lists: list[Node] = []
        for node in chosen:
            if not any(is_close(self._values[node], self._values[each]) for each in lists):
                lists.append(node)
        original = self._values[finder.edges]
        lists.sort(key=lambda node: not is_close(self._values[node], original))
        if len(lists) > 1 and (
            not allows_several or any(DROP in node.meta for node in finder.graph.nodes)
        ):
            raise ValueError(
                "edges are dropped, and layers take different ones, some the edges as they are, "
                f"and some those of '{lists[1].name}': use layers that all take the same ones"
            )
        return lists

    def _is_part(self, node: Node, edges: Node) -> bool:
        """Return whether a value is a list of edges, or one of its ends."""
        value, whole = self._values.get(node), self._values[edges]
        is_long = isinstance(value, Tensor) and value.dtype == torch.long
        return is_long and any(is_close(value, part) for part in (whole, whole[0], whole[1]))

    def _name_masks(self) -> list[str]:
        """Return the names of the masks that select each list; "" for one that has all edges."""
        finder, names = self._finder, [""] * len(self._lists)
        for record, (num_nodes, _) in zip(finder.records, finder.counts, strict=True):
            edges, places = join_lists([record[node] for node in self._lists], num_nodes)
            for position, place in enumerate(places):
                if place is not None and place.numel() < edges.size(1):
                    names[position] = f"{PREPARED}edge_list_{position}"
        return names

    def _is_read(self, node: Node) -> bool:
        """Return whether nodes that depend on more than the edges read a value, if indirectly."""
        users = [user for user in node.users if user not in self._finder.moved]
        return any(user not in self._finder.found or self._is_read(user) for user in users)

    def _edges(self, position: int) -> Tensor:
        """Return a list of edges on the first small graph."""
        edges: Tensor = self._values[self._lists[position]]
        return edges

    def _find_list(self, node: Node) -> int | None:
        """Find the list of edges that a value has a row for each of; ``None`` if there is none."""
        value = self._values[node]
        found = [
            position for position, edges in enumerate(self._lists)
            if self._is_part(node, edges)
            or self._find_repeated_end(value, self._edges(position)) is not None
        ] or [
            position for position in range(len(self._lists))
            if has_rows(value, size := self._edges(position).size(1))
            or (isinstance(value, int) and value == size)
        ]  # fmt: skip
        if len(found) < 2:
            return found[0] if found else None
        is_end = isinstance(value, Tensor) and value.dtype == torch.long
        for each in self._inputs_of(node) if is_end else ():  # Turned round, they have the same.
            for position in found:
                if is_close(self._values[each], self._edges(position)):
                    return position
        # Several have as many edges: it is given, or computed, with one of them.
        together = [each for user in node.users for each in user.all_input_nodes]
        siblings = [user for each in node.all_input_nodes for user in each.users]
        for others in (together, siblings, self._inputs_of(node)):
            for each in others:
                for position in found:
                    if self._is_part(each, self._lists[position]):
                        return position
        return found[0]

    def _inputs_of(self, node: Node) -> list[Node]:
        """Return the nodes that a value is computed from, the last first."""
        before = walk_back(node)
        return [each for each in reversed(self._finder.inside) if each in before]

    def _check_place(self, node: Node) -> None:
        """Refuse a value that can't be an attribute of the graph."""
        is_of_nodes = has_rows(self._values[node], self._finder.counts[0][0])
        if not is_of_nodes and self._find_list(node) is None:
            raise ValueError(
                f"'{node.name}' ({function_name(node)}) is computed of the edges, and isn't a row "
                "for each node or edge: compute it before, and give it as an attribute"
            )

    def run(self) -> Preparation:
        """Change the graph, and return the transform."""
        finder = self._finder
        readers = {node for node in finder.graph.nodes if node not in finder.moved}
        replaced: dict[Node, Any] = {}
        if self._masks[0] and self._is_original:  # First, as others are replaced by all edges.
            replaced[finder.edges] = self._select(finder.edges, 0)
        replaced |= {node: self._replace(node) for node in self._read}
        replaced |= {node: self._values[node] for node in finder.moved if finder.is_plain(node)}
        function = self._write()
        for node, other in replaced.items():
            replace_node(node, other, readers.__contains__)
        names = [str(node.target) for node in finder.inputs if node is not finder.edges]
        for node in reversed(finder.inside):
            if node in finder.moved:
                finder.graph.erase_node(node)
        erase_unused(finder.graph)
        for node in finder.inputs:
            if node is not finder.edges and not node.users:
                finder.graph.erase_node(node)
        called = dict.fromkeys(map(function_name, finder.inside))
        called = {name: None for name in called if name not in TRIVIAL} or called
        described = ", ".join(list(called)[:4]) + (", ..." if len(called) > 4 else "")
        if not self._made and not any(self._masks):  # A graph that isn't prepared lacks it.
            self._masks[0] = f"{PREPARED}edge_0"
            self._placeholder(self._masks[0])
        made = {self._name(node): position for node, position in self._made.items()}
        code = _FOLDERS.sub("gas_convert_", function.code)
        text = f"{code}{self._masks}{made}"
        tag = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:6]
        own = {name: name.replace(PREPARED, f"{PREPARED}{tag}_") for name in (*made, *self._masks)}
        if weights := self._find_weights():  # Which are cut with the edges, as the user's are.
            own[weights] = WEIGHT
        for node in finder.graph.nodes:
            if node.op == "placeholder" and node.target in own:
                node.target = own[node.target]
        return Preparation(
            function,
            names,
            [own[name] for name in self._masks],
            {own[name]: position for name, position in made.items()},
            f"{PREPARED}{tag}",
            [(position, own.get(str(where), where)) for _, position, where in self._checks],
            described,
            AFTER_DROP in self._lists[0].meta,
            self._given,
            self._dtype,
        )

    def _find_weights(self) -> str:
        """Return the attribute that can be the weights of all edges; "" if there is none."""
        if any(node.target == WEIGHT for node in self._inputs()):
            return ""
        for node, position in self._made.items():
            value = self._values[node]
            is_of_all = position is not None and not self._masks[position]
            is_number = value.dim() == 1 and value.is_floating_point()
            if is_of_all and is_number and bool((value != 1).any()):  # As a matrix without has.
                return self._name(node)
        return ""

    def _replace(self, node: Node) -> Node:
        """Return the node from which the rest of the graph reads the value of another."""
        graph, value, position = self._finder.graph, self._values[node], self._find_list(node)
        if position is not None:
            edges, source = self._edges(position), self._finder.edges
            if is_close(value, edges):
                self._checks.append((node, position, None))
                return self._select(source, position)
            if (end := self._find_repeated_end(value, edges)) is not None:
                self._checks.append((node, position, end))
                source, shape = self._select(source, position), value.shape[1:]
                with graph.inserting_before(node):
                    made = graph.call_function(operator.getitem, (source, end))
                    if shape:
                        made = graph.call_method("view", (made, -1, *[1] * len(shape)))
                        made = graph.call_method("expand", (made, -1, *shape))
                return made
            if isinstance(value, int):
                source = self._select(source, position)
                with graph.inserting_before(node):
                    return graph.call_method("size", (source, 1))
        name = ""
        for other, where in self._made.items():
            if where == position and is_close(self._values[other], value):
                name = self._name(other)
                self._checks.append((node, position, name))
        if not name:
            self._made[node] = position
            name = self._name(node)
        return self._select(self._placeholder(name, node), position)

    def _select(self, rows: Node, position: int | None) -> Node:
        """Select the rows of one list of edges among rows of all edges."""
        if position is None or not self._masks[position]:
            return rows
        mask = self._placeholder(self._masks[position])
        if (key := mask if rows is self._finder.edges else rows) not in self._selected:
            index = (slice(None), mask) if rows is self._finder.edges else mask
            with self._finder.graph.inserting_after(self._inputs()[-1]):
                made = self._finder.graph.call_function(operator.getitem, (rows, index))
            self._selected[key] = made
        return self._selected[key]

    def _name(self, node: Node) -> str:
        """Return the name of an attribute, by which its rows are those of nodes or edges."""
        kind = "node" if self._made[node] is None else "edge"
        return f"{PREPARED}{kind}_{list(self._made).index(node)}"

    def _find_repeated_end(self, value: Any, edges: Tensor) -> int | None:
        """Find the end of the edges that a value has in its rows; ``None`` if it has neither."""
        is_long = has_rows(value, edges.size(1)) and value.dtype == torch.long
        if not is_long or (value.dim() > 1 and not value.numel()):
            return None
        shape = (-1, *[1] * (value.dim() - 1))
        found = [torch.equal(value, end.view(shape).expand_as(value)) for end in edges]
        return found.index(True) if any(found) else None

    def _inputs(self) -> list[Node]:
        return [node for node in self._finder.graph.nodes if node.op == "placeholder"]

    def _placeholder(self, name: str, value: Node | None = None) -> Node:
        """Return the input of a name, which notes what the value notes."""
        graph, found = self._finder.graph, self._inputs()
        made = next((node for node in found if node.target == name), None)
        if made is None:
            with graph.inserting_after(found[-1]):
                made = graph.placeholder(name)
        if value is not None and self._reduces_left(value):
            made.meta[SCALED] = True
        return made

    def _reduces_left(self, node: Node) -> bool:
        """Return whether a value needs a sum over the edges that are left of a dropout."""
        left = walk_back(node, lambda each: AFTER_DROP not in each.meta)
        return any(
            AFTER_DROP in each.meta and each in self._finder.moved and (
                each.target is gcn_norm or any(
                    has_rows(leaf, self._finder.counts[0][0])
                    for leaf in tree_leaves(self._values.get(each))
                )
            )
            for each in left
        )  # fmt: skip

    def _write(self) -> GraphModule:
        """Write the function that the transform calls."""
        finder, graph = self._finder, Graph()
        edges, count, device, dtype = map(
            graph.placeholder, ("edges", "num_nodes", "device", "dtype")
        )
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
            if isinstance(value, torch.dtype) and value.is_floating_point:  # Of rows of nodes.
                self._dtype = value
                return dtype
            return device if isinstance(value, torch.device) else value

        known: dict[Any, Node] = {}  # What is computed before is read again.
        for node in finder.inside:
            made[node] = new = graph.node_copy(node, value_of)
            if any(is_in_place(each) for each in (node, *node.users)):
                continue
            key = new.op, new.target, repr((new.args, new.kwargs))
            if (same := known.setdefault(key, new)) is not new:
                made[node] = same
                graph.erase_node(new)
        stored = {made[node] for node in self._made}
        self._checks = [
            (node, at, where) for node, at, where in self._checks
            if not isinstance(where, str) or made[node] not in stored
        ]  # fmt: skip
        checked = [node for node, *_ in self._checks]
        graph.output(map_arg((*self._lists, *self._made, *checked), made.__getitem__))
        return GraphModule(torch.nn.Module(), graph, "Preparation")


def move_preparation(traced: Traced) -> Preparation | None:
    """Move computations that depend on the edges alone to a transform of the whole graph.

    Its graph gets the results as inputs. Edges that the module selects, ``edge_index[:, mask]``,
    stay with it, if layers take different lists of edges otherwise. If they still do, the transform
    joins these lists.

    Returns:
        The transform; ``None`` if a mini-batch has all that it takes.

    Raises:
        ValueError: If it can't be an attribute of nodes or edges, or edges are dropped of several
            lists.
    """
    traced.record()
    inputs = traced.inputs
    given = inputs.matrix, inputs.layout, WEIGHT in inputs.names
    failure: ValueError | None = None
    for keeps_selections, joins in ((False, False), (True, False), (False, True)):
        finder = EdgeValues(traced, keeps_selections)
        if keeps_selections and (finder.keeps_nothing or finder.changes_selections):
            continue
        if not finder.read:
            return None
        try:
            prepared = _Extractor(finder, joins, given).run()
        except ValueError as error:
            failure = error
            continue
        traced.graphs = [prepared(each) for each in traced.graphs]
        traced.inputs = replace(traced.inputs, made=prepared.made)
        return prepared
    assert failure is not None
    raise failure
