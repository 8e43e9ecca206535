"""Calls of message passing layers, and normalisation, which moves to the whole graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import BaseTransform

from gas.convert.edge_dropout import DROP
from gas.convert.edge_layers import OnGivenEdges, direction_error, turns_round
from gas.convert.scope import (
    SQUARE,
    edge_weight,
    edges,
    gcn_weights,
    source_pair,
    sources,
    weights,
)
from gas.convert.trace import GIVEN, UNROLLED, Added, is_layer
from gas.graph import WEIGHT, layout_of, with_edge_index

_NORMALISED: Any = WeakIdKeyDictionary()  # The weights that were normalised.


class Normalise(BaseTransform):
    """The symmetric normalisation of a graph's edge weights, as PyG's layers compute it.

    It depends on the layout, as in PyG: self-loops are added to the diagonal of an ``adj_t`` of
    ``torch.sparse``, replace that of a SparseTensor, and are added to an ``edge_index`` only where
    they are missing.

    Args:
        improved: Weight self-loops by 2.
        add_self_loops: Add self-loops.
        weighted: Use the weights of the graph. (default: ``True``)
    """

    by_value = False
    """Whether the module takes weighted edges as a matrix, even if they are given as a list."""

    attribute = WEIGHT
    """The attribute with the weights before, which ``edge_weight`` replaces."""

    marks = False
    """Mark the original edges, for layers that take no added self-loops."""

    prefers_adj_t = False
    """Take the ``adj_t`` of a graph that has both, as the module does."""

    takes_adj_t = True
    """Whether :func:`gas.cluster` passes the graph with an ``adj_t`` instead of ``edge_index``."""

    def __init__(self, improved: bool, add_self_loops: bool, weighted: bool = True) -> None:
        self.improved = improved
        self.add_self_loops = add_self_loops
        self.weighted = weighted

    def fit_to(self, is_matrix: bool, edges: str) -> None:
        """Note what the module takes: a matrix with weights, and the parameter for the edges."""
        if is_matrix:
            self.by_value = True
        if edges == "adj_t":
            self.prefers_adj_t = True

    def forward(self, data: Data) -> Data:
        """See :class:`torch_geometric.transforms.GCNNorm`."""
        if self.marks and GIVEN in data:
            return data
        self._refuse_twice(data.get(self.attribute))
        if "adj_t" in data and "edge_index" in data:  # One of them, as the edges change.
            del data["edge_index" if self.prefers_adj_t else "adj_t"]
        is_list = "edge_index" in data and not self.by_value
        given = data.get("adj_t") if "edge_index" not in data else None
        replaces = given is not None and layout_of(given, "adj_t").name == "sparse_tensor"
        data = with_edge_index(data)
        edge_index = before = data.edge_index
        weight = data.get(self.attribute)
        dtype = None if data.x is None or not data.x.is_floating_point() else data.x.dtype
        if edge_index is None:
            raise ValueError(
                "'data' has no edges, which the normalisation needs: set data.edge_index"
            )
        if not self.weighted:  # A matrix always has values.
            weight = None if is_list or weight is None else weight.to(dtype)
        loops = self.add_self_loops
        if loops and not is_list:
            ones = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
            weight = ones if weight is None else weight
            edge_index, weight = self._add_to_diagonal(
                edge_index, weight, int(data.num_nodes or 0), replaces
            )
            loops = False
        data.edge_index, data.edge_weight = gcn_norm(
            edge_index, weight, data.num_nodes, self.improved, loops, dtype=dtype
        )
        if self.marks:
            self._mark(data, before)
        _NORMALISED[data.edge_weight] = True
        if self.attribute != WEIGHT:
            del data[self.attribute]  # Its rows are those of the edges before.
        return data

    def _refuse_twice(self, weight: Any) -> None:
        """Refuse weights that were normalised before."""
        if self.weighted and isinstance(weight, Tensor) and weight in _NORMALISED:
            raise ValueError(
                "'data' has weights that were normalised already: give the graph as it was, or "
                "leave 'model' out of gas.cluster"
            )

    def _mark(self, data: Data, before: Tensor) -> None:
        """Mark the edges that there were before, and keep all self-loops of a node among them."""
        src, dst = before
        loops = torch.bincount(src[src == dst], minlength=int(data.num_nodes or 0))
        ends = data.edge_index
        marks = (ends[0] != ends[1]) | (loops[ends[0]] > 0)
        more = torch.arange(loops.numel(), device=loops.device)
        more = more.repeat_interleave((loops - 1).clamp(min=0))  # Without weight.
        data.edge_index = torch.cat([ends, more.expand(2, -1)], dim=1)
        weight = data.edge_weight
        data.edge_weight = torch.cat([weight, weight.new_zeros(more.numel())])
        data[GIVEN] = torch.cat([marks, marks.new_ones(more.numel())])

    def _add_to_diagonal(
        self, edge_index: Tensor, weight: Tensor, num_nodes: int, replaces: bool
    ) -> tuple[Tensor, Tensor]:
        """Add the weight of a self-loop to that of the existing ones, or replace it."""
        is_loop = edge_index[0] == edge_index[1]
        loops = weight.new_full((num_nodes,), 2.0 if self.improved else 1.0)
        if not replaces:
            loops.index_add_(0, edge_index[0, is_loop], weight[is_loop])
        nodes = torch.arange(num_nodes, device=edge_index.device)
        return (
            torch.cat([edge_index[:, ~is_loop], nodes.expand(2, -1)], dim=1),
            torch.cat([weight[~is_loop], loops]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Normalise) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        hidden = ("marks", "prefers_adj_t")
        given = {name: value for name, value in vars(self).items() if name not in hidden}
        options = ", ".join(f"{name}={value}" for name, value in given.items())
        return f"GCNNorm({options})"


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
            make: ``make(function, *args)`` calls a function of :mod:`gas.convert.scope`.
            value_of: Returns the value of an argument of the traced graph.
        """
        if self.normalised or self.weighted:
            weight = make(gcn_weights if self.normalised else weights)
        else:
            weight = value_of(self.weight)
        out = {}
        for name, argument in self.given.items():
            if name == self.features and self.pair is not ALONE:
                given = [value_of(each) if isinstance(each, Node) else each for each in argument]
                out[name] = make(source_pair, *given, form)
            elif name == self.features:
                pairs = getattr(self.layer, "takes_pairs", True)
                out[name] = make(sources, value_of(argument), form, pairs)
            elif name in self.other:
                out[name] = make(sources, value_of(argument), SQUARE)
            elif name == self.adjacency:
                out[name] = make(edges, form, weight)
            elif name != WEIGHT or argument is None:
                out[name] = value_of(argument)
        if self.normalised or self.weighted or self.weight is not None:
            out[WEIGHT] = make(edge_weight, form, weight)
        return out


