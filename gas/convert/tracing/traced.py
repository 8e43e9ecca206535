"""A traced module: the values of its nodes on small graphs, and what they have rows of."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

from gas.convert.module.inputs import Inputs, copy_value, like_tuple
from gas.convert.module.state import CONSTANT, keep_attributes, run_mode
from gas.convert.tracing.trace import get_module, is_layer
from gas.convert.values.edge_layers import several_values_error
from gas.convert.values.failures import describe_error, describe_hooks
from gas.convert.values.known import evaluate_node, is_close, walk_back
from gas.convert.values.modes import BY_ROW, IN_ONE_MODE, IN_ORDER, LINE, TRAINING
from gas.nn import reason_inexact

# Kinds of values.

ROWS = "rows"  # Rows of nodes, or their number.
EDGES = "edges"
SELECTED = "selected"  # Rows of some edges, ``edge_index[:, mask]``.
OTHER = "other"
SELECTIONS = ("nonzero", "argwhere", "masked_select")

# Functions that draw a number for each item.
DRAWS = (
    "bernoulli", "rand", "randn", "rand_like", "randn_like", "normal", "uniform", "exponential",
    "dropout",
)  # fmt: skip

Values = Mapping[Node, Any]


def sizes(value: Any) -> list[Any]:
    """Return all sizes in a value that may depend on the size of the graph."""
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, tuple | list):
        return [size for item in value for size in sizes(item)]
    if isinstance(value, dict):
        return [size for item in value.values() for size in sizes(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def is_selection(node: Node, values: Values) -> bool:
    """Return whether a node selects rows by their values, ``rows[mask]`` or ``nonzero(mask)``."""
    if node.target is operator.getitem:
        index: Any = node.args[1]
        found = [values[each] for each in tree_leaves(index) if isinstance(each, Node)]
        return any(isinstance(mask, Tensor) and mask.dtype == torch.bool for mask in found)
    return str(getattr(node.target, "__name__", node.target)) in SELECTIONS


def function_name(node: Node) -> str:
    """Return the name of the function that a node calls, or what the user writes for it."""
    return node.meta.get(LINE) or str(getattr(node.target, "__name__", node.target))


def row_dim(value: Any, size: int) -> int | None:
    """Return the dimension of ``size`` rows in a value; ``None`` if there is none."""
    if isinstance(value, tuple | list):
        dims = [row_dim(item, size) for item in value]
        return next((dim for dim in dims if dim is not None), None)
    if isinstance(value, Tensor) and size in value.shape:
        return list(value.shape).index(size)
    return None


def row_dims(value: Any, size: int) -> Any:
    """Return the dimension of ``size`` rows in a value, nested as tuples are; ``None`` for none."""
    if isinstance(value, torch.Size):
        return list(value).index(size) if size in value else None
    if isinstance(value, tuple | list):
        return [row_dims(item, size) for item in value]
    return 0 if isinstance(value, int) else row_dim(value, size)


def select_rows(value: Any, size: int, rows: range) -> Any:
    """Return some of the ``size`` rows in a value."""
    if isinstance(value, torch.Size):
        return torch.Size(len(rows) if item == size else item for item in value)
    if isinstance(value, tuple | list):
        return like_tuple(value, [select_rows(item, size, rows) for item in value])
    if isinstance(value, Tensor):
        dim = row_dim(value, size)
        return copy_value(value if dim is None else value.narrow(dim, rows.start, len(rows)))
    is_count = isinstance(value, int) and not isinstance(value, bool) and value == size
    return len(rows) if is_count else value


# Types that functions of rows of nodes or edges may return, besides tensors.
PLAIN = (int, tuple, list, torch.Size, torch.dtype, torch.device, torch.layout, slice, type(None))


def _is_drawn(node: Node) -> bool:
    return function_name(node).strip("_") in (*DRAWS, *IN_ORDER)


def describe_constants(graph: Graph) -> str:
    """Return which lines read tensors that aren't followed, or ""."""
    found = [node for node in graph.nodes if str(node.target).startswith(CONSTANT)]
    lines = list(dict.fromkeys(node.meta[LINE] for node in found if node.meta.get(LINE)))
    return f" (it reads a tensor that isn't followed: {lines[0]!r})" if len(lines) == 1 else ""


