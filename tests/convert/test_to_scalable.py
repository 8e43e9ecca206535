"""Models made of ordinary modules: equal to those on the uncut graph, on batches, layer-wise."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, PNA, EdgeCNN, GraphSAGE

import gas


def relative_error(out, expected):
    return float((out - expected).norm() / expected.norm().clamp(min=1e-12))


N, E, WIDTH, CLASSES = 150, 700, 10, 4
UNFILLED = pytest.mark.filterwarnings("ignore:A history was read before it was filled")
LAYOUTS = ("csr", "fused", "edge_index")


def graph(**attributes):
    torch.manual_seed(0)
    data = Data(x=torch.randn(N, WIDTH), edge_index=torch.randint(N, (2, E)))
    data.y = torch.randint(CLASSES, (N,))
    data.train_mask = torch.rand(N) < 0.5
    return data.update(attributes)


def without_loops():
    src, dst = graph().edge_index
    return torch.stack([torch.where(src == dst, (src + 1) % N, src), dst])


def degrees(data):
    return torch.bincount(torch.bincount(data.edge_index[1], minlength=N))


def inputs_of(net, data):
    names = net.forward.__code__.co_varnames[: net.forward.__code__.co_argcount][3:]
    return {name: data[name] for name in names if name in data}


class Skips(nn.Module):
    """Residuals, two convolutions in a layer, functions of the input, F.dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.a = pyg.SAGEConv(8, 8)
        self.b = pyg.GraphConv(8, 8, aggr="mean")
        self.c = pyg.GATv2Conv(8, 4, heads=2)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x, edge_index):
        start = x = F.relu(self.first(x))
        x = F.dropout(x, 0.5, training=self.training)
        x = x + self.a(x, edge_index).relu() + self.b(x, edge_index)
        h = F.dropout(self.norm(x), p=0.3, training=self.training)
        h = self.c(h, edge_index) + h
        h = h + start.sigmoid()
        return self.last(torch.cat([h, start], dim=-1)).log_softmax(dim=-1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = pyg.SAGEConv(width, width)

    def forward(self, x, edge_index):
        return x + self.conv(F.relu(self.norm(x)), edge_index)


class Blocks(nn.Module):
    """Layers inside of modules, in a list, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.end = nn.Sequential(nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x, edge_index):
        x = self.start(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, edge_index)
        return self.end(x)


class Branches(nn.Module):
    """Two branches with histories of their own, and views of several heads."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleList([pyg.SAGEConv(WIDTH, 6), pyg.SAGEConv(6, CLASSES)])
        self.b = nn.ModuleList([pyg.GATConv(WIDTH, 3, heads=2), pyg.GINConv(nn.Linear(6, CLASSES))])

    def forward(self, x, edge_index):
        a = self.a[1](self.a[0](x, edge_index).tanh(), edge_index)
        b = self.b[0](x, edge_index)
        b = F.elu(b.view(b.size(0), 2, 3)).flatten(1)
        return torch.stack([a, self.b[1](b, edge_index)], dim=0).mean(dim=0)


class Pieces(nn.Module):
    """Halves of the input, of which one goes to a layer, and layers' outputs side by side."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(WIDTH, 8)
        self.a, self.b, self.c = pyg.SAGEConv(4, 4), pyg.SAGEConv(4, 4), pyg.SAGEConv(4, CLASSES)

    def forward(self, x, edge_index):
        a, b = self.start(x).chunk(2, dim=1)
        a, b = self.a(a, edge_index), self.b(b.tanh(), edge_index) + b
        both = torch.stack([a, b], dim=0)
        return self.c(both.sum(dim=0), edge_index) + both[0]


class Weighted(nn.Module):
    def __init__(self, normalize=True):
        super().__init__()
        self.a = pyg.GCNConv(WIDTH, 8, normalize=normalize)
        self.b = pyg.GCNConv(8, CLASSES, normalize=normalize)

    def forward(self, x, edge_index, edge_weight=None):
        return self.b(self.a(x, edge_index, edge_weight).relu(), edge_index, edge_weight)


class Typed(nn.Module):
    """Types and attributes of edges, which an encoder has gone over."""

    def __init__(self):
        super().__init__()
        self.encode_edges = nn.Linear(3, 6)
        self.a = pyg.RGCNConv(WIDTH, 8, num_relations=3)
        self.b = pyg.TransformerConv(8, 8, edge_dim=6)
        self.c = pyg.GINEConv(nn.Linear(8, CLASSES), edge_dim=6)

    def forward(self, x, edge_index, edge_type, edge_attr):
        e = self.encode_edges(edge_attr).relu()
        x = self.a(x, edge_index, edge_type).relu()
        return self.c(self.b(x, edge_index, e).relu(), edge_index, e)


class Learnt(nn.Module):
    """Weights of edges that are learnt from what the edges have."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(3, 1)
        self.a = pyg.GraphConv(WIDTH, 8)
        self.b = pyg.GraphConv(8, CLASSES)

    def forward(self, x, edge_index, edge_attr):
        weight = self.score(edge_attr).sigmoid().squeeze(-1)
        return self.b(self.a(x, edge_index, weight).relu(), edge_index, weight)


class Deep(nn.Module):
    """GCNII, whose layers all take the first one's output."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, 8)
        self.convs = nn.ModuleList([pyg.GCN2Conv(8, 0.1, 0.5, i + 1) for i in range(4)])
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x, adj_t):
        x = x_0 = self.lin(F.dropout(x, 0.6, self.training)).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, 0.6, self.training), x_0, adj_t).relu()
        return self.out(x)


class ByValue(nn.Module):
    """Weights that are the values of adj_t, as of T.ToSparseTensor."""

    def __init__(self, normalize):
        super().__init__()
        self.a = pyg.GCNConv(WIDTH, 8, normalize=normalize)
        self.b = pyg.GCNConv(8, CLASSES, normalize=normalize)

    def forward(self, x, adj_t):
        return self.b(self.a(x, adj_t).relu(), adj_t)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = pyg.SAGEConv(WIDTH, 8), pyg.SAGEConv(8, CLASSES)

    def encode(self, x, edge_index):
        return self.b(self.a(x, edge_index).relu(), edge_index)


class Stack(nn.Module):
    """A perceptron and a layer that propagates several times."""

    def __init__(self, layer, width=CLASSES):
        super().__init__()
        self.lin = nn.Linear(WIDTH, width)
        self.propagation = layer

    def forward(self, x, edge_index):
        return self.propagation(self.lin(x).relu(), edge_index)


def sequential():
    return pyg.Sequential(
        "x, edge_index",
        [
            (nn.Dropout(0.5), "x -> x"),
            (pyg.SAGEConv(WIDTH, 8), "x, edge_index -> x1"),
            nn.ReLU(inplace=True),
            (pyg.SAGEConv(8, 8), "x1, edge_index -> x2"),
            (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
            (pyg.JumpingKnowledge("cat", 8, 2), "xs -> x"),
            nn.Linear(16, CLASSES),
        ],
    )


NODE = {"LayerNorm": {"mode": "node"}}
SMALL = dict(in_channels=WIDTH, hidden_channels=8, num_layers=3, out_channels=CLASSES)
NETS = {
    "sage": lambda d: GraphSAGE(**SMALL, dropout=0.5),
    "sage-max": lambda d: GraphSAGE(**SMALL, aggr="max", project=True),
    "sage-std-median": lambda d: GraphSAGE(**SMALL, aggr=["std", "median"]),
    "gin": lambda d: GIN(**SMALL, norm="layer_norm", norm_kwargs={"mode": "node"}),
    "gat": lambda d: GAT(**SMALL, heads=2, dropout=0.5),
    "gat-v2": lambda d: GAT(
        **SMALL, heads=2, v2=True, act="elu", act_first=True, norm="batch_norm"
    ),
    "edgecnn": lambda d: EdgeCNN(**SMALL, norm="batch_norm"),
    "pna": lambda d: PNA(
        **SMALL,
        aggregators=["mean", "max", "std"],
        scalers=["identity", "amplification"],
        deg=degrees(d),
    ),
    "gcn": lambda d: GCN(**SMALL, dropout=0.5),
    "gcn-improved": lambda d: GCN(**SMALL, improved=True),
    "gcn-without-loops": lambda d: GCN(**SMALL, add_self_loops=False),
    "lazy": lambda d: GraphSAGE(-1, 8, 2, CLASSES),
    "one-layer": lambda d: GraphSAGE(WIDTH, 8, 1, CLASSES),
    **{
        f"jk-{jk}-{norm or 'none'}": lambda d, jk=jk, norm=norm: GCN(
            **SMALL, jk=jk, norm=norm, dropout=0.2, norm_kwargs=NODE.get(norm)
        )
        for jk in ("last", "cat", "max", "lstm")
        for norm in (None, "BatchNorm", "LayerNorm")
    },
    "skips": lambda d: Skips(),
    "blocks": lambda d: Blocks(),
    "branches": lambda d: Branches(),
    "pieces": lambda d: Pieces(),
    "weighted": lambda d: Weighted(),
    "weighted-as-they-are": lambda d: Weighted(normalize=False),
    "by-value": lambda d: ByValue(normalize=True),
    "by-value-as-they-are": lambda d: ByValue(normalize=False),
    "typed": lambda d: Typed(),
    "learnt": lambda d: Learnt(),
    "gcn2": lambda d: Deep(),
    "encode": lambda d: Encoder(),
    "sequential": lambda d: sequential(),
    "appnp": lambda d: Stack(pyg.APPNP(4, 0.1)),
    "sgc": lambda d: pyg.SGConv(WIDTH, CLASSES, K=3),
    "ssgc": lambda d: Stack(pyg.SSGConv(8, CLASSES, 0.1, K=3), 8),
    "tag": lambda d: Stack(pyg.TAGConv(8, CLASSES, K=3), 8),
    "lightgcn": lambda d: Stack(pyg.LGConv()),
}
ATTRIBUTES = {
    "weighted": dict(edge_weight=torch.rand(E)),
    "weighted-as-they-are": dict(edge_weight=torch.rand(E)),
    "by-value": dict(edge_weight=torch.rand(E), edge_index=without_loops()),
    "by-value-as-they-are": dict(edge_weight=torch.rand(E)),
    "typed": dict(edge_type=torch.randint(3, (E,)), edge_attr=torch.randn(E, 3)),
    "learnt": dict(edge_attr=torch.randn(E, 3)),
}


@pytest.fixture(params=NETS)
def case(request):
    data = graph(**ATTRIBUTES.get(request.param, {}))
    torch.manual_seed(1)
    return NETS[request.param](data), data


def run(net, data):
    """Run the module itself on the graph."""
    call = net if type(net) is not Encoder else net.encode
    if type(net) is ByValue:
        adj_t = gas.nn.Adjacency.of(data.edge_index, N, data.edge_weight).to_torch_sparse()
        return call(data.x, adj_t)
    names = ("edge_weight", "edge_type", "edge_attr")
    return call(data.x, data.edge_index, **{name: data[name] for name in names if name in data})


@pytest.mark.slow(fast=11)
def test_predictions_are_those_of_the_module(case):
    net, data = case
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 6, model=model, log=False)
    for layout in LAYOUTS:
        out = model.predict(graph, 2, layout=layout)
        assert relative_error(out, run(net.eval(), data).detach()) < 1e-5, layout
        assert gas.verify(model, graph, 2, layout=layout), layout
    assert gas.verify(model, graph, bipartite=False, layout="fused")


@pytest.mark.slow(fast=7)
@pytest.mark.parametrize(
    ("store", "dtype", "layout"),
    [("disk", "float32", "csr"), ("host", "float16", "fused"), ("disk", "int8", "edge_index")],
)
def test_histories_of_any_store(case, store, dtype, layout):
    """As exact as their numbers allow."""
    net, data = case
    model = gas.to_scalable(net.eval(), data, store=store, dtype=dtype)
    graph = gas.cluster(data, 4, model=model, log=False)
    found = gas.verify(model, graph, 2, layout=layout)
    assert found, str(found)
    bound = {"float32": 1e-5, "float16": 2e-3, "int8": 2e-2}[dtype]
    assert found.tolerance == (bound if len(model.histories) else 1e-5)
    out = model.predict(graph, 2, layout=layout)
    assert relative_error(out, run(net, data).detach()) <= found.tolerance
    model.close()


def test_gradients_are_those_of_the_module(case):
    net, data = case
    net.eval()  # Without dropout, and with the same statistics.
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 1, model=model, log=False)
    for layout in LAYOUTS:
        run(net, data).square().sum().backward()
        expected = {name: p.grad for name, p in net.named_parameters()}
        net.zero_grad()
        (batch,) = gas.SubgraphLoader(graph, layout=layout, log=False)
        model(batch).square().sum().backward()
        largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
        for name, parameter in model.net.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None
            else:
                close = torch.allclose(parameter.grad, expected[name], 1e-4, 1e-5 * largest)
                assert close, (layout, name)
        net.zero_grad()


@UNFILLED
def test_parameters_and_hooks_are_shared(case):
    net, data = case
    model = gas.to_scalable(net, data)
    mine, theirs = dict(model.net.named_parameters()), dict(net.named_parameters())
    assert list(mine) == list(theirs)
    assert all(mine[name] is theirs[name] for name in mine)
    assert list(model.net.state_dict()) == list(net.state_dict())
    assert type(next(net.modules())) is type(net)  # The module's own layers stay PyG's.
    seen = []
    layer = next(m for m in net.modules() if isinstance(m, nn.Linear | pyg.Linear))
    layer.register_forward_hook(lambda *_: seen.append(1))
    graph = gas.cluster(data, 2, model=model, log=False)
    model(next(iter(gas.SubgraphLoader(graph, log=False))))
    run(net, data)
    assert len(seen) >= 1


@pytest.mark.slow(fast=4)
@UNFILLED
def test_it_trains(case):
    net, data = case
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 6, model=model, log=False)
    loader = gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def whole_loss():
        out = model.predict(graph)
        return float(F.cross_entropy(out[data.train_mask], data.y[data.train_mask]))

    torch.manual_seed(2)
    before = whole_loss()
    for _ in range(8):
        for batch in loader:
            optimizer.zero_grad()
            out, own = model(batch), batch.own
            assert out.shape == (batch.batch_size, CLASSES)
            loss = F.cross_entropy(out[own.train_mask], own.y[own.train_mask])
            loss.backward()
            optimizer.step()
    assert whole_loss() < before


@pytest.mark.parametrize("num_nodes", [0, -1, 2.5, True])
def test_a_number_of_nodes_is_an_integer_of_at_least_1(num_nodes):
    with pytest.raises(ValueError, match=f"'num_nodes' is {num_nodes}, expected an integer"):
        gas.to_scalable(GCN(2, 2, 2), num_nodes=num_nodes)


def test_options_of_other_names_are_refused():
    for name in ("stor", "hidden_channels"):
        with pytest.raises(ValueError, match=f"'{name}' is no argument of gas.to_scalable"):
            gas.to_scalable(GCN(2, 2, 2), num_nodes=4, **{name: "host"})


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x, e: x[: int(e.max())], "keep it as an option of the module$"),
        (lambda x, e: x if torch.isnan(x).any() else -x, "Leave a check out of forward"),
    ],
)
def test_errors_end_with_what_to_do(function, error):
    class Net(nn.Module):
        def forward(self, x, edge_index):
            return function(x, edge_index)

    with pytest.raises(ValueError, match=error):
        gas.to_scalable(Net(), Data(x=torch.randn(9, 2), edge_index=torch.randint(9, (2, 20))))
