"""Nothing that a training step does on a device makes the host wait for it."""

import contextlib
import copy
import itertools
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.typing
from conftest import no_sync, random_graph
from pretended_device import DEVICE, Pretended
from torch_geometric.transforms import GCNNorm
from torch_geometric.utils import degree

import gas
from gas import nn
from gas.augment import DropEdge
from gas.graph.layout import _draw_kept_edges, drop_edges_and_rows, layout_of
from gas.native import matrix
from gas.native.rows import sparse_csr
from gas.nn import Adjacency
from gas.training import loss_of, train_epoch

# The function itself: the pretended device runs operators, such as this one, on the host.
transpose = matrix.transpose._kernel


@pytest.fixture(autouse=True)
def _without_torch_scatter(monkeypatch):
    """Have PyG use PyTorch's operators: those of torch-scatter can't be pretended."""
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", False)


NODES, PTR = 200, torch.arange(0, 201, 20)
PNA = {"aggregators": ["mean", "max"], "scalers": ["identity", "attenuation"]}
MODELS = {
    "GCN": (gas.models.GCN, (5, 8, 3, 3), {"batch_norm": True, "residual": True}),
    "GCN linear": (gas.models.GCN, (5, 8, 3, 3), {"linear": True}),
    "GraphSAGE": (gas.models.GraphSAGE, (5, 8, 3, 3), {"batch_norm": True}),
    "GraphSAGE max": (gas.models.GraphSAGE, (5, 8, 3, 3), {"aggr": "max"}),
    "GIN": (gas.models.GIN, (5, 8, 3, 3), {"batch_norm": True, "noise": 0.1}),
    "GAT": (gas.models.GAT, (5, 4, 2, 3, 2, 3), {}),
    "APPNP": (gas.models.APPNP, (5, 8, 3, 3), {}),
    "GCN2": (gas.models.GCN2, (5, 8, 3, 3), {}),
    "PNA": (gas.models.PNA, (5, 8, 3, 3), PNA),
    "PNA_JK": (gas.models.PNA_JK, (5, 8, 3, 3), {**PNA, "batch_norm": True}),
}


def perceptron(i, o):
    return torch.nn.Sequential(torch.nn.Linear(i, o), torch.nn.ReLU())


LAYERS = {
    "GCNConv": lambda i, o: nn.GCNConv(i, o, normalize=False),
    "SAGEConv": nn.SAGEConv,
    "SAGEConv max": lambda i, o: nn.SAGEConv(i, o, aggr="max"),
    "GraphConv": nn.GraphConv,
    "GINConv": lambda i, o: nn.GINConv(perceptron(i, o), train_eps=True),
    "GATConv": lambda i, o: nn.GATConv(i, o, dropout=0.3),
    "GATConv without loops": lambda i, o: nn.GATConv(i, o, add_self_loops=False),
    "GATv2Conv": lambda i, o: nn.GATv2Conv(i, o, dropout=0.3),
    "EdgeConv": lambda i, o: nn.EdgeConv(perceptron(2 * i, o)),
    "EdgeConv mean": lambda i, o: nn.EdgeConv(perceptron(2 * i, o), aggr="mean"),
    "GMMConv": lambda i, o: nn.GMMConv(i, o, 1, 3),
}


class Model(gas.ScalableGNN):
    """Two layers, as a user puts them together."""

    def __init__(self, layer, **kwargs):
        super().__init__(NODES, 8, 2, **kwargs)
        self.convs = torch.nn.ModuleList([layer(5, 8), layer(8, 3)])

    def forward(self, x, adj_t, batch_size, *args):
        h = self._conv(0, x, adj_t, batch_size).relu()
        h = self.push_and_pull(self.histories[0], h, batch_size, *args)
        return self._conv(1, h, adj_t, batch_size)

    def _conv(self, layer, x, adj_t, batch_size):
        conv = self.convs[layer]
        return conv(x if isinstance(conv, nn.GCNConv) else (x, x[:batch_size]), adj_t)


@pytest.fixture(scope="module")
def graph():
    return GCNNorm()(random_graph(NODES, 1200)), PTR


