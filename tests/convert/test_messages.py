"""Messages that a module passes by itself: sums, some of the edges, updates of edges."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from comparisons import (
    Layers,
    Net,
    TutorialConv,
    Unused,
    check,
    check_gradients,
    of_edge_attr,
    of_x,
    with_edge_attr,
)
from conftest import random_graph
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GINEConv,
    GraphConv,
    MessagePassing,
    NNConv,
    SAGEConv,
    Sequential,
    TransformerConv,
)
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, scatter, softmax

import gas

# Messages without a layer -------------------------------------------------------------------------


def summed(net, x, edge_index, _):
    src, dst = edge_index
    return scatter(x[src], dst, dim=0, dim_size=x.size(0), reduce="sum")


def mean(net, x, edge_index, _):
    src, dst = edge_index[0], edge_index[1]
    return scatter(x[src], dst, dim=0, dim_size=x.size(0), reduce="mean")


def added(net, x, edge_index, _):
    src, dst = edge_index
    return torch.zeros_like(x).index_add_(0, dst, x[src])


def added_to_rows(net, x, edge_index, _):
    src, dst = edge_index
    return torch.zeros(x.size(0), x.size(1)).to(x.dtype).index_add(0, dst, x[src]) + x


def weighted(net, x, edge_index, edge_attr):
    src, dst = edge_index
    weight = torch.sigmoid(net.of_edges(edge_attr))
    out = x.new_zeros(x.size(0), x.size(1))
    out.index_add_(0, dst, weight * x.index_select(0, src))
    return out


def by_both_ends(net, x, edge_index, edge_attr):
    src, dst = edge_index
    message = net.both(torch.cat([x[src], x[dst], edge_attr], dim=-1)).relu()
    return scatter(message, dst, dim=0, dim_size=x.size(0), reduce="sum")


def normalised(net, x, edge_index, _):
    src, dst = edge_index
    deg = degree(dst, x.size(0), dtype=x.dtype).clamp(min=1)
    norm = (deg[src] * deg[dst]).rsqrt()
    return scatter(x[src] * norm[:, None], dst, dim=0, dim_size=x.size(0), reduce="sum")


def attention(net, x, edge_index, _):
    src, dst = edge_index
    score = F.leaky_relu((x[src] * net.att_src).sum(-1) + (x[dst] * net.att_dst).sum(-1))
    alpha = softmax(score, dst, num_nodes=x.size(0))
    return scatter(alpha[:, None] * x[src], dst, dim=0, dim_size=x.size(0), reduce="sum")


def largest(net, x, edge_index, _):
    src, dst = edge_index
    start = torch.full_like(x, -9.0)
    index = dst.view(-1, 1).expand(-1, x.size(1))
    return start.scatter_reduce(0, index, x[src], "amax", include_self=True)


class Passing(nn.Module):
    """Two hops of messages that a function passes."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.lin1, self.lin2 = nn.Linear(5, 8), nn.Linear(8, 8)
        self.of_edges, self.both = nn.Linear(2, 1), nn.Linear(18, 8)
        self.att_src, self.att_dst = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x, edge_index, edge_attr):
        x = self.function(self, self.lin1(x), edge_index, edge_attr).relu()
        x = F.dropout(x, 0.3, self.training)
        return self.function(self, self.lin2(x), edge_index, edge_attr)


PASSING = [
    summed, mean, added, added_to_rows, weighted, by_both_ends, normalised, attention, largest,
]  # fmt: skip


@pytest.mark.parametrize("function", PASSING)
def test_messages_without_a_layer(function):
    net = Passing(function)
    model, graph, out = check(net, with_edge_attr(), of_edge_attr)
    assert len(model.histories) == 1
    assert set(model.net.state_dict()) == set(net.state_dict())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again.predict(graph, log=False), out)


@pytest.mark.parametrize("function", [by_both_ends, attention, normalised])
def test_gradients_of_messages_are_those_of_a_full_batch(function):
    check_gradients(Passing(function), with_edge_attr(), of_edge_attr)


