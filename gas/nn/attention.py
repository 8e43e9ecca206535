"""Fused graph attention, GAT and GATv2; nothing of the size of the edges is stored."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gas.graph import Adjacency
from gas.native import attention as kernels
from gas.native import check_probability, learns
from gas.nn.conv import FusedConv, apply_rowwise, is_leading_view
from gas.nn.spmm import HALF, check_features, check_tensors, compute_dtype, message_dtype


def gat_attention(
    adj: Adjacency,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """Aggregate neighbours by attention weights, as in graph attention networks.

    ``out[i, h] = sum of softmax_j(leaky_relu(source[j, h] + target[i, h])) * x[j, h]`` over the
    edges ``j -> i``, zero where there are none. Nothing of the size of the edges is stored: the
    backward pass computes attention weights again, and draws dropout's random numbers again.
    Deterministic.

    Source: Veličković et al., *Graph Attention Networks*, ICLR 2018; the way of computing it, Zhang
    et al., *Understanding GNN Computational Graph*, MLSys 2022.

    Args:
        adj: The edges, of shape ``[rows, cols]``; values are ignored.
        x: Features of the sources, of shape ``[cols, heads, width]``, float32, float64, or
            bfloat16 or float16, which are added up in float32.
        source: Scores of the sources, of shape ``[cols, heads]``.
        target: Scores of the destinations, of shape ``[rows, heads]``.
        negative_slope: Of the leaky ReLU below zero, at least 0. (default: ``0.2``)
        dropout: Probability of dropping an attention weight, in ``[0, 1)``; ``torch.manual_seed``
            makes it repeatable on every device. (default: ``0.0``)
        training: Whether to drop at all. (default: ``True``)

    Returns:
        Of shape ``[rows, heads, width]`` and the type of ``x``; of float16, the type of a message,
        which is that of the scores if that is wider.

    Raises:
        ValueError: If shapes, types or numbers don't fit, naming the argument.
        RuntimeError: If a CUDA graph is captured that would drop the same weights at every replay.
    """
    check_features(adj, x, 3)
    check_tensors(adj, source=source, target=target)
    heads = x.size(1)
    for name, scores, rows in (("source", source, adj.size(1)), ("target", target, adj.size(0))):
        if scores.shape != (rows, heads):
            raise ValueError(
                f"'{name}' has shape {list(scores.shape)}, expected [{rows}, {heads}]: a score for "
                "each node and head"
            )
    if not negative_slope >= 0:
        raise ValueError(f"'negative_slope' is {negative_slope}, expected at least 0")
    check_probability("dropout", dropout, below_one=True)
    kind = message_dtype(x, source, target)
    x = x.to(compute_dtype(kind)) if x.dtype == HALF else x
    p = dropout if training else 0.0
    seed = draw_seed(p, x.device)
    keep_state = learns(x, source, target)
    source, target = source.to(compute_dtype(kind)), target.to(compute_dtype(kind))
    how = negative_slope, p, seed, keep_state
    return kernels.attention(adj.matrix, x, source, target, *how)[0].to(kind)


def gatv2_attention(
    adj: Adjacency,
    source: Tensor,
    target: Tensor,
    att: Tensor,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    training: bool = True,
) -> Tensor:
    """Aggregate neighbours by GATv2's attention, whose ranking depends on the target node.

    ``out[i, h] = sum of softmax_j(<att[h], leaky_relu(source[j, h] + target[i, h])>) * source[j,
    h]`` over the edges ``j -> i``, zero where there are none. Nothing of the size of the edges is
    stored: the backward pass computes scores again, and draws dropout's random numbers again.
    Deterministic.

    Source: Brody et al., *How Attentive are Graph Attention Networks?*, ICLR 2022; the way of
    computing it, Zhang et al., *Understanding GNN Computational Graph*, MLSys 2022.

    Args:
        adj: The edges, of shape ``[rows, cols]``; values are ignored.
        source: Features of the sources, of shape ``[cols, heads, width]``, float32, float64, or
            bfloat16 or float16, which are added up in float32.
        target: Features of the destinations, of shape ``[rows, heads, width]``, of the same type.
        att: The attention vectors, of shape ``[heads, width]``.
        negative_slope: Of the leaky ReLU below zero. (default: ``0.2``)
        dropout: Probability of dropping an attention weight, in ``[0, 1)``; ``torch.manual_seed``
            makes it repeatable on every device. (default: ``0.0``)
        training: Whether to drop at all. (default: ``True``)

    Returns:
        Of shape ``[rows, heads, width]`` and the type of ``source``; of float16, the type of a
        message, which is that of ``att`` if that is wider.

    Raises:
        ValueError: If shapes, types or numbers don't fit, naming the argument.
        RuntimeError: See :func:`gas.nn.gat_attention`.
    """
    check_features(adj, source, 3, "source")
    check_tensors(adj, target=target, att=att)
    shape = (adj.size(0), *source.shape[1:])
    if target.shape != shape or target.dtype != source.dtype:
        raise ValueError(
            f"'target' is {target.dtype} of shape {list(target.shape)}, expected {source.dtype} of "
            f"shape {list(shape)}: a row for each row of 'adj'"
        )
    if att.shape != shape[1:]:
        raise ValueError(f"'att' has shape {list(att.shape)}, expected {list(shape[1:])}")
    check_probability("dropout", dropout, below_one=True)
    kind = message_dtype(source, att)
    if source.dtype == HALF:
        source, target = source.to(compute_dtype(kind)), target.to(compute_dtype(kind))
    att = att.to(compute_dtype(kind))
    p = dropout if training else 0.0
    seed = draw_seed(p, source.device)
    how = negative_slope, p, seed
    return kernels.attention_v2(adj.matrix, source, target, att, *how)[0].to(kind)


def draw_seed(p: float, device: torch.device) -> Tensor:
    """Draw a seed of dropout's generator, int64; 0, without drawing, if nothing is dropped.

    The CPU's generator draws it, so that reading it doesn't synchronise.

    Args:
        p: The probability of dropping.
        device: The device of the operator.

    Raises:
        RuntimeError: If a CUDA graph is captured, which would keep the seed.
    """
    if p == 0:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    on_cuda = device.type == "cuda" and not torch.compiler.is_compiling()
    if on_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"'dropout' is {p} while a CUDA graph is captured, every replay of which would drop "
            "the same attention weights: leave it out, dropout=0, or use PyG's layer on "
            "adj.to_edge_index()"
        )
    return torch.randint(2**63 - 1, (), device="cpu")


class _AttentionConv(FusedConv):
    """A convolution that weighs neighbours by attention."""

    takes_sparse = True
    edge_dim: Any
    dropout: float
    concat: bool
    res: Any
    bias: Any

    def _reason_pyg(self, x: Any, adj: Any, edge_attr: Any, return_attention_weights: Any) -> str:
        """Return the reason why attention can't be fused; "" if it can."""
        if not isinstance(adj, Adjacency):
            return f"the adjacency is a {type(adj).__name__}"
        if isinstance(x, tuple) and x[1] is None:
            return "no destination features"
        if self.edge_dim is not None or edge_attr is not None:
            return "edge features"
        if return_attention_weights is not None:
            return "'return_attention_weights' is given"
        if self.dropout >= 1:
            return "'dropout' is 1"
        if self._reduce != "sum":
            return f"aggr={self.aggr!r} is not sum"
        return self._reason_not_fused(adj)

    def _combine_heads(self, out: Tensor, own: Any) -> Tensor:
        """Return the layer's output from that of each head, of shape ``[rows, heads, width]``."""
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None:
            out = out + self.res(own)
        return out if self.bias is None else out + self.bias


