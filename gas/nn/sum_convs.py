"""PyG's convolutions that sum, average or take extremes over neighbours, on :func:`spmm`.

Those with the symmetric normalisation are among them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from gas.graph import Adjacency, to_dense
from gas.history import Rows, first_rows
from gas.native import is_sparse
from gas.nn.conv import FusedConv, add_weight, apply_rowwise, has_sparse, to_tensors
from gas.nn.sparse_features import is_linear, linear
from gas.nn.spmm import HALF, find_sums, message_dtype, spmm

# Costs, in multiplications of a dense product on two cores: of an element of a sparse product, of
# transposing an entry, and of reading an element of a halo row from a history. For 36 shapes (677
# to 105,000 columns, with and without a halo, widths of 7 to 1,433) they choose the slower order in
# four cases, by a factor of at most 1.2.
SPARSE_COST = 5
TRANSPOSE_COST = 400
HALO_COST = 30


class SumConv(FusedConv):
    """A convolution that aggregates by :func:`spmm`."""

    uses_values = True
    """Multiply messages by the values of the adjacency."""

    def _reason_not_fused(self, adj: Adjacency) -> str:
        if self.uses_values and adj.value is not None and self._reduce in ("max", "min"):
            return f"aggr={self.aggr!r} of weighted messages"
        return super()._reason_not_fused(adj)

    @property
    def multiplies_sparse(self) -> bool:
        """See :class:`FusedConv`."""
        return self.takes_sparse and self.sums_input_rows

    def _propagate(self, adj: Adjacency, x: Any, **_: Any) -> Tensor:
        return self._aggregate(adj, x[0] if isinstance(x, tuple) else x)

    def _aggregate(self, adj: Adjacency, x: Tensor | Rows) -> Tensor:
        reduce = self._reduce
        if not self.uses_values:
            adj = adj.remove_values()
        if adj.sums_of is not None and isinstance(x, Tensor) and self.sums_input_rows:
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
    uses_values = False

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

    @property
    def sums_input_rows(self) -> bool:
        """See :class:`SumConv`."""
        return super().sums_input_rows and not self.project


class GINConv(SumConv, pyg.GINConv):
    """:class:`torch_geometric.nn.GINConv`; values of the adjacency are ignored, as in PyG."""

    uses_values = False


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

    def forward(
        self, x: Any, edge_index: Any, edge_weight: Tensor | None = None, size: Any = None
    ) -> Tensor:
        """See PyG."""
        if self.combine_root != "self_loop" or not isinstance(edge_index, Adjacency):
            return super().forward(x, edge_index, edge_weight, size)
        adj = add_weight(edge_index, edge_weight)
        edges, weight = adj.to_edge_index()
        return self._run_pyg("combine_root='self_loop'", x, edges, weight, size)[: adj.size(0)]


# Symmetric normalisation --------------------------------------------------------------------------


class GCN2Conv(SumConv, pyg.GCN2Conv):
    """:class:`torch_geometric.nn.GCN2Conv`."""

    takes_pairs = False

    def forward(
        self, x: Tensor | Rows, x_0: Tensor, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """See PyG."""
        if self.normalize and isinstance(edge_index, Adjacency):
            edge_index, edge_weight = add_weight(edge_index, edge_weight), None
            edge_index = normalise_graph(edge_index, False, self.add_self_loops, x.dtype)
        return super().forward(x, x_0, edge_index, edge_weight)


class GCNConv(SumConv, pyg.GCNConv):
    """:class:`torch_geometric.nn.GCNConv`; aggregates before it transforms if that is cheaper."""

    takes_pairs = False
    takes_sparse = True

    def forward(
        self, x: Tensor | Rows, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """See PyG."""
        if not isinstance(edge_index, Adjacency):
            return super().forward(to_tensors(x), edge_index, edge_weight)
        edge_index = add_weight(edge_index, edge_weight)
        if self.normalize and self.flow != "source_to_target":
            return self._run_pyg(f"flow={self.flow!r}", x, *edge_index.to_edge_index())
        if self.normalize:
            edge_index = normalise_graph(edge_index, self.improved, self.add_self_loops, x.dtype)
        if self._reason_not_fused(edge_index):
            return super().forward(to_tensors(x), edge_index)
        self.path, reduce = "fused", self._reduce
        # Aggregated rows of sparse features would have more non-zeros.
        if not is_sparse(x) and should_aggregate_first(edge_index, x, self.out_channels, reduce):
            out = apply_linear(self.lin, spmm(edge_index, x, reduce=reduce), self.bias)
            value = edge_index.value  # Under autocast, the linear layer returns float16.
            return out if value is None else out.to(message_dtype(out, value))
        out = spmm(edge_index, apply_rowwise(self.lin, x), reduce=reduce)
        return out if self.bias is None else out + self.bias


class ProjectedConv(SumConv, pyg.SimpleConv):
    """Sum or mean of linearly transformed rows, ``sum_j w_ij (W x_j + b)``.

    Aggregates before it transforms if that is cheaper; a linear layer with hooks, or of another
    class by now, is called, before the aggregation.

    Args:
        aggr: The aggregation, ``"sum"`` or ``"mean"``.
        net: A module that has the linear layer, which isn't a child of this one.
            (default: ``weight`` and ``bias`` are arguments of the call)
        target: The name of the layer in ``net``.
    """

    takes_pairs = False
    takes_sparse = True

    def __init__(
        self, aggr: str = "sum", net: torch.nn.Module | None = None, target: str = ""
    ) -> None:
        super().__init__(aggr=aggr)
        object.__setattr__(self, "net", net)  # Not a child: it has this one.
        self.target = target

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "net": None}  # A copied model sets its own: model._link_layers.

    def extra_repr(self) -> str:
        """Return the name of the linear layer."""
        return self.target

    @property
    def multiplies_sparse(self) -> bool:
        """See :class:`FusedConv`."""
        layer = self._linear
        return super().multiplies_sparse and (layer is None or is_linear(layer))

    @property
    def _linear(self) -> Any:
        net: Any = self.net
        return None if net is None else net.get_submodule(self.target)

    def forward(
        self,
        x: Tensor | Rows,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        end_bias: Tensor | None = None,
    ) -> Tensor:
        """Return the aggregated rows.

        Args:
            x: Rows of the sources, ``[N, in_channels]``.
            edge_index: The edges, in any layout.
            edge_weight: Their weights, if they are no values of the adjacency. (default: none)
            weight: The matrix ``W``, ``[out_channels, in_channels]``. (default: that of the layer)
            bias: The bias ``b``, ``[out_channels]``. (default: that of the layer, or none)
            end_bias: A bias that is added to the sums, ``[out_channels]``. (default: none)

        Returns:
            Rows of the destinations, ``[N, out_channels]``.
        """
        layer = self._linear
        if layer is not None and is_linear(layer):
            weight, bias = layer.weight, layer.bias

        def transform(x: Tensor) -> Tensor:
            return layer(x) if weight is None else linear(x, weight, bias)

        if isinstance(edge_index, Adjacency):
            edge_index, edge_weight = add_weight(edge_index, edge_weight), None
        if not isinstance(edge_index, Adjacency) or self._reason_not_fused(edge_index):
            out = super().forward(transform(to_tensors(x)), edge_index, edge_weight)
            return out if end_bias is None else out + end_bias
        self.path = "fused"
        if (
            weight is None
            or is_sparse(x)
            # In float16, sums of the rows before the transformation may be infinite.
            or torch.is_autocast_enabled(x.device.type)
            or not should_aggregate_first(edge_index, x, weight.size(0), self._reduce)
        ):
            out = spmm(edge_index, apply_rowwise(transform, x), reduce=self._reduce)
            return out if end_bias is None else out + end_bias
        out = F.linear(spmm(edge_index, x, reduce=self._reduce), weight, end_bias)
        if bias is not None:
            ones = bias.new_ones(edge_index.size(1), 1)
            out = out + spmm(edge_index, ones, reduce=self._reduce) * bias
        return out


def apply_linear(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``layer(x) + bias``, in one pass unless the layer has hooks."""
    if is_linear(layer) and layer.bias is None and not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, layer.weight, bias)
    out = layer(x)
    return out if bias is None else out + bias


