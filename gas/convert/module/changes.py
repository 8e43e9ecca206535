"""Refuse in-place changes of a module's parameters and buffers, in runs and in traces."""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data.data import BaseData
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import SparseTensor

from gas.convert.module.preparation import NODE_ID
from gas.convert.module.state import CONSTANT
from gas.convert.values.failures import attribute_change_error
from gas.convert.values.known import assign

VIEWS = (
    operator.getitem, torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.transpose,
    "view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "t",
    "narrow", "select", "expand", "unflatten", "chunk", "split", "unbind", "detach",
    torch.chunk, torch.split, torch.unbind,
)  # fmt: skip


def with_noise(weight: Tensor) -> Tensor:
    """Return a copy of a parameter with noise that keeps the signs of non-zero values."""
    if not weight.is_floating_point():
        return weight.clone()
    noise = 0.1 * torch.randn_like(weight)
    return torch.where(weight * (weight + noise) < 0, weight - noise, weight + noise)


def add_noise(net: Module, computed: Collection[str]) -> None:
    """Add noise to the parameters, buffers and other tensors of a module, but for some.

    Those that are zero, such as the parameters of a gate, would hide the values before them, and a
    buffer of ones would look as if it weren't read.
    """
    for weight in net.parameters():
        weight.data = with_noise(weight.detach())
    found = [
        (f"{prefix}.{key}".lstrip("."), values, key, value)
        for prefix, module in net.named_modules()
        for values in (module._buffers, vars(module)) for key, value in values.items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    ]  # fmt: skip
    made = {id(value): value for name, *_, value in found if name in computed}
    for _, values, key, value in found:  # A tensor may have several names.
        if id(value) not in made:
            made[id(value)] = with_noise(value.detach())
        values[key] = made[id(value)]


@contextlib.contextmanager
def swap_parameters(weights: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Give parameters copies of other values in this context."""
    kept = {weight: weight.data for weight in weights}
    try:
        for weight, value in weights.items():
            weight.data = value.clone()
        yield
    finally:
        for weight, value in kept.items():
            weight.data = value


class RefuseChanges(TorchDispatchMode):
    """Refuse in-place changes of parameters while a module is run.

    A layer may change its own parameters, as mini-batches call the layer itself, unless its type is
    ``traced_types``: such layers are traced.
    """

    def __init__(self, net: Module, traced_types: Collection[type]) -> None:
        super().__init__()
        self._net, self._traced_types = net, tuple(traced_types)
        self._weights = {n: p for n, p in net.named_parameters() if p.numel()}
        self._names = {_address(weight): name for name, weight in self._weights.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function unless it writes to a parameter."""
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
        given.update(kwargs or {})
        written = [given.get(each.name) for each in func._schema.arguments if each.is_write]
        for leaf in tree_leaves(written):
            name = self._names.get(_address(leaf)) if isinstance(leaf, Tensor) else None
            if name and not self._is_read_by_layer(self._weights[name]):
                raise attribute_change_error(name)
        return func(*args, **(kwargs or {}))

    def _is_read_by_layer(self, weight: Tensor) -> bool:
        """Return whether a layer that is being called, and isn't traced, has read its parameter."""
        for frame, _ in traceback.walk_stack(None):
            variables = list(frame.f_locals.values())
            takes_self = frame.f_code.co_argcount and variables
            layer = variables[0] if takes_self else None
            caller = frame.f_back  # Only forward isn't traced; other methods of a layer are.
            is_called = caller is not None and caller.f_code is Module._call_impl.__code__
            if not is_called or not isinstance(layer, Module) or layer is self._net:
                continue
            is_traced = isinstance(layer, self._traced_types)
            is_layer = isinstance(layer, MessagePassing) and not is_traced
            has = any(weight is each for each in layer.parameters())
            if has and (is_layer or not any(map(_is_graph, variables))):
                return True
        return False

    def find_replaced(self) -> str:
        """Return the name of a parameter whose values were replaced, ``weight.data = ...``."""
        names = (n for n, weight in self._weights.items() if _address(weight) not in self._names)
        return next(names, "")


def _is_graph(value: Any) -> bool:
    """Return whether a value is a graph, its adjacency, or a list of edges."""
    if not isinstance(value, Tensor):
        return isinstance(value, BaseData | SparseTensor)
    is_list = value.dim() == 2 and value.size(0) == 2 and not value.is_floating_point()
    return value.layout != torch.strided or is_list


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else 0


def is_in_place(node: Node) -> bool:
    """Return whether a call changes its first argument: its name ends in ``_``, or ``inplace``."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    name = str(getattr(node.target, "__name__", node.target))
    is_operator = getattr(node.target, "__module__", "") == "_operator"  # Such as and_.
    is_named = name.endswith("_") and not name.endswith("__") and not is_operator
    return is_named or (node.op == "call_function" and node.kwargs.get("inplace") is True)


def views_of(node: Node) -> list[Node]:
    """Return a value, the value that it is a view of, and so on up to the first one."""
    found: list[Node] = [node]
    while (last := found[-1]).target in VIEWS or _is_data(last) or is_of_table(last):
        if not last.args or not isinstance(last.args[0], Node):  # An input may be named "t".
            break
        key = last.args[1] if last.target is operator.getitem else None
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, Node) for each in keys):  # What a tensor selects is copied.
            break
        found.append(last.args[0])
    return found


def is_of_table(node: Any) -> bool:
    """Return whether a value of a traced graph is rows, or columns, of a table."""
    is_selected = isinstance(node, Node) and node.target == "index_select"
    return is_selected and getattr(node.args[-1], "target", None) == NODE_ID


def _is_data(node: Node) -> bool:
    """Return whether a value is ``x.data`` of another one."""
    return node.target is getattr and node.args[1] == "data"


def check_change(node: Node) -> None:
    """Refuse a change in place of a parameter or a buffer."""
    is_changed = node.target is assign or is_in_place(node)
    changed = node.kwargs.get("out", node.args[0] if is_changed else None)
    views = views_of(changed) if isinstance(changed, Node) else []
    if not views or views[-1].op != "get_attr" or node.target == "requires_grad_":
        return
    name = str(views[-1].target)
    if not name.startswith(CONSTANT) or node.target is assign or any(map(_is_data, views)):
        raise attribute_change_error(name)
