"""Calls of message passing layers, also of those that take some of the edges."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module

from gas.convert.edge_layers import WrappedLayer, bind
from gas.convert.hops import DROP
from gas.convert.matrices import add_product
from gas.convert.rewrite import erase_unused
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
from gas.convert.trace import Added, is_layer
from gas.graph import WEIGHT

ALONE = object()  # Features that aren't given in a pair.
Wrapped = tuple[str, tuple[Node, ...], dict[str, Any]]


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
    * ``dropped``: the call that drops the layer's edges, its probability, and whether it drops
      their weights, those of self-loops included.
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


SELECTED_EDGES = "_selected_"  # The prefix of the names of such layers.


class OnSomeEdges(WrappedLayer):
    """A layer that takes some of the edges, and their rows.

    A converted model calls the layer itself, on a neighbourhood with these edges.

    Args:
        net: The module that has the layer.
        target: The name of the layer.
        edges: The name of its parameter for the edges.
        rows: The names of its parameters for rows of these edges.
    """

    def __init__(self, net: Module, target: str, edges: str, rows: Collection[str] = ()) -> None:
        super().__init__(net, target, edges)
        self.rows = tuple(rows)

    def forward(self, edge_index: Tensor, edge_mask: Tensor, **given: Any) -> Any:
        """Return what the layer gives."""
        layer: Any = self.layer
        given |= {name: given[name][edge_mask] for name in self.rows}
        return layer(**given, **{self.edges: edge_index[:, edge_mask]})


def wrap_layers(
    net: Module, graph: Graph, edges: str, kind: type[WrappedLayer], prefix: str,
    find: Callable[[Node, Node, dict[str, Any]], Wrapped | None],
) -> Added:  # fmt: skip
    """Have layers be called by others that prepare their edges, and return these.

    ``find`` returns for a call, the node of the adjacency and the call's arguments: the parameter
    for the edges, what is given instead, and options; ``None`` to leave a layer as it is.
    """
    added: Added = {}
    source = next(node for node in graph.nodes if node.target == edges)
    for node in list(graph.nodes):
        if not is_layer(net, node):
            continue
        given = bind_arguments(net.get_submodule(str(node.target)), node)
        if (found := find(node, source, given)) is not None:
            name, args, options = found
            given.pop(name)
            key = f"{prefix}{len(added)}"
            target = str(node.target)
            added[key] = functools.partial(kind, target=target, edges=name, **options)
            replace_layer(net, graph, node, key, added[key], args, given)
    return added


def wrap_selecting_layers(net: Module, graph: Graph, edges: str) -> Added:
    """Have layers that are given ``edge_index[:, mask]`` select these edges themselves."""
    added = wrap_layers(net, graph, edges, OnSomeEdges, SELECTED_EDGES, _find_mask)
    if added:
        erase_unused(graph)
    return added


def _find_mask(node: Node, source: Node, given: dict[str, Any]) -> Wrapped | None:
    """Find the mask of the edges that a layer is given, and give it all rows of edges."""
    taken = {
        name: value.args for name, value in given.items()
        if isinstance(value, Node) and value.target is operator.getitem
    }  # fmt: skip
    masks = {name: index for name, (rows, index) in taken.items() if rows is source}
    for name, index in masks.items():
        if len(masks) > 1 or not isinstance(index, tuple) or len(index) != 2:
            continue
        whole, mask = index
        if whole != slice(None) or not isinstance(mask, Node) or _follows(mask, source):
            continue  # Batches have ends of edges in layers alone.
        rows = {key: each for key, (each, index) in taken.items() if index is mask}
        given |= rows
        return name, (source, mask), {"rows": tuple(rows)}
    return None


def _follows(node: Node, source: Node) -> bool:
    """Return whether a value is computed of another."""
    return node is source or any(_follows(each, source) for each in node.all_input_nodes)


def call_product(
    net: Module, graph: Graph, target: str, args: Sequence[Node], masks: Sequence[Node],
    added: Added,
) -> Node:  # fmt: skip
    """Write the call of a product with the edges, or with those of a mask.

    Args:
        net: The module, which gets a layer that selects edges.
        graph: The graph to write to.
        target: The name of the product.
        args: The rows, the edges, and their weights, if they have any.
        masks: The mask, if there is one.
        added: Further layers of the module, which that layer is added to.
    """
    if not masks:
        return graph.call_module(target, tuple(args))
    x, edges, *weight = args
    named = dict(zip(("edge_weight",), weight, strict=False))
    name = f"{SELECTED_EDGES}{target}_{len(added)}"
    added[name] = functools.partial(_make_product, target=target, rows=tuple(named))
    net.add_module(name, added[name](net))
    return graph.call_module(name, (edges, *masks), {"x": x, **named})


def _make_product(net: Module, target: str, rows: Collection[str]) -> OnSomeEdges:
    """Return a product with some of the edges, whose layer a module gets."""
    add_product(net, target)
    return OnSomeEdges(net, target, "edge_index", rows)


def replace_layer(
    net: Module, graph: Graph, node: Node, name: str, make: Any, args: tuple[Node, ...],
    given: dict[str, Any],
) -> Node:  # fmt: skip
    """Have a layer that ``make(net)`` returns be called instead of another, under a name."""
    net.add_module(name, make(net))
    with graph.inserting_before(node):
        made = graph.call_module(name, args, given)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made
