"""Modules that are given several lists of edges, which become one graph."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as pyg
from comparisons import check, check_gradients, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.data import Data

import gas

KINDS = pyg.SAGEConv, pyg.GCNConv, pyg.GATConv, pyg.GraphConv


def graph_of(first, second):
    """Return a graph with two lists of edges, that have some edges in common."""
    data = random_graph()
    data[first] = data.edge_index
    data[second] = torch.cat([torch.randint(60, (2, 77)), data.edge_index[:, :30]], dim=1)
    if "edge_index" not in (first, second):
        del data.edge_index
    return data


class Two(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        a, b, c, d = kinds * (4 // len(kinds))
        self.first = nn.ModuleList([a(5, 8), b(5, 8)])
        self.last = nn.ModuleList([c(8, 3), d(8, 3)])

    def add(self, x, one, two):
        x = (self.first[0](x, *one) + self.first[1](x, *two)).relu()
        return self.last[0](x, *one) + self.last[1](x, *two)

    def forward(self, x, edge_index1, edge_index2):
        return self.add(x, [edge_index1], [edge_index2])


class Weighted(Two):
    def forward(self, x, edge_index, edge_index2, edge_weight, edge_weight2):
        return self.add(x, [edge_index, edge_weight], [edge_index2, edge_weight2])


class OfData(Two):
    def forward(self, data):
        return self.add(data.x, [data.edge_index], [data.neg_edge_index])


class Optional(Two):
    def forward(self, x, edge_index, neg_edge_index=None):
        lists = [[edge_index], [edge_index if neg_edge_index is None else neg_edge_index]]
        return self.add(x, *lists)


class Mixed(nn.Module):
    """Rows of edges of one list, beside another."""

    def __init__(self):
        super().__init__()
        self.attention, self.sage = pyg.TransformerConv(5, 8, edge_dim=2), pyg.SAGEConv(5, 8)
        self.last = pyg.GCNConv(8, 3)

    def forward(self, features, edge_index, edge_attr, other_edges):
        x = self.attention(features, edge_index, edge_attr) + self.sage(features, other_edges)
        return self.last(x.relu(), other_edges)


def signed(net, data):
    return net(data.x, data.pos_edge_index, data.neg_edge_index)


def numbered(net, data):
    return net(data.x, data.edge_index1, data.edge_index2)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_signed_graphs(num_layers):
    data = graph_of("pos_edge_index", "neg_edge_index")
    net = pyg.SignedGCN(5, 8, num_layers)
    model, graph, _ = check(net, data, signed)
    assert len(model.histories) == num_layers - 1
    assert graph.num_edges == data.pos_edge_index.size(1) + data.neg_edge_index.size(1)
    check_gradients(net, data, signed)
    check(pyg.SignedConv(5, 8, True), data, signed)


@pytest.mark.parametrize("num_edges", [(360, 360), (500, 200)])
def test_as_many_edges_of_a_list_in_two_small_graphs_are_no_constant(num_edges):
    """The module is tried on two graphs, which may have as many edges of a list by chance."""
    lists = zip(("pos_edge_index", "neg_edge_index"), num_edges, strict=True)
    data = Data(x=torch.rand(160, 5), **{k: torch.randint(160, (2, n)) for k, n in lists})
    check(pyg.SignedGCN(5, 8, 2), data, signed)


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_gets_the_edges_of_its_list(kind):
    check(Two(kind), graph_of("edge_index1", "edge_index2"), numbered)
    data = graph_of("edge_index", "neg_edge_index")
    check(OfData(kind), data)
    check(Optional(kind), data, lambda net, data: net(data.x, data.edge_index, data.neg_edge_index))
    check(Optional(kind), random_graph(), of_x)
    data.pairs_edge_label_index = data.edge_index[:, :9]
    check(OfData(kind), data)


def test_layers_of_several_kinds():
    data = graph_of("edge_index1", "edge_index2")
    check(Two(*KINDS), data, numbered)
    check_gradients(Two(*KINDS), data, numbered)


@pytest.mark.parametrize("kind", [pyg.GCNConv, pyg.GraphConv])
@pytest.mark.parametrize("size", [240, 77])  # Of the second list; the first has 240 edges.
def test_weights_are_those_of_the_list_of_their_name(kind, size):
    data = graph_of("edge_index", "edge_index2")
    data.edge_index2 = torch.randint(60, (2, size))
    data.edge_weight, data.edge_weight2 = torch.rand(data.num_edges), torch.rand(size)

    def call(net, data):
        weights = data.edge_weight, data.edge_weight2
        return net(data.x, data.edge_index, data.edge_index2, *weights)

    assert data.num_edges == 240
    check(Weighted(kind), data, call)


def test_rows_of_the_edges_of_a_list():
    data = graph_of("edge_index", "other_edges")
    data.edge_attr = torch.rand(data.edge_index.size(1), 2)
    check(
        Mixed(), data,
        lambda net, data: net(data.x, data.edge_index, data.edge_attr, data.other_edges),
    )  # fmt: skip


class Table(nn.Module):
    def __init__(self, num_nodes):
        super().__init__()
        self.embedding, self.net = nn.Embedding(num_nodes, 5), pyg.SignedGCN(5, 8, 2)

    def forward(self, pos_edge_index, neg_edge_index):
        return self.net(self.embedding.weight, pos_edge_index, neg_edge_index)


def test_a_parameter_with_a_row_for_each_node_beside_two_lists():
    data = graph_of("pos_edge_index", "neg_edge_index")
    before = data.to_dict().keys()
    check(Table(60), data, lambda net, data: net(data.pos_edge_index, data.neg_edge_index))
    assert data.to_dict().keys() == before


def test_a_graph_in_a_folder_and_a_copied_model(tmp_path):
    data, net = graph_of("pos_edge_index", "neg_edge_index"), pyg.SignedGCN(5, 8, 2).eval()
    model = gas.to_scalable(net, data)
    assert "after EdgeLists(pos_edge_index, neg_edge_index)" in repr(model)
    graph = gas.cluster(data, "auto", model=model, log=False, out=tmp_path / "graph")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = each.predict(graph, log=False)
        torch.testing.assert_close(found, signed(net, data))
    prepared = model.prepare(data)
    assert model.prepare(prepared).to_dict().keys() == prepared.to_dict().keys()
    net.load_state_dict(model._checkpoint_module.state_dict())


def test_ids_that_no_node_has_and_lists_without_edges():
    data = graph_of("pos_edge_index", "neg_edge_index")
    net = pyg.SignedGCN(5, 8, 2).eval()
    model = gas.to_scalable(net, data)
    other = data.clone()
    other.neg_edge_index = data.neg_edge_index + 9
    with pytest.raises(ValueError, match="neg_edge_index"):
        gas.cluster(other, 4, model=model, log=False)
    other.neg_edge_index = data.neg_edge_index[:, :0]
    found = model.predict(gas.cluster(other, 4, model=model, log=False), log=False)
    torch.testing.assert_close(found, signed(net, other))
    with pytest.raises(ValueError, match="'neg_edge_index' has no edges, with which SignedGCN"):
        gas.to_scalable(net, other)


def test_edges_of_a_graph_without_nodes_are_refused():
    data = graph_of("pos_edge_index", "neg_edge_index")
    model = gas.to_scalable(pyg.SignedGCN(5, 8, 2), data)
    data.x, data.num_nodes = data.x[:0], 0
    with pytest.raises(ValueError, match="but 'num_nodes' is 0"):
        gas.cluster(data, 4, model=model, log=False)


def test_a_graph_without_one_of_the_lists_is_refused():
    data = graph_of("pos_edge_index", "neg_edge_index")
    model = gas.to_scalable(pyg.SignedGCN(5, 8, 2), data)
    for other in (data.clone(), random_graph()):
        other.pop("neg_edge_index", None)
        with pytest.raises(ValueError, match="the graph has no '(neg|pos)_edge_index' of shape"):
            gas.cluster(other, 4, model=model, log=False)
    with pytest.raises(ValueError, match="give each list of edges to the graph under its name"):
        gas.to_scalable(pyg.SignedGCN(5, 8, 2), random_graph())


def test_edges_that_the_module_does_not_take_and_their_rows_are_left_out():
    data = graph_of("pos_edge_index", "neg_edge_index")
    data.edge_index, data.edge_weight = torch.randint(60, (2, 333)), torch.rand(333)
    data.edge_attr = torch.rand(333, 2)
    _, graph, _ = check(pyg.SignedGCN(5, 8, 2), data, signed)
    assert not {"edge_weight", "edge_attr"} & graph.to_dict().keys()


def test_rows_of_another_number_than_the_edges_of_their_list_are_refused():
    data = graph_of("pos_edge_index", "neg_edge_index")
    data.tags = torch.rand(data.neg_edge_index.size(1), 2)
    model = gas.to_scalable(pyg.SignedGCN(5, 8, 2), data)
    data.tags = torch.rand(20, 2)
    with pytest.raises(ValueError, match=r"'tags' is \[20, 2\], and had a row for each edge of"):
        gas.cluster(data, 4, model=model, log=False)
    del data.tags
    assert gas.verify(model, gas.cluster(data, 4, model=model, log=False))


BACKWARD = {
    "one list in both directions": lambda x, a, b: [a, a.flip(0)],
    "one of the lists": lambda x, a, b: [a, b.flip(0)],
    "both lists": lambda x, a, b: [a.flip(0), b.flip(0)],
}


@pytest.mark.parametrize("kind", [pyg.SAGEConv, pyg.GCNConv])
@pytest.mark.parametrize("lists", BACKWARD)
def test_lists_that_are_turned_round(lists, kind):
    class Turned(Two):
        def forward(self, x, edge_index1, edge_index2):
            return self.add(x, *([each] for each in BACKWARD[lists](x, edge_index1, edge_index2)))

    check(Turned(kind), graph_of("edge_index1", "edge_index2"), numbered)


def test_edges_of_one_type_that_are_turned_round():
    class Turned(Two):
        def forward(self, x, edge_index, edge_type):
            one = edge_index[:, edge_type == 0]
            return self.add(x, [one], [one.flip(0)])

    data = random_graph()
    data.edge_type = torch.randint(2, (data.num_edges,))
    check(
        Turned(pyg.SAGEConv), data, lambda net, data: net(data.x, data.edge_index, data.edge_type)
    )


def test_a_layer_of_one_list_against_the_direction_of_its_edges():
    net = Two(pyg.SAGEConv)
    for layers in (net.first, net.last):
        layers[1].flow = "target_to_source"
    check(net, graph_of("edge_index1", "edge_index2"), numbered)
    assert net.first[1].flow == net.last[1].flow == "target_to_source"
