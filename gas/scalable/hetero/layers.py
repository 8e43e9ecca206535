"""Hooks around the message passing layers that a heterogeneous module calls, and HAN's layer.

Modules for heterogeneous graphs loop over dictionaries of features, which can't be traced like
modules of one node type. Inputs and outputs of a layer are therefore changed when it is called: its
``edge_index``, which is one of the batch's, tells the types of its rows. The weights of HAN's
attention over relations are means over all nodes of a type.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MessagePassing

from gas.graph import EdgeType
from gas.history import History
from gas.nn import FusedConv


class LayerCall(NamedTuple):
    """A call of a layer: its number among all calls, from 0, and the layer's name."""

    number: int
    name: str


class FusedCall(NamedTuple):
    """A call of a layer of :mod:`gas.nn`.

    * ``number``: its number among all calls.
    * ``layer``: the layer.
    * ``kind``: its relation.
    * ``edges``: the edges of all relations.
    * ``x``: rows of the source nodes, or of source and destination nodes.
    """

    number: int
    layer: FusedConv
    kind: EdgeType
    edges: Mapping[EdgeType, Tensor]
    x: Any

    @property
    def source(self) -> Tensor:
        """Rows of the source nodes."""
        return self.x[0] if isinstance(self.x, tuple) else self.x

    @property
    def target(self) -> Tensor | None:
        """Rows of the destination nodes, if there are any."""
        return self.x[1] if isinstance(self.x, tuple) else self.x


class Visitor:
    """Changes inputs and outputs of layers; this base class leaves them as in a full batch."""

    def source(self, layer: LayerCall, kind: str, x: Tensor) -> Tensor:
        """Return the layer's input for source rows of a type."""
        return x

    def fused_inputs(self, call: FusedCall) -> tuple[Any, Any]:
        """Return the features and edges of a layer of :mod:`gas.nn`, which takes an adjacency."""
        return call.x, call.edges[call.kind]

    def mean(self, layer: LayerCall, kind: str, rows: Tensor) -> Tensor:
        """Return the mean over all nodes of a type, for a :class:`HANConv`."""
        return mean_rows(kind, rows)

    def output(self, layer: LayerCall, kind: str, out: Tensor) -> Tensor:
        """Return the layer's output for rows of a type."""
        return out


@contextlib.contextmanager
def visit_layers(
    net: Module, edge_index: Mapping[EdgeType, Tensor], visitor: Visitor
) -> Iterator[None]:
    """Call a visitor's methods around every message passing layer of a module in this context.

    Raises:
        ValueError: When edges or outputs of a layer aren't supported.
    """
    state = _LayerHooks(edge_index, visitor)
    with contextlib.ExitStack() as hooks:
        for name, layer in net.named_modules():
            if isinstance(layer, MessagePassing):
                enter, leave = partial(state.enter, name), partial(state.leave, name)
                hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(layer.register_forward_hook(leave).remove)
                if isinstance(layer, HANConv):
                    hooks.callback(layer.__dict__.pop, "mean_over_nodes", None)
        yield


@functools.lru_cache(maxsize=128)
def _parameters(layer: type[MessagePassing]) -> tuple[str, ...]:
    """Return the parameters of a layer's forward; cached, as inspection is slow."""
    return tuple(inspect.signature(layer.forward).parameters)[1:]


