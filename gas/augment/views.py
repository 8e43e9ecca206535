"""Views of mini-batches: both states of an augmentation, cut by ids of edges and nodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import GCNNorm
from torch_geometric.utils import add_remaining_self_loops

from gas.augment.units import GraphState, mask_node_features
from gas.graph import Adjacency, copy_graph, find_mark, is_row_per_edge, layout_of
from gas.native import find_kept_entries, gather_rows


class _State(NamedTuple):
    """A state of the augmentation, in the order of the graph that batches are cut from.

    ``edges`` of shape ``[E]`` and ``nodes`` of shape ``[N]``, bool, true for what is kept;
    ``scale`` of shape ``[]``, the factor of kept features; ``weight`` of shape ``[E]``, undefined
    for dropped edges, or ``None`` for a graph without weights.
    """

    edges: Tensor
    nodes: Tensor
    scale: Tensor
    weight: Tensor | None


class StatefulAugmentation(Protocol):
    """Augmentation whose states are masks, see :class:`gas.augment.Augmentation`."""

    @property
    def states(self) -> tuple[GraphState, GraphState]:
        """Return the previous state and the current one."""

    def run(self) -> None:
        """Take the steps of an epoch."""

    def check(self, data: Data) -> None:
        """Refuse another graph."""


class EpochViews(NamedTuple):
    """The states of an augmentation in one epoch, and the views that are cut from them."""

    previous: _State
    current: _State
    edge_keys: Sequence[str]
    """Names of edge-level tensors."""

    def cut(
        self, batch: Data, n_id: Tensor, weighted: bool = True, e_id: Tensor | None = None
    ) -> list[Data]:
        """Return the views of a batch; see :meth:`Views.cut`."""
        ids = n_id, batch.e_id if e_id is None else e_id
        view = _cut(self.previous, batch, *ids, weighted, self.edge_keys)
        if self.current is self.previous:  # A chain that stayed: one transpose serves both.
            return [view, copy_graph(view)]
        return [view, _cut(self.current, batch, *ids, weighted, self.edge_keys)]


class Views:
    """Cuts views out of mini-batches, for any loader whose batches have ``e_id``.

    A batch has two views, of the previous and the current state of the augmentation, with the nodes
    of the batch and the edges that the state keeps. Call :meth:`run` before each epoch::

        views = gas.augment.Views(chain, data)
        for epoch in range(100):
            views.run()
            for batch in loader:
                first, second = views.cut(batch, n_id)

    The result of :meth:`run` cuts the views of that epoch, also after the next call.

    Args:
        augmentation: The augmentation, built on ``data``.
        data: The graph, with features, before any ``transform``.
        transform: The normalisation of the graph, such as ``T.GCNNorm()`` and
            ``T.AddRemainingSelfLoops()``. It may compute ``edge_weight`` from edges, weights and
            the number of nodes, and add or change self-loops; other edges keep their order. Weights
            of a view are normalised by the degrees of its state. (default: none; weights are those
            of ``data``)

    Raises:
        ValueError: If the augmentation was built on another graph, ``data`` is normalised already,
            or ``transform`` changes anything else.
    """

    def __init__(
        self,
        augmentation: StatefulAugmentation,
        data: Data,
        transform: Callable[[Data], Data] | None = None,
    ) -> None:
        if isinstance(augmentation, type) or not hasattr(augmentation, "states"):
            what = f"a {type(augmentation).__name__}"
            if isinstance(augmentation, type):
                what = f"the class {augmentation.__name__}"
            raise ValueError(
                f"'augmentation' is {what}, expected one of gas.augment, built on the graph, such "
                "as gas.MHAug(data, ...)"
            )
        augmentation.check(data)
        _check_not_normalised(data, transform is not None)
        self.augmentation = augmentation
        self.data = data
        self.transform = transform
        self.graph = data if transform is None else transform(copy.copy(data))
        """The graph of the batches: ``data`` after ``transform``."""
        self._edge_keys = [key for key, _ in self.graph if is_row_per_edge(self.graph, key)]
        self._looped: Tensor | None = None  # Weights with self-loops, before GCNNorm's.
        if transform is not None:
            self._check_transform()
        self._read: dict[GraphState, _State] = {}  # Cached, by state.
        self._epoch: EpochViews | None = None

    def run(self, again: bool = False) -> EpochViews:
        """Run the augmentation on the whole graph, and use its states for the next views.

        Args:
            again: Keep its current states, for an epoch that is resumed from a checkpoint.
                (default: ``False``)
        """
        # Training can't use tensors that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if not again:
                self.augmentation.run()
            return self._read_states()

    def cut(
        self, batch: Data, n_id: Tensor, weighted: bool = True, e_id: Tensor | None = None
    ) -> list[Data]:
        """Return both views of a batch, with new ``x``, adjacency and edge-level tensors.

        Other attributes are those of the batch.

        Args:
            batch: A batch of :attr:`graph`, with ``x``, ``e_id`` and the adjacency in any layout,
                its edges in the order of ``e_id``.
            n_id: The nodes of its features, of shape ``[nodes]``.
            weighted: Whether the values of ``adj_t`` are ``edge_weight``. (default: ``True``)
            e_id: The ids of its edges in :attr:`graph`, for a batch of a shard, of shape ``[E]``,
                int64. (default: ``batch.e_id``)
        """
        epoch = self._epoch or self._read_states()
        return epoch.cut(batch, n_id, weighted, e_id)

    # States ---------------------------------------------------------------------------------------

    def _read_states(self) -> EpochViews:
        """Read both states; the current one of the last epoch is cached."""
        read: dict[GraphState, _State] = {}
        for view in self.augmentation.states:
            known = read.get(view) or self._read.get(view)
            read[view] = known or self._state(view)
        self._read = read
        previous, current = (read[view] for view in self.augmentation.states)
        self._epoch = EpochViews(previous, current, self._edge_keys)
        return self._epoch

    def _state(self, view: GraphState) -> _State:
        """Read a state of the augmentation, in the order of :attr:`graph`."""
        device = self.data.edge_index.device
        nodes, scale = view.node_mask.to(device), view.scale.to(device)
        kept = view.edge_mask.to(device)
        weight = self.graph.get("edge_weight")
        if self.transform is None:
            return _State(kept, nodes, scale, weight)
        edges = torch.ones_like(self._is_edge).masked_scatter_(self._is_edge, kept[self._edges])
        if weight is not None and self._looped is not None:
            looped = self._looped * edges
            _, weight = gcn_norm(
                self.graph.edge_index, looped, self.graph.num_nodes, add_self_loops=False
            )
        elif weight is not None:
            weight = self._weigh(kept, edges)
        return _State(edges, nodes, scale, weight)

    def _weigh(self, kept: Tensor, edges: Tensor) -> Tensor:
        """Return the weights that the transform computes of the kept edges alone, else zero.

        Args:
            kept: Which edges of :attr:`data` are kept, of shape ``[E]``.
            edges: The same of :attr:`graph`. Self-loops are always kept.
        """
        out = self._transform_part(kept)
        if not torch.equal(out.edge_index, self.graph.edge_index[:, edges]):
            raise _transform_error(self.transform, "its edges depend on which others are kept")
        weight = self.graph.edge_weight
        return torch.zeros_like(weight).index_copy_(0, edges.nonzero().view(-1), out.edge_weight)

    def _transform_part(self, kept: Tensor) -> Data:
        """Transform the edges that are kept and self-loops, without the rest of the graph."""
        assert self.transform is not None
        kept, own = kept | ~self._edges, self.data.get("edge_weight")
        part = Data(edge_index=self.data.edge_index[:, kept], num_nodes=self.data.num_nodes)
        if own is not None:
            part.edge_weight = own[kept]
        return self.transform(part)

    def _check_transform(self) -> None:
        """Check that the transform changes nothing but weights and self-loops."""
        before, after = self.data, self.graph
        if after.get("edge_index") is None or after.get("adj_t") is not None:
            raise _transform_error(self.transform, "it makes no 'edge_index', or an 'adj_t'")
        self._edges = before.edge_index[0] != before.edge_index[1]
        self._is_edge = after.edge_index[0] != after.edge_index[1]
        same = after.num_nodes == before.num_nodes and torch.equal(
            after.edge_index[:, self._is_edge], before.edge_index[:, self._edges]
        )
        if not same:
            raise _transform_error(
                self.transform, "it changes nodes or edges other than self-loops"
            )
        made = [key for key, value in after if key not in before and isinstance(value, Tensor)]
        if not made and "edge_weight" not in after:
            return
        every = torch.ones_like(self._edges)
        some = torch.arange(every.numel(), device=every.device) % 2 == 0
        try:
            again, part = self._transform_part(every), self._transform_part(some)
        except (AttributeError, TypeError) as error:
            raise _transform_error(
                self.transform, f"it needs more of the graph ({error})"
            ) from error
        if "edge_weight" in after and not _is_close(again.edge_weight, after.edge_weight):
            raise _transform_error(self.transform, "its weights don't follow from the edges alone")
        edges = torch.ones_like(self._is_edge).masked_scatter_(self._is_edge, some[self._edges])
        for key in set(made) - {"edge_weight"}:
            whole = after[key][edges] if key in self._edge_keys else after[key]
            if not _is_close(part[key], whole):
                raise _transform_error(
                    self.transform, f"its {key!r} depends on which edges are kept"
                )
        if type(self.transform) is GCNNorm and getattr(self.transform, "add_self_loops", False):
            # It would look for self-loops anew in each state, which takes most of its time.
            own = before.get("edge_weight")
            if own is None:
                own = torch.ones(before.num_edges, device=before.edge_index.device)
            _, self._looped = add_remaining_self_loops(
                before.edge_index, own, 1.0, before.num_nodes
            )


def _cut(
    state: _State,
    batch: Data,
    n_id: Tensor,
    e_id: Tensor,
    weighted: bool,
    edge_keys: Sequence[str],
) -> Data:
    """Cut the view of one state out of a batch."""
    key = "adj_t" if batch.get("adj_t") is not None else "edge_index"
    if isinstance(batch[key], Adjacency):
        entry, rowptr = find_kept_entries(batch[key].rowptr, e_id, state.edges)
    else:
        entry, rowptr = state.edges.index_select(0, e_id).nonzero().view(-1), None
    view = batch.__class__()
    view.x = mask_node_features(batch.x, state.nodes.index_select(0, n_id), state.scale)
    view.e_id = batch.e_id.index_select(0, entry)
    view.num_nodes = batch.num_nodes
    value = None
    if state.weight is not None:
        view.edge_weight = gather_rows(state.weight, e_id.index_select(0, entry))
        value = view.edge_weight.view(-1) if weighted else None
    for other, rows in batch:
        if other not in view and other not in ("edge_index", "adj_t", "views"):
            view[other] = rows.index_select(0, entry) if other in edge_keys else rows
    view[key] = layout_of(batch[key]).select_edges(batch[key], entry, value, rowptr)
    return view


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected)


def _check_not_normalised(data: Data, transformed: bool) -> None:
    """Refuse prepared graphs, and those with weights and a self-loop at every node."""
    cure = (
        "weights of views follow from their own degrees; pass the graph as it was before, build "
        "the augmentation on that, and pass the normalisation as 'graph_transform'"
    )
    if find_mark(data) is not None:
        raise ValueError(f"'data' was prepared for a converted model: {cure}")
    src, dst = data.edge_index
    looped = torch.zeros(data.num_nodes, dtype=torch.bool, device=src.device)
    looped[src[src == dst]] = True
    weighted = data.get("edge_weight") is not None
    if (transformed or weighted) and bool(looped.all()):
        raise ValueError(
            f"'data' has a self-loop at each of its {data.num_nodes} nodes"
            f"{' and weights of edges' if weighted else ''}, as a normalised graph has: {cure}"
        )


def _transform_error(transform: object, reason: str) -> ValueError:
    return ValueError(
        f"'graph_transform' is {transform!r}, but {reason}: expected one that computes "
        "'edge_weight' from the edges and adds self-loops at most, such as "
        "torch_geometric.transforms.GCNNorm(); apply others before building the augmentation"
    )
