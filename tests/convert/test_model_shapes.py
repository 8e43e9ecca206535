"""Shapes of models that others publish: what ``forward`` takes and returns."""

import copy
import dataclasses
import inspect
import typing

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from comparisons import Layers, Net, Unused, check, check_gradients, fields_of, of_x
from conftest import random_graph
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, degree, scatter, spmm

import gas

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


class OfItems(Net):
    """The graph as a dictionary of its attributes."""

    def forward(self, data):
        given = data.to_dict()
        edges = given["edge_index"], given.get("edge_weight")
        return self.conv2(self.conv1(given["x"], *edges).relu(), *edges)


class OfMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(5, 8), SAGEConv(8, 3)

    def forward(self, data):
        return self.conv2(self.conv1(data.x, data.adj_t).relu(), data.adj_t)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [OfGraph, Written, Asking, OfItems])
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
    assert tree_map(type, fields_of(out)) == tree_map(type, fields_of(expected))
    shape = tree_map(lambda rows: getattr(rows, "shape", rows), fields_of(out))
    assert shape == tree_map(lambda rows: getattr(rows, "shape", rows), fields_of(expected))
    model.predict(graph, log=False)
    some = model.predict(graph, nodes=torch.tensor([3, 1, 3]), log=False)
    for mine, theirs in zip(
        tree_leaves(fields_of(some)), tree_leaves(fields_of(expected)), strict=True
    ):
        assert mine is theirs or torch.allclose(mine, theirs[[3, 1, 3]])
    again = copy.deepcopy(model).predict(graph, log=False)
    assert all(
        mine is theirs or torch.allclose(mine, theirs)
        for mine, theirs in zip(
            tree_leaves(fields_of(again)), tree_leaves(fields_of(out)), strict=True
        )
    )


def test_gradients_of_several_outputs_are_those_of_a_full_batch():
    def loss(out):
        return out["out"].square().mean() + out["hidden"].sin().mean()

    check_gradients(Returning("dictionary"), random_graph(), of_x, loss)


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
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, edge_index):
        hidden = self.conv1(x, edge_index)
        self.mean[:4] = 0.9 * self.mean[:4] + 0.1
        return self.conv2(hidden + self.mean, edge_index)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AskingSize, "symbolically traced variables cannot be used as inputs to control flow"),
        (AskingNumbers, "symbolically traced variables cannot be used as inputs to control flow"),
        (Assigning, "Assigning keeps 'mean' of one call for the next"),
    ],
)
def test_questions_about_the_graph_are_refused(kind, reason):
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(kind(), random_graph())


def test_layers_that_are_never_called_do_not_count():
    model, graph, _ = check(Unused(), random_graph(), of_x)
    assert model.transform is None
    assert "edge_weight" not in graph


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
    assert str(model).count("ProjectedConv(") == 2


REDUCED = {
    "mean": lambda adj, x: torch.sparse.mm(adj, x, "mean"),
    "mean by name": lambda adj, x: torch.sparse.mm(adj, x, reduce="mean"),
    "mean of PyG": lambda adj, x: spmm(adj, x, "mean"),
    "max": lambda adj, x: torch.sparse.mm(adj, x, "amax"),
    "min by name": lambda adj, x: torch.sparse.mm(adj, x, reduce="amin"),
    "max of PyG": lambda adj, x: spmm(adj, x, reduce="max"),
}


@pytest.mark.parametrize("kind", REDUCED)
def test_products_that_reduce_otherwise(kind, monkeypatch):
    monkeypatch.setitem(PRODUCTS, kind, REDUCED[kind])
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges).double()
    data = T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data)
    check(Product(kind), data, lambda net, data: net(data.x, data.adj_t))


def test_a_product_into_a_tensor_is_refused(monkeypatch):
    def multiply(adj, x):
        return torch.mm(adj, x.detach(), out=torch.empty_like(x))

    monkeypatch.setitem(PRODUCTS, "out", multiply)
    data = T.ToSparseTensor(layout=torch.sparse_csr)(random_graph())
    with pytest.raises(ValueError, match="'mm' of a sparse matrix can't be"):
        gas.to_scalable(Product("out"), data)


def test_a_product_needs_a_matrix():
    with pytest.raises(ValueError, match="'adj_t' as a matrix, and the graph has none: T.ToSparse"):
        gas.to_scalable(Product("@"), random_graph())


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


