"""PyG's convolutions on the fused operators: same constructors, defaults, weights and outputs.

Each takes what PyG's takes, and an :class:`gas.nn.Adjacency` as ``adj_t``, square or bipartite.
What it can't fuse goes PyG's own way, and ``conv.path`` says which it took and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gas.nn.adjacency import Adjacency
from gas.nn.halo import first_rows, is_front, parts_of, row_by_row
from gas.nn.spmm import REDUCES, spmm

# One element of a sparse product takes as long as some multiplications of a dense one: 4 to 6 with
# 20 entries per row, 20 to 34 with 5, at widths of 16 to 256 on one core.
SPARSE_COST = 10


def pyg_class(cls: type) -> type:
    """The class of PyG that a class here extends."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("torch_geometric."))


@contextlib.contextmanager
def _as_pyg(conv: Any) -> Iterator[None]:
    """Makes a layer an object of PyG's class: PyG compiles methods from a class's source."""
    cls = type(conv)
    conv.__class__ = pyg_class(cls)
    try:
        yield
    finally:
        conv.__class__ = cls


class _Fused:
    """A convolution whose aggregation is an operator of :mod:`gas.nn`, such as a sparse product.

    It stands in front of a class of PyG, which the type checker doesn't see behind it.
    """

    aggr: Any
    flow: str
    path = "pyg: not called yet"
    """``"fused"``, or ``"pyg: <reason>"``: the way the last call took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _as_pyg(self):
            self.__init__(*args, **kwargs)  # type: ignore[misc]

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        with _as_pyg(self):
            self._set_jittable_templates(raise_on_error)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, tuple) and x[1] is not None and is_front(x[0], x[1]):
            x = (x[0], first_rows(x[0], x[1].size(0)))  # As scripts pass it: (x, x[:batch_size]).
        return super().__call__(x, *args, **kwargs)  # type: ignore[misc]

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Aggregates over an :class:`Adjacency`; leaves everything else to PyG."""
        if not isinstance(edge_index, Adjacency):
            self.path = f"pyg: the adjacency is a {type(edge_index).__name__}"
            return super().propagate(edge_index, size=size, **kwargs)  # type: ignore[misc]
        reason = self._unsupported(kwargs)
        if reason:
            self.path = f"pyg: {reason}"
            adj = edge_index.to_torch_sparse()
            return super().propagate(adj, size=size, **kwargs)  # type: ignore[misc]
        self.path = "fused"
        return self._propagate(edge_index, **kwargs)

    def _propagate(self, adj: Adjacency, x: Any, **_: Any) -> Tensor:
        return self._aggregate(adj, x if isinstance(x, Tensor) else x[0])

    def _unsupported(self, kwargs: dict[str, Any]) -> str:
        """Why the aggregation can't be fused; empty if it can."""
        if pyg_class(type(self)) not in type(self).__bases__:
            return (
                f"{type(self).__name__} may aggregate in another way than {pyg_class(type(self))}"
            )
        if self._reduce not in REDUCES:
            return f"aggr={self.aggr!r} is none of {', '.join(REDUCES)}"
        if kwargs.get("edge_weight") is not None:
            return "'edge_weight' is given, but an Adjacency has values of its own"
        if self.flow != "source_to_target":
            return f"flow={self.flow!r}"
        return ""

    @property
    def _reduce(self) -> str:
        return {"add": "sum"}.get(self.aggr, self.aggr) if isinstance(self.aggr, str) else ""

    def _aggregate(self, adj: Adjacency, x: Tensor) -> Tensor:
        if self._reduce in ("max", "min"):
            adj = adj.unweighted()
        return spmm(adj, x, reduce=self._reduce)


class SAGEConv(_Fused, pyg.SAGEConv):
    """:class:`torch_geometric.nn.SAGEConv`; values of the adjacency are ignored, as in PyG."""

    def _aggregate(self, adj: Adjacency, x: Tensor) -> Tensor:
        return super()._aggregate(adj.unweighted(), x)


class GINConv(_Fused, pyg.GINConv):
    """:class:`torch_geometric.nn.GINConv`; values of the adjacency are ignored, as in PyG."""

    def _aggregate(self, adj: Adjacency, x: Tensor) -> Tensor:
        return super()._aggregate(adj.unweighted(), x)


class GraphConv(_Fused, pyg.GraphConv):
    """:class:`torch_geometric.nn.GraphConv`."""


class SimpleConv(_Fused, pyg.SimpleConv):
    """:class:`torch_geometric.nn.SimpleConv`."""


class GCN2Conv(_Fused, pyg.GCN2Conv):
    """:class:`torch_geometric.nn.GCN2Conv`."""

    def forward(
        self, x: Tensor, x_0: Tensor, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """See PyG."""
        if self.normalize and isinstance(edge_index, Adjacency):
            edge_index = normalised(edge_index, False, self.add_self_loops, x.dtype)
            self.normalize: bool = False
            try:
                return super().forward(x, x_0, edge_index, edge_weight)
            finally:
                self.normalize = True
        return super().forward(x, x_0, edge_index, edge_weight)


class GCNConv(_Fused, pyg.GCNConv):
    """:class:`torch_geometric.nn.GCNConv`; aggregates before it transforms if that is cheaper."""

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """See PyG."""
        if not isinstance(edge_index, Adjacency) or self._unsupported({"edge_weight": edge_weight}):
            if isinstance(edge_index, Adjacency) and self.normalize:
                edge_index, edge_weight = edge_index.to_edge_index()
            return super().forward(x, edge_index, edge_weight)
        self.path = "fused"
        if self.normalize:
            edge_index = normalised(edge_index, self.improved, self.add_self_loops, x.dtype)
        if aggregates_first(edge_index, x, self.out_channels):
            out = self.lin(spmm(edge_index, x))
        else:
            out = spmm(edge_index, row_by_row(self.lin, x))
        return out if self.bias is None else out + self.bias


def aggregates_first(adj: Adjacency, x: Tensor, out_channels: int) -> bool:
    """Whether ``(A x) W`` costs less than ``A (x W)``; both have the same values.

    Aggregating first spares the rows of the halo the dense product; transforming first is better
    where it makes rows narrower. Backward, the gradient towards the input costs both once more.
    """
    rows, cols = adj.shape
    width = x.size(1)
    sparse, dense = SPARSE_COST * adj.num_entries, width * out_channels
    aggregate = sparse * width + 2 * rows * dense
    transform = 2 * sparse * out_channels + 2 * cols * dense
    if x.requires_grad:
        aggregate += sparse * width + rows * dense
        transform += (cols if parts_of(x) is None else rows) * dense
    return aggregate <= transform


def normalised(
    adj: Adjacency, improved: bool, add_self_loops: bool, dtype: torch.dtype
) -> Adjacency:
    """The symmetric normalisation of a whole graph, made once for each adjacency.

    Raises:
        ValueError: If it is that of a mini-batch.
    """
    if adj.size(0) != adj.size(1):
        raise ValueError(
            f"'normalize' is True, but the adjacency of shape {list(adj.shape)} is that of a "
            "mini-batch, which doesn't know the degrees of its halo: normalise the whole graph, "
            "T.GCNNorm()(data), and build the layer with normalize=False"
        )
    key = (improved, add_self_loops, dtype)
    if key not in adj.kept:
        edge_index, weight = adj.to_edge_index()
        edge_index, weight = gcn_norm(
            edge_index, weight, adj.size(0), improved, add_self_loops, dtype=dtype
        )
        adj.kept[key] = Adjacency.of(edge_index, adj.size(0), weight)
    return adj.kept[key]
