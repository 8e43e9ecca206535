"""Forms of calling each layer on a mini-batch that give the same result as on the graph.

Nothing is taken on trust: a layer is tried on a mini-batch of a small graph, and a form counts if
its outputs are those on the graph itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.fx import Node
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import BaseTransform

from gas.convert.scope import (
    FUSED,
    PAIR,
    SQUARE,
    Scope,
    edge_weight,
    edges,
    normalised_weights,
    sources,
    weights,
)
from gas.graph import with_edge_index
from gas.nn import FusedConv, reason_inexact

WEIGHT = "edge_weight"


class Normalise(BaseTransform):
    """The symmetric normalisation of a graph's edge weights, as PyG's layers compute it.

    It is that of the layout in which the graph is given: to the diagonal of an ``adj_t`` of
    ``torch.sparse``, PyG adds self-loops, and to an ``edge_index`` those that are missing.

    Args:
        improved: Weight self-loops by 2.
        add_self_loops: Add self-loops.
        weighted: Take the weights that the graph has. (default: ``True``)
    """

    by_value = False
    """Whether the module takes a list of edges with weights as a matrix, too."""

    takes_adj_t = True
    """Whether :func:`gas.cluster` gives it the graph with an ``adj_t``, not a list of edges."""

    def __init__(self, improved: bool, add_self_loops: bool, weighted: bool = True) -> None:
        self.improved = improved
        self.add_self_loops = add_self_loops
        self.weighted = weighted

    def forward(self, data: Data) -> Data:
        """See :class:`torch_geometric.transforms.GCNNorm`."""
        is_list = "edge_index" in data and not self.by_value
        data = with_edge_index(data)
        edge_index, weight = data.edge_index, data.get(WEIGHT)
        dtype = None if data.x is None or not data.x.is_floating_point() else data.x.dtype
        if edge_index is None:
            raise ValueError(
                "'data' has no 'edge_index', which the normalisation needs: give the graph with "
                "one instead of 'adj_t'"
            )
        if not self.weighted:  # A matrix has values always.
            weight = None if is_list or weight is None else weight.to(dtype)
        loops = self.add_self_loops
        if loops and not is_list:
            ones = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
            weight = ones if weight is None else weight
            edge_index, weight = self._add_to_diagonal(edge_index, weight, int(data.num_nodes or 0))
            loops = False
        data.edge_index, data.edge_weight = gcn_norm(
            edge_index, weight, data.num_nodes, self.improved, loops, dtype=dtype
        )
        return data

    def _add_to_diagonal(
        self, edge_index: Tensor, weight: Tensor, num_nodes: int
    ) -> tuple[Tensor, Tensor]:
        """Add a self-loop to the existing ones of a node."""
        is_loop = edge_index[0] == edge_index[1]
        loops = weight.new_full((num_nodes,), 2.0 if self.improved else 1.0)
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
        options = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"GCNNorm({options})"


def move_normalisation(layer: Any) -> Normalise | None:
    """Return the transform of the whole graph that a layer needs, and switch off the layer's own.

    Changes:
        ``layer.normalize`` is false afterwards.
    """
    if isinstance(layer, pyg.SGConv | pyg.SSGConv):
        return Normalise(False, layer.add_self_loops)
    alone = isinstance(layer, pyg.LGConv | pyg.TAGConv)
    if not isinstance(layer, NORMALISING) or not layer.normalize:
        return None
    layer.normalize = False
    return Normalise(getattr(layer, "improved", False), not alone and layer.add_self_loops)


NORMALISING = (pyg.GCNConv, pyg.GCN2Conv, pyg.LGConv, pyg.FAConv, pyg.TAGConv, pyg.APPNP)


@dataclass
class LayerCall:
    """Call of a message passing layer.

    * ``node``: the call; ``layer``: the layer; ``name``: where it is in the model.
    * ``given``: its arguments by the names of its parameters.
    * ``features``: the one of them whose rows are neighbours'; ``other``: further rows of nodes.
    * ``adjacency``, ``weight``: which are the edges and their weights.
    * ``cured``: whether weights must be those of the normalised graph; ``weighted``: whether it
      takes those of the adjacency without being given any.
    * ``form``: how it is called.
    """

    node: Node
    layer: Module
    name: str
    given: dict[str, Any]
    features: str
    other: tuple[str, ...]
    adjacency: str
    weight: Any
    cured: bool
    weighted: bool
    form: str = ""

    def arguments(
        self, form: str, make: Callable[..., Any], value_of: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Return the arguments of the call, in a form.

        Args:
            form: :data:`FUSED`, :data:`PAIR` or :data:`SQUARE`.
            make: ``make(function, *args)`` calls a function of :mod:`gas.convert.scope`.
            value_of: What an argument in the traced graph is.
        """
        if self.cured or self.weighted:
            weight = make(normalised_weights if self.cured else weights)
        else:
            weight = value_of(self.weight)
        out = {}
        for name, argument in self.given.items():
            if name == self.features:
                pairs = getattr(self.layer, "takes_pairs", True)
                out[name] = make(sources, value_of(argument), form, pairs)
            elif name in self.other:
                out[name] = make(sources, value_of(argument), SQUARE)
            elif name == self.adjacency:
                out[name] = make(edges, form, weight)
            elif name != WEIGHT:
                out[name] = value_of(argument)
        if self.cured or self.weighted or self.weight is not None:
            out[WEIGHT] = make(edge_weight, form, weight)
        return out


