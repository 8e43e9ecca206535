"""Errors of ``gas.nn``: operators, convolutions, dropout."""

from unittest import mock

import torch
from torch.autograd import forward_ad

from gas import nn
from gas.history.rows import Rows
from gas.nn import gat_attention, gatv2_attention, gaussian_mixture, spmm
from gas.nn.attention import draw_seed
from gas.nn.edge_conv import edge_conv, kernel_activation
from refusals import adjacency, ring

ADJ = adjacency()  # [2, 3], with 3 entries.
X, OWN, HEADS, PAIRS = torch.ones(3, 4), torch.ones(2, 4), torch.ones(3, 1, 4), torch.ones(2, 1, 4)
SCORES, POINTS, KERNELS = torch.ones(3, 1), torch.ones(3, 2), torch.ones(5, 2)
ROWS = Rows(HEADS[:2], HEADS[2:])
ELU = torch.nn.ELU(-0.5)


SPARSE = ADJ.to_torch_sparse()


TYPED = {("a", "to", "b"): torch.tensor([[0, 1], [0, 1]])}
WEIGHTED = adjacency(torch.ones(3))


def gat(source=SCORES, target=SCORES[:2], **options):
    gat_attention(ADJ, HEADS, source, target, **options)


def product(x):
    return spmm(ADJ, x)


def second_derivative():
    x = HEADS.clone().requires_grad_()
    out = gat_attention(ADJ, x, SCORES, SCORES[:2]).pow(2).sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    grad.pow(2).sum().backward()


def captured():
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        draw_seed(0.5, torch.device("cuda"))


def forward_mode():
    with forward_ad.dual_level():
        product(forward_ad.make_dual(X, X))


def changed_adjacency():
    adj = adjacency()
    adj.col[0] = 1
    spmm(adj, X)


def mixture(pseudo=POINTS, mu=KERNELS, sigma=KERNELS, **options):
    gaussian_mixture(ADJ, X, pseudo, mu, sigma, **options)


CASES = {
    "linear, weights of other features": lambda t: nn.linear(SPARSE, torch.ones(2, 4)),
    "linear, features in another layout": lambda t: nn.linear(X.to_sparse_coo(), X),
    "dropout, features in another layout": lambda t: nn.dropout(X.to_sparse_coo()),
    "relations, a type without a number of nodes": lambda t: nn.relations(TYPED, {"a": 2}),
    "relations, values": lambda t: nn.relations({("a", "to", "b"): WEIGHTED}, {"a": 3, "b": 2}),
    "relations, a source that isn't there": lambda t: nn.relations(TYPED, {"a": 1, "b": 2}),
    "relations, a target that isn't there": lambda t: nn.relations(TYPED, {"a": 2, "b": 1}),
    "spmm, an edge_index": lambda t: spmm(ring().edge_index, X),
    "spmm, features of the own rows alone": lambda t: spmm(ADJ, OWN),
    "spmm, features in three dimensions": lambda t: spmm(ADJ, HEADS),
    "spmm, integers": lambda t: spmm(ADJ, X.long()),
    "spmm, complex numbers": lambda t: spmm(ADJ, X * 1j),
    "spmm, features on another device": lambda t: spmm(ADJ, X.to("meta")),
    "spmm, an unknown reduce": lambda t: spmm(ADJ, X, reduce="prod"),
    "spmm, weights of other edges": lambda t: spmm(ADJ, X, torch.ones(2)),
    "spmm, weights of another type": lambda t: spmm(ADJ, X, torch.ones(3).double()),
    "spmm, weights for the largest": lambda t: spmm(ADJ, X, torch.ones(3), "max"),
    "gat_attention, Rows": lambda t: gat_attention(ADJ, ROWS, SCORES, SCORES[:2]),
    "gat_attention, a second derivative": lambda t: second_derivative(),
    "spmm, torch.func.jvp": lambda t: torch.func.jvp(product, (X,), (X,)),
    "spmm, a dual number": lambda t: forward_mode(),
    "spmm, gradients in batches": lambda t: torch.autograd.functional.jacobian(
        product, X, vectorize=True
    ),
    "spmm, an adjacency changed in place": lambda t: changed_adjacency(),
    "gat_attention, scores of the own rows alone": lambda t: gat(source=torch.ones(2, 1)),
    "gat_attention, scores of more heads": lambda t: gat(target=torch.ones(2, 2)),
    "gat_attention, a slope below 0": lambda t: gat(negative_slope=-0.1),
    "gat_attention, a slope that is no number": lambda t: gat(negative_slope=float("nan")),
    "gat_attention, every edge dropped": lambda t: gat(dropout=1.0),
    "gat_attention, dropout in a CUDA graph": lambda t: captured(),
    "gatv2_attention, features without heads": lambda t: gatv2_attention(ADJ, X, OWN, X[0]),
    "gatv2_attention, targets of all nodes": lambda t: gatv2_attention(ADJ, HEADS, HEADS, X[:1]),
    "gatv2_attention, a vector of another width": lambda t: gatv2_attention(
        ADJ, HEADS, PAIRS, torch.ones(1, 3)
    ),
    "edge_conv, an unknown reduce": lambda t: edge_conv(ADJ, X, OWN, None, "prod"),
    "edge_conv, targets of all nodes": lambda t: edge_conv(ADJ, X, X, None),
    "edge_conv, an unknown activation": lambda t: kernel_activation(torch.nn.GELU(), "sum"),
    "edge_conv, an activation that falls": lambda t: kernel_activation(ELU, "max"),
    "gaussian_mixture, an unknown reduce": lambda t: mixture(reduce="max"),
    "gaussian_mixture, means in one row": lambda t: mixture(mu=torch.ones(2)),
    "gaussian_mixture, deviations of other kernels": lambda t: mixture(sigma=torch.ones(4, 2)),
    "gaussian_mixture, coordinates of other edges": lambda t: mixture(pseudo=torch.ones(2, 2)),
    "gaussian_mixture, coordinates of more dimensions": lambda t: mixture(pseudo=torch.ones(3, 3)),
    "GMMConv, no coordinates": lambda t: nn.GMMConv(4, 4, 2, 3)((X, OWN), ADJ),
    "GCNConv, normalising a mini-batch": lambda t: nn.GCNConv(4, 4)(X, ADJ),
    "GCNConv, weights beside values": lambda t: nn.GCNConv(4, 4, normalize=False)(
        X, WEIGHTED, torch.ones(3)
    ),
    "GCNConv, weights of other edges": lambda t: nn.GCNConv(4, 4, normalize=False)(
        X, ADJ, torch.ones(2)
    ),
    "fuse, a graph": lambda t: nn.fuse(ring()),
    "dropout, more than certain": lambda t: nn.dropout(X, 1.5),
    "relu_dropout, more than certain": lambda t: nn.relu_dropout(X, 1.5),
    "nn.Dropout, a negative probability": lambda t: nn.Dropout(-0.1),
}
