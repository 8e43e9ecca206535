"""Layers that normalise by themselves, of several hops, and their arguments."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from comparisons import Layers, Net, TutorialConv, check, check_gradients, of_edge_attr, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GCN,
    CorrectAndSmooth,
    GATConv,
    GCNConv,
    GINConv,
    GraphSAGE,
    LabelPropagation,
    MessagePassing,
    SAGEConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, degree, remove_self_loops

import gas

# Layers that normalise by themselves, and of several hops -----------------------------------------


class Hops(MessagePassing):
    """Several hops of learnt weights, after GPRGNN."""

    def __init__(self, hops=3, **options):
        super().__init__(aggr="add")
        self.hops, self.options = hops, options
        self.temp = nn.Parameter(torch.rand(hops + 1))

    def forward(self, x, edge_index, edge_weight=None):
        edge_index, norm = gcn_norm(
            edge_index, edge_weight, num_nodes=x.size(0), dtype=x.dtype, **self.options
        )
        out = x * self.temp[0]
        for k in range(self.hops):
            x = self.propagate(edge_index, x=x, norm=norm)
            out = out + self.temp[k + 1] * x
        return out

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class MeanByDegree(MessagePassing):
    """Divides by degrees that it counts, of rows and of edges."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        edge_index, _ = remove_self_loops(edge_index)
        deg = degree(edge_index[1], x.size(0), x.dtype).clamp(min=1)
        out_deg = degree(edge_index[0], x.size(0), x.dtype)
        return self.lin(self.propagate(edge_index, x=x * out_deg[:, None]) / deg.view(-1, 1))