def bind_arguments(layer: Any, node: Node) -> dict[str, Any]:
    """Return the arguments that a node gives to a layer, by the names of its parameters."""
    return inspect.signature(layer.forward).bind(*node.args, **node.kwargs).arguments


def layer_call(
    node: Node,
    layer: Any,
    kinds: Mapping[Node, str],
    adjacency: Node,
    cured: Collection[str],
    weighted: Collection[str],
) -> LayerCall:
    """Describe the call of a layer by a node.

    Raises:
        ValueError: If the layer isn't given the model's own edges.
    """
    name = str(node.target)
    bound = bind_arguments(layer, node)
    edges = [key for key, value in bound.items() if value is adjacency]
    given = {key: value for key, value in bound.items() if isinstance(value, Node)}
    rows = [key for key, value in given.items() if kinds[value] == "rows"]
    if not edges or not rows:
        raise ValueError(
            f"'{name}' ({type(layer).__name__}) takes {', '.join(bound)}, and expected are rows of "
            f"nodes and the model's own '{adjacency.target}': edges that the model changes aren't "
            "those of mini-batches; change the graph before it is cut into parts"
        )
    return LayerCall(
        node, layer, name, bound, rows[0], tuple(rows[1:]), edges[0], bound.get(WEIGHT),
        name in cured, name in weighted,
    )  # fmt: skip


def find_form(
    call: LayerCall, expected: Tensor, value_of: Callable[[Node], Any], scopes: Sequence[Scope]
) -> str:
    """Find the form in which a layer's result on a mini-batch equals that on the graph.

    Args:
        call: The call of the layer.
        expected: What it gives on the graph, for the in-batch nodes.
        value_of: What the value of a node of the traced graph is in the mini-batch.
        scopes: The mini-batch in several layouts, in all of which it has to.

    Raises:
        ValueError: If there is none, saying why.
    """
    for form in (FUSED, PAIR, SQUARE):
        if form == FUSED and not isinstance(call.layer, FusedConv):
            continue
        if is_exact(call, form, expected, value_of, scopes):
            return form
    raise inexact_error(call)


def inexact_error(call: LayerCall) -> ValueError:
    """Return the error of a layer whose result on a mini-batch differs from that on the graph."""
    reasons = (reason_inexact(part) for part in call.layer.modules())
    reason = next(filter(None, reasons), "") or (
        "needs more of the graph than a node's own edges and their other ends: take another layer"
    )
    return ValueError(
        f"'{call.name}' ({type(call.layer).__name__}) isn't exact on mini-batches: it {reason}"
    )


def is_exact(
    call: LayerCall,
    form: str,
    expected: Tensor,
    value_of: Callable[[Node], Any],
    scopes: Sequence[Scope],
) -> bool:
    """Return whether a layer called in a form is exact in all layouts of a batch."""
    return all(_is_exact(call, form, expected, value_of, scope) for scope in scopes)


def _is_exact(
    call: LayerCall,
    form: str,
    expected: Tensor,
    value_of: Callable[[Node], Any],
    scope: Scope,
) -> bool:
    given = call.arguments(
        form,
        lambda function, *args: function(scope, *args),
        lambda a: value_of(a) if isinstance(a, Node) else a,
    )
    try:
        out = call.layer(**given)
    except Exception:  # Whatever a layer raises at what it can't take.
        return False
    return isinstance(out, Tensor) and is_close(out[: scope.batch_size], expected)


def is_close(found: Any, expected: Any) -> bool:
    """Return whether two results are equal up to rounding."""
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(is_close, found, expected))
    if not isinstance(expected, Tensor):
        return found == expected
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * scale + 1e-12, equal_nan=True)
