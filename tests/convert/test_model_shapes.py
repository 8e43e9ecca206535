"""Shapes of models that others publish: what ``forward`` takes and returns."""

import copy
import dataclasses
import pickle
import typing

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from conftest import random_graph
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, GCNConv, GINConv, MessagePassing, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, scatter, softmax

import gas


def check(net, data, call=None, tolerance=1e-10):
    """Convert a module, and compare it with the module called as its user would, in float64."""
    net, data = net.double().eval(), data.clone()
    for key, value in data.to_dict().items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            data[key] = value.double()
    call = call or (lambda net, data: net(data))
    expected = tree_leaves(_fields(call(net, copy.copy(data))))
    model = gas.to_scalable(net, data, dtype=torch.float64)
    graph = gas.cluster(data, 4, model=model, log=False)
    out = model.predict(graph, log=False)
    found = tree_leaves(_fields(out))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is theirs or torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    # Mini-batches, with the halo's rows from the histories.
    for batch in gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False):
        rows = tree_leaves(_fields(model(batch)))
        nodes = graph.perm[batch.n_id[: batch.batch_size]]
        for mine, theirs in zip(rows, expected, strict=True):
            assert mine is theirs or torch.allclose(
                mine, theirs[nodes], rtol=tolerance, atol=tolerance
            )
    assert gas.verify(model, graph)
    return model, graph, out


def check_gradients(net, data, call, loss=lambda out: out.square().mean()):
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
    assert len(gradients[0]) == len(gradients[1]) >= 4
    for name, mine in gradients[0].items():
        torch.testing.assert_close(mine, gradients[1][name], rtol=1e-9, atol=1e-12)


def of_x(net, data):
    return net(data.x, data.edge_index)


def _fields(out):
    is_made = dataclasses.is_dataclass(out)
    return {f.name: getattr(out, f.name) for f in dataclasses.fields(out)} if is_made else out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(5, 8), GCNConv(8, 3)


# Graphs as the argument ---------------------------------------------------------------------------


class OfGraph(Net):
    """The shape of PyG's introduction."""

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = F.dropout(self.conv1(x, edge_index).relu(), training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


class Written(Net):
    """A batch that goes from layer to layer, as in GraphGym."""

    class Layer(nn.Module):
        def __init__(self, conv):
            super().__init__()
            self.layer = conv
            self.post = nn.Sequential(nn.BatchNorm1d(conv.out_channels), nn.ReLU())

        def forward(self, batch):
            batch.x = self.layer(batch.x, batch.edge_index)
            batch.x = self.post(batch.x)
            return batch

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2)

        def forward(self, batch):
            return self.lin(batch.x)

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*map(self.Layer, (self.conv1, self.conv2)))
        self.head = self.Head()

    def forward(self, batch):
        for layer in self.layers:
            batch = layer(batch)
        return self.head(batch)


class Asking(Net):
    """Numbers, optional attributes, items, and what isn't a tensor."""

    def forward(self, data, scale=2.0):
        assert data.x.size(1) == 5
        weight = data.edge_weight if "edge_weight" in data else None
        x = torch.cat([data["x"], data.x.new_zeros(data.num_nodes, 0)], dim=1)
        assert data.name == "mine"
        assert data.edge_attr is None
        assert data.batch is None
        x = self.conv1(x, data.edge_index, weight) * scale
        return self.conv2(x.view(data.num_nodes, 8), data.edge_index, weight)


class OfMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(5, 8), SAGEConv(8, 3)

    def forward(self, data):
        return self.conv2(self.conv1(data.x, data.adj_t).relu(), data.adj_t)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [OfGraph, Written, Asking])
def test_forward_takes_the_graph(kind, weighted):
    data = random_graph()
    data.name, data.y = "mine", torch.arange(data.num_nodes)
    if weighted:
        data.edge_weight = torch.rand(data.num_edges)
    model, _, _ = check(kind(), data)
    assert len(model.histories) == 1


