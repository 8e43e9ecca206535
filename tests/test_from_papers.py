"""``benchmarks/from_papers.py``: each contender does what it says."""

import functools
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch_geometric.nn import GraphSAGE

import gas
import gas.compat
from gas.datasets import planted_partition
from gas.datasets.masks import with_masks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def papers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("from_papers")


def make(papers, kind, net_options=(), layers=3, nodes=300, attributes=(), method="random"):
    """Return a contender in float64, without dropout, and its graph of 6 parts."""
    torch.manual_seed(0)
    data = with_masks(planted_partition(nodes), num_splits=1)
    data.x = data.x.double()
    options = {"dropout": 0.0, "norm": None, **dict(net_options)}
    net = GraphSAGE(data.num_features, 16, layers, int(data.y.max()) + 1, **options).double()
    graph = gas.cluster(data, 6, method=method, log=False)
    model, graph, _ = papers.write_out(
        functools.partial(kind, dtype=torch.float64), None, net, graph
    )
    for name, value in dict(attributes).items():
        setattr(model, name, value)
    return model.train(), graph


def step(model, batch):
    """Return the gradient of the sum of a batch's losses."""
    model.zero_grad()
    mask, y = batch.own.train_mask, batch.own.y
    out = model(batch)
    F.cross_entropy(out[mask], y[mask]).backward()
    return torch.cat([int(mask.sum()) * p.grad.flatten() for p in model.parameters()])


def train(papers, kind, **attributes):
    """Train with dropout and BatchNorm; return the losses and the weights."""
    model, graph = make(papers, kind, {"dropout": 0.5, "norm": "batch_norm"}, 3, 300, attributes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    options = {"batch_size": 2, "log": False, "warm_up": 0, "correct_drift": False}
    run = gas.fit(model, graph, optimizer, 3, keep_best=False, **options)
    return run.loss, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("is_sparse", [False, True])
def test_plain_histories_are_those_of_a_converted_model(papers, is_sparse):
    torch.manual_seed(0)
    data = with_masks(planted_partition(300), num_splits=1)
    data.x = data.x.to_sparse_csr() if is_sparse else data.x
    losses = []
    for writes in (False, True):
        torch.manual_seed(0)
        net = GraphSAGE(data.num_features, 16, 3, 20, dropout=0.5, norm="batch_norm")
        model = gas.to_scalable(net, data)
        graph = gas.cluster(data, 6, model=model, method="random", log=False)
        if writes:
            model, graph, _ = papers.write_out(papers.SAGE, model, net, graph)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(1)
        run = gas.fit(model, graph, optimizer, 3, batch_size=2, log=False, warm_up=0)
        losses.append(run.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "off"), [("AgeWeights", {"decay": 0.0}), ("Momentum", {"beta": 0.0})]
)
def test_contenders_turned_off_are_plain_histories(papers, kind, off):
    plain = train(papers, papers.SAGE)
    changed, unchanged = (
        train(papers, getattr(papers, kind)),
        train(papers, getattr(papers, kind), **off),
    )
    assert plain[0] == unchanged[0]
    assert torch.equal(plain[1], unchanged[1])
    assert plain[0] != changed[0]


def test_age_weights(papers):
    model, graph = make(papers, papers.AgeWeights, layers=2)
    first, second, _ = gas.SubgraphLoader(graph, batch_size=2, log=False)
    model.refresh(graph)
    pushes = model.histories[0].num_pushes
    model(first)
    rows = model.histories[0].emb.clone()
    age = (pushes + 1 - model.histories[0].written_at).clamp(min=0) + 1.0
    out = model(second)
    halo = second.n_id[second.batch_size :]
    weight = torch.exp(-age[halo] / 2)[:, None]
    own = model.histories[0].emb[second.n_id[: second.batch_size]]
    expected = model.net.convs[1](gas.history.Rows(own, rows[halo] * weight), second.adj_t)
    torch.testing.assert_close(out, expected.to(out))


def test_momentum_of_one_is_what_is_computed_inside(papers):
    model, graph = make(papers, papers.Momentum, attributes={"beta": 1.0})
    model.refresh(graph)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, log=False)))
    model(batch)
    exact = make(papers, papers.SAGE)[0]
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.mul_(1.1)
    exact.refresh(graph)
    torch.testing.assert_close(
        model.histories[0].emb[batch.n_id], exact.histories[0].emb[batch.n_id]
    )
    # Of the second layer, messages from outside are missing.
    n_id, halo = batch.n_id, batch.n_id[batch.batch_size :]
    inside = torch.zeros(graph.num_nodes, dtype=torch.bool)
    inside[n_id] = True
    source, target = graph.edge_index
    kept = inside[source]
    h = exact.histories[0].emb
    sums = torch.zeros_like(h).index_add_(0, target[kept], h[source[kept]])
    degree = torch.bincount(target, minlength=graph.num_nodes).clamp(min=1)
    rows = model.transform(1, sums / degree[:, None], h).relu()
    torch.testing.assert_close(model.histories[1].emb[halo], rows[halo].detach())