class Mesh(nn.Module):
    """Updates of edges and nodes in turn, after MeshGraphNets."""

    def __init__(self):
        super().__init__()
        self.start, self.start_edges = nn.Linear(5, 8), nn.Linear(2, 8)
        self.of_edges = nn.ModuleList(nn.Linear(24, 8) for _ in range(2))
        self.of_nodes = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x, edge_index, edge_attr):
        src, dst = edge_index
        x, e = self.start(x), self.start_edges(edge_attr)
        for of_edges, of_nodes in zip(self.of_edges, self.of_nodes, strict=True):
            e = e + of_edges(torch.cat([x[src], x[dst], e], dim=1)).relu()
            total = scatter(e, dst, dim=0, dim_size=x.size(0), reduce="sum")
            x = x + of_nodes(torch.cat([x, total], dim=1)).relu()
        return x


def test_edges_are_updated_from_layer_to_layer():
    model, _, _ = check(Mesh(), with_edge_attr(), of_edge_attr)
    assert len(model.histories) == 1


def distances(net, x, edge_index, edge_attr):
    src, dst = edge_index
    return (x[src] - x[dst]).norm(dim=-1, keepdim=True).expand(-1, 2)


def updated(net, x, edge_index, edge_attr):
    src, dst = edge_index
    return edge_attr + net.of_edges(torch.cat([x[src], x[dst], edge_attr], dim=1)).tanh()


def normalised_rows(net, x, edge_index, edge_attr):
    src, dst = edge_index
    return net.norm(net.of_edges(torch.cat([x[src], x[dst], edge_attr], dim=1)))


def chosen(net, x, edge_index, edge_attr):
    src, dst = edge_index
    return ((x[src] * x[dst]).sum(1, keepdim=True).detach() > 0) * edge_attr


class WithEdges(nn.Module):
    """Layers of PyG, which are given rows of edges that are computed of rows of nodes."""

    def __init__(self, function, layer, is_new=True):
        super().__init__()
        self.function, self.is_new = function, is_new
        self.start, self.a, self.b = nn.Linear(5, 8), layer(), layer()
        self.of_edges, self.norm = nn.Linear(18, 2), nn.BatchNorm1d(2)

    def forward(self, x, edge_index, edge_attr):
        x = self.start(x)
        edges = self.function(self, x, edge_index, edge_attr)
        x = self.a(x, edge_index, edges).relu()
        if self.is_new:
            edges = self.function(self, x, edge_index, edges)
        return self.b(x, edge_index, edge_attr=edges)


EDGE_LAYERS = {
    "TransformerConv": lambda: TransformerConv(8, 8, edge_dim=2),
    "GINEConv": lambda: GINEConv(nn.Linear(8, 8), edge_dim=2),
    "GATv2Conv": lambda: GATv2Conv(8, 8, edge_dim=2, add_self_loops=False),
    "GATConv with loops": lambda: GATConv(8, 8, edge_dim=2),
    "NNConv": lambda: NNConv(8, 8, nn.Linear(2, 64)),
}


@pytest.mark.slow(fast=4)
@pytest.mark.parametrize(
    ("function", "is_new"),
    [
        (distances, True),
        (updated, True),
        (normalised_rows, True),
        (normalised_rows, False),
        (chosen, True),
    ],
)
@pytest.mark.parametrize("layer", EDGE_LAYERS)
def test_layers_are_given_rows_of_edges_that_nodes_make(layer, function, is_new):
    net = WithEdges(function, EDGE_LAYERS[layer], is_new)
    model, graph, _ = check(net, with_edge_attr(), of_edge_attr)
    assert len(model.histories) == 1
    steps = 0
    for batch in gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False):
        assert torch.isfinite(model.train()(batch)).all()
        steps += 1
    if function is normalised_rows:  # Once for each set of edges, not for each layer.
        assert net.norm.num_batches_tracked == steps * (1 + is_new)


@pytest.mark.parametrize("function", [distances, updated])
def test_gradients_through_rows_of_edges_are_those_of_a_full_batch(function):
    net = WithEdges(function, EDGE_LAYERS["GINEConv"])
    check_gradients(net, with_edge_attr(), of_edge_attr)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = GraphConv(5, 8), GraphConv(8, 4)

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.a(x, edge_index, torch.cosine_similarity(x[src], x[dst])).relu()
        return self.b(h, edge_index, (h[src] * h[dst]).sum(dim=-1).sigmoid())