def bind_arguments(layer: Any, node: Node) -> dict[str, Any]:
    """Return the arguments that a node gives to a layer, by the names of its parameters."""
    signature = inspect.signature(layer.forward)
    found = signature.bind(*node.args, **node.kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


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
    edges = [key for key, value in bound.items() if value is adjacency]
    given = {key: value for key, value in bound.items() if isinstance(value, Node)}
    rows = [key for key, value in given.items() if kinds[value] == "rows"]
    pairs = [
        key for key, value in bound.items()
        if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], Node)
        and kinds[value[0]] == "rows" and (value[1] is None or isinstance(value[1], Node))
    ]  # fmt: skip
    rows = [*pairs[:1], *rows]
    if any(turns_round(value, adjacency) for value in given.values()):
        raise direction_error(f"'{name}' ({type(layer).__name__})")
    if not edges or not rows:
        raise ValueError(
            f"'{name}' ({type(layer).__name__}) takes {', '.join(bound)}, and expected are rows of "
            f"nodes and the model's own '{adjacency.target}': edges that the model changes aren't "
            "those of mini-batches; change the graph before it is cut into parts"
        )
    return LayerCall(
        node, layer, name, bound, rows[0], tuple(rows[1:]), edges[0], bound.get(WEIGHT),
        name in normalised, name in weighted, pair=bound[pairs[0]][1] if pairs else ALONE,
        dropped=node.meta.get(DROP),
    )  # fmt: skip


def lacks_weight(net: Module, node: Node) -> bool:
    """Return whether a layer takes edge weights, but is called without any."""
    layer: Any = net.get_submodule(str(node.target))
    takes = WEIGHT in inspect.signature(layer.forward).parameters
    return takes and bind_arguments(layer, node).get(WEIGHT) is None


