"""Message passing layers that are no layers of PyG, and hops of those that are followed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch.fx import Proxy
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from gas.convert.values.known import KnownProxy, walk_back
from gas.convert.values.traced_matrix import TracedMatrix
from gas.graph import WEIGHT
from gas.nn import SimpleConv

FORWARD = "source_to_target"


class InexactLayerError(ValueError):
    """Error of a layer that isn't exact on mini-batches."""

    def __init__(self, text: str, layer: Module) -> None:
        super().__init__(text)
        self.layer = layer


def several_values_error(name: str, layer: Module, value: Any) -> InexactLayerError:
    """Return the error of a layer that returns anything but one tensor."""
    return InexactLayerError(
        f"'{name}' ({type(layer).__name__}) returns a {type(value).__name__}, expected one tensor "
        "with a row for each node",
        layer,
    )


class EdgeLayer(Module):
    """A message passing layer that isn't one of PyG's: ``forward(edge_index, **rows)``."""


class Propagation(EdgeLayer):
    """The messages of a layer, whose ``forward`` is followed up to them."""

    def __init__(self, layer: MessagePassing) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # Not a child: it has this one.

    def forward(self, edge_index: Any, size_rows: Any = None, **given: Any) -> Any:
        """Return what ``layer.propagate`` gives, of edges to where messages go.

        ``size_rows`` has a row for each node, if no other argument has.
        """
        layer: Any = self.layer
        if size_rows is not None:
            ends = size_rows if isinstance(size_rows, tuple) else (size_rows, size_rows)
            given["size"] = tuple(rows.size(0) for rows in ends)
        flow, layer.flow = layer.flow, FORWARD
        try:
            return type(layer).propagate(layer, edge_index, **given)
        finally:
            layer.flow = flow


def bind_arguments(layer: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a layer's call, by the names of its parameters."""
    signature = inspect.signature(layer.forward)
    found = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


class DirectionError(ValueError):
    """Error of messages that are passed against the direction of the edges."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} passes messages from the destinations of edges to their sources, of which a "
            "mini-batch doesn't have all edges: turn the graph round, data.edge_index.flip(0), and "
            "pass messages from edge_index[0] to edge_index[1]; or pass those of one direction by "
            "a layer that takes edge_index.flip(0), such as SimpleConv"
        )


# Layers that propagate several times without a transformation in between; unrolled into hops.
UNROLLED = (pyg.APPNP, pyg.SGConv, pyg.SSGConv, pyg.TAGConv)
LayerTypes = tuple[type[MessagePassing], ...]
DROP = "drops_edges"  # What a layer's node notes: the call, its probability, and if weights drop.


def find_layout_sensitive_types(
    net: Module, traced_types: LayerTypes
) -> list[type[MessagePassing]]:
    """Find the types of layers that may treat a matrix, or turned edges, in their own way."""
    dubious = [
        type(layer) for layer in _whole_layers(net, traced_types)
        if layer.flow != FORWARD
        or (is_of_user(layer) and "SparseTensor" in type(layer).forward.__code__.co_names)
    ]  # fmt: skip
    return list(dict.fromkeys(dubious))


def is_of_user(layer: Module) -> bool:
    """Return whether a layer is neither PyG's nor this library's."""
    return not type(layer).__module__.startswith(("torch_geometric.", "gas."))


def _whole_layers(net: Module, traced_types: LayerTypes) -> list[Any]:
    layers = [each for each in net.modules() if isinstance(each, MessagePassing)]
    return [each for each in layers if not isinstance(each, (*UNROLLED, *traced_types))]


def set_forward_flow(net: Module, traced_types: LayerTypes) -> list[Any]:
    """Set the usual ``flow`` of layers that pass messages to ``edge_index[0]``.

    Returns:
        These layers, which aren't traced. They are given ``edge_index.flip(0)``.
    """
    found = [layer for layer in _whole_layers(net, traced_types) if layer.flow != FORWARD]
    for layer in found:
        layer.flow = FORWARD
    return found


def add_hop(layer: Any) -> None:
    """Give a layer the child that computes one of its hops."""
    layer.hop = SimpleConv(aggr="add") if isinstance(layer, UNROLLED) else Propagation(layer)


class Hops:
    """Replacement of ``propagate`` of an unrolled layer: a layer for every hop."""

    def __init__(self, layer: Any) -> None:
        self._layer, self.dropout = layer, 0.0
        if isinstance(layer, pyg.APPNP):  # It drops weights of edges, others for each hop.
            self.dropout, layer.dropout = layer.dropout, 0.0
        add_hop(layer)

    def __call__(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        """See :meth:`torch_geometric.nn.MessagePassing.propagate`."""
        if isinstance(edge_index, TracedMatrix):
            if getattr(self._layer, "fuse", False):
                return self._multiply(edge_index, given)
            matrix, edge_index = edge_index, torch.stack([edge_index.col, edge_index.row])
            if matrix.value is not None and given.get(WEIGHT) is None:
                given[WEIGHT] = matrix.value
        if self._layer.flow != FORWARD:
            edge_index = edge_index.flip(0)
        if isinstance(self._layer, UNROLLED):
            out = self._layer.hop(given["x"], edge_index, given.get(WEIGHT))
            if self.dropout > 0:
                out.node.meta[DROP] = out.node.name, self.dropout, True
            return out
        if not any(map(_has_row_per_node, given.values())):
            given["size_rows"] = _find_size_rows(size)
        return self._layer.hop(edge_index, **given)

    def _multiply(self, matrix: TracedMatrix, given: dict[str, Any]) -> Any:
        """Return what the layer computes of a matrix, as PyG calls it."""
        out = matrix
        for function in (self._layer.message_and_aggregate, self._layer.update):
            names = list(inspect.signature(function).parameters)[1:]
            out = function(out, **{name: given[name] for name in names if name in given})
        return out


def _has_row_per_node(value: Any) -> bool:
    pair = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(each, KnownProxy) and each.has_row_per_node for each in pair)


def _find_size_rows(size: Any) -> Any:
    """Return the rows of nodes whose number a layer is given as its ``size``, or ``None``."""
    end = size[1] if isinstance(size, tuple | list) else None
    if not isinstance(end, Proxy):
        return None
    found = (KnownProxy(node, end.tracer) for node in walk_back(end.node))
    return next((each for each in found if each.has_row_per_node), None)


@contextlib.contextmanager
def unroll_layers(net: Module, traced_types: LayerTypes) -> Iterator[None]:
    """Call a separate layer for every hop of the unrolled layers, in this context."""
    layers = [layer for layer in net.modules() if isinstance(layer, (*UNROLLED, *traced_types))]
    for layer in layers:
        object.__setattr__(layer, "propagate", Hops(layer))
    try:
        yield
    finally:
        for layer in layers:
            if isinstance(layer, pyg.APPNP):
                layer.dropout = layer.propagate.dropout
            del layer.__dict__["propagate"]
