"""Parameters with a row for each node, which a mini-batch reads by node."""

import pytest
import torch
import torch.nn.functional as F
from comparisons import check, check_gradients
from conftest import random_graph
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import LINKX, FastRGCNConv, LightGCN, MessagePassing, RGCNConv, SAGEConv
from torch_geometric.utils import scatter

import gas

SIZES = (40, 61, 199, 200)  # Also those of a small graph, and of a sample of the graph.


class Net(nn.Module):
    """Reads an embedding and a parameter, each twice or in several layers."""

    def __init__(self, num_nodes, **kwargs):
        super().__init__()
        self.num_nodes = num_nodes
        self.embedding = nn.Embedding(num_nodes, 8, **kwargs)
        self.bias = nn.Parameter(torch.randn(num_nodes, 3))
        self.conv1, self.conv2 = SAGEConv(8, 8), SAGEConv(8, 3)

    def forward(self, edge_index):
        x = self.embedding.weight
        x = self.conv1(x, edge_index).relu() + self.embedding.weight
        return self.conv2(F.dropout(x, 0.5, self.training), edge_index) + self.bias


class Everyone(Net):
    """Asks for the rows of all ids."""

    def forward(self, x, edge_index):
        ids = torch.arange(x.size(0), device=x.device)
        return self.conv2(self.conv1(self.embedding(ids), edge_index).relu(), edge_index)


class Light(LightGCN):
    def forward(self, edge_index):
        return self.get_embedding(edge_index)


class Relations(nn.Module):
    def __init__(self, num_nodes, kind=RGCNConv, **kwargs):
        super().__init__()
        self.conv1, self.conv2 = kind(num_nodes, 8, 3, **kwargs), kind(8, 3, 3)

    def forward(self, edge_index, edge_type):
        x = self.conv1(None, edge_index, edge_type).relu()
        return self.conv2(x, edge_index, edge_type)


class Link(nn.Module):
    def __init__(self, num_nodes):
        super().__init__()
        self.num_nodes, self.lin = num_nodes, nn.Linear(num_nodes, 3)

    def forward(self, x, edge_index):
        ones = torch.ones(edge_index.size(1), dtype=x.dtype)
        return self.lin(torch.sparse_coo_tensor(edge_index.flip(0), ones, 2 * (self.num_nodes,)))


class Conv(MessagePassing):
    """Has two tables, of sources and destinations."""

    def __init__(self, num_nodes):
        super().__init__(aggr="add")
        self.lin, self.bias = nn.Linear(5, 5), nn.Parameter(torch.randn(num_nodes, 5))
        self.gate = nn.Embedding(num_nodes, 5)

    def forward(self, x, edge_index):
        x = self.lin(x) + self.bias
        return self.propagate(edge_index, x=x, bias=self.bias, gate=self.gate.weight)

    def message(self, x_j, bias_i, gate_j):
        return x_j * (bias_i * gate_j).sigmoid()


class InMessage(Conv):
    def message(self, x_j, edge_index_j):
        return x_j * self.gate(edge_index_j).sigmoid()


class InUpdate(Conv):
    def update(self, out):
        return out + self.bias


class Twice(nn.Module):
    def __init__(self, num_nodes, kind=Conv):
        super().__init__()
        self.conv1, self.conv2 = kind(num_nodes), kind(num_nodes)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class Tied(Net):
    """Has one parameter under two names."""

    def __init__(self, num_nodes):
        super().__init__(num_nodes)
        self.other = nn.Embedding(num_nodes, 8)
        self.other.weight = self.embedding.weight

    def forward(self, edge_index):
        return self.conv1(self.embedding.weight * self.other.weight, edge_index)


def of_edges(net, data):
    return net(data.edge_index)


def of_types(net, data):
    return net(data.edge_index, data.edge_type)


def of_x(net, data):
    return net(data.x, data.edge_index)


CASES = {
    "embedding and parameter": (Net, of_edges),
    "padding": (lambda n: Net(n, padding_idx=3), of_edges),
    "all ids": (Everyone, of_x),
    "all ids, padding": (lambda n: Everyone(n, padding_idx=3), of_x),
    "one parameter, two names": (Tied, of_edges),
    "LightGCN": (lambda n: Light(n, 8, 2), of_edges),
    "LINKX": (lambda n: LINKX(n, 5, 8, 3, 2, num_edge_layers=2), of_x),
    "RGCN without x": (Relations, of_types),
    "RGCN with bases": (lambda n: Relations(n, num_bases=2, root_weight=False), of_types),
    "FastRGCN without x": (lambda n: Relations(n, FastRGCNConv), of_types),
    "FastRGCN with bases": (
        lambda n: Relations(n, FastRGCNConv, num_bases=2, root_weight=False, bias=False),
        of_types,
    ),
    "layers with tables": (Twice, of_x),
    "linear layer of a matrix": (Link, of_x),
}


@pytest.mark.parametrize("num_nodes", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_tables_are_read_by_node(case, num_nodes):
    make, call = CASES[case]
    data = random_graph(num_nodes, 400)
    data.edge_type = torch.randint(3, (data.num_edges,))
    net = make(num_nodes)
    model, _, _ = check(net, data, call)
    shapes = {name: value.shape for name, value in model.net.state_dict().items()}
    assert shapes == {name: value.shape for name, value in net.state_dict().items()}
    check_gradients(net, data, call, fewest=1)


def test_gradients_reach_rows_of_batch_and_halo():
    data, net = random_graph(200, 400), Net(200)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 8, model=model, log=False)
    batch = next(iter(gas.SubgraphLoader(graph, log=False)))
    model.refresh(graph, log=False)
    model(batch).sum().backward()
    found = net.embedding.weight.grad.abs().sum(dim=1).nonzero().view(-1).tolist()
    assert len(found) > batch.batch_size
    assert set(found) <= set(graph.perm[batch.n_id].tolist())


