"""The message passing layers that a module of typed graphs calls: looked at, one call at a time.

Modules of typed graphs hold their features in dictionaries and loop over them, which can't be
traced as that of one type can. What is done around a layer is therefore done when it is called:
which types its rows are of says the ``edge_index`` that it is given, one of the batch's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MessagePassing

from gas.graph import EdgeType
from gas.nn import FusedConv
from gas.scalable.hetero.semantic import HANConv


class Layer(NamedTuple):
    """A call of a layer: which it is of the calls, from 0, and the layer's name."""

    number: int
    name: str


class FusedCall(NamedTuple):
    """A call of a layer of :mod:`gas.nn`.

    * ``number``: which it is of the calls.
    * ``layer``: the layer.
    * ``kind``: its relation.
    * ``edges``: the edges of all relations.
    * ``x``: rows of the nodes where its edges start, or of these and of those where they end.
    """

    number: int
    layer: FusedConv
    kind: EdgeType
    edges: Mapping[EdgeType, Tensor]
    x: Any

    @property
    def source(self) -> Tensor:
        """Rows of the nodes where edges start."""
        return self.x[0] if isinstance(self.x, tuple) else self.x

    @property
    def target(self) -> Tensor | None:
        """Rows of the nodes where edges end, if they have some."""
        return self.x[1] if isinstance(self.x, tuple) else self.x


class Visitor(Protocol):
    """Hooks around layers."""

    def source(self, layer: Layer, kind: str, x: Tensor) -> Tensor:
        """Return the layer's input for source rows of a type."""

    def fused(self, call: FusedCall) -> tuple[Any, Any]:
        """Return the features and edges of a layer of :mod:`gas.nn`, which takes an adjacency."""

    def mean(self, layer: Layer, kind: str, rows: Tensor) -> Tensor:
        """Return the mean over all nodes of a type, for a layer that asks for it."""

    def output(self, layer: Layer, kind: str, out: Tensor) -> Tensor:
        """Return the layer's output for rows of a type."""


@contextlib.contextmanager
def around_layers(
    net: Module, edge_index: Mapping[EdgeType, Tensor], visitor: Visitor
) -> Iterator[None]:
    """In this context a visitor sees every message passing layer that a module calls.

    Raises:
        ValueError: When a layer is given edges, or returns something, that can't be followed.
    """
    state = _State(edge_index, visitor)
    with contextlib.ExitStack() as hooks:
        for name, layer in net.named_modules():
            if isinstance(layer, MessagePassing):
                before, after = partial(state.before, name), partial(state.after, name)
                hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(layer.register_forward_hook(after).remove)
                if isinstance(layer, HANConv):
                    hooks.callback(layer.__dict__.pop, "mean_over_nodes", None)
        yield


@functools.lru_cache(maxsize=128)
def _parameters(layer: type[MessagePassing]) -> tuple[str, ...]:
    """Return the parameters of a layer's forward; cached, as inspection is slow."""
    return tuple(inspect.signature(layer.forward).parameters)[1:]


class _State:
    """State of a running module."""

    def __init__(self, edge_index: Mapping[EdgeType, Tensor], visitor: Visitor) -> None:
        self._edges, self._visitor = edge_index, visitor
        self._kinds = {id(edges): kind for kind, edges in edge_index.items()}
        self._calls = 0
        self._running: list[tuple[Layer, EdgeType | None]] = []

    def before(
        self, name: str, layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = Layer(self._calls, name)
        if self._running:  # A layer in a layer, which sees what that was given.
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
            sources = {self._kind(name, layer, each)[0] for each in edges.values()}
            x = {
                key: self._visitor.source(call, key, value) if key in sources else value
                for key, value in x.items()
            }
        else:
            kind = self._kind(name, layer, edges)
            if isinstance(x, tuple | list):
                x = (self._visitor.source(call, kind[0], x[0]), *x[1:])
            else:
                x = self._visitor.source(call, kind[0], x)
            others = [value for value in given.values() if value is not None]
            if isinstance(layer, FusedConv) and len(others) == 2:
                fused = FusedCall(call.number, layer, kind, self._edges, x)
                x, edges = self._visitor.fused(fused)
        self._running.append((call, kind))
        new = {**given, first: x, second: edges}
        return tuple(new.pop(name) for name in list(new)[: len(args)]), new

    def after(self, name: str, layer: Module, _: tuple[Any, ...], out: Any) -> Any:
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

    def _kind(self, name: str, layer: Module, edges: Any) -> EdgeType:
        kind = self._kinds.get(id(edges))
        if kind is None:
            raise ValueError(
                f"'{name}' ({type(layer).__name__}) is given other edges than those of the graph: "
                "what changes edges belongs to the graph, before it is cut into parts"
            )
        return kind


TRAIN = {torch.nn.functional.dropout: "training", torch.dropout: "train"}


class Dropouts(TorchFunctionMode):
    """Notes what was dropped out of what, so that histories get rows as they were before."""

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
                self._found[id(out)] = out, x, p  # Kept, as are its id.
        return out

    def before(self, x: Tensor) -> tuple[Tensor, float]:
        """Return a tensor before dropout and the probability; itself and 0 without dropout."""
        if id(x) not in self._found:
            return x, 0.0
        _, whole, p = self._found[id(x)]
        return whole, p
