"""Restore the attributes, modes and random states that a run of a module may change."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import APPNP

from gas.scalable import preserve_modes

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


def find_namespaces(net: Module) -> list[tuple[str, MutableMapping[str, Any]]]:
    """Return the namespaces where a module may keep what it computes, each with a prefix of names.

    A prefix that is empty or ends with ``"."`` is of a submodule: its attributes or buffers. One
    that ends with ``":"`` is of a class, or of the globals of a Python file: the files of the
    submodules' classes, and those that they import from their folder.
    """
    places: list[tuple[str, MutableMapping[str, Any]]] = [
        (f"{name}.".lstrip("."), values)
        for name, each in net.named_modules() if not _is_lazy(each)
        for values in ((vars(each), each._buffers) if is_custom_module(each) else (vars(each),))
    ]  # fmt: skip
    kinds = {
        kind: None for module in net.modules() for kind in type(module).__mro__
        if kind.__module__.split(".")[0] not in (*_LIBRARIES, "gas", "builtins")
    }  # fmt: skip
    files = {kind.__module__: None for kind in kinds if kind.__module__ in sys.modules}
    for name in [*files]:
        files |= dict.fromkeys(_find_local_imports(sys.modules[name]))
    for name in files:
        found = list(vars(sys.modules[name]).values())
        kinds |= {v: None for v in found if isinstance(v, type) and v.__module__ == name}
    places += [(f"{name}:", vars(sys.modules[name])) for name in files]
    return places + [(f"{kind.__qualname__}:", _Attributes(kind)) for kind in kinds]


def _find_local_imports(module: ModuleType) -> list[str]:
    """Return the Python modules in the same folder, or below, from which a module has imported."""
    names = {
        value.__name__ if isinstance(value, ModuleType) else value.__module__
        for value in list(vars(module).values()) if isinstance(value, FunctionType | ModuleType)
    }  # fmt: skip
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    file = getattr(module, "__file__", None)
    return [n for n, beside in files.items() if file and beside and _is_in_folder_of(file, beside)]


def _is_in_folder_of(file: str, other: str) -> bool:
    return Path(file).parent in Path(other).parents


def find_namespace(net: Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """Return the namespace that an attribute is in, by the prefix of its name, and its key."""
    found: list[tuple[MutableMapping[str, Any], str]] = [
        (values, name.removeprefix(prefix)) for prefix, values in find_namespaces(net)
        if name.startswith(prefix) and not {".", ":"} & set(name.removeprefix(prefix))
    ]  # fmt: skip
    return next((each for each in found if each[1] in each[0]), found[0])


def is_custom_module(module: Module) -> bool:
    """Return whether a module isn't of PyTorch or PyG."""
    return type(module).__module__.split(".")[0] not in _LIBRARIES


def _is_lazy(module: Module) -> bool:
    return any(is_lazy(weight) for weight in module.parameters(recurse=False))


def custom_modules(net: Module) -> Iterator[tuple[str, Module]]:
    """Iterate over the names and parts of a module that aren't of PyTorch or PyG."""
    for name, module in net.named_modules():
        if is_custom_module(module):
            yield name, module


@contextmanager
def keep_attributes(net: Module) -> Iterator[dict[str, Any]]:
    """Restore attributes and buffers of a module, and of its submodules, after this context.

    Attributes of their classes, and globals of the classes' files, are restored as well; buffers of
    PyTorch's and PyG's modules, and lazy modules, which a call initialises, aren't.

    Yields:
        An empty dictionary, which then gets the attributes that were changed, by their names.
    """
    changed: dict[str, Any] = {}
    saved = [
        (prefix, values, before, _copy_contents(before, prefix.endswith(":")))
        for prefix, values in find_namespaces(net)
        for before in (dict(values),)  # Other threads may add to globals meanwhile.
    ]
    methods = _empty_function_caches(saved)
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


