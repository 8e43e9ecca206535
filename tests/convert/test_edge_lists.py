"""Layers that take different edges: with and without self-loops, of some kinds, or turned round."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from comparisons import Layers, TutorialConv, check, check_gradients, of_edge_attr, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    ChebConv,
    GATConv,
    GCNConv,
    GINEConv,
    GraphConv,
    MessagePassing,
    MixHopConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    degree,
    dropout_edge,
    remove_self_loops,
    scatter,
    to_undirected,
)

import gas
from gas.convert.module.preparation import join_lists


def sum_of(messages, index, rows):
    return scatter(messages, index, dim=0, dim_size=rows.size(0), reduce="sum")


def mean_of(messages, index, rows):
    return scatter(messages, index, dim=0, dim_size=rows.size(0), reduce="mean")


class Normalising(nn.Module):
    """Changes the self-loops, and normalises by the weights that there are then."""

    def __init__(self, in_channels, out_channels, change):
        super().__init__()
        self.lin, self.change = nn.Linear(in_channels, out_channels), change

    def forward(self, x, edge_index, edge_weight=None):
        num_nodes = x.size(0)
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.size(1), dtype=x.dtype, device=edge_index.device)
        options = {} if self.change is remove_self_loops else {"num_nodes": num_nodes}
        (src, dst), weight = self.change(edge_index, edge_weight, **options)
        total = torch.zeros(num_nodes, dtype=x.dtype).scatter_add_(0, dst, weight)
        scale = total.clamp(min=1e-3).rsqrt()
        messages = self.lin(x)[src] * (scale[src] * scale[dst] * weight).view(-1, 1)
        return sum_of(messages, dst, x)


class Between(nn.Module):
    """Layers of PyG on the edges as they are, between layers that change self-loops."""

    def __init__(self, change):
        super().__init__()
        self.first, self.last = Normalising(5, 8, change), Normalising(8, 8, change)
        self.sage, self.gat = SAGEConv(8, 8), GATConv(8, 3)

    def forward(self, x, edge_index):
        x = self.sage(self.first(x, edge_index).relu(), edge_index).relu()
        return self.gat(self.last(x, edge_index), edge_index)


class Weighted(Between):
    def forward(self, x, edge_index, edge_weight):
        x = self.sage(self.first(x, edge_index, edge_weight).relu(), edge_index).relu()
        return self.gat(self.last(x, edge_index, edge_weight), edge_index)


class Several(nn.Module):
    """Three ways to change self-loops, and none."""

    def __init__(self):
        super().__init__()
        changes = add_self_loops, add_remaining_self_loops, remove_self_loops
        self.layers = nn.ModuleList(Normalising(5, 5, change) for change in changes)
        self.last = GraphConv(5, 3)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index).tanh()
        return self.last(x, edge_index)


class WithAttributes(nn.Module):
    """Rows of edges, as they are and computed, beside layers with self-loops."""

    def __init__(self):
        super().__init__()
        self.first, self.last = TutorialConv(5, 8), Normalising(8, 3, remove_self_loops)
        self.attention, self.gine = TransformerConv(8, 8, edge_dim=2), GINEConv(nn.Linear(8, 8))
        self.encode = nn.Linear(2, 8)

    def forward(self, x, edge_index, edge_attr):
        x = self.attention(self.first(x, edge_index).relu(), edge_index, edge_attr)
        return self.last(self.gine(x, edge_index, self.encode(edge_attr).relu()), edge_index)


class Hops(MessagePassing):
    def __init__(self, **options):
        super().__init__(aggr="add")
        self.options = options

    def forward(self, x, edge_index):
        edge_index, norm = gcn_norm(
            edge_index, None, num_nodes=x.size(0), dtype=x.dtype, **self.options
        )
        for _ in range(2):
            x = self.propagate(edge_index, x=x, norm=norm)
        return x

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


class TwoKindsOfHops(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Hops(), Hops(add_self_loops=False)
        self.sage, self.lin = SAGEConv(5, 5), nn.Linear(5, 3)

    def forward(self, x, edge_index):
        x = self.sage(self.first(x, edge_index), edge_index)
        return self.lin(self.last(x, edge_index))


class Jumping(nn.Module):
    """Joins the rows of all layers, and passes them on once more, after JKNet."""

    def __init__(self):
        super().__init__()
        self.first, self.second = TutorialConv(5, 4), TutorialConv(4, 4)
        self.lin = nn.Linear(8, 3)

    def forward(self, x, edge_index):
        rows = [self.first(x, edge_index).relu()]
        rows.append(self.second(rows[0], edge_index).relu())
        edge_index, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        src, dst = edge_index
        joined = torch.cat(rows, dim=1)
        return self.lin(sum_of(joined[src] * weight.view(-1, 1), dst, x))


class Signed(nn.Module):
    """Friends and foes, at first without self-loops, then with them, summed up by sources."""

    def __init__(self):
        super().__init__()
        self.friends, self.foes = nn.Linear(5, 4), nn.Linear(5, 4)
        self.lin, self.lin2 = nn.Linear(12, 3), nn.Linear(12, 3)

    def base(self, lin, x, edge_index):
        row, col = remove_self_loops(edge_index)[0]
        return F.normalize(lin(mean_of(x[col], row, x)), dim=-1).tanh()

    def deep(self, lin, x, other, friends, foes):
        out = [x]
        for rows, edge_index in ((x, friends), (other, foes)):
            edge_index, _ = remove_self_loops(edge_index)
            row, col = add_self_loops(edge_index, num_nodes=x.size(0))[0]
            out.append(mean_of(rows[col], row, x))
        return lin(torch.cat(out, dim=1))

    def forward(self, x, edge_index, edge_type):
        friends, foes = edge_index[:, edge_type == 0], edge_index[:, edge_type == 1]
        h, g = self.base(self.friends, x, friends), self.base(self.foes, x, foes)
        first = self.deep(self.lin, h, g, friends, foes)
        return torch.cat([first, self.deep(self.lin2, g, h, foes, friends)], dim=1)


class OfKinds(nn.Module):
    """A layer that normalises for each kind of edges."""

    def __init__(self, layer):
        super().__init__()
        self.convs = nn.ModuleList(layer(5, 8) for _ in range(3))
        self.last = nn.ModuleList(layer(8, 3) for _ in range(3))

    def forward(self, x, edge_index, edge_type):
        for convs in (self.convs, self.last):
            parts = [conv(x, edge_index[:, edge_type == k]) for k, conv in enumerate(convs)]
            x = torch.stack(parts).sum(dim=0).tanh()
        return x


class GCNBesideAttributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GCNConv(5, 8), GCNConv(8, 3)
        self.attention = TransformerConv(8, 8, edge_dim=2)

    def forward(self, x, edge_index, edge_attr):
        x = self.attention(self.first(x, edge_index).relu(), edge_index, edge_attr)
        return self.last(x, edge_index)


class GCNBesideSum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GCNConv(5, 8), GCNConv(8, 3)

    def forward(self, x, edge_index):
        x, (src, dst) = self.first(x, edge_index), edge_index
        most = scatter(x[src], dst, dim=0, dim_size=x.size(0), reduce="max")
        return self.last(x + most, edge_index)


class WeightedAndNot(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = GCNConv(5, 8), GCNConv(8, 8), SAGEConv(8, 3)

    def forward(self, x, edge_index, edge_weight):
        x = self.second(self.first(x, edge_index, edge_weight).relu(), edge_index)
        return self.last(x, edge_index)


class AtSources(nn.Module):
    """Sums of weighted rows at the sources of edges."""

    def __init__(self):
        super().__init__()
        self.lin, self.lin2 = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index, edge_weight):
        row, col = edge_index
        for lin in (self.lin, self.lin2):
            x = sum_of(lin(x)[col] * edge_weight.view(-1, 1), row, x).tanh()
        return x


class Gated(nn.Module):
    """Layers beside means, at the sources of edges, of how far their ends are apart."""

    def __init__(self, layer):
        super().__init__()
        self.lin, self.conv, self.gate = nn.Linear(5, 8), layer(8, 8), layer(8, 8)

    def forward(self, x, edge_index):
        x = self.lin(x).tanh()
        for _ in range(2):
            rows = self.gate(x, edge_index).tanh()
            apart = (rows[edge_index[0]] - rows[edge_index[1]]).square()
            share = mean_of(apart, edge_index[0], x).tanh()
            x = (1 - share) * x + share * self.conv(x, edge_index).tanh()
        return x


class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.back = SAGEConv(5, 8), SAGEConv(5, 8)
        self.there2, self.back2 = GCNConv(8, 3), GCNConv(8, 3)

    def forward(self, x, edge_index):
        back = edge_index.flip(0)
        x = (self.there(x, edge_index) + self.back(x, back)).relu()
        return self.there2(x, edge_index) + self.back2(x, back)


class Reversed(nn.Module):
    def __init__(self):
        super().__init__()
        self.sage, self.gat = SAGEConv(5, 8), GATConv(8, 3, edge_dim=2)

    def forward(self, x, edge_index, edge_attr):
        edge_index = torch.stack([edge_index[1], edge_index[0]])
        return self.gat(self.sage(x, edge_index).relu(), edge_index, edge_attr)


class Backwards(MessagePassing):
    """Normalises by the sources of edges, to which it passes messages."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add", flow="target_to_source")
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        norm = 1 / degree(edge_index[0], x.size(0), dtype=x.dtype)
        return self.propagate(edge_index, x=self.lin(x), norm=norm[edge_index[0]])

    def message(self, x_j, norm):
        return x_j * norm.view(-1, 1)


