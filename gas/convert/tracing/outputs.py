"""The outputs of a module, and checks that its traced graph has the same."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Data

from gas.convert.module.caches import find_caches, find_read, memory_error
from gas.convert.module.inputs import Inputs, copy_value
from gas.convert.module.state import NUMBERS, keep_attributes, training_mode
from gas.convert.tracing.scope import join_columns
from gas.convert.tracing.traced import ROWS, Traced, Values
from gas.convert.values.failures import describe_error, is_own
from gas.convert.values.known import is_close
from gas.convert.values.modes import BY_ROW, IN_ORDER, RANDOM

UNKNOWN = "a generator of its own, if no layer changes its parameters in forward"


@dataclass(frozen=True)
class Outputs:
    """Outputs of a module.

    * ``leaves``: the nodes of the traced graph that it returns, and constants, in order.
    * ``nested``: their positions, nested as they are; ``made``: the dataclass of the outermost, if
      it is one.
    * ``shapes``: the shapes of a row of each node's value, and ``None`` for constants.
    * ``dtypes``: their types, if these differ, and ``None`` otherwise.
    """

    leaves: tuple[Any, ...]
    nested: Any
    made: type | None
    shapes: tuple[torch.Size | None, ...]
    dtypes: tuple[torch.dtype | None, ...]

    @property
    def is_single(self) -> bool:
        """Return whether it is one tensor."""
        return isinstance(self.nested, int)

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes that are returned."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Node)]

    def values(self, record: Values) -> list[Any]:
        """Return what is returned, in order, for the values of the traced graph's nodes."""
        return [record[leaf] if isinstance(leaf, Node) else leaf for leaf in self.leaves]

    def apply(self, function: Callable[[Tensor], Tensor]) -> Outputs:
        """Return outputs of the types that a function gives, such as that of ``net.double()``."""
        dtypes = [each and function(torch.empty(0, dtype=each)).dtype for each in self.dtypes]
        return dataclasses.replace(self, dtypes=tuple(dtypes))

    def without_nodes(self) -> Outputs:
        """Return the structure alone, as a model keeps it."""
        leaves = tuple(None if isinstance(leaf, Node) else leaf for leaf in self.leaves)
        return dataclasses.replace(self, leaves=leaves)

    def join(self, returned: Any) -> Any:
        """Return the rows that a module returns as the columns of one tensor."""
        if self.is_single:
            return returned
        leaves = zip(flatten(returned), self.shapes, strict=True)
        return join_columns([rows for rows, shape in leaves if shape is not None])

    def split(self, rows: Tensor) -> Any:
        """Return the structure of joined rows."""
        if self.is_single:
            return rows
        has_floats = any(dtype is not None and dtype.is_floating_point for dtype in self.dtypes)
        found: list[Any] = []
        for leaf, shape, dtype in zip(self.leaves, self.shapes, self.dtypes, strict=True):
            if shape is None:
                found.append(leaf)
                continue
            is_long, width = has_floats and dtype == torch.long, shape.numel()
            part, rows = rows[:, : width << is_long], rows[:, width << is_long :]
            if is_long:
                part = (part[:, :width].long() << 32) + part[:, width:].long()
            found.append(part.reshape(-1, *shape).to(dtype or part.dtype))
        out = tree_map(found.__getitem__, self.nested)
        return out if self.made is None else self.made(**cast(Mapping[str, Any], out))


def flatten(returned: Any) -> list[Any]:
    """Return the leaves of what a module returns."""
    return tree_leaves(_fields_of(returned)[0])


def _fields_of(returned: Any) -> tuple[Any, type | None]:
    """Return the fields of a dataclass, and its type; anything else as it is."""
    made = None
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        made = type(returned)
        fields = dataclasses.fields(returned)
        returned = {each.name: getattr(returned, each.name) for each in fields}
    return returned, made


