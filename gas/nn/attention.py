"""Fused graph attention: one pass over the edges, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from gas.graph import Adjacency
from gas.native import Dropout, Matrix, custom_op, learns
from gas.native import attention as kernels
from gas.nn.conv import FusedConv, apply_rowwise, is_leading_view, to_tensors
from gas.nn.half import HALF, compute_dtype, message_dtype
from gas.nn.spmm import NONE, check_features, check_tensors


@custom_op("gas::gat_attention", "gas.nn.gat_attention")
def _attention(
    matrix: Sequence[Tensor],
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = x.contiguous(), source.contiguous(), target.contiguous()
    return kernels.attention(Matrix(*matrix), *tensors, slope, Dropout(p, int(seed)), keep_state)


@_attention.register_fake
def _(
    matrix: Sequence[Tensor],
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    keep_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty(Matrix(*matrix).num_rows, x.size(1), x.size(2))
    maximum, total, weight = (torch.empty_like(target) for _ in range(3))
    positive = torch.empty_like(out) if keep_state else out.new_empty(0)
    return out, maximum, total, weight, positive


@custom_op("gas::gat_attention_backward", "gas.nn.gat_attention")
def _attention_backward(
    matrix: Sequence[Tensor],
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    weight: Tensor,
    positive: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.attention_backward(
        Matrix(*matrix),
        x.contiguous(),
        source.contiguous(),
        target.contiguous(),
        slope,
        Dropout(p, int(seed)),
        out,
        (maximum, total, weight, positive),
        grad.contiguous(),
    )


@_attention_backward.register_fake
def _(
    matrix: Sequence[Tensor],
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    p: float,
    seed: Tensor,
    out: Tensor,
    maximum: Tensor,
    total: Tensor,
    weight: Tensor,
    positive: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(source, memory_format=torch.contiguous_format),
        torch.empty_like(target, memory_format=torch.contiguous_format),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    matrix, x, source, target, slope, p, seed, _ = inputs
    ctx.slope, ctx.p = slope, p
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*matrix, x, source, target, seed, *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *matrix, x, source, target, seed, out, maximum, total, weight, positive = ctx.saved_tensors
    state = out, maximum, total, weight, positive
    tensors = x, source, target
    grads = _attention_backward(matrix, *tensors, ctx.slope, ctx.p, seed, *state, grad)
    return NONE, *grads, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


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
    if negative_slope < 0:
        raise ValueError(f"'negative_slope' is {negative_slope}, expected at least 0")
    check_dropout(dropout)
    kind = message_dtype(x, source, target)
    x = x.to(compute_dtype(kind)) if x.dtype == HALF else x
    p = dropout if training else 0.0
    seed = draw_seed(p, x.device)
    keep_state = learns(x, source, target)
    source, target = source.to(compute_dtype(kind)), target.to(compute_dtype(kind))
    out = _attention(adj.matrix, x, source, target, negative_slope, p, seed, keep_state)[0]
    return out.to(kind)


def check_dropout(dropout: float) -> None:
    """Raise ``ValueError`` unless ``dropout`` is a probability below 1."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"'dropout' is {dropout}, expected a probability in [0, 1)")


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


class GATConv(FusedConv, pyg.GATConv):
    """:class:`torch_geometric.nn.GATConv`, without anything of the size of the edges."""

    takes_sparse = True

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
            out = super().forward(
                to_tensors(x), edge_index, edge_attr, size, return_attention_weights
            )
            self.path = f"pyg: {reason}"
            return out
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
        reason = reason_attention_not_fused(self, adj, edge_attr, return_attention_weights)
        return reason or ("'negative_slope' is below zero" if self.negative_slope < 0 else "")


def reason_attention_not_fused(
    conv: Any, adj: Any, edge_attr: Any, return_attention_weights: Any
) -> str:
    """Return the reason why attention can't be fused; "" if it can."""
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
    return conv._reason_not_fused({})