@pytest.fixture
def device(monkeypatch):
    return Pretended(monkeypatch)


def make(name, data, **kwargs):
    torch.manual_seed(0)
    if name in LAYERS:
        return filled(Model(LAYERS[name], **kwargs))
    cls, args, options = MODELS[name]
    if "aggregators" in options:
        options = {**options, "deg": degree(data.edge_index[1], NODES)}
    return filled(cls(NODES, *args, **options, **kwargs))


def filled(model):
    for history in model.histories:
        history.push(torch.randn(NODES, history.embedding_dim))
    return model


def run(model, loader, device=None, **kwargs):
    """Train for two epochs; what made the host wait in the second."""
    with contextlib.nullcontext() if device is None else device:
        if device is not None:
            device.move(model)
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        for _ in range(2):  # The first batches show what layers ask for.
            waits = [] if device is None else device.waits
            waits.clear()
            train_epoch(model, loader, optimizer, **kwargs)
        if device is not None:  # Others wait for what is under way, sooner or later.
            assert {entry[2] for entry in device.log if entry[0] == "copy"} == {"pinned"}
    return list(waits)


def values(model):
    state = {**model.state_dict(), **{f"history {i}": h.emb for i, h in enumerate(model.histories)}}
    return {key: getattr(value, "on_host", value) for key, value in state.items()}


def assert_for_the_loss(waits):
    assert len(waits) == 1
    assert "_mean_loss" in waits[0][-1]


def test_a_loss_that_is_not_finite_is_named_at_the_end(graph, device):
    model, calls = make("GraphSAGE", graph[0]), []

    def loss_fn(out, y):
        calls.append(out)
        return loss_of(out, y) * (float("nan") if len(calls) == 2 else 1.0)

    loader = gas.PrefetchLoader(loaded(graph), model)
    with pytest.raises(FloatingPointError, match="the loss is nan in batch 2"):
        run(model, loader, device, loss_fn=loss_fn)
    assert len(calls) == len(loader)
    waits = [wait for wait in device.waits if "find_nonfinite_loss" not in wait[-1]]
    assert_for_the_loss(waits)


def loaded(graph, layout="fused", **kwargs):
    return gas.SubgraphLoader(*graph, batch_size=3, layout=layout, log=False, **kwargs)


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize(
    ("name", "prefetch"),
    [*itertools.product([*LAYERS, *MODELS], [0]), ("GATConv", 1), ("GCN", 1), ("GraphSAGE", None)],
)
def test_an_epoch_waits_for_its_loss_alone(graph, device, name, prefetch):
    model, twin = (make(name, graph[0], prefetch=prefetch or 0) for _ in range(2))
    for one, there in ((model, device), (twin, None)):
        loader = loaded(graph)
        waits = run(one, loader if prefetch is None else gas.PrefetchLoader(loader, one), there)
        if there is not None:
            assert_for_the_loss(waits)
    assert all(getattr(layer, "path", "fused") == "fused" for layer in model.modules())
    torch.testing.assert_close(values(model), values(twin))


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_dropout(graph, device, name):
    model = make(name, graph[0], dropout=0.5)
    assert_for_the_loss(run(model, gas.PrefetchLoader(loaded(graph), model), device))


def compare(models, device, loader, **kwargs):
    """Train a model on the device, and its twin on the CPU: they come to the same."""
    for model, there in zip(models, (device, None), strict=True):
        waits = run(model, gas.PrefetchLoader(loader(), model), there, **kwargs)
        if there is not None:
            assert_for_the_loss(waits)
    torch.testing.assert_close(*map(values, models))


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("layout", ["edge_index", "csr"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"GraphSAGE max"}))
def test_layers_of_pyg(graph, device, name, layout):
    models = [make(name, graph[0]) for _ in range(2)]
    compare(models, device, lambda: loaded(graph, layout=layout))
    assert not any(getattr(layer, "path", "") == "fused" for layer in models[0].modules())