# Dictionaries of the graph, objects that hold it, other names -------------------------------------


class OfDictionary(Net):
    """The shape of the heterophily benchmarks: ``data.graph["node_feat"]``."""

    def forward(self, data):
        assert set(data.graph) == {*dict(data.graph)} >= {"node_feat", "num_classes"}
        assert data.graph["num_classes"] == 60
        x, edge_index = data.graph["node_feat"], data.graph["edge_index"]
        assert data.graph.get("edge_feat") is None
        assert data.graph["name"] == "ring"
        x = self.conv1(x, edge_index).relu() + torch.ones(data.graph["num_nodes"], 1, dtype=x.dtype)
        return self.conv2(x, edge_index)


def with_dictionary():
    data = random_graph(dtype=torch.float64)
    data.graph = {
        "node_feat": data.x, "edge_index": data.edge_index, "edge_feat": None, "name": "ring",
        "num_nodes": 60, "num_classes": 60,
    }  # fmt: skip
    return data


def test_dictionaries_of_the_graph():
    data = with_dictionary()
    net = OfDictionary().double()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    assert "graph" not in graph  # Nobody has renumbered its rows.
    expected = net(data)
    torch.testing.assert_close(model.predict(graph, log=False), expected, rtol=1e-10, atol=1e-10)
    assert gas.verify(model, graph)
    for batch in gas.SubgraphLoader(graph, batch_size=2, log=False):
        own = expected[graph.perm[batch.n_id[: batch.batch_size]]]
        torch.testing.assert_close(model(batch), own, rtol=1e-10, atol=1e-10)


class UnpacksDictionary(Net):
    def forward(self, data):
        return self.layers(**data.graph)

    def layers(self, node_feat, edge_index, num_nodes, **others):
        given = {**others, "num_nodes": num_nodes}
        assert sorted(given) == ["edge_feat", "name", "num_classes", "num_nodes"]
        return self.conv2(self.conv1(node_feat, edge_index).relu(), edge_index)


def test_dictionaries_are_unpacked():
    data, net = with_dictionary(), UnpacksDictionary().double()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    torch.testing.assert_close(model.predict(graph, log=False), net(data), rtol=1e-10, atol=1e-10)


class ReluInPlace(Net):
    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index)
        F.relu(x, inplace=True)
        return self.conv2(x, edge_index)


def test_functions_in_place_whose_result_is_not_used():
    check(ReluInPlace(), random_graph(), of_x)


def test_a_dictionary_of_other_rows_is_refused_when_they_are_read():
    data = with_dictionary()
    data.graph["node_feat"] = data.x.clone()
    with pytest.raises(ValueError, match=r"set data.node_feat = data.graph\['node_feat'\]"):
        gas.to_scalable(OfDictionary().double(), data)


class Holder:
    """An object that isn't a graph of PyG, and holds one."""

    def __init__(self, x, edge_index):
        self.graph = {"x": x, "edge_index": edge_index}