def _empty_function_caches(
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
    values: dict[str, Any], are_shared: bool
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

    for key, value in values.items():
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


DRAWS = (torch, "rand"), (random, "random"), (np.random, "rand"), (np.random, "random")
NUMBERS = 0.999, 0.001  # With which random branches aren't taken, or are.

# Random functions whose result also depends on an input: that result without randomness.
OF_INPUTS: dict[str, Callable[..., Any]] = {
    "rrelu_with_noise": lambda number, x, noise, lower=1 / 8, upper=1 / 3, *_: (
        torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    ),
    "normal": lambda number, mean, std=1.0, *_: mean + number * std,
    "poisson": lambda number, rate, *_: rate.clone(),
    "binomial": lambda number, count, p, *_: count * p,
}


class FixedNumbers(TorchDispatchMode):
    """Replace random numbers by a given one; dropout keeps all, norms use running statistics.

    * ``found``: the functions that drew numbers, other than for dropout.
    """

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number, self.found = number, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False))
        if {"running_mean", "training"} <= given.keys() and given["running_mean"] is not None:
            args = tuple((given | {"training": False}).values())
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        if not isinstance(out, Tensor):  # Of attention, it is what there is without dropout.
            is_dropout = name == "native_dropout"
            return (args[0] / (1 - args[1]), torch.ones_like(out[1])) if is_dropout else out
        if name.startswith("bernoulli"):
            return out.fill_(1)
        self.found.append(name)
        if name in OF_INPUTS:
            found = OF_INPUTS[name](self._number, *args)
            return found if isinstance(found, Tensor) else out.fill_(found)  # normal(0.0, 1.0, 5)
        if name == "randperm":
            return out.copy_(torch.arange(out.numel() - 1, -1, -1))
        return out.fill_(self._number)  # Of integers, 0.

    def make_draw(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that draws for Python or NumPy; other threads draw as before."""
        thread = threading.get_ident()

        def draw(*sizes: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*sizes, **kwargs)
            self.found.append(function.__name__)
            shape = kwargs.get("size", sizes)
            if shape and not isinstance(shape, int) and isinstance(shape[0], tuple | list):
                (shape,) = shape
            return self._number if shape in (None, ()) else np.full(shape, self._number)

        return draw


def _find_generators(net: Module) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return functions that get and set the state of each generator of Python, NumPy or a module.

    PyTorch's global generators are left out.
    """
    kept = {id(v): v for _, values in find_namespaces(net) for v in list(values.values())}
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate), (np.random.get_state, np.random.set_state)
    ]  # fmt: skip
    for value in kept.values():
        if isinstance(value, random.Random):
            found.append((value.getstate, value.setstate))
        elif isinstance(value, np.random.RandomState | torch.Generator):
            found.append((value.get_state, value.set_state))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            get = functools.partial(getattr, bits, "state")
            found.append((get, functools.partial(setattr, bits, "state")))
    return found


def random_states(net: Module) -> list[str]:
    """Return the states of generators of Python and NumPy, and those that a module keeps."""
    states = [get() for get, _ in _find_generators(net)]
    return [str(each.tolist() if isinstance(each, Tensor) else each) for each in states]


@contextlib.contextmanager
def keep_generators(net: Module) -> Iterator[None]:
    """Restore the global generators, of PyTorch on a module's devices, and those that it keeps."""
    devices = {p.device.index for p in net.parameters() if p.device.type == "cuda"}
    with contextlib.ExitStack() as stack:
        for get, restore in _find_generators(net):
            stack.callback(restore, get())
        random.seed()  # PyG draws names of copies of its Sequential, which mustn't come again.
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        yield


@contextlib.contextmanager
def training_mode(net: Module, number: float) -> Iterator[FixedNumbers]:
    """Set training mode in this context, without gradients, and with :class:`FixedNumbers`.

    Raises:
        ValueError: If a module changes the shape of a buffer, such as each node's cluster.
    """
    drops = [(each, each.dropout) for each in net.modules() if isinstance(each, APPNP)]
    buffers = [
        (name, each, {
            key: value.clone() for key, value in each.named_buffers(recurse=False)
            if not isinstance(value, Proxy)  # What a trace has left there.
        })
        for name, each in net.named_modules()
    ]  # fmt: skip
    fixed = FixedNumbers(number)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_modes(net, True))
        for each in net.modules():  # Weights of spectral norms change from call to call.
            parts = (each, *each._forward_pre_hooks.values())
            each.training &= not any("SpectralNorm" in type(part).__name__ for part in parts)
        for module, name in DRAWS[1:]:
            draw = fixed.make_draw(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, draw))
        for layer, p in drops:  # The model drops weights of edges outside of it.
            stack.callback(setattr, layer, "dropout", p)
            layer.dropout = 0.0
        stack.enter_context(torch.no_grad())
        yield stack.enter_context(fixed)
    for name, each, kept in buffers:
        for key, value in kept.items():
            now = dict(each.named_buffers(recurse=False)).get(key)
            if now is not None and now.shape != value.shape:
                raise ValueError(
                    f"'{name}' ({type(each).__name__}) keeps rows of each call in '{key}', and "
                    "mini-batches come one after another: keep what doesn't depend on how many "
                    "nodes there are"
                )
        for key, value in kept.items():
            each._buffers[key] = value


@contextlib.contextmanager
def eval_mode(net: Module) -> Iterator[None]:
    """Set evaluation mode, without gradients, in this context."""
    with preserve_modes(net, False), torch.no_grad():
        yield


def run_mode(net: Module, number: float | None) -> AbstractContextManager[Any]:
    """Set training mode with random numbers that are all a number, or evaluation mode without."""
    return eval_mode(net) if number is None else training_mode(net, number)
