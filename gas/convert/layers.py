"""Calls of message passing layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.nn import Module

from gas.convert.edge_dropout import DROP
from gas.convert.edge_layers import bind
from gas.convert.scope import (
    SQUARE,
    edge_weight,
    edges,
    gcn_weights,
    kept_edges,
    source_pair,
    sources,
    weights,
)
from gas.convert.selected import OnSomeEdges
from gas.convert.trace import is_layer
from gas.graph import WEIGHT

ALONE = object()  # Features that aren't given in a pair.


@dataclass
class LayerCall:
    """Call of a message passing layer.

    * ``node``: the call; ``layer``: the layer; ``name``: its name in the model.
    * ``given``: the arguments by the names of the parameters.
    * ``features``: the parameter for the neighbours' rows; ``other``: further rows of nodes.
    * ``adjacency``, ``weight``: the parameters for the edges and their weights.
    * ``normalised``: whether the weights must be those of the normalised graph.
    * ``weighted``: whether the values of the adjacency are the weights.
    * ``form``: the form of the call.
    * ``selected``: the mask of the edges that it takes, if it doesn't take all, and ``picked``: the
      parameters for rows of these edges.
    * ``dropped``: the call that drops the layer's edges, by its position, and its probability.
    * ``pair``: what the features are given with, as ``conv((x, y), edge_index)``: rows, or
      ``None``. ``ALONE`` if they aren't.
    """

    node: Node
    layer: Module
    name: str
    given: dict[str, Any]
    features: str
    other: tuple[str, ...]
    adjacency: str
    weight: Any
    normalised: bool
    weighted: bool
    form: str = ""
    pair: Any = ALONE
    dropped: tuple[int, float] | None = None
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
            form: One of the forms in :mod:`gas.convert.scope`.
            make: ``make(function, *args)`` calls a function of :mod:`gas.convert.scope`, with the
                neighbourhood that the layer takes.
            value_of: Returns the value of an argument of the traced graph.
        """
        picked = [self.given[name] for name in self.picked]

        def value(argument: Any) -> Any:
            rows = value_of(argument)
            return make(kept_edges, rows, False) if argument in picked else rows

        if self.normalised or self.weighted:
            weight = make(gcn_weights if self.normalised else weights)
        else:
            weight = value(self.weight)
        out = {}
        for name, argument in self.given.items():
            if name == self.features and self.pair is not ALONE:
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
        if self.normalised or self.weighted or self.weight is not None:
            out[WEIGHT] = make(edge_weight, form, weight)
        return out


def bind_arguments(layer: Any, node: Node) -> dict[str, Any]:
    """Return the arguments that a node gives to a layer, by the names of its parameters."""
    return bind(layer, node.args, node.kwargs)


def describe_call(
    net: Module,
    node: Node,
    kinds: Mapping[Node, str],
    adjacency: Node,
    normalised: Collection[str],
    weighted: Collection[str],
) -> LayerCall:
    """Describe the call of a layer by a node.

    Raises:
        ValueError: If the layer isn't given the model's own edges.
    """
    name = str(node.target)
    layer = net.get_submodule(name)
    bound = bind_arguments(layer, node)
    selected: Node | None = None
    picked: tuple[str, ...] = ()
    if isinstance(layer, OnSomeEdges):
        selected, picked, name = bound.pop("edge_mask"), layer.rows, layer.target
        bound[layer.edges] = bound.pop("edge_index")
        layer = net.get_submodule(name)
        bound = bind(layer, (), bound)  # In the order of its parameters.
    edges = [key for key, value in bound.items() if value is adjacency]
    given = {key: value for key, value in bound.items() if isinstance(value, Node)}
    rows = [key for key, value in given.items() if kinds[value] == "rows"]
    pairs = [
        key for key, value in bound.items()
        if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], Node)
        and kinds[value[0]] == "rows" and (value[1] is None or isinstance(value[1], Node))
    ]  # fmt: skip
    rows = [*pairs[:1], *rows]
    if not edges or not rows:
        raise ValueError(
            f"'{name}' ({type(layer).__name__}) takes {', '.join(bound)}, and expected are rows of "
            f"nodes and the model's own '{adjacency.target}': edges that the model changes aren't "
            "those of mini-batches; change the graph before it is cut into parts"
        )
    return LayerCall(
        node, layer, name, bound, rows[0], tuple(rows[1:]), edges[0], bound.get(WEIGHT),
        name in normalised, name in weighted, pair=bound[pairs[0]][1] if pairs else ALONE,
        dropped=node.meta.get(DROP), selected=selected, picked=picked,
    )  # fmt: skip


def layers_without_weights(net: Module, graph: Graph) -> list[str]:
    """Return the names of layers that take edge weights, but are called without any."""
    out = []
    for node in graph.nodes:
        if is_layer(net, node):
            layer: Any = net.get_submodule(str(node.target))
            takes = WEIGHT in inspect.signature(layer.forward).parameters
            if takes and bind_arguments(layer, node).get(WEIGHT) is None:
                out.append(str(node.target))
    return out
