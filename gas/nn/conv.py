"""PyG's convolutions on the fused operators: same constructors, defaults, weights and outputs.

Each takes what PyG's takes, and an :class:`gas.nn.Adjacency` as ``adj_t``, square or bipartite.
What it can't fuse goes PyG's own way, and ``conv.path`` says which it took and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gas.nn.adjacency import Adjacency
from gas.nn.halo import first_rows, is_front, parts_of, row_by_row
from gas.nn.spmm import REDUCES, spmm

# In the time of so many multiplications of a dense product two cores do one element of a sparse
# product, transpose an entry, and read an element of a halo's row from a history to transform it.
# Of 36 shapes, 677 to 105,000 columns with and without a halo, widths of 7 to 1,433, these choose
# the slower order in four, by 1.2 times at most.
SPARSE_COST = 5
TRANSPOSE_COST = 400
HALO_COST = 30


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
            return with_bias(self.lin, spmm(edge_index, x), self.bias)
        out = spmm(edge_index, row_by_row(self.lin, x))
        return out if self.bias is None else out + self.bias


def with_bias(linear: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """``linear(x) + bias``, in one pass unless somebody would miss ``linear(x)``."""
    if type(linear) is pyg.Linear and linear.bias is None and not _is_observed(linear, x):
        return F.linear(x, linear.weight, bias)
    out = linear(x)
    return out if bias is None else out + bias


def _is_observed(module: torch.nn.Module, x: Tensor) -> bool:
    """Whether a hook sees what goes through a module, or autocast makes it another type."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        any(getattr(module, name) for name in hooks)
        or torch.nn.modules.module._has_any_global_hook()
        or torch.is_autocast_enabled(x.device.type)
    )


def aggregates_first(adj: Adjacency, x: Tensor, out_channels: int) -> bool:
    """Whether ``(A x) W`` costs less than ``A (x W)``; both have the same values.

    Aggregating first spares the rows of the halo the dense product, and the transpose where the
    input takes no gradient; transforming first is better where it makes rows narrower. Backward,
    the gradient towards the input costs both once more. Of a batch's entries half may be inside it.
    """
    rows, cols = adj.shape
    entries, width, dense = adj.num_entries, x.size(1), x.size(1) * out_channels
    aggregate = SPARSE_COST * entries * width + 2 * rows * dense
    transform = (2 * SPARSE_COST * out_channels + TRANSPOSE_COST) * entries + 2 * cols * dense
    is_apart = parts_of(x) is not None
    if is_apart:
        transform += HALO_COST * (cols - rows) * width
    if x.requires_grad:
        back = (SPARSE_COST * width + TRANSPOSE_COST) * entries
        aggregate += (back // 2 if is_apart else back) + rows * dense
        transform += (rows if is_apart else cols) * dense
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