class GATConv(_AttentionConv, pyg.GATConv):
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
        reason = self._reason_pyg(x, edge_index, edge_attr, return_attention_weights)
        if not reason and self.negative_slope < 0:
            reason = "'negative_slope' is below zero"
        if reason:
            if size is None and isinstance(edge_index, Adjacency):
                size = edge_index.shape[::-1]
            rest = edge_attr, size, return_attention_weights
            return self._run_pyg(reason, x, edge_index, *rest)
        self.path = "fused"
        heads, width = self.heads, self.out_channels
        own = x if isinstance(x, Tensor) else x[1]
        lin = self.lin if self.lin is not None else self.lin_src
        source = apply_rowwise(lin, x if isinstance(x, Tensor) else x[0]).view(-1, heads, width)
        if isinstance(x, Tensor) and self.lin is not None:
            target = source
        elif self.lin is not None and is_leading_view(x[0], own):
            target = source[: own.size(0)]  # They are transformed already.
        else:
            lin = self.lin if self.lin is not None else self.lin_dst
            target = lin(own).view(-1, heads, width)
        adj = edge_index.with_self_loops() if self.add_self_loops else edge_index
        by_source = (source * self.att_src).sum(dim=-1)
        by_target = (target * self.att_dst).sum(dim=-1)
        how = self.negative_slope, self.dropout, self.training
        return self._combine_heads(gat_attention(adj, source, by_source, by_target, *how), own)


class GATv2Conv(_AttentionConv, pyg.GATv2Conv):
    """:class:`torch_geometric.nn.GATv2Conv`, without anything of the size of the edges."""

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """See PyG."""
        reason = self._reason_pyg(x, edge_index, edge_attr, return_attention_weights)
        if reason:
            return self._run_pyg(reason, x, edge_index, edge_attr, return_attention_weights)
        self.path = "fused"
        whole, own = (x, x) if isinstance(x, Tensor) else x
        source = apply_rowwise(self.lin_l, whole).view(-1, self.heads, self.out_channels)
        if self.lin_l is self.lin_r and (own is whole or is_leading_view(whole, own)):
            target = source[: own.size(0)]  # They are transformed already.
        else:
            target = self.lin_r(own).view(-1, self.heads, self.out_channels)
        adj = edge_index.with_self_loops() if self.add_self_loops else edge_index
        how = self.negative_slope, self.dropout, self.training
        return self._combine_heads(gatv2_attention(adj, source, target, self.att[0], *how), own)