class _Recorder(Interpreter):
    """Interpreter that runs a graph and records the value of each node."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.net, graph=traced.graph)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n] = copy_value(value)
        return value


@dataclass
class Traced:
    """A traced module, and the values of its graph's nodes on small graphs.

    * ``net``: the module, whose layers the graph calls; ``graph``: what it computes.
    * ``inputs``: its arguments; ``graphs``: the small graphs that provide them.
    * ``records``: the values of the nodes on each small graph; ``kinds``: what they have rows of.
    * ``added``: layers that the module got for its graph, as functions of it.
    """

    net: Module
    graph: Graph
    inputs: Inputs
    graphs: list[Data]
    records: list[dict[Node, Any]] = field(default_factory=list)
    kinds: dict[Node, str] = field(default_factory=dict)
    added: dict[str, functools.partial[Module]] = field(default_factory=dict)

    @property
    def edges(self) -> Node:
        """Return the node of the adjacency."""
        return next(node for node in self.graph.nodes if node.target == self.inputs.edges)

    @property
    def values(self) -> dict[Node, Any]:
        """Return the values on the first small graph."""
        return self.records[0]

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Return the numbers of nodes and edges of the small graphs."""
        return [(int(each.num_nodes or 0), each.num_edges) for each in self.graphs]

    def run(self, number: float | None = None, data: Data | None = None) -> dict[Node, Any]:
        """Return the value of each node on a small graph, by default the first.

        In evaluation mode, or in training if each random number is given.
        """
        data = self.graphs[0] if data is None else data
        recorder, net = _Recorder(self), self.net
        names = [str(node.target) for node in self.graph.nodes if node.op == "placeholder"]
        given = {**self.inputs.arguments(data), TRAINING: number is not None}
        keep = keep_attributes(net) if self.inputs.keeps else contextlib.nullcontext()
        with run_mode(net, number), keep:
            recorder.run(*[copy_value(given[name]) for name in names])
        return recorder.values

    def record(self) -> list[dict[Node, Any]]:
        """Record the values of the nodes on each of the small graphs, and return them.

        Raises:
            ValueError: If the graph can't be run.
        """
        try:
            self.records = [self.run(data=each) for each in self.graphs]
        except Exception as error:
            how = describe_constants(self.graph) + describe_hooks(self.net)
            name = type(self.net).__name__
            raise ValueError(
                f"{name} can't be run on a small graph{how}: {describe_error(error)}"
            ) from error
        return self.records

    def find_kinds(self) -> None:
        """Find for each node what its value has a row of.

        Raises:
            ValueError: If a size is neither the number of nodes, nor that of edges or of some of
                them.
        """
        known = dict(zip(zip(*self.counts, strict=True), (ROWS, EDGES), strict=True))
        self.kinds = {}
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            per_graph = [sizes(values[node]) for values in self.records]
            if len({len(found) for found in per_graph}) > 1:
                raise ValueError(
                    f"{self._describe(node)} returns another number of tensors for another number "
                    "of nodes or edges, and mini-batches have others: keep the rows in one tensor"
                )
            taken = {self.kinds[argument] for argument in node.all_input_nodes} - {OTHER}
            if taken and taken <= {EDGES, SELECTED} and is_selection(node, self.values):
                before = {n for each in node.all_input_nodes for n in sizes(self.values[each])}
                # As many edges may be selected of each graph.
                new = [size for size in zip(*per_graph, strict=True) if size[0] not in before]
                known |= dict.fromkeys((size for size in new if size not in known), SELECTED)
            changing = [
                found for found in zip(*per_graph, strict=True)
                if len(set(found)) > 1 or found in known
            ]  # fmt: skip
            found = {known.get(size, OTHER) for size in changing}
            if len(found) > 1 or OTHER in found:
                value, name = self.values[node], str(node.target)
                if is_layer(self.net, node) and not isinstance(value, Tensor):
                    raise several_values_error(name, self.net.get_submodule(name), value)
                cure = ""
                if node.target is operator.getitem and OTHER in found and ROWS in taken:
                    cure = (
                        ": return the rows of all nodes, and select those of a mask where the "
                        "loss is computed, out[own.train_mask]"
                    )
                elif function_name(node) == "one_hot":
                    cure = ": give it 'num_classes'"
                raise ValueError(
                    f"'{node.name}' ({function_name(node)}) has a size that is neither the number "
                    "of nodes nor of edges: mini-batches have other ones, so its meaning isn't "
                    f"known{cure}"
                )
            self.kinds[node] = found.pop() if found else OTHER

    def add_layer(self, name: str, make: Callable[..., Module], **options: Any) -> None:
        """Give the module, and later its twins, a layer, ``make(module, **options)``."""
        self.added[name] = functools.partial(make, **options)
        self.net.add_module(name, self.added[name](self.net))

    def replace_node(self, node: Node, made: Node) -> None:
        """Replace a node by another one, which gets its kind and values."""
        for known in (self.kinds, *self.records):
            if node in known:
                known[made] = known[node]
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def check_rows(self, mode: str = "") -> None:
        """Refuse functions outside of layers that don't treat every node, or every edge, alike.

        Each function is run on the first half of the rows, and on the last: the results must be the
        rows of its result on all of them. Errors name the mode, such as " in training".
        """
        values = self.values
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output") or is_layer(self.net, node):
                continue
            kind = self.kinds[node]
            taken = {self.kinds[argument] for argument in node.all_input_nodes} - {OTHER}
            if kind == SELECTED:
                cure = "reduce it to a row for each node, as scatter does"
                if any(map(_is_drawn, walk_back(node))):
                    cure = f"as it is random, {BY_ROW}"
                raise ValueError(
                    f"{self._describe(node)} selects edges, and isn't summed up by nodes: {cure}"
                )
            if len(taken | ({kind} - {OTHER})) > 1:
                raise ValueError(
                    f"{self._describe(node)} mixes rows of nodes with rows of edges outside of a "
                    "message passing layer, whose edges mini-batches know: give rows of edges as "
                    "data.edge_attr, compute them in the message of a MessagePassing, of x_i and "
                    "x_j, or reduce them by scatter; for a softmax of edges, take "
                    "torch_geometric.utils.softmax"
                )
            if not taken or (IN_ONE_MODE in node.meta and function_name(node).strip("_") in DRAWS):
                continue
            self._check_type(node)
            if kind == OTHER and not any(isinstance(v, Tensor) for v in tree_leaves(values[node])):
                continue  # A width, a type, a device.
            size = self.counts[0][taken == {EDGES}]
            for rows in (range(size // 2), range(size - size // 2, size)):
                self._check_node(node, size, rows, mode)

    def _describe(self, node: Node) -> str:
        module = get_module(self.net, node)
        name = type(module).__name__ if module is not None else function_name(node)
        return f"'{node.name}' ({name})"

    def _check_type(self, node: Node) -> None:
        value, *rest = [record[node] for record in self.records]
        if isinstance(value, bool | float | str):
            if any(other != value for other in rest):
                raise ValueError(
                    f"{self._describe(node)} depends on how many nodes or edges there are, and "
                    "mini-batches have others: pass the number as a constant"
                )
        elif not isinstance(value, (Tensor, *PLAIN)):
            raise ValueError(
                f"{self._describe(node)} returns a {type(value).__name__}, which can't be "
                "followed: return tensors, alone or in a tuple"
            )

    def _limits_columns(self, node: Node, size: int) -> bool:
        """Return whether a node limits norms over all rows, which small graphs may not reach."""
        if function_name(node).strip("_") != "renorm":
            return False
        value = self.values[node]
        dim = node.kwargs["dim"] if "dim" in node.kwargs else node.args[2]
        return dim % value.dim() != row_dim(value, size)

    def _check_node(self, node: Node, size: int, rows: range, mode: str) -> None:
        module = get_module(self.net, node)
        given: dict[Node, Any] = {}

        def take(argument: Node) -> Any:
            has_rows = self.kinds[argument] != OTHER  # Others may have as many rows by chance.
            return select_rows(self.values[argument], size if has_rows else -1, rows)

        def cut(argument: Node) -> Any:
            return given.setdefault(argument, take(argument))

        reason = reason_inexact(module) if module is not None else ""
        why = reason or (
            "looks at more than one node or edge at a time, as attention to all nodes and "
            "statistics of all do: attend along edges, as TransformerConv does, or treat each alike"
        )
        if function_name(node) == "arange":
            why = (
                "numbers all rows, and mini-batches number their own: to read a column of each "
                "row, take x.gather(1, index.view(-1, 1))"
            )
        elif function_name(node) in IN_ORDER:
            why = f"draws an order of all rows: {BY_ROW}"
        elif not mode and function_name(node).strip("_") in DRAWS:
            why = (
                "draws random numbers in evaluation: draw them in training alone, if self.training"
            )
        try:
            out = evaluate_node(self.net, node, cut)
            expected = select_rows(self.values[node], size, rows)
            exact = not reason and self.kinds[node] != OTHER and is_close(out, expected)
            exact = exact and not self._limits_columns(node, size)
        except Exception as error:
            exact, why = False, f"fails with fewer rows: {describe_error(error)}"
        draws = node.meta.get(IN_ONE_MODE) == TRAINING and function_name(node) not in IN_ORDER
        if not exact and draws and not mode:
            again = [evaluate_node(self.net, node, self.values.__getitem__) for _ in range(2)]
            exact = not is_close(*again)  # It draws; it is checked in training, of fixed numbers.
        what = self._describe(node)
        if not exact:
            raise ValueError(f"{what} isn't exact on mini-batches{mode}: it {why}")
        for argument, value in given.items():
            if len(argument.users) > 1 and not is_close(value, take(argument)):
                raise ValueError(
                    f"{what} changes '{argument.name}' in place, which another function reads: "
                    "leave out 'inplace', or use the function that returns a new tensor"
                )
