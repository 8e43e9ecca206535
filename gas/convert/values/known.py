"""Values of a traced module on small graphs, for where it asks about them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from gas.convert.values.failures import attribute_change_error, find_line
from gas.convert.values.modes import EDGE_CALLS, LINE
from gas.convert.values.traced_matrix import TracedMatrix
from gas.scalable import preserve_modes

# Methods and attributes of a tensor that don't depend on its numbers.
SHAPE_METHODS = ("size", "dim", "ndimension", "numel", "is_floating_point", "is_complex")
SHAPE_ATTRIBUTES = (
    "shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_sparse", "is_sparse_csr",
)  # fmt: skip
# Functions whose results have shapes that depend on numbers.
SELECTING = (
    "unique", "unique_consecutive", "nonzero", "argwhere", "masked_select", "repeat_interleave",
    "bincount", "coalesce",
)  # fmt: skip
# Functions of sizes that need not change with the number of nodes, although a size does.
SELECTORS = (operator.getitem, getattr, len)
# Comparisons with a number of at most this have the same result for each number of nodes.
_WITH_NONE = {
    operator.gt: 0, operator.ge: 1, operator.lt: 1, operator.le: 0, operator.eq: 0, operator.ne: 0
}  # fmt: skip


class KnownProxy(Proxy):
    """Proxy whose value on small graphs is known to its tracer.

    It answers what doesn't depend on the graph, such as the width of its rows.
    """

    _is_param, _is_buffer, _persistent = False, False, True  # Asked of tensors by torch.nn.
    __array_ufunc__ = None  # A number of numpy leaves an operation to it, as to a tensor.

    @property
    def is_tensor(self) -> bool:
        """Return whether the value is a tensor."""
        return isinstance(cast(Any, self.tracer).known.first(self.node), Tensor)

    @property
    def has_row_per_node(self) -> bool:
        """Return whether the value has a row for each node."""
        return cast(Any, self.tracer).known.has_row_per_node(self.node)

    def __len__(self) -> int:
        return cast(Any, self.tracer).known.length(self.node)

    def __getattr__(self, k: str) -> Attribute:
        return _KnownAttribute(self, k)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, TracedMatrix):  # It scales its entries.
            return NotImplemented
        return self.tracer.create_proxy("call_function", operator.mul, (self, other), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        args = self, key, value
        made = self.tracer.create_proxy(
            "call_function", assign, args, {}, name=f"{self.node.name}_changed"
        )
        made.node.meta[LINE] = find_line()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise attribute_change_error(
                str(self.node.target if self.node.op == "get_attr" else self.node)
            )
        super().__setattr__(name, value)

    def __index__(self) -> int:
        value = cast(Any, self.tracer).known.fixed(self.node)
        if isinstance(value, int):
            return value
        if tensors := _find_attributes(self.node):
            raise ValueError(
                f"it makes a number of '{tensors[0]}', which training may change: compute with the "
                "tensor itself, such as x * self.scale instead of x * float(self.scale)"
            )
        raise TypeError(
            f"'{self.node.name}' depends on the graph, and a number is expected that doesn't: "
            "compute it of the graph before, and keep it as an option of the module"
        )


class _KnownAttribute(Attribute):
    """Attribute of a proxy, such as its shape, whose length may be known."""

    __len__, __setitem__ = KnownProxy.__len__, KnownProxy.__setitem__
    __array_ufunc__ = None
    __getattr__ = KnownProxy.__getattr__


def _find_attributes(node: Node) -> list[str]:
    """Return the tensors of the module of which a value is computed, if of nothing else."""
    if node.op == "get_attr":
        return [str(node.target)]
    found = [_find_attributes(each) for each in node.all_input_nodes]
    return [name for names in found for name in names] if all(found) else []


class KnownValues:
    """Values of the nodes of a graph that is being traced, on several small graphs.

    ``samples`` are the values of the inputs by name, on each of the small graphs, ``counts`` the
    numbers of their nodes, and ``edges`` is the input that is the adjacency.
    """

    def __init__(
        self, root: Module, samples: Sequence[Mapping[str, Any]], counts: Sequence[int], edges: str
    ) -> None:
        self.root, self._samples, self._counts, self._edges = root, samples, counts, edges
        self.dropping: list[str] = []  # Layers that drop edges by themselves.
        self.of_edges: set[Node] = set()  # The adjacency, and the ends of edges.
        self._values: dict[Node, list[Any]] = {}
        self.is_evaluating = False  # Then calls of modules aren't traced.

    def add(self, node: Node) -> None:
        """Evaluate a node, whose value stays unknown if that fails."""
        self.is_evaluating = True
        try:
            if node.op == "placeholder":
                self._values[node] = [given[str(node.target)] for given in self._samples]
            elif node.op == "get_attr":
                self._values[node] = [operator.attrgetter(str(node.target))(self.root)]
                self._values[node] *= len(self._samples)
            elif all(argument in self._values for argument in node.all_input_nodes):
                self._values[node] = [
                    self._evaluate(node, position) for position in range(len(self._samples))
                ]
        except Exception:  # A function may raise anything; the trace goes on without its value.
            self._values.pop(node, None)
        finally:
            self.is_evaluating = False
        is_adjacency = (node.op, node.target) == ("placeholder", self._edges)
        if is_adjacency or (
            not self.of_edges.isdisjoint(node.all_input_nodes) and _has_ids(self.first(node))
        ):
            self.of_edges.add(node)

    def _evaluate(self, node: Node, position: int) -> Any:
        value_of, calls = lambda each: self._values[each][position], len(EDGE_CALLS)
        if node.op != "call_module":
            with torch.no_grad():
                return evaluate_node(self.root, node, value_of)
        try:
            with preserve_modes(self.root.get_submodule(str(node.target)), False), torch.no_grad():
                return evaluate_node(self.root, node, value_of)
        finally:
            if len(EDGE_CALLS) > calls:
                self.dropping.append(str(node.target))

    def first(self, node: Node) -> Any:
        """Return the value on the first graph; ``None`` if it isn't known."""
        return self._values[node][0] if node in self._values else None

    def has(self, node: Node) -> bool:
        """Return whether a node's values are known."""
        return node in self._values

    def length(self, node: Node) -> int:
        """Return the length of a value, if it is that on each graph.

        Raises:
            TypeError: If it isn't.
        """
        values = self._values.get(node, [])
        lengths = {len(value) for value in values if hasattr(value, "__len__")}
        if len(lengths) == 1 and not isinstance(values[0], str):
            return lengths.pop()
        raise TypeError(f"the length of '{node.name}' depends on the graph: use its size(0)")

    def fixed(self, node: Node) -> Any:
        """Return a value that follows from shapes alone, the same on each graph, or ``None``."""
        is_fixed = self._follows_from_shapes(node, set()) and not self._varies(node)
        return self._values[node][0] if is_fixed else None

    def _varies(self, node: Node) -> bool:
        first, *rest = self._values[node]
        return any(type(other) is not type(first) or other != first for other in rest)

    def _follows_from_shapes(self, node: Node, seen: set[Node]) -> bool:
        """Return whether no number of a tensor, and no number of nodes, decides a value."""
        if node in seen:
            return True
        if node not in self._values or has_tensor(self._values[node][0]):
            return False
        seen.add(node)
        about_shape = is_about_shape(node)
        for argument in node.all_input_nodes:
            if has_tensor(self._values[argument][0]):
                is_size = node.target in ("size", "numel") or "shape" in node.args
                if not about_shape or (is_size and self._is_of_numbers(argument)):
                    return False
            elif not self._follows_from_shapes(argument, seen) or (
                self._varies(argument)
                and not self._varies(node)
                and node.target not in SELECTORS
                and not self._compares_same(node)
            ):
                return False
        return True

    def _is_of_numbers(self, node: Node) -> bool:
        """Return whether a tensor's shape may follow from numbers, such as that of ``unique``."""
        return any(map(self._selects, walk_back(node, self.has_row_per_node)))

    def _selects(self, node: Node) -> bool:
        name = str(getattr(node.target, "__name__", node.target)).strip("_")
        index = node.args[1] if node.target is operator.getitem else None
        mask = self.first(index) if isinstance(index, Node) else None
        return name in SELECTING or (isinstance(mask, Tensor) and mask.dtype == torch.bool)

    def has_row_per_node(self, node: Node) -> bool:
        """Return whether a value's rows are those of nodes, and the rest of its shape the same."""
        values = self._values.get(node, ())
        shapes = [value.shape for value in values if isinstance(value, Tensor) and value.dim() > 0]
        is_by_node = [shape[0] for shape in shapes] == list(self._counts)
        return is_by_node and len({shape[1:] for shape in shapes}) == 1

    def _compares_same(self, node: Node) -> bool:
        """Return whether sizes are compared that are equal on each graph, or differ on each.

        Or the number of nodes with 0, as each graph has some.
        """
        if node.target in _WITH_NONE and not node.kwargs:
            size, other = node.args
            is_count = isinstance(size, Node) and self._values[size] == list(self._counts)
            if is_count and type(other) is int and other <= _WITH_NONE[node.target]:
                return True
        if node.target not in (operator.eq, operator.ne):
            return False
        is_equal = {each is (node.target is operator.eq) for each in self._values[node]}
        if len(is_equal) == 2:
            return False
        return is_equal.pop() or self._always_differ(*node.args)

    def _always_differ(self, *pair: Any) -> bool:
        """Return whether two shapes differ in a size that is the same on each graph."""
        given = [
            self._values[each] if isinstance(each, Node) else [each] * len(self._samples)
            for each in pair
        ]
        if not all(isinstance(shape, tuple | list) for shapes in given for shape in shapes):
            return False
        if len({len(shape) for shapes in given for shape in shapes}) > 1:
            return all(len(one) != len(two) for one, two in zip(*given, strict=True))
        columns = [list(map(set, zip(*shapes, strict=True))) for shapes in given]
        return any(
            len(one) == len(two) == 1 and one != two for one, two in zip(*columns, strict=True)
        )