def test_weights_of_edges_are_computed_of_nodes():
    check(Weighted(), random_graph(), of_x)
    check_gradients(Weighted(), random_graph(), of_x)


# Sums of messages ---------------------------------------------------------------------------------


def hops(net, x, edge_index, _):
    src, dst = edge_index
    for _ in range(3):
        x = scatter(x[src], dst, dim=0, dim_size=x.size(0), reduce="sum") / 4
    return x


def hops_by_index_add(net, x, edge_index, _):
    src, dst = edge_index
    for _ in range(2):
        x = torch.zeros_like(x).index_add_(0, dst, x[src]).tanh()
    return x


def read_at_both_ends(net, x, edge_index, _):
    src, dst = edge_index
    for _ in range(2):
        x = scatter(x[src] - x[dst], dst, dim=0, dim_size=x.size(0), reduce="sum").tanh()
    return x


def softmax_by_hand(net, x, edge_index, _):
    src, dst = edge_index
    e = ((x[src] * net.att_src).sum(-1) + (x[dst] * net.att_dst).sum(-1)).tanh().exp()
    total = torch.zeros(x.size(0)).to(x.dtype).scatter_add_(0, dst, e)
    alpha = e / total[dst]
    return torch.zeros_like(x).index_add_(0, dst, alpha[:, None] * x[src])


@pytest.mark.parametrize("function", [hops, hops_by_index_add, read_at_both_ends, softmax_by_hand])
def test_sums_of_sums_of_messages(function):
    model, _, _ = check(Passing(function), with_edge_attr(), of_edge_attr)
    times = {hops: 3, softmax_by_hand: 1}.get(function, 2)
    assert len(model.histories) == 2 * times - 1


class DroppedTwice(nn.Module):
    """Reads a dropped message twice: both sums cancel, unless they are dropped anew."""

    def __init__(self, part):
        super().__init__()
        self.lin, self.part = nn.Linear(5, 3), part

    def forward(self, x, edge_index):
        src, dst = edge_index
        message = self.part(self.lin(x)[src])
        size = {"dim": 0, "dim_size": x.size(0), "reduce": "sum"}
        return scatter(message, dst, **size) + scatter(-message, dst, **size)


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_messages_that_several_sums_read_are_computed_once(part):
    model, graph, _ = check(DroppedTwice(part), random_graph(), of_x)
    (batch, *_) = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False)
    model.train()
    assert torch.allclose(model(batch), torch.zeros(1, 3, dtype=torch.float64), atol=1e-12)
    if isinstance(part, nn.BatchNorm1d):
        assert part.num_batches_tracked == 1


class GatedGCN(nn.Module):
    """A layer that updates its edges, too, with batch norms of both, as GatedGCN does."""

    def __init__(self, in_channels, edge_channels, out_channels):
        super().__init__()
        self.own, self.of, self.ends = (nn.Linear(in_channels, out_channels) for _ in range(3))
        self.edge = nn.Linear(edge_channels, out_channels)
        self.norm, self.edge_norm = nn.BatchNorm1d(out_channels), nn.BatchNorm1d(out_channels)

    def forward(self, x, edge_index, edge_attr):
        (src, dst), size = edge_index, {"dim": 0, "dim_size": x.size(0)}
        edge = self.ends(x)[src] + self.ends(x)[dst] + self.edge(edge_attr)
        gate = edge.sigmoid()
        out = scatter(gate * self.of(x)[src], dst, **size) / (scatter(gate, dst, **size) + 1e-6)
        return self.norm(self.own(x) + out).relu(), self.edge_norm(edge).relu()


