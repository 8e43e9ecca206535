"""Recurrent and temporal layers, attention over all nodes: refused by name, or exact."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator

import gas

N, W, STEPS = 80, 6, 3


def graph():
    torch.manual_seed(0)
    return Data(x=torch.randn(N, STEPS * W), edge_index=torch.randint(N, (2, 400)))


class GConvGRU(nn.Module):
    """A gated recurrent unit whose gates look at neighbours, of the inputs and of the state."""

    def __init__(self):
        super().__init__()
        self.x = nn.ModuleList([pyg.GraphConv(W, W) for _ in range(3)])
        self.h = nn.ModuleList([pyg.GraphConv(W, W) for _ in range(3)])

    def forward(self, x, edge_index, h):
        update = (self.x[0](x, edge_index) + self.h[0](h, edge_index)).sigmoid()
        reset = (self.x[1](x, edge_index) + self.h[1](h, edge_index)).sigmoid()
        new = (self.x[2](x, edge_index) + self.h[2](reset * h, edge_index)).tanh()
        return update * h + (1 - update) * new


class OverTime(nn.Module):
    """Steps of time in the columns of ``x``; the state begins anew with every call."""

    def __init__(self, layer, functions):
        super().__init__()
        self.layer, self.last = layer, pyg.SAGEConv(W, 3)
        self.functions = functions

    def forward(self, x, edge_index):
        steps = x.view(-1, STEPS, W)
        return self.last(self.functions(self, steps, edge_index), edge_index)


def unrolled(net, steps, edge_index):
    h = torch.zeros_like(steps[:, 0])
    for step in range(STEPS):
        h = net.layer(steps[:, step], edge_index, h)
    return h


def by_node(net, steps, edge_index):
    return net.layer(steps)[0][:, -1]


def cell(net, steps, edge_index):
    h = steps[:, 0]
    for step in range(1, STEPS):
        h = net.layer(steps[:, step], h)
    return h


class GateOfState(nn.Module):
    """A unit whose only convolution is of the state."""

    def __init__(self, hops):
        super().__init__()
        self.lin, self.conv = nn.Linear(W, W), pyg.ChebConv(W, W, hops)

    def forward(self, x, edge_index, h):
        return (self.lin(x) + self.conv(h, edge_index)).tanh()


def first_step(net, steps, edge_index):
    return net.layer(steps[:, 0], edge_index, torch.zeros_like(steps[:, 0]))


def temporal():
    """Stands in for a unit of a package that isn't installed."""
    name = "torch_geometric_temporal.nn.recurrent.gconv_gru"
    return type("GConvGRU", (GConvGRU,), {"__module__": name})()


EXACT = {
    "a graph convolution in a GRU, unrolled": (GConvGRU, unrolled),
    "a unit of PyTorch Geometric Temporal": (temporal, unrolled),
    "a convolution of zeros": (lambda: GateOfState(2), first_step),
    "a convolution without hops": (lambda: GateOfState(1), unrolled),
    "torch.nn.GRU by node": (lambda: nn.GRU(W, W, batch_first=True), by_node),
    "torch.nn.LSTM by node": (lambda: nn.LSTM(W, W, 2, batch_first=True), by_node),
    "torch.nn.GRUCell by node": (lambda: nn.GRUCell(W, W), cell),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_begins_anew_with_every_call_is_exact(name):
    make, functions = EXACT[name]
    data, net = graph(), OverTime(make(), functions).eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 5, model=model, log=False)
    expected = net(data.x, data.edge_index).detach()
    assert torch.allclose(model.predict(clustered, 2), expected, atol=1e-5)
    assert gas.verify(model, clustered, 2)


class Two(nn.Module):
    """A layer between two."""

    def __init__(self, layer, name=None):
        super().__init__()
        self.a, self.layer, self.b = pyg.SAGEConv(STEPS * W, W), layer, pyg.SAGEConv(W, 3)
        self.name = name

    def forward(self, x, edge_index):
        layer = self.layer if self.name is None else self.layer[self.name]
        return self.b(layer(self.a(x, edge_index).relu(), edge_index), edge_index)


class Carried(nn.Module):
    """Adds its previous output: a state that is never reset."""

    def __init__(self, width=W):
        super().__init__()
        self.conv, self.state = pyg.SAGEConv(width, W), None

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        self.state = h if self.state is None else h + self.state.detach()
        return self.state