@pytest.mark.parametrize(("kind", "beta"), [("BackwardLMC", None), ("LMC", 0.0)])
def test_gradients_of_lmc_add_up_to_the_whole_graphs(papers, kind, beta):
    model, graph = make(papers, getattr(papers, kind), layers=4, attributes={"beta": beta})
    whole = step(model, next(iter(gas.SubgraphLoader(graph, batch_size=6, log=False))))
    batches = gas.SubgraphLoader(graph, batch_size=2, log=False)
    torch.testing.assert_close(
        sum(step(model, batch) for batch in batches),
        whole,
        rtol=0,
        atol=1e-12 * float(whole.abs().max()),
    )
    plain, graph = make(papers, papers.SAGE, layers=4)
    plain.refresh(graph)
    total = sum(step(plain, batch) for batch in batches)
    assert (total - whole).abs().max() > 0.1 * whole.abs().max()


def test_lmc_trains(papers):
    losses = {kind: train(papers, getattr(papers, kind))[0] for kind in ("LMC", "BackwardLMC")}
    assert all(loss[-1] < loss[0] for loss in losses.values())
    assert losses["LMC"] != losses["BackwardLMC"]


def test_top(papers):
    model, graph = make(papers, papers.TOP)
    plain, _ = make(papers, papers.SAGE)
    uncut = next(iter(gas.SubgraphLoader(graph, batch_size=6, log=False)))
    torch.testing.assert_close(model(uncut), plain(uncut))
    model.features, graph = torch.ones_like(model.features), graph
    model.means = model.features.clone()
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, log=False)))
    model.basis = None
    whole = model(graph.x, model.edges)  # All nodes are alike, so that one's rows give another's.
    torch.testing.assert_close(
        model(batch), whole[batch.n_id[: batch.batch_size]], rtol=0, atol=1e-3
    )
    assert not len(model.histories)


def test_first_layer_fresh(papers):
    model, graph = make(papers, papers.FirstLayerFresh, {"norm": "batch_norm"}, layers=2)
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, log=False)))
    own = batch.n_id[: batch.batch_size]
    z = model.first_layer(torch.arange(graph.num_nodes))
    h = model.activate_halo(0, z, z[own])  # Histories have only zeros.
    expected = model.net.convs[1](h, model.edges)[own]
    torch.testing.assert_close(model(batch), expected)


def test_callbacks(papers):
    model, graph = make(papers, papers.SAGE)
    batches = gas.SubgraphLoader(graph, batch_size=2, log=False)
    model.refresh(graph)
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    refresh = papers.Refresh(model, graph, 2)
    errors = []
    for _ in range(2):
        refresh.on_step_end(None)
        errors.append(max(stale.error for stale in model.staleness(batches)))
    assert errors[0] > 0.1
    assert errors[1] < 1e-12
    forward = papers.ForwardOnly(model, graph, 2, 2)
    pushes = model.histories[0].num_pushes
    forward.on_step_end(None)
    assert model.histories[0].num_pushes == pushes + 2


def test_contenders_in_time_to_accuracy(papers, monkeypatch):
    times = importlib.import_module("time_to_accuracy")
    monkeypatch.setattr(times, "MOST_EPOCHS", 2)
    monkeypatch.setattr(times, "PAPERS_WAY", (6, 2, times.PLAIN))
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    runs = {}
    case = "planted:300:SAGE:batch:0.01"
    for _ in times.measure(
        case, lambda name: times.read_graph("", name), 0, runs, papers.FROM_PAPERS, 0.01
    ):
        pass
    assert list(runs) == ["full batch", *papers.FROM_PAPERS]
    assert all(run["seconds"][-1] >= 0.01 for name, run in runs.items() if name != "full batch")
    runs = {"full batch": runs["full batch"]}
    assert not list(
        times.measure(
            "planted:300:GCN:batch:0.01",
            lambda name: times.read_graph("", name),
            0,
            runs,
            papers.FROM_PAPERS,
        )
    )


def test_pyg_autoscale(papers, monkeypatch):
    """The names of gas.compat, in place of the package, give plain histories that begin at zero."""
    monkeypatch.setitem(sys.modules, "torch_geometric_autoscale", gas.compat)
    monkeypatch.setattr(torch, "empty", torch.empty)  # The benchmark replaces it for good.
    times = importlib.import_module("time_to_accuracy")
    monkeypatch.setattr(gas, "cluster", functools.partial(gas.cluster, method="random"))
    data = times.read_graph("", "planted:600")
    net = times.make_net(data, "SAGE", "batch", 0)
    run = times.train_as_pyg(data, net, 0.01, times.OF_PYG["pyg_autoscale"], 0.3)
    assert run["val"][-1] > 0.5
