"""Encoded features are what the same features are as a tensor, through everything."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from conftest import random_graph
from test_equality import OURS, full_batch, make_model, relative_error, zoo_class
from torch_geometric.data import Data

import gas
from gas.augment import DropEdge
from gas.cli import Experiment, Settings
from gas.history import Encoded, Features
from gas.loader.lazy import get_lazy
from gas.training import FullBatch

DTYPES = ("float32", "bfloat16", "float16", "int8")
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3, "int8": 2e-2}


def graphs(name, dtype, store="host", num_parts=6):
    """Return a clustered graph whose features are encoded, and with what they decode to."""
    data = random_graph(directed=True)
    transform = zoo_class(name).transform
    data = data if transform is None else transform(data)
    data.x = gas.quantize(data.x, dtype, store)
    graph = gas.cluster(data, num_parts, log=False)
    plain = copy.copy(graph)
    plain.x = graph.x.dequantize()
    return graph, plain


def outcome(model, graph, layout, training):
    """Return outputs and gradients of mini-batches, and layer-wise inference."""
    model.zero_grad()
    model.histories.apply(lambda h: h.reset_parameters() if isinstance(h, gas.History) else None)
    pred = model.predict(graph, layout=layout)
    model.train(training)
    torch.manual_seed(2)
    outs = []
    # Sums computed once, of plain features alone, are added up in another order.
    options = {"layout": layout, "precompute": False, "log": False}
    for batch in gas.SubgraphLoader(graph, batch_size=2, **options):
        out = model(batch)
        (out.square().sum() + getattr(model, "reg_loss", 0.0)).backward()
        outs.append(out.detach())
    return [pred, *outs, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow(fast=11)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*(("fused", dtype) for dtype in DTYPES), ("csr", "int8"), ("edge_index", "int8")],
)
@pytest.mark.parametrize("name", OURS)
def test_every_model_bit_by_bit(name, dtype, layout, training):
    graph, plain = graphs(name, dtype)
    assert isinstance(graph.x, Encoded)
    model = make_model(name, plain)
    model.dropout = 0.4
    twin = copy.deepcopy(model)
    found = outcome(model, graph, layout, training)
    wanted = outcome(twin, plain, layout, training)
    assert len(found) > 3
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.slow(fast=7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OURS)
def test_one_part_and_sweeps_equal_the_full_batch(name, dtype):
    """E1, E2 and E3, of the decoded features; of those before, as far as the codec goes."""
    graph, plain = graphs(name, dtype)
    model = make_model(name, plain).eval()
    expected = full_batch(model, plain).detach()
    assert relative_error(full_batch(model, graph), expected) == 0  # The graph as it is.
    (batch,) = gas.SubgraphLoader(graph, torch.tensor([0, 60]), layout="fused", log=False)
    assert relative_error(model(batch), expected) < 1e-5
    out = torch.full_like(expected, torch.nan)
    for _ in range(model.num_layers):
        for batch in gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False):
            out[batch.n_id[: batch.batch_size]] = model(batch).detach()
    assert relative_error(out, expected) < 1e-5
    inferred = model(loader=gas.EvalSubgraphLoader(graph, log=False))
    assert relative_error(inferred, expected) < 1e-5
    assert gas.verify(model, graph)
    assert gas.verify(model, graph, num_nodes=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gas.GCN", "gas.GraphSAGE", "gas.APPNP"])
def test_outputs_are_those_of_the_features_before(name, dtype):
    """Models without batch norm of random statistics, which would make any error larger."""
    data = random_graph(200, 800, directed=True, features=32)
    transform = zoo_class(name).transform
    data = data if transform is None else transform(data)
    model = {
        "gas.GCN": lambda: gas.models.GCN(200, 32, 16, 3, 3),
        "gas.GraphSAGE": lambda: gas.models.GraphSAGE(200, 32, 16, 3, 3),
        "gas.APPNP": lambda: gas.models.APPNP(200, 32, 16, 3, 3, alpha=0.2),
    }[name]()
    encoded = copy.copy(data)
    encoded.x = gas.quantize(data.x, dtype)
    outs = [model.predict(gas.cluster(graph, 6, log=False)) for graph in (encoded, data)]
    error = (outs[0] - outs[1]).norm() / outs[1].norm()
    assert error <= BOUNDS[dtype]
    assert (error == 0) == (dtype == "float32")


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_features_are_read_where_they_lie(dtype, store):
    graph, plain = graphs("gas.GraphSAGE", dtype, store)
    assert graph.x.store.tier == store
    batch = gas.SubgraphLoader(graph, log=False).cut([0, 3])
    x = batch.features()
    assert isinstance(x, Features)
    assert get_lazy(batch.data, "x") is not None
    _, table, _ = x.kernel_inputs()
    assert (table is not None) == (dtype == "float32")  # Products read numbers alone.
    assert torch.equal(x.tensor(), plain.x[batch.n_id])
    assert torch.equal(x.own, plain.x[batch.n_id[: batch.batch_size]])
    assert type(batch.x) is torch.Tensor
    assert torch.equal(batch.x, plain.x[batch.n_id])
    assert torch.equal(batch.own.x, plain.x[batch.n_id[: batch.batch_size]])


def test_own_rows_are_decoded_once(monkeypatch):
    graph, _ = graphs("gas.GraphSAGE", "int8")
    options = {"layout": "fused", "log": False}
    batch = gas.SubgraphLoader(graph, precompute=False, **options).cut([0])
    read, seen = Encoded.read, []
    monkeypatch.setattr(
        Encoded, "read", lambda x, index, *rest: seen.append(index.numel()) or read(x, index, *rest)
    )
    gas.models.GraphSAGE(60, 5, 8, 3, 1)(batch)
    assert seen == [batch.n_id.numel()]
    loader = gas.SubgraphLoader(graph, **options)
    first_batch, batch = loader.cut([0]), loader.cut([1])
    gas.models.GraphSAGE(60, 5, 8, 3, 1)(first_batch)
    seen.clear()
    gas.models.GraphSAGE(60, 5, 8, 3, 1)(batch)  # Beside its rows, their sums over neighbours.
    assert seen == [batch.batch_size]


@pytest.mark.parametrize("store", ["host", "disk"])
def test_edge_features(store):
    """A model of PyG that takes ``edge_attr``, converted."""
    data = random_graph(directed=True)
    data.edge_attr = torch.randn(data.num_edges, 5)
    encoded = copy.copy(data)
    encoded.edge_attr = gas.quantize(data.edge_attr, "int8", store)
    encoded.x = gas.quantize(data.x, "int8", store)
    plain = copy.copy(data)
    plain.edge_attr, plain.x = encoded.edge_attr.dequantize(), encoded.x.dequantize()

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = pyg.GINEConv(torch.nn.Linear(5, 8), edge_dim=5)
            self.last = pyg.GINEConv(torch.nn.Linear(8, 3), edge_dim=5)

        def forward(self, x, edge_index, edge_attr):
            x = self.first(x, edge_index, edge_attr).relu()
            return self.last(x, edge_index, edge_attr)

    torch.manual_seed(0)
    net = Net()
    expected = net(plain.x, plain.edge_index, plain.edge_attr).detach()
    assert torch.equal(net(encoded.x, encoded.edge_index, encoded.edge_attr), expected)
    model = gas.to_scalable(net, encoded)
    graph = gas.cluster(encoded, 6, model=model, log=False)
    assert isinstance(graph.edge_attr, Encoded)
    assert relative_error(model.predict(graph), expected) < 1e-5
    assert gas.verify(model, graph)
    for batch in gas.SubgraphLoader(graph, log=False):
        rows = graph.edge_attr.dequantize()[batch.data.e_id]
        assert torch.equal(batch.edge_attr, rows)


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("adjacency", ["edge_index", "adj_t", "both"])
def test_renumbering_moves_rows_as_they_are(adjacency, store):
    data = random_graph(directed=True)
    data.edge_attr = torch.randn(data.num_edges, 3)
    data.more = torch.randn(60, 2)
    if adjacency != "edge_index":
        order = (data.edge_index[1] * 60 + data.edge_index[0]).argsort(stable=True)
        data.edge_index = data.edge_index[:, order]
        rowptr = torch.bincount(data.edge_index[1], minlength=60).cumsum(0)
        rowptr = torch.cat([rowptr.new_zeros(1), rowptr])
        data.adj_t = torch.sparse_csr_tensor(
            rowptr, data.edge_index[0], torch.ones(data.num_edges), (60, 60),
            check_invariants=False,
        )  # fmt: skip
    if adjacency == "adj_t":
        del data.edge_index
    encoded, plain = copy.copy(data), copy.copy(data)
    for key in ("x", "edge_attr", "more"):
        encoded[key] = gas.quantize(data[key], "int8", store)
        plain[key] = encoded[key].dequantize()
    perm = torch.randperm(60)
    found, wanted = gas.permute(encoded, perm, log=False), gas.permute(plain, perm, log=False)
    for key in ("x", "edge_attr", "more"):
        assert isinstance(found[key], Encoded)
        assert found[key].store.tier == store
        assert torch.equal(found[key].dequantize(), wanted[key])


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"cache": True}, {"check": True}])
@pytest.mark.parametrize("store", ["host", "disk"])
def test_ways_of_loading(store, options):
    graph, plain = graphs("gas.GraphSAGE", "int8", store)
    graph.more = gas.quantize(torch.randn(60, 2))
    loader = gas.SubgraphLoader(graph, log=False, **options)
    for _ in range(2):
        for batch in loader:
            assert type(batch.x) is torch.Tensor
            assert torch.equal(batch.x, plain.x[batch.n_id])
            assert torch.equal(batch.more, graph.more.dequantize()[batch.n_id])


@pytest.mark.slow
def test_spawned_workers():
    graph, plain = graphs("gas.GraphSAGE", "int8", "disk", num_parts=2)
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    for batch in gas.SubgraphLoader(graph, log=False, **options):
        assert torch.equal(batch.x, plain.x[batch.n_id])


def test_replaced_features_are_followed():
    graph, _ = graphs("gas.GraphSAGE", "int8")
    loader = gas.SubgraphLoader(graph, log=False)
    list(loader)
    graph.x = gas.quantize(torch.ones(60, 5))
    assert all(bool((batch.x == 1).all()) for batch in loader)


def test_prefetching():
    graph, plain = graphs("gas.GraphSAGE", "int8")
    outs = []
    for given in (graph, plain):
        torch.manual_seed(0)
        model = gas.models.GraphSAGE(60, 5, 8, 3, 3, dropout=0.5, prefetch=1)
        model.predict(given)
        model.train()
        loader = gas.SubgraphLoader(given, layout="fused", log=False)
        outs.append(torch.cat([model(batch) for batch in gas.PrefetchLoader(loader, model)]))
    assert torch.equal(*outs)


def test_views():
    data = random_graph(directed=True)
    data.x = gas.quantize(data.x)
    graph = gas.cluster(data, 4, log=False)
    plain = copy.copy(graph)
    plain.x = graph.x.dequantize()
    found = []
    for given in (graph, plain):
        torch.manual_seed(0)
        augment = DropEdge(given, 0.3)
        loader = gas.SubgraphLoader(given, epoch_transform=augment, log=False)
        found.append([view.x for batch in loader for view in batch.views])
        found[-1].append(augment(given).x)
    for mine, other in zip(*found, strict=True):
        assert type(mine) is torch.Tensor
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_converted_models(dtype):
    graph, plain = graphs("gas.GraphSAGE", dtype)
    net = pyg.GraphSAGE(5, 8, 2, 3)
    model = gas.to_scalable(net, graph)
    expected = net.eval()(plain.x, plain.edge_index).detach()
    inferred = model(loader=gas.EvalSubgraphLoader(graph, log=False))
    assert relative_error(inferred, expected) < 1e-5
    assert relative_error(model(graph.x, graph.edge_index), expected) < 1e-6
    assert gas.verify(model, graph)
    x, adj_t, _ = model.inputs_of(graph)
    assert torch.equal(FullBatch(graph, layout="fused").data.x, plain.x)
    assert x is graph.x
    assert adj_t is graph.edge_index


@pytest.mark.slow
@pytest.mark.requires("one_graph")
def test_compiled():
    graph, plain = graphs("gas.GraphSAGE", "int8", num_parts=2)
    model = gas.models.GraphSAGE(60, 5, 8, 3, 2)
    model.predict(plain)
    wanted = [model(batch, push=False) for batch in gas.SubgraphLoader(plain, log=False)]
    model.compile(backend="eager")
    found = [model(batch, push=False) for batch in gas.SubgraphLoader(graph, log=False)]
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("options", [{}, {"inductive": True}, {"full_batch": True}])
def test_experiments(options, dtype):
    data, _, out_channels = gas.get_data("data", "planted:1000")
    data.x = gas.quantize(data.x, dtype)
    plain = Data(**data.to_dict())
    plain.x = data.x.dequantize()
    settings = Settings.default("gcn").replace(epochs=2, num_parts=4, batch_size=2)
    runs = []
    for given in (data, plain):
        experiment = Experiment(given, out_channels, "gcn", settings, log=False, **options)
        runs.append(experiment.run(0))
        if given is data:
            assert isinstance(experiment.graph.data.x, Encoded)
    assert runs[0].loss == runs[1].loss
    assert runs[0].test_acc == runs[1].test_acc


def test_a_transform_that_changes_features():
    data = random_graph(directed=True)
    data.x = gas.quantize(data.x.abs())
    out = T.NormalizeFeatures()(copy.copy(data))
    assert type(out.x) is torch.Tensor
    torch.testing.assert_close(out.x.sum(1), torch.ones(60))


def test_slices_and_gradients_are_those_of_a_read_only_matrix():
    x = torch.randn(6, 2)
    encoded = gas.quantize(x, "float32")
    for index in (slice(4, 2), slice(-1, 2), slice(9, 3), slice(1, 5, 3), slice(None, 0)):
        assert torch.equal(encoded[index], x[index])
    assert encoded.requires_grad_(False) is encoded
    with pytest.raises(TypeError, match=r"x.requires_grad_\(\) can't write to encoded rows"):
        encoded.requires_grad_()