class OfEdges(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([GatedGCN(5, 2, 8), GatedGCN(8, 8, 8), GatedGCN(8, 8, 8)])

    def forward(self, x, edge_index, edge_attr):
        for part in self.parts[:-1]:
            x, edge_attr = part(x, edge_index, edge_attr)
        return self.parts[-1](x, edge_index, edge_attr)[0]


def test_edges_are_updated_once_by_layer():
    net = OfEdges()
    model, graph, _ = check(net, with_edge_attr(), of_edge_attr)
    assert len(model.histories) == 2
    norms = [part.edge_norm for part in net.parts]
    before = [int(norm.num_batches_tracked) for norm in norms]
    for batch in gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False):
        model.train()(batch)
    after = [int(norm.num_batches_tracked) - 2 for norm in norms[:-1]]
    assert after == before[:-1]
    check_gradients(OfEdges(), with_edge_attr(), of_edge_attr)


# Some of the edges --------------------------------------------------------------------------------


def layers_of_types(net, x, edge_index, edge_attr, edge_type):
    out = net.own(x)
    for kind, conv in enumerate(net.convs):
        mask = edge_type == kind
        out = out + conv(x, edge_index[:, mask], edge_attr[mask])
    return out


def means_of_types(net, x, edge_index, _, edge_type):
    out = net.own(x)
    for kind in range(2):
        src, dst = edge_index[:, edge_type == kind]
        out = out + scatter(net.lins[kind](x)[src], dst, dim=0, dim_size=len_of(x), reduce="mean")
    return out


def softmax_of_types(net, x, edge_index, edge_attr, edge_type):
    out = net.own(x)
    for kind in range(2):
        chosen = (edge_type == kind).nonzero().view(-1)
        src, dst = edge_index[0, chosen], edge_index[1, chosen]
        alpha = softmax(edge_attr[chosen, :1], dst, num_nodes=len_of(x))
        out = out + scatter(alpha * net.lins[kind](x)[src], dst, dim=0, dim_size=len_of(x))
    return out


def edges_that_features_choose(net, x, edge_index, *_):
    src, dst = edge_index
    some = edge_index[:, src != dst]
    return net.own(x) + net.sage(x, some) + net.sage(x.relu(), edge_index)


def len_of(x):
    return x.size(0)


class OfTypes(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.own, self.last, self.sage = nn.Linear(5, 5), nn.Linear(5, 3), SAGEConv(5, 5)
        self.convs = nn.ModuleList([GATConv(5, 5, edge_dim=2, dropout=0.5) for _ in range(2)])
        self.lins = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])

    def forward(self, x, edge_index, edge_attr, edge_type):
        x = self.function(self, x, edge_index, edge_attr, edge_type).tanh()
        return self.last(self.function(self, x, edge_index, edge_attr, edge_type))


def with_edge_type():
    data = with_edge_attr()
    data.edge_type = torch.randint(2, (data.num_edges,))
    return data


def of_edge_type(net, data):
    return net(data.x, data.edge_index, data.edge_attr, data.edge_type)


SELECTING = [layers_of_types, means_of_types, softmax_of_types, edges_that_features_choose]


@pytest.mark.parametrize("function", SELECTING)
def test_some_of_the_edges(function):
    model, _, _ = check(OfTypes(function), with_edge_type(), of_edge_type)
    assert len(model.histories) == 1
    net = OfTypes(function)
    for conv in net.convs:
        conv.dropout = 0.0
    check_gradients(net, with_edge_type(), of_edge_type)


def returned_edges(net, x, edge_index, _, edge_type):
    return net.sage(x, edge_index), x[edge_index[:, edge_type == 0][0]]


def averaged_edges(net, x, edge_index, edge_attr, edge_type):
    return net.sage(x, edge_index) * edge_attr[edge_type == 0].mean()


