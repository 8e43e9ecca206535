"""Arguments of the layers of a converted model, for a mini-batch or for the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gas.convert.module.inputs import like_tuple
from gas.convert.values.modes import make_leaf
from gas.graph import Adjacency, features, layout_of
from gas.history import Rows, first_rows
from gas.nn import add_weight, check_weights
from gas.nn import dropout as drop

# Forms of calling a layer.
FUSED = "fused"  # Features (or sources and destinations) and a matrix in the loader's layout.
PAIR = "pair"  # Sources and destinations, and an edge_index between them.
SQUARE = "square"  # All rows and an edge_index; the outputs of halo nodes are removed.


class LayerScope:
    """Neighbourhood in which the layers of a converted model compute.

    Args:
        adj_t: The adjacency, in any layout.
        edge_weight: The weights of an ``edge_index``.
        batch_size: The number of in-batch nodes; ``None`` on a full batch.
        push_and_pull: A function of a history's position, a layer's output, and whether it may
            return :class:`gas.history.Rows`. (default: none, of layers alone)
        read_history: A function of a history's position, and of whether to read the rows of the
            in-batch nodes alone; layer-wise inference needs it. (default: none)
    """

    def __init__(
        self,
        adj_t: Any,
        edge_weight: Tensor | None,
        batch_size: int | None,
        push_and_pull: Callable[[int, Tensor, bool], Tensor | Rows] | None = None,
        read_history: Callable[[int, bool], Tensor] | None = None,
    ) -> None:
        self.is_edge_index = layout_of(adj_t, "adj_t").num_rows(adj_t) is None
        self.given = adj_t, edge_weight
        # One layout for all layers.
        self.adj_t = adj_t if self.is_edge_index else Adjacency.of(adj_t)
        if edge_weight is not None and not self.is_edge_index:  # In place of its own.
            self.adj_t = add_weight(self.adj_t.with_value(None), edge_weight)
        self.edge_weight = edge_weight if self.is_edge_index else self.adj_t.value
        self.batch_size = batch_size
        self.push_and_pull = push_and_pull
        self.read_history = read_history
        # Computed once. (torch.compile doesn't support functools.cached_property.)
        self._edge_index: Any = adj_t if self.is_edge_index else None
        # With some of the edges: their mask, and the probability of keeping each in a dropout.
        self.kept: Tensor | None = None
        self.share: Tensor | None = None
        self.is_checked = False  # Whether the graph is normalised.

    @property
    def supports_rows(self) -> bool:
        """Return whether layers support :class:`gas.history.Rows` of a mini-batch."""
        return not self.is_edge_index and self.adj_t.size(0) == self.batch_size

    @property
    def edge_index(self) -> Any:
        """Return sources and destinations of the edges."""
        if self._edge_index is None:
            self._edge_index = self.adj_t.to_edge_index()[0]
        return self._edge_index


@make_leaf
def own_rows(scope: LayerScope, x: Any, dims: Any = 0) -> Any:
    """Return the in-batch rows of a value; of a number of rows, the number of in-batch rows.

    Args:
        scope: The mini-batch.
        x: The value: a tensor, a number, sizes, or a tuple of such.
        dims: The dimension of its rows, nested as ``x`` is; ``None`` if it has none.
    """
    size = scope.batch_size
    if size is None or dims is None:
        return x
    if isinstance(x, int):
        return size
    if isinstance(x, torch.Size):
        return torch.Size((*x[:dims], size, *x[dims + 1 :]))
    if isinstance(x, tuple | list):
        return like_tuple(x, [own_rows(scope, *each) for each in zip(x, dims, strict=True)])
    return first_rows(x, size) if dims == 0 else x.narrow(dims, 0, size)


@make_leaf
def drop_edges(
    scope: LayerScope, p: float, training: bool, keeps_loops: bool, scales: bool
) -> LayerScope:
    """Return the neighbourhood without some of its edges in training, drawn at random.

    Args:
        scope: The neighbourhood.
        p: The probability of dropping an edge.
        training: Whether any are dropped.
        keeps_loops: Never drop self-loops, which layers add after the others are dropped.
        scales: Divide the weights of the kept edges by ``1 - p``, as dropout does.
    """
    if not training or p <= 0:
        return scope
    row, col = reversed(scope.edge_index) if scope.is_edge_index else scope.adj_t.coo()
    kept = torch.rand(row.numel(), device=row.device) >= p
    is_loop = row == col
    if keeps_loops:
        kept |= is_loop
    share = torch.where(is_loop[kept], 1.0, 1.0 - p) if keeps_loops else torch.tensor(1.0 - p)
    out = select_edges(scope, kept, share.to(row.device) if scales else None)
    out.share = share.to(row.device)
    return out


@make_leaf
def select_edges(scope: LayerScope, kept: Tensor, share: Tensor | None = None) -> LayerScope:
    """Return the neighbourhood with the edges of a mask, their weights divided by a share."""
    weight = None if scope.edge_weight is None else scope.edge_weight[kept]
    if weight is not None and share is not None:
        weight = weight / share.to(weight.dtype)
    adj = layout_of(scope.adj_t).select_edges(scope.adj_t, kept.nonzero().view(-1), weight)
    out = LayerScope(adj, weight, scope.batch_size, scope.push_and_pull, scope.read_history)
    out.given = scope.given  # The weights that are checked are those before.
    out.kept = kept
    return out


@make_leaf
def kept_edges(scope: LayerScope, rows: Any, scaled: bool) -> Any:
    """Return the rows of the kept edges, divided by the probability of keeping them if scaled."""
    if scope.kept is None:
        return rows
    rows = rows[scope.kept]
    if not scaled or scope.share is None or not rows.is_floating_point():
        return rows
    share = scope.share.to(rows.dtype)
    return rows / (share if share.dim() == 0 else share.view(-1, *[1] * (rows.dim() - 1)))


@make_leaf
def pull(scope: LayerScope, position: int, x: Tensor, rows: bool) -> Tensor | Rows:
    """Push the own rows of a batch to a history, and return the rows of all its nodes."""
    assert scope.push_and_pull is not None
    return scope.push_and_pull(position, x, rows and scope.supports_rows)


def with_own(x: Tensor | Rows, own: Tensor) -> Tensor | Rows:
    """Return what :func:`pull` has returned, with other rows of the batch's own."""
    return replace(x, own=own) if isinstance(x, Rows) else own


