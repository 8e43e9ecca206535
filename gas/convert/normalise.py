"""Normalisation, which moves from layers to the whole graph, and layers that take other edges."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.fx import Node, Proxy
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import BaseTransform

from gas.convert.edge_layers import DROP, UNROLLED, DifferentEdgesError, OnMatrix, bind
from gas.convert.layers import OnSomeEdges, Wrapped, wrap_layers
from gas.convert.preparation import GIVEN
from gas.convert.trace import Added
from gas.convert.traced import Traced
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
    """Take weighted edges as a matrix, as the module does, even if they are given as a list."""

    attribute = WEIGHT
    """The attribute with the weights before, which ``edge_weight`` replaces."""

    marks = False
    """Mark the original edges, for layers that take no added self-loops."""

    keeps_loops = True
    """Keep self-loops when edges are dropped, as layers add them afterwards."""

    prefers_adj_t = False
    """Take the ``adj_t`` of a graph that has both, as the module does."""

    takes_adj_t = True
    """Take a graph from :func:`gas.cluster` with an ``adj_t`` instead of an ``edge_index``."""

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


def _find_normalising_layers(traced: Traced) -> dict[str, Normalise]:
    """Disable the normalisation of layers that are called, and return it by their names."""
    called = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    return {
        _hop_name(traced.net, name): how
        for name, layer in traced.net.named_modules()
        if _hop_name(traced.net, name) in called
        and (how := disable_normalisation(layer)) is not None
    }


def normalise_edges(
    edge_index: Any, weight: Any, num_nodes: Any, improved: bool, loops: bool, dtype: Any
) -> Any:
    """Compute the edges and weights of a symmetric normalisation, as a function that is traced."""
    args = edge_index, weight, num_nodes, improved, loops
    if isinstance(edge_index, Proxy):
        return edge_index.tracer.create_proxy("call_function", normalise_edges, (*args, dtype), {})
    return gcn_norm(*args, dtype=dtype)


def write_normalisation(traced: Traced) -> None:
    """Write what layers normalise by themselves into a traced graph, each on its own edges.

    Raises:
        ValueError: If a layer normalises edges that are left of a dropout.
    """
    net, graph, found = traced.net, traced.graph, _find_normalising_layers(traced)
    for node in list(graph.nodes):
        if node.op != "call_module" or node.target not in found:
            continue
        if DROP in node.meta:
            raise ValueError(
                f"'{node.target}' normalises edges that are left of a dropout, and other layers "
                "take others: build them alike, or drop no edges"
            )
        layer: Any = net.get_submodule(str(node.target))
        given, how = bind(layer, node.args, node.kwargs), found[str(node.target)]
        with graph.inserting_before(node):
            size = graph.call_method("size", (given["x"], layer.node_dim))
            dtype = graph.call_function(getattr, (given["x"], "dtype"))
            args = given["edge_index"], given.get(WEIGHT), size, how.improved, how.add_self_loops
            made = graph.call_function(normalise_edges, (*args, dtype))
            if how.add_self_loops:
                given["edge_index"] = graph.call_function(operator.getitem, (made, 0))
            given[WEIGHT] = graph.call_function(operator.getitem, (made, 1))
        node.args, node.kwargs = (), bind(layer, (), given)


def move_normalisation(traced: Traced) -> Added:
    """Move normalisation from layers to the whole graph, and note it in the traced module.

    Returns:
        Layers that call those without normalisation on the graph's own edges.

    Raises:
        DifferentEdgesError: If layers normalise the graph in different ways, or its edges are
            prepared otherwise.
    """
    net, graph, found = traced.net, traced.graph, _find_normalising_layers(traced)
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in found:
            continue
        layer: Any = net.get_submodule(str(node.target))
        weight = bind(layer, node.args, node.kwargs).get(WEIGHT)
        if isinstance(weight, Node) and weight.op != "placeholder":
            error = DifferentEdgesError(
                f"'{node.target}' normalises weights that the model computes, '{weight.name}', or "
                "by another rule than other layers, which mini-batches can't: use normalize=False, "
                "or the same options of self-loops in all layers"
            )
            error.is_last_word = True
            raise error
        if isinstance(weight, Node) and weight.target != WEIGHT:
            found[str(node.target)].attribute = str(weight.target)
            node.replace_input_with(weight, None)
            if not weight.users:
                graph.erase_node(weight)
        found[str(node.target)].weighted = weight is not None or node.target in traced.weighted
    if len(set(found.values())) > 1:
        raise DifferentEdgesError(
            f"layers normalise the graph in different ways, {found}: build them alike, or with "
            "normalize=False"
        )
    transform = next(iter(found.values()), None)
    if transform is None:
        return {}
    if traced.inputs.made:  # Each layer normalises its own edges then.
        raise DifferentEdgesError("layers take different graphs")
    traced.transform, traced.normalised = transform, list(found)
    takes_others = transform.add_self_loops and not traced.inputs.by_value
    added = _take_given_edges(traced) if takes_others else {}
    if added:
        transform.marks = True
    transform.fit_to(traced.inputs.is_matrix, traced.inputs.edges)
    traced.graphs = [transform(each) for each in traced.graphs]
    return added


def _take_given_edges(traced: Traced) -> Added:
    """Have layers that don't normalise take the edges as they are."""

    def find(node: Node, source: Node, given: dict[str, Any]) -> Wrapped | None:
        names = [name for name, value in given.items() if value is source]
        others = [str(value.target) for value in given.values() if isinstance(value, Node)]
        if node.target in traced.normalised or len(names) != 1:
            return None
        if sum(name.startswith("edge_") for name in others) > 1:
            return None  # Its attributes of edges don't follow, so that it is refused.
        mark = next((each for each in traced.graph.nodes if each.target == GIVEN), None)
        if mark is None:
            with traced.graph.inserting_after(source):
                mark = traced.graph.placeholder(GIVEN)
        return names[0], (source, mark), {}

    return wrap_layers(traced, OnSomeEdges, "_given_", find)


def take_matrices(traced: Traced) -> Added:
    """Have layers without a parameter for weights take a matrix, of which they may read values."""

    def find(node: Node, source: Node, given: dict[str, Any]) -> Wrapped | None:
        layer: Any = traced.net.get_submodule(str(node.target))
        names = [name for name, value in given.items() if value is source]
        takes_weights = WEIGHT in inspect.signature(layer.forward).parameters
        return None if len(names) != 1 or takes_weights else (names[0], (source,), {})

    return wrap_layers(traced, OnMatrix, "_matrix_", find)


def _hop_name(net: Module, name: str) -> str:
    """Return the name of the layer to call: of an unrolled layer, that of its hop."""
    if not isinstance(net.get_submodule(name), UNROLLED):
        return name
    return f"{name}.hop" if name else "hop"