def turned(layer, *args, **kwargs):
    return layer(*args, flow="target_to_source", **kwargs)


def of_edge_weight(net, data):
    return net(data.x, data.edge_index, data.edge_weight)


def of_edge_type(net, data):
    return net(data.x, data.edge_index, data.edge_type)


MODELS = {
    "add": (lambda: Between(add_self_loops), of_x),
    "add remaining": (lambda: Between(add_remaining_self_loops), of_x),
    "remove": (lambda: Between(remove_self_loops), of_x),
    "weighted, add": (lambda: Weighted(add_self_loops), of_edge_weight),
    "weighted, add remaining": (lambda: Weighted(add_remaining_self_loops), of_edge_weight),
    "several": (Several, of_x),
    "attributes": (WithAttributes, of_edge_attr),
    "hops": (TwoKindsOfHops, of_x),
    "jumping": (Jumping, of_x),
    "signed": (Signed, of_edge_type),
    "kinds": (lambda: OfKinds(TutorialConv), of_edge_type),
    "kinds, GCN": (lambda: OfKinds(GCNConv), of_edge_type),
    "Cheb": (lambda: Layers(ChebConv(5, 8, 3), SAGEConv(8, 8)), of_x),
    "MixHop": (lambda: Layers(MixHopConv(5, 4, [0, 1]), GraphConv(8, 8)), of_x),
    "GCN beside one's own": (lambda: Layers(GCNConv(5, 8), TutorialConv(8, 8)), of_x),
    "GCN in two ways": (
        lambda: Layers(GCNConv(5, 8), GCNConv(8, 8, add_self_loops=False)), of_x
    ),
    "GCN beside attributes": (GCNBesideAttributes, of_edge_attr),
    "GCN beside a sum": (GCNBesideSum, of_x),
    "weighted and not": (WeightedAndNot, of_edge_weight),
    "at sources": (AtSources, of_edge_weight),
    "both ways": (BothWays, of_x),
    "means at sources beside SAGE": (lambda: Gated(SAGEConv), of_x),
    "means at sources beside GCN": (lambda: Gated(GCNConv), of_x),
    "means at sources beside GAT": (lambda: Gated(GATConv), of_x),
    "reversed": (Reversed, of_edge_attr),
    "flow, SAGE": (lambda: Layers(turned(SAGEConv, 5, 8), SAGEConv(8, 8)), of_x),
    "flow, GCN": (lambda: Layers(GCNConv(5, 8), turned(GCNConv, 8, 8)), of_x),
    "flow, GAT": (lambda: Layers(turned(GATConv, 5, 8), turned(GATConv, 8, 8)), of_x),
    "flow, a layer of one's own": (lambda: Layers(Backwards(5, 8), TutorialConv(8, 8)), of_x),
    "flow, Cheb": (lambda: Layers(turned(ChebConv, 5, 8, 3), SAGEConv(8, 8)), of_x),
    "flow, in one way": (lambda: Layers(Backwards(5, 8), Backwards(8, 8)), of_x),
}  # fmt: skip


