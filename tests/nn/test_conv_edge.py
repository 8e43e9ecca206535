"""Convolutions that compute on edges: functions of both ends, and mixtures by coordinates."""

import pytest
import torch
import torch_geometric.nn as pyg
from adjacencies import SHAPES, make_adjacency
from convs import mlp

from gas import nn


def hooked(layer):
    layer[0].register_forward_hook(lambda *_: None)
    return layer


def hooked_backward(layer):
    layer.register_full_backward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "options", "reason"),
    [
        (mlp(torch.nn.ReLU(), torch.nn.Linear(4, 4)), {}, "'nn' is more than a linear layer"),
        (torch.nn.Sequential(torch.nn.BatchNorm1d(10)), {}, "'nn' is more than a linear layer"),
        (torch.nn.Sequential(), {}, "'nn' is more than a linear layer"),
        (pyg.MLP([10, 4]), {}, "'nn' is more than a linear layer"),
        (mlp(torch.nn.GELU()), {}, "'activation' is GELU"),
        (mlp(torch.nn.LeakyReLU(-0.5)), {}, "expected 'negative_slope' of at least 0"),
        (hooked(mlp(torch.nn.ReLU())), {}, "'nn' has hooks"),
        (hooked_backward(mlp(torch.nn.ReLU())), {}, "'nn' has hooks"),
        (mlp(torch.nn.ReLU()), {"aggr": "std"}, "aggr='std' is none of sum, mean, max, min"),
    ],
)
def test_edge_functions_that_cannot_be_fused_say_why(layer, options, reason):
    adj = make_adjacency(12, 12, 60)
    ours, theirs = nn.EdgeConv(layer, **options), pyg.EdgeConv(layer, **options)
    x = torch.randn(12, 10 if len(list(layer.parameters())) == 0 else 5)
    edge_index, _ = adj.to_edge_index()
    assert torch.allclose(ours(x, adj), theirs(x, edge_index), atol=1e-5)
    assert ours.path.startswith("pyg: ")
    assert reason in ours.path


def test_a_lazy_linear_layer_is_fused_once_it_knows_its_size():
    adj, x = make_adjacency(12, 12, 60), torch.randn(12, 5)
    conv = nn.EdgeConv(pyg.Linear(-1, 4))
    first = conv(x, adj)
    assert conv.path == "pyg: 'nn' has hooks"
    assert torch.allclose(conv(x, adj), first, atol=1e-5)
    assert conv.path == "fused"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [True, False])
def test_mixtures_of_many_coordinates_in_either_order(shape, first, monkeypatch):
    rows, cols, entries = SHAPES[shape]
    if rows == 0:
        return
    monkeypatch.setattr(nn.mixture, "should_sum_first", lambda *_: first)
    adj = make_adjacency(rows, cols, entries)
    theirs, ours = (package.GMMConv(5, 4, 3, 2).double() for package in (pyg, nn))
    ours.load_state_dict(theirs.state_dict())
    x, pseudo = torch.randn(cols, 5).double(), torch.rand(entries, 3).double()
    tensors = x.requires_grad_(), pseudo.requires_grad_()
    wanted = theirs((x, x[:rows]), adj.to_edge_index()[0], pseudo)
    found = ours((x, x[:rows]), adj, pseudo)
    assert ours.path == "fused"
    assert torch.allclose(found, wanted, atol=1e-10)
    grads = [
        torch.autograd.grad(out.pow(2).sum(), [*tensors, *conv.parameters()])
        for out, conv in ((found, ours), (wanted, theirs))
    ]
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*grads, strict=True))


def test_mixtures_that_cannot_be_fused_say_why():
    adj, x, pseudo = make_adjacency(12, 12, 60), torch.randn(12, 5), torch.rand(60, 2)
    for options, reason in (
        ({"separate_gaussians": True}, "pyg: separate_gaussians=True"),
        ({"aggr": "max"}, "pyg: aggr='max' is none of sum, mean"),
    ):
        theirs, ours = (package.GMMConv(5, 4, 2, 3, **options) for package in (pyg, nn))
        ours.load_state_dict(theirs.state_dict())
        wanted = theirs(x, adj.to_edge_index()[0], pseudo)
        assert torch.allclose(ours(x, adj, pseudo), wanted, atol=1e-5)
        assert ours.path == reason


def test_a_mixture_without_coordinates_or_a_root():
    adj, x = make_adjacency(12, 12, 60), torch.randn(12, 5)
    with pytest.raises(ValueError, match=r"'edge_attr' is None, expected .* shape \[60, 2\]"):
        nn.GMMConv(5, 4, 2, 3)(x, adj)
    conv = nn.GMMConv(5, 4, 2, 3, root_weight=False)  # PyG's own fails.
    with_root = nn.GMMConv(5, 4, 2, 3)
    with_root.load_state_dict({**conv.state_dict(), "root.weight": torch.zeros(4, 5)})
    pseudo = torch.rand(60, 2)
    assert torch.equal(conv(x, adj, pseudo), with_root(x, adj, pseudo))


def test_a_lazy_mixture():
    adj, x, pseudo = make_adjacency(12, 12, 60), torch.randn(12, 5), torch.rand(60, 2)
    lazy, conv = nn.GMMConv(-1, 4, 2, 3), nn.GMMConv(5, 4, 2, 3)
    lazy(x, adj, pseudo)
    conv.load_state_dict(lazy.state_dict())
    assert torch.equal(lazy(x, adj, pseudo), conv(x, adj, pseudo))
    assert lazy.path == "fused"


def test_the_cheaper_order_of_a_mixture():
    should_sum_first = nn.mixture.should_sum_first
    few = make_adjacency(50, 5000, 1000)
    assert should_sum_first(few, torch.randn(5000, 64), 3, 64)  # Halo rows are spared the product.
    dense = make_adjacency(50, 50, 5000)
    assert not should_sum_first(dense, torch.randn(50, 64, requires_grad=True), 3, 8)
    assert should_sum_first(dense, torch.randn(50, 8), 3, 64)
    tall = make_adjacency(1000, 10, 1000)
    assert not should_sum_first(tall, torch.randn(10, 64), 4, 64)