def test_forward_takes_a_graph_of_a_matrix():
    data = T.ToSparseTensor(layout=torch.sparse_csr)(random_graph())
    check(OfMatrix(), data)


def test_a_graph_s_labels_are_read_where_forward_does():
    """Labels as features, of which a mini-batch has those of its halo, too."""

    class WithLabels(OfGraph):
        def forward(self, data):
            known = F.one_hot(data.y, 5).to(data.x.dtype) * data.train_mask[:, None]
            x = self.conv1(data.x + known, data.edge_index).relu()
            return self.conv2(x, data.edge_index)

    data = random_graph()
    data.y = torch.randint(5, (data.num_nodes,))
    data.train_mask = torch.rand(data.num_nodes) < 0.5
    check(WithLabels(), data)


# What forward returns -----------------------------------------------------------------------------


class Named(typing.NamedTuple):
    out: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Made:
    out: torch.Tensor
    hidden: torch.Tensor
    attention: torch.Tensor | None = None


RETURNED = {
    "pair": lambda out, h: (out, h),
    "list": lambda out, h: [out, h],
    "dictionary": lambda out, h: {"out": out, "hidden": h, "none": None},
    "nested": lambda out, h: {"a": (out, [h]), "scale": 2.0},
    "vectors and cubes": lambda out, h: (out.sum(1), h.view(-1, 2, 4)),
    "alone": lambda out, h: [out],
    "named": Named,
    "dataclass": lambda out, h: Made(out, hidden=h),
}


class Returning(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, edge_index):
        hidden = self.conv1(x, edge_index).relu()
        return RETURNED[self.kind](self.conv2(hidden, edge_index), hidden)


@pytest.mark.parametrize("kind", RETURNED)
def test_forward_returns_several(kind):
    data, net = random_graph(), Returning(kind)
    model, graph, out = check(net, data, lambda net, data: net(data.x, data.edge_index))
    expected = net(data.x.double(), data.edge_index)
    assert type(out) is type(expected)
    assert tree_map(type, _fields(out)) == tree_map(type, _fields(expected))
    shape = tree_map(lambda rows: getattr(rows, "shape", rows), _fields(out))
    assert shape == tree_map(lambda rows: getattr(rows, "shape", rows), _fields(expected))
    model.predict(graph, log=False)
    some = model.predict(graph, nodes=torch.tensor([3, 1, 3]), log=False)
    for mine, theirs in zip(
        tree_leaves(_fields(some)), tree_leaves(_fields(expected)), strict=True
    ):
        assert mine is theirs or torch.allclose(mine, theirs[[3, 1, 3]])
    again = copy.deepcopy(model).predict(graph, log=False)
    assert all(
        mine is theirs or torch.allclose(mine, theirs)
        for mine, theirs in zip(tree_leaves(_fields(again)), tree_leaves(_fields(out)), strict=True)
    )


def test_gradients_of_several_outputs_are_those_of_a_full_batch():
    def loss(out):
        return out["out"].square().mean() + out["hidden"].sin().mean()

    check_gradients(Returning("dictionary"), random_graph(), of_x, loss)


# Layers that normalise by themselves, and of several hops -----------------------------------------


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


class Layers(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.lin = first, second, nn.Linear(8, 3)

    def forward(self, x, edge_index):
        return self.lin(self.second(self.first(x, edge_index).relu(), edge_index))


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


@pytest.mark.parametrize("loops", [0, 2])
def test_layers_with_and_without_self_loops(loops):
    data = random_graph()
    data.edge_index = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    nodes = torch.arange(loops).expand(2, -1)
    data.edge_index = torch.cat([data.edge_index, nodes], dim=1)
    model, graph, _ = check(Mixed(), data, of_x)
    assert int(graph.is_given_edge.sum()) == data.num_edges < graph.num_edges
    assert set(model.net.state_dict()) == set(Mixed().state_dict())
    again = pickle.loads(pickle.dumps(model))
    out = model.predict(graph, log=False)
    torch.testing.assert_close(again.predict(graph, log=False), out)


def test_several_self_loops_of_a_node():
    data = random_graph()
    data.edge_index = torch.cat([data.edge_index, torch.full((2, 3), 3)], dim=1)
    model, graph, _ = check(Mixed(), data, of_x)
    assert int(graph.is_given_edge.sum()) == data.num_edges
    again = gas.cluster(model.prepare(data.clone()), 4, model=model, log=False)
    assert again.num_edges == graph.num_edges


def test_weights_are_normalised_once():
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges) + 0.1
    net = WithAttr()
    data.edge_attr = data.edge_weight
    model = gas.to_scalable(net, data)
    prepared = model.prepare(data)
    with pytest.raises(ValueError, match="weights that were normalised already"):
        model.prepare(prepared.update({"edge_attr": prepared.edge_weight}))


