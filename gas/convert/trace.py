"""Trace of a module's computation, in which message passing layers are single nodes."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer
from torch.fx.proxy import TraceError
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from gas.convert.edge_layers import EdgeLayer, InexactLayerError, Propagation
from gas.convert.known import KnownProxy, KnownValues, answer_questions
from gas.convert.matrices import TracedMatrix, spread_matrix
from gas.convert.modes import DROPOUTS, add_training_input
from gas.nn import BY_TIME, NeverExactError, SimpleConv, check_exact

# Layers that propagate several times without a transformation in between; unrolled into hops.
UNROLLED = (pyg.APPNP, pyg.SGConv, pyg.SSGConv, pyg.TAGConv)
Opened = tuple[type[MessagePassing], ...]
Added = dict[str, Callable[[Module], Module]]  # Layers to add to a module, by their names.
InCall = Callable[[dict[str, Any]], dict[str, Any]]
GIVEN = (
    "is_given_edge"  # Whether an edge is one of the graph's own, not a self-loop that was added.
)
ATTEMPTS = 3  # Traces, of which one must draw no random numbers, as other threads may.
CONSTANT = "_tensor_constant"  # The prefix of the names of such tensors.


class _Tracer(Tracer):
    """Tracer whose leaves are message passing layers, and modules without such layers."""

    proxy_buffer_attributes = True  # Their values may change.

    def __init__(
        self, method: str, inputs: Sequence[str], in_call: InCall, fixed: dict[str, Any],
        known: KnownValues, opened: Opened,
    ) -> None:  # fmt: skip
        super().__init__()
        self.known, self.hides_types = known, isinstance(known.root, UNROLLED)
        self._autocast = torch.is_autocast_enabled("cpu")
        self._without_gradient: set[Node] = set()
        self.traced_func_name = method
        self._opened = opened
        self._inputs, self._in_call, self._fixed = inputs, in_call, fixed
        self.failed = ""  # The submodule that can't be traced, if any.

    def call_module(self, m: Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Follow modules that take a graph, and record the innermost that can't be traced."""
        if self.known.is_evaluating:
            return forward(*args, **kwargs)
        check_exact(self.path_of_module(m), m)
        hidden, self.hides_types = self.hides_types, self.hides_types or isinstance(m, UNROLLED)
        try:
            takes_graph = any(map(self._is_graph, (*args, *kwargs.values())))
            if takes_graph and not isinstance(m, (MessagePassing, EdgeLayer)):
                return forward(*args, **kwargs)
            if isinstance(m, MessagePassing) and not self._opens(m):
                args, kwargs = spread_matrix(m, args, kwargs)
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or f" in '{self.path_of_module(m)}' ({type(m).__name__})"
            raise
        finally:
            self.hides_types = hidden

    def _is_graph(self, value: Any) -> bool:
        """Return whether a value is, or has, the graph, its adjacency, or the ends of edges."""
        if issubclass(type(value), Proxy):
            return value.node in self.known.of_edges
        return isinstance(value, Data | TracedMatrix) or _has_proxy(value)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Trace parameters and buffers that are read, except by what is evaluated."""
        if self.known.is_evaluating or issubclass(type(attr_val), Proxy):
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: Node) -> Proxy:
        """Return a proxy of a node that knows its values on small graphs."""
        self.known.add(node)
        return KnownProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """Return the argument of a node; proxies may be instances of what their values are."""
        return a.node if issubclass(type(a), Proxy) else super().create_arg(a)

    def to_bool(self, obj: Proxy) -> bool:
        """Answer a condition that follows from shapes, the same on every graph."""
        value = self.known.fixed(obj.node)
        return super().to_bool(obj) if value is None else bool(value)

    def iter(self, obj: Proxy) -> Iterator[Any]:
        """Iterate over what has the same length on every graph."""
        try:
            size = self.known.length(obj.node)
        except TypeError:
            return super().iter(obj)
        values: Any = obj
        return iter([values[position] for position in range(size)])

    def _opens(self, m: Module) -> bool:
        """Return whether a layer is followed up to its messages."""
        return isinstance(m, (*UNROLLED, *self._opened))

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        if self._opens(m) or isinstance(m, torch.nn.Sequential):
            return False  # Histories are placed before a dropout in it.
        return isinstance(m, MessagePassing) or not any(
            isinstance(child, MessagePassing) for child in m.modules()
        )

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Note what is computed without gradients, and refuse a change of autocast."""
        if torch.is_autocast_enabled("cpu") != self._autocast:
            raise ValueError(
                "it changes whether lower precision is on, which a graph can't say: take autocast "
                "around the model"
            )
        node = super().create_node(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._without_gradient.add(node)
        return node

    def detach(self, graph: Graph) -> None:
        """Detach what was computed under ``torch.no_grad()`` from what wasn't."""
        for node in list(graph.nodes):
            if node not in self._without_gradient:
                continue
            readers = [user for user in node.users if user not in self._without_gradient]
            if isinstance(self.known.first(node), tuple | list):  # Its items are detached.
                items = [user for user in readers if user.target is operator.getitem]
                self._without_gradient.update(items)
            elif readers and isinstance(self.known.first(node), Tensor):
                with graph.inserting_after(node):
                    detached = graph.call_method("detach", (node,))
                for reader in readers:
                    reader.replace_input_with(node, detached)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Make inputs of the parameters that the graph provides; others keep their defaults."""
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._inputs]

        def call(root: Module, *values: Any) -> Any:
            given = self._in_call(dict(zip(self._inputs, values, strict=True)))
            out = root_fn(root, **self._fixed, **given)
            if isinstance(out, Data):
                raise ValueError("it returns the graph: return its rows, such as data.x")
            return out

        return call, [self.root, *proxies]


def _has_proxy(value: Any) -> bool:
    """Return whether an object has attributes that are traced, or dictionaries of such."""
    if isinstance(value, Module) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(leaf, Proxy) for leaf in tree_leaves(vars(value)))


def add_hop(layer: Any) -> None:
    """Give a layer the child that computes one of its hops."""
    layer.hop = SimpleConv(aggr="add") if isinstance(layer, UNROLLED) else Propagation(layer)


class Hops:
    """Replacement of ``propagate`` of an unrolled layer: a layer for every hop."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        add_hop(layer)

    def __call__(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        """See :meth:`torch_geometric.nn.MessagePassing.propagate`."""
        if isinstance(self._layer, UNROLLED):
            return self._layer.hop(given["x"], edge_index, given.get("edge_weight"))
        return self._layer.hop(edge_index, **given)


@contextlib.contextmanager
def _unroll_layers(net: Module, opened: Opened) -> Iterator[None]:
    layers = [layer for layer in net.modules() if isinstance(layer, (*UNROLLED, *opened))]
    for layer in layers:
        object.__setattr__(layer, "propagate", Hops(layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["propagate"]


def trace(
    net: Module,
    method: str,
    inputs: Sequence[str],
    in_call: InCall,
    fixed: dict[str, Any],
    samples: Sequence[dict[str, Any]],
    counts: Sequence[int],
    edges: str,
    opened: Opened = (),
) -> Graph:
    """Trace a module's method; ``training`` arguments become an input of that name.

    Layers of :data:`UNROLLED` get a child ``hop``, and their calls are traced.

    Args:
        net: The module, whose layers the graph calls by their names.
        method: Such as ``"forward"``.
        inputs: The names of the values that are inputs.
        in_call: Makes the method's arguments of these values.
        fixed: The values of its other parameters.
        samples: The inputs on several small graphs.
        counts: The numbers of their nodes.
        edges: The input that is the adjacency.
        opened: Types of layers that are followed up to ``propagate``.

    Raises:
        ValueError: If it can't be traced, or differs in training from evaluation.
    """
    modes = [(module, module.training) for module in net.modules()]
    graphs: list[Graph] = []
    constants: list[dict[str, Tensor]] = []
    sizes: list[int] = []
    known = KnownValues(net, samples, counts, edges)
    tracer = _Tracer(method, inputs, in_call, fixed, known, opened)
    try:
        with _unroll_layers(net, opened), answer_questions():
            for training in (True, False):
                net.train(training)
                for attempt in range(ATTEMPTS):
                    known = KnownValues(net, samples, counts, edges)
                    tracer = _Tracer(method, inputs, in_call, fixed, known, opened)
                    before = _random_states(net)
                    with _Draws(known) as draws:
                        graph = tracer.trace(net)
                    if known.dropping:
                        layer = net.get_submodule(known.dropping[0])
                        what = f"'{known.dropping[0]}' ({type(layer).__name__})"
                        raise InexactLayerError(f"{what} drops edges in its forward", layer)
                    if not draws.found and _random_states(net) == before:
                        break
                    _check_random(attempt)
                    _take_constants(net)
                graphs.append(graph)
                tracer.detach(graphs[-1])
                sizes.append(len(graphs[0].nodes))
                constants.append(_take_constants(net))
    except (NeverExactError, InexactLayerError):
        raise
    except Exception as error:
        if graphs:
            _check_states(net, sizes[0], graphs)
        raise ValueError(
            f"{type(net).__name__}.{method} can't be followed{tracer.failed}: {_explain(error)}"
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode
    _check_states(net, sizes[0], graphs)
    drops = functools.partial(is_dropout, net)
    add_training_input(f"{type(net).__name__}.{method}", graphs[0], graphs[1], drops)
    for name, value in constants[0].items():
        if not torch.equal(value, constants[1][name]):
            raise ValueError(f"{type(net).__name__}.{method} draws numbers, or keeps them: {name}")
        setattr(net, name, value)
    _check_dropout(net, graphs[0])
    return graphs[0]


class _Draws(TorchDispatchMode):
    """Notes whether this thread draws numbers in a trace, other than for values on small graphs."""

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known, self.found = known, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self._known.is_evaluating:
            self.found = True
        return func(*args, **(kwargs or {}))


def _random_states(net: Module) -> list[Any]:
    """Return the states of the generators of Python and NumPy, global ones and those of modules."""
    _, key, position, *_ = np.random.get_state()
    kept = [value for module in net.modules() for value in vars(module).values()]
    return [
        random.getstate(), list(key), position,
        *(value.getstate() for value in kept if isinstance(value, random.Random)),
        *(str(each.bit_generator.state) for each in kept if isinstance(each, np.random.Generator)),
        *(str(each.get_state()) for each in kept if isinstance(each, np.random.RandomState)),
    ]  # fmt: skip


def _check_random(attempt: int) -> None:
    """Refuse a module that draws numbers in every trace, which its calls would then repeat."""
    if attempt == ATTEMPTS - 1:
        raise ValueError(
            "it draws random numbers that don't follow from its inputs, such as whether to skip a "
            "layer: use dropout with training=self.training"
        )


def _explain(error: Exception) -> str:
    """Return why tracing fails, and what to do."""
    if isinstance(error, ValueError) and not isinstance(error, TraceError):
        return str(error)
    why = "It is called with stand-ins for tensors, which have shapes but no values"
    if isinstance(error, TraceError):
        why = "What it does must not depend on values of tensors"
    return (
        f"{type(error).__name__}: {error}. {why}: subclass gas.ScalableGNN instead, and call "
        "push_and_pull after every layer but the last"
    )


def _find_kept_value(net: Module) -> str:
    """Find a module that keeps a traced value, and name its attribute; return "" if none does."""
    for name, module in net.named_modules():
        for key, value in (*vars(module).items(), *module._buffers.items()):
            if isinstance(value, Proxy):
                where = f"'{name}' ({type(module).__name__})" if name else type(module).__name__
                return f"{where} keeps '{key}'"
    return ""


def _check_states(net: Module, size: int, graphs: Sequence[Graph]) -> None:
    """Refuse a trace that has read values of the trace before it, which had ``size`` nodes.

    Raises:
        ValueError: Naming the module and the attribute.
    """
    first, *rest = graphs
    read = not rest or len(first.nodes) > size or any(
        argument.graph is not rest[0] for node in rest[0].nodes for argument in node.all_input_nodes
    )  # fmt: skip
    if read and (kept := _find_kept_value(net)):
        raise ValueError(
            f"{kept} of one call for the next, and mini-batches come after one another: {BY_TIME}"
        )


def _check_dropout(net: Module, graph: Graph) -> None:
    """Refuse dropout that is also applied in evaluation."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in DROPOUTS:
            given = dict(zip(DROPOUTS[node.target], node.args, strict=False)) | node.kwargs
            if given.get("training", True) is True and given.get("train", True) is True:
                raise ValueError(
                    f"'{node.name}' drops in evaluation, too: pass training=self.training"
                )


def _take_constants(net: Module) -> dict[str, Tensor]:
    """Remove the tensors that tracing has stored in a module, and return them."""
    names = [name for name in vars(net) if name.startswith(CONSTANT)]
    return {name: net.__dict__.pop(name) for name in names}


def get_module(net: Module | GraphModule, node: Node) -> Module | None:
    """Return the module that a node calls, if it calls one."""
    return net.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_layer(net: Module, node: Node) -> bool:
    """Return whether a node is a message passing layer."""
    return isinstance(get_module(net, node), (MessagePassing, EdgeLayer))


def is_dropout(net: Module, node: Node) -> bool:
    """Return whether a node drops elements at random."""
    if node.op == "call_module":
        return isinstance(get_module(net, node), torch.nn.modules.dropout._DropoutNd)
    return node.op == "call_function" and node.target in DROPOUTS
