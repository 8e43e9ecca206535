"""Attributes of a module that its model takes when they are replaced, or refuses."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from operator import is_
from types import CodeType
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from gas.convert.state import is_own_module
from gas.graph import version

OPTIONS = bool, int, float, str  # Types of options that are followed.
NOT_OPTIONS = "training", "fuse"  # Modes, which calls of layers set, too.
# Methods that run first in a call; _find_read follows the methods that they name.
CALLED = "forward", "message", "message_and_aggregate", "aggregate", "update", "edge_update"


class Followed(Protocol):
    """Attributes that are looked at before each call of a model."""

    def follow(self) -> None:
        """Take what has changed in the module, or raise."""


Place = tuple[dict[str, Any], str]  # Attributes, and the name of one.


@dataclass
class _FollowedTensor:
    """A tensor of a module, and of its model.

    * ``owners``, ``places``: the attributes of the module, and of the model, that are this tensor.
    * ``seen``, ``version``: the tensor that was there last, and its version.
    * ``is_fixed``: whether the model has what was computed of it.
    """

    owners: list[Place]
    places: list[Place]
    seen: Tensor
    version: int
    is_fixed: bool

    def follow(self) -> None:
        """Take the tensor by which it was replaced, or its values where the model has a copy.

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
        if self.is_fixed:
            raise ValueError(
                f"{key!r} of the module has changed, and its model has what forward computed of it "
                f"when it was converted: register it as a buffer, self.register_buffer({key!r}, "
                f"tensor), or {again}"
            )
        for place, name in self.places:
            if now is not self.seen or place[name] is not now:
                place[name] = now.to(place[name])
        self.seen, self.version = now, version(now)


@dataclass
class _FollowedParts:
    """The parts of each module of a module, and those that it had when it was converted."""

    parts: list[tuple[dict[str, Module | None], dict[str, Module | None]]]

    def follow(self) -> None:
        """Check that they are the same.

        Raises:
            ValueError: If one was replaced, added or removed.
        """
        for now, seen in self.parts:
            if now == seen:
                continue
            key = next(key for key in {**seen, **now} if seen.get(key) is not now.get(key))
            raise ValueError(
                f"{key!r} of the module is another part than it was when it was converted, and its "
                "model has the one from before: convert the module again"
            )


@dataclass
class _FollowedOptions:
    """The options of modules, such as ``p`` of a dropout, of which the model has copies.

    * ``options``: the name of each module, its attributes now, and its options when it was
      converted.
    """

    options: list[tuple[str, dict[str, Any], dict[str, Any]]]

    def follow(self) -> None:
        """Check that they are the same.

        Raises:
            ValueError: If one was changed.
        """
        for name, now, seen in self.options:
            if all(map(is_, map(now.get, seen, seen.values()), seen.values())):  # At every call.
                continue
            for key, value in seen.items():
                if (changed := now.get(key, value)) is not value and changed != value:
                    raise ValueError(
                        f"{f'{name}.{key}'.lstrip('.')!r} of the module is {changed!r}, and "
                        f"was {value!r} when it was converted, as it still is in its model: "
                        "convert the module again"
                    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r}"
    kind = "floating-point numbers" if value.is_floating_point() else value.dtype
    return f"{kind} of {list(value.shape)}"


def find_followed(
    net: Module, model: Module, unknown: Collection[str], computed: Collection[str]
) -> list[Followed]:
    """Find what its model wouldn't see if it were replaced in a module: tensors, parts, options.

    Args:
        net: The module. Buffers of its parts are those of the model, and are found there.
        model: What is made of it, with parts of the same names.
        unknown: The names of attributes that are left out.
        computed: The names of those that the model has numbers of.
    """
    parts: list[Any] = []
    options: list[Any] = []
    read = _find_read(net)
    tensors: dict[int, _FollowedTensor] = {}
    for prefix, module in net.named_modules():
        if isinstance(module._modules, dict):  # That of a scripted module can't be changed.
            parts.append((module._modules, dict(module._modules)))
        if is_own_module(module):  # A number may be that of the class.
            found = {key: inspect.getattr_static(module, key, ...) for key in read}
            chosen = {k: v for k, v in found.items() if v is None or type(v) in OPTIONS}
        else:
            chosen = {
                key: value for key, value in vars(module).items()
                if type(value) in OPTIONS and key not in NOT_OPTIONS and not key.startswith("_")
            }  # fmt: skip
        options.append((prefix, vars(module), chosen))
        mine = model.get_submodule(prefix)
        for owner in (vars(module), *([] if prefix else [module._buffers])):
            for key, value in owner.items():
                name = f"{prefix}.{key}".lstrip(".")
                if not isinstance(value, Tensor) or name in unknown:
                    continue
                made = _FollowedTensor([], [], value, version(value), False)
                made = tensors.setdefault(id(value), made)
                made.owners.append((owner, key))
                made.is_fixed |= name in computed
                place: Any = mine._buffers if key in mine._buffers else vars(mine)
                if isinstance(place.get(key), Tensor):
                    made.places.append((place, key))
    return [
        _FollowedParts(parts),
        _FollowedOptions(options),
        *(each for each in tensors.values() if each.places or each.is_fixed),
    ]


def _find_read(net: Module) -> set[str]:
    """Find the names of attributes that calls of a module's own classes read, and don't set."""
    kinds = {
        kind: None for module in net.modules() if is_own_module(module)
        for kind in type(module).__mro__ if kind not in (Module, MessagePassing)
    }  # fmt: skip
    read, stored, seen, names = set[str](), set(NOT_OPTIONS), set[str](), set(CALLED)
    while names:
        seen |= names
        for code in _codes([vars(kind).get(name) for kind in kinds for name in names]):
            for each in dis.get_instructions(code):
                if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    read.add(each.argval)
                elif each.opname == "STORE_ATTR":
                    stored.add(each.argval)
        names = read - seen
    return read - stored


def _codes(found: list[Any]) -> Iterator[CodeType]:
    """Yield the code of functions and properties, and that within it."""
    for each in found:
        function = getattr(each, "fget", None) or getattr(each, "__func__", each)
        code = each if isinstance(each, CodeType) else None
        if code is None and callable(function):
            code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            yield code
            yield from _codes([const for const in code.co_consts if isinstance(const, CodeType)])
