"""Message passing layers of converted models that aren't layers of PyG."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.nn import Module
from torch_geometric.nn import MessagePassing


class EdgeLayer(Module):
    """A message passing layer that isn't one of PyG's: ``forward(edge_index, **rows)``."""


class OnGivenEdges(EdgeLayer):
    """A layer on the edges of a graph as they are, without self-loops that others need.

    Args:
        net: The module that has the layer.
        target: The name of the layer.
        edges: The name of its parameter for the edges.
    """

    def __init__(self, net: Module, target: str, edges: str) -> None:
        super().__init__()
        object.__setattr__(self, "layer", net.get_submodule(target))  # Not a child twice.
        self.edges, self.target = edges, target

    def forward(self, edge_index: Any, is_given_edge: Any, **given: Any) -> Any:
        """Return what the layer gives."""
        layer: Any = self.layer
        return layer(**given, **{self.edges: edge_index[:, is_given_edge]})


class Propagation(EdgeLayer):
    """The messages of a layer, whose ``forward`` is followed up to them.

    Args:
        layer: A layer of PyG's kind.
    """

    def __init__(self, layer: MessagePassing) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # Not a child: it has this one.

    def forward(self, edge_index: Any, **given: Any) -> Any:
        """Return what ``layer.propagate`` gives."""
        layer: Any = self.layer
        return type(layer).propagate(layer, edge_index, **given)


def turns_round(value: Node, adjacency: Node) -> bool:
    """Return whether a value is the edges with sources and destinations exchanged."""
    if value.target == "flip":
        return value.args in ((adjacency, 0), (adjacency, [0]))
    ends: Any = value.args[0] if value.target is torch.stack else ()
    return [end.args for end in ends if isinstance(end, Node)] == [(adjacency, 1), (adjacency, 0)]


def direction_error(what: str) -> ValueError:
    """Return the error of messages that are passed against the direction of the edges."""
    return ValueError(
        f"{what} passes messages from the destinations of edges to their sources, of which a "
        "mini-batch doesn't have all edges: turn the graph round, data.edge_index.flip(0), and "
        "pass messages from edge_index[0] to edge_index[1]"
    )
