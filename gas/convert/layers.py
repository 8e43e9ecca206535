"""How each layer of a model is called on a mini-batch, so that it gives what it does on the graph.

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
from gas.nn.conv import FusedConv
from gas.nn.inexact import why_inexact

WEIGHT = "edge_weight"


class Normalise(BaseTransform):
    """The symmetric normalisation of a graph's edge weights, as PyG's layers compute it.

    Args:
        improved: Weight self-loops by 2.
        add_self_loops: Add the self-loops that are missing.
        weighted: Take the weights that the graph has. (default: ``True``)
    """

    def __init__(self, improved: bool, add_self_loops: bool, weighted: bool = True) -> None:
        self.improved = improved
        self.add_self_loops = add_self_loops
        self.weighted = weighted

    def forward(self, data: Data) -> Data:
        """See :class:`torch_geometric.transforms.GCNNorm`."""
        edge_index, weight = data.edge_index, data.get(WEIGHT) if self.weighted else None
        dtype = None if data.x is None or not data.x.is_floating_point() else data.x.dtype
        if edge_index is None:
            raise ValueError(
                "'data' has no 'edge_index', which the normalisation needs: give the graph with "
                "one instead of 'adj_t'"
            )
        data.edge_index, data.edge_weight = gcn_norm(
            edge_index, weight, data.num_nodes, self.improved, self.add_self_loops, dtype=dtype
        )
        return data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Normalise) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"GCNNorm({options})"


def cure(layer: Any) -> Normalise | None:
    """What the whole graph has to go through for a layer, which is told that it has.

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
    """One call of a message passing layer.

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
        """The arguments of the call, in a form.

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


def given_to(layer: Any, node: Node) -> dict[str, Any]:
    """The arguments that a node gives to a layer, by the names of its parameters."""
    return inspect.signature(layer.forward).bind(*node.args, **node.kwargs).arguments


def layer_call(
    node: Node,
    layer: Any,
    kinds: Mapping[Node, str],
    adjacency: Node,
    cured: Collection[str],
    weighted: Collection[str],
) -> LayerCall:
    """What a node that calls a layer calls it with.

    Raises:
        ValueError: If the layer isn't given the model's own edges.
    """
    name = str(node.target)
    bound = given_to(layer, node)
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
    """In which form a layer gives on a mini-batch what it gives on the graph.

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
        if all(_is_exact(call, form, expected, value_of, scope) for scope in scopes):
            return form
    reasons = (why_inexact(part) for part in call.layer.modules())
    reason = next(filter(None, reasons), "") or (
        "needs more of the graph than a node's own edges and their other ends: take another layer"
    )
    raise ValueError(
        f"'{call.name}' ({type(call.layer).__name__}) isn't exact on mini-batches: it {reason}"
    )


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
    """Whether two results are equal up to rounding."""
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