class WithoutLoops(nn.Module):
    """Sums over the edges without self-loops, which the whole graph is prepared with."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x, edge_index):
        src, dst = remove_self_loops(edge_index)[0]
        for _ in range(2):
            x = scatter(x[src], dst, dim=0, dim_size=x.size(0), reduce="mean")
        return self.lin(x)


def test_sums_over_edges_without_self_loops():
    data = random_graph()
    data.edge_index = torch.cat([data.edge_index, torch.arange(9).expand(2, -1)], dim=1)
    model, _, _ = check(WithoutLoops(), data, of_x)
    assert len(model.histories) == 1


class OfFunction(OfTypes):
    def __init__(self, function):
        super().__init__(function)

    def forward(self, x, edge_index, edge_attr, edge_type):
        return self.function(self, x, edge_index, edge_attr, edge_type)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (returned_edges, "isn't a row for each node"),
        (averaged_edges, "selects edges, and isn't summed up by nodes"),
    ],
)
def test_some_of_the_edges_refused(function, reason):
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(OfFunction(function), with_edge_type())


# Graphs that differ from small ones ---------------------------------------------------------------


class WithLoops(nn.Module):
    """Changes the edges, and computes nothing else of them."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(5, 8), SAGEConv(8, 3)

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def test_a_graph_is_prepared_once():
    data, net = random_graph(), WithLoops().eval()
    model = gas.to_scalable(net, data)
    expected = net(data.x, data.edge_index)
    prepared = model.prepare(data)
    for given, options in ((prepared, {"model": model}), (prepared, {})):
        graph = gas.cluster(given, 4, log=False, **options)
        assert torch.allclose(model.predict(graph, log=False), expected, atol=1e-5)
    with pytest.raises(ValueError, match="the graph lacks what this model's layers compute of all"):
        model.predict(gas.cluster(data, 4, log=False), log=False)
    other = gas.to_scalable(Unused(), data)
    with pytest.raises(
        ValueError, match="was prepared for another model than this one: give the gr"
    ):
        other.predict(gas.cluster(prepared, 4, log=False), log=False)
    with pytest.raises(
        ValueError, match="was prepared for another model than this one: give the gr"
    ):
        gas.to_scalable(Layers(TutorialConv(5, 8), TutorialConv(8, 8)), data).prepare(prepared)


def test_as_many_edges_as_nodes():
    node = torch.arange(60)
    data = random_graph()
    data.edge_index = torch.stack([node, (node + 7) % 60])
    check(Passing(normalised), with_attr(data), of_edge_attr)


def with_attr(data):
    data.edge_attr = torch.rand(data.num_edges, 2)
    return data