class Propagating(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.lin, self.prop = nn.Linear(5, 3), Hops(**options)

    def forward(self, data):
        x = F.dropout(self.lin(data.x).relu(), training=self.training)
        return F.log_softmax(self.prop(x, data.edge_index, data.edge_weight), dim=1)


@pytest.mark.parametrize("kind", [TutorialConv, MeanByDegree])
def test_layers_normalise_by_themselves(kind):
    data = random_graph()
    data.edge_index = torch.cat([data.edge_index, torch.tensor([[3, 7], [3, 7]])], dim=1)
    model, graph, _ = check(Layers(kind(5, 8), kind(8, 8)), data, of_x)
    assert len(model.histories) == 1
    assert any(name.startswith("prepared_") for name, _ in graph)


class RealAndImaginary(MessagePassing):
    """Takes two tensors of rows on two lists of edges, and returns both, after MagNet."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.weight = nn.Parameter(torch.randn(in_channels, out_channels))

    def forward(self, real, imaginary, edge_index):
        edge_index, _ = remove_self_loops(edge_index)
        norm = 1 / degree(edge_index[1], real.size(0), dtype=real.dtype).clamp(min=1)
        norm = norm[edge_index[1]]
        with_loops, loop_norm = add_self_loops(edge_index, norm, -1.0, num_nodes=real.size(0))
        real = self.propagate(with_loops, x=real, norm=loop_norm)
        return real @ self.weight, self.propagate(edge_index, x=imaginary, norm=norm) @ self.weight

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([RealAndImaginary(5, 8), RealAndImaginary(8, 3)])

    def forward(self, x, z, edge_index):
        for layer in self.layers:
            x, z = layer(x, z, edge_index)
            x, z = x * (x >= 0), z * (x >= 0)
        return torch.cat([x, z], dim=-1)


def test_layers_return_several_tensors():
    data = random_graph()
    data.z = torch.rand(data.num_nodes, 5)
    model, _, _ = check(Complex(), data, lambda net, data: net(data.x, data.z, data.edge_index))
    assert len(model.histories) == 2


class Equivariant(MessagePassing):
    """Messages of edges, and the number of nodes that they go to, after EGNN."""

    def __init__(self, channels, counted):
        super().__init__(aggr="add")
        self.counted = counted
        self.edges = nn.Sequential(nn.Linear(2 * channels + 1, channels), nn.SiLU())
        self.nodes = nn.Linear(2 * channels, channels)

    def forward(self, h, pos, edge_index):
        row, col = edge_index
        between = pos[row] - pos[col]
        distances = between.square().sum(dim=-1, keepdim=True)
        m = self.edges(torch.cat([h[row], h[col], distances], dim=-1))
        size = (h.size(0), h.size(0)) if self.counted == "size" else (h.shape[0],) * 2
        moved = self.propagate(edge_index, m=between * m[:, :1], size=size)
        summed = self.propagate(edge_index, m=m, size=size)
        return self.nodes(torch.cat([h, summed], dim=-1)), pos + moved

    def message(self, m):
        return m


@pytest.mark.parametrize("counted", ["size", "shape"])
def test_messages_without_rows_of_nodes(counted):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(Equivariant(8, counted) for _ in range(2))

        def forward(self, x, pos, edge_index):
            for conv in self.convs:
                x, pos = conv(x, pos, edge_index)
            return x, pos

    data = random_graph(features=8)
    data.pos = torch.randn(data.num_nodes, 3)

    def call(net, data):
        return net(data.x, data.pos, data.edge_index)

    check(Moving(), data, call)
    check_gradients(Moving(), data, call, lambda outs: sum(out.square().mean() for out in outs))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"improved": True}])
def test_layers_of_several_hops(options, weighted):
    data = random_graph()
    if weighted:
        data.edge_weight = torch.rand(data.num_edges) + 0.1
    model, _, _ = check(Propagating(**options), data)
    assert len(model.histories) == 2
    assert [history.embedding_dim for history in model.histories] == [3, 3]


def test_layers_train_on_mini_batches_as_on_the_whole_graph():
    check_gradients(Layers(TutorialConv(5, 8), TutorialConv(8, 8)), random_graph(), of_x)


class Mixed(nn.Module):
    """Layers that normalise, with self-loops, beside others."""

    def __init__(self):
        super().__init__()
        self.gcn1, self.sage, self.gcn2 = GCNConv(5, 8), SAGEConv(8, 8), GCNConv(8, 8)
        self.gin, self.gat = GINConv(nn.Linear(8, 8)), GATConv(8, 4, heads=2)
        self.lin = nn.Linear(8, 3)

    def forward(self, x, edge_index):
        x = self.sage(self.gcn1(x, edge_index).relu(), edge_index).relu()
        x = self.gin(x, edge_index) + self.gcn2(x, edge_index)
        return self.lin(self.gat(x, edge_index=edge_index))


def given_edges(graph):
    """Return the mask of the edges that the graph had before."""
    (name,) = [key for key in graph.to_dict() if key.endswith("edge_list_0")]
    return graph[name]


@pytest.mark.parametrize("loops", [0, 2])
def test_layers_with_and_without_self_loops(loops):
    data = random_graph()
    data.edge_index = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    nodes = torch.arange(loops).expand(2, -1)
    data.edge_index = torch.cat([data.edge_index, nodes], dim=1)
    model, graph, _ = check(Mixed(), data, of_x)
    assert int(given_edges(graph).sum()) == data.num_edges < graph.num_edges
    assert set(model.net.state_dict()) == set(Mixed().state_dict())
    again = pickle.loads(pickle.dumps(model))
    out = model.predict(graph, log=False)
    torch.testing.assert_close(again.predict(graph, log=False), out)


def test_edges_are_marked_only_where_layers_add_self_loops():
    for loops in (True, False):
        net = Layers(GCNConv(5, 8, add_self_loops=loops), SAGEConv(8, 8))
        model = gas.to_scalable(net, random_graph())
        assert "after Preparation(gcn_norm)" in str(model)
        graph = gas.cluster(random_graph(), 2, model=model, log=False)
        assert ("edge_weight" in graph, any("list" in key for key in graph.to_dict())) == (
            (False, True) if loops else (True, False)
        )


def test_several_self_loops_of_a_node():
    data = random_graph()
    data.edge_index = torch.cat([data.edge_index, torch.full((2, 3), 3)], dim=1)
    model, graph, _ = check(Mixed(), data, of_x)
    assert int(given_edges(graph).sum()) == data.num_edges
    again = gas.cluster(model.prepare(data.clone()), 4, model=model, log=False)
    assert again.num_edges == graph.num_edges


def test_weights_are_normalised_once():
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges) + 0.1
    net = WithAttr()
    data.edge_attr = data.edge_weight
    model = gas.to_scalable(net, data)
    prepared = model.prepare(data)
    assert torch.equal(model.prepare(prepared).edge_weight, prepared.edge_weight)
    again = Data(x=data.x, edge_index=prepared.edge_index, edge_attr=prepared.edge_weight)
    with pytest.raises(ValueError, match="weights that were normalised already"):
        model.prepare(again)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_prepared_graph_converts_to_the_same_model(weighted, tmp_path):
    data = random_graph()
    if weighted:
        data.edge_weight = torch.rand(data.num_edges)
    net = GCN(5, 8, 2, 3).eval()
    model = gas.to_scalable(net, data)
    gas.cluster(data, 4, model=model, out=tmp_path / "graph", log=False)
    graph = gas.open_graph(tmp_path / "graph")
    again = gas.to_scalable(net, graph)
    found = again.predict(graph, log=False)
    expected = net(data.x, data.edge_index, data.get("edge_weight"))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
    assert again.prepare(graph).adj_t is graph.adj_t
    with pytest.raises(ValueError, match="prepared for another model"):
        gas.to_scalable(GraphSAGE(5, 8, 2, 3), data).predict(graph, log=False)


# Arguments of layers ------------------------------------------------------------------------------


class Pairs(nn.Module):
    """Sources and destinations, as bipartite layers take them."""

    def __init__(self, second):
        super().__init__()
        self.second = second
        self.conv1, self.conv2 = SAGEConv((5, 5), 8), GATConv((8, 8), 3, add_self_loops=False)
        self.lin = nn.Linear(5, 5)

    def forward(self, x, edge_index):
        others = {"same": x, "other": self.lin(x), "none": None}
        x = self.conv1((x, others[self.second]), edge_index).relu()
        return self.conv2((x, x), edge_index)


@pytest.mark.parametrize("second", ["same", "other", "none"])
def test_layers_take_pairs(second):
    check(Pairs(second), random_graph(), of_x)


class WithAttr(Net):
    def forward(self, x, edge_index, edge_attr):
        return self.conv2(self.conv1(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


def test_weights_have_another_name():
    data = random_graph()
    data.edge_attr = torch.rand(data.num_edges) + 0.1
    _, graph, _ = check(WithAttr(), data, of_edge_attr)
    assert "edge_attr" not in graph  # Its rows aren't those of the edges with self-loops.


class Embedded(Net):
    def __init__(self, num_nodes):
        super().__init__()
        self.table = nn.Embedding(num_nodes, 5)

    def forward(self, node_id, edge_index):
        return self.conv2(self.conv1(self.table(node_id), edge_index).relu(), edge_index)


def test_rows_of_parameters_are_read_by_id():
    data = random_graph()
    data.node_id = torch.arange(data.num_nodes)
    model, graph, _ = check(
        Embedded(data.num_nodes), data, lambda net, data: net(data.node_id, data.edge_index)
    )
    batch = next(iter(gas.SubgraphLoader(graph, log=False)))
    model(batch).sum().backward()
    read = model.net.table.weight.grad.abs().sum(dim=1).nonzero().view(-1)
    assert set(read.tolist()) <= set(graph.perm[batch.n_id].tolist())


class Counts(Net):
    """Calls functions of PyG without the number of nodes."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, edge_index):
        return self.conv2(self.function(self.conv1(x, edge_index), edge_index), edge_index)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, edges: x * degree(edges[1])[edges[1]].sum(),
        lambda x, edges: x * gcn_norm(edges)[1].sum(),
        lambda x, edges: x * add_self_loops(edges)[0].size(1),
    ],
    ids=["degree", "gcn_norm", "add_self_loops"],
)
def test_functions_without_the_number_of_nodes(function):
    with pytest.raises(ValueError, match="isn't a row for each node or edge: compute it before"):
        gas.to_scalable(Counts(function), random_graph())
    before = add_self_loops(torch.tensor([[0], [3]]))[0]
    assert before.size(1) == 5  # PyG's own function is as it was.