def should_aggregate_first(
    adj: Adjacency, x: Tensor | Rows, out_channels: int, reduce: str = "sum"
) -> bool:
    """Return whether ``(A x) W`` costs less than ``A (x W)``; both have the same values.

    Aggregating first saves the dense product of halo rows, and the transpose if the input needs no
    gradient; transforming first is better if it makes rows narrower. The gradient of the input
    costs both once more. Half of a batch's entries are assumed to be inside it. Extremes are not
    linear, so that they are taken last.
    """
    if reduce in ("max", "min"):
        return False
    if find_sums(adj, x, reduce) is not None:
        return True
    rows, cols = adj.shape
    entries, width, dense = adj.num_entries, x.size(1), x.size(1) * out_channels
    aggregate = SPARSE_COST * entries * width + 2 * rows * dense
    transform = (2 * SPARSE_COST * out_channels + TRANSPOSE_COST) * entries + 2 * cols * dense
    is_apart = isinstance(x, Rows)
    if is_apart:
        transform += HALO_COST * (cols - rows) * width
    if x.requires_grad:
        back = (SPARSE_COST * width + TRANSPOSE_COST) * entries
        aggregate += (back // 2 if is_apart else back) + rows * dense
        transform += (rows if is_apart else cols) * dense
    return aggregate <= transform


def normalise_graph(
    adj: Adjacency, improved: bool, add_self_loops: bool, dtype: torch.dtype
) -> Adjacency:
    """Return a whole graph with symmetric normalisation, cached while its values stay the same.

    Raises:
        ValueError: If the graph is a mini-batch.
    """
    if adj.size(0) != adj.size(1):
        raise ValueError(
            f"'normalize' is True, but the adjacency of shape {list(adj.shape)} is that of a "
            "mini-batch, which doesn't know the degrees of its halo: normalise the whole graph, "
            "T.GCNNorm()(data), and build the layer with normalize=False"
        )

    def make(adj: Adjacency) -> Adjacency:
        kind = torch.float32 if dtype == HALF else dtype  # float16 ends at 65,504, degrees don't.
        edge_index, weight = gcn_norm(
            *adj.to_edge_index(), adj.size(0), improved, add_self_loops, dtype=kind
        )
        return Adjacency.of(edge_index, adj.size(0), weight.to(dtype))

    return adj.keep((improved, add_self_loops, dtype), make)
