"""Fused GATv2 attention; nothing of the size of the edges is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gas.graph import Adjacency
from gas.native import Dropout, Matrix, custom_op
from gas.native import attention_v2 as kernels
from gas.nn.attention import check_dropout, draw_seed, reason_attention_not_fused
from gas.nn.conv import FusedConv, apply_rowwise, is_leading_view, to_tensors
from gas.nn.half import HALF, compute_dtype, message_dtype
from gas.nn.spmm import NONE, check_features, check_tensors


@custom_op("gas::gatv2_attention", "gas.nn.gatv2_attention")
def _attention(
    matrix: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = source.contiguous(), target.contiguous(), att.contiguous()
    return kernels.attention_v2(Matrix(*matrix), *tensors, slope, Dropout(p, int(seed)))


@_attention.register_fake
def _(
    matrix: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(target, memory_format=torch.contiguous_format)
    maximum, total = (att.new_empty(target.shape[:2]) for _ in range(2))
    return out, maximum, total


@custom_op("gas::gatv2_attention_backward", "gas.nn.gatv2_attention")
def _attention_backward(
    matrix: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = source.contiguous(), target.contiguous(), att.contiguous()
    how = slope, Dropout(p, int(seed))
    state = out, maximum, total, grad.contiguous()
    return kernels.attention_v2_backward(Matrix(*matrix), *tensors, *how, *state)


@_attention_backward.register_fake
def _(
    matrix: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    att: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(source, memory_format=torch.contiguous_format),
        torch.empty_like(target, memory_format=torch.contiguous_format),
        torch.empty_like(att, memory_format=torch.contiguous_format),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    matrix, source, target, att, ctx.slope, ctx.p, seed = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*matrix, source, target, att, seed, *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *matrix, source, target, att, seed, out, maximum, total = ctx.saved_tensors
    how, state = (ctx.slope, ctx.p, seed), (out, maximum, total)
    grads = _attention_backward(matrix, source, target, att, *how, *state, grad)
    return NONE, *grads, None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


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
    check_dropout(dropout)
    kind = message_dtype(source, att)
    if source.dtype == HALF:
        source, target = source.to(compute_dtype(kind)), target.to(compute_dtype(kind))
    att = att.to(compute_dtype(kind))
    p = dropout if training else 0.0
    seed = draw_seed(p, source.device)
    out = _attention(adj.matrix, source, target, att, negative_slope, p, seed)[0]
    return out.to(kind)


class GATv2Conv(FusedConv, pyg.GATv2Conv):
    """:class:`torch_geometric.nn.GATv2Conv`, without anything of the size of the edges."""

    takes_sparse = True

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """See PyG."""
        reason = reason_attention_not_fused(self, edge_index, edge_attr, return_attention_weights)
        if reason:
            if isinstance(edge_index, Adjacency):
                edge_index, _ = edge_index.to_edge_index()
            out = super().forward(to_tensors(x), edge_index, edge_attr, return_attention_weights)
            self.path = f"pyg: {reason}"
            return out
        self.path = "fused"
        whole, own = (x, x) if isinstance(x, Tensor) else x
        source = apply_rowwise(self.lin_l, whole).view(-1, self.heads, self.out_channels)
        if self.lin_l is self.lin_r and (own is whole or is_leading_view(whole, own)):
            target = source[: own.size(0)]  # They are transformed already.
        else:
            target = self.lin_r(own).view(-1, self.heads, self.out_channels)
        adj = edge_index.with_self_loops() if self.add_self_loops else edge_index
        how = self.negative_slope, self.dropout, self.training
        out = gatv2_attention(adj, source, target, self.att[0], *how)
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None:
            out = out + self.res(own)
        return out if self.bias is None else out + self.bias
