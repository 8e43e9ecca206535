"""Features that stay in the graph's table: every model gives what it gives of tensors."""

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph

import gas
from gas.history import Features
from gas.history.rows import Rows
from gas.native.dropout import dropout, gather_dropout
from gas.native.rows import gather_rows
from gas.nn import Adjacency, spmm
from gas.nn import dropout as drop

N, IN, OUT = 90, 7, 3


def graph():
    torch.manual_seed(0)
    data = T.GCNNorm()(random_graph(N, 500))
    data.x = torch.randn(N, IN)
    return data


PNA = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 3, 9])}
MODELS = {
    "gcn": lambda: gas.models.GCN(N, IN, 8, OUT, 3, dropout=0.4),
    "gcn without dropout": lambda: gas.models.GCN(N, IN, 8, OUT, 3),
    "gcn that transforms first": lambda: gas.models.GCN(N, IN, 1, OUT, 3, dropout=0.4),
    "gcn, linear": lambda: gas.models.GCN(N, IN, 8, OUT, 3, dropout=0.4, linear=True),
    "gcn, input not dropped": lambda: gas.models.GCN(N, IN, 8, OUT, 3, 0.4, drop_input=False),
    "gcn, residual": lambda: gas.models.GCN(N, IN, IN, OUT, 3, 0.4, residual=True),
    "gcn, batch norm": lambda: gas.models.GCN(N, IN, 8, OUT, 3, 0.4, batch_norm=True),
    "sage": lambda: gas.models.GraphSAGE(N, IN, 8, OUT, 3, dropout=0.4),
    "sage, largest": lambda: gas.models.GraphSAGE(N, IN, 8, OUT, 3, aggr="max"),
    "gat": lambda: gas.models.GAT(N, IN, 4, 2, OUT, 1, 3, dropout=0.4),
    "gcn2": lambda: gas.models.GCN2(N, IN, 8, OUT, 3, alpha=0.1, theta=0.5, dropout=0.4),
    "appnp": lambda: gas.models.APPNP(N, IN, 8, OUT, 3, alpha=0.1, dropout=0.4),
    "gin": lambda: gas.models.GIN(N, IN, 8, OUT, 3, dropout=0.4, noise=0.1),
    "pna": lambda: gas.models.PNA(N, IN, 8, OUT, 3, **PNA, dropout=0.4),
    "pna_jk": lambda: gas.models.PNA_JK(N, IN, 8, OUT, 3, **PNA, dropout=0.4),
}


@pytest.mark.slow(fast=11)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_read_features_where_they_lie(name, training):
    data = gas.cluster(graph(), 6, log=False)
    results = []
    for in_place in (True, False):
        torch.manual_seed(1)
        model = MODELS[name]()
        model(
            loader=gas.EvalSubgraphLoader(data, batch_size=1, log=False)
        )  # No history is read unfilled.
        model.train(training)
        torch.manual_seed(2)
        outs = []
        options = {"layout": "fused", "precompute": False, "log": False}
        for batch in gas.SubgraphLoader(data, batch_size=2, **options):
            if not in_place:
                _ = batch.x  # A tensor now, which the model is given.
            assert isinstance(
                model._forward_inputs(batch)[0], Features if in_place else torch.Tensor
            )
            out = model(batch)
            (out.square().sum() + getattr(model, "reg_loss", 0.0)).backward()
            outs.append(out.detach())
        results.append([*outs, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_inference_reads_them_there_too(name):
    data = gas.cluster(graph(), 6, log=False)
    torch.manual_seed(1)
    model = MODELS[name]()
    out = model(loader=gas.EvalSubgraphLoader(data, None, 2, log=False))
    expected = model.eval()(data.x, Adjacency.of(data.edge_index, N, data.edge_weight))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_who_may_see_more_gets_a_tensor():
    data = gas.cluster(graph(), 6, log=False)
    batch = gas.SubgraphLoader(data, log=False).cut(range(6))
    seen = []
    model = MODELS["gcn"]()
    handle = model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(batch)
    handle.remove()

    class Mine(gas.models.GCN):
        def forward(self, x, *args, **kwargs):
            seen.append(x)
            return super().forward(x, *args, **kwargs)

    Mine(N, IN, 8, OUT, 2)(batch)

    model = MODELS["gcn"]()
    handle = model.convs[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(batch)
    handle.remove()
    forward, model.forward = model.forward, lambda x, *rest: forward(x * 2, *rest)
    model(batch)
    model = MODELS["gcn"]()
    model.inputs_of = lambda data: (data.x * 0, data.adj_t, {})
    seen.append(model._forward_inputs(batch)[0])
    assert not seen[-1].any()
    for layout in ("csr", "edge_index"):
        other = next(iter(gas.SubgraphLoader(data, layout=layout, log=False)))
        seen.append(MODELS["gcn"]()._forward_inputs(other)[0])
    assert all(type(x) is torch.Tensor for x in seen)
    assert len(seen) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 64, 131])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9999])
def test_reading_and_dropping_is_dropping_what_was_read(width, p, dtype):
    table, index = torch.randn(50, width, dtype=dtype), torch.randint(50, (33,))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        expected = dropout(gather_rows(table, index), p, 12345)
        assert torch.equal(gather_dropout(table, index, p, 12345), expected)
    assert torch.equal(gather_dropout(table.t().contiguous().t(), index, p, 12345), expected)
    assert gather_dropout(table, index[:0], p, 1).shape == (0, width)
    with pytest.raises(IndexError, match="50"):
        gather_dropout(table, torch.tensor([0, 50]), p, 1)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_products_of_features(reduce, p):
    table, index = torch.randn(40, 5), torch.randperm(40)[:12]
    adj = Adjacency.of(torch.randint(12, (2, 60)), 12)
    adj = Adjacency(adj.rowptr[:5], adj.col[: int(adj.rowptr[4])], None, 12)
    x = Features(table, index, 4).dropout(p, 7) if p else Features(table, index, 4)
    assert torch.equal(spmm(adj, x, reduce=reduce), spmm(adj, x.tensor(), reduce=reduce))
    assert torch.equal(torch.cat([x.own, x.halo_tensor()]), x.tensor())
    if not p:
        assert torch.equal(x.tensor(), table[index])


def test_dropout_of_features():
    table, index = torch.randn(40, 5), torch.randperm(40)[:12]
    x = Features(table, index, 4)
    torch.manual_seed(3)
    once = drop(x, 0.5)
    twice = drop(once, 0.5)
    torch.manual_seed(3)
    expected = drop(table[index], 0.5)
    assert torch.equal(once.tensor(), expected)
    assert torch.equal(twice.tensor(), drop(expected, 0.5))
    assert drop(x, 0.5, training=False) is x
    assert drop(x, 0.0) is x
    every = drop(x, 1.0)
    assert isinstance(every, Rows)
    assert not every.tensor().any()
    half = drop(Features(table.bfloat16(), index, 4), 0.5)  # Which the kernel doesn't know.
    kept = half.tensor() != 0
    assert torch.equal(half.tensor()[kept], 2 * table.bfloat16()[index][kept])
    assert "Features([12, 5], own=4" in repr(x)
    with pytest.raises(TypeError, match="Rows"):
        x + 1
