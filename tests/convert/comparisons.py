"""Comparisons of converted models with the modules that they come from."""

import copy
import dataclasses

import torch
from conftest import random_graph
from torch import nn
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import GCNConv, MessagePassing, SAGEConv
from torch_geometric.utils import add_self_loops, degree

import gas


def check(net, data, call=None, tolerance=1e-10):
    """Convert a module, and compare it with the module called as its user would, in float64."""
    net, data = net.double().eval(), data.clone()
    for key, value in data.to_dict().items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            data[key] = value.double()
    call = call or (lambda net, data: net(data))
    expected = tree_leaves(fields_of(call(net, copy.copy(data))))
    model = gas.to_scalable(net, data, dtype=torch.float64)
    graph = gas.cluster(data, 4, model=model, log=False)
    out = model.predict(graph, log=False)
    found = tree_leaves(fields_of(out))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is theirs or torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    # Mini-batches, with the halo's rows from the histories.
    for batch in gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False):
        rows = tree_leaves(fields_of(model(batch)))
        nodes = graph.perm[batch.n_id[: batch.batch_size]]
        for mine, theirs in zip(rows, expected, strict=True):
            assert mine is theirs or torch.allclose(
                mine, theirs[nodes], rtol=tolerance, atol=tolerance
            )
    assert gas.verify(model, graph)
    return model, graph, out


def check_gradients(net, data, call, loss=lambda out: out.square().mean(), fewest=4):
    """Compare gradients on a graph of one part with those of the module, in float64."""
    net, data = net.double().eval(), data.clone()
    data = data.apply(lambda rows: rows.double() if rows.is_floating_point() else rows)
    model = gas.to_scalable(net, data)
    (batch,) = gas.SubgraphLoader(gas.cluster(data, 1, model=model, log=False), log=False)
    gradients = []
    for out in (model(batch), call(net, data)):
        net.zero_grad()
        loss(out).backward()
        gradients.append(
            {n: w.grad.clone() for n, w in net.named_parameters() if w.grad is not None}
        )
    assert len(gradients[0]) == len(gradients[1]) >= fewest
    for name, mine in gradients[0].items():
        torch.testing.assert_close(mine, gradients[1][name], rtol=1e-9, atol=1e-12)


def of_x(net, data):
    return net(data.x, data.edge_index)


def fields_of(out):
    is_made = dataclasses.is_dataclass(out)
    return {f.name: getattr(out, f.name) for f in dataclasses.fields(out)} if is_made else out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(5, 8), GCNConv(8, 3)


class Unused(Net):
    """Has a layer that it never calls."""

    def __init__(self):
        super().__init__()
        self.sage1, self.sage2 = SAGEConv(5, 8), SAGEConv(8, 3)

    def forward(self, x, edge_index):
        return self.sage2(self.sage1(x, edge_index).relu(), edge_index)


class TutorialConv(MessagePassing):
    """The layer of PyG's tutorial."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        x = self.lin(x)
        row, col = edge_index
        deg = degree(col, x.size(0), dtype=x.dtype)
        deg_inv_sqrt = deg.pow(-0.5)
        deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
        norm = deg_inv_sqrt[row] * deg_inv_sqrt[col]
        return self.propagate(edge_index, x=x, norm=norm) + self.bias

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Layers(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.lin = first, second, nn.Linear(8, 3)

    def forward(self, x, edge_index):
        return self.lin(self.second(self.first(x, edge_index).relu(), edge_index))


def with_edge_attr():
    data = random_graph()
    data.edge_attr = torch.rand(data.num_edges, 2)
    return data


def of_edge_attr(net, data):
    return net(data.x, data.edge_index, data.edge_attr)


def net_of(function, **attributes):
    """Return a module whose forward is ``function(self, x, edge_index)``."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.lin = SAGEConv(5, 8), SAGEConv(8, 3), nn.Linear(5, 3)
            self.c = GCNConv(5, 8, normalize=False)
            self.d = GCNConv(8, 3, normalize=False)

        def forward(self, x, edge_index):
            return function(self, x, edge_index)

    net = Net()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net