class BySigns(nn.Module):
    """Takes weights in two ways that are the same for positive ones."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x, edge_index, edge_weight):
        src, dst = edge_index
        size = {"dim": 0, "dim_size": x.size(0), "reduce": "sum"}
        first = scatter(edge_weight.abs(), dst, **size)
        second = scatter(edge_weight.clamp(min=0), dst, **size)
        messages = scatter(self.lin(x)[src], dst, **size)
        return messages * first[:, None] + messages * second[:, None]


def test_values_that_are_alike_on_small_graphs_alone():
    data = random_graph()
    data.edge_weight = torch.randn(data.num_edges)
    model = gas.to_scalable(BySigns(), data)
    with pytest.raises(ValueError, match="edges, or attributes of edges, on this graph, of Prepar"):
        model.prepare(data)
    data.edge_weight = data.edge_weight.abs()
    check(BySigns(), data, lambda net, data: net(data.x, data.edge_index, data.edge_weight))


class OfSmallestDegree(Net):
    def forward(self, x, edge_index):
        smallest = degree(edge_index[1], x.size(0)).min().item()
        return self.conv2(self.conv1(x, edge_index) + smallest, edge_index)


def test_numbers_of_the_edges_are_refused():
    with pytest.raises(ValueError, match="is computed of the edges, and isn't a row for each node"):
        gas.to_scalable(OfSmallestDegree(), random_graph())


def test_assignments_to_prepared_rows_are_pickled():
    data = random_graph()
    model = gas.to_scalable(Layers(TutorialConv(5, 8), TutorialConv(8, 8)), data).eval()
    again = pickle.loads(pickle.dumps(model))
    out = model.predict(gas.cluster(data, 4, model=model, log=False), log=False)
    graph = gas.cluster(data, 4, model=again, log=False)
    torch.testing.assert_close(again.predict(graph, log=False), out)


# What only training shows -------------------------------------------------------------------------


class DroppingInPlace(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(5, 8), SAGEConv(8, 3)
        self.kind, self.drop = kind, nn.Dropout(0.5, inplace=True)

    def forward(self, x, edge_index):
        hidden = self.conv1(x, edge_index)
        if self.kind == "function":
            F.dropout(hidden, 0.5, self.training, inplace=True)
        elif self.kind == "module":
            self.drop(hidden)
        elif self.kind == "read again":
            hidden = F.dropout(hidden, 0.5, self.training, inplace=True) + hidden
        else:
            F.dropout(hidden.view(-1, 8), 0.5, self.training, inplace=True)
        return self.conv2(hidden, edge_index)


@pytest.mark.parametrize("kind", ["function", "module", "read again"])
def test_dropout_in_place_drops(kind):
    data, net = random_graph(), DroppingInPlace(kind)
    model, graph, _ = check(net, data, of_x)
    model.train()
    seen = []
    model.net.conv2.register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    model(next(iter(gas.SubgraphLoader(graph, log=False))))
    rows = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    rows = rows.tensor() if hasattr(rows, "tensor") else rows
    assert 0.3 < float((rows == 0).double().mean()) < 0.7


def test_dropout_in_place_of_a_view_is_refused():
    with pytest.raises(ValueError, match="applies dropout to a view of a tensor in place"):
        gas.to_scalable(DroppingInPlace("view"), random_graph())


class WithoutGradient(Net):
    def forward(self, x, edge_index):
        hidden = self.conv1(x, edge_index)
        with torch.no_grad():
            parts = hidden.chunk(2, dim=1)
        return self.conv2(torch.cat([parts[1], parts[0]], dim=1), edge_index)


def test_parts_of_a_tuple_without_gradient():
    model, graph, _ = check(WithoutGradient(), random_graph(), of_x)
    model(next(iter(gas.SubgraphLoader(graph, log=False)))).sum().backward()
    assert model.net.conv1.lin.weight.grad is None
    assert model.net.conv2.lin.weight.grad is not None


class ByTypes(Net):
    """Counts types, of which a small graph may lack rare ones."""

    def forward(self, x, edge_index, edge_type):
        count = edge_type.unique().numel()
        return sum([self.conv2(self.conv1(x, edge_index), edge_index) for _ in range(count)])


def test_sizes_that_depend_on_numbers_are_refused():
    data = random_graph()
    data.edge_type = torch.zeros(data.num_edges, dtype=torch.long)
    with pytest.raises(ValueError, match="'numel' depends on the graph, and a number is expected"):
        gas.to_scalable(ByTypes(), data)


def of_edges_alone(net, x, edge_index, edge_attr):
    total = scatter(net.of_edges(edge_attr), edge_index[1], dim=0, dim_size=x.size(0))
    return x[:, :8] + total


def test_sums_of_edge_attributes_alone():
    net = Passing(of_edges_alone)
    net.first = SAGEConv(8, 8)
    check(WithConv(net), with_edge_attr(), of_edge_attr)


class WithConv(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.conv = net, SAGEConv(8, 8)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(self.net(x, edge_index, edge_attr), edge_index)


class AskingForGradients(Net):
    def forward(self, x, edge_index):
        hidden = self.conv1(x, edge_index)
        if hidden.requires_grad:
            hidden = 2 * hidden
        return self.conv2(hidden, edge_index)


def test_questions_about_gradients_are_refused():
    with pytest.raises(
        ValueError, match="requires gradients, which predictions don.t have: ask for self.training"
    ):
        gas.to_scalable(AskingForGradients(), random_graph())


# Rows of other shapes, and copies -----------------------------------------------------------------


def of_heads(net, x, edge_index, _):
    """Attention of two heads, whose rows are tables, and scores numbers."""
    src, dst = edge_index
    h = x.view(x.size(0), 2, 4)
    score = (h * net.att_src.view(2, 4)).sum(-1).tanh()
    alpha = softmax(score[src] + score[dst], dst, num_nodes=x.size(0))
    out = scatter(alpha.unsqueeze(-1) * h[src], dst, dim=0, dim_size=x.size(0), reduce="sum")
    return out.flatten(1)


def of_numbers(net, x, edge_index, _):
    src, dst = edge_index
    score = x.mean(dim=1)
    return x + scatter(score[src], dst, dim=0, dim_size=x.size(0), reduce="sum")[:, None]


@pytest.mark.parametrize("function", [of_heads, of_numbers])
def test_rows_of_any_shape(function):
    check(Passing(function), with_edge_attr(), of_edge_attr)


class Copying(Net):
    """Moves and copies, which change nothing, asserts about sizes, and changes in place."""

    def forward(self, data):
        data = data.to(data.x.device)
        x, edge_index = data.x, data.edge_index.to(data.x.device).long().contiguous()
        row, col = edge_index
        hidden = self.conv1(x, torch.stack([row, col], dim=0))
        assert hidden.shape == (x.size(0), 8)
        hidden.add_(1.0)
        F.relu_(hidden)
        return self.conv2(hidden, torch.stack((row, col), 0))


def test_copies_of_the_edges_and_changes_in_place():
    check(Copying(), random_graph())


# Sums that are products ---------------------------------------------------------------------------


class WeightedSum(nn.Module):
    """Sums up rows of neighbours, weighted by a function of the edges' weights."""

    def __init__(self, how):
        super().__init__()
        self.lin1, self.lin2, self.how = nn.Linear(5, 8), nn.Linear(8, 3), how
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x, edge_index, edge_weight):
        for lin in (self.lin1, self.lin2):
            x = self.sum(lin(x), edge_index, edge_weight).tanh()
        return x

    def sum(self, x, edge_index, weight):
        src, dst = edge_index
        reduce = self.how if self.how in ("mean", "max") else "sum"
        rows = x[src]
        if self.how == "relu":
            weight = weight.relu()
        if self.how == "scale":
            weight = weight * self.scale
        if self.how == "difference":
            rows = rows - x[dst]
        if self.how == "limit":
            rows = rows.clamp(-1000, 1000)
        messages = rows * weight[:, None]
        if self.how == "dropout":
            messages = F.dropout(messages, 0.5, self.training)
        return scatter(messages, dst, dim=0, dim_size=x.size(0), reduce=reduce)


