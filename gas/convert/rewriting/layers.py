"""Calls of message passing layers, also of those that take some of the edges."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.nn import Module

from gas.convert.rewriting.rewrite import erase_unused
from gas.convert.tracing.scope import (
    SQUARE,
    edge_weight,
    edges,
    kept_edges,
    source_pair,
    sources,
)
from gas.convert.tracing.trace import is_layer
from gas.convert.tracing.traced import ROWS, Traced
from gas.convert.values.edge_layers import DROP, EdgeLayer, bind_arguments
from gas.convert.values.known import walk_back
from gas.graph import WEIGHT


@dataclass
class LayerCall:
    """Call of a message passing layer.

    * ``node``: the call; ``layer``: the layer; ``name``: its name in the model.
    * ``given``: the arguments by the names of the parameters.
    * ``features``: the parameter for the neighbours' rows, or for a pair of these and further rows,
      as in ``conv((x, y), edge_index)``; ``other``: those for further rows of nodes.
    * ``adjacency``: the parameter for the edges.
    * ``form``: the form of the call.
    * ``selected``: the mask of the edges that it takes, if it doesn't take all, and ``picked``: the
      parameters for rows of these edges.
    * ``dropped``: the call that drops the layer's edges, its probability, and whether it drops
      their weights, those of self-loops included.
    """

    node: Node
    layer: Module
    name: str
    given: dict[str, Any]
    features: str
    other: tuple[str, ...]
    adjacency: str
    form: str = ""
    dropped: tuple[int | str, float, bool] | None = None
    selected: Node | None = None
    picked: tuple[str, ...] = ()

    def rows(self) -> list[Node]:
        """Return the rows of nodes that the call takes."""
        given = [self.given[name] for name in (self.features, *self.other)]
        pairs = [[value] if isinstance(value, Node) else value for value in given]
        return [each for pair in pairs for each in pair if each is not None]

    def arguments(
        self, form: str, make: Callable[..., Any], value_of: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Return the arguments of the call, in a form.

        Args:
            form: One of the forms in :mod:`gas.convert.tracing.scope`.
            make: ``make(function, *args)`` calls a function of :mod:`gas.convert.tracing.scope`,
                with the neighbourhood that the layer takes.
            value_of: Returns the value of an argument of the traced graph.
        """
        picked = [self.given[name] for name in self.picked]

        def value(argument: Any) -> Any:
            rows = value_of(argument)
            return make(kept_edges, rows, False) if argument in picked else rows

        has_weight = self.given.get(WEIGHT) is not None
        weight = value(self.given[WEIGHT]) if has_weight else None
        out = {}
        for name, argument in self.given.items():
            if name == self.features and not isinstance(argument, Node):
                given = [value(each) if isinstance(each, Node) else each for each in argument]
                out[name] = make(source_pair, *given, form)
            elif name == self.features:
                pairs = getattr(self.layer, "takes_pairs", True)
                out[name] = make(sources, value(argument), form, pairs)
            elif name in self.other:
                out[name] = make(sources, value(argument), SQUARE)
            elif name == self.adjacency:
                out[name] = make(edges, form, weight)
            elif name != WEIGHT or argument is None:
                out[name] = value(argument)
        if has_weight:
            out[WEIGHT] = make(edge_weight, form, weight)
        return out


