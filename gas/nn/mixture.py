"""Sums over neighbours with weights from a mixture of Gaussians, as in MoNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gas import _mixture
from gas._mixture import Mixture
from gas._operators import Matrix
from gas.nn.adjacency import Adjacency
from gas.nn.custom_op import custom_op
from gas.nn.spmm import NONE, check_features


def _contiguous(*tensors: Tensor) -> Mixture:
    return Mixture(*(tensor.contiguous() for tensor in tensors))


@custom_op("gas::mixture_spread")
def _spread(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    mixture = _contiguous(pseudo, mu, sigma)
    return _mixture.spread(Matrix(*matrix), mixture, x.contiguous(), mean, transposed)


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


@custom_op("gas::mixture_collapse")
def _collapse(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    mixture = _contiguous(pseudo, mu, sigma)
    return _mixture.collapse(Matrix(*matrix), mixture, x.contiguous(), mean, transposed)


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


@custom_op("gas::mixture_backward")
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
    mixture = _contiguous(pseudo, mu, sigma)
    sides = own.contiguous(), other.contiguous()
    return _mixture.backward(Matrix(*matrix), mixture, *sides, keep_out, keep_pseudo, transposed)


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


def _divided(ctx: Any, parts: Sequence[Tensor], grad: Tensor) -> Tensor:
    if not ctx.mean:
        return grad
    count = Matrix(*parts).rowptr.diff().clamp(min=1).to(grad.dtype)
    return grad / count.view(-1, *[1] * (grad.dim() - 1))


def _spread_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, x, pseudo, mu, sigma = ctx.saved_tensors
    grad = _divided(ctx, parts, grad)
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
    grad = _divided(ctx, parts, grad)
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
    """Aggregates neighbours by weights that depend on the coordinates of each edge.

    ``out[i] = sum of w_k(pseudo[i, j]) * x[j, k]`` over kernels ``k`` and edges ``j -> i``, with
    ``w_k(u) = exp(-1/2 sum over d of (u_d - mu_kd)^2 / (1e-15 + sigma_kd^2))``. Weights are
    computed again in the backward pass; nothing has their size. Deterministic.

    If all kernels read the same, ``x`` of shape ``[cols, width]``, each kernel has its own row of
    the output, ``out[i, k] = sum of w_k(pseudo[i, j]) * x[j]``. A linear layer may come before the
    one or after the other; what is cheaper depends on the graph.

    Source: Monti et al., *Geometric Deep Learning on Graphs and Manifolds Using Mixture Model
    CNNs*, CVPR 2017, equations 9 and 11; the way of computing it, Zhang et al., *Understanding GNN
    Computational Graph*, MLSys 2022.

    Args:
        adj: The edges, of shape ``[rows, cols]``; values are ignored.
        x: Features of the sources, of shape ``[cols, kernels, width]`` or ``[cols, width]``,
            float32, float64, or bfloat16, which is added up in float32.
        pseudo: Coordinates of the edges, of shape ``[E, dims]``, in the order of the entries of
            ``adj``; gradients reach them.
        mu: The means, of shape ``[kernels, dims]``.
        sigma: The standard deviations, of shape ``[kernels, dims]``.
        reduce: ``"sum"``, or ``"mean"`` over the number of edges. (default: ``"mean"``)

    Returns:
        Of shape ``[rows, width]``, or ``[rows, kernels, width]``.

    Raises:
        ValueError: If shapes or types don't fit, naming the argument.
    """
    if reduce not in ("sum", "mean"):
        raise ValueError(f"'reduce' is {reduce!r}, expected one of sum, mean")
    check_features(adj, x, 2 if isinstance(x, Tensor) and x.dim() == 2 else 3)
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
    kind = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    mixture = pseudo.to(kind), mu.to(kind), sigma.to(kind)
    operator = _spread if x.dim() == 2 else _collapse
    return operator(adj.matrix, x, *mixture, reduce == "mean", False)
