"""Follow later changes of a module: its model uses replaced tensors, and refuses the rest."""

from __future__ import annotations

import dis
import inspect
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, is_dataclass
from functools import partial
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from gas.convert.module.state import DEEPEST, is_custom_module
from gas.graph import version

OPTIONS = bool, int, float, str  # Types of options that are followed.
MOST_ITEMS = 1_000  # Of a container, or array, whose items are followed, too.
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
NOT_OPTIONS = "training", "fuse"  # Modes, which calls of layers set, too.
BY_NAME = "getattr", "hasattr", "vars"  # Functions that read an attribute by its name.
_FUNCTIONS = FunctionType, BuiltinFunctionType, partial
# Methods that run first in a call; _find_read follows the methods that they name.
CALLED = "forward", "message", "message_and_aggregate", "aggregate", "update", "edge_update"


Place = tuple[dict[str, Any], str]  # Attributes, and the name of one.


@dataclass
class _FollowedTensor:
    """A tensor of a module, and of its model.

    * ``owners``, ``places``: the attributes of the module, and of the model, that are this tensor.
    * ``seen``, ``version``: the tensor that was there last, and its version.
    * ``fixed``: a copy of it, if the model has what was computed of it.
    """

    owners: list[Place]
    places: list[Place]
    seen: Tensor
    version: int
    fixed: Tensor | None = None

    def follow(self) -> None:
        """Use the tensor that has replaced this one; copy its values where the model has a copy.

        Raises:
            ValueError: If it was replaced by something else, or by several, or is fixed.
        """
        values = [owner.get(key) for owner, key in self.owners]
        now, key = values[0], self.owners[0][1]
        if version(self.seen) == self.version and all(each is self.seen for each in values):
            return
        before, again = _describe(self.seen), "convert the module again"
        if any(name not in owner for owner, name in self.owners):
            raise ValueError(
                f"{key!r} of the module was {before} when it was converted, and was deleted, or "
                f"made a parameter or a buffer: {again}"
            )
        if not isinstance(now, Tensor) or _describe(now) != before:
            raise ValueError(
                f"{key!r} of the module is {_describe(now)} now, and was {before} when it was "
                f"converted: {again}"
            )
        if any(each is not now for each in values):
            names = ", ".join(repr(name) for _, name in self.owners)
            raise ValueError(
                f"{names} of the module were one tensor when it was converted, and are several "
                f"now: {again}"
            )
        if self.fixed is not None and not torch.equal(now.to(self.fixed), self.fixed):
            raise ValueError(
                f"{key!r} of the module has changed, and its model has what forward computed of it "
                f"when it was converted: register it as a buffer, self.register_buffer({key!r}, "
                f"tensor), or {again}"
            )
        for place, name in self.places:
            if now is not self.seen or place[name] is not now:
                place[name] = now.to(place[name])
        self.seen, self.version = now, version(now)


def _check_parts(
    parts: Iterable[tuple[Mapping[str, Module | None], dict[str, Module | None]]],
) -> None:
    """Check that modules have the parts that they had when they were converted."""
    for now, seen in parts:
        if now == seen:
            continue
        key = next(key for key in {**seen, **now} if seen.get(key) is not now.get(key))
        raise ValueError(
            f"{key!r} of the module is another part than it was when it was converted, and its "
            "model has the one from before: convert the module again"
        )


def _check_options(options: Iterable[tuple[str, Mapping[str, Any], dict[str, Any]]]) -> None:
    """Check that modules have the options, such as ``p`` of a dropout, that models have copies of.

    ``options`` are each module's name, its attributes now, and those when it was converted.
    """
    for name, now, seen in options:
        if all(map(is_, map(now.get, seen, seen.values()), seen.values())):  # At every call.
            continue
        for key, value in seen.items():
            if (changed := now.get(key, value)) is not value and changed != value:
                raise _changed_error(f"{name}.{key}".lstrip("."), changed, value)


class _Copy(NamedTuple):
    """A tensor, its version, and a copy of its values."""

    tensor: Tensor
    version: int
    values: Tensor

    def is_same(self, now: Any) -> bool:
        """Return whether it has the same values now."""
        if now is self.tensor and version(now) == self.version:
            return True
        is_alike = isinstance(now, Tensor) and now.shape == self.values.shape
        return is_alike and torch.equal(now.to(self.values), self.values)


