"""``ProjectedConv``: sums of linearly transformed rows, in both orders."""

import pytest
import torch
import torch.nn.functional as F
from adjacencies import make_adjacency
from torch_geometric.nn import SimpleConv

import gas
from gas.history import Rows
from gas.nn import ProjectedConv, sum_convs

ROWS, COLS, IN, OUT = 7, 19, 5, 3


@pytest.fixture(params=[True, False], ids=["aggregate first", "transform first"])
def order(request, monkeypatch):
    monkeypatch.setattr(sum_convs, "should_aggregate_first", lambda *_: request.param)


def make_parameters(bias):
    weight = torch.randn(OUT, IN, dtype=torch.float64, requires_grad=True)
    return weight, torch.randn(OUT, dtype=torch.float64, requires_grad=True) if bias else None


def dense_result(adj, x, weight, bias, reduce):
    dense = torch.zeros(adj.shape, dtype=torch.float64)
    row, col = adj.coo()
    value = torch.ones(row.numel(), dtype=torch.float64) if adj.value is None else adj.value
    dense.index_put_((row.long(), col.long()), value, accumulate=True)
    if reduce == "mean":
        dense = dense / torch.bincount(row.long(), minlength=ROWS).clamp(min=1)[:, None]
    return dense @ F.linear(x, weight, bias)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_dense_algebra_with_gradients(weighted, reduce, bias):
    adj = make_adjacency(ROWS, COLS, 60, weighted)
    weight, offset = make_parameters(bias)
    x = torch.randn(COLS, IN, dtype=torch.float64, requires_grad=True)
    given = [each for each in (x, weight, offset) if each is not None]
    conv = ProjectedConv(aggr=reduce)
    out = conv(x, adj, weight=weight, bias=offset)
    expected = dense_result(adj, x, weight, offset, reduce)
    torch.testing.assert_close(out, expected)
    assert conv.path == "fused"
    found = torch.autograd.grad(out.square().sum(), given)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), given))


@pytest.mark.usefixtures("order")
def test_rows_of_a_mini_batch():
    adj = make_adjacency(ROWS, COLS, 60, True)
    weight, bias = make_parameters(True)
    x = torch.randn(COLS, IN, dtype=torch.float64)
    out = ProjectedConv()(Rows(x[:ROWS], x[ROWS:]), adj, weight=weight, bias=bias)
    torch.testing.assert_close(out, dense_result(adj, x, weight, bias, "sum"))


def test_sparse_features():
    adj = make_adjacency(ROWS, COLS, 60, True)
    weight, bias = make_parameters(True)
    x = torch.randn(COLS, IN, dtype=torch.float64).relu()
    out = ProjectedConv()(x.to_sparse_csr(), adj, weight=weight, bias=bias)
    torch.testing.assert_close(out, dense_result(adj, x, weight, bias, "sum"))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_list_of_edges(reduce):
    edge_index, edge_weight = torch.randint(0, COLS, (2, 60)), torch.rand(60).double()
    weight, bias = make_parameters(True)
    x = torch.randn(COLS, IN, dtype=torch.float64)
    out = ProjectedConv(aggr=reduce)(x, edge_index, edge_weight, weight=weight, bias=bias)
    expected = SimpleConv(aggr=reduce)(F.linear(x, weight, bias), edge_index, edge_weight)
    torch.testing.assert_close(out, expected)


def test_autocast_computes_what_separate_layers_do():
    adj = make_adjacency(ROWS, COLS, 60, True, torch.float32)
    x, weight = torch.randn(COLS, 512), torch.randn(512, 512)
    with torch.autocast("cpu", torch.float16):
        out = ProjectedConv()(x, adj, weight=weight)
        expected = gas.nn.SimpleConv(aggr="sum")(F.linear(x, weight), adj)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)
