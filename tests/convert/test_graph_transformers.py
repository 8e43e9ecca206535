"""Graph transformers and layers of edge features: batches equal the full batch (E1 to E3).

Each as a module of a user's own through ``gas.to_scalable``, and in a model written by hand.
"""

import pytest
import torch
import torch_geometric.nn as pyg
from conftest import random_graph
from torch import nn

import gas
from gas.graph import get_mapped_rows
from gas.loader.lazy import LazyRows

E = 3  # Width of what edges have.
W = 8
CLASSES = 4


def transformer(i, o, **options):
    return pyg.TransformerConv(i, o // 2, heads=2, **options)


class LocalGPS(nn.Module):
    """GPSConv without its global attention."""

    def __init__(self, width, conv):
        super().__init__()
        self.conv = conv
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, edge_index, edge_attr):
        h = self.norm1(self.conv(x, edge_index, edge_attr) + x)
        return self.norm2(h + self.mlp(h))


LAYERS = {  # Whether they take edge_attr, and what makes one of some width.
    "Transformer": (False, transformer),
    "Transformer, edges": (True, lambda i, o: transformer(i, o, edge_dim=E)),
    "Transformer, beta": (True, lambda i, o: transformer(i, o, edge_dim=E, beta=True)),
    "Transformer, mean of heads": (
        True,
        lambda i, o: pyg.TransformerConv(i, o, heads=3, concat=False, edge_dim=E, beta=True),
    ),
    "GINE": (True, lambda i, o: pyg.GINEConv(nn.Linear(i, o), train_eps=True, edge_dim=E)),
    "NNConv": (True, lambda i, o: pyg.NNConv(i, o, nn.Linear(E, i * o), aggr="mean")),
    "ResGated": (True, lambda i, o: pyg.ResGatedGraphConv(i, o, edge_dim=E)),
    "GEN": (True, lambda i, o: pyg.GENConv(i, o, edge_dim=E, norm="layer")),
    "GATv2": (True, lambda i, o: pyg.GATv2Conv(i, o // 2, heads=2, edge_dim=E)),
    "GPS, local": (
        True,
        lambda i, o: (
            LocalGPS(o, transformer(o, o, edge_dim=E)) if i == o else transformer(i, o, edge_dim=E)
        ),
    ),
}


class Net(nn.Module):
    """Three layers, as for a whole graph."""

    def __init__(self, name):
        super().__init__()
        self.takes_edges, make = LAYERS[name]
        self.convs = nn.ModuleList([make(5, W), make(W, W), make(W, CLASSES)])

    def forward(self, x, edge_index, edge_attr):
        edge_attr = (edge_attr,) if self.takes_edges else ()
        for conv in self.convs[:-1]:
            x = conv(x, edge_index, *edge_attr).relu()
        return self.convs[-1](x, edge_index, *edge_attr)


class ByHand(gas.ScalableGNN):
    """The same, as a user writes it for square batches."""

    def __init__(self, net, num_nodes, dtype):
        super().__init__(num_nodes, W, num_layers=3, dtype=dtype)
        self.convs, self.takes_edges = net.convs, net.takes_edges

    def forward(self, x, edge_index, *args, edge_attr=None):
        edge_attr = (edge_attr,) if self.takes_edges else ()
        for history, conv in zip(self.histories, self.convs[:-1], strict=True):
            x = conv(x, edge_index, *edge_attr).relu()
            x = self.push_and_pull(history, x, *args)
        return self.convs[-1](x, edge_index, *edge_attr)


class ByHandInPairs(ByHand):
    """The same with sources and destinations, of a batch's own nodes alone."""

    def forward(self, x, adj_t, *args, edge_attr=None):
        edge_attr = (edge_attr,) if self.takes_edges else ()
        batch_size = args[0] if args else None
        for history, conv in zip(self.histories, self.convs[:-1], strict=True):
            x = conv((x, x[:batch_size]), adj_t, *edge_attr).relu()
            x = self.push_and_pull(history, x, *args)
        return self.convs[-1]((x, x[:batch_size]), adj_t, *edge_attr)


WAYS = {
    "converted": ("fused", "csr", "edge_index"),
    "by hand": ("edge_index",),
    "in pairs": ("csr", "edge_index"),
}
# A residual of all rows; and self-loops, which PyG doesn't add to a matrix if edges have features.
UNTAKEN = [("GPS, local", "csr"), ("GPS, local", "edge_index"), ("GATv2", "csr")]
CASES = [
    pytest.param(name, way, layout, id=f"{name}-{way}-{layout}")
    for name in LAYERS
    for way, layouts in WAYS.items()
    for layout in layouts
    if way != "in pairs" or (name, layout) not in UNTAKEN
]


def graph(dtype=torch.float32, directed=True):
    """Return edges have features of their own; no edge goes into one of the nodes."""
    data = random_graph(directed=directed, dtype=dtype)
    data.edge_index = data.edge_index[:, data.edge_index[1] != 7]
    data.edge_attr = torch.randn(data.num_edges, E, dtype=dtype)
    return data


def make(name, way, data):
    """Return a module, the model with its parameters, and the graph for it."""
    torch.manual_seed(1)
    net = Net(name).to(data.x.dtype).eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    if way == "converted":
        model = gas.to_scalable(net, data, dtype=data.x.dtype)
    else:
        cls = ByHand if way == "by hand" else ByHandInPairs
        model = cls(net, data.num_nodes, data.x.dtype)
    return net, model.eval()


def close(out, expected, tolerance):
    out, expected = out.detach(), expected.detach()
    return bool((out - expected).abs().max() <= tolerance * expected.abs().max())


def gradients(out, net, weight):
    return torch.autograd.grad((out * weight).sum(), list(net.parameters()))


@pytest.mark.slow(fast=11)
@pytest.mark.parametrize("directed", [True, False], ids=["directed", "undirected"])
@pytest.mark.parametrize(("name", "way", "layout"), CASES)
def test_one_part_equals_the_full_batch(name, way, layout, directed):
    data = graph(torch.float64, directed)
    net, model = make(name, way, data)
    net.train(), model.train()
    expected = net(data.x, data.edge_index, data.edge_attr)
    weight = torch.randn_like(expected)
    wanted = gradients(expected, net, weight)
    clustered = gas.cluster(data, 1, log=False)
    (batch,) = gas.SubgraphLoader(clustered, layout=layout, log=False)
    out = model(batch)
    assert close(out, expected[clustered.perm], 1e-12)
    found = gradients(out, net, weight[clustered.perm])
    largest = max(float(grad.abs().max()) for grad in wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert float((mine - other).abs().max()) < 1e-12 * largest


@pytest.mark.slow(fast=11)
@pytest.mark.parametrize("directed", [True, False], ids=["directed", "undirected"])
@pytest.mark.parametrize(("name", "way", "layout"), CASES)
def test_sweeps_and_inference_equal_the_uncut_graph(name, way, layout, directed):
    data = graph(directed=directed)
    net, model = make(name, way, data)
    with torch.no_grad():
        hidden = [data.x]
        for depth in (1, 2, 3):
            hidden.append(Layers(net, depth)(data))
    clustered = gas.cluster(data, 6, log=False)
    loader = gas.SubgraphLoader(clustered, batch_size=2, shuffle=True, layout=layout, log=False)
    for history in model.histories:
        history.push(torch.randn_like(history.emb))
    out = torch.full_like(hidden[-1], float("nan"))
    with torch.no_grad():
        for _ in range(3):
            for batch in loader:
                out[batch.perm[: batch.batch_size]] = model(batch)
    assert close(out, hidden[-1], 1e-5)
    for history in model.histories:
        history.push(torch.randn_like(history.emb))
    assert close(model.predict(clustered, 2, layout=layout), hidden[-1], 1e-5)
    for history, rows in zip(model.histories, hidden[1:3], strict=True):
        assert close(history.emb, rows[clustered.perm], 1e-5)
    assert gas.verify(model, clustered, 2, layout=layout)


class Layers:
    """Outputs of the first layers of a module on the whole graph, or with given halo rows."""

    def __init__(self, net, depth=3):
        self.net, self.depth = net, depth

    def __call__(self, data, own=None, hidden=()):
        edge_attr = (data.edge_attr,) if self.net.takes_edges else ()
        x = data.x
        for depth in range(self.depth):
            x = self.net.convs[depth](x, data.edge_index, *edge_attr)
            x = x.relu() if depth < 2 else x
            if own is not None and depth < 2:
                x = torch.where(own[:, None], x, hidden[depth])
        return x


@pytest.mark.slow(fast=11)
@pytest.mark.parametrize(("name", "way", "layout"), CASES)
def test_gradients_of_batches_are_those_with_the_halo_detached(name, way, layout):
    data = graph(torch.float64)
    net, model = make(name, way, data)
    with torch.no_grad():
        hidden = [Layers(net, depth)(data) for depth in (1, 2)]
    clustered = gas.cluster(data, 6, log=False)
    model.predict(clustered, layout=layout)
    for batch in gas.SubgraphLoader(clustered, batch_size=2, layout=layout, log=False):
        rows = batch.perm[: batch.batch_size]
        own = torch.zeros(data.num_nodes, dtype=torch.bool).index_fill_(0, rows, True)
        expected = Layers(net)(data, own, hidden)[rows]
        weight = torch.randn_like(expected)
        wanted = gradients(expected, net, weight)
        found = gradients(model(batch), net, weight)
        largest = max(float(grad.abs().max()) for grad in wanted)
        for mine, other in zip(found, wanted, strict=True):
            assert float((mine - other).abs().max()) < 1e-12 * largest


@pytest.mark.parametrize(("way", "layout"), [("converted", "fused"), ("by hand", "edge_index")])
def test_edge_features_that_stay_on_the_disk(way, layout, tmp_path):
    """History 0 of edges: rows of a mapped table, read batch by batch, and the same training."""
    data = graph()
    curves = []
    for out in (None, tmp_path / "folder"):
        clustered = gas.cluster(data, 6, log=False, out=out)
        net, model = make("Transformer, edges", way, data)
        torch.manual_seed(3)
        pred = model.predict(clustered, 2, layout=layout)
        assert close(pred, net(data.x, data.edge_index, data.edge_attr), 1e-5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        loader = gas.SubgraphLoader(clustered, batch_size=2, shuffle=True, layout=layout, log=False)
        for _ in range(3):
            model.train()
            for batch in loader:
                assert type(dict.get(batch.data._store._mapping, "edge_attr")) is LazyRows
                own = batch.own
                loss = torch.nn.functional.cross_entropy(model(batch), own.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                assert torch.equal(batch.edge_attr, clustered.edge_attr[batch.data.e_id])
        curves.append([*losses, *model.predict(clustered, 2, layout=layout).view(-1).tolist()])
    assert curves[0] == curves[1]
    assert get_mapped_rows(clustered.edge_attr) is not None
