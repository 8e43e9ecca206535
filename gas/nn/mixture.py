"""Fused aggregation with weights from a mixture of Gaussians, as in MoNet."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from gas.graph import Adjacency
from gas.history import Rows
from gas.native import mixture as kernels
from gas.nn.conv import FusedConv, apply_rowwise, to_tensors
from gas.nn.spmm import HALF, check_features, check_tensors, compute_dtype, message_dtype


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
        number = x.size(1) if x.dim() == 3 else "kernels"
        raise ValueError(f"'mu' has shape {list(mu.shape)}, expected [{number}, dims]")
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
    operator = kernels.spread if x.dim() == 2 else kernels.collapse
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
        reason = self._reason_not_fused(edge_index)
        if reason:
            return self._run_pyg(reason, x, edge_index, pseudo, size)
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

    def _reason_not_fused(self, adj: Adjacency) -> str:
        if self.separate_gaussians:
            return "separate_gaussians=True"
        if self._reduce in ("max", "min"):
            return f"aggr={self.aggr!r} is none of sum, mean"
        return super()._reason_not_fused(adj)


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
