"""Attention scored by both ends together, without anything of the size of the edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gas import _attention_v2
from gas._operators import Dropout, Matrix
from gas.nn.adjacency import Adjacency
from gas.nn.attention import check_dropout, draw_seed
from gas.nn.custom_op import custom_op
from gas.nn.spmm import NONE, check_features


@custom_op("gas::gatv2_attention")
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
    return _attention_v2.attention_v2(Matrix(*matrix), *tensors, slope, Dropout(p, int(seed)))


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


@custom_op("gas::gatv2_attention_backward")
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
    return _attention_v2.attention_v2_backward(Matrix(*matrix), *tensors, *how, *state)


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
    """Attention over each node's neighbours whose ranking depends on the node, as in GATv2.

    ``out[i, h] = sum of softmax_j(<att[h], leaky_relu(source[j, h] + target[i, h])>) * source[j,
    h]`` over the edges ``j -> i``, zero where there are none. Nothing of the size of the edges is
    stored: the backward pass computes scores again, and draws dropout's random numbers again.
    Deterministic.

    Source: Brody et al., *How Attentive are Graph Attention Networks?*, ICLR 2022; the way of
    computing it, Zhang et al., *Understanding GNN Computational Graph*, MLSys 2022.

    Args:
        adj: The edges, of shape ``[rows, cols]``; values are ignored.
        source: Features of the sources, of shape ``[cols, heads, width]``, float32, float64, or
            bfloat16, which is added up in float32.
        target: Features of the destinations, of shape ``[rows, heads, width]``, of the same type.
        att: What scores are made with, of shape ``[heads, width]``.
        negative_slope: Of the leaky ReLU below zero. (default: ``0.2``)
        dropout: Probability of dropping an attention weight, in ``[0, 1)``. (default: ``0.0``)
        training: Whether to drop at all. (default: ``True``)

    Returns:
        Of shape ``[rows, heads, width]``.

    Raises:
        ValueError: If shapes, types or numbers don't fit, naming the argument.
    """
    check_features(adj, source, 3, "source")
    shape = (adj.size(0), *source.shape[1:])
    if target.shape != shape or target.dtype != source.dtype:
        raise ValueError(
            f"'target' is {target.dtype} of shape {list(target.shape)}, expected {source.dtype} of "
            f"shape {list(shape)}: a row for each row of 'adj'"
        )
    if att.shape != shape[1:]:
        raise ValueError(f"'att' has shape {list(att.shape)}, expected {list(shape[1:])}")
    check_dropout(dropout)
    att = att.to(torch.float32 if source.dtype == torch.bfloat16 else source.dtype)
    p = dropout if training else 0.0
    return _attention(adj.matrix, source, target, att, negative_slope, p, draw_seed(p))[0]
