"""Merge the graphs of a module that are traced in training and in evaluation."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, cast
from unittest import mock

import torch
import torch_geometric.utils as pyg_utils
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch_geometric.utils.num_nodes import maybe_num_nodes

TRAINING = "training"
LINE = "line"  # What the user writes, which the node of an inner function notes.
# Marks of nodes that are computed in one mode, or in a random branch, alone.
IN_ONE_MODE, BRANCH = "in_one_mode", "random branch"
RANDOM = (
    "it draws random numbers in a way that isn't known: skip layers by torch.rand(1) < p, in "
    "training alone, each by a number of its own, compared once, and no skip depending on another, "
    "or use dropout with training=self.training"
)
# Functions that draw the order, or positions, of rows.
IN_ORDER = frozenset(("randperm", "randint", "multinomial"))
BY_ROW = (
    "drop edges by dropout_edge(edge_index, p, training=self.training), and rows by a number for "
    "each, torch.rand(x.size(0)) < p"
)
# Functions that drop at random, with the names of their parameters.
DROPOUTS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.dropout: ("input", "p", "training", "inplace"),
    torch.nn.functional.alpha_dropout: ("input", "p", "training", "inplace"),
    torch.nn.functional.feature_alpha_dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "train"),
}


def copy_function(function: Any) -> Any:
    """Copy a function, which stays as it is while the original records calls."""
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )


# Functions of PyG that are single nodes of a trace, under whatever name a module knows them.
_ORIGINALS: list[Any] = [
    inspect.unwrap(each)
    for each in (
        pyg_utils.dropout_edge, pyg_utils.dropout_adj, maybe_num_nodes, pyg_utils.coalesce,
        pyg_utils.to_undirected, pyg_utils.to_dense_adj, pyg_utils.softmax,
    )
]  # fmt: skip
_COPIES: dict[str, Any] = {each.__name__: copy_function(each) for each in _ORIGINALS}
EDGE_DROPOUTS: dict[Any, tuple[str, ...]] = {
    _COPIES[each.__name__]: tuple(inspect.signature(each).parameters) for each in _ORIGINALS[:2]
}
EDGE_CALLS: list[str] = []  # Calls of dropouts of edges in a trace, also by what isn't followed.
_recorded: dict[str, Callable[..., Any]] = {}  # A global of the functions while they record.


def _call(*args: Any, **kwargs: Any) -> Any:
    return _recorded["name"](*args, **kwargs)


def _make_code(name: str) -> CodeType:
    """Make the code of a function that calls what is recorded under a name."""
    code = _call.__code__
    return code.replace(co_consts=tuple(name if c == "name" else c for c in code.co_consts))


@contextmanager
def replace_functions(made: dict[Any, Any]) -> Iterator[None]:
    """Let functions call their replacements, under whatever name a module knows them."""
    before = [(each, each.__code__, each.__defaults__) for each in made]
    recorded = {each.__name__: new for each, new in made.items()}
    with ExitStack() as stack:
        for each in made:
            stack.enter_context(mock.patch.dict(each.__globals__, {"_recorded": recorded}))
        try:
            for each in made:
                each.__defaults__, each.__code__ = None, _make_code(each.__name__)
            yield
        finally:
            for function, code, defaults in before:
                function.__code__, function.__defaults__ = code, defaults


@contextmanager
def record_functions(record: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace functions by what ``record`` makes of them, which records their calls in a trace.

    Raises:
        ValueError: If both directions of edges were dropped together, or a dense matrix made.
    """
    in_pairs: list[str] = []  # Also by layers that aren't followed.
    thread = threading.get_ident()
    EDGE_CALLS.clear()
    made = {name: record(function) for name, function in _COPIES.items()}

    def check(function: Any) -> Callable[..., Any]:
        recorded = made[function.__name__]

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args, **kwargs)
            EDGE_CALLS.append(function.__name__)
            given = dict(zip(EDGE_DROPOUTS[function], args, strict=False)) | kwargs
            in_pairs.extend([function.__name__] * bool(given.get("force_undirected", False)))
            return recorded(*args, **kwargs)

        return call

    count_nodes = made["maybe_num_nodes"]

    def count(edge_index: Any, num_nodes: Any = None) -> Any:
        return count_nodes(edge_index) if num_nodes is None else num_nodes

    def normalise(
        src: Any, index: Any, ptr: Any = None, num_nodes: Any = None, dim: int = 0
    ) -> Any:
        if num_nodes is None and issubclass(type(index), Proxy):  # The same as for fewer nodes.
            num_nodes = index.tracer.count_nodes()
        return _COPIES["softmax"](src, index, ptr, num_nodes, dim)

    def refuse(edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        if not issubclass(type(edge_index), Proxy):
            return _COPIES["to_dense_adj"](edge_index, *args, **kwargs)
        raise ValueError(
            "it makes a matrix of all nodes by all nodes, to_dense_adj: make a sparse one, "
            "torch.sparse_coo_tensor(edge_index.flip(0), weight, (num_nodes, num_nodes))"
        )

    made |= {function.__name__: check(function) for function in EDGE_DROPOUTS}
    made |= {"maybe_num_nodes": count, "to_dense_adj": refuse, "softmax": normalise}
    with replace_functions({each: made[each.__name__] for each in _ORIGINALS}):
        yield
    if in_pairs:
        raise ValueError(
            f"'{in_pairs[0]}' drops both directions of an edge together, and a mini-batch may have "
            "one of them alone: leave out 'force_undirected'"
        )


def make_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a single node of a trace, also when its graph is traced again in unpickling.

    It is traced if its first argument is.
    """

    @functools.wraps(function)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, Proxy):
            return first.tracer.create_proxy("call_function", call, (first, *args), kwargs)
        return function(first, *args, **kwargs)

    return call


@make_leaf
def choose(flag: Any, yes: Any, no: Any) -> Any:
    """Return one of two values."""
    return yes if flag else no


@make_leaf
def draw_flag(training: Any, p: float, rest: bool = False) -> Any:
    """Return ``True`` with probability ``p`` in training, and ``rest`` in evaluation."""
    return bool(torch.rand(()) < p) if training else rest


class ModeMerger:
    """Merge evaluation, or a random branch of training, into a module's graph in training.

    Both are computed, and the value of one of them is read. The graph in training is changed.
    """

    def __init__(self, name: str, graph: Graph, is_dropout: Callable[[Node], bool]) -> None:
        self.graph = graph
        self._name, self._is_dropout = name, is_dropout
        self._nodes = list(graph.nodes)
        self._read = {node: _inputs_of(node) for node in self._nodes}  # As they were traced.
        self._current: dict[Node, Node] = {}  # What is read of a value, by random branches.
        self._same: dict[Node, Node] = {}  # The nodes of the other graph with the same values.
        self._back: dict[Node, Node] = {}
        self._made: dict[tuple[Node, Node], Node] = {}  # By what is read, and of the other graph.
        self._merged: set[tuple[Node, Node]] = set()  # Of which one is chosen.
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        with graph.inserting_after(inputs[-1]):
            self.training = graph.placeholder(TRAINING)
        self._first = next(node for node in self._nodes if node.op != "placeholder")

    def merge(self, other: Graph, p: float | None = None, outcome: bool = False) -> None:
        """Merge another graph.

        Args:
            other: What is computed instead, in evaluation, or in a random branch of training.
            p: The probability that the branch's number is less; ``None`` in evaluation.
            outcome: Whether the other is taken then. (default: ``False``, as in evaluation)

        Raises:
            ValueError: If it returns something else, or random branches depend on one another.
        """
        self._same, self._back, self._made, self._merged = {}, {}, {}, set()
        self._is_evaluated, flag, self._outcome = p is None, self.training, outcome
        if p is not None:
            with self.graph.inserting_before(self._first):
                flag = self.graph.call_function(draw_flag, (self.training, p, not outcome))
        mine, others = list(self._nodes), list(other.nodes)
        while mine or others:
            if mine and others and self._is_same(mine[0], others[0]):
                self._pair(mine.pop(0), others.pop(0), flag)
            elif mine and (equal := self._find_equal(mine[0])) is not None and p is None:
                self._same[mine[0]] = equal
                self._drop_in_training(mine.pop(0))
            else:
                start, end = _find_next(mine, others, self._is_alike)
                if start == len(mine):
                    raise ValueError(
                        f"{self._name} returns something else in training than in evaluation, "
                        "which can't be followed: return the same values, in the same order"
                    )
                for node in mine[:start]:
                    node.meta.setdefault(IN_ONE_MODE, TRAINING if p is None else BRANCH)
                    if p is None:  # Before, graphs in training are compared.
                        self._drop_in_training(node)
                for node in others[:end]:
                    with self.graph.inserting_before(mine[start]):
                        made = self.graph.node_copy(node, self._value_of)
                    made.meta[IN_ONE_MODE] = "evaluation" if p is None else BRANCH
                    self._drop_in_training(made)
                    self._back[node] = made
                mine, others = mine[start:], others[end:]
                self._pair(mine.pop(0), others.pop(0), flag)

    def _value_of(self, other: Node) -> Node:
        value = self._back[other]
        return self._current.get(value, value)

    def _is_alike(self, node: Node, other: Node) -> bool:
        """Return whether nodes call the same with the same constants, but for ``training``."""
        if (node.op, node.target) != (other.op, other.target):
            return False
        ones, twos = _constants(node), _constants(other)
        default = True if node.target in {**DROPOUTS, **EDGE_DROPOUTS} else None
        return all(
            self._is_evaluated and ones.get(key, default) is True and twos.get(key) is False
            for key in _differing(node, other)
        )

    def _is_same(self, node: Node, other: Node) -> bool:
        """Return whether they also have the same inputs, or such that one is chosen of."""
        if not self._is_alike(node, other):
            return False
        pairs = list(zip(self._read[node], _inputs_of(other), strict=False))
        return all(self._same.get(u) is w or (u, w) in self._merged for u, w in pairs)

    def _pair(self, node: Node, other: Node, flag: Node) -> None:
        """Have a node compute what either does, the other in evaluation or in a branch."""
        self._same[node], self._back[other] = other, node
        found = zip(self._read[node], _inputs_of(other), _inputs_of(node), strict=False)
        changes: dict[int, Node] = {}
        for position, (mine, theirs, read) in enumerate(found):
            if self._same.get(mine) is theirs:
                continue
            if (read, theirs) not in self._made:
                if flag is not self.training and mine in self._current:
                    raise ValueError(RANDOM)
                value = self._value_of(theirs)
                with self.graph.inserting_before(node):
                    pair = (value, read) if self._outcome else (read, value)
                    name = f"{pair[0].name}_or_{pair[1].name}"
                    made = self.graph.create_node("call_function", choose, (flag, *pair), name=name)
                which = "self.training" if flag is self.training else "torch.rand(1) < p"
                made.meta |= {IN_ONE_MODE: TRAINING, LINE: f"if {which}"}
                self._made[read, theirs] = made
                self._merged.add((mine, theirs))
                if flag is not self.training:
                    self._current[mine] = made
            changes[position] = self._made[read, theirs]
        if changes:
            _change_inputs(node, changes)
        for key in _differing(node, other):
            if isinstance(key, int):
                node.update_arg(key, self.training)
            else:
                node.update_kwarg(key, self.training)

    def _find_equal(self, node: Node) -> Node | None:
        """Return what dropout that is called in training alone is equal to in evaluation."""
        same = self._same
        if self._is_dropout(node) or node.target in EDGE_DROPOUTS:
            return same.get(cast(Node, node.args[0])) if node.args else None
        if node.target is not operator.getitem or not isinstance(node.args[0], Node):
            return None
        whole, index = node.args[0], node.args[1]
        if whole.target in EDGE_DROPOUTS:
            is_attribute = "edge_attr" in EDGE_DROPOUTS[whole.target] and index == 1
            return same.get(cast(Node, whole.args[1]) if is_attribute else whole)
        masks: Any = index.args[0] if isinstance(index, Node) and index.args else None
        is_mask = isinstance(masks, Node) and masks.target in EDGE_DROPOUTS
        return same.get(whole) if is_mask else None

    def _drop_in_training(self, node: Node) -> None:
        """Give dropout that is called in training alone the argument ``training``."""
        if names := {**DROPOUTS, **EDGE_DROPOUTS}.get(node.target):
            given = dict(zip(names[1:], node.args[1:], strict=False)) | node.kwargs
            switch = "train" if "train" in names else "training"
            if given.get(switch, True) is True:
                node.args, node.kwargs = node.args[:1], {**given, switch: self.training}


def number_values(graph: Graph, known: dict[str, int], outcomes: Sequence[bool] = ()) -> str:
    """Number the outputs of a graph by how they are computed, for outcomes of its random choices.

    Equal numbers mean equal computations. ``known`` has the numbers by computation, and gets new
    ones; ``outcomes`` are in the order in which the choices were merged.
    """
    numbers: dict[Node, str] = {}
    flags = [node for node in graph.nodes if node.target is draw_flag]
    chosen = dict(zip(flags, outcomes, strict=True))
    for node in graph.nodes:
        if node.target is choose:
            is_first = chosen[cast(Node, node.args[0])]
            numbers[node] = numbers[cast(Node, node.args[1 if is_first else 2])]
        elif node.target is not draw_flag and (node.op != "placeholder" or node.target != TRAINING):
            given = map_arg((node.args, node.kwargs), lambda each: numbers.get(each, True))
            text = f"{node.op} {node.target} {given!r}"
            numbers[node] = f"%{known.setdefault(text, len(known))}"
    return list(numbers.values())[-1]


def _find_next(
    mine: Sequence[Node], others: Sequence[Node], is_alike: Callable[[Node, Node], bool]
) -> tuple[int, int]:
    """Find the first of the longest nodes in a row that two graphs both have."""
    ones, twos = ([(node.op, node.target) for node in nodes] for nodes in (mine, others))
    matcher = difflib.SequenceMatcher(None, ones, twos, autojunk=False)
    for start, end, size in matcher.get_matching_blocks():
        for more in range(size):
            if is_alike(mine[start + more], others[end + more]):
                return start + more, end + more
    return len(mine), len(others)


def _inputs_of(node: Node) -> list[Node]:
    """Return the nodes among a node's arguments, in order, as often as they are given."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _change_inputs(node: Node, changes: dict[int, Node]) -> None:
    """Replace inputs of a node, by their positions in :func:`_inputs_of`."""
    positions = itertools.count()

    def change(each: Node) -> Node:
        return changes.get(next(positions), each)

    node.args, node.kwargs = map_arg(node.args, change), map_arg(node.kwargs, change)


def _differing(node: Node, other: Node) -> list[int | str]:
    """Return the arguments that differ in more than nodes."""

    def describe(value: Any) -> str:
        return repr(map_arg(value, lambda _: "node"))

    ones, twos = _constants(node), _constants(other)
    keys = {**ones, **twos}
    return [k for k in keys if describe(ones.get(k, True)) != describe(twos.get(k, True))]


def _constants(node: Node) -> dict[int | str, Any]:
    out: dict[int | str, Any] = dict(enumerate(node.args))
    out.update(node.kwargs)
    return out
