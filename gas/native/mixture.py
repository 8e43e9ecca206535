"""Sums over neighbours weighted by Gaussians: the native kernels, and their pure-torch twins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gas.native import extension as native
from gas.native.matrix import TYPES, Matrix, native_matrix, native_transpose, run_typed, sum_type

EPS = 1e-15  # PyG's, of variances.


class Mixture(NamedTuple):
    """Gaussians on the coordinates of edges, float32 for features in bfloat16, all contiguous.

    ``pseudo`` of shape ``[entries, dims]``, ``mu`` and ``sigma`` of shape ``[kernels, dims]``.
    """

    pseudo: Tensor
    mu: Tensor
    sigma: Tensor

    def weights(self) -> Tensor:
        """Return the weight of every entry and kernel, of shape ``[entries, kernels]``."""
        gap = self.pseudo[:, None] - self.mu
        return (-0.5 * gap.square() / (EPS + self.sigma.square())).sum(dim=-1).exp()

    def to_native(self) -> object:
        """Return the mixture in the form of the kernels."""
        addresses = (tensor.data_ptr() for tensor in self)
        return getattr(native.C, f"Mixture_{TYPES[self.mu.dtype]}")(*self.mu.shape, *addresses)


def spread(
    m: Matrix, mixture: Mixture, x: Tensor, mean: bool = False, transposed: bool = False
) -> Tensor:
    """Sum rows, weighted by each kernel, over the entries of each row.

    Args:
        m: The matrix.
        mixture: The weights of its entries.
        x: Of shape ``[cols, width]``, contiguous; ``[rows, width]`` if ``transposed``.
        mean: Divide by the number of entries. (default: ``False``)
        transposed: Sum over the entries of each column instead. (default: ``False``)

    Returns:
        Of shape ``[rows, kernels, width]``; ``[cols, kernels, width]`` if ``transposed``.
    """
    if not native.has_kernels(x, *mixture, m.col):
        source = x[_entry_ends(m, transposed)[1]][:, None]
        rows = source.to(sum_type(x)) * mixture.weights()[:, :, None]
        return _add_up(m, rows, mean, transposed, x.dtype)
    size = m.num_cols if transposed else m.num_rows
    out = x.new_empty(size, mixture.mu.size(0), x.size(1))
    matrix = native_transpose(m) if transposed else native_matrix(m)
    run_typed("mixture_spread", x, matrix, mixture.to_native(), x, x.size(1), mean, out)
    return out


def collapse(
    m: Matrix, mixture: Mixture, x: Tensor, mean: bool = False, transposed: bool = False
) -> Tensor:
    """Sum rows of each kernel, weighted by it, over kernels and the entries of each row.

    ``x`` has the shape of the result of :func:`spread`, and the result that of its ``x``, with rows
    and columns exchanged.
    """
    if not native.has_kernels(x, *mixture, m.col):
        rows = x[_entry_ends(m, transposed)[1]].to(sum_type(x)) * mixture.weights()[:, :, None]
        return _add_up(m, rows.sum(dim=1), mean, transposed, x.dtype)
    out = x.new_empty(m.num_cols if transposed else m.num_rows, x.size(2))
    matrix = native_transpose(m) if transposed else native_matrix(m)
    run_typed("mixture_collapse", x, matrix, mixture.to_native(), x, x.size(2), mean, out)
    return out


def backward(
    m: Matrix,
    mixture: Mixture,
    own: Tensor,
    other: Tensor,
    keep_out: bool,
    keep_pseudo: bool,
    transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of Gaussian mixture weights, as of ``GMMConv``.

    The gradient towards a weight is ``<own[row], other[col]>``.

    Args:
        m: The matrix.
        mixture: The weights of its entries.
        own: Of shape ``[rows, kernels, width]``, contiguous.
        other: Of shape ``[cols, width]``, contiguous.
        keep_out: Whether to return the :func:`spread` of ``other`` too.
        keep_pseudo: Whether ``pseudo`` requires a gradient.
        transposed: Exchange rows and columns. (default: ``False``)

    Returns:
        The spread and the gradients towards ``pseudo``, ``mu`` and ``sigma``; those
        that aren't required are empty.
    """
    if not native.has_kernels(own, other, *mixture, m.col):
        return _backward_torch(m, mixture, own, other, keep_out, keep_pseudo, transposed)
    pseudo, mu, sigma = mixture
    out = torch.empty_like(own) if keep_out else own.new_empty(0)
    grad_pseudo = torch.empty_like(pseudo) if keep_pseudo else pseudo.new_empty(0)
    # Without rows, nothing runs on CUDA that would write zeros.
    grad_mu, grad_sigma = torch.zeros_like(mu), torch.zeros_like(sigma)
    settings = native_transpose(m) if transposed else native_matrix(m), mixture.to_native()
    grads: list[Tensor | None] = [grad_pseudo if keep_pseudo else None, grad_mu, grad_sigma]
    given = own, other, other.size(1), out if keep_out else None
    run_typed("mixture_backward", own, *settings, *given, grads)
    return out, grad_pseudo, grad_mu, grad_sigma


def _entry_ends(m: Matrix, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the destination and the source row of every entry."""
    return (m.col.long(), m.row) if transposed else (m.row, m.col.long())


def _add_up(m: Matrix, rows: Tensor, mean: bool, transposed: bool, dtype: torch.dtype) -> Tensor:
    to, _ = _entry_ends(m, transposed)
    out = rows.new_zeros(m.num_cols if transposed else m.num_rows, *rows.shape[1:])
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
    out = spread(m, mixture, other, False, transposed) if keep_out else own.new_empty(0)
    return (
        out,
        -through.sum(dim=1) if keep_pseudo else pseudo.new_empty(0),
        through.sum(dim=0),
        (through * gap).sum(dim=0) * inverse * sigma,
    )