def test_graphs_of_other_sizes_are_refused():
    net = Net(60)
    model = gas.to_scalable(net, random_graph())
    error = "the graph has 50 nodes, and 'bias' of the model is for 60"
    for data in (random_graph(50), model.prepare(random_graph()).subgraph(torch.arange(50))):
        with pytest.raises(ValueError, match=error):
            gas.cluster(data, 4, model=model, log=False)
    other = random_graph()  # Of the same size.
    graph = gas.cluster(other, 4, log=False)
    with pytest.raises(ValueError, match="the graph lacks what this model's layers compute"):
        model.predict(graph, log=False)
    found = model.predict(model.prepare(graph), log=False)  # In the order of the parts.
    torch.testing.assert_close(found, net.eval()(other.edge_index))


def test_rows_that_the_graph_has_already_are_refused():
    data, net = random_graph(), Net(60)
    model = gas.to_scalable(net, data)
    data.prepared_node_id = torch.arange(60).flip(0)
    with pytest.raises(ValueError, match="'prepared_node_id', which isn't the row of each node"):
        gas.cluster(data, 4, model=model, log=False)


def test_a_trained_model_is_loaded():
    data, net = random_graph(), Net(60)
    data.node_id = [f"node {i}" for i in range(60)]  # The user's own.
    data.val_mask = data.test_mask = ~data.train_mask
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    gas.fit(model, graph, optimizer, epochs=2, batch_size=2, log=False)
    other = Net(60)
    loaded = gas.to_scalable(other, data)
    loaded.load_state_dict(model.state_dict())
    found = loaded.predict(gas.cluster(data, 4, model=loaded, log=False), log=False)
    torch.testing.assert_close(found, net.eval()(data.edge_index))
    torch.testing.assert_close(found, other.eval()(data.edge_index))


def test_lazy_layers_are_completed():
    data = random_graph(200)
    net = LINKX(200, -1, 8, 3, 2)
    model = gas.to_scalable(net, data)
    found = model.predict(gas.cluster(data, 4, model=model, log=False), log=False)
    torch.testing.assert_close(found, net.eval()(data.x, data.edge_index))


def test_num_nodes_instead_of_a_graph():
    data, net = random_graph(200), LINKX(200, 5, 8, 3, 2).eval()
    model = gas.to_scalable(net, num_nodes=200)
    found = model.predict(gas.cluster(data, 4, model=model, log=False), log=False)
    torch.testing.assert_close(found, net(data.x, data.edge_index))


def test_graphs_without_features():
    class OfData(Net):
        def forward(self, data):
            table, (src, dst) = self.embedding.weight, data.edge_index
            return scatter(table[src], dst, dim_size=data.num_nodes)

    check(OfData(60), Data(edge_index=random_graph().edge_index, num_nodes=60))


def clamp(net):
    with torch.no_grad():
        return net.embedding.weight.clamp_(-1, 1)


REFUSED = {
    "in forward changes 'embedding.weight' of the module": clamp,
    "'mean' .* isn't exact on mini-batches": lambda net: (
        net.embedding.weight.mean(0) + net.embedding.weight
    ),
    "'getitem_1' .* isn't exact on mini-batches": lambda net: torch.cat(
        [net.embedding.weight[:100], net.embedding.weight[100:]]
    ),
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_mini_batches_do_not_know_is_refused(error):
    class Other(Net):
        def forward(self, edge_index):
            return self.conv1(REFUSED[error](self), edge_index)

    with pytest.raises(ValueError, match=error):
        gas.to_scalable(Other(200), random_graph(200))


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (InMessage, "'gate.weight' has a row for each node, and InMessage.message reads it itself"),
        (InUpdate, "'bias' has a row for each node, and InUpdate.update reads it itself"),
    ],
)
def test_tables_that_are_read_beside_edges_are_refused(kind, error):
    cure = "read it in forward, and for messages give it to propagate"
    with pytest.raises(ValueError, match=f"{error}: {cure}"):
        gas.to_scalable(Twice(200, kind), random_graph(200))


def test_sparse_gradients_stay_sparse():
    data, net = random_graph(200), Everyone(200, sparse=True)
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    model.refresh(graph, log=False)
    model(next(iter(gas.SubgraphLoader(graph, log=False)))).sum().backward()
    assert net.embedding.weight.grad.is_sparse
    torch.optim.SparseAdam([net.embedding.weight]).step()


class OfGraph(Net):
    """Takes a graph, and reads one of its lists of edges."""

    def forward(self, data):
        return super().forward(data.edge_index)


def test_a_table_may_have_one_number_for_each_node():
    class Net(nn.Module):
        def __init__(self, num_nodes):
            super().__init__()
            self.a, self.b = SAGEConv(5, 4), SAGEConv(4, 3)
            self.weight = nn.Parameter(torch.randn(num_nodes))

        def forward(self, x, edge_index):
            h = self.a(x, edge_index).relu() * self.weight.unsqueeze(-1)
            return self.b(h, edge_index)

    data = random_graph()
    check(Net(data.num_nodes), data, lambda net, data: net(data.x, data.edge_index))


def test_lists_that_are_not_read_are_not_joined():
    data, net = random_graph(200), OfGraph(200)
    data.other_edge_index = data.edge_index[:, :50].flip(0)
    model = gas.to_scalable(net, data)
    assert str(model.transform) == "NodeIds()"
    graph = gas.cluster(data, 4, model=model, log=False)
    torch.testing.assert_close(model.eval().predict(graph, log=False), net.eval()(data))