class InHolder(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = OfHolder()

    def forward(self, x, edge_index):
        return self.part(Holder(x, edge_index))


class OfHolder(Net):
    def __init__(self):
        super().__init__()
        self.mlp = Rows()

    def forward(self, held):
        x = self.conv1(self.mlp(held), held.graph["edge_index"]).relu()
        return self.conv2(x, held.graph["edge_index"])


class Rows(nn.Module):
    """Takes the object, and has no layer."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, held):
        return self.lin(held.graph["x"]).relu()


def test_objects_that_hold_the_graph():
    check(InHolder(), random_graph(), of_x)


class NamedOtherwise(Net):
    def forward(self, features, edge_index, slope=0.1):
        x = F.leaky_relu(self.conv1(features, edge_index), slope)
        return self.conv2(x, edge_index)


def test_features_under_another_name():
    model, graph, _ = check(NamedOtherwise(), random_graph(), of_x)
    x = model.predict(graph, log=False)
    graph.x = graph.x + 1
    assert not torch.allclose(model.predict(graph, log=False), x)


class OfPositions(Net):
    def forward(self, pos, edge_index):
        return self.conv2(self.conv1(pos, edge_index).relu(), edge_index)


def test_an_attribute_of_the_graph_is_not_the_features():
    data = random_graph()
    data.pos = torch.rand(60, 5)
    check(OfPositions(), data, lambda net, data: net(data.pos, data.edge_index))


class AskingForWeights(Net):
    def forward(self, x, edge_index, edge_weight=None):
        return self.conv2(self.conv1(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


def test_weights_that_are_called_edge_attr_are_asked_for():
    data = random_graph()
    data.edge_attr = torch.rand(data.num_edges)
    with pytest.raises(ValueError, match="set data.edge_weight = data.edge_attr"):
        gas.to_scalable(AskingForWeights(), data)
    data.edge_weight, data.edge_attr = data.edge_attr, None
    check(
        AskingForWeights(), data, lambda net, data: net(data.x, data.edge_index, data.edge_weight)
    )


class HoldsSignature(Net):
    """Keeps what Python doesn't copy: a mapping that can't be changed, and a module of Python."""

    def __init__(self):
        super().__init__()
        self.parameters_of_conv = inspect.signature(self.conv1.forward).parameters
        self.functional = F

    def forward(self, x, edge_index):
        return self.conv2(self.functional.relu(self.conv1(x, edge_index)), edge_index)


def test_modules_that_hold_what_cannot_be_copied():
    net = HoldsSignature()
    check(net, random_graph(), of_x)
    assert net.functional is F


class Residual(pyg.MessagePassing):
    """Adds its input where it has the width of its output, and normalises by itself."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        edge_index, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        out = self.lin(self.propagate(edge_index, x=x, edge_weight=weight))
        if out.shape == x.shape:
            out = 0.5 * out + 0.5 * x
        if out.size() != x.size():
            out = 2 * out
        return out

    def message(self, x_j, edge_weight):
        return edge_weight[:, None] * x_j


class Residuals(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([Residual(5, 8), Residual(8, 8), Residual(8, 3)])

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


def test_shapes_are_compared_after_a_normalisation():
    check(Residuals(), random_graph(), of_x)


@pytest.mark.parametrize(
    "layer",
    [pyg.SAGEConv(5, 3), pyg.GCNConv(5, 3), pyg.GINConv(nn.Linear(5, 3)), Residual(5, 5)],
    ids=["SAGE", "GCN", "GIN", "an own one"],
)
def test_a_layer_alone(layer):
    check(layer, random_graph(), of_x)


def test_scripted_modules_are_refused():
    scripted = torch.jit.script(nn.Linear(5, 3))
    with pytest.raises(ValueError, match="give the module before torch.jit.script"):
        gas.to_scalable(scripted, random_graph())


def test_shapes_that_a_mask_decides_are_refused():
    class Masked(Net):
        def forward(self, x, edge_index):
            x = self.conv1(x, edge_index)
            if x[x.abs().sum(1) > 0].shape == x.shape:  # So it is on small graphs.
                x = 2 * x
            return self.conv2(x, edge_index)

    with pytest.raises(ValueError, match="control flow"):
        gas.to_scalable(Masked(), random_graph())


class Perceptron(nn.Module):
    """A baseline that reads no edges."""

    def __init__(self):
        super().__init__()
        self.start, self.norm, self.end = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x, y=None, flag=False):
        return self.end(F.dropout(self.norm(self.start(x)).relu(), 0.5, self.training))


class PerceptronOfGraph(Perceptron):
    def forward(self, data):
        return super().forward(data.x)


@pytest.mark.parametrize(
    ("net", "call"),
    [
        (Perceptron(), lambda net, data: net(data.x)),
        (PerceptronOfGraph(), None),
        (pyg.MLP([5, 8, 3]), lambda net, data: net(data.x)),
        (nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), lambda net, data: net(data.x)),
        (nn.Linear(5, 3), lambda net, data: net(data.x)),
    ],
    ids=["rows", "a graph", "MLP", "Sequential", "Linear"],
)
@pytest.mark.parametrize("matrix", [False, True], ids=["edge_index", "adj_t"])
def test_models_without_edges(net, call, matrix):
    data = random_graph()
    data = T.ToSparseTensor(layout=torch.sparse_csr)(data) if matrix else data
    model, _, _ = check(net, data, call)
    assert not model.histories