def walk_back(node: Node, stops: Callable[[Node], bool] = lambda _: False) -> list[Node]:
    """Return a node and all that it is computed of, no further than where it stops."""
    found: dict[Node, None] = {}
    left = [node]
    while left:
        if (last := left.pop()) not in found:
            found[last] = None
            left += [] if stops(last) else reversed(last.all_input_nodes)
    return list(found)


def is_about_shape(node: Node) -> bool:
    """Return whether a node asks for what doesn't depend on a tensor's numbers."""
    if node.target is getattr:
        return node.args[1] in SHAPE_ATTRIBUTES
    return str(getattr(node.target, "__name__", node.target)) in SHAPE_METHODS


def has_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or has one in it."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _has_ids(value: Any) -> bool:
    leaves = tree_leaves(value)
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.long for leaf in leaves)


def evaluate_node(
    net: Module, node: Node, value_of: Callable[[Node], Any], module: Module | None = None
) -> Any:
    """Evaluate a node for other values of its arguments, or another module than it calls."""
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    if node.op == "call_module":
        return (module or net.get_submodule(str(node.target)))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


def record_call(function: Callable[..., Any], itself: bool = False) -> Callable[..., Any]:
    """Have a function be a single node of a trace, which calls it, or what is returned here."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for value in tree_leaves((args, kwargs)):
            if issubclass(type(value), Proxy):
                target = call if itself else function
                return value.tracer.create_proxy("call_function", target, args, kwargs)
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _record_itself(function: Any) -> Callable[..., Any]:
    """Have a function be a single node of a trace, by its name in this module."""
    return record_call(function, itself=True)


@_record_itself
def assign(target: Any, key: Any, value: Any, selects: bool = False) -> Any:
    """Return a copy of a tensor after ``copy[key] = value``, as a function that is traced.

    Args:
        target: The tensor.
        key: The items.
        value: Their values, or rows of which ``value[key]`` are the values.
        selects: Whether it is such rows. (default: ``False``)
    """
    out = target.clone()
    out[key] = value[key] if selects else value
    return out


# Functions that make tensors of sizes, which may be the number of nodes.
zeros, ones, full = map(_record_itself, (torch.zeros, torch.ones, torch.full))
empty, arange, eye = map(_record_itself, (torch.empty, torch.arange, torch.eye))
rand, randn = map(_record_itself, (torch.rand, torch.randn))
FACTORIES = (zeros, ones, full, empty, arange, eye, rand, randn)


def is_edge_list(value: Any) -> bool:
    """Return whether a value may be a list of edges, by its type and shape."""
    is_long = isinstance(value, Tensor) and value.dtype == torch.long and value.dim() == 2
    return is_long and value.size(0) == 2


def is_close(found: Any, expected: Any) -> bool:
    """Return whether two results are equal up to rounding."""
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(is_close, found, expected))
    if not isinstance(expected, Tensor):
        return found == expected
    if not isinstance(found, Tensor) or found.dtype != expected.dtype:
        return False
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * scale + 1e-12, equal_nan=True)