def find_outputs(graph: Graph, returned: Any, name: str) -> Outputs:
    """Find the outputs of a traced graph, for what the module ``returned`` on a small graph.

    A dataclass is made outside of the traced graph.

    Raises:
        ValueError: If it isn't rows of nodes.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    structure, made = _fields_of(returned)
    leaves, position = tree_leaves(structure), itertools.count()
    nested = tree_map(lambda _: next(position), structure)
    given: Any = output.args[0]
    kind: Any = type(returned)
    if isinstance(given, Node) and given.target is kind:  # A named tuple, or a dataclass.
        fields = structure if made is not None else structure._asdict()
        bound = dict(zip(fields, given.args, strict=False)) | given.kwargs
        output.args = ([bound.get(name, value) for name, value in fields.items()],)
        graph.erase_node(given)
    found = tree_leaves(output.args[0])
    if len(found) != len(leaves):
        raise ValueError(
            f"{name} returns a {type(returned).__name__}, expected a tensor with a row for each "
            "node, or tuples, lists, dictionaries or a dataclass of such"
        )
    for leaf, value in zip(found, leaves, strict=True):
        if isinstance(leaf, Node) and not isinstance(value, Tensor):
            raise ValueError(
                f"{name} returns '{leaf.name}', a {type(value).__name__}, expected tensors with a "
                "row for each node"
            )
    pairs = zip(found, leaves, strict=True)
    rows = [value if isinstance(leaf, Node) else None for leaf, value in pairs]
    shapes = tuple(None if value is None else value.shape[1:] for value in rows)
    dtypes = tuple(None if value is None else value.dtype for value in rows)
    if len({*dtypes} - {None}) < 2:
        dtypes = (None,) * len(rows)
    return Outputs(tuple(found), nested, made, shapes, dtypes)


def check_outputs(outputs: Outputs, traced: Traced) -> None:
    """Refuse outputs that aren't rows of nodes, or can't be stored in one table."""
    name = type(traced.net).__name__
    for node in outputs.nodes:
        rows = traced.values[node]
        has_rows = rows.dim() > 0 and rows.size(0) == traced.counts[0][0]
        if traced.kinds[node] != ROWS or not has_rows:
            raise ValueError(
                f"{name} returns '{node.name}', which isn't a row for each node: mini-batches give "
                "each node's output, of which the loss selects some; for scores of pairs of nodes, "
                "let forward return the embeddings, as LightGCN.get_embedding does"
            )
    if not outputs.nodes:
        raise ValueError(f"{name} returns no rows of nodes")


def call_module(net: Module, inputs: Inputs, data: Data) -> list[Any]:
    """Return what a module returns on a small graph, in the mode that it is in."""
    return flatten(inputs.call(net, inputs.values(data)))


def run_in_training(
    net: Module, inputs: Inputs, graphs: Sequence[Data], expected: Any
) -> tuple[list[list[Any]], list[str]]:
    """Run a module in training, with gradients, for each of :data:`NUMBERS` if it draws numbers.

    In evaluation, it returns ``expected`` on the first graph.

    Returns:
        The outputs on the first graph, and the names of attributes that later calls read.

    Raises:
        ValueError: If it fails, keeps what changes the next call, or the types of several outputs
            differ from those in evaluation.
    """
    name, found, caches = type(net).__name__, [], list[str]()
    call = functools.partial(call_module, net, inputs)
    with_gradients = torch.enable_grad()(call)

    def in_mode(given: tuple[bool, Data]) -> list[Any]:
        is_training, data = given
        net.train(is_training)
        return (with_gradients if is_training else call)(data)

    if inputs.keeps:
        with training_mode(net, NUMBERS[0]):  # For what it draws in evaluation.
            net.eval()
            caches += find_caches(net, call, graphs)
    for number in NUMBERS:
        with training_mode(net, number) as numbers:
            try:
                with keep_attributes(net) as changed:
                    found.append(copy_value(with_gradients(graphs[0])))
            except Exception as error:  # A module may raise anything.
                cure = "" if is_own(error) else "; model.train() must run on graphs of any size"
                raise ValueError(
                    f"{name} can't be run in training on a small graph like this one: "
                    f"{describe_error(error)}{cure}"
                ) from error
            if changed:
                caches += find_caches(net, with_gradients, graphs)
                read, values = find_read(net, in_mode, (True, graphs[0]), (False, graphs[0]))
                net.train()
                if read:  # By evaluation, after training.
                    raise memory_error(net, read[0], values[read[0]])
        kinds = [list(map(_kind_of, leaves)) for leaves in (found[-1], flatten(expected))]
        if kinds[0] != kinds[1] and len(kinds[0]) == len(kinds[1]) > 1:
            raise ValueError(
                f"{name} returns {', '.join(kinds[0])} in training, and {', '.join(kinds[1])} in "
                "evaluation, expected outputs of the same widths and types: return them in both"
            )
        if not numbers.found:
            break
    return found, list(dict.fromkeys(caches))


def _kind_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{[*value.shape]} of {value.dtype}"


def record_checked(
    traced: Traced, expected: Any, trained: Sequence[list[Any]], find_draws: Callable[[bool], str]
) -> Outputs:
    """Record the values of a traced module, and check that it returns what the module does.

    Also in training: ``trained`` is what :func:`run_in_training` returned, and ``find_draws`` is
    :func:`find_draws`, of the module as it was called.
    """
    name = type(traced.net).__name__
    outputs = find_outputs(traced.graph, expected, name)
    traced.record()
    if not is_close(outputs.values(traced.values), flatten(expected)):
        if drawn := find_draws(False):
            raise ValueError(
                f"{name} returns other values when it is run again, as it draws random numbers in "
                f"evaluation, by {drawn}: draw them in training alone, if self.training, or give "
                "them as attributes of the graph"
            )
        raise MismatchError(name)
    for number, values in zip(NUMBERS, trained, strict=False):
        if not is_close(outputs.values(traced.run(number)), values):
            cure = (
                "it mustn't change tensors that are read elsewhere, nor leave nodes out at random: "
                "compute new ones, and leave edges out, by dropout_edge"
            )
            drawn = find_draws(True)
            cure = RANDOM if drawn == UNKNOWN else cure
            if not IN_ORDER.isdisjoint(drawn.split(", ")):
                cure = f"it draws by {drawn}, and a mini-batch has other rows: {BY_ROW}"
            raise ValueError(
                f"{name} returns other values in training, model.train(), than its layers do, "
                f"called one by one: {cure}"
            )
    return outputs


def find_draws(net: Module, inputs: Inputs, data: Data, training: bool) -> str:
    """Return the functions by which a module draws random numbers in a mode, or ""."""
    found = []
    with training_mode(net, NUMBERS[0]) as numbers:
        net.train(training)
        for _ in range(2):
            with keep_attributes(net):
                found.append(copy_value(call_module(net, inputs, data)))
    drawn = ", ".join(dict.fromkeys(numbers.found))
    return drawn or ("" if is_close(*found) else UNKNOWN)


class MismatchError(ValueError):
    """Error of a module that returns other values than its layers do."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} returns other values than its layers do, called one by one: it must not "
            "change views of tensors in place, keep statistics by F.batch_norm (take BatchNorm1d), "
            "normalise messages by BatchNorm, ask for torch.is_grad_enabled(), replace weights for "
            "a call, take means or extremes over a matrix of edges that are there twice, nor read "
            "an attribute of the edges beside two lists of them, such as edge_index and "
            "edge_index.flip(0): give the second a copy under another name"
        )
