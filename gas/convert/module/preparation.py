"""Transforms of the whole graph that compute what a module derives from its edges alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform, GCNNorm

from gas.convert.values.failures import new_error
from gas.convert.values.known import is_close
from gas.graph import PREPARED, WEIGHT, find_mark, is_row_per_edge, layout_of, with_edge_index

NODE_ID = f"{PREPARED}node_id"  # The row of each node in parameters with a row for each node.
LAYOUTS = ("", "csr", "sparse_tensor")  # Of a module's edges: a list, or a matrix.
EDGE_LIST = f"{PREPARED}list"  # The position of the list that an edge is of.
_MADE: Any = WeakIdKeyDictionary()  # Attributes that were made of others.


@dataclass(frozen=True, repr=False)
class ChainedTransform(BaseTransform):
    """A transform of a whole graph that comes before another one, ``then``, and is false if empty.

    * ``then``: the transform that comes next.
    """

    then: BaseTransform | None = field(default=None, kw_only=True)

    def before(self, then: BaseTransform | None) -> BaseTransform | None:
        """Return the transform of a module that needs another one as well."""
        return replace(self, then=then) if self else then

    def _go_on(self, data: Data) -> Data:
        return data if self.then is None else self.then(data)

    def _describe(self, what: str) -> str:
        return what if self.then is None else f"{what}, {self.then}"


class Preparation(BaseTransform):
    """Transform that computes the values that a module derives from the graph's edges alone.

    Examples are self-loops, degrees and symmetric normalisation, which a mini-batch can't compute.
    If layers take different lists of edges, the graph gets the union of them, and masks.

    Args:
        function: A function of the graph's edges, number of nodes, device, type of rows, and
            attributes ``names``. It returns the lists of edges, the new attributes, and values to
            check.
        names: The attributes of edges that it takes.
        masks: The name of the mask of each list among all edges; "" for one that has them all.
        made: The names of the attributes that it makes, and the position of the list that each has
            rows of; ``None`` if its rows are those of nodes.
        mark: The name of an attribute that marks a graph which has them, see :func:`read_mark`.
        checks: Where else each of the last results was found on small graphs: the position of the
            list, and a row of it, ``None`` for both, or the name of an attribute.
        described: The functions that it calls, for its description.
        keeps_loops: Whether layers change the edges after a dropout of edges, so that none of the
            self-loops that they add are dropped.
        given: The parameter for a matrix, its layout, and whether weights are taken.
        dtype: The type of rows of nodes, if the graph has no ``x`` of real numbers.
    """

    _refuses_for = ""  # The module's name, if it would read weights that its graph lacked.

    def __init__(
        self,
        function: GraphModule,
        names: Sequence[str],
        masks: Sequence[str],
        made: Mapping[str, int | None],
        mark: str,
        checks: Sequence[tuple[int | None, int | str | None]],
        described: str,
        keeps_loops: bool,
        given: tuple[str, str, bool],
        dtype: torch.dtype | None,
    ) -> None:
        matrix, layout, is_weighted = given
        self.keeps_loops, self._reads_adj_t = keeps_loops, matrix == "adj_t"
        self._dtype = dtype
        self._before = 2 * LAYOUTS.index(layout) + is_weighted
        self.function, self.names = function, tuple(names)
        self.made, self._mark = (*made, *filter(None, masks), mark), mark
        self._masks, self._lists = tuple(masks), dict(made)
        self._checks = tuple(checks)
        self._described = described

    @property
    def needed_mark(self) -> str:
        """Return the mark that tells made weights from those before; "" if none are made."""
        return self._mark if WEIGHT in self.made else ""

    @functools.cached_property
    def is_gcn_norm(self) -> bool:
        """Return whether it does what ``T.GCNNorm()`` does, for graphs without weights."""
        edges = torch.tensor([[0, 1, 2, 2, 3, 1, 0], [1, 2, 0, 2, 1, 0, 1]])
        data = Data(edge_index=edges, num_nodes=5)
        if self._before or self.names or [*self._lists] != [WEIGHT]:
            return False
        mine, other = self(copy.copy(data)), GCNNorm()(data)
        same = mine.edge_index.shape == other.edge_index.shape
        return same and is_close(mine.edge_weight.float(), other.edge_weight)

    def refuse_weights(self, module: str) -> None:
        """Refuse graphs with weights from now on, if their name is given, for a module."""
        self._refuses_for = module

    @torch.no_grad()
    def forward(self, data: Data) -> Data:
        """Return a graph with these edges and attributes; a prepared graph is returned as it is.

        Raises:
            ValueError: If the graph lacks an attribute, was prepared for another model, or layers
                take other edges on it than they do on small graphs.
        """
        if self._mark in data:
            return data
        check_unprepared(data.keys(), self.made)
        if self._reads_adj_t and "adj_t" in data and "edge_index" in data:
            del data.edge_index
        data = with_edge_index(data)
        if data.edge_index is None:
            raise ValueError(
                "'data' has no edges, of which the model's layers take what is computed: set "
                "data.edge_index"
            )
        before, weight = data.edge_index, data.get(WEIGHT)
        if self._refuses_for and weight is not None and bool((weight != 1).any()):
            raise new_error(self._refuses_for, WEIGHT)
        given = self._read(data)
        x = data.get("x")
        is_float = isinstance(x, Tensor) and x.is_floating_point()
        dtype = x.dtype if is_float else self._dtype
        found = self.function(before.clone(), data.num_nodes, before.device, dtype, *given)
        lists, rest = found[: len(self._masks)], found[len(self._masks) :]
        values = dict(zip(self._lists, rest, strict=False))
        for value, (position, where) in zip(rest[len(values) :], self._checks, strict=True):
            self._check(value, values[where] if isinstance(where, str) else lists[position], where)
        edges, places = join_lists(lists, int(data.num_nodes or 0))
        whole = [each for name, each in zip(self._masks, lists, strict=True) if not name]
        if any(each.size(1) != edges.size(1) for each in whole) or any(
            values[name].size(0) != (data.num_nodes if at is None else lists[at].size(1))
            for name, at in self._lists.items()
        ):
            raise self._mismatch()
        masks = {name: at for at, name in enumerate(self._masks) if name}
        values |= {
            name: torch.ones(lists[at].size(1), dtype=torch.bool, device=edges.device)
            for name, at in masks.items()
        }
        made = {
            name: scatter_rows(values[name], None if at is None else places[at], edges.size(1))
            for name, at in (self._lists | masks).items()
        }
        if edges.shape != before.shape or not torch.equal(edges, before):
            for name in [key for key in data.to_dict() if is_row_per_edge(data, key)]:
                del data[name]  # They don't follow.
        data.edge_index = edges
        if "adj_t" in data:
            del data.adj_t
        known = [id(value) for value in given]
        _MADE.update({value: True for value in made.values() if id(value) not in known})
        return data.update({**made, self._mark: torch.tensor(self._before)})

    def _read(self, data: Data) -> list[Any]:
        """Return the attributes of a graph that the function takes, or refuse them."""
        missing = [name for name in self.names if name not in data]
        if missing:
            raise ValueError(
                f"the graph has no {missing[0]!r}, which the model takes: set data.{missing[0]}"
            )
        given = [data[name] for name in self.names]
        if any(isinstance(value, Tensor) and value in _MADE for value in given):
            raise ValueError(
                "'data' has weights that were normalised already: give the graph as it was, or "
                "leave 'model' out of gas.cluster"
            )
        for name, value in zip(self.names, given, strict=True):
            if isinstance(value, Tensor) and value.requires_grad:
                raise ValueError(
                    f"{name!r} requires a gradient, and the model's layers take what is computed "
                    f"of it once: detach it, data.{name} = data.{name}.detach(), or have the "
                    "module compute the weights of rows of nodes"
                )
        return given

    def _check(self, value: Any, other: Any, where: int | str | None) -> None:
        """Check that a value is found where it was on small graphs."""
        if isinstance(where, int):
            other = other[where]
            if other.size(0) == value.size(0):
                other = other.view(-1, *[1] * (value.dim() - 1)).expand_as(value)
        if not is_close(value, other):
            raise self._mismatch()

    def _mismatch(self) -> ValueError:
        return ValueError(
            f"layers take different edges, or attributes of edges, on this graph, of {self}, "
            "although they take the same on a small one, whose weights are positive: change edges "
            "and weights of the graph before the model"
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


def is_weighted(adj_t: Any, edge_weight: Tensor | None) -> bool:
    """Return whether the edges of a mini-batch have weights other than ones.

    On a GPU, values aren't compared with one, for which the host would have to wait: those of a
    ``torch.sparse`` tensor count as ones, others as weights.
    """
    value = edge_weight if adj_t is None else layout_of(adj_t, "adj_t").value(adj_t)
    if value is None or value.is_cuda:
        return value is not None and not isinstance(adj_t, Tensor)
    return bool((value != 1).any())


def is_gcn_normalised(adj_t: Any, edge_weight: Tensor | None) -> bool:
    """Return whether a batch has the weights of ``T.GCNNorm()``, of a graph without weights.

    The self-loop of each node that has edges has a weight of one over their number.
    """
    layout = layout_of(adj_t, "adj_t")
    value = edge_weight if layout.num_rows(adj_t) is None else layout.value(adj_t)
    if value is None:
        return False
    row, col = layout.entries(adj_t)
    row, is_loop = row.long(), row == col
    counts = torch.bincount(row).to(value)
    loops = torch.zeros_like(counts).index_add_(0, row[is_loop], value.detach()[is_loop])
    return bool(torch.allclose(loops * counts, (counts > 0).to(value), rtol=1e-2, atol=1e-2))


def read_mark(data: Data) -> tuple[str, bool] | None:
    """Return the layout of a prepared graph before, "" for a list, and whether weights were taken.

    ``None`` if it wasn't prepared. A module is converted with a prepared graph, as from a folder,
    as with the graph before.
    """
    mark = find_mark(data)
    return None if mark is None else (LAYOUTS[int(mark) // 2], bool(mark % 2))


def check_unprepared(names: Iterable[str], known: Collection[str]) -> None:
    """Refuse names of a graph's attributes that tell that it was prepared for another model.

    Those of this model are ``known``.
    """
    for name in names:
        if name.startswith(PREPARED) and name not in (*known, NODE_ID, EDGE_LIST):
            raise ValueError(
                "the graph was prepared for another model than this one: give the graph as it was"
            )


def join_lists(lists: Sequence[Tensor], num_nodes: int) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Join lists of edges into one that has those of each, and no more.

    An edge that lists have twice at most is twice in the result.

    Args:
        lists: The lists, each ``[2, num_edges]``.
        num_nodes: The number of nodes.

    Returns:
        The edges, in the order in which they are met, and the position among them of each edge of
        each list; ``None`` if there is one list, which is returned as it is.
    """
    if len(lists) == 1:
        return lists[0], [None]
    longest = max(lists, key=lambda each: each.size(1))
    if all(torch.equal(longest[:, : each.size(1)], each) for each in lists):
        return longest, [torch.arange(each.size(1), device=each.device) for each in lists]
    edges = torch.cat(list(lists), dim=1)
    src, dst = edges
    _, keys = torch.unique(src * num_nodes + dst, return_inverse=True)
    sizes = torch.tensor([each.size(1) for each in lists], device=keys.device)
    which = torch.arange(len(lists), device=keys.device).repeat_interleave(sizes)
    rows = torch.arange(keys.numel(), device=keys.device)
    # Of several equal edges of a list, the first, the second, ...
    equal, order = (which * rows.numel() + keys).sort(stable=True)
    turn = torch.empty_like(rows).index_copy_(0, order, rows - torch.searchsorted(equal, equal))
    found, joined = torch.unique(keys * rows.numel() + turn, return_inverse=True)
    first = torch.full_like(found, rows.numel()).scatter_reduce_(0, joined, rows, "amin")
    met, order = first.sort()
    places = torch.empty_like(order).index_copy_(0, order, rows[: order.numel()])[joined]
    return edges[:, met], places.split(sizes.tolist())


def scatter_rows(rows: Tensor, places: Tensor | None, size: int) -> Tensor:
    """Return rows of some edges as rows of all of them, zero for others."""
    if places is None:
        return rows
    return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, places, rows)