CONVERTED = {
    "GCN": pyg.GCN,
    "GraphSAGE": pyg.GraphSAGE,
    "GIN": pyg.GIN,
    "PNA": partial(pyg.PNA, aggregators=["max"], scalers=["linear"], deg=torch.tensor([1, 2, 3])),
}


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("layout", ["edge_index", "csr", "fused"])
@pytest.mark.parametrize("name", CONVERTED)
def test_converted(device, name, layout):
    data = random_graph(NODES, 1200)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(filled(gas.to_scalable(CONVERTED[name](5, 8, 3, 3), data)))
    graph = gas.cluster(data, 10, model=models[0], log=False)
    compare(models, device, lambda: loaded((graph, None), layout=layout))


@pytest.mark.parametrize("layout", ["edge_index", "csr"])
def test_an_adjacency_of_a_graph_on_the_device(device, layout):
    """Its own edges, in whatever order, and looked at by the device itself."""
    adj = random_graph(NODES, 1200).edge_index
    if layout == "csr":
        adj = Adjacency.of(adj, NODES, torch.rand(1200)).to_torch_sparse()
    wanted = Adjacency.of(adj, NODES)
    with device:
        there = adj.to(DEVICE)
        device.waits.clear()
        found = Adjacency.of(there, NODES)
        assert not device.waits
    for mine, other in zip(found.tensors(), wanted.tensors(), strict=True):
        assert torch.equal(mine.on_host, other)


@pytest.mark.parametrize(
    ("adj", "fault"),
    [
        (torch.tensor([[0, 1], [1, 3]]), r"'row' has a row outside \[0, 3\)"),
        (torch.tensor([[0, -1], [1, 2]]), r"'col' has a column outside \[0, 3\)"),
        (sparse_csr(torch.tensor([0, 1, 3]), torch.tensor([0, 3, 1]), None, 3), "'col' has"),
        (sparse_csr(torch.tensor([0, 2, 1]), torch.tensor([0]), None, 3), "'rowptr' does not rise"),
        (sparse_csr(torch.tensor([0, 1, 1]), torch.tensor([0, 1]), None, 3), "'rowptr' does not"),
        (sparse_csr(torch.tensor([1, 1, 2]), torch.tensor([0, 1]), None, 3), "'rowptr' does not"),
    ],
)
def test_an_adjacency_is_looked_at_on_the_device(device, adj, fault):
    with device, pytest.raises(RuntimeError, match=fault):
        Adjacency.of(adj.to(DEVICE), 3)


@pytest.mark.parametrize("kwargs", [{"micro_batches": 2}, {"scale_loss": True}])
@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_steps_and_losses(graph, device, kwargs, kind):
    data = copy.copy(graph[0])
    data.y = torch.randint(2, (NODES, 3)) if kind == "labels" else torch.randn(NODES)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(filled(gas.models.GraphSAGE(NODES, 5, 8, 3 if kind == "labels" else 1, 3)))
    compare(models, device, lambda: loaded((data, PTR)), **kwargs)


def test_a_normalisation(device):
    """Of a whole graph, which comes as one batch."""
    data, ptr = random_graph(NODES, 1200), torch.tensor([0, NODES])
    model = filled(Model(nn.GCNConv))
    models = model, copy.deepcopy(model)
    for model, there in zip(models, (device, None), strict=True):
        loader = gas.SubgraphLoader(data, ptr, layout="fused", log=False)
        waits = run(model, gas.PrefetchLoader(loader, model), there)
        if there is not None:
            assert_for_the_loss(waits)
    torch.testing.assert_close(*map(values, models))


@pytest.mark.slow(fast=4)
@pytest.mark.parametrize("layout", ["edge_index", "csr", "fused"])
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"GraphSAGE max"}))
def test_sparse_features(graph, device, name, layout):
    data = copy.copy(graph[0])
    data.x = (data.x * (data.x > 0)).to_sparse_csr()
    models = [make(name, data) for _ in range(2)]
    compare(models, device, lambda: loaded((data, PTR), layout=layout))