class Keeps(Net):
    """Keeps what was computed of a graph, or takes it."""

    def __init__(self, **kept):
        super().__init__()
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x, edge_index, scale=None):
        x = x * (self.scale if scale is None else scale)
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class KeepsMatrix(nn.Module):
    def __init__(self, adj_t):
        super().__init__()
        self.adj_t, self.lin1, self.lin2 = adj_t, nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, adj_t=None):
        adj_t = self.adj_t if adj_t is None else adj_t
        return adj_t @ self.lin2((adj_t @ self.lin1(x)).relu())


def test_rows_that_a_module_keeps_are_given_by_the_graph():
    data = random_graph()
    scale = torch.rand(data.num_nodes, 1).double()
    with pytest.raises(ValueError, match=r"'scale' keeps rows of all nodes.*set data.scale to it"):
        gas.to_scalable(Keeps(scale=scale), data)
    data.scale = scale
    check(Keeps(), data, lambda net, data: net(data.x, data.edge_index, data.scale))


def test_a_matrix_that_a_module_keeps_is_given_by_the_graph():
    data = random_graph()
    sizes = data.num_nodes, data.num_nodes
    weight = torch.rand(data.num_edges).double()
    adj_t = torch.sparse_coo_tensor(data.edge_index.flip(0), weight, sizes).to_sparse_csr()

    class WithEdges(KeepsMatrix):
        def forward(self, x, edge_index):
            return super().forward(x)

    with pytest.raises(ValueError, match=r"'adj_t' keeps rows of all nodes.*set data.adj_t to it"):
        gas.to_scalable(WithEdges(adj_t), data)
    data.adj_t = adj_t
    del data.edge_index
    check(KeepsMatrix(None), data, lambda net, data: net(data.x, data.adj_t))


@pytest.mark.parametrize(
    "net",
    [LabelPropagation(2, 0.9), CorrectAndSmooth(2, 0.9, 2, 0.9)],
    ids=lambda net: type(net).__name__,
)
def test_what_has_no_weights_is_called_on_the_whole_graph(net):
    with pytest.raises(ValueError, match=r"has no weights to train: call it once on the whole"):
        gas.to_scalable(net, random_graph())