@make_leaf
def read_history(scope: LayerScope, position: int, own: bool) -> Any:
    """Return the rows of a history, for a stage of layer-wise inference."""
    assert scope.read_history is not None
    return scope.read_history(position, own)


@make_leaf
def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Apply :func:`gas.nn.dropout`, which always returns a new tensor."""
    return drop(x, p, training)


@make_leaf
def join(scope: LayerScope, tensors: Any) -> Any:
    """Return several values as the columns of one, ``[num_rows, width]``."""
    return join_columns(tensors)


def join_columns(tensors: Sequence[Tensor]) -> Tensor:
    """Return several values as the columns of one, ``[num_rows, width]``.

    Beside floating-point numbers, integers are in float64, of 64 bits as multiples of 2**32 and
    what is left of them.
    """
    found = [rows.flatten(1) if rows.dim() > 1 else rows[:, None] for rows in tensors]
    if any(rows.is_floating_point() for rows in found):
        for position, rows in enumerate(found):
            if rows.dtype == torch.long:
                high = rows >> 32
                rows = torch.cat([high, rows - (high << 32)], 1)
            if not rows.is_floating_point() and rows.dtype != torch.bool:
                found[position] = rows.double()
    return torch.cat(found, 1)


@make_leaf
def dense(x: Any) -> Any:
    """Return features as a dense tensor."""
    return features.to_dense(x)


@make_leaf
def sources(scope: LayerScope, x: Any, form: str, takes_pairs: bool = True) -> Any:
    """Return a layer's features in a form."""
    if form == FUSED and not scope.is_edge_index:
        if isinstance(x, Rows) or not takes_pairs:
            return x
        return _make_pair(x, scope.adj_t.size(0))
    x = x.tensor() if isinstance(x, Rows) else x
    return _make_pair(x, scope.batch_size) if form == PAIR else x


@make_leaf
def source_pair(scope: LayerScope, x: Any, own: Any, form: str) -> Any:
    """Return features of sources and of destinations, as they are given, in a form."""
    x, own = (value.tensor() if isinstance(value, Rows) else value for value in (x, own))
    if own is None or form == SQUARE:
        return x, own
    return x, first_rows(own, scope.batch_size)


def _make_pair(x: Tensor, num_rows: int | None) -> Any:
    return x if num_rows is None or num_rows == x.size(0) else (x, first_rows(x, num_rows))


@make_leaf
def edges(scope: LayerScope, form: str, weight: Tensor | None) -> Any:
    """Return a layer's adjacency in a form."""
    if form != FUSED or scope.is_edge_index:
        return scope.edge_index
    if weight is scope.edge_weight:
        return scope.adj_t
    return scope.adj_t.with_value(None if weight is None else weight.view(-1))


@make_leaf
def edge_weight(scope: LayerScope, form: str, weight: Tensor | None) -> Tensor | None:
    """Return a layer's edge weights in a form; those of a matrix are its values."""
    return weight if form != FUSED or scope.is_edge_index else None


@make_leaf
def weights(scope: LayerScope) -> Tensor | None:
    """Return the weight of every edge."""
    return scope.edge_weight


@make_leaf
def gcn_weights(scope: LayerScope) -> Tensor | None:
    """Return the normalised weights of a mini-batch for a converted GCN layer.

    Raises:
        ValueError: If its graph isn't normalised.
    """
    if not scope.is_checked:
        try:
            check_weights(*scope.given)
        except ValueError as error:
            raise ValueError(
                "the edges have no weights, but this model's layers take those of the normalised "
                "graph: partition it by gas.cluster(data, num_parts, model=model), or pass "
                "model.prepare(data)"
            ) from error
        scope.is_checked = True
    return scope.edge_weight