def disable_normalisation(layer: Any) -> Normalise | None:
    """Disable the normalisation of a layer, and return it as a transform of the whole graph.

    Changes:
        ``layer.normalize`` becomes false.
    """
    if isinstance(layer, pyg.SGConv | pyg.SSGConv):
        return Normalise(False, layer.add_self_loops)
    alone = isinstance(layer, pyg.LGConv | pyg.TAGConv)
    if not isinstance(layer, NORMALISING) or not layer.normalize:
        return None
    layer.normalize = False
    return Normalise(getattr(layer, "improved", False), not alone and layer.add_self_loops)


NORMALISING = (
    pyg.GCNConv, pyg.GCN2Conv, pyg.LGConv, pyg.FAConv, pyg.TAGConv, pyg.APPNP, pyg.DNAConv
)  # fmt: skip


def move_normalisation(
    net: Module, graph: Graph, edges: str, weighted: Sequence[str]
) -> tuple[Normalise | None, list[str], Added]:
    """Move normalisation from layers to the whole graph.

    Args:
        net: The module, which gets layers on the edges as they are.
        graph: Its traced graph, which is changed to call them.
        edges: The input that is the adjacency, unless its values are the weights.
        weighted: The names of layers that are given the values of the adjacency.

    Returns:
        The transform of the graph, the names of the layers that take its weights, and further
        layers.
    """
    called = {node.target for node in graph.nodes if node.op == "call_module"}
    found = {
        _hop_name(net, name): how
        for name, layer in net.named_modules()
        if _hop_name(net, name) in called and (how := disable_normalisation(layer)) is not None
    }
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in found:
            continue
        weight = bind_arguments(net.get_submodule(str(node.target)), node).get(WEIGHT)
        if isinstance(weight, Node) and weight.op != "placeholder":
            raise ValueError(
                f"'{node.target}' normalises weights that the model computes, '{weight.name}', "
                "which mini-batches can't: use normalize=False"
            )
        if isinstance(weight, Node) and weight.target != WEIGHT:
            found[str(node.target)].attribute = str(weight.target)
            node.replace_input_with(weight, None)
            if not weight.users:
                graph.erase_node(weight)
        found[str(node.target)].weighted = weight is not None or node.target in weighted
    if len(set(found.values())) > 1:
        raise ValueError(
            f"layers normalise the graph in different ways, {found}: build them alike, or with "
            "normalize=False"
        )
    transform = next(iter(found.values()), None)
    if transform is None or not transform.add_self_loops or not edges:
        return transform, list(found), {}
    added = _take_given_edges(net, graph, edges, found)
    if added:
        transform.marks = True
    return transform, list(found), added


def _take_given_edges(net: Module, graph: Graph, edges: str, normalised: Collection[str]) -> Added:
    """Have layers that don't normalise take the edges as they are."""
    added: Added = {}
    source = next(node for node in graph.nodes if node.target == edges)
    for node in list(graph.nodes):
        if not is_layer(net, node) or node.target in normalised:
            continue
        given = bind_arguments(net.get_submodule(str(node.target)), node)
        names = [name for name, value in given.items() if value is source]
        others = [str(value.target) for value in given.values() if isinstance(value, Node)]
        if len(names) != 1 or sum(name.startswith("edge_") for name in others) > 1:
            continue  # Its attributes of edges don't follow, so that it is refused.
        mark = next((each for each in graph.nodes if each.target == GIVEN), None)
        if mark is None:
            with graph.inserting_after(source):
                mark = graph.placeholder(GIVEN)
        name = f"_given_{len(added)}"
        added[name] = functools.partial(OnGivenEdges, target=str(node.target), edges=names[0])
        net.add_module(name, added[name](net))
        given.pop(names[0])
        with graph.inserting_before(node):
            made = graph.call_module(name, (source, mark), given)
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return added


def _hop_name(net: Module, name: str) -> str:
    """Return the name of the layer to call: of an unrolled layer, that of its hop."""
    if not isinstance(net.get_submodule(name), UNROLLED):
        return name
    return f"{name}.hop" if name else "hop"