def _walk(value: Any, read: Set[str], path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the options and tensors in a value, and where they are.

    Those of lists, dictionaries, arrays, and the attributes ``read`` of namespaces.
    """
    if isinstance(value, np.ndarray | np.generic) and value.size <= MOST_ITEMS:
        value = value.tolist()
    if isinstance(value, SimpleNamespace | Namespace) or is_dataclass(value):
        keys = read & vars(value).keys() or vars(value)  # Others may read them all.
        found = [(f".{key}", vars(value)[key]) for key in sorted(keys)]
    elif isinstance(value, dict):
        found = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        found = [(f"[{position}]", each) for position, each in enumerate(value)]
    else:
        if value is None or type(value) in OPTIONS or isinstance(value, Tensor):
            yield path, value
        return
    for key, each in found if len(found) <= MOST_ITEMS and depth < DEEPEST else ():
        yield from _walk(each, read, path + key, depth + 1)


def _copy_items(value: Any, read: Set[str], known: Collection[int]) -> dict[str, Any]:
    """Return the items of a value by where they are, except tensors whose ids are known."""
    return {
        path: _Copy(item, version(item), item.detach().clone())
        if isinstance(item, Tensor) else item
        for path, item in _walk(value, read) if id(item) not in known
    }  # fmt: skip


def _check_items(
    containers: Iterable[tuple[str, Mapping[str, Any], str, dict[str, Any]]], read: Set[str]
) -> None:
    """Check that the items of containers haven't changed since the model copied them."""
    for name, owner, key, seen in containers:
        now = dict(_walk(owner.get(key), read))
        for path, before in seen.items():
            item = now.get(path)
            if isinstance(before, _Copy):
                if not before.is_same(item):
                    raise ValueError(
                        f"{f'{name}{path}'!r} of the module has changed, and its model has its "
                        "values from before: register each tensor as a buffer, "
                        "self.register_buffer('first', tensor), or convert the module again"
                    )
            elif item is not before and (isinstance(item, Tensor) or item != before):
                raise _changed_error(f"{name}{path}", item, before)


def _changed_error(name: str, changed: Any, value: Any) -> ValueError:
    """Return the error of an option that was changed."""
    return ValueError(
        f"{name!r} of the module is {changed!r}, and was {value!r} when it was converted, as it "
        "still is in its model: convert the module again"
    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r}"
    kind = "floating-point numbers" if value.is_floating_point() else value.dtype
    return f"{kind} of {list(value.shape)}"


def check_hooks(net: Module, called: Collection[str]) -> None:
    """Refuse hooks of a module and its parts, except those ``called``, which the model calls."""
    starts = [f"{name}." for name in called]
    for name, module in net.named_modules():
        hooked = any(getattr(module, kind) for kind in HOOKS)
        if hooked and not any(f"{name}.".startswith(start) for start in starts):
            what = f"'{name}' ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(
                f"{what} has hooks, which the model wouldn't call, because it calls the layers "
                "alone: take them off, and register them on what to_scalable returns, or on layers"
            )


