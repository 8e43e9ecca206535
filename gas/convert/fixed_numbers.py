"""Training mode with fixed random numbers, in which what a module does can be compared."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import APPNP

from gas.convert.places import find_places
from gas.scalable import preserve_modes

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
    """Fix all random numbers to one; dropout keeps all, and norms use running statistics.

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
            return OF_INPUTS[name](self._number, *args)
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
    """Return how to get and set the states of generators that a module keeps, or that are global.

    Besides PyTorch's own.
    """
    kept = {id(v): v for _, values in find_places(net) for v in list(values.values())}
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
            now = each._buffers.get(key)
            if now is not None and now.shape != value.shape:
                raise ValueError(
                    f"'{name}' ({type(each).__name__}) keeps rows of each call in '{key}', and "
                    "mini-batches come one after another: keep what doesn't depend on how many "
                    "nodes there are"
                )
        for key, value in kept.items():
            each._buffers[key] = value