def test_layers_of_different_graphs_are_refused():
    with pytest.raises(ValueError, match="layers take different graphs, some the edges as they"):
        gas.to_scalable(Layers(TutorialConv(5, 8), SAGEConv(8, 8)), random_graph())


# Products with a matrix ---------------------------------------------------------------------------

PRODUCTS = {
    "@": lambda adj, x: adj @ x,
    "torch.matmul": torch.matmul,
    "torch.mm": torch.mm,
    "torch.sparse.mm": torch.sparse.mm,
    "method": lambda adj, x: adj.matmul(x),
}


class Product(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.lin1, self.lin2 = kind, nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, adj_t):
        product = PRODUCTS[self.kind]
        return product(adj_t, self.lin2(product(adj_t, self.lin1(x)).relu()))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_with_the_adjacency(kind, weighted):
    data = random_graph()
    if weighted:
        data.edge_weight = torch.rand(data.num_edges).double()
    make = T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)
    data = make(data)
    if not weighted:
        value = torch.ones(data.adj_t.values().numel(), dtype=torch.float64)
        parts = data.adj_t.crow_indices(), data.adj_t.col_indices(), value
        data.adj_t = torch.sparse_csr_tensor(*parts, size=data.adj_t.shape)
    model, _, _ = check(Product(kind), data, lambda net, data: net(data.x, data.adj_t))
    assert "SimpleConv" in str(model)


def test_a_product_needs_a_matrix():
    with pytest.raises(ValueError, match="'adj_t' as a matrix, and the graph has none: T.ToSparse"):
        gas.to_scalable(Product("@"), random_graph())


# Questions about shapes ---------------------------------------------------------------------------


class AskingShapes(Net):
    """Asserts, branches by type, loops over columns, and tensors of sizes."""

    def forward(self, x, edge_index):
        assert x.dim() == 2
        assert x.size(1) == 5
        if isinstance(edge_index, torch.Tensor) and edge_index.size(0) == 2:
            hidden = self.conv1(x, edge_index).max(dim=1, keepdim=True)[0] + torch.zeros(
                x.size(0), 8
            ).to(x.dtype)
        else:
            hidden = torch.ones(x.size(0), 8)
        assert hidden.size(0) == x.size(0)
        columns = [part * 2 for part in hidden.chunk(2, dim=1)]
        return self.conv2(torch.cat(columns, dim=1), edge_index) * len(columns)


def test_questions_about_shapes_are_answered():
    check(AskingShapes(), random_graph(), of_x)


class AskingSize(Net):
    def forward(self, x, edge_index):
        if x.size(0) > 1000:
            x = x * 2
        return self.conv2(self.conv1(x, edge_index), edge_index)


class AskingNumbers(Net):
    def forward(self, x, edge_index):
        if x.sum() > 0:
            x = x * 2
        return self.conv2(self.conv1(x, edge_index), edge_index)


class Assigning(Net):
    def forward(self, x, edge_index):
        hidden = self.conv1(x, edge_index)
        hidden[hidden < 0] = 0
        return self.conv2(hidden, edge_index)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AskingSize, "symbolically traced variables cannot be used as inputs to control flow"),
        (AskingNumbers, "symbolically traced variables cannot be used as inputs to control flow"),
        (Assigning, "'conv1' is changed by an assignment"),
    ],
)
def test_questions_about_the_graph_are_refused(kind, reason):
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(kind(), random_graph())