def test_dropout_of_sparse_features(graph, device):
    data = copy.copy(graph[0])
    data.x = (data.x * (data.x > 0)).to_sparse_csr()
    model = filled(gas.models.GraphSAGE(NODES, 5, 5, 3, 3, dropout=0.5, residual=True))
    assert_for_the_loss(run(model, gas.PrefetchLoader(loaded((data, PTR)), model), device))


@pytest.mark.parametrize("layout", ["edge_index", "csr", "fused"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_encoded_features(graph, device, dtype, layout):
    data = copy.copy(graph[0])
    data.x = gas.quantize(data.x, dtype)
    models = [make("GraphSAGE", graph[0]) for _ in range(2)]
    compare(models, device, lambda: loaded((data, PTR), layout=layout))


@pytest.mark.slow(fast=2)
@pytest.mark.parametrize("layout", ["edge_index", "csr", "fused"])
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_dropped_edges(graph, device, name, layout):
    model = make(name, graph[0])
    loader = gas.PrefetchLoader(loaded(graph, layout=layout), model)
    assert_for_the_loss(run(model, loader, device, edge_dropout=0.5))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["edge_index", "csr", "fused"])
def test_what_stays_of_a_device_s_edges(device, layout, weighted):
    edge_index = random_graph(NODES, 1200).edge_index
    number, weight = torch.arange(1200), torch.rand(1200)
    adj, rows = edge_index, {"number": number, "edge_weight": weight}
    if layout != "edge_index":  # Whose numbers are those of the entries.
        adj = Adjacency.of(edge_index, NODES, weight if weighted else None)
        edge_index, weight = adj.to_edge_index()
        adj = adj if layout == "fused" else adj.to_torch_sparse()
    with device:
        there = {key: row.to(DEVICE) for key, row in rows.items()}
        adj = adj.to(DEVICE)
        device.waits.clear()
        torch.manual_seed(0)
        dropped, rows = drop_edges_and_rows(adj, there, 0.25)
        torch.manual_seed(0)
        again, _ = drop_edges_and_rows(adj, there, 0.25)
        assert not device.waits
        ends, value = layout_of(dropped).entries(dropped), layout_of(dropped).value(dropped)
        for mine, other in zip(ends, layout_of(again).entries(again), strict=True):
            assert torch.equal(mine, other)
    kept = rows["number"].on_host
    assert 800 < kept.numel() < 1000
    assert bool((kept.diff() > 0).all())
    dst, src = (end.on_host for end in ends)
    assert torch.equal(torch.stack([src, dst]), edge_index[:, kept])
    scaled = weight[kept] / 0.75 if weighted or layout == "edge_index" else None
    found = rows["edge_weight"] if layout == "edge_index" else value
    if layout == "csr" and not weighted:  # Which has values always.
        scaled = torch.ones(kept.numel())
    assert scaled is None if found is None else torch.allclose(found.on_host, scaled)


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_how_many_edges_a_device_drops(device, p):
    """As many, and each as often, as if every edge were drawn by itself."""
    times, edges = 2000, 20
    stays = torch.zeros(times, edges)
    torch.manual_seed(0)
    with device:
        for row in stays:
            row[_draw_kept_edges(edges, p, DEVICE).on_host] = 1
    count = stays.sum(1)
    assert count.var() / (edges * p * (1 - p)) == pytest.approx(1, abs=0.15)
    error = (p * (1 - p) / times) ** 0.5
    assert float((stays.mean(0) - (1 - p)).abs().max()) < 4 * error
    assert stays.T.cov().fill_diagonal_(0).abs().max() < 5 * p * (1 - p) / times**0.5


@pytest.mark.parametrize(
    "make_chain", [DropEdge, partial(gas.MHAug, **gas.augment.PUBLISHED["cora"].chain)]
)
def test_views(device, make_chain):
    data = random_graph(NODES, 1200)
    model = make("GATConv", data)
    loader = loaded((data, PTR), epoch_transform=make_chain(data))
    assert_for_the_loss(run(model, gas.PrefetchLoader(loader, model), device))


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: torch.bincount(x),
        lambda x: torch.repeat_interleave(x, x),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1], device=x.device),
        lambda x: torch.ones(3).to(x.device),
        lambda x: x.masked_select(x > 1),
    ],
)
def test_what_the_pretended_device_notes(device, waits):
    with device:
        x = torch.arange(3).to(DEVICE, non_blocking=True)
        index = torch.zeros(2, dtype=torch.long, device=DEVICE)
        torch.repeat_interleave(x, x, output_size=3)
        torch.where(x > 1, x[index].sum(), 0).to(torch.float64)
        assert not device.waits
        waits(x)
        assert device.waits
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            x + torch.ones(3)


