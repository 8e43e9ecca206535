"""One graph of a module, of those that are traced in training and in evaluation."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast
from unittest import mock

import torch
import torch_geometric.utils as pyg_utils
from torch import Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch_geometric.utils.num_nodes import maybe_num_nodes

TRAINING = "training"
# Functions that drop at random, with the names of their parameters.
DROPOUTS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.dropout: ("input", "p", "training", "inplace"),
    torch.nn.functional.alpha_dropout: ("input", "p", "training", "inplace"),
    torch.nn.functional.feature_alpha_dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "train"),
}


def _copy(function: Any) -> Any:
    """Copy a function, which stays as it is while the original records calls."""
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )


_ORIGINALS: list[Any] = [
    inspect.unwrap(each) for each in (pyg_utils.dropout_edge, pyg_utils.dropout_adj)
]
EDGE_DROPOUTS: dict[Any, tuple[str, ...]] = {
    _copy(function): tuple(inspect.signature(function).parameters) for function in _ORIGINALS
}


_MAYBE_NUM_NODES: Any = inspect.unwrap(maybe_num_nodes)
_maybe_num_nodes = _copy(_MAYBE_NUM_NODES)

EDGE_CALLS: list[str] = []  # Their calls in a trace, also by what isn't followed.
_recorded: dict[str, Callable[..., Any]] = {}  # A global of the functions while they record.


def _call_dropout_edge(*args: Any, **kwargs: Any) -> Any:
    return _recorded["dropout_edge"](*args, **kwargs)


def _call_dropout_adj(*args: Any, **kwargs: Any) -> Any:
    return _recorded["dropout_adj"](*args, **kwargs)


def _call_maybe_num_nodes(edge_index: Any, num_nodes: int | None = None) -> Any:
    return _recorded["maybe_num_nodes"](edge_index, num_nodes)


@contextmanager
def explain_num_nodes() -> Iterator[None]:
    """Have functions of PyG that count nodes by the largest id say what to pass to them."""

    def count(edge_index: Any, num_nodes: int | None) -> Any:
        try:
            return _maybe_num_nodes(edge_index, num_nodes)
        except Exception as error:
            if not issubclass(type(edge_index), Proxy):
                raise
            raise ValueError(
                "a function of PyG that it calls, such as add_self_loops, degree or gcn_norm, "
                "counts the nodes by the largest id of the edges: pass num_nodes=x.size(0) to it"
            ) from error

    before = _MAYBE_NUM_NODES.__code__
    with mock.patch.dict(_MAYBE_NUM_NODES.__globals__, {"_recorded": {"maybe_num_nodes": count}}):
        try:
            _MAYBE_NUM_NODES.__code__ = _call_maybe_num_nodes.__code__
            yield
        finally:
            _MAYBE_NUM_NODES.__code__ = before


@contextmanager
def record_edge_dropout(record: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Have calls of these functions be recorded, under whatever name a module knows them.

    Args:
        record: Makes a function that records the call of another.

    Raises:
        ValueError: If both directions of edges were dropped together.
    """
    in_pairs: list[str] = []  # Also by layers that aren't followed.
    EDGE_CALLS.clear()

    def check(function: Any) -> Callable[..., Any]:
        recorded = record(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            EDGE_CALLS.append(function.__name__)
            given = dict(zip(EDGE_DROPOUTS[function], args, strict=False)) | kwargs
            in_pairs.extend([function.__name__] * bool(given.get("force_undirected", False)))
            return recorded(*args, **kwargs)

        return call

    made = {function.__name__: check(function) for function in EDGE_DROPOUTS}
    before = [(each, each.__code__, each.__defaults__) for each in _ORIGINALS]
    with mock.patch.dict(_ORIGINALS[0].__globals__, {"_recorded": made}):
        try:
            for function, call in zip(
                _ORIGINALS, (_call_dropout_edge, _call_dropout_adj), strict=True
            ):
                function.__defaults__, function.__code__ = None, call.__code__
            yield
        finally:
            for function, code, defaults in before:
                function.__code__, function.__defaults__ = code, defaults
    if in_pairs:
        raise ValueError(
            f"'{in_pairs[0]}' drops both directions of an edge together, and a mini-batch may have "
            "one of them alone: leave out 'force_undirected'"
        )


def add_training_input(
    name: str, graph: Graph, other: Graph, is_dropout: Callable[[Node], bool]
) -> None:
    """Replace arguments that are true in training and false in evaluation by one input.

    Dropout that is called in training alone gets it, too.

    Args:
        name: The name of the method.
        graph: What it computes in training, which is changed.
        other: What it computes in evaluation.
        is_dropout: Whether a node drops elements at random.
    """
    pairs, same = _pair_nodes(name, graph, other, is_dropout)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        training = graph.placeholder(TRAINING)
    for a, b in pairs.items():
        if b is None:
            if names := {**DROPOUTS, **EDGE_DROPOUTS}.get(a.target):
                given = dict(zip(names[1:], a.args[1:], strict=False)) | a.kwargs
                switch = "train" if "train" in names else "training"
                if given.get(switch, True) is not False:
                    a.args, a.kwargs = a.args[:1], {**given, switch: training}
            continue
        ones, twos = _constants(a), _constants(b)
        differ = [
            key for key in {**ones, **twos}
            if not _is_same(map_arg(ones.get(key, True), same.get), twos.get(key, True))
        ]  # fmt: skip
        if any(ones.get(key, True) is not True for key in differ):
            raise ValueError(
                f"{name}: '{a.name}' takes other values in training than in evaluation, "
                "which can't be followed: pass training=self.training"
            )
        for key in differ:
            if isinstance(key, int):
                a.update_arg(key, training)
            else:
                a.update_kwarg(key, training)


def _pair_nodes(
    name: str, graph: Graph, other: Graph, is_dropout: Callable[[Node], bool]
) -> tuple[dict[Node, Node | None], dict[Node, Node]]:
    """Find the nodes in evaluation for those in training, ``None`` for dropout without one.

    Returns:
        These, and the nodes in evaluation that have the same values, which dropout has, too.

    Raises:
        ValueError: If they differ in more than dropout.
    """
    pairs: dict[Node, Node | None] = {}
    same: dict[Node, Node] = {}
    left = list(other.nodes)
    for a in graph.nodes:
        b = left[0] if left else None
        inputs = [same.get(each) for each in a.all_input_nodes]
        if b is not None and (a.op, a.target, inputs) == (b.op, b.target, b.all_input_nodes):
            pairs[a] = same[a] = left.pop(0)
        elif (equal := _find_equal(a, same, is_dropout)) is not None:
            pairs[a], same[a] = None, equal
        else:
            left = [a]
            break
    if left:
        raise ValueError(
            f"{name} calls other functions in training than in evaluation, which can't be "
            "followed: call the same ones, with training=self.training"
        )
    return pairs, same


def _find_equal(
    node: Node, same: dict[Node, Node], is_dropout: Callable[[Node], bool]
) -> Node | None:
    """Return what dropout that is called in training alone is equal to in evaluation."""
    if is_dropout(node) or node.target in EDGE_DROPOUTS:
        return same.get(cast(Node, node.args[0])) if node.args else None
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    whole, index = node.args[0], node.args[1]
    if whole.target in EDGE_DROPOUTS:
        is_attribute = "edge_attr" in EDGE_DROPOUTS[whole.target] and index == 1
        return same.get(cast(Node, whole.args[1]) if is_attribute else whole)
    masks: Any = index.args[0] if isinstance(index, Node) and index.args else None
    return same.get(whole) if isinstance(masks, Node) and masks.target in EDGE_DROPOUTS else None


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, Node) or isinstance(two, Node):
        return one is two
    return type(one) is type(two) and (isinstance(one, Tensor) or repr(one) == repr(two))


def _constants(node: Node) -> dict[int | str, Any]:
    out: dict[int | str, Any] = dict(enumerate(node.args))
    out.update(node.kwargs)
    return out