class Unused(Net):
    """Has a layer that it never calls."""

    def __init__(self):
        super().__init__()
        self.sage1, self.sage2 = SAGEConv(5, 8), SAGEConv(8, 3)

    def forward(self, x, edge_index):
        return self.sage2(self.sage1(x, edge_index).relu(), edge_index)


def test_layers_that_are_never_called_do_not_count():
    model, graph, _ = check(Unused(), random_graph(), of_x)
    assert model.transform is None
    assert "edge_weight" not in graph


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


def with_edge_attr():
    data = random_graph()
    data.edge_attr = torch.rand(data.num_edges, 2)
    return data


def of_edge_attr(net, data):
    return net(data.x, data.edge_index, data.edge_attr)


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
    def __init__(self, num_nodes, by_id):
        super().__init__()
        self.table, self.by_id = nn.Embedding(num_nodes, 5), by_id

    def forward(self, node_id, edge_index):
        x = self.table(node_id) if self.by_id else self.table.weight
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def test_rows_of_parameters_are_read_by_id():
    data = random_graph()
    data.node_id = torch.arange(data.num_nodes)
    model, graph, _ = check(
        Embedded(data.num_nodes, True), data, lambda net, data: net(data.node_id, data.edge_index)
    )
    batch = next(iter(gas.SubgraphLoader(graph, log=False)))
    model(batch).sum().backward()
    read = model.net.table.weight.grad.abs().sum(dim=1).nonzero().view(-1)
    assert set(read.tolist()) <= set(graph.perm[batch.n_id].tolist())


def test_parameters_without_ids_are_refused():
    class WithoutIds(Embedded):
        def forward(self, edge_index):
            return super().forward(None, edge_index)

    data = random_graph()
    with pytest.raises(ValueError, match=r"'table.weight' has a row for each node.*node_id"):
        gas.to_scalable(WithoutIds(data.num_nodes, False), data)


# Parts without a layer ----------------------------------------------------------------------------


class GraphConvolution(nn.Module):
    """The layer of Kipf's pygcn."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x, adj):
        return torch.spmm(adj, torch.mm(x, self.weight)) + self.bias


class OfParts(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, adj):
        x = F.dropout(self.first(x, adj).relu(), training=self.training)
        return F.log_softmax(self.second(x, adj), dim=1)


def test_parts_multiply_by_the_adjacency():
    data = T.GCNNorm()(random_graph())
    data.edge_weight = data.edge_weight.double()
    data = T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data)
    net = OfParts(GraphConvolution(5, 8), GraphConvolution(8, 3))
    model, _, _ = check(net, data, lambda net, data: net(data.x, data.adj_t))
    assert len(model.histories) == 1


class ByHand(nn.Module):
    """Normalises and sums up, without a layer of PyG."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(self.lin(x), *edge_index)

    def propagate(self, x, src, dst):
        scale = degree(dst, x.size(0), dtype=x.dtype).rsqrt().view(-1, 1)
        return scale * scatter((x * scale)[src], dst, dim=0, dim_size=x.size(0), reduce="sum")


def test_parts_normalise_by_themselves():
    net = Layers(ByHand(5, 8), ByHand(8, 8))
    model, graph, _ = check(net, random_graph(), of_x)
    assert len(model.histories) == 1
    assert any(name.startswith("prepared_") for name, _ in graph)