@pytest.mark.parametrize(
    ("how", "product"),
    [
        ("sum", "sum"), ("relu", "sum"), ("scale", "sum"), ("max", "max"), ("mean", ""),
        ("difference", ""), ("limit", ""), ("dropout", ""),
    ],
)  # fmt: skip
def test_sums_of_rows_are_products(how, product):
    def call(net, data):
        return net(data.x, data.edge_index, data.edge_weight)

    data, net = random_graph(), WeightedSum(how)
    data.edge_weight = torch.randn(data.num_edges)
    model, _, _ = check(net, data, call)
    name = "_projected_sum" if product == "sum" else f"_product_{product}"
    assert str(model).count(name) == (2 if product else 0)
    assert str(model).count("[fused]") == (2 if product else 0)
    check_gradients(net, data, call)


class DropsMessages(MessagePassing):
    """A layer whose messages are rows, but for what it drops of them in training."""

    def __init__(self, p):
        super().__init__()
        self.lin, self.p = nn.Linear(5, 3), p

    def forward(self, x, edge_index):
        scale = degree(edge_index[1], x.size(0), x.dtype).clamp(min=1).rsqrt()
        weight = scale[edge_index[0]] * scale[edge_index[1]]
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def message(self, x_j, weight):
        return F.dropout(x_j, self.p, self.training) * weight[:, None]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_messages_that_are_dropped_are_no_products(p):
    net = Sequential("x, edge_index", [(DropsMessages(p), "x, edge_index -> x")])
    model, _, _ = check(net, random_graph(), of_x)
    assert ("_projected_sum" in str(model)) == (p == 0)


def test_rows_that_are_added_at_indices_are_refused_by_what_they_are():
    def forward(self, x, edge_index):
        out = x.clone()
        out[edge_index[1]] += x[edge_index[0]]  # Of several edges, the last one's.
        return out

    net = type("Net", (nn.Module,), {"forward": forward})()
    with pytest.raises(ValueError, match="'clone_changed' is computed of messages along edges"):
        gas.to_scalable(net, random_graph())