def test_a_baseline_without_edges_is_trained_as_others_are(tmp_path):
    data, net = random_graph(), Perceptron()
    data.val_mask = data.test_mask = ~data.train_mask
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    before = copy.deepcopy(net.state_dict())
    gas.fit(model, graph, torch.optim.Adam(net.parameters()), epochs=2, batch_size=2, log=False)
    assert not torch.equal(before["start.weight"], net.start.weight)
    accuracy = gas.evaluate(model, graph)["test"]
    out = net.eval()(data.x).argmax(1)
    assert accuracy == pytest.approx((out == data.y)[data.test_mask].float().mean().item())
    assert gas.plan(data, model, log=False)
    gas.save(tmp_path, model)
    other = Perceptron()
    gas.load(tmp_path, other)
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("default", ["", "=None"])
def test_an_adjacency_of_another_name_is_no_model_without_edges(default):
    data = random_graph()
    data.adjs = data.edge_index
    made = {}
    exec(f"def forward(self, x, adjs{default}): return self.end(x)", made)
    net = type("Strange", (nn.Module,), {"forward": made["forward"]})()
    net.end = nn.Linear(5, 3)
    with pytest.raises(ValueError, match="takes x, adjs, and none of them is the adjacency"):
        gas.to_scalable(net, data)


def test_models_without_edges_look_at_one_node():
    class Centred(Perceptron):
        def forward(self, x):
            return super().forward(x - x.mean(dim=0))

    with pytest.raises(ValueError, match=r"'mean' \(mean\) isn't exact"):
        gas.to_scalable(Centred(), random_graph())


class GetsAttributes(Net):
    """Reads attributes of the graph that it may not have."""

    def forward(self, data):
        weight, nothing = data.get("edge_weight"), data.get("nothing", 2.0)
        x = nothing * self.conv1(data.x, data.edge_index).relu()
        return self.conv2(x, data.edge_index, weight)


@pytest.mark.parametrize("has_weight", [False, True])
def test_attributes_by_get(has_weight):
    data = random_graph(dtype=torch.float64)
    if has_weight:
        data.edge_weight = torch.rand(data.num_edges, dtype=torch.float64)
    check(GetsAttributes(), data)


class NamesEdges(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = SAGEConv(5, 8), pyg.GCNConv(8, 3)

    def forward(self, x, ei, scale=2.0):
        return self.b(self.a(scale * x, ei).relu(), ei)


class NamesBoth(NamesEdges):
    def forward(self, features, edges):
        return super().forward(features, edges)


class NamesEdgesFirst(NamesEdges):
    def forward(self, edges, x, edge_weight):
        return self.b(self.a(x, edges).relu(), edges, edge_weight)


@pytest.mark.parametrize(
    ("net", "call"),
    [
        (NamesEdges(), of_x),
        (NamesBoth(), of_x),
        (NamesEdgesFirst(), lambda net, data: net(data.edge_index, data.x, data.edge_weight)),
    ],
)
def test_edges_of_another_name(net, call):
    data = random_graph(dtype=torch.float64)
    data.edge_weight = torch.rand(data.num_edges, dtype=torch.float64)
    check(net, data, call)
    check_gradients(net, data, call)


class NamesMatrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, matrix):
        return matrix @ self.b((matrix @ self.a(x)).relu())


def test_a_matrix_of_another_name():
    data = random_graph(dtype=torch.float64)
    size = (data.num_nodes, data.num_nodes)
    value = torch.rand(data.num_edges, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(data.edge_index.flip(0), value, size).coalesce()
    data.adj_t = matrix.to_sparse_csr()
    del data.edge_index
    check(NamesMatrix(), data, lambda net, data: net(data.x, data.adj_t))
    data.edge_index = torch.stack(matrix.indices().unbind()[::-1])
    with pytest.raises(ValueError, match="takes x, matrix, and none of them is the adjacency"):
        gas.to_scalable(NamesMatrix(), data)  # Either may be meant.


def test_an_argument_that_is_no_edges_is_refused():
    class Scales(NamesEdges):
        def forward(self, x, temperature):
            return self.a.lin_l(x) / temperature

    with pytest.raises(ValueError, match="takes x, temperature, and none of them is the adjacency"):
        gas.to_scalable(Scales(), random_graph())


def test_edges_of_another_name_beside_those_that_a_module_keeps():
    data, net = random_graph(dtype=torch.float64), NamesEdges()
    net.unread = data.edge_index
    check(net, data, of_x)
