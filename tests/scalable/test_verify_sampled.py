"""``gas.verify`` against neighbourhoods of sampled nodes, and of a loader's own mini-batches."""

import re
import sys

import pytest
import torch
import torch_geometric.transforms as T
from conftest import random_graph
from torch_geometric.data import Data
from torch_geometric.nn import APPNP, SAGEConv
from torch_geometric.utils import degree, k_hop_subgraph, scatter

import gas
from gas.augment import DropEdge

NODES = 300


def sparse_graph(**kwargs):
    """Return a graph whose neighbourhoods of three hops are a part of it."""
    torch.manual_seed(0)
    return random_graph(NODES, 500, **kwargs)


def clustered(model=None, num_parts=12):
    return gas.cluster(sparse_graph(), num_parts, model=model, log=False)


def zoo(name, num_layers=3):
    options = {}
    if name == "GAT":
        options = {"hidden_heads": 2, "out_heads": 1}
    if name.startswith("PNA"):
        options = {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"]}
        options["deg"] = torch.tensor([1, 2, 3, 4])
    cls = getattr(gas.models, name)
    return cls(NODES, 5, hidden_channels=8, out_channels=3, num_layers=num_layers, **options)


ZOO = ["GCN", "GAT", "APPNP", "GCN2", "GIN", "GraphSAGE", "PNA", "PNA_JK"]


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("layout", ["csr", "edge_index", "fused"])
@pytest.mark.parametrize("name", ZOO)
def test_exact_models(name, layout):
    model = zoo(name)
    if name in ("GraphSAGE", "GIN", "PNA", "PNA_JK"):
        graph = gas.cluster(sparse_graph(), 12, log=False)
    else:
        graph = clustered(model)
    found = gas.verify(model, graph, 2, layout=layout, num_nodes=10)
    assert found
    assert len(found.errors) == 3
    assert max(found.errors) < 2e-6
    assert found.reference == "3-hop neighbourhoods of 10 sampled nodes"
    assert str(found).startswith("reference: 3-hop neighbourhoods of 10 sampled nodes\nhistory 0")


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_layer_reads_one_hop(name, num_layers):
    """So that as many hops as there are layers are all that a model reads."""
    model = zoo(name, num_layers).eval()
    node = torch.arange(NODES)
    graph = Data(x=torch.randn(NODES, 5), edge_index=torch.stack([node[:-1], node[1:]]))
    data = model.prepare(graph)
    x = data.x.requires_grad_()
    weight = {"edge_weight": data.edge_weight} if "edge_weight" in data else {}
    model(x, data.edge_index, **weight)[50].sum().backward()
    (read,) = x.grad.abs().sum(dim=1).nonzero(as_tuple=True)
    assert read.tolist() == list(range(50 - num_layers, 51))


def test_neighbourhoods():
    graph = clustered()
    graph.edge_attr = torch.arange(graph.num_edges)
    loader = gas.SubgraphLoader(graph, layout="edge_index", batch_size=3, log=False)
    for hops in (1, 2, 3):
        some = torch.tensor([170, 3])
        found = loader.neighbourhood(some, hops)
        within = [k_hop_subgraph(some, k, graph.edge_index)[0] for k in range(hops + 1)]
        assert torch.equal(found.n_id[:2], some)
        assert torch.equal(found.n_id.sort().values, within[hops])
        assert len(within[hops]) < NODES / 2
        assert found.num_nodes == found.n_id.numel()
        assert torch.equal(found.x, graph.x[found.n_id])
        into = torch.isin(graph.edge_index[1], within[hops - 1])
        assert torch.equal(found.e_id.sort().values, into.nonzero().view(-1))
        assert torch.equal(found.n_id[found.edge_index], graph.edge_index[:, found.edge_attr])
    assert (
        loader.neighbourhood(torch.tensor([0]), 1).num_nodes
        == loader.neighbourhood(torch.tensor([0]), 1).n_id.numel()
    )


class OfTheBatch(torch.nn.Module):
    """A convolution by hand that normalises by degrees, which a batch doesn't know."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        src, dst = edge_index
        norm = (degree(dst, x.size(0)) + 1).rsqrt()
        h = self.lin(x) * norm[:, None]
        return (scatter(h[src], dst, dim_size=x.size(0)) + h) * norm[:, None]


class Twice(torch.nn.Module):
    """Two convolutions, and no history between them."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.first = SAGEConv(in_channels, out_channels)
        self.second = SAGEConv(out_channels, out_channels)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Centred(torch.nn.Module):
    """A statistic of all nodes that are there."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = SAGEConv(in_channels, out_channels)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return x - x.mean(dim=0)


class ByHand(gas.ScalableGNN):
    """Layers of which one isn't exact."""

    def __init__(self, wrong=None, at=None, num_layers=3):
        super().__init__(NODES, 8, num_layers)
        self.convs = torch.nn.ModuleList(
            (wrong if layer == at else SAGEConv)(8 if layer else 5, 8)
            for layer in range(num_layers)
        )

    def forward(self, x, edge_index, *args):
        for conv, history in zip(self.convs, self.histories, strict=False):
            x = self.push_and_pull(history, conv(x, edge_index).tanh(), *args)
        return self.convs[-1](x, edge_index)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("wrong", [OfTheBatch, Twice, Centred])
def test_the_first_layer_that_differs(wrong, at):
    model, graph = ByHand(wrong, at), clustered()
    for options in ({}, {"num_nodes": 30}):
        found = gas.verify(model, graph, 2, layout="edge_index", **options)
        assert found.first == at
        assert all(error < 1e-6 for error in found.errors[:at])
        assert found.errors[at] > 1e-3
    assert "to differ, so look at what forward does before it, such as reading further" in str(
        found
    )


@pytest.mark.parametrize("wrong", [OfTheBatch, Twice, Centred])
def test_one_layer_and_no_history(wrong):
    """With one hop, the reference would know as little of neighbours as a batch does."""
    found = gas.verify(
        ByHand(wrong, 0, num_layers=1), clustered(), layout="edge_index", num_nodes=30
    )
    assert found.first == 0
    assert found.reference.startswith("2-hop")
    assert gas.verify(ByHand(num_layers=1), clustered(), layout="edge_index", num_nodes=30)


def test_reading_further_is_never_exact():
    """One mini-batch of all nodes gives what the graph gives; a neighbourhood doesn't."""
    model, graph = ByHand(Twice, 1), clustered()
    assert gas.verify(model, graph, 12, layout="edge_index")
    assert not gas.verify(model, graph, 12, layout="edge_index", num_nodes=30)


def test_a_model_that_is_taken_apart():
    """PyG's APPNP, which has one layer, gets as many histories as hops but one."""
    data = sparse_graph()
    model = gas.to_scalable(APPNP(4, 0.2), data)
    assert model.num_layers == 4
    graph = gas.cluster(data, 12, model=model, log=False)
    found = gas.verify(model, graph, num_nodes=10)
    assert found
    assert found.reference.startswith("4-hop")


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_histories_of_fewer_bits(dtype):
    model = gas.models.GraphSAGE(NODES, 5, 8, 3, num_layers=3, dtype=dtype)
    found = gas.verify(model, clustered(), 2, num_nodes=10)
    assert found
    assert found.errors[-1] > 1e-6


def test_the_sample():
    model, graph = ByHand(Centred, 1), clustered()
    runs = [gas.verify(model, graph, layout="edge_index", num_nodes=3, seed=s) for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    state = torch.get_rng_state()
    whole = gas.verify(model, graph, layout="edge_index", num_nodes=NODES)
    assert torch.equal(state, torch.get_rng_state())
    assert whole.reference == "the uncut graph"
    assert whole == gas.verify(model, graph, layout="edge_index")


def test_where_the_full_batch_does_not_fit(monkeypatch):
    model = gas.models.GraphSAGE(NODES, 5, 8, 3, num_layers=2).train()
    graph = clustered()
    module = sys.modules["gas.scalable.verify"]  # The function has its name.
    monkeypatch.setattr(module, "SAMPLE", 20)
    for room, reference in (
        (150_000, "the uncut graph"),  # The full batch takes 50,000 bytes.
        (75_000, "2-hop neighbourhoods of 20 sampled nodes"),
    ):
        monkeypatch.setattr(module, "free_memory", lambda device, room=room: room)
        found = gas.verify(model, graph, 2)
        assert found
        assert found.reference == reference
        assert model.training
    assert gas.verify(model, graph, num_nodes=NODES).reference == "the uncut graph"


def test_neighbourhoods_that_do_not_fit(monkeypatch):
    """Nodes with smaller ones are looked for, and it is said how many were passed over."""
    model = gas.models.GraphSAGE(NODES, 5, 8, 3, num_layers=2)
    monkeypatch.setattr(sys.modules["gas.scalable.verify"], "free_memory", lambda device: 2500)
    found = gas.verify(model, clustered(), 2, num_nodes=10)
    assert found
    assert re.fullmatch(
        r"2-hop neighbourhoods of 10 sampled nodes \([1-9]\d* with too large ones passed over\)",
        found.reference,
    )
    monkeypatch.setattr(sys.modules["gas.scalable.verify"], "free_memory", lambda device: 9)
    with pytest.raises(MemoryError, match="the neighbourhoods of 20 of 20 nodes don't fit half"):
        gas.verify(model, clustered(), 2, num_nodes=10)


def test_nodes_without_neighbours_do_not_speak_for_the_others(monkeypatch):
    """Nodes with hardly any edges are exact for every model."""
    data = random_graph(NODES, 300)
    graph = gas.cluster(data, 4, log=False)
    loader = gas.SubgraphLoader(graph, log=False)
    module = sys.modules["gas.scalable.verify"]
    order = module._shuffle_nodes(loader, 0)
    assert order.sort().values.tolist() == list(range(NODES))
    assert (loader.degree[order[:50]] > 0).all()
    model = gas.models.GraphSAGE(NODES, 5, 8, 3, num_layers=2)
    monkeypatch.setattr(module, "_max_graph_size", lambda *_: 4)
    with pytest.raises(MemoryError, match="nodes don't fit half of the memory"):
        gas.verify(model, graph, num_nodes=20)


# A loader in place of a graph ---------------------------------------------------------------------


@pytest.mark.parametrize("num_nodes", [None, 10])
def test_a_loader(num_nodes):
    model, graph = ByHand(), clustered()
    loader = gas.SubgraphLoader(graph, batch_size=5, shuffle=True, layout="edge_index", log=False)
    state = torch.get_rng_state()
    assert gas.verify(model, loader, num_nodes=num_nodes)
    assert torch.equal(state, torch.get_rng_state())
    wrong = gas.verify(ByHand(OfTheBatch, 1), loader, num_nodes=num_nodes)
    assert wrong.first == 1


def test_its_batch_size():
    model, graph = ByHand(Twice, 1), clustered()
    for size, exact in ((5, False), (12, True)):
        loader = gas.SubgraphLoader(graph, batch_size=size, layout="edge_index", log=False)
        assert bool(gas.verify(model, loader)) == exact


def test_its_weights():
    """Values of a matrix multiply what SAGE adds up, but in a loader without."""
    data = T.GCNNorm()(sparse_graph())
    perm, ptr = gas.metis(data.edge_index, 12, num_nodes=NODES, log=False)
    data = gas.permute(data, perm, log=False)
    model = gas.models.GraphSAGE(NODES, 5, 8, 3, num_layers=2)
    seen = []
    model.convs[0].register_forward_pre_hook(lambda _, args: seen.append(args[1].values()))
    for weighted in (True, False):
        seen.clear()
        loader = gas.SubgraphLoader(data, ptr, 4, edge_weight=weighted, log=False)
        assert gas.verify(model, loader, num_nodes=5)
        assert bool((torch.cat(seen) != 1).any()) == weighted


def test_views_are_left_alone(monkeypatch):
    monkeypatch.setattr("gas.augment.Views.cut", None)
    graph = clustered()
    loader = gas.SubgraphLoader(graph, batch_size=2, epoch_transform=DropEdge(graph), log=False)
    model = gas.models.GraphSAGE(NODES, 5, 8, 3, num_layers=2)
    assert gas.verify(model, loader, num_nodes=5)
    assert gas.verify(model, loader)
