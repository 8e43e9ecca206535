"""Fused edge convolution; nothing of the size of the edges is stored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor

from gas.graph import Adjacency
from gas.native import edge_conv as kernels
from gas.native import learns
from gas.nn.conv import FusedConv, apply_rowwise
from gas.nn.sparse_features import LINEAR_LAYERS, has_hooks
from gas.nn.spmm import HALF, REDUCES, check_features, check_tensors, spmm

# The kernel's name and the parameter's attribute by class.
ACTIVATIONS: dict[type[torch.nn.Module], tuple[str, str]] = {
    torch.nn.ReLU: ("relu", ""),
    torch.nn.LeakyReLU: ("leaky_relu", "negative_slope"),
    torch.nn.ELU: ("elu", "alpha"),
    torch.nn.Sigmoid: ("sigmoid", ""),
    torch.nn.Tanh: ("tanh", ""),
}


def kernel_activation(module: torch.nn.Module | None, reduce: str) -> tuple[str, float]:
    """Return the kernels' name of an activation and its parameter; ``"identity"`` for none.

    Raises:
        ValueError: If :func:`edge_conv` doesn't support it, or it isn't monotonic with ``"max"`` or
            ``"min"``.
    """
    if module is None or type(module) is torch.nn.Identity:
        return "identity", 0.0
    if type(module) not in ACTIVATIONS:
        known = ", ".join(cls.__name__ for cls in ACTIVATIONS)
        raise ValueError(
            f"'activation' is {module!r}, expected None or a torch.nn module of Identity, {known}"
        )
    name, attribute = ACTIVATIONS[type(module)]
    parameter = float(getattr(module, attribute)) if attribute else 0.0
    if parameter < 0 and reduce in ("max", "min"):
        raise ValueError(
            f"'activation' is {module!r}, expected '{attribute}' of at least 0 with "
            f"reduce={reduce!r}: one that never falls"
        )
    return name, parameter


def edge_conv(
    adj: Adjacency,
    target: Tensor,
    source: Tensor,
    activation: torch.nn.Module | None = None,
    reduce: str = "max",
) -> Tensor:
    """Aggregate a function of both ends: ``act(target[i] + source[j])`` for edges ``j -> i``.

    An edge function that is linear in the features of both ends, ``W [x_i, x_j - x_i] + b`` in
    EdgeConv, needs a product for each node instead of each edge: ``target = (W_1 - W_2) x + b``
    and ``source = W_2 x``. For ``"max"`` and ``"min"``, a monotonic activation is applied to the
    aggregated rows. For ``"sum"`` and ``"mean"``, the backward pass computes derivatives again.
    Deterministic.

    Source: Wang et al., *Dynamic Graph CNN for Learning on Point Clouds*, ACM TOG 2019; the way of
    computing it, Zhang et al., *Understanding GNN Computational Graph*, MLSys 2022.

    Args:
        adj: The edges, of shape ``[rows, cols]``; values are ignored.
        target: Of the destinations, of shape ``[rows, width]``, of the type of ``source``.
        source: Of the sources, of shape ``[cols, width]``, float32, float64, or bfloat16 or
            float16, which are added up in float32.
        activation: A module ``ReLU``, ``LeakyReLU``, ``ELU``, ``Sigmoid``, ``Tanh`` or
            ``Identity`` of ``torch.nn``. (default: none)
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; nodes without edges get zero. Of
            equal extremes, the first takes the gradient. (default: ``"max"``)

    Returns:
        Of shape ``[rows, width]`` and the type of ``source``.

    Raises:
        ValueError: If shapes, types, or the activation don't fit, naming the argument.
    """
    if reduce not in REDUCES:
        raise ValueError(f"'reduce' is {reduce!r}, expected one of {', '.join(REDUCES)}")
    check_features(adj, source, 2, "source")
    check_tensors(adj, target=target)
    if target.shape != (adj.size(0), source.size(1)) or target.dtype != source.dtype:
        raise ValueError(
            f"'target' is {target.dtype} of shape {list(target.shape)}, expected {source.dtype} of "
            f"shape [{adj.size(0)}, {source.size(1)}]: a row for each row of 'adj'"
        )
    if source.dtype == HALF:
        return edge_conv(adj, target.float(), source.float(), activation, reduce).to(HALF)
    name, parameter = kernel_activation(activation, reduce)
    if reduce in ("sum", "mean") and name != "identity":
        keep_state = learns(target)
        mean = reduce == "mean"
        return kernels.edge_conv(adj.matrix, target, source, name, parameter, mean, keep_state)[0]
    out = spmm(adj.remove_values(), source, reduce=reduce)
    if reduce == "sum":
        return out + adj.degree().to(target.dtype)[:, None] * target
    out = out + target
    if activation is not None:
        out = activation(out)
    return out.masked_fill((adj.degree() == 0)[:, None], 0)


class EdgeConv(FusedConv, pyg.EdgeConv):
    """:class:`torch_geometric.nn.EdgeConv`, with products for nodes instead of edges.

    It is fused if ``nn`` is a linear layer, with or without an activation of
    :func:`gas.nn.edge_conv`. The difference ``x_j - x_i`` is taken after the product, which loses
    precision if positions are large and differences small.
    """

    nn: torch.nn.Module

    def _reason_not_fused(self, adj: Adjacency) -> str:
        reason = super()._reason_not_fused(adj)
        if reason:
            return reason
        layers = _list_layers(self.nn)
        if type(layers[0]) not in LINEAR_LAYERS or len(layers) > 2:
            return "'nn' is more than a linear layer and an activation"
        if any(map(has_hooks, (self.nn, *layers))):
            return "'nn' has hooks"
        try:
            kernel_activation(layers[1] if len(layers) > 1 else None, self._reduce)
        except ValueError as error:
            return str(error)
        return ""

    def _propagate(self, adj: Adjacency, x: Any, **_: Any) -> Tensor:
        linear, activation = (*_list_layers(self.nn), None)[:2]
        by_target, by_difference = linear.weight.chunk(2, dim=1)
        target = F.linear(x[1], by_target - by_difference, linear.bias)
        source = apply_rowwise(lambda rows: F.linear(rows, by_difference), x[0])
        return edge_conv(adj, target, source, activation, self._reduce)


def _list_layers(module: Any) -> list[Any]:
    return list(module) if type(module) is torch.nn.Sequential and len(module) else [module]
