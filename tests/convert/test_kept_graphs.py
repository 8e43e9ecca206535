"""Modules that keep the graph, or its tensors, in attributes."""

import copy

import pytest
import torch
from comparisons import check, check_gradients
from conftest import random_graph
from torch import nn
from torch_geometric.nn import GCNConv, GraphConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import gas


def make_graph(num_nodes=60):
    data = random_graph(num_nodes, dtype=torch.float64)
    data.edge_weight = torch.rand(data.num_edges, dtype=torch.float64)
    return data


class Keeps(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.a, self.b = GraphConv(5, 8), GraphConv(8, 3)
        self.edges = data.edge_index

    def run(self, x, *edges):
        return self.b(self.a(x, *edges).relu(), *edges)

    def forward(self, x, scale=2.0):
        return self.run(scale * x, self.edges)


class KeepsBuffers(Keeps):
    def __init__(self, data):
        super().__init__(data)
        self.register_buffer("list", data.edge_index)
        self.register_buffer("weight", data.edge_weight, persistent=False)

    def forward(self, x):
        return self.run(x, self.list, self.weight)


class KeepsFeatures(Keeps):
    def __init__(self, data):
        super().__init__(data)
        self.features = data.x

    def forward(self, edge_index):
        return self.run(self.features, edge_index)


class KeepsAll(KeepsFeatures):
    def forward(self, *_):
        return self.run(self.features, self.edges)


class KeepsGraph(Keeps):
    def __init__(self, data):
        super().__init__(data)
        self.graph = data

    def forward(self):
        return self.run(self.graph.x, self.graph.edge_index, self.graph.edge_weight)


class Layer(nn.Module):
    def __init__(self, conv, edges):
        super().__init__()
        self.conv, self.edges = conv, edges

    def forward(self, x):
        return self.conv(x, self.edges)


class KeepsInLayers(nn.Module):
    def __init__(self, data):
        super().__init__()
        edges = data.edge_index.clone()
        self.a, self.b = Layer(GCNConv(5, 8), edges), Layer(GCNConv(8, 3), edges)
        self.table = nn.Embedding(data.num_nodes, 5)

    def forward(self):
        return self.b(self.a(self.table.weight).relu())


class KeepsMatrix(nn.Module):
    def __init__(self, data):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)
        self.matrix = data.adj_t

    def forward(self, x):
        return self.matrix @ self.b(torch.sparse.mm(self.matrix, self.a(x)).relu())


class KeepsMatrixAsBuffer(KeepsMatrix):
    def __init__(self, data):
        super().__init__(data)
        del self.matrix
        self.register_buffer("matrix", data.adj_t, persistent=False)


def of_nothing(net, _):
    return net()


def of_features(net, data):
    return net(data.x)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Keeps, of_features),
        (KeepsBuffers, of_features),
        (KeepsFeatures, lambda net, data: net(data.edge_index)),
        (KeepsAll, of_nothing),
        (KeepsGraph, of_nothing),
        (KeepsInLayers, of_nothing),
    ],
)
def test_what_a_module_keeps_of_the_graph_is_given(kind, call):
    data = make_graph()
    net = kind(data).double().eval()
    before = {name: id(value) for name, value in vars(net).items()}
    model, graph, out = check(net, data, call)
    check_gradients(net, data, call)
    assert {name: id(value) for name, value in vars(net).items()} == before
    assert data.edge_weight._version == 0  # Of buffers that are the graph's own tensors.
    torch.testing.assert_close(copy.deepcopy(model).predict(graph, log=False), out)


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("kind", [KeepsMatrix, KeepsMatrixAsBuffer])
def test_a_matrix_that_a_module_keeps_is_given(kind, layout):
    data = make_graph()
    edges = data.edge_index.flip(0), data.edge_weight, (data.num_nodes, data.num_nodes)
    data.adj_t = torch.sparse_coo_tensor(*edges).coalesce().to_sparse(layout=layout)
    del data.edge_index, data.edge_weight
    net = kind(data).double().eval()
    model = gas.to_scalable(net, data, dtype=torch.float64).eval()
    graph = gas.cluster(data, 4, model=model, log=False)
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x))
    assert gas.verify(model, graph)


def test_another_graph_has_its_own_edges():
    data = make_graph()
    net = Keeps(data).double().eval()
    model = gas.to_scalable(net, data, dtype=torch.float64)
    fewer = data.clone()
    fewer.edge_index, fewer.edge_weight = data.edge_index[:, ::2], data.edge_weight[::2]
    graph = gas.cluster(fewer, 4, model=model.eval(), log=False)
    expected = net.run(2 * data.x, fewer.edge_index)
    torch.testing.assert_close(model.predict(graph, log=False), expected)


def test_other_edges_are_refused_until_the_graph_has_them():
    class Normalises(Keeps):
        def __init__(self, data):
            super().__init__(data)
            self.edges, self.weight = gcn_norm(
                data.edge_index, None, data.num_nodes, dtype=torch.float64
            )

        def forward(self, x):
            return self.run(x, self.edges, self.weight)

    data = make_graph(300)
    net = Normalises(data).double().eval()
    with pytest.raises(ValueError, match="'edges' keeps other edges .*: set data.edge_index to th"):
        gas.to_scalable(net, data)
    data.edge_index, data.edge_weight = net.edges, net.weight
    check(net, data, of_features)