class Jumping(nn.Module):
    """Layers that attend to a node's rows after each layer before, [num_nodes, layers, width]."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 8)
        self.convs = nn.ModuleList([pyg.DNAConv(8, heads=2, groups=2) for _ in range(3)])

    def forward(self, x, edge_index):
        rows = self.lin(x).relu().view(-1, 1, 8)
        for conv in self.convs:
            rows = torch.cat([rows, conv(rows, edge_index).relu().view(-1, 1, 8)], dim=1)
        return rows[:, -1]


HOPPING = {
    "ChebConv": (lambda i, o: pyg.ChebConv(i, o, K=3), 3),
    "MixHopConv": (lambda i, o: pyg.MixHopConv(i, o, powers=[2]), 3),
    "ARMAConv": (lambda i, o: pyg.ARMAConv(i, o, num_stacks=2, num_layers=2), 3),
    "GatedGraphConv": (lambda i, o: pyg.GatedGraphConv(8, 2), 3),
    "EGConv": (lambda i, o: pyg.EGConv(i, 8, num_heads=2, num_bases=2), 1),
}


@pytest.mark.parametrize("name", HOPPING)
def test_layers_of_several_hops_are_followed(name):
    make, histories = HOPPING[name]
    model, _, _ = check(Layers(make(5, 8), make(8, 8)), random_graph(), of_x)
    assert len(model.histories) == histories


def test_layers_that_attend_to_those_before():
    model, _, _ = check(Jumping(), random_graph(), of_x)
    assert len(model.histories) == 2


class Checkpointed(Net):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x, edge_index):
        x = checkpoint(self.conv1, x, edge_index, use_reentrant=self.use_reentrant).relu()
        return self.conv2(x, edge_index)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_followed(use_reentrant):
    check(Checkpointed(use_reentrant), random_graph(), of_x)


def test_histories_are_as_precise_as_the_parameters():
    data = random_graph()
    data.x = data.x.double()
    assert gas.to_scalable(Unused().double(), data).histories[0].emb.dtype == torch.float64
    single = gas.to_scalable(Unused().double(), data, dtype=torch.float32)
    assert single.histories[0].emb.dtype == torch.float32
    assert gas.to_scalable(Unused(), random_graph()).histories[0].emb.dtype == torch.float32


class Frozen(Net):
    """An encoder that isn't trained."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))

    def forward(self, x, edge_index):
        with torch.no_grad():
            x = self.encoder(x) * 2
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def test_parts_without_gradient():
    model, graph, _ = check(Frozen(), random_graph(), of_x)
    model(next(iter(gas.SubgraphLoader(graph, log=False)))).sum().backward()
    assert all(weight.grad is None for weight in model.net.encoder.parameters())
    assert model.net.conv1.lin.weight.grad.abs().sum() > 0


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
    with pytest.raises(ValueError, match="layers take different edges on this graph, of Prepar"):
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


def normalised_types(net, x, edge_index, _, edge_type):
    return sum(conv(x, edge_index[:, edge_type == kind]) for kind, conv in enumerate(net.gcns))


def returned_edges(net, x, edge_index, _, edge_type):
    return net.sage(x, edge_index), x[edge_index[:, edge_type == 0][0]]


def averaged_edges(net, x, edge_index, edge_attr, edge_type):
    return net.sage(x, edge_index) * edge_attr[edge_type == 0].mean()


class OfFunction(OfTypes):
    def __init__(self, function):
        super().__init__(function)
        self.gcns = nn.ModuleList([GCNConv(5, 5) for _ in range(2)])

    def forward(self, x, edge_index, edge_attr, edge_type):
        return self.function(self, x, edge_index, edge_attr, edge_type)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (normalised_types, "attributes of edges don't follow"),
        (returned_edges, "isn't a row for each node"),
        (averaged_edges, "selects edges, and isn't summed up by nodes"),
    ],
)
def test_some_of_the_edges_refused(function, reason):
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(OfFunction(function), with_edge_type())


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
        return self.conv2(hidden, edge_index)


def test_copies_of_the_edges_and_changes_in_place():
    check(Copying(), random_graph())


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
    with pytest.raises(ValueError, match="drops a view of a tensor in place"):
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
    with pytest.raises(ValueError, match="cannot be used as inputs to control flow"):
        gas.to_scalable(AskingForGradients(), random_graph())
