"""Wrappers of modules that can't be traced as they are: single layers, and modules of a graph."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator, Mapping, Sequence
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


def wrap(
    kind: type[EncoderWrapper], net: Module, wanted: Mapping[str, Any] | None = None, **members: Any
) -> Any:
    """Wrap a module into one whose class has the same name.

    Args:
        kind: The class of the wrapper.
        net: The module.
        wanted: The parameters of ``forward``, and their defaults, ``inspect.Parameter.empty`` for
            none. (default: those of the module)
        **members: Attributes of the class.
    """
    if wanted is not None:

        def forward(self: Any, **values: Any) -> Any:
            return kind.forward(self, **values)

        place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = {"self": inspect.Parameter.empty, **wanted}
        named = [inspect.Parameter(key, place, default=own[key]) for key in own]
        ordered = sorted(named, key=lambda each: each.default is not each.empty)
        # For what asks for the parameters of forward. Type checkers don't know this attribute.
        forward.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        members["forward"] = forward
    return type(type(net).__name__, (kind,), members)(net)


class _KeptGraphWrapper(EncoderWrapper):
    """Wrapper that takes the graph or its tensors, and sets the attributes that keep them."""

    places: Sequence[tuple[str, str | None, str]] = ()
    """Names: of the parameter, of the submodule that keeps its value, and of the attribute.

    Of a global variable of the module's file, the submodule is ``None``.
    """

    def forward(self, **given: Any) -> Any:
        """Call the module with a graph's values in its attributes."""
        kept = [(self._find_namespace(of), key, given[name]) for name, of, key in self.places]
        before = [values.get(key) for values, key, _ in kept]
        taken = {name for name, *_ in self.places}
        try:
            for values, key, value in kept:
                values[key] = value  # Python finds it before a buffer.
            return self.encoder(**{name: given[name] for name in given if name not in taken})
        finally:
            for (values, key, _), old in zip(kept, before, strict=True):
                if old is None:
                    values.pop(key, None)
                else:
                    values[key] = old

    def _find_namespace(self, of: str | None) -> dict[str, Any]:
        if of is None:
            return type(self.encoder).forward.__globals__
        return vars(self.encoder.get_submodule(of))


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
    kept = [*_find_attributes(net)]
    places: list[tuple[str, str | None, str]]
    places = [("data", of, key) for of, key, value in kept if isinstance(value, Data)]
    if not takes_others and not named and (variable := _find_global(type(net).forward)):
        places = [("data", None, variable)]
    if named or len(places) != 1:
        takes_graph = graph_parameter(named, data)
        wanted = {} if takes_graph else {k: v for k, v in data.to_dict().items() if _is_input(k, v)}
        places = [
            (name, of, key) for of, key, value in kept for name in wanted
            if name not in named and _is_same(value, wanted[name])
        ]  # fmt: skip
    if not places:
        return net
    taken = dict.fromkeys((name for name, *_ in places), inspect.Parameter.empty)
    return wrap(_KeptGraphWrapper, net, named | taken, places=places)


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
    given = {edges[0] if name in found else name: named[name] for name in named}
    return wrap(_RenamedEdgesWrapper, net, given, edges=edges[0], name=found[0])


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
