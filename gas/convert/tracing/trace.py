"""Trace of a module's computation, in which message passing layers are single nodes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, Proxy, Tracer
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from gas.convert.module.changes import check_change
from gas.convert.module.inputs import Inputs
from gas.convert.module.state import CONSTANT
from gas.convert.tracing.runs import Runs, merge_random_branches, patch_for_tracing
from gas.convert.values.edge_layers import (
    UNROLLED,
    EdgeLayer,
    InexactLayerError,
    LayerTypes,
    is_of_user,
    set_forward_flow,
    unroll_layers,
)
from gas.convert.values.failures import explain_trace, find_line
from gas.convert.values.known import KnownProxy, KnownValues, is_edge_list
from gas.convert.values.matrices import LOOPS, spread_matrix
from gas.convert.values.modes import (
    BRANCH,
    BY_ROW,
    DROPOUTS,
    IN_ONE_MODE,
    IN_ORDER,
    LINE,
    RANDOM,
    TRAINING,
    ModeMerger,
)
from gas.convert.values.segments import AttentionWeights
from gas.convert.values.traced_matrix import TracedMatrix
from gas.nn import NeverExactError, check_exact
from gas.scalable import preserve_modes

ATTENTION = "return_attention_weights"


class _Tracer(Tracer):
    """Tracer whose leaves are message passing layers, and modules without such layers."""

    proxy_buffer_attributes = True  # Their values may change.

    def __init__(
        self,
        inputs: Inputs,
        known: KnownValues,
        traced_types: LayerTypes,
        backward: Sequence[Module],
    ) -> None:
        super().__init__()
        self._backward = backward
        self.known = known
        self._autocast = torch.is_autocast_enabled("cpu")
        self._without_gradient: set[Node] = set()
        self.traced_func_name = inputs.method
        self._inputs, self._traced_types = inputs, traced_types
        self.failed = ""  # The submodule that can't be traced, if any.

    def call_module(self, m: Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Follow modules that take a graph, and record the innermost that can't be traced."""
        if self.known.is_evaluating:
            return forward(*args, **kwargs)
        if not any(m is each for each in self.root.modules()):
            return _call_made(m, forward, args, kwargs)
        check_exact(self.path_of_module(m), m)
        try:
            takes_graph = any(map(self._is_graph, (*args, *kwargs.values())))
            if takes_graph and not isinstance(m, (MessagePassing, EdgeLayer)):
                return forward(*args, **kwargs)
            has_matrix = any(isinstance(each, TracedMatrix) for each in (*args, *kwargs.values()))
            if isinstance(m, MessagePassing) and not self._opens(m):
                spread = spread_matrix(m, args, kwargs)
                if spread is None:
                    raise self._matrix_error(m)
                args, kwargs, has_loops = spread
                if any(m is each for each in self._backward):
                    args, kwargs = tree_map(self._turn, (args, kwargs))
                if kwargs.get(ATTENTION) is True:
                    out = super().call_module(m, forward, args, {**kwargs, ATTENTION: None})
                    return out, AttentionWeights(self.path_of_module(m))
                out = super().call_module(m, forward, args, kwargs)
                if has_loops:
                    out.node.meta[LOOPS] = True
                if has_matrix and not self.known.has(out.node) and is_of_user(m):
                    raise self._matrix_error(m)
                return out
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or f" in '{self.path_of_module(m)}' ({type(m).__name__})"
            raise

    def _matrix_error(self, m: Module) -> InexactLayerError:
        where = f"'{self.path_of_module(m)}' ({type(m).__name__})"
        return InexactLayerError(f"{where} takes a matrix, and no list of edges instead", m)

    def _is_graph(self, value: Any) -> bool:
        """Return whether a value is, or has, the graph, its adjacency, or the ends of edges."""
        if issubclass(type(value), Proxy):
            return value.node in self.known.of_edges
        return isinstance(value, Data | TracedMatrix) or _has_proxy(value)

    def _turn(self, value: Any) -> Any:
        """Return a list of edges turned round, and anything else as it is."""
        is_edges = issubclass(type(value), Proxy) and value.node in self.known.of_edges
        return value.flip(0) if is_edges and is_edge_list(self.known.first(value.node)) else value

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Trace parameters and buffers that are read, except by what is evaluated."""
        if self.known.is_evaluating or issubclass(type(attr_val), Proxy):
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: Node) -> Proxy:
        """Return a proxy of a node that knows its values on small graphs."""
        self.known.add(node)
        return KnownProxy(node, self)

    def count_nodes(self) -> Proxy | None:
        """Return the number of rows of an input with a row for each node; ``None`` without one."""
        for node in self.graph.nodes:
            if node.op == "placeholder" and self.known.has_row_per_node(node):
                return self.create_proxy("call_method", "size", (KnownProxy(node, self), 0), {})
        return None

    def create_arg(self, a: Any) -> Any:
        """Return the argument of a node; proxies may be instances of what their values are."""
        if isinstance(a, np.generic):  # The code that is written has no name for it.
            a = a.item()
        return a.node if issubclass(type(a), Proxy) else super().create_arg(a)

    def to_bool(self, obj: Proxy) -> bool:
        """Answer a condition that follows from shapes, the same on every graph."""
        value = self.known.fixed(obj.node)
        if obj.node.target is getattr and obj.node.args[1] == "requires_grad":
            raise ValueError(
                f"it asks whether '{obj.node.args[0]}' requires gradients, which predictions don't "
                "have: ask for self.training"
            )
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
        return isinstance(m, (*UNROLLED, *self._traced_types))

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        kept = [
            value for each in m.modules()
            for values in (each._parameters, vars(each)) for value in values.values()
        ]  # fmt: skip
        is_given = any(issubclass(type(value), Proxy | TracedMatrix) for value in kept)
        if self._opens(m) or isinstance(m, torch.nn.Sequential) or is_given:
            return False  # Histories are placed before a dropout in it.
        return isinstance(m, MessagePassing) or not any(
            isinstance(child, MessagePassing) for child in m.modules()
        )

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Proxy:
        """Refuse hooks, which a graph can't call, and ``backward``, which may change gradients."""
        if (kind, target) == ("call_method", "register_hook"):
            raise ValueError(
                "it registers a hook on a tensor, which the model wouldn't call: compute what it "
                "does in a torch.autograd.Function, which is followed"
            )
        if (kind, target) == ("call_method", "backward"):
            raise ValueError(
                "it computes gradients in forward, which the model wouldn't do: add what they are "
                "of to the loss"
            )
        return super().create_proxy(kind, target, *args, **kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Note what has no gradients, and refuse changes of autocast and of parameters."""
        if torch.is_autocast_enabled("cpu") != self._autocast:
            raise ValueError(
                "it changes whether lower precision is on, which a graph can't say: take autocast "
                "around the model"
            )
        node = super().create_node(*args, **kwargs)
        check_change(node)
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT):
            node.meta[LINE] = find_line()
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
        names, fixed = self._inputs.arrange()
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def call(root: Module, *values: Any) -> Any:
            given = dict(zip(names, values, strict=True))
            out = self._inputs.call(root, given, functools.partial(root_fn, root, **fixed))
            if isinstance(out, Data):
                raise ValueError("it returns the graph: return its rows, such as data.x")
            return out

        return call, [self.root, *proxies]


def _call_made(module: Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Follow a module that forward makes, such as ``ReLU()(x)``.

    Raises:
        ValueError: If it has parameters.
    """
    if any(True for _ in module.parameters()):
        raise ValueError(
            f"it calls a {type(module).__name__} that isn't a part of the module: make it in "
            "__init__, not in forward, and keep layers in a torch.nn.ModuleList, not in a list"
        )
    return forward(*args, **kwargs)


def _has_proxy(value: Any) -> bool:
    """Return whether an object has attributes that are traced, or dictionaries of such."""
    if isinstance(value, Module) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(leaf, Proxy) for leaf in tree_leaves(vars(value)))


