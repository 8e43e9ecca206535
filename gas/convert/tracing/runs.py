"""Traces of a module in training and evaluation, and for each outcome of random branches."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph, Proxy
from torch.nn import Module
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn.models import rev_gnn

from gas.convert.module.caches import check_caches
from gas.convert.module.state import CONSTANT, DRAWS, keep_attributes, random_states
from gas.convert.values.edge_layers import InexactLayerError
from gas.convert.values.known import FACTORIES, KnownProxy, record_call
from gas.convert.values.matrices import trace_matrices
from gas.convert.values.modes import RANDOM, ModeMerger, number_values, record_functions
from gas.convert.values.traced_matrix import TracedMatrix

MOST_IN_PAIRS = 8  # Random choices of which each two are traced together.
ATTEMPTS = 3  # Traces, of which one must draw no random numbers, as other threads may.


class RandomBranches:
    """Outcomes of the random branches, ``torch.rand(1) < p``, of a module that is traced.

    * ``found``: the probability of each outcome so far that a number is less than another.
    """

    def __init__(self) -> None:
        self.found: list[float] = []
        self._known: Any = None

    def start(self, known: Any, outcomes: Sequence[bool], rest: bool) -> None:
        """Set the outcomes of the first random branches of this thread's trace, and of the rest."""
        self.found, self._known, self._outcomes, self._rest = [], known, outcomes, rest
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Stop replacing random numbers."""
        self._known = None

    @property
    def are_recorded(self) -> bool:
        """Return whether numbers are drawn by what is traced."""
        is_traced = self._known is not None and not self._known.is_evaluating
        return is_traced and self._thread == threading.get_ident()

    def decide(self, p: float) -> bool:
        """Record a probability, and return the next outcome."""
        position = len(self.found)
        self.found.append(p)
        return self._outcomes[position] if position < len(self._outcomes) else self._rest


class _TracedRandom:
    """Stands in for a number between 0 and 1 in a trace, which is compared with a probability."""

    def __init__(self, decide: Callable[[float], bool]) -> None:
        self._decide, self._is_compared = decide, False

    def __lt__(self, other: Any) -> bool:
        if self._is_compared:  # Both outcomes follow from one number.
            raise ValueError(RANDOM)
        self._is_compared = True
        return self._decide(float(other))

    def __gt__(self, other: Any) -> bool:
        return not self < other

    __le__, __ge__ = __lt__, __gt__

    def item(self) -> _TracedRandom:
        """Return the number."""
        return self

    def __getitem__(self, key: Any) -> _TracedRandom:
        return self

    def _refuse(self, name: str = "") -> Any:
        raise ValueError(RANDOM)

    __float__ = __bool__ = __getattr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


def _make_draw(function: Callable[..., Any], branches: RandomBranches) -> Callable[..., Any]:
    """Make a function that draws random numbers, a :class:`_TracedRandom` for one in a trace."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
        sizes = kwargs.get("size", given)
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        is_one = all(type(size) is int and size == 1 for size in sizes)
        if not is_one or "generator" in kwargs or not branches.are_recorded:
            return function(*args, **kwargs)
        return _TracedRandom(branches.decide)

    return draw


def _names(kind: Any, wanted: Any) -> bool:
    """Return whether a class, a tuple or a union of classes contains a class."""
    kinds = kind if type(kind) is tuple else getattr(kind, "__args__", ())
    return kind is wanted or any(_names(each, wanted) for each in kinds)


GENERATOR = "_checkpoint_without_reentrant_generator"


# Stand in for checkpoints, and PyG's invertible function, in a trace: functions are called.
_PLAIN = SimpleNamespace(apply=lambda function, preserve, *args: function(*args))
_INVERTIBLE = SimpleNamespace(
    apply=lambda function, inverse, passes, size, *args: function(*args[:size])
)


_apply_original: Any = torch.autograd.Function.__dict__["apply"].__func__


