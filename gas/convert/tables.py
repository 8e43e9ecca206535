"""Parameters with a row for each node, of which a mini-batch reads the rows of its own nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch.fx import Graph, Node
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from gas.convert.preparation import NODE_ID, First
from gas.graph import PERM
from gas.nn import twin


@dataclass(frozen=True, repr=False)
class Tables(First):
    """The parameters of a module that have a row, or a column, for each node of a graph.

    As a transform, they give a graph ``prepared_node_id``, the row of each node.

    * ``num_nodes``: the number of nodes.
    * ``dims``: the name of each, and the dimension of its rows.
    * ``by_id``: layers that read their own rows by node ids, which ``None`` stands for.
    """

    num_nodes: int = 0
    dims: tuple[tuple[str, int], ...] = ()
    by_id: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dims or self.by_id)

    def forward(self, data: Data) -> Data:
        """Return a graph with these rows, after the next transform; as it is without tables.

        Raises:
            ValueError: If it has another number of nodes than the tables have rows, or has other
                rows already.
        """
        if not self:
            return data
        if data.num_nodes != self.num_nodes:
            name = next(iter((*dict(self.dims), *self.by_id)))
            raise ValueError(
                f"the graph has {data.num_nodes} nodes, and '{name}' of the model is for "
                f"{self.num_nodes}: give the graph for which the module was made"
            )
        edges = data.get("edge_index", data.get("adj_t"))
        device = edges.device if isinstance(edges, torch.Tensor) else None
        rows = data.get(PERM, torch.arange(self.num_nodes, device=device))
        if NODE_ID in data and not torch.equal(data[NODE_ID].to(rows.device), rows):
            raise ValueError(
                f"'data' has an attribute '{NODE_ID}', which isn't the row of each node in the "
                f"model's parameters: remove it, del data.{NODE_ID}"
            )
        data[NODE_ID] = rows
        return self._go_on(data)

    def __repr__(self) -> str:
        return self._describe("NodeIds()")

    @contextlib.contextmanager
    def select_rows(self, net: Module, values: Mapping[str, Any]) -> Iterator[None]:
        """Give a module its tables' rows of some nodes alone, in this context.

        Its attributes ``num_nodes`` become the number of these nodes.

        Args:
            net: The module, or one that is traced.
            values: The attributes of a graph, of which ``prepared_node_id`` are the rows. Without
                it, the graph has all nodes in order, and the module is left as it is.
        """
        if not self or NODE_ID not in values:
            yield
            return
        ids = values[NODE_ID]
        changes: list[tuple[Callable[[str, Any], None], str, Any, Any]] = []
        for name, dim in self.dims:
            prefix, _, key = name.rpartition(".")
            owner = net.get_submodule(prefix)
            rows = getattr(owner, key).index_select(dim, ids)
            changes.append((owner._parameters.__setitem__, key, owner._parameters[key], rows))
        for module in net.modules():
            size = vars(module).get("num_nodes")
            if isinstance(size, int) and size == self.num_nodes:
                changes.append((vars(module).__setitem__, "num_nodes", size, ids.size(0)))
        for layer in map(net.get_submodule, self.by_id):
            called = _call_by_ids(type(layer), ids)
            changes.append((partial(setattr, layer), "__class__", type(layer), called))
        with contextlib.ExitStack() as stack:
            for change, key, before, value in changes:
                stack.callback(change, key, before)
                change(key, value)
            yield

    def find_layers(self, net: Module) -> tuple[type[MessagePassing], ...]:
        """Return the types of the layers of message passing that have tables."""
        return tuple({type(layer): None for layer, _ in self._in_layers(net)})

    def _in_layers(self, net: Module) -> Iterator[tuple[MessagePassing, str]]:
        """Iterate over the layers of message passing that have tables, and these."""
        for prefix, layer in net.named_modules():
            start = f"{prefix}.".lstrip(".")
            for name, _ in self.dims if isinstance(layer, MessagePassing) else ():
                if name.startswith(start):
                    yield layer, name.removeprefix(start)

    def error(self, net: Module, error: ValueError) -> ValueError:
        """Return an error, with the cure if a layer reads a table where it has edges."""
        for layer, name in self._in_layers(net):
            key = name.partition(".")[0]
            for method in ("message", "update", "aggregate", "edge_update"):
                code = getattr(getattr(type(layer), method, None), "__code__", None)
                if code is not None and key in code.co_names:
                    return ValueError(
                        f"'{name}' has a row for each node, and {type(layer).__name__}.{method} "
                        "reads it itself: read it in forward, and for messages give it to "
                        f"propagate, self.propagate(edge_index, x=x, {key}=self.{name}), of which "
                        f"message takes the rows {key}_j and {key}_i"
                    )
        return error

    def by_ids(self, net: Module) -> Module:
        """Return a twin of a module whose layers can be given node ids: no ``FastRGCNConv``."""
        if not any(type(net.get_submodule(name)) is pyg.FastRGCNConv for name in self.by_id):
            return net
        made = twin(net)
        for name in self.by_id:
            layer, (prefix, _, key) = made.get_submodule(name), name.rpartition(".")
            if type(layer) is pyg.FastRGCNConv:
                made.get_submodule(prefix)._modules[key] = _as_rgcn(layer)
        return made


def _as_rgcn(layer: Any) -> Module:
    """Return the ``RGCNConv`` that computes what a ``FastRGCNConv`` does, by its parameters."""
    with torch.device("meta"):
        made = pyg.RGCNConv(
            layer.in_channels, layer.out_channels, layer.num_relations, layer.num_bases,
            layer.num_blocks, layer.aggr, layer.root is not None, layer.bias is not None,
        )  # fmt: skip
    for key, value in vars(layer).items():
        if key in ("_parameters", "_buffers", "training") or "_hooks" in key:
            made.__dict__[key] = value
    return made


def _call_by_ids(kind: Any, ids: Any) -> Any:
    """Return the type of a layer that is given ids in place of no features."""

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, ids if x is None else x, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


def find_tables(net: Module, num_nodes: int) -> Tables:
    """Find the parameters with a row for each node, or of a linear layer, with a column."""
    dims, by_id = list[tuple[str, int]](), list[str]()
    for prefix, module in net.named_modules():
        if isinstance(module, pyg.RGCNConv):
            if module.in_channels_l == num_nodes:
                by_id.append(prefix)
            continue
        dim = 1 if isinstance(module, torch.nn.Linear | pyg.Linear) else 0
        changes = getattr(module, "max_norm", None) is not None
        for key, weight in module._parameters.items():
            is_known = weight is not None and not is_lazy(weight) and not changes
            if is_known and weight.dim() == 2 and weight.size(dim) == num_nodes:
                dims.append((f"{prefix}.{key}".lstrip("."), dim))
    return Tables(num_nodes, tuple(dims), tuple(by_id))


def is_of_table(node: Any) -> bool:
    """Return whether a value of a traced graph is rows, or columns, of a table."""
    is_selected = isinstance(node, Node) and node.target == "index_select"
    return is_selected and getattr(node.args[-1], "target", None) == NODE_ID


def asks_for_rows(node: Node) -> bool:
    """Return whether an embedding that is a table is called."""
    return node.target is torch.nn.functional.embedding and is_of_table(node.args[1])


def read_all_rows(graph: Graph, values: Mapping[Node, Any]) -> None:
    """Read tables by the ids of nodes where a module asks for all rows, ``embedding(arange(n))``.

    Args:
        graph: The traced graph.
        values: The values of its nodes on a small graph.
    """
    for node in filter(asks_for_rows, graph.nodes):
        ids, rows = node.args
        every = torch.arange(len(values[rows]), device=values[rows].device)
        if torch.equal(values[ids], every):
            node.args = rows.args[-1], rows.args[0]  # Of the layer's own gradient.
