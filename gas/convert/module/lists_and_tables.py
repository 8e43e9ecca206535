"""Lists of edges, and parameters with a row for each node, as transforms before all others."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from gas.convert.module.arguments import (
    find_method,
    graph_parameter,
    is_list,
    parameters,
)
from gas.convert.module.preparation import EDGE_LIST, NODE_ID, ChainedTransform, scatter_rows
from gas.convert.module.wrappers import EncoderWrapper, wrap
from gas.graph import PERM, PREPARED, check_ids, is_row_per_edge, is_row_per_node
from gas.nn import twin


@dataclass(frozen=True, repr=False)
class EdgeLists(ChainedTransform):
    """The lists of edges that a module takes, as a transform that joins them into one.

    The graph gets ``prepared_list``, the position of the list that each edge is of.

    * ``names``: the attributes that are lists, each ``[2, num_edges]``.
    * ``rows``: attributes with a row for each edge of a list, and the position of this list.
    """

    names: tuple[str, ...] = ()
    rows: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    def forward(self, data: Data) -> Data:
        """Return a graph with all edges, after the next transform; as it is without lists.

        Attributes of the edges of a list are zero for other edges.

        Raises:
            ValueError: If it lacks a list, or has no nodes with its ids.
        """
        if self.names and not any(key.startswith(PREPARED) for key in data.to_dict()):
            self._join(data)
        return self._go_on(data)

    def _join(self, data: Data) -> None:
        for name in self.names:
            if not is_list(name, data.get(name)):
                raise ValueError(
                    f"the graph has no {name!r} of shape [2, E], which the model takes: set "
                    f"data.{name}; of no edges, it is torch.empty(2, 0, dtype=torch.long)"
                )
            check_ids(data[name], int(data.num_nodes or 0), name)
        for key, at in self.rows:
            rows, name = data.get(key), self.names[at]
            if rows is not None and (
                not isinstance(rows, Tensor) or rows.shape[:1] != data[name].shape[1:]
            ):
                shape = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise ValueError(
                    f"{key!r} is {shape}, and had a row for each edge of {name!r} when the model "
                    f"was converted, here {data[name].size(1)}: give such rows, or leave it out, "
                    f"del data.{key}"
                )
        num_nodes, lists = data.num_nodes, [data[name] for name in self.names]
        sizes = torch.tensor([each.size(1) for each in lists], device=lists[0].device)
        which = torch.arange(len(lists), device=sizes.device).repeat_interleave(sizes)
        made = {
            key: scatter_rows(data[key], (which == at).nonzero().view(-1), which.numel())
            for key, at in self.rows if key in data
        }  # fmt: skip
        if "edge_index" in data and "edge_index" not in self.names:  # The module doesn't read it.
            for name in [key for key in data.to_dict() if is_row_per_edge(data, key)]:
                del data[name]
        for name in self.names:
            del data[name]
        data.edge_index = torch.cat(lists, dim=1)
        data.num_nodes = num_nodes
        data.update({**made, EDGE_LIST: which})

    def take(self, values: Any) -> dict[str, Any]:
        """Return the lists, and the attributes of their edges, of a graph that has all edges."""
        masks = [values[EDGE_LIST] == at for at in range(len(self.names))]
        edges = values["edge_index"]
        out = {name: edges[:, mask] for name, mask in zip(self.names, masks, strict=True)}
        return out | {key: values[key][masks[at]] for key, at in self.rows if key in values}

    def __repr__(self) -> str:
        return self._describe(f"EdgeLists({', '.join(self.names)})")


class EdgeListsWrapper(EncoderWrapper):
    """Wrapper that takes the joined edges, and passes the module its lists of them."""

    lists = EdgeLists()
    method, graph = "forward", ""

    def forward(self, **given: Any) -> Any:
        """Call the module with its lists of edges."""
        call = self.encoder if self.method == "forward" else getattr(self.encoder, self.method)
        if not self.graph:
            lists = self.lists.take(given)
            rest = {key: given[key] for key in given if key not in ("edge_index", EDGE_LIST)}
            return call(**{**rest, **lists})
        data = given[self.graph]
        for key, value in self.lists.take(data).items():
            data[key] = value
        return call(data)


def wrap_lists(net: Module, data: Data, in_graph: bool = False) -> tuple[Module, Data]:
    """Return a module, of the same name, that takes several lists as one, and the graph with it.

    Both as they are, if it takes a single list. One that takes the graph may read lists besides
    ``edge_index`` if it is ``in_graph``.

    Raises:
        ValueError: If a list has no edges.
    """
    method = find_method(net)
    wanted = parameters(net, method)
    graph = graph_parameter(wanted, data)
    found = [key for key in data.to_dict() if is_list(key, data[key]) and (graph or key in wanted)]
    is_known = not in_graph and graph and "edge_index" in data
    if len(found) < 2 or is_known or isinstance(net, EncoderWrapper):
        return net, data
    for name in found:
        if not data[name].size(1):
            raise ValueError(
                f"{name!r} has no edges, with which {type(net).__name__} could be tried on a small "
                "graph: convert it with a graph that has some"
            )
    lists = EdgeLists(tuple(found), _find_rows(data, found, wanted))
    given = {key: wanted[key] for key in wanted if key not in found}
    given |= dict.fromkeys(() if graph else ("edge_index", EDGE_LIST), inspect.Parameter.empty)
    made = wrap(EdgeListsWrapper, net, given, lists=lists, method=method, graph=graph)
    return made, lists(data)


def _find_rows(data: Data, lists: list[str], wanted: Any) -> tuple[tuple[str, int], ...]:
    """Find the attributes with a row for each edge of a list, by their sizes and then names."""
    out = []
    for key, value in data.to_dict().items():
        if key in lists or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if is_row_per_node(data, key) and ("edge" not in key or key not in wanted):
            continue

        def fit(at: int, key: str = key) -> int:
            start, _, end = lists[at].partition("edge_index")
            return len(start + end) if key.startswith(start) and key.endswith(end) else -1

        found = [at for at, name in enumerate(lists) if data[name].size(1) == value.size(0)]
        if found:
            out.append((key, max(found, key=fit)))
    return tuple(out)


@dataclass(frozen=True, repr=False)
class Tables(ChainedTransform):
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
            if is_known and weight.dim() > dim and weight.size(dim) == num_nodes:
                dims.append((f"{prefix}.{key}".lstrip("."), dim))
    return Tables(num_nodes, tuple(dims), tuple(by_id))