class _LayerHooks:
    """The hooks of :func:`visit_layers`, and the layers that are running."""

    def __init__(self, edge_index: Mapping[EdgeType, Tensor], visitor: Visitor) -> None:
        self._edges, self._visitor = edge_index, visitor
        self._kinds = {id(edges): kind for kind, edges in edge_index.items()}
        self._calls = 0
        self._running: list[tuple[LayerCall, EdgeType | None]] = []

    def enter(
        self, name: str, layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change the arguments of a layer."""
        call = LayerCall(self._calls, name)
        if self._running:  # A layer inside a layer gets its inputs unchanged.
            self._running.append((call, None))
            return args, kwargs
        given = dict(zip(_parameters(layer.__class__), args, strict=False)) | kwargs
        first, *_ = given
        second = "edge_index" if "edge_index" in given else "edge_index_dict"
        x, edges = given[first], cast(Any, given.get(second))
        self._calls += 1
        if isinstance(layer, HANConv):
            layer.__dict__["mean_over_nodes"] = partial(self._visitor.mean, call)
        if isinstance(edges, Mapping):
            kind = None
            sources = {self._edge_type(name, layer, each)[0] for each in edges.values()}
            x = {
                key: self._visitor.source(call, key, value) if key in sources else value
                for key, value in x.items()
            }
        else:
            kind = self._edge_type(name, layer, edges)
            if isinstance(x, tuple | list):
                x = (self._visitor.source(call, kind[0], x[0]), *x[1:])
            else:
                x = self._visitor.source(call, kind[0], x)
            others = [value for value in given.values() if value is not None]
            if isinstance(layer, FusedConv) and len(others) == 2:
                fused = FusedCall(call.number, layer, kind, self._edges, x)
                x, edges = self._visitor.fused_inputs(fused)
        self._running.append((call, kind))
        new = {**given, first: x, second: edges}
        return tuple(new.pop(name) for name in list(new)[: len(args)]), new

    def leave(self, name: str, layer: Module, _: tuple[Any, ...], out: Any) -> Any:
        """Change the output of a layer."""
        call, kind = self._running.pop()
        if self._running:
            return out
        if kind is not None and isinstance(out, Tensor):
            return self._visitor.output(call, kind[2], out)
        if kind is None and isinstance(out, dict):
            return {
                key: self._visitor.output(call, key, value) if isinstance(value, Tensor) else value
                for key, value in out.items()
            }
        what = "a dictionary of tensors" if kind is None else "one tensor"
        raise ValueError(
            f"'{name}' ({type(layer).__name__}) returns a {type(out).__name__}, expected {what}, "
            "with a row for each node"
        )

    def _edge_type(self, name: str, layer: Module, edges: Any) -> EdgeType:
        """Return the relation of a layer's edges."""
        kind = self._kinds.get(id(edges))
        if kind is None:
            raise ValueError(
                f"'{name}' ({type(layer).__name__}) is given other edges than those of the graph: "
                "what changes edges belongs to the graph, before it is cut into parts"
            )
        return kind


TRAIN = {torch.nn.functional.dropout: "training", torch.dropout: "train"}


class Dropouts(TorchFunctionMode):
    """Record the inputs of dropout in this context: histories store rows from before it."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[Tensor, Tensor, float]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in TRAIN:
            p, training, inplace = (
                kwargs.get(name, args[place] if len(args) > place else default)
                for place, (name, default) in enumerate(
                    (("p", 0.5), (TRAIN[func], True), ("inplace", False)), start=1
                )
            )
            if training and p > 0 and not inplace:
                x = args[0] if args else kwargs["input"]
                self._found[id(out)] = out, x, p  # A reference to out keeps its id valid.
        return out

    def find_input(self, out: Tensor) -> tuple[Tensor, float]:
        """Return the input and the probability of the dropout that returned ``out``, if any.

        ``out`` and 0 otherwise.
        """
        if id(out) not in self._found:
            return out, 0.0
        _, whole, p = self._found[id(out)]
        return whole, p


# HAN ----------------------------------------------------------------------------------------------


def mean_rows(kind: str, rows: Tensor) -> Tensor:
    """Return the mean of all rows, or zero if there are none."""
    return rows.sum(0) / max(1, rows.size(0))


class HANConv(pyg.HANConv):
    """:class:`torch_geometric.nn.HANConv` whose means over all nodes can be replaced."""

    mean_over_nodes = staticmethod(mean_rows)
    """Return the mean of the scores of all nodes of a type, ``[n, relations]``."""

    def forward(
        self,
        x_dict: Mapping[str, Tensor],
        edge_index_dict: Mapping[EdgeType, Tensor],
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        """See :class:`torch_geometric.nn.HANConv`."""
        if return_semantic_attention_weights:
            return super().forward(x_dict, edge_index_dict, True)
        shape = -1, self.heads, self.out_channels // self.heads
        h = {kind: self.proj[kind](x).view(shape) for kind, x in x_dict.items()}
        outs: dict[str, list[Tensor]] = {kind: [] for kind in x_dict}
        for (src, name, dst), edges in edge_index_dict.items():
            key, x = "__".join((src, name, dst)), (h[src], h[dst])
            lins = self.lin_src[key], self.lin_dst[key]
            alpha = tuple((rows * lin).sum(-1) for rows, lin in zip(x, lins, strict=True))
            outs[dst].append(self.propagate(edges, x=x, alpha=alpha).relu())
        return {kind: self._combine_relations(kind, rows) for kind, rows in outs.items()}

    def _combine_relations(self, kind: str, outs: list[Tensor]) -> Tensor | None:
        """Return the weighted sum of the outputs of a type's relations."""
        if len(outs) < 2:
            return outs[0] if outs else None
        rows = torch.stack(outs)
        scores = (self.q * self.k_lin(rows).tanh()).sum(-1).t()
        weight = self.mean_over_nodes(kind, scores).softmax(0)
        return (weight[:, None, None] * rows).sum(0)


def replace_han_convs(net: Module) -> Module:
    """Replace PyG's ``HANConv`` by that of this module, in place."""
    for layer in net.modules():
        if type(layer) is pyg.HANConv:
            layer.__class__ = HANConv
    return net


class Totals:
    """The sums of all rows of histories, which are updated with each push."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Tensor]] = {}  # With the history's version.

    def of(self, position: int, history: History) -> Tensor:
        """Return the sum of a history's rows, of shape ``[width]``, float64."""
        known = self._known.get(position)
        if known is None or known[0] != _history_version(history):
            known = _history_version(history), history.emb.double().sum(0)
            self._known[position] = known
        return known[1]

    def set(self, position: int, history: History, total: Tensor) -> None:
        """Store the sum after a push."""
        self._known[position] = _history_version(history), total


def _history_version(history: History) -> tuple[Any, ...]:
    return history.changes, history.num_resets
