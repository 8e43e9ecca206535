"""PyG's attention layers on the fused operators; see :mod:`gas.nn.conv`."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from gas.nn.adjacency import Adjacency
from gas.nn.attention import gat_attention
from gas.nn.attention_v2 import gatv2_attention
from gas.nn.conv import _Fused
from gas.nn.halo import is_front, row_by_row


class GATConv(_Fused, pyg.GATConv):
    """:class:`torch_geometric.nn.GATConv`, without anything of the size of the edges."""

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """See PyG."""
        reason = self._reason(edge_index, edge_attr, return_attention_weights)
        if reason:
            if isinstance(edge_index, Adjacency):
                edge_index, _ = edge_index.to_edge_index()
            out = super().forward(x, edge_index, edge_attr, size, return_attention_weights)
            self.path = f"pyg: {reason}"
            return out
        self.path = "fused"
        heads, width = self.heads, self.out_channels
        own = x if isinstance(x, Tensor) else x[1]
        lin = self.lin if self.lin is not None else self.lin_src
        source = row_by_row(lin, x if isinstance(x, Tensor) else x[0]).view(-1, heads, width)
        if isinstance(x, Tensor) and self.lin is not None:
            target = source
        elif self.lin is not None and is_front(x[0], own):
            target = source[: own.size(0)]  # The rows of the batch have been transformed already.
        else:
            lin = self.lin if self.lin is not None else self.lin_dst
            target = lin(own).view(-1, heads, width)
        adj = edge_index.with_self_loops() if self.add_self_loops else edge_index
        out = gat_attention(
            adj,
            source,
            (source * self.att_src).sum(dim=-1),
            (target * self.att_dst).sum(dim=-1),
            self.negative_slope,
            self.dropout,
            self.training,
        )
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None:
            out = out + self.res(own)
        return out if self.bias is None else out + self.bias

    def _reason(self, adj: Any, edge_attr: Any, return_attention_weights: Any) -> str:
        reason = _reason(self, adj, edge_attr, return_attention_weights)
        return reason or ("'negative_slope' is below zero" if self.negative_slope < 0 else "")


class GATv2Conv(_Fused, pyg.GATv2Conv):
    """:class:`torch_geometric.nn.GATv2Conv`, without anything of the size of the edges."""

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """See PyG."""
        reason = _reason(self, edge_index, edge_attr, return_attention_weights)
        if reason:
            if isinstance(edge_index, Adjacency):
                edge_index, _ = edge_index.to_edge_index()
            out = super().forward(x, edge_index, edge_attr, return_attention_weights)
            self.path = f"pyg: {reason}"
            return out
        self.path = "fused"
        whole, own = (x, x) if isinstance(x, Tensor) else x
        source = row_by_row(self.lin_l, whole).view(-1, self.heads, self.out_channels)
        if self.lin_l is self.lin_r and (own is whole or is_front(whole, own)):
            target = source[: own.size(0)]  # These rows have been transformed already.
        else:
            target = self.lin_r(own).view(-1, self.heads, self.out_channels)
        adj = edge_index.with_self_loops() if self.add_self_loops else edge_index
        how = self.negative_slope, self.dropout, self.training
        out = gatv2_attention(adj, source, target, self.att[0], *how)
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None:
            out = out + self.res(own)
        return out if self.bias is None else out + self.bias


def _reason(conv: Any, adj: Any, edge_attr: Any, return_attention_weights: Any) -> str:
    """Why attention can't be fused; empty if it can."""
    if not isinstance(adj, Adjacency):
        return f"the adjacency is a {type(adj).__name__}"
    if conv.edge_dim is not None or edge_attr is not None:
        return "edge features"
    if return_attention_weights is not None:
        return "'return_attention_weights' is given"
    if conv.dropout >= 1:
        return "'dropout' is 1"
    if conv._reduce != "sum":
        return f"aggr={conv.aggr!r} is not sum"
    return conv._unsupported({})
