"""Fused aggregation with weights from a mixture of Gaussians, as in MoNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from gas.graph import Adjacency
from gas.history import Rows
from gas.native import Matrix, Mixture, custom_op
from gas.native import mixture as kernels
from gas.nn.conv import FusedConv, apply_rowwise, to_tensors
from gas.nn.half import HALF, compute_dtype, message_dtype
from gas.nn.spmm import NONE, check_features, check_tensors


def _make_mixture(*tensors: Tensor) -> Mixture:
    """Make a mixture of contiguous tensors."""
    return Mixture(*(tensor.contiguous() for tensor in tensors))


@custom_op("gas::mixture_spread", "gas.nn.gaussian_mixture")
def _spread(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    mixture = _make_mixture(pseudo, mu, sigma)
    return kernels.spread(Matrix(*matrix), mixture, x.contiguous(), mean, transposed)


@_spread.register_fake
def _(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    m = Matrix(*matrix)
    return x.new_empty(m.num_cols if transposed else m.num_rows, mu.size(0), x.size(1))


@custom_op("gas::mixture_collapse", "gas.nn.gaussian_mixture")
def _collapse(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    mixture = _make_mixture(pseudo, mu, sigma)
    return kernels.collapse(Matrix(*matrix), mixture, x.contiguous(), mean, transposed)


@_collapse.register_fake
def _(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    m = Matrix(*matrix)
    return x.new_empty(m.num_cols if transposed else m.num_rows, x.size(2))


@custom_op("gas::mixture_backward", "gas.nn.gaussian_mixture")
def _backward(
    matrix: Sequence[Tensor],
    own: Tensor,
    other: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    keep_out: bool,
    keep_pseudo: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixture = _make_mixture(pseudo, mu, sigma)
    sides = own.contiguous(), other.contiguous()
    return kernels.backward(Matrix(*matrix), mixture, *sides, keep_out, keep_pseudo, transposed)


@_backward.register_fake
def _(
    matrix: Sequence[Tensor],
    own: Tensor,
    other: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    keep_out: bool,
    keep_pseudo: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        own.new_empty(own.shape if keep_out else 0),
        pseudo.new_empty(pseudo.shape if keep_pseudo else 0),
        mu.new_empty(mu.shape),
        sigma.new_empty(sigma.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, x, pseudo, mu, sigma, ctx.mean, ctx.transposed = inputs
    ctx.save_for_backward(*matrix, x, pseudo, mu, sigma)


def _divide_by_degree(ctx: Any, parts: Sequence[Tensor], grad: Tensor) -> Tensor:
    if not ctx.mean:
        return grad
    count = Matrix(*parts).rowptr.diff().clamp(min=1).to(grad.dtype)
    return grad / count.view(-1, *[1] * (grad.dim() - 1))


def _spread_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, x, pseudo, mu, sigma = ctx.saved_tensors
    grad = _divide_by_degree(ctx, parts, grad)
    grads: list[Tensor | None] = [None] * 4
    needed = ctx.needs_input_grad[1:5]
    if needed[0]:
        grads[0] = _collapse(parts, grad, pseudo, mu, sigma, False, not ctx.transposed)
    if any(needed[1:]):
        keep = False, needed[1], ctx.transposed
        _, *grads[1:] = _backward(parts, grad, x, pseudo, mu, sigma, *keep)
    return NONE, *(g if n else None for g, n in zip(grads, needed, strict=True)), None, None


def _collapse_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, x, pseudo, mu, sigma = ctx.saved_tensors
    grad = _divide_by_degree(ctx, parts, grad)
    grads: Sequence[Tensor | None] = [None] * 4
    needed = ctx.needs_input_grad[1:5]
    if any(needed[1:]):
        keep = needed[0], needed[1], not ctx.transposed
        grads = _backward(parts, x, grad, pseudo, mu, sigma, *keep)
    elif needed[0]:
        grads = _spread(parts, grad, pseudo, mu, sigma, False, not ctx.transposed), *grads[1:]
    return NONE, *(g if n else None for g, n in zip(grads, needed, strict=True)), None, None


_spread.register_autograd(_spread_grad, setup_context=_setup)
_collapse.register_autograd(_collapse_grad, setup_context=_setup)


def gaussian_mixture(
    adj: Adjacency,
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    reduce: str = "mean",
) -> Tensor:
    """Aggregate neighbours by weights that depend on the coordinates of each edge.

    ``out[i] = sum of w_k(pseudo[i, j]) * x[j, k]`` over kernels ``k`` and edges ``j -> i``, with
    ``w_k(u) = exp(-1/2 sum over d of (u_d - mu_kd)^2 / (1e-15 + sigma_kd^2))``. Weights are
    computed again in the backward pass; nothing has their size. Deterministic.

    With ``x`` of shape ``[cols, width]``, all kernels read the same rows, and the output has a row
    for each: ``out[i, k] = sum of w_k(pseudo[i, j]) * x[j]``. A linear layer may be applied before
    the first form or after the second; the cheaper order depends on the graph.

    Source: Monti et al., *Geometric Deep Learning on Graphs and Manifolds Using Mixture Model
    CNNs*, CVPR 2017, equations 9 and 11; the way of computing it, Zhang et al., *Understanding GNN
    Computational Graph*, MLSys 2022.

    Args:
        adj: The edges, of shape ``[rows, cols]``; values are ignored.
        x: Features of the sources, of shape ``[cols, kernels, width]`` or ``[cols, width]``,
            float32, float64, or bfloat16 or float16, which are added up in float32.
        pseudo: Coordinates of the edges, of shape ``[E, dims]``, in the order of the entries of
            ``adj``; gradients reach them.
        mu: The means, of shape ``[kernels, dims]``.
        sigma: The standard deviations, of shape ``[kernels, dims]``.
        reduce: ``"sum"``, or ``"mean"`` over the number of edges. (default: ``"mean"``)

    Returns:
        Of shape ``[rows, width]``, or ``[rows, kernels, width]``, and the type of ``x``; of
        float16, the type of a message, which is that of the Gaussians if that is wider.

    Raises:
        ValueError: If shapes or types don't fit, naming the argument.
    """
    if reduce not in ("sum", "mean"):
        raise ValueError(f"'reduce' is {reduce!r}, expected one of sum, mean")
    check_features(adj, x, 2 if isinstance(x, Tensor) and x.dim() == 2 else 3)
    check_tensors(adj, pseudo=pseudo, mu=mu, sigma=sigma)
    if mu.dim() != 2 or (x.dim() == 3 and mu.size(0) != x.size(1)):
        kernels = x.size(1) if x.dim() == 3 else "kernels"
        raise ValueError(f"'mu' has shape {list(mu.shape)}, expected [{kernels}, dims]")
    if sigma.shape != mu.shape:
        raise ValueError(f"'sigma' has shape {list(sigma.shape)}, expected {list(mu.shape)}")
    if pseudo.shape != (adj.num_entries, mu.size(1)):
        raise ValueError(
            f"'pseudo' has shape {list(pseudo.shape)}, expected [{adj.num_entries}, {mu.size(1)}]: "
            "coordinates of each edge"
        )
    kind = message_dtype(x, pseudo, mu, sigma)
    x = x.to(compute_dtype(kind)) if x.dtype == HALF else x
    mixture = (
        pseudo.to(compute_dtype(kind)),
        mu.to(compute_dtype(kind)),
        sigma.to(compute_dtype(kind)),
    )
    operator = _spread if x.dim() == 2 else _collapse
    return operator(adj.matrix, x, *mixture, reduce == "mean", False).to(kind)


class GMMConv(FusedConv, pyg.GMMConv):
    """:class:`torch_geometric.nn.GMMConv`; sums before or after the linear layer, as is cheaper."""

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
    ) -> Tensor:
        """See PyG; without ``edge_attr``, values of the adjacency are the coordinates."""
        if not isinstance(edge_index, Adjacency):
            return super().forward(to_tensors(x), edge_index, edge_attr, size)
        pseudo = edge_attr
        if pseudo is None:
            if edge_index.value is None or self.dim != 1:
                raise ValueError(
                    "'edge_attr' is None, expected coordinates of shape "
                    f"[{edge_index.num_entries}, {self.dim}], in the order of the entries of the "
                    "adjacency"
                )
            pseudo = edge_index.value[:, None]
        reason = self._reason_not_fused({})
        if reason:
            out = super().forward(to_tensors(x), edge_index.to_edge_index()[0], pseudo, size)
            self.path = f"pyg: {reason}"
            return out
        self.path = "fused"
        source, own = (x, x) if isinstance(x, Tensor) else x
        mixture = pseudo, self.mu, self.sigma, self._reduce
        weight = self.g.view(-1, self.kernel_size, self.out_channels)  # [in, kernels, out]
        if should_sum_first(edge_index, source, self.kernel_size, self.out_channels):
            sums = gaussian_mixture(edge_index, to_tensors(source), *mixture)  # [rows, kernels, in]
            out = sums.flatten(1) @ weight.transpose(0, 1).flatten(0, 1)
            out = out.to(message_dtype(out, *mixture[:3]))  # Under autocast, it may be float16.
        else:
            transformed = apply_rowwise(lambda rows: rows @ self.g, source).view(
                -1, self.kernel_size, self.out_channels
            )
            out = gaussian_mixture(edge_index, transformed, *mixture)
        if self.root_weight and own is not None:
            out = out + self.root(own)
        return out if self.bias is None else out + self.bias

    def _reason_not_fused(self, kwargs: dict[str, Any]) -> str:
        if self.separate_gaussians:
            return "separate_gaussians=True"
        if self._reduce in ("max", "min"):
            return f"aggr={self.aggr!r} is none of sum, mean"
        return super()._reason_not_fused(kwargs)


# The cost of an element of a product that computes its weights, in multiplications of a dense
# product. In a product with given weights, it is 4 to 34, depending on degree and width.
SPARSE_COST = 10


def should_sum_first(adj: Adjacency, x: Tensor | Rows, kernels: int, out_channels: int) -> bool:
    """Return whether summing each kernel's rows before the linear layer costs less than after it.

    Both orders make a pass over the edges with a row per kernel, and one with a row for all. They
    differ mostly in the dense product, which is over the rows or over the columns.
    """
    rows, cols = adj.shape
    again = 1 if x.requires_grad else 0
    product = kernels * x.size(1) * out_channels
    before = SPARSE_COST * adj.num_entries * x.size(1) * (2 + again * kernels) + 3 * rows * product
    after = SPARSE_COST * adj.num_entries * out_channels * (1 + kernels)
    return before <= after + (2 + again) * cols * product