def find_followed(
    net: Module, model: Module, unknown: Collection[str], computed: Collection[str]
) -> list[Callable[[], None]]:
    """Find the tensors, submodules and options whose replacement a model wouldn't notice by itself.

    Hooks of the module itself are checked as well, because its model doesn't call them. Hooks of
    submodules are shared with the model.

    Args:
        net: The module. Buffers of its submodules are shared with the model.
        model: The model of the module, with submodules of the same names.
        unknown: The names of attributes that are left out.
        computed: The names of attributes of which the model has computed values.

    Returns:
        Functions to call before each call of the model. They update its tensors, or raise an error
        if something else has changed.
    """
    parts: list[Any] = []
    options: list[Any] = []
    containers: list[Any] = []
    read = find_read(net)
    known = {id(each) for each in (*net.parameters(), *net.buffers())}
    tensors: dict[int, _FollowedTensor] = {}
    for prefix, module in net.named_modules():
        if isinstance(module._modules, dict):  # That of a scripted module can't be changed.
            parts.append((module._modules, dict(module._modules)))
        if is_custom_module(module):
            chosen = {}
            for key in sorted(read):
                value = inspect.getattr_static(module, key, ...)
                name = f"{prefix}.{key}".lstrip(".")
                owners = (vars(module), *map(vars, type(module).__mro__))
                owner = next((each for each in owners if key in each), None)
                if owner is None or name in unknown:
                    continue
                is_function = isinstance(value, _FUNCTIONS) and owner is owners[0]
                if value is None or type(value) in OPTIONS or is_function:
                    chosen[key] = value
                    if owner is not owners[0]:  # That of the class may be changed, too.
                        options.append((prefix, owner, {key: value}))
                elif not isinstance(value, Tensor):
                    items = _copy_items(owner[key], read, known)
                    containers += [(name, owner, key, items)] if items else []
        else:
            chosen = {
                key: value for key, value in vars(module).items()
                if type(value) in OPTIONS and key not in NOT_OPTIONS and not key.startswith("_")
            }  # fmt: skip
        chosen["forward"] = vars(module).get("forward")
        options.append((prefix, vars(module), chosen))
        mine = model.get_submodule(prefix)
        for owner in (vars(module), module._buffers):
            for key, value in owner.items():
                name = f"{prefix}.{key}".lstrip(".")
                is_shared = prefix and owner is module._buffers and name not in computed
                if not isinstance(value, Tensor) or name in unknown or is_shared:
                    continue
                made = _FollowedTensor([], [], value, version(value))
                made = tensors.setdefault(id(value), made)
                made.owners.append((owner, key))
                if name in computed:
                    made.fixed = value.detach().clone()
                place: Any = mine._buffers if key in mine._buffers else vars(mine)
                if isinstance(place.get(key), Tensor):
                    made.places.append((place, key))
    hooks = [getattr(net, kind) for kind in HOOKS]
    return [
        lambda: check_hooks(net, []) if any(hooks) else None,
        partial(_check_parts, parts),
        partial(_check_options, options),
        partial(_check_items, containers, read),
        *(each.follow for each in tensors.values() if each.places or each.fixed is not None),
    ]


def find_read(net: Module) -> set[str]:
    """Find the names of attributes that calls of a module's own classes read, and don't set."""
    kinds = {
        kind: None for module in net.modules() if is_custom_module(module)
        for kind in type(module).__mro__ if kind not in (Module, MessagePassing)
    }  # fmt: skip
    read, stored, seen, names = set[str](), set(NOT_OPTIONS), set[str](), set(CALLED)
    helpers, left = set[Any](), list[Any]()  # Functions beside the classes, which are called, too.
    while names or left:
        seen |= names
        found = [*(vars(kind).get(name) for kind in kinds for name in names), *left]
        left = []
        for code, beside in _codes(found):
            for each in dis.get_instructions(code):
                if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    read.add(each.argval)
                elif each.opname == "STORE_ATTR":
                    stored.add(each.argval)
                elif each.opname == "LOAD_GLOBAL" and each.argval in BY_NAME:
                    read |= {const for const in code.co_consts if isinstance(const, str)}
                elif each.opname == "LOAD_GLOBAL":
                    helper = beside.get(each.argval)
                    if _is_helper(helper) and helper not in helpers:
                        helpers.add(helper)
                        left.append(helper)
        names = read - seen
    return read - stored


def _is_helper(value: Any) -> bool:
    """Return whether a value is a function that is no library's."""
    libraries = "torch", "torch_geometric", "gas"
    return isinstance(value, FunctionType) and value.__module__.split(".")[0] not in libraries


def _codes(found: list[Any]) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """Yield the code of functions and properties, nested ones included, with their globals."""
    for each in found:
        function: Any = getattr(each, "fget", None) or getattr(each, "__func__", each)
        function = inspect.unwrap(function) if callable(function) else None
        left = [function.__code__] if isinstance(function, FunctionType) else []
        while left:
            code = left.pop()
            yield code, function.__globals__
            left += [const for const in code.co_consts if isinstance(const, CodeType)]