class Evolving(nn.Module):
    """Weights that a recurrent unit changes in every call, after EvolveGCN."""

    def __init__(self, buffer=False):
        super().__init__()
        self.start, self.unit = nn.Parameter(torch.randn(W, W)), nn.GRUCell(W, W)
        self.conv, self.buffer = pyg.SimpleConv("mean"), buffer
        self.weight = None
        if buffer:
            del self.weight
            self.register_buffer("weight", torch.randn(W, W))

    def forward(self, x, edge_index):
        before = self.start if self.weight is None else self.weight
        self.weight = self.unit(before, before)
        return self.conv(x @ self.weight, edge_index)


class Remembering(nn.Module):
    """Keeps its output as an attribute."""

    def __init__(self):
        super().__init__()
        self.conv, self.seen = pyg.SAGEConv(W, W), None

    def forward(self, x, edge_index):
        self.seen = self.conv(x, edge_index)
        return self.seen


def memory():
    return pyg.TGNMemory(N, 1, W, W, IdentityMessage(1, W, W), LastAggregator())


REFUSED = {
    "a state": (lambda: Two(Carried()), r"'layer' \(Carried\) keeps 'state' of one call for"),
    "weights": (lambda: Two(Evolving()), r"'layer' \(Evolving\) keeps 'weight' of one call for"),
    "a buffer": (lambda: Two(Evolving(True)), r"'layer' \(Evolving\) keeps 'weight' of one call"),
    "itself": (lambda: Carried(STEPS * W), r"Carried keeps 'state' of one call for"),
    "TGNMemory": (lambda: Two(memory()), r"'layer' \(TGNMemory\) isn't exact .* a memory"),
    "a GRU over edges": (
        lambda: Two(pyg.SAGEConv(W, W, pyg.aggr.GRUAggregation(W, W))),
        r"'layer' \(SAGEConv\) .* the order in which a node's edges are stored",
    ),
    "an LSTM over edges": (
        lambda: pyg.GraphSAGE(STEPS * W, 8, 2, 3, aggr="lstm"),
        r"'convs.0' \(SAGEConv\) .* the order in which a node's edges are stored",
    ),
    "SGFormer": (
        lambda: pyg.SGFormer(STEPS * W, 8, 3),
        r"'trans_conv.attns.0' \(SGFormerAtt.* all",
    ),
    "Polynormer": (lambda: pyg.Polynormer(STEPS * W, 8, 3), r"'global_attn.0' \(Polynormer.* all"),
    "PMLP": (
        lambda: pyg.PMLP(STEPS * W, 8, 3, 2),
        r"'norm' \(BatchNorm1d\) isn't exact on mini-batches",
    ),
    "something inside that can't be followed": (
        lambda: Two(nn.ModuleDict({"inner": Branching()}), "inner"),
        r"Two.forward can't be followed in 'layer.inner' \(Branching\): .* raises TraceError",
    ),
}


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.SAGEConv(W, W)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) if x.sum() > 0 else x


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(make(), graph())


def test_what_is_kept_and_never_read_does_no_harm():
    data, net = graph(), Two(Remembering()).eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 5, model=model, log=False)
    expected = net(data.x, data.edge_index).detach()
    assert torch.allclose(model.predict(clustered, 2), expected, atol=1e-5)


def test_other_layers_of_temporal_packages_are_tried():
    layer = type("LocalConv", (pyg.GraphConv,), {})(W, W)
    type(layer).__module__ = "torch_geometric_temporal.nn.attention.some"
    data, net = graph(), Two(layer).eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 5, model=model, log=False)
    expected = net(data.x, data.edge_index).detach()
    assert torch.allclose(model.predict(clustered, 2), expected, atol=1e-5)


def test_attributes_of_edges_that_nobody_reads():
    """PyG's GCN names edge_attr, and its normalisation changes the edges."""
    data = graph()
    data.edge_attr = torch.rand(data.num_edges, 2)
    net = pyg.GCN(STEPS * W, 8, 3, 3, jk="lstm").eval()
    model = gas.to_scalable(net, data)
    del data.edge_attr
    clustered = gas.cluster(data, 5, model=model, log=False)
    expected = net(data.x, data.edge_index).detach()
    assert torch.allclose(model.predict(clustered, 2), expected, atol=1e-5)
