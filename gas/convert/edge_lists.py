"""Several lists of edges that a module takes, in one graph with the list of each edge."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from gas.convert.arguments import LayerAlone, find_method, graph_parameter, is_list, parameters
from gas.convert.preparation import EDGE_LIST, PREPARED, First, spread
from gas.graph import check_ids, is_row_per_edge, is_row_per_node


@dataclass(frozen=True, repr=False)
class EdgeLists(First):
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
            key: spread(data[key], (which == at).nonzero().view(-1), which.numel())
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


class TakesLists(LayerAlone):
    """A module that is given all edges, and gives each list of them to another."""

    lists = EdgeLists()
    method, graph = "forward", ""

    def forward(self, **given: Any) -> Any:
        """Return what the module gives for its lists."""
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

    Both as they are, if it takes a single list.

    Args:
        net: The module.
        data: The graph.
        in_graph: Whether a module that takes the graph may read lists besides ``edge_index``.

    Raises:
        ValueError: If a list has no edges.
    """
    method = find_method(net)
    wanted = parameters(net, method)
    graph = graph_parameter(wanted, data)
    found = [key for key in data.to_dict() if is_list(key, data[key]) and (graph or key in wanted)]
    is_known = not in_graph and graph and "edge_index" in data
    if len(found) < 2 or is_known or isinstance(net, LayerAlone):
        return net, data
    for name in found:
        if not data[name].size(1):
            raise ValueError(
                f"{name!r} has no edges, with which {type(net).__name__} could be tried on a small "
                "graph: convert it with a graph that has some"
            )
    lists = EdgeLists(tuple(found), _find_rows(data, found, wanted))
    names = [key for key in wanted if key not in found]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = {key: inspect.Parameter(key, kind, default=wanted[key]) for key in names}
    needed = () if graph else ("edge_index", EDGE_LIST)
    given |= {key: inspect.Parameter(key, kind) for key in needed}
    ordered = sorted(given.values(), key=lambda each: each.default is not each.empty)

    def forward(self: Any, **values: Any) -> Any:
        return TakesLists.forward(self, **values)

    own = inspect.Parameter("self", kind)
    # For what asks for the parameters of forward. Type checkers don't know this attribute.
    forward.__signature__ = inspect.Signature([own, *ordered])  # type: ignore[attr-defined]
    members = {"lists": lists, "method": method, "graph": graph, "forward": forward}
    return type(type(net).__name__, (TakesLists,), members)(net), lists(data)


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