@pytest.mark.parametrize("name", ["SAGEConv", "SAGEConv max", "GATConv without loops", "GCN"])
def test_a_batch_that_nobody_has_prepared(graph, device, name):
    """Structures requested by its layers are made on the device."""
    model, twin = (make(name, graph[0]) for _ in range(2))
    batch = next(iter(gas.SubgraphLoader(*graph, batch_size=3, layout="fused", log=False)))
    expected = torch.autograd.grad(twin(batch).sum(), list(twin.parameters()))
    with device:
        device.move(model)
        there = batch.to(model.device)
        device.waits.clear()
        found = torch.autograd.grad(model(there).sum(), list(model.parameters()))
        assert not device.waits
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.on_host, other)


@pytest.mark.parametrize("kept", [0, 40, 75])
def test_a_transpose_that_is_made_on_the_device(device, kept):
    """The operator itself, into which a pretended device doesn't see."""
    col = torch.randint(75, (300,), dtype=torch.int32)
    rowptr = torch.arange(0, 301, 10, dtype=torch.int32)
    wanted = transpose(rowptr, col, 75, kept)
    with device:
        found = transpose(rowptr.to(DEVICE), col.to(DEVICE), 75, kept)
        device.waits[:2] = []
        assert not device.waits
    assert torch.equal(found[0].on_host, wanted[0])
    for mine, other in zip(found[1:], wanted[1:], strict=True):
        kept_entries = int(wanted[0][-1])
        assert mine.on_host.dtype == torch.int32
        assert torch.equal(mine.on_host[:kept_entries], other[:kept_entries])


@pytest.mark.parametrize("wrong", [-1, 5])
def test_columns_are_looked_at_on_the_device(device, wrong):
    rowptr, col = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([4, wrong]).int()
    with device, pytest.raises(RuntimeError, match=r"'col' has a column outside \[0, 5\)"):
        transpose(rowptr.to(DEVICE), col.to(DEVICE), 5, 5)


def assert_no_step_waits_for_a_real_device(model, loader, drop=0.0):
    batches = gas.PrefetchLoader(loader, model.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def epoch():
        for batch in batches:
            if drop > 0:
                batch.data.adj_t = gas.drop_edges(batch.data.adj_t, drop)
            optimizer.zero_grad()
            (model(batch).pow(2).mean() + getattr(model, "reg_loss", 0.0)).backward()
            optimizer.step()

    epoch()  # Layers show what they ask for, and libraries allocate.
    with no_sync():
        epoch()


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("name", [*LAYERS, *MODELS])
def test_no_step_waits_for_a_real_device(graph, name, prefetch):
    model = make(name, graph[0], prefetch=prefetch)
    assert_no_step_waits_for_a_real_device(model, loaded(graph))


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
@pytest.mark.parametrize("layout", ["edge_index", "csr", "fused"])
@pytest.mark.parametrize("name", ["GraphSAGE", "PNA"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_other_layouts_and_features_on_a_real_device(graph, name, layout, is_sparse):
    data = copy.copy(graph[0])
    if is_sparse:
        data.x = (data.x * (data.x > 0)).to_sparse_csr()
    loader = loaded((data, PTR), layout=layout)
    assert_no_step_waits_for_a_real_device(make(name, data), loader)


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
@pytest.mark.parametrize("layout", ["csr", "fused"])
def test_dropped_edges_on_a_real_device(graph, layout):
    model = make("GraphSAGE", graph[0])
    assert_no_step_waits_for_a_real_device(model, loaded(graph, layout=layout), 0.5)
