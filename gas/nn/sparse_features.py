"""Linear layers for sparse features, which multiply only the non-zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gas.graph import Adjacency, adjacency_from_csr, version
from gas.history import cache_row_starts
from gas.native import TYPES, csr_parts, is_sparse, sparse_csr
from gas.nn.spmm import spmm

# The adjacency of each living matrix, which caches its transpose for gradients, with the version of
# the matrix. The result of dropout has the same adjacency.
_ADJACENCIES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x W^T + b`` from the non-zeros of sparse features.

    Deterministic, forward and backward: the gradient towards ``weight`` is a product by the
    transpose, which is computed once per matrix. float16 is computed in float32.

    Args:
        x: Features, of shape ``[N, F]``, a ``torch.sparse_csr`` matrix, or a dense tensor of any
            shape, which PyTorch multiplies.
        weight: The weight, of shape ``[out, F]``. Values of ``x`` are converted to its type.
        bias: The bias, of shape ``[out]``. (default: none)

    Returns:
        Of shape ``[N, out]``, dense.

    Raises:
        ValueError: If the shapes don't fit, or ``x`` is sparse in another layout.
    """
    if x.layout == torch.strided:
        return F.linear(x, weight, bias)
    check_layout(x)
    if weight.dim() != 2 or weight.size(1) != x.size(1):
        raise ValueError(
            f"'weight' has shape {list(weight.shape)}, expected [out, {x.size(1)}]: a column for "
            f"each of the features of 'x', which has shape {list(x.shape)}"
        )
    kind = weight.dtype if weight.dtype in TYPES else torch.float32
    adj = _find_adjacency(x).with_value(x.values())
    out = spmm(adj, weight.t().to(kind)).to(weight.dtype)
    return out if bias is None else out + bias


def check_layout(x: Tensor) -> None:
    """Raise ``ValueError`` unless a tensor is dense, or a ``torch.sparse_csr`` matrix."""
    if x.layout not in (torch.strided, torch.sparse_csr):
        raise ValueError(
            f"'x' is {x.layout}, expected a dense tensor or torch.sparse_csr: pass "
            "x.to_sparse_csr()"
        )


def replace_values(x: Tensor, value: Tensor) -> Tensor:
    """Return sparse features with other values ``[entries]``; the transpose is shared."""
    known = _find_adjacency(x)
    rowptr, col, _ = csr_parts(x)
    out = cache_row_starts(sparse_csr(rowptr, col, value, x.size(1)), x)
    _ADJACENCIES[out] = known, version(out)
    return out


def _find_adjacency(x: Tensor) -> Adjacency:
    """Return the adjacency of the entries of sparse features, without values."""
    known = _ADJACENCIES.get(x)
    if known is None or known[1] != version(x):
        rowptr, col, _ = csr_parts(x)
        known = adjacency_from_csr(rowptr, col, None, x.size(1)), version(x)
        _ADJACENCIES[x] = known
    return known[0]


class Linear(torch.nn.Linear):
    """:class:`torch.nn.Linear` that takes sparse features, by :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """See :func:`linear`."""
        if is_sparse(input):
            return linear(input, self.weight, self.bias)
        return super().forward(input)


class PyGLinear(pyg.Linear):
    """The linear layer of PyG's convolutions and models that takes sparse features."""

    def forward(self, x: Tensor) -> Tensor:
        """See :func:`linear`."""
        if is_sparse(x):
            return linear(x, self.weight, self.bias)
        return super().forward(x)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, "Linear", 1)


LINEAR: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.Linear: Linear,
    pyg.Linear: PyGLinear,
}
LINEAR_LAYERS = (*LINEAR, *LINEAR.values())


def accept_sparse_features(module: torch.nn.Module) -> None:
    """Make the linear layers of a module take sparse features, in place."""
    for layer in module.modules():
        layer.__class__ = LINEAR.get(type(layer), type(layer))


def has_hooks(layer: torch.nn.Module) -> bool:
    """Return whether a layer has hooks, global ones included."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        any(getattr(layer, name) for name in hooks)
        or torch.nn.modules.module._has_any_global_hook()
    )


def is_linear(layer: torch.nn.Module) -> bool:
    """Return whether a layer is linear and has no hooks."""
    return type(layer) in LINEAR_LAYERS and not has_hooks(layer)