def trace(
    net: Module, inputs: Inputs, small: Sequence[Data], finish: Callable[[Module, Graph], None],
    traced_types: LayerTypes, caches: Sequence[str], computed: set[str],
) -> Graph:  # fmt: skip
    """Trace a module's method; ``training`` arguments become an input of that name.

    Layers of :data:`UNROLLED` get a child ``hop``, and their calls are traced.

    Args:
        net: The module, whose layers the graph calls by their names.
        inputs: Its arguments.
        small: Several small graphs, which provide them.
        finish: Changes the graph of each mode before they are merged.
        traced_types: Types of layers that are followed up to ``propagate``.
        caches: The attributes that it computes in its first call alone.
        computed: Gets the names of the attributes of tensors that other values are computed of.

    Raises:
        ValueError: If it can't be traced, or differs in training from evaluation.
    """
    name = f"{type(net).__name__}.{inputs.method}"
    samples = [inputs.values(each) for each in small]
    counts = [int(each.num_nodes or 0) for each in small]
    backward = set_forward_flow(net, traced_types)

    def make_tracer() -> _Tracer:
        known = KnownValues(net, samples, counts, inputs.edges)
        return _Tracer(inputs, known, traced_types, backward)

    runs = Runs(net, make_tracer, finish, caches, computed)
    merge = functools.partial(ModeMerger, name, is_dropout=functools.partial(is_dropout, net))
    try:
        with (
            preserve_modes(net),
            unroll_layers(net, traced_types),
            patch_for_tracing(runs.branches),
        ):
            first = runs.run(True)
            found = runs.branches.found
            evaluated = runs.run(False)
            if found:
                merger = merge_random_branches(runs, first, evaluated, found, merge)
            else:
                merger = merge(first)
    except (NeverExactError, InexactLayerError):
        raise
    except Exception as error:
        called = {getattr(node.target, "__name__", "") for node in runs.tracer.graph.nodes}
        cure = f"; if this is for random edges or rows, {BY_ROW}" if called & IN_ORDER else ""
        raise ValueError(
            f"{name} can't be followed{runs.tracer.failed}: {explain_trace(error)}{cure}"
        ) from error
    merger.merge(evaluated)
    try:
        merger.graph.lint()
    except RuntimeError as error:  # A value is read before it is computed.
        raise ValueError(f"{name} can't be followed: {RANDOM}") from error
    for key, value in runs.constants.items():
        setattr(net, key, value)
    _check_modes(net, merger.graph)
    return merger.graph


