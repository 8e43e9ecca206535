"""Find where a module may keep what it computes, and its changes in place in a trace."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.fx import Node
from torch.nn import Module
from torch.nn.parameter import is_lazy

from gas.convert.failures import changes_error
from gas.convert.known import assign

VIEWS = (
    operator.getitem, torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.transpose,
    "view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t",
    "narrow", "select", "expand", "unflatten", "chunk", "split", "unbind", "detach",
    torch.chunk, torch.split, torch.unbind,
)  # fmt: skip


_LIBRARIES = ("torch", "torch_geometric")


class _Attributes(MutableMapping[str, Any]):
    """The attributes of a class, which can be set."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __getitem__(self, key: str) -> Any:
        return vars(self._kind)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._kind, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self._kind, key)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self._kind))

    def __len__(self) -> int:
        return len(vars(self._kind))


def find_places(net: Module) -> list[tuple[str, MutableMapping[str, Any]]]:
    """Find where a module may keep what it computes, and the beginnings of names there.

    These are attributes and buffers of the module and its parts, and, where the beginning ends with
    ``":"``, the attributes of their classes, and the globals and other classes beside these.
    """
    places: list[tuple[str, MutableMapping[str, Any]]] = [
        (f"{name}.".lstrip("."), values)
        for name, each in net.named_modules() if not _is_lazy(each)
        for values in ((vars(each), each._buffers) if is_own_module(each) else (vars(each),))
    ]  # fmt: skip
    kinds = {
        kind: None for module in net.modules() for kind in type(module).__mro__
        if kind.__module__.split(".")[0] not in (*_LIBRARIES, "gas", "builtins")
    }  # fmt: skip
    names = {kind.__module__: None for kind in kinds if kind.__module__ in sys.modules}
    files = {name: vars(sys.modules[name]) for name in names}
    for name, values in files.items():
        kinds |= {
            v: None for v in list(values.values()) if type(v) is type and v.__module__ == name
        }
    places += [(f"{name}:", values) for name, values in files.items()]
    return places + [(f"{k.__qualname__}:", _Attributes(k)) for k in kinds if type(k) is type]


def is_own_module(module: Module) -> bool:
    """Return whether a module isn't of PyTorch or PyG."""
    return type(module).__module__.split(".")[0] not in _LIBRARIES


def _is_lazy(module: Module) -> bool:
    return any(is_lazy(weight) for weight in module.parameters(recurse=False))


def is_in_place(node: Node) -> bool:
    """Return whether a function changes its first argument, by its name or an option."""
    if node.op == "call_function" and node.args and node.kwargs.get("inplace") is True:
        return True
    name = str(getattr(node.target, "__name__", node.target))
    is_function = node.op in ("call_function", "call_method") and bool(node.args)
    return is_function and name.endswith("_") and not name.endswith("__")


def views_of(node: Node) -> list[Node]:
    """Return a value, what it is a view of, and so on."""
    found: list[Node] = [node]
    while (last := found[-1]).target in VIEWS or _is_data(last):
        if not isinstance(last.args[0], Node):
            break
        key = last.args[1] if last.target is operator.getitem else None
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, Node) for each in keys):  # What a tensor selects is copied.
            break
        found.append(last.args[0])
    return found


def _is_data(node: Node) -> bool:
    return node.target is getattr and node.args[1] == "data"


def check_change(net: Module, node: Node) -> None:
    """Refuse a change in place of a parameter, and what isn't followed of one of a buffer.

    Raises:
        ValueError: Quoting the line that is followed now.
    """
    is_changed = node.target is assign or is_in_place(node)
    changed = node.kwargs.get("out", node.args[0] if is_changed else None)
    views = views_of(changed) if isinstance(changed, Node) else []
    if not views or views[-1].op != "get_attr" or node.target == "requires_grad_":
        return
    name = str(views[-1].target)
    is_parameter = name in dict(net.named_parameters(remove_duplicate=False))
    if is_parameter or node.target is assign or any(map(_is_data, views)):
        raise changes_error(name)
