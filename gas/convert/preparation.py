"""Transform of a whole graph: what a module computes of its edges alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch.fx import GraphModule
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from gas.convert.known import is_close
from gas.graph import is_row_per_edge, with_edge_index

PREPARED = "prepared_"  # The prefix of attributes that are computed for the whole graph.


class Preparation(BaseTransform):
    """The edges and attributes that a module computes of a whole graph's edges.

    Such as self-loops, degrees and symmetric normalisation, of which a mini-batch doesn't know
    enough.

    Args:
        function: Returns the edges, the attributes, and what is to be checked, of the graph's
            edges, number of nodes and device, and of ``names``.
        names: The attributes of edges that it takes.
        made: The names of the attributes that it makes.
        checks: Where else each of the last results was found on small graphs: a row of the edges,
            ``None`` for both, or the name of an attribute.
        described: The functions that it calls, for its description.
        keeps_loops: Whether layers change the edges after a dropout of edges, so that none of the
            self-loops that they add are dropped.
    """

    takes_adj_t = True
    by_value = False

    def __init__(
        self,
        function: GraphModule,
        names: Sequence[str],
        made: Sequence[str],
        checks: Sequence[int | str | None],
        described: str,
        keeps_loops: bool,
    ) -> None:
        self.keeps_loops = keeps_loops
        self.function, self.names, self.made = function, tuple(names), tuple(made)
        self._checks = tuple(checks)
        self._described = described

    @torch.no_grad()
    def forward(self, data: Data) -> Data:
        """Return a graph with these edges and attributes; as it is if it has them.

        Raises:
            ValueError: If the graph was prepared for another model, or layers take other edges on
                it than they do on small graphs.
        """
        if all(name in data for name in self.made):
            return data
        check_unprepared(data.keys(), self.made)
        data = with_edge_index(data)
        before = data.edge_index
        given = [data[name] for name in self.names]
        found = self.function(before.clone(), data.num_nodes, before.device, *given)
        edges, rest = found[0], found[1:]
        size = len(rest) - len(self._checks)
        values, checked = rest[:size], rest[size:]
        if not values:  # A graph that isn't prepared lacks it.
            values = [torch.ones(edges.size(1), dtype=torch.bool, device=edges.device)]
        made = dict(zip(self.made, values, strict=True))
        for value, where in zip(checked, self._checks, strict=True):
            other = edges if where is None else made[where] if where in made else edges[where]
            if isinstance(where, int) and other.size(0) == value.size(0):
                other = other.view(-1, *[1] * (value.dim() - 1)).expand_as(value)
            if not is_close(value, other):
                raise ValueError(
                    f"layers take different edges on this graph, of {self}, although they take the "
                    "same on a small one: change the edges of the graph before the model"
                )
        if edges.shape != before.shape or not torch.equal(edges, before):
            for name in [key for key in data.to_dict() if is_row_per_edge(data, key)]:
                del data[name]  # They don't follow.
        data.edge_index = edges
        return data.update(made)

    def conflict(self, other: BaseTransform) -> ValueError:
        """Return the error of a module that needs another transform as well."""
        return ValueError(
            f"layers take different graphs, of {self} and {other}: build them alike, or with "
            "normalize=False"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Preparation) and (
            (self.function.code, self.names, self.made)
            == (other.function.code, other.names, other.made)
        )

    def __hash__(self) -> int:
        return hash((self.function.code, self.names, self.made))

    def __repr__(self) -> str:
        return f"Preparation({self._described})"


def check_unprepared(names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a graph that was prepared for another model.

    Args:
        names: The names of its attributes.
        known: Those of the model.

    Raises:
        ValueError: If it was.
    """
    for name in names:
        if name.startswith(PREPARED) and name not in known:
            raise ValueError(
                "the graph was prepared for another model than this one: give the graph as it was"
            )
