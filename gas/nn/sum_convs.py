"""PyG's convolutions that sum, average or take extremes over neighbours, on :func:`spmm`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

from gas.graph import Adjacency, to_dense
from gas.history import Rows, first_rows
from gas.native import is_sparse
from gas.nn.conv import FusedConv, has_sparse, to_tensors
from gas.nn.sparse_features import is_linear, linear
from gas.nn.spmm import spmm


class SumConv(FusedConv):
    """A convolution that aggregates by :func:`spmm`."""

    @property
    def multiplies_sparse(self) -> bool:
        """See :class:`FusedConv`."""
        return self.takes_sparse and self.sums_input_rows

    def _propagate(self, adj: Adjacency, x: Any, **_: Any) -> Tensor:
        return self._aggregate(adj, x[0] if isinstance(x, tuple) else x)

    def _aggregate(self, adj: Adjacency, x: Tensor | Rows) -> Tensor:
        reduce = self._reduce
        if reduce in ("max", "min"):
            adj = adj.remove_values()
        elif adj.sums_of is not None and isinstance(x, Tensor) and self.sums_input_rows:
            return adj.sums_of(x, reduce)
        return spmm(adj, x, reduce=reduce)

    @property
    def sums_input_rows(self) -> bool:
        """Return whether input rows are summed, so that layers can share the sums."""
        return self._reduce in ("sum", "mean")


def _transform_then_aggregate(
    conv: Any, x: Any, edge_index: Any, lin: Any, root: Any, **kwargs: Any
) -> Tensor | None:
    """Compute ``lin(aggregate(x)) + root(x)`` of sparse features, by ``aggregate(lin(x))``.

    Return ``None`` unless ``x`` is sparse, ``aggregate`` a sum or a mean, and ``lin`` plain.
    """
    source, own = x if isinstance(x, tuple) else (x, x)
    if not is_sparse(source) or conv._reduce not in ("sum", "mean") or not is_linear(lin):
        return None
    if own is not None and own.size(0) > source.size(0):
        return None
    h = linear(source, lin.weight)
    pair = h, None if own is None else first_rows(h, own.size(0))
    out = conv.propagate(edge_index, x=pair, **kwargs)
    if lin.bias is not None:
        out = out + lin.bias
    return out if own is None or root is None else out + root(own)


class SAGEConv(SumConv, pyg.SAGEConv):
    """:class:`torch_geometric.nn.SAGEConv`; values of the adjacency are ignored, as in PyG."""

    takes_sparse = True

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """See PyG."""
        if self.project:
            return super().forward(to_tensors(x), edge_index, size)
        if not has_sparse(x):
            return super().forward(x, edge_index, size)
        root = self.lin_r if self.root_weight else None
        out = _transform_then_aggregate(self, x, edge_index, self.lin_l, root, size=size)
        if out is None:
            return super().forward(to_dense(x), edge_index, size)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _aggregate(self, adj: Adjacency, x: Tensor | Rows) -> Tensor:
        return super()._aggregate(adj.remove_values(), x)

    @property
    def sums_input_rows(self) -> bool:
        """See :class:`SumConv`."""
        return super().sums_input_rows and not self.project


class GINConv(SumConv, pyg.GINConv):
    """:class:`torch_geometric.nn.GINConv`; values of the adjacency are ignored, as in PyG."""

    def _aggregate(self, adj: Adjacency, x: Tensor | Rows) -> Tensor:
        return super()._aggregate(adj.remove_values(), x)


class GraphConv(SumConv, pyg.GraphConv):
    """:class:`torch_geometric.nn.GraphConv`."""

    takes_sparse = True

    def forward(
        self, x: Any, edge_index: Any, edge_weight: Tensor | None = None, size: Any = None
    ) -> Tensor:
        """See PyG."""
        how = {"edge_weight": edge_weight, "size": size}
        out = _transform_then_aggregate(self, x, edge_index, self.lin_rel, self.lin_root, **how)
        return super().forward(to_dense(x), edge_index, edge_weight, size) if out is None else out


class SimpleConv(SumConv, pyg.SimpleConv):
    """:class:`torch_geometric.nn.SimpleConv`."""