def describe_call(traced: Traced, node: Node) -> LayerCall:
    """Describe the call of a layer by a node.

    Raises:
        ValueError: If the layer isn't given the model's own edges.
    """
    net, kinds, adjacency, name = traced.net, traced.kinds, traced.edges, str(node.target)
    layer = net.get_submodule(name)
    bound = bind_arguments(layer, node.args, node.kwargs)
    if _are_counts(traced, bound.get("size")):
        del bound["size"]  # Those of the rows and edges that it is given, as without it.
    selected: Node | None = None
    picked: tuple[str, ...] = ()
    if isinstance(layer, MaskedEdgeLayer):
        selected, picked, name = bound.pop("edge_mask"), layer.rows, layer.target
        bound[layer.edges] = bound.pop("edge_index")
        layer = net.get_submodule(name)
        bound = bind_arguments(layer, (), bound)  # In the order of its parameters.
    edges = [key for key, value in bound.items() if value is adjacency]
    given = {key: value for key, value in bound.items() if isinstance(value, Node)}
    rows = [key for key, value in given.items() if kinds[value] == ROWS]
    pairs = [
        key for key, value in bound.items()
        if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], Node)
        and kinds[value[0]] == ROWS and (value[1] is None or isinstance(value[1], Node))
    ]  # fmt: skip
    rows = [*pairs[:1], *rows]
    if not edges or not rows:
        raise ValueError(
            f"'{name}' ({type(layer).__name__}) takes {', '.join(bound)}, and expected are rows of "
            f"nodes and the model's own '{adjacency.target}': edges that the model changes aren't "
            "those of mini-batches; change the graph before it is cut into parts"
        )
    return LayerCall(
        node, layer, name, bound, rows[0], tuple(rows[1:]), edges[0],
        dropped=node.meta.get(DROP), selected=selected, picked=picked,
    )  # fmt: skip


def _are_counts(traced: Traced, size: Any) -> bool:
    """Return whether a layer's ``size`` is the number of nodes at both ends."""
    ends = size if isinstance(size, tuple | list) else ()
    return bool(ends) and all(
        isinstance(end, Node) and traced.kinds[end] == ROWS and isinstance(traced.values[end], int)
        for end in ends
    )


SELECTED_EDGES = "_selected_"  # The prefix of the names of such layers.


class MaskedEdgeLayer(EdgeLayer):
    """A layer, ``target`` of a module, that takes some of the edges, and their rows.

    A converted model calls the layer itself, on a neighbourhood with these edges. ``edges`` is its
    parameter for the edges, and ``rows`` are those for their rows.
    """

    def __init__(self, net: Module, target: str, edges: str, rows: Collection[str]) -> None:
        super().__init__()
        object.__setattr__(self, "layer", net.get_submodule(target))  # Not a child twice.
        self.target, self.edges, self.rows = target, edges, tuple(rows)

    def forward(self, edge_index: Tensor, edge_mask: Tensor, **given: Any) -> Any:
        """Call the layer with the edges of a mask, and with their rows."""
        layer: Any = self.layer
        given |= {name: given[name][edge_mask] for name in self.rows}
        return layer(**given, **{self.edges: edge_index[:, edge_mask]})


def wrap_selecting_layers(traced: Traced) -> None:
    """Replace layers of ``edge_index[:, mask]`` by layers that select these edges themselves."""
    net, graph, edges = traced.net, traced.graph, traced.edges
    for node in [each for each in graph.nodes if is_layer(net, each)]:
        target = str(node.target)
        given = bind_arguments(net.get_submodule(target), node.args, node.kwargs)
        if (found := _find_mask(edges, given)) is None:
            continue
        parameter, mask, rows = found
        name = f"{SELECTED_EDGES}{len(traced.added)}"
        traced.add_layer(name, MaskedEdgeLayer, target=target, edges=parameter, rows=tuple(rows))
        arguments = {key: value for key, value in (given | rows).items() if key != parameter}
        with graph.inserting_before(node):
            made = graph.call_module(name, (edges, mask), arguments)
        made.meta.update(node.meta)
        traced.replace_node(node, made)
    if traced.added:
        erase_unused(graph)


def _find_mask(source: Node, given: dict[str, Any]) -> tuple[str, Node, dict[str, Any]] | None:
    """Find the edges of a mask among a layer's arguments.

    Returns:
        The parameter for the edges, the mask, and by parameters of which the mask selects rows, all
        rows; ``None`` if the layer takes no such edges.
    """
    taken = {
        name: value.args for name, value in given.items()
        if isinstance(value, Node) and value.target is operator.getitem
    }  # fmt: skip
    masks = {name: index for name, (rows, index) in taken.items() if rows is source}
    for name, index in masks.items():
        if len(masks) > 1 or not isinstance(index, tuple) or len(index) != 2:
            continue
        whole, mask = index
        if whole != slice(None) or not isinstance(mask, Node) or source in walk_back(mask):
            continue  # Batches have ends of edges in layers alone.
        return name, mask, {key: each for key, (each, index) in taken.items() if index is mask}
    return None
