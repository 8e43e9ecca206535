"""Wrappers of modules that can't be traced as they are: single layers, and modules of a graph."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Sequence
from inspect import CO_VARARGS, CO_VARKEYWORDS
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from gas.convert.module.arguments import (
    ADJACENCY,
    UNSUPPORTED,
    features_parameter,
    find_method,
    graph_parameter,
    parameters,
)


class EncoderWrapper(Module):
    """Wrapper that calls a layer or a module, its child ``encoder``."""

    def __init__(self, layer: Module) -> None:
        super().__init__()
        self.encoder, self.training = layer, layer.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the child."""
        return self.encoder(*args, **kwargs)


def wrap_layer(layer: Module) -> Module:
    """Wrap a single layer into a module whose class has the same name."""
    return type(type(layer).__name__, (EncoderWrapper,), {})(layer)


def make_forward(kind: type[EncoderWrapper], parameters: Sequence[inspect.Parameter]) -> Any:
    """Return a ``forward`` with these parameters that calls that of ``kind`` by keywords."""

    def forward(self: Any, **values: Any) -> Any:
        return kind.forward(self, **values)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ordered = sorted(parameters, key=lambda each: each.default is not each.empty)
    # For what asks for the parameters of forward. Type checkers don't know this attribute.
    forward.__signature__ = inspect.Signature([own, *ordered])  # type: ignore[attr-defined]
    return forward


class _GlobalGraphWrapper(EncoderWrapper):
    """Wrapper that takes the graph, and sets the global variable from which a module reads it."""

    _variable = ""

    def forward(self, data: Data) -> Any:
        """Call the module with a graph as its global variable."""
        variables = type(self.encoder).forward.__globals__
        before, variables[self._variable] = variables[self._variable], data
        try:
            return self.encoder()
        finally:
            variables[self._variable] = before


class _KeptGraphWrapper(EncoderWrapper):
    """Wrapper that takes the graph or its tensors, and sets the attributes that keep them."""

    places: tuple[tuple[str, str, str], ...] = ()
    """Names: of the parameter, of the submodule that keeps its value, and of the attribute."""

    def forward(self, **given: Any) -> Any:
        """Call the module with a graph's values in its attributes."""
        kept = [(vars(self.encoder.get_submodule(of)), key, name) for name, of, key in self.places]
        before = [values.get(key) for values, key, _ in kept]
        rest = {name: given[name] for name in given if all(name != each[2] for each in kept)}
        try:
            for values, key, name in kept:
                values[key] = given[name]  # Python finds it before a buffer.
            return self.encoder(**rest)
        finally:
            for (values, key, _), old in zip(kept, before, strict=True):
                if old is None:
                    values.pop(key, None)
                else:
                    values[key] = old


def wrap_kept_graph(net: Module, data: Data) -> Module:
    """Wrap a module that keeps its graph into one, of the same name, that takes it as an argument.

    A kept graph is a ``Data`` in an attribute or a global variable, if ``forward`` takes nothing;
    or attributes that equal tensors of ``data`` that ``forward`` doesn't take. Other modules are
    returned as they are.
    """
    code = getattr(type(net).forward, "__code__", None)
    if code is None or isinstance(net, EncoderWrapper):
        return net
    named = {} if code.co_argcount + code.co_kwonlyargcount == 1 else parameters(net, "forward")
    takes_others = bool(code.co_flags & (CO_VARARGS | CO_VARKEYWORDS))
    if takes_others and named:
        return net
    if not takes_others and not named and (variable := _find_global(type(net).forward)):
        return type(type(net).__name__, (_GlobalGraphWrapper,), {"_variable": variable})(net)
    kept = [*_find_attributes(net)]
    places = [("data", of, key) for of, key, value in kept if isinstance(value, Data)]
    if named or len(places) != 1:
        takes_graph = graph_parameter(named, data)
        wanted = {} if takes_graph else {k: v for k, v in data.to_dict().items() if _is_input(k, v)}
        places = [
            (name, of, key) for of, key, value in kept for name in wanted
            if name not in named and _is_same(value, wanted[name])
        ]  # fmt: skip
    if not places:
        return net
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = {key: inspect.Parameter(key, kind, default=named[key]) for key in named}
    given |= {key: inspect.Parameter(key, kind) for key, _, _ in places}
    forward = make_forward(_KeptGraphWrapper, [*given.values()])
    members = {"places": tuple(places), "forward": forward}
    return type(type(net).__name__, (_KeptGraphWrapper,), members)(net)


class _RenamedEdgesWrapper(EncoderWrapper):
    """Wrapper that takes the edges as ``edge_index`` or ``adj_t``, and passes them as ``name``."""

    edges = name = ""

    def forward(self, **given: Any) -> Any:
        """Call the module with the edges under its own name for them."""
        given[self.name] = given.pop(self.edges)
        return self.encoder(**given)


def wrap_edges_by_other_names(net: Module, data: Data) -> Module:
    """Wrap a module whose edges have another name, ``forward(x, ei)``, into one of the same name.

    The edges are the only argument that it needs and the graph doesn't have. Other modules are
    returned as they are.
    """
    named = parameters(net, "forward") if find_method(net) == "forward" else {}
    needed = [name for name in named if named[name] is inspect.Parameter.empty]
    if len(needed) < 2 or any(name in ADJACENCY for name in named):
        return net
    features = "x" if "x" in named else features_parameter(named, data, "")
    found = [name for name in needed if name not in data and name not in (features, *UNSUPPORTED)]
    edges = [key for key in ("edge_index", "adj_t") if data.get(key) is not None]
    if len(found) != 1 or len(edges) != 1:  # Of two, which may differ, a name would have to say it.
        return net
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = [
        inspect.Parameter(edges[0] if name in found else name, kind, default=default)
        for name, default in named.items()
    ]
    members = {
        "edges": edges[0],
        "name": found[0],
        "forward": make_forward(_RenamedEdgesWrapper, given),
    }
    return type(type(net).__name__, (_RenamedEdgesWrapper,), members)(net)


def _find_global(forward: Any) -> str:
    """Return the name of the global variable that is a graph; "" unless there is one."""
    names = {e.argval for e in dis.get_instructions(forward) if e.opname == "LOAD_GLOBAL"}
    found = [name for name in names if isinstance(forward.__globals__.get(name), Data)]
    return found[0] if len(found) == 1 else ""


def _find_attributes(net: Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the module, name and value of each attribute that is no parameter."""
    for of, module in net.named_modules():
        for name, value in [*vars(module).items(), *module._buffers.items()]:
            yield of, name, value


def _is_input(name: str, value: Any) -> bool:
    """Return whether an attribute of a graph may be an argument of a module."""
    is_rows = isinstance(value, Tensor) or hasattr(value, "sparse_sizes")
    return is_rows and name != "y" and not name.endswith("_mask")


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are one, or equal dense tensors."""
    if value is other:
        return True
    if not all(
        isinstance(each, Tensor) and each.layout == torch.strided for each in (value, other)
    ):
        return False
    is_alike = value.shape == other.shape and value.dtype == other.dtype
    return is_alike and torch.equal(value.to(other.device), other)
