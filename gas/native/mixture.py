"""Sums over neighbours weighted by Gaussians: operators, derivatives, and pure-torch twins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.custom_op import custom_op
from gas.native.matrix import (
    NONE,
    TYPES,
    Matrix,
    divide_by_degree,
    native_matrix,
    native_transpose,
    run_typed,
    sum_type,
)

EPS = 1e-15  # PyG's, of variances.


class Mixture(NamedTuple):
    """Gaussians on the coordinates of edges, float32 for features in bfloat16, all contiguous.

    ``pseudo`` of shape ``[entries, dims]``, ``mu`` and ``sigma`` of shape ``[kernels, dims]``.
    """

    pseudo: Tensor
    mu: Tensor
    sigma: Tensor

    @staticmethod
    def of(*tensors: Tensor) -> Mixture:
        """Make a mixture of tensors that may not be contiguous."""
        return Mixture(*(tensor.contiguous() for tensor in tensors))

    def weights(self) -> Tensor:
        """Return the weight of every entry and kernel, of shape ``[entries, kernels]``."""
        gap = self.pseudo[:, None] - self.mu
        return (-0.5 * gap.square() / (EPS + self.sigma.square())).sum(dim=-1).exp()

    def to_native(self) -> object:
        """Return the mixture in the form of the kernels."""
        addresses = (tensor.data_ptr() for tensor in self)
        return getattr(native.C, f"Mixture_{TYPES[self.mu.dtype]}")(*self.mu.shape, *addresses)


@custom_op("gas::mixture_spread", "gas.nn.gaussian_mixture")
def spread(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    """Sum rows, weighted by each kernel, over the entries of each row.

    Args:
        matrix: The fields of a :class:`Matrix`.
        x: Of shape ``[cols, width]``; ``[rows, width]`` if ``transposed``.
        pseudo: See :class:`Mixture`.
        mu: See :class:`Mixture`.
        sigma: See :class:`Mixture`.
        mean: Divide by the number of entries.
        transposed: Sum over the entries of each column instead.

    Returns:
        Of shape ``[rows, kernels, width]``; ``[cols, kernels, width]`` if ``transposed``.
    """
    m, x, mixture = Matrix(*matrix), x.contiguous(), Mixture.of(pseudo, mu, sigma)
    if not native.has_kernels(x, *mixture, m.col):
        source = x[_entry_ends(m, transposed)[1]][:, None]
        rows = source.to(sum_type(x)) * mixture.weights()[:, :, None]
        return _add_up(m, rows, mean, transposed, x.dtype)
    out = _new_spread(m, x, *mixture, mean, transposed)
    side = native_transpose(m) if transposed else native_matrix(m)
    run_typed("mixture_spread", x, side, mixture.to_native(), x, x.size(1), mean, out)
    return out


@spread.register_fake
def _new_spread(
    matrix: Sequence[Tensor], x: Tensor, pseudo: Tensor, mu: Tensor, *how: Any
) -> Tensor:
    return x.new_empty(_num_sums(Matrix(*matrix), how[-1]), mu.size(0), x.size(1))


@custom_op("gas::mixture_collapse", "gas.nn.gaussian_mixture")
def collapse(
    matrix: Sequence[Tensor],
    x: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    mean: bool,
    transposed: bool,
) -> Tensor:
    """Sum rows of each kernel, weighted by it, over kernels and the entries of each row.

    ``x`` has the shape of the result of :func:`spread`, and the result that of its ``x``, with rows
    and columns exchanged.
    """
    m, x, mixture = Matrix(*matrix), x.contiguous(), Mixture.of(pseudo, mu, sigma)
    if not native.has_kernels(x, *mixture, m.col):
        rows = x[_entry_ends(m, transposed)[1]].to(sum_type(x)) * mixture.weights()[:, :, None]
        return _add_up(m, rows.sum(dim=1), mean, transposed, x.dtype)
    out = _new_collapse(m, x, mean, transposed)
    side = native_transpose(m) if transposed else native_matrix(m)
    run_typed("mixture_collapse", x, side, mixture.to_native(), x, x.size(2), mean, out)
    return out


@collapse.register_fake
def _new_collapse(matrix: Sequence[Tensor], x: Tensor, *how: Any) -> Tensor:
    return x.new_empty(_num_sums(Matrix(*matrix), how[-1]), x.size(2))


@custom_op("gas::mixture_backward", "gas.nn.gaussian_mixture")
def backward(
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
    """Return the gradients of Gaussian mixture weights, as of ``GMMConv``.

    The gradient towards a weight is ``<own[row], other[col]>``.

    Args:
        matrix: The fields of a :class:`Matrix`.
        own: Of shape ``[rows, kernels, width]``.
        other: Of shape ``[cols, width]``.
        pseudo: See :class:`Mixture`.
        mu: See :class:`Mixture`.
        sigma: See :class:`Mixture`.
        keep_out: Whether to return the :func:`spread` of ``other`` too.
        keep_pseudo: Whether ``pseudo`` requires a gradient.
        transposed: Exchange rows and columns.

    Returns:
        The spread and the gradients towards ``pseudo``, ``mu`` and ``sigma``; those
        that aren't required are empty.
    """
    m, mixture = Matrix(*matrix), Mixture.of(pseudo, mu, sigma)
    own, other = own.contiguous(), other.contiguous()
    if not native.has_kernels(own, other, *mixture, m.col):
        return _backward_torch(m, mixture, own, other, keep_out, keep_pseudo, transposed)
    made = _new_grads(m, own, other, *mixture, keep_out, keep_pseudo, transposed)
    out, grad_pseudo, *grads = made
    for grad in grads:  # Without rows, nothing runs on CUDA that would write zeros.
        grad.zero_()
    settings = native_transpose(m) if transposed else native_matrix(m), mixture.to_native()
    given = own, other, other.size(1), out if keep_out else None
    towards = [grad_pseudo if keep_pseudo else None, *grads]
    run_typed("mixture_backward", own, *settings, *given, towards)
    return made


@backward.register_fake
def _new_grads(
    matrix: Sequence[Tensor],
    own: Tensor,
    other: Tensor,
    pseudo: Tensor,
    mu: Tensor,
    sigma: Tensor,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keep_out, keep_pseudo, _ = how
    return (
        own.new_empty(own.shape if keep_out else 0),
        pseudo.new_empty(pseudo.shape if keep_pseudo else 0),
        mu.new_empty(mu.shape),
        sigma.new_empty(sigma.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    matrix, x, pseudo, mu, sigma, ctx.mean, ctx.transposed = inputs
    ctx.save_for_backward(*matrix, x, pseudo, mu, sigma)


def _spread_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, x, pseudo, mu, sigma = ctx.saved_tensors
    grad = divide_by_degree(Matrix(*parts), grad) if ctx.mean else grad
    grads: list[Tensor | None] = [None] * 4
    needed = ctx.needs_input_grad[1:5]
    if needed[0]:
        grads[0] = collapse(parts, grad, pseudo, mu, sigma, False, not ctx.transposed)
    if any(needed[1:]):
        keep = False, needed[1], ctx.transposed
        _, *grads[1:] = backward(parts, grad, x, pseudo, mu, sigma, *keep)
    return NONE, *(g if n else None for g, n in zip(grads, needed, strict=True)), None, None


def _collapse_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *parts, x, pseudo, mu, sigma = ctx.saved_tensors
    grad = divide_by_degree(Matrix(*parts), grad) if ctx.mean else grad
    grads: Sequence[Tensor | None] = [None] * 4
    needed = ctx.needs_input_grad[1:5]
    if any(needed[1:]):
        keep = needed[0], needed[1], not ctx.transposed
        grads = backward(parts, x, grad, pseudo, mu, sigma, *keep)
    elif needed[0]:
        grads = spread(parts, grad, pseudo, mu, sigma, False, not ctx.transposed), *grads[1:]
    return NONE, *(g if n else None for g, n in zip(grads, needed, strict=True)), None, None


spread.register_autograd(_spread_grad, setup_context=_setup)
collapse.register_autograd(_collapse_grad, setup_context=_setup)


def _num_sums(m: Matrix, transposed: bool) -> int:
    return m.num_cols if transposed else m.num_rows


def _entry_ends(m: Matrix, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the destination and the source row of every entry."""
    return (m.col.long(), m.row) if transposed else (m.row, m.col.long())