def make_graph(kind="loops"):
    """Return a graph with attributes of edges, and nodes without any."""
    data = random_graph()
    edges = data.edge_index[:, (data.edge_index < 57).all(dim=0)]
    edges, _ = remove_self_loops(edges)
    if kind == "loops":  # And edges that are there twice, in any order.
        loops = torch.tensor([[3, 3, 4, 7], [3, 3, 4, 7]])
        edges = torch.cat([edges, loops, edges[:, :9]], dim=1)
        edges = edges[:, torch.randperm(edges.size(1))]
    elif kind == "undirected":
        edges = to_undirected(edges)
    num_edges = edges.size(1)
    return Data(
        x=data.x, edge_index=edges, edge_attr=torch.randn(num_edges, 2),
        edge_weight=torch.rand(num_edges) + 0.1, edge_type=torch.randint(3, (num_edges,)),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "loops", "undirected"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_take_different_edges(name, kind):
    make, call = MODELS[name]
    model, graph, out = check(make(), make_graph(kind), call)
    assert sum("edge_list" in key for key in graph.to_dict()) <= 6
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(again.predict(graph, log=False), out)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_layers_that_take_different_edges(name):
    make, call = MODELS[name]
    check_gradients(make(), make_graph(), call)


def test_a_graph_is_joined_once():
    data = make_graph()
    model = gas.to_scalable(Between(add_self_loops), data)
    prepared = model.prepare(data)
    masks = [key for key in prepared.to_dict() if "edge_list" in key]
    assert len(masks) == 1  # The other list is all edges.
    assert int(prepared[masks[0]].sum()) == data.num_edges
    assert prepared.num_edges == data.num_edges + data.num_nodes
    assert torch.equal(prepared.edge_index[:, prepared[masks[0]]], data.edge_index)
    assert model.prepare(prepared).num_edges == prepared.num_edges
    other = gas.to_scalable(Between(remove_self_loops), data)
    with pytest.raises(ValueError, match="was prepared for another model"):
        other.prepare(prepared)
    with pytest.raises(ValueError, match="the graph lacks what this model's layers compute of all"):
        model.predict(gas.cluster(data, 4, log=False), log=False)


def test_layers_are_fused_on_their_edges():
    text = str(gas.to_scalable(Between(add_remaining_self_loops), make_graph()))
    assert text.count("[fused]") == 4  # One's own are products.
    text = str(gas.to_scalable(OfKinds(GCNConv), make_graph()))
    assert text.count("[fused]") == 6
    text = str(gas.to_scalable(WithAttributes(), make_graph()))
    assert "attention: TransformerConv(8, 8, heads=1)  [pair]" in text


def test_edges_are_selected_once_for_all_layers():
    model = gas.to_scalable(OfKinds(GCNConv), make_graph())
    names = [getattr(node.target, "__name__", "") for node in model.net.graph.nodes]
    assert names.count("select_edges") == 3


def test_models_of_one_list_have_no_masks():
    data = make_graph()
    for net in (
        Layers(TutorialConv(5, 8), TutorialConv(8, 8)),
        Layers(GCNConv(5, 8), GCNConv(8, 8)),
    ):
        graph = gas.to_scalable(net, data).prepare(data)
        assert not [key for key in graph.to_dict() if "edge_list" in key]


class DropsKinds(nn.Module):
    """Drops edges of each kind at random."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(GraphConv(5, 3) for _ in range(2))

    def forward(self, x, edge_index, edge_type):
        out = 0
        for kind, conv in enumerate(self.convs):
            kept, _ = dropout_edge(edge_index[:, edge_type == kind], 0.5, training=self.training)
            out = out + conv(x, kept)
        return out


def test_edges_of_kinds_are_dropped():
    data, net = make_graph(), DropsKinds()
    check(net, data, of_edge_type)
    data = data.apply(lambda rows: rows.double() if rows.is_floating_point() else rows)
    model = gas.to_scalable(net, data).train()
    (batch,) = gas.SubgraphLoader(gas.cluster(data, 1, model=model, log=False), log=False)
    with torch.no_grad():
        drawn = [torch.stack([model(batch) for _ in range(400)]).mean(dim=0)]
        net.train()
        drawn.append(torch.stack([of_edge_type(net, data) for _ in range(400)]).mean(dim=0))
        whole = of_edge_type(net.eval(), data)
    error = (drawn[0] - drawn[1]).abs().mean()
    assert error < 0.2 * (whole - drawn[1]).abs().mean()


@pytest.mark.requires("torch_sparse")
def test_a_sparse_tensor_is_joined():
    from torch_sparse import SparseTensor

    data = make_graph("undirected")
    listed = data.clone()
    row, col = data.edge_index.flip(0)
    data.adj_t = SparseTensor(row=row, col=col, sparse_sizes=(60, 60))
    for key in ("edge_index", "edge_attr", "edge_weight", "edge_type"):
        del data[key]
    net = Between(add_self_loops).double().eval()
    data.x = data.x.double()
    model = gas.to_scalable(net, data)
    out = model.predict(gas.cluster(data, 4, model=model, log=False), log=False)
    torch.testing.assert_close(out, net(data.x, listed.edge_index))


def test_join_lists():
    edges = torch.tensor([[0, 1, 1, 2], [1, 2, 2, 0]])
    more = torch.tensor([[2, 1, 2, 1], [2, 2, 0, 0]])
    joined, (first, second) = join_lists([edges, more], 3)
    assert joined.tolist() == [[0, 1, 1, 2, 2, 1], [1, 2, 2, 0, 2, 0]]
    assert [first.tolist(), second.tolist()] == [[0, 1, 2, 3], [4, 1, 3, 5]]
    alone, places = join_lists([edges], 3)
    assert alone is edges
    assert places == [None]
    none = torch.empty(2, 0, dtype=torch.long)
    joined, (first, second) = join_lists([none, edges], 3)
    assert torch.equal(joined, edges)
    assert first.numel() == 0
    joined, (first, second) = join_lists([edges, torch.cat([edges, more], dim=1)], 3)
    assert joined.tolist() == [[0, 1, 1, 2, 2, 1, 2, 1], [1, 2, 2, 0, 2, 2, 0, 0]]
    assert [first.tolist(), second.tolist()] == [[0, 1, 2, 3], list(range(8))]
    joined, places = join_lists([none, none], 3)
    assert joined.shape == (2, 0)


def test_random_lists_are_joined():
    for _ in range(20):
        lists = [torch.randint(4, (2, int(torch.randint(30, ())))) for _ in range(3)]
        joined, places = join_lists(lists, 4)
        for edges, place in zip(lists, places, strict=True):
            assert torch.equal(joined[:, place], edges)
            assert place.unique().numel() == place.numel()
        counts = [torch.bincount(edges[0] * 4 + edges[1], minlength=16) for edges in lists]
        most = torch.stack(counts).amax(dim=0)
        assert torch.equal(torch.bincount(joined[0] * 4 + joined[1], minlength=16), most)


class CountsOthers(nn.Module):
    """Divides by the number of edges out of a node, without self-loops."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin = GraphConv(5, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        (src, dst), _ = remove_self_loops(edge_index)
        share = 1 / degree(src, x.size(0), x.dtype).clamp(min=1)
        return self.lin(sum_of(x[src] * share[src].view(-1, 1), dst, x))


def test_rows_of_nodes_beside_several_lists():
    check(CountsOthers(), make_graph(), of_x)