def _check_modes(net: Module, graph: Graph) -> None:
    """Refuse dropout that is also applied in evaluation, and statistics that are kept in it."""
    for node in graph.nodes:
        module, mode = get_module(net, node), node.meta.get(IN_ONE_MODE, TRAINING)
        if mode != TRAINING and keeps_statistics(module):
            when, cure = "evaluation alone", "call it in training, too"
            if mode == BRANCH:
                when = "a random branch, where it would count what isn't taken"
                cure = "call it before the branch, or take a norm without, such as LayerNorm"
            raise ValueError(
                f"'{node.target}' ({type(module).__name__}) keeps statistics, and is called in "
                f"{when}: {cure}"
            )
        if node.op == "call_function" and node.target in DROPOUTS:
            given = dict(zip(DROPOUTS[node.target], node.args, strict=False)) | node.kwargs
            if given.get("training", True) is True and given.get("train", True) is True:
                raise ValueError(
                    f"'{node.name}' drops in evaluation, too: pass training=self.training"
                )


def get_module(net: Module | GraphModule, node: Node) -> Module | None:
    """Return the module that a node calls, if it calls one."""
    return net.get_submodule(str(node.target)) if node.op == "call_module" else None


def keeps_statistics(module: Module | None) -> bool:
    """Return whether a module, or a part of it, keeps statistics of its rows in training."""
    parts = () if module is None else module.modules()
    return any(getattr(part, "track_running_stats", False) for part in parts)


def is_layer(net: Module, node: Node) -> bool:
    """Return whether a node is a message passing layer."""
    return isinstance(get_module(net, node), (MessagePassing, EdgeLayer))


def is_dropout(net: Module, node: Node) -> bool:
    """Return whether a node drops elements at random."""
    if node.op == "call_module":
        return isinstance(get_module(net, node), torch.nn.modules.dropout._DropoutNd)
    return node.op == "call_function" and node.target in DROPOUTS