def apply(cls: Any, *args: Any) -> Any:
    """Call a user's ``torch.autograd.Function``, or record the call."""
    for value in args:
        if issubclass(type(value), Proxy):
            target = MethodType(apply, cls)
            return value.tracer.create_proxy("call_function", target, args, {})
    return _apply_original(cls, *args)


def _make_refusal(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(issubclass(type(each), Proxy) for each in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        raise ValueError(
            f"it calls torch.autograd.{name}, and what it differentiates is of some of the nodes: "
            "compute penalties of gradients in the training loop, of what the model returns"
        )

    return call


def _yield_once(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def patch_for_tracing(branches: RandomBranches) -> Iterator[None]:
    """Let a traced module call ``isinstance``, create tensors of traced sizes, and checkpoint.

    ``isinstance`` is replaced, not the class of proxies, which functions in C would believe.
    """
    is_instance = isinstance

    def answer(value: Any, kind: Any) -> bool:
        if is_instance(value, TracedMatrix):
            return _names(kind, value.kind) or is_instance(value, kind)
        is_known = type(value) is KnownProxy and _names(kind, Tensor)
        return (is_known and value.is_tensor) or is_instance(value, kind)

    with contextlib.ExitStack() as stack:
        stack.enter_context(trace_matrices())
        stack.enter_context(record_functions(record_call))
        stack.enter_context(mock.patch.object(builtins, "isinstance", answer))
        for name, plain in (("CheckpointFunction", _PLAIN), (GENERATOR, _yield_once)):
            stack.enter_context(mock.patch.object(checkpoint, name, plain))
        stack.enter_context(mock.patch.object(rev_gnn, "InvertibleFunction", _INVERTIBLE))
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        for name in ("grad", "backward"):
            refuse = _make_refusal(name, getattr(torch.autograd, name))
            stack.enter_context(mock.patch.object(torch.autograd, name, refuse))
        for function in FACTORIES:
            stack.enter_context(mock.patch.object(torch, function.__name__, function))
        for module, name in DRAWS:
            draw = _make_draw(getattr(module, name), branches)
            stack.enter_context(mock.patch.object(module, name, draw))
        yield


class Runs:
    """Traces of a module.

    Args:
        net: The module.
        make_tracer: Makes a tracer.
        finish: Changes each graph before it is compared with others.
        caches: The attributes that it computes in its first call alone, which each trace is.
        computed: Gets the names of the attributes of tensors that other values are computed of.
    """

    def __init__(
        self, net: Module, make_tracer: Callable[[], Any], finish: Callable[[Module, Graph], None],
        caches: Sequence[str], computed: set[str],
    ) -> None:  # fmt: skip
        self._net, self._make_tracer, self._finish = net, make_tracer, finish
        self._caches, self._computed = caches, computed
        self.branches, self.tracer = RandomBranches(), make_tracer()
        self.constants: dict[str, Tensor] = {}  # The tensors that it has made, by their names.

    def run(self, training: bool, outcomes: Sequence[bool] = (), rest: bool = False) -> Graph:
        """Trace the module; trace it again if random numbers were drawn, maybe by another thread.

        Args:
            training: Trace it in training mode.
            outcomes: The outcomes of the first random branches, such as ``if random() < p``.
                (default: none)
            rest: The outcome of other random branches. (default: ``False``)

        Raises:
            ValueError: If it draws random numbers in every trace.
            InexactLayerError: If one of its layers drops edges.
        """
        net = self._net
        net.train(training)
        for attempt in range(ATTEMPTS):
            self.tracer = self._make_tracer()
            known, before = self.tracer.known, random_states(net)
            self.branches.start(known, outcomes, rest)
            with keep_attributes(net) as changed, _Evaluated(net, known) as evaluated:
                graph = self.tracer.trace(net)
            self._computed.update(evaluated.names)
            check_caches(net, self._caches, changed)
            self.branches.stop()
            if known.dropping:
                layer = net.get_submodule(known.dropping[0])
                what = f"'{known.dropping[0]}' ({type(layer).__name__})"
                raise InexactLayerError(f"{what} drops edges in its forward", layer)
            is_random = evaluated.draws or bool(self.branches.found and not training)
            if not is_random and random_states(net) == before:
                break
            if attempt == ATTEMPTS - 1:
                raise ValueError(RANDOM)
            _take_constants(net)
        self.tracer.detach(graph)
        self._finish(net, graph)
        self._name_constants(graph, _take_constants(net))
        return graph

    def _name_constants(self, graph: Graph, found: dict[str, Tensor]) -> None:
        """Give equal tensors of several traces the same name, and others other names."""
        for node in graph.nodes:
            if node.op == "get_attr" and node.target in found:
                value = found[str(node.target)]
                same = [
                    key for key, each in self.constants.items()
                    if each.dtype == value.dtype and torch.equal(each, value)
                ]  # fmt: skip
                node.target = same[0] if same else f"{CONSTANT}{len(self.constants)}"
                self.constants[node.target] = value


def merge_random_branches(
    runs: Runs, first: Graph, evaluated: Graph, probabilities: Sequence[float], merge: Any
) -> ModeMerger:
    """Merge the graphs of a module for each outcome of its random branches.

    ``first`` is the graph of outcomes that are all ``False``; of it and that of outcomes that are
    all ``True``, which have these probabilities, the one that is closer to the graph in evaluation
    is merged into, by what ``merge`` makes.

    Raises:
        ValueError: If random branches depend on one another.
    """
    graphs = [first, runs.run(True, rest=True)]
    base = min((0, 1), key=lambda at: abs(len(graphs[at].nodes) - len(evaluated.nodes)))
    known: dict[str, int] = {}
    count = len(probabilities)

    def outcomes_of(turned: Sequence[int]) -> list[bool]:
        """Return the outcomes with the random choices at these positions the other way."""
        return [(position in turned) != bool(base) for position in range(count)]

    def run(*turned: int) -> Graph:
        return runs.run(True, outcomes_of(turned), bool(base))

    # Number each output, by the positions of the random choices that differ from the base.
    expected = {tuple(range(count)): number_values(graphs[1 - base], known)}
    merger: ModeMerger = merge(graphs[base])
    for position, p in enumerate(probabilities):
        other = run(position)
        if runs.branches.found != probabilities:
            raise ValueError(RANDOM)
        expected[position,] = number_values(other, known)
        merger.merge(other, p, not base)
    for pair in itertools.combinations(range(count), 2) if count <= MOST_IN_PAIRS else ():
        expected[pair] = number_values(run(*pair), known)
    for turned, number in expected.items():
        if number_values(merger.graph, known, outcomes_of(turned)) != number:
            raise ValueError(RANDOM)
    return merger


class _Evaluated(TorchDispatchMode):
    """Notes what this thread computes in a trace, other than values on small graphs.

    * ``draws``: whether it draws numbers.
    * ``names``: the attributes of the module that it computes with, which the graph doesn't read.
    """

    def __init__(self, net: Module, known: Any) -> None:
        super().__init__()
        self._known, self.draws = known, False
        self.names: set[str] = set()
        self._tensors = {
            id(value): (value, f"{prefix}.{key}".lstrip("."))
            for prefix, module in net.named_modules()
            for key, value in {**module._buffers, **vars(module)}.items()
            if isinstance(value, Tensor)
        }  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._known.is_evaluating:
            self.draws |= torch.Tag.nondeterministic_seeded in func.tags
            found = [self._tensors.get(id(each)) for each in tree_leaves((args, kwargs))]
            self.names.update(each[1] for each in found if each is not None)
        return func(*args, **(kwargs or {}))


def _take_constants(net: Module) -> dict[str, Tensor]:
    """Remove the tensors that tracing has stored in a module, and return them."""
    names = [name for name in vars(net) if name.startswith(CONSTANT)]
    return {name: net.__dict__.pop(name) for name in names}
