"""Sums, means and extremes over neighbours; float16 in all operators, which compute in float32.

Under ``torch.autocast('cuda')``, linear layers return float16, and PyG's layers multiply it by
weights in float32, so that their messages are float32. Results here have the dtype of PyG's.
"""

from __future__ import annotations

from functools import reduce as fold

import torch
from torch import Tensor

from gas.graph import Adjacency
from gas.history import ROWS_HINT, Features, Rows
from gas.native import TYPES, gather_rows
from gas.native import sparse as kernels

HALF = torch.float16
REDUCES = ("sum", "mean", "max", "min")


def spmm(
    adj: Adjacency, x: Tensor | Rows, weight: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """Aggregate the rows of each node's neighbours: ``out[i]`` from ``x[j]`` for edges ``j -> i``.

    Deterministic: each row of the output, and of the gradient, is added up in one order. In
    :class:`gas.history.Rows`, halo rows get no gradient; sums and means read them in place, unless
    ``weight`` needs a gradient. On a GPU where
    :func:`gas.native.measure_costs.measure` found cuSPARSE faster, cuSPARSE computes sums in
    float32, unless ``torch.use_deterministic_algorithms`` is set.

    Args:
        adj: The edges, of shape ``[rows, cols]``.
        x: Features of the sources, of shape ``[cols, width]``, float32, float64, or bfloat16 or
            float16, which are added up in float32; a tensor or :class:`gas.history.Rows`.
        weight: The weight of each edge, of shape ``[E]``, of the type of ``x``; gradients reach it.
            (default: ``adj.value``; none for ``"max"`` and ``"min"``)
        reduce: ``"sum"``, ``"mean"`` (over the number of edges), ``"max"`` or ``"min"``; nodes
            without edges get zero. Of equal extremes, the first takes the gradient.
            (default: ``"sum"``)

    Returns:
        Of shape ``[rows, width]`` and the type of ``x``; of float16, the type of a message, which
        is that of an edge's weight if that is wider.

    Raises:
        ValueError: If shapes or types don't fit, naming the argument.
    """
    if reduce not in REDUCES:
        raise ValueError(f"'reduce' is {reduce!r}, expected one of {', '.join(REDUCES)}")
    check_features(adj, x, 2, takes_rows=True)
    if x.dtype == HALF:
        kind = HALF
        if weight is not None:
            check_tensors(adj, weight=weight)
            kind = message_dtype(x, weight)
            weight = weight.to(compute_dtype(kind))
        elif adj.value is not None and reduce in ("sum", "mean"):
            kind = message_dtype(x, adj.value)
        x = (x.tensor() if isinstance(x, Rows) else x).to(compute_dtype(kind))
        return spmm(adj, x, weight, reduce).to(kind)
    if reduce in ("max", "min"):
        if weight is not None:
            raise ValueError(f"'weight' is given, but reduce={reduce!r} has no use for it")
        if not isinstance(x, Rows):
            return kernels.extreme(adj.matrix_for(x), x, None, reduce == "max")[0]
        values = torch.cat([x.own.detach(), x.halo_tensor()])
        return kernels.extreme(adj.matrix_for(x.own), values, x.own, reduce == "max")[0]
    if weight is None and (sums := find_sums(adj, x, reduce)) is not None:
        assert isinstance(x, Features)
        return gather_rows(sums, x.index[: x.num_own])
    if weight is None and adj.value is not None:
        weight = adj.value.to(x.dtype)
    if weight is not None:
        check_tensors(adj, weight=weight)
        if weight.shape != adj.col.shape or weight.dtype != x.dtype:
            raise ValueError(
                f"'weight' is {weight.dtype} of shape {list(weight.shape)}, expected {x.dtype} of "
                f"shape [{adj.num_entries}]: one for each edge"
            )
        weight = weight.contiguous()
    other = place = None
    if isinstance(x, Rows):
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            x = x.tensor()  # The backward pass needs a copy, as rows may change.
        else:
            x, other, place = x.kernel_inputs()
    return kernels.multiply(
        adj.matrix_for(x), weight, x, other, place, reduce == "mean", False, None
    )


def find_sums(adj: Adjacency, x: Tensor | Rows, reduce: str = "sum") -> Tensor | None:
    """Return the sums of all nodes, if they were computed for the whole graph."""
    if not isinstance(x, Features) or x.find_sums is None or adj.size(0) != x.num_own:
        return None
    return x.find_sums(adj, reduce, spmm)


def check_features(
    adj: Adjacency, x: Tensor | Rows, dims: int, name: str = "x", takes_rows: bool = False
) -> None:
    """Raise ``ValueError`` unless ``x`` has a row for each source, of a dtype of the kernels.

    Raise ``TypeError`` for :class:`Rows`, unless ``takes_rows``.
    """
    if isinstance(x, Rows) and not takes_rows:
        raise TypeError(f"{name!r} is Rows, expected a tensor: {ROWS_HINT}")
    if not isinstance(adj, Adjacency):
        raise ValueError(
            f"'adj' is a {type(adj).__name__}, expected a gas.nn.Adjacency: use Adjacency.of(adj), "
            "or a loader with layout='fused'"
        )
    shape, num_cols = x.shape, adj.size(1)
    if len(shape) != dims or shape[0] != num_cols:
        raise ValueError(
            f"'{name}' has shape {list(shape)}, expected {dims} dimensions and one row for each "
            f"of the {num_cols} columns of 'adj'"
        )
    stored = x.prototype() if isinstance(x, Rows) else x
    check_tensors(adj, **{name: stored})
    if stored.dtype not in TYPES and stored.dtype != HALF:
        names = ", ".join((*TYPES.values(), "float16"))
        raise ValueError(f"'{name}' has dtype {stored.dtype}, expected one of {names}")


def check_tensors(adj: Adjacency, **tensors: Tensor) -> None:
    """Raise ``ValueError`` unless tensors are dense, real and on the adjacency's device."""
    device = adj.col.device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(
                f"'{name}' is on {tensor.device}, but 'adj' is on {device}: move one to the "
                "other, adj.to(device)"
            )
        if tensor.layout != torch.strided or tensor.is_complex():
            raise ValueError(
                f"'{name}' is {tensor.dtype} and {tensor.layout}, expected real numbers in a dense "
                "tensor"
            )


def message_dtype(x: Tensor | Rows, *weights: Tensor) -> torch.dtype:
    """Return the dtype of features times weights: that of ``x``, except for float16."""
    if x.dtype != HALF:
        return x.dtype
    return fold(torch.promote_types, (weight.dtype for weight in weights), x.dtype)


def compute_dtype(kind: torch.dtype) -> torch.dtype:
    """Return the dtype of weights and of results in kernels that are given ``kind``."""
    return torch.float32 if kind in (HALF, torch.bfloat16) else kind
