"""Find where a module may keep what it computes, and restore it after a call."""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

CONSTANT = "_tensor_constant"  # The prefix of the names of tensors that a trace stores.
# Attributes that aren't restored: forward doesn't set them, or eval_mode restores them.
_OTHERS = ("training", "_parameters", "_modules")
ATTRIBUTES_OF_TORCH = (*_OTHERS, "_buffers")
MOST_SHARED = 10_000  # Items of the lists, dictionaries and tensors of a file that are restored.
CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
DEEPEST = 20  # Of containers in one another.
# New globals that stay, as other threads import or define them meanwhile: no values of a call.
_DEFINITIONS = (type, FunctionType, ModuleType)
_CACHED = type(functools.cache(len))
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
    ``":"``, the attributes of their classes, and the globals and other classes beside these and
    beside functions that are imported from the same folder.
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
    files = {kind.__module__: None for kind in kinds if kind.__module__ in sys.modules}
    for name in [*files]:
        files |= dict.fromkeys(_imported_beside(sys.modules[name]))
    for name in files:
        found = list(vars(sys.modules[name]).values())
        kinds |= {v: None for v in found if isinstance(v, type) and v.__module__ == name}
    places += [(f"{name}:", vars(sys.modules[name])) for name in files]
    return places + [(f"{kind.__qualname__}:", _Attributes(kind)) for kind in kinds]


def _imported_beside(module: ModuleType) -> list[str]:
    """Return the modules of the same folder, or below, of which a module has functions."""
    names = {
        value.__name__ if isinstance(value, ModuleType) else value.__module__
        for value in list(vars(module).values()) if isinstance(value, FunctionType | ModuleType)
    }  # fmt: skip
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    file = getattr(module, "__file__", None)
    return [n for n, beside in files.items() if file and beside and _is_beside(file, beside)]


def _is_beside(file: str, other: str) -> bool:
    return Path(file).parent in Path(other).parents


def find_place(net: Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """Find the attributes among which one is, by the name of :func:`find_places`, and its key."""
    found: list[tuple[MutableMapping[str, Any], str]] = [
        (values, name.removeprefix(prefix)) for prefix, values in find_places(net)
        if name.startswith(prefix) and not {".", ":"} & set(name.removeprefix(prefix))
    ]  # fmt: skip
    return next((each for each in found if each[1] in each[0]), found[0])


def is_own_module(module: Module) -> bool:
    """Return whether a module isn't of PyTorch or PyG."""
    return type(module).__module__.split(".")[0] not in _LIBRARIES


def _is_lazy(module: Module) -> bool:
    return any(is_lazy(weight) for weight in module.parameters(recurse=False))


def own_modules(net: Module) -> Iterator[tuple[str, Module]]:
    """Iterate over the names and parts of a module that aren't of PyTorch or PyG."""
    for name, module in net.named_modules():
        if is_own_module(module):
            yield name, module


@contextmanager
def keep_attributes(net: Module) -> Iterator[dict[str, Any]]:
    """Restore attributes and buffers of a module, and of its parts, at the end.

    But for buffers of modules of PyTorch and PyG, and lazy modules, which the call completes. And
    restore attributes of their classes, and globals beside these.

    Yields:
        An empty dictionary, which then gets the attributes that were changed, by their names.
    """
    changed: dict[str, Any] = {}
    saved = [
        (prefix, values, dict(values), _copy_contents(values, prefix.endswith(":")))
        for prefix, values in find_places(net)
    ]
    methods = _forget_cached(saved)
    try:
        yield changed
    finally:
        for values, key, value in methods:
            values[key] = value
        for prefix, now, before, contents in saved:
            for key in [key for key in list(now) if key not in before]:
                is_defined = prefix.endswith(":") and isinstance(now[key], _DEFINITIONS)
                if not key.startswith(CONSTANT) and not is_defined:
                    changed[prefix + key] = now.pop(key)
            for key, value in before.items():
                if key not in _OTHERS and now.get(key) is not value:
                    changed[prefix + key], now[key] = now.get(key), value
            for key, value, copied in contents:
                if _has_changed(value, copied):
                    changed[prefix + key] = _copy(value)[0]
                    _restore(value, copied[0])


def _forget_cached(
    places: Sequence[tuple[str, Any, dict[str, Any], Any]],
) -> list[tuple[MutableMapping[str, Any], str, Any]]:
    """Give methods by ``functools.cache`` and ``lru_cache`` an empty one; return the originals."""
    found: list[tuple[MutableMapping[str, Any], str, Any]] = [
        (values, key, value) for _, values, before, _ in places
        if isinstance(values, _Attributes)
        for key, value in before.items() if isinstance(value, _CACHED)
    ]  # fmt: skip
    for values, key, value in found:
        values[key] = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
    return found


def _copy_contents(
    values: MutableMapping[str, Any], are_shared: bool
) -> list[tuple[str, Any, tuple[Any, int]]]:
    """Copy tensors, and containers with what is in them; if they are shared, small ones alone."""
    found: list[tuple[str, Any, tuple[Any, int]]] = []
    seen: set[int] = set()
    left = MOST_SHARED  # Items of shared containers that are looked at.

    def add(key: str, value: Any, depth: int = 0) -> None:
        nonlocal left
        if type(value) is SimpleNamespace:
            value = vars(value)
        is_tensor = type(value) is Tensor and not value.is_inference()
        if id(value) in seen or not (is_tensor or type(value) in CONTAINERS) or depth > DEEPEST:
            return
        seen.add(id(value))
        size = (value.numel() if is_tensor else len(value)) if are_shared else 0
        if size > left:
            return
        left -= size
        found.append((key, value, _copy(value)))
        items = value.values() if isinstance(value, dict) else value
        for each in () if is_tensor else list(items):
            add(key, each, depth + 1)

    for key, value in list(values.items()):
        if key not in ATTRIBUTES_OF_TORCH and not key.endswith("_hooks") and key[:2] != "__":
            add(key, value)
    return found


def _copy(value: Any) -> tuple[Any, int]:
    """Return a copy of a tensor or container, and the version of the tensor."""
    if isinstance(value, Tensor):
        return value.detach().clone(), value._version
    return copy.copy(value), 0


def _has_changed(value: Any, copied: tuple[Any, int]) -> bool:
    if isinstance(value, Tensor):
        return value._version != copied[1]
    one, two = (list(v.values() if isinstance(v, dict) else v) for v in (value, copied[0]))
    return len(one) != len(two) or any(a is not b for a, b in zip(one, two, strict=True))


def _restore(value: Any, copied: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(copied)
        return
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(copied)
