"""Outputs of a module: rows of nodes, alone or in tuples, dictionaries and dataclasses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map

from gas.convert.kinds import ROWS, Values
from gas.convert.scope import join_columns


@dataclass(frozen=True)
class Outputs:
    """Outputs of a module.

    * ``leaves``: the nodes of the traced graph that it returns, and constants, in order.
    * ``nested``: their positions, nested as they are; ``made``: the dataclass of the outermost, if
      it is one.
    * ``shapes``: the shapes of a row of each node's value, and ``None`` for constants.
    """

    leaves: tuple[Any, ...]
    nested: Any
    made: type | None
    shapes: tuple[torch.Size | None, ...]

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
        widths = [0 if shape is None else shape.numel() for shape in self.shapes]
        columns = rows.split(widths, dim=1)
        found = [
            leaf if shape is None else part.reshape(-1, *shape)
            for leaf, shape, part in zip(self.leaves, self.shapes, columns, strict=True)
        ]
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
    """Find the outputs of a traced graph.

    Args:
        graph: The graph. A dataclass is made outside of it.
        returned: What the module has returned on a small graph.
        name: The name of the module.

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
    shapes = tuple(
        value.shape[1:] if isinstance(leaf, Node) else None
        for leaf, value in zip(found, leaves, strict=True)
    )
    return Outputs(tuple(found), nested, made, shapes)


def check_outputs(
    outputs: Outputs, kinds: Mapping[Node, str], record: Values, size: int, name: str
) -> None:
    """Refuse outputs that aren't rows of nodes, or can't be stored in one table.

    Args:
        outputs: The outputs.
        kinds: The kinds of the nodes' values.
        record: These values on a graph.
        size: The number of nodes of this graph.
        name: The name of the module.

    Raises:
        ValueError: Naming the output.
    """
    nodes = outputs.nodes
    for node in nodes:
        if kinds[node] != ROWS or record[node].dim() == 0 or record[node].size(0) != size:
            raise ValueError(
                f"{name} returns '{node.name}', which isn't a row for each node: mini-batches give "
                "each node's output, of which the loss selects some"
            )
    if not nodes:
        raise ValueError(f"{name} returns no rows of nodes")
    dtypes: Sequence[torch.dtype] = [record[node].dtype for node in nodes]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"{name} returns rows of {', '.join(map(str, dict.fromkeys(dtypes)))}, expected one "
            "type for all: convert them after the model"
        )
