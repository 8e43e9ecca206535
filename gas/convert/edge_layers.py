"""Message passing layers of converted models that aren't layers of PyG."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from gas.graph import find_layout

FORWARD = "source_to_target"


class InexactLayerError(ValueError):
    """Error of a layer that isn't exact on mini-batches."""

    def __init__(self, text: str, layer: Module) -> None:
        super().__init__(text)
        self.layer = layer


class DifferentEdgesError(ValueError):
    """Error of layers that can't all take one normalised graph."""

    may_read_values = False
    is_last_word = False  # Whether it says why, if other ways don't convert the module either.


class EdgeLayer(Module):
    """A message passing layer that isn't one of PyG's: ``forward(edge_index, **rows)``."""


class WrappedLayer(EdgeLayer):
    """A layer whose edges are prepared before it is called.

    Args:
        net: The module that has the layer.
        target: The name of the layer.
        edges: The name of its parameter for the edges.
    """

    def __init__(self, net: Module, target: str, edges: str) -> None:
        super().__init__()
        object.__setattr__(self, "layer", net.get_submodule(target))  # Not a child twice.
        self.edges, self.target = edges, target


class OnMatrix(WrappedLayer):
    """A layer that reads the values of a weighted matrix, ``torch.sparse_csr``."""

    def forward(self, edge_index: Any, edge_weight: Any = None, **given: Any) -> Any:
        """Return what the layer gives."""
        rows = next(x for x in given.values() if isinstance(x, Tensor | tuple))
        num_cols, num_rows = [x.size(0) for x in (rows if isinstance(rows, tuple) else [rows] * 2)]
        layer: Any = self.layer
        matrix = make_matrix(edge_index, edge_weight, (num_rows, num_cols), "csr")
        return layer(**given, **{self.edges: matrix})


def make_matrix(edges: Tensor, weight: Tensor | None, sizes: tuple[int, int], layout: str) -> Any:
    """Return edges as a matrix of a layout, whose rows are destinations."""
    src, dst = edges
    order = (dst * sizes[1] + src).argsort(stable=True)
    counts = torch.bincount(dst, minlength=sizes[0])
    rowptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    value = None if weight is None else weight.view(-1)[order]
    return find_layout(layout).make(rowptr, src[order], value, sizes[1])


class Propagation(EdgeLayer):
    """The messages of a layer, whose ``forward`` is followed up to them.

    Args:
        layer: A layer of PyG's kind.
    """

    def __init__(self, layer: MessagePassing) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # Not a child: it has this one.

    def forward(self, edge_index: Any, **given: Any) -> Any:
        """Return what ``layer.propagate`` gives, of edges to where messages go."""
        layer: Any = self.layer
        flow, layer.flow = layer.flow, FORWARD
        try:
            return type(layer).propagate(layer, edge_index, **given)
        finally:
            layer.flow = flow


def bind(layer: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a layer's call, by the names of its parameters."""
    signature = inspect.signature(layer.forward)
    found = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


class DirectionError(ValueError):
    """Error of messages that are passed against the direction of the edges."""


def direction_error(what: str) -> DirectionError:
    """Return the error of messages that are passed against the direction of the edges."""
    return DirectionError(
        f"{what} passes messages from the destinations of edges to their sources, of which a "
        "mini-batch doesn't have all edges: turn the graph round, data.edge_index.flip(0), and "
        "pass messages from edge_index[0] to edge_index[1]; or pass those of one direction by a "
        "layer that takes edge_index.flip(0), such as SimpleConv"
    )