def _add_up(m: Matrix, rows: Tensor, mean: bool, transposed: bool, dtype: torch.dtype) -> Tensor:
    to, _ = _entry_ends(m, transposed)
    out = rows.new_zeros(_num_sums(m, transposed), *rows.shape[1:])
    out.index_add_(0, to, rows)
    if mean:
        count = torch.bincount(to, minlength=out.size(0)).clamp(min=1)
        out = out / count.view(-1, *[1] * (out.dim() - 1))
    return out.to(dtype)


def _backward_torch(
    m: Matrix,
    mixture: Mixture,
    own: Tensor,
    other: Tensor,
    keep_out: bool,
    keep_pseudo: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pseudo, mu, sigma = mixture
    to, source = _entry_ends(m, transposed)
    kind = sum_type(own)
    inner = (own[to].to(kind) * other[source].to(kind)[:, None]).sum(dim=-1)
    gap, inverse = pseudo[:, None] - mu, 1 / (EPS + sigma.square())
    through = (inner * mixture.weights())[:, :, None] * gap * inverse
    out = spread(m, other, *mixture, False, transposed) if keep_out else own.new_empty(0)
    return (
        out,
        -through.sum(dim=1) if keep_pseudo else pseudo.new_empty(0),
        through.sum(dim=0),
        (through * gap).sum(dim=0) * inverse * sigma,
    )
