"""Message passing layers of converted models that aren't layers of PyG."""

from __future__ import annotations

from typing import Any

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
