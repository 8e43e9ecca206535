"""Drop-in convolutions: PyG's weights in, PyG's numbers out, and the way they took."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from adjacencies import SHAPES, make_adjacency
from conftest import random_graph

import gas
from gas import nn
from gas.nn import Adjacency


def mlp(*layers):
    return torch.nn.Sequential(torch.nn.Linear(10, 4), *layers)


CONVS = {
    "GCNConv": ((5, 4), {"normalize": False}),
    "GCNConv normalised": ((5, 4), {}),
    "GCNConv improved": ((5, 4), {"improved": True, "bias": False}),
    "SAGEConv": ((5, 4), {}),
    "SAGEConv max": ((5, 4), {"aggr": "max", "normalize": True}),
    "SAGEConv project": ((5, 4), {"aggr": "sum", "project": True, "root_weight": False}),
    "GINConv": ((torch.nn.Linear(5, 4),), {"train_eps": True, "eps": 0.3}),
    "GraphConv": ((5, 4), {}),
    "GraphConv mean": ((5, 4), {"aggr": "mean"}),
    "GATConv": ((5, 4), {"heads": 2, "add_self_loops": False}),
    "GATConv loops": ((5, 4), {"heads": 3, "concat": False, "negative_slope": 0.1}),
    "GATConv residual": ((5, 4), {"heads": 2, "residual": True, "bias": False}),
    "GATv2Conv": ((5, 4), {"heads": 2, "add_self_loops": False}),
    "GATv2Conv loops": ((5, 4), {"heads": 3, "concat": False, "negative_slope": -0.1}),
    "GATv2Conv residual": (((5, 5), 4), {"heads": 2, "residual": True, "bias": False}),
    "GATv2Conv shared": ((5, 4), {"heads": 2, "share_weights": True}),
    "GCN2Conv": ((5, 0.2, 0.5, 2), {"normalize": False}),
    "GCN2Conv normalised": ((5, 0.2, 0.5, 2), {"shared_weights": False}),
    "SimpleConv": ((), {"aggr": "sum"}),
    "EdgeConv": ((mlp(torch.nn.ReLU()),), {}),
    "EdgeConv linear": ((pyg.Linear(10, 4, bias=False),), {"aggr": "min"}),
    "EdgeConv sum": ((mlp(torch.nn.ELU(0.5)),), {"aggr": "sum"}),
    "EdgeConv mean": ((mlp(torch.nn.LeakyReLU()),), {"aggr": "mean"}),
    "EdgeConv mean linear": ((mlp(),), {"aggr": "mean"}),
    "GMMConv": ((5, 4, 1, 3), {}),
    "GMMConv sum": (((5, 5), 2, 1, 2), {"aggr": "sum", "bias": False}),
}
WEIGHTED = ("GCNConv", "GraphConv", "GCN2Conv", "SimpleConv", "GMMConv")
SQUARE_ONLY = ("normalised", "improved")


def pair(name):
    """PyG's layer, and ours with its weights."""
    args, options = CONVS[name]
    cls = name.split()[0]
    theirs = getattr(pyg, cls)(*args, **options).double()
    ours = getattr(nn, cls)(*args, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def call(conv, x, adj, weight=None):
    extra = () if weight is None else (weight,)
    if isinstance(conv, pyg.GMMConv) and weight is not None:
        extra = (weight[:, None],)  # One coordinate.
    if isinstance(conv, pyg.GCN2Conv):
        front = x[0] if isinstance(x, tuple) else x
        return conv(front, front.flip(1), adj, *extra)
    if isinstance(conv, pyg.GCNConv) and isinstance(x, tuple):
        x = x[0]
    return conv(x, adj, *extra)


def assert_equal(theirs, ours, x, edge_index, weight, adj, rows):
    x = x.requires_grad_()
    pairs = x if rows == x.size(0) else (x, x[:rows])
    wanted = call(theirs, pairs, edge_index, weight)[:rows]
    found = call(ours, pairs, adj)[:rows]
    assert ours.path == "fused"
    assert torch.allclose(found, wanted, atol=1e-10)
    inputs = [x, *theirs.parameters()], [x, *ours.parameters()]
    grads = [
        torch.autograd.grad(out.pow(2).sum(), given, allow_unused=True)
        for out, given in zip((wanted, found), inputs, strict=True)
    ]
    for mine, other in zip(*grads, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.allclose(mine, other, atol=1e-9)


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_pyg(name, shape):
    rows, cols, entries = SHAPES[shape]
    if rows == 0 or (rows != cols and name.endswith(SQUARE_ONLY)):
        return
    weighted = name.startswith(WEIGHTED)
    adj = make_adjacency(rows, cols, entries, weighted)
    if weighted and adj.value.numel():
        adj.value.abs_()  # For square roots of degrees.
    edge_index, weight = adj.to_edge_index()
    theirs, ours = pair(name)
    x = torch.randn(cols, 5, dtype=torch.float64)
    assert_equal(theirs, ours, x, edge_index, weight, adj, rows)


@pytest.mark.parametrize("name", CONVS)
def test_same_constructor_and_weights(name):
    theirs, ours = pair(name)
    assert isinstance(ours, type(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    twin = copy.deepcopy(ours)
    assert type(twin) is type(ours)


@pytest.mark.parametrize("name", CONVS)
def test_other_adjacencies_take_the_way_of_pyg(name):
    data = random_graph(directed=False, dtype=torch.float64)
    theirs, ours = pair(name)
    weight = torch.rand(data.edge_index.size(1)).double() if name.startswith(WEIGHTED) else None
    wanted = call(theirs, data.x, data.edge_index, weight)
    assert torch.allclose(call(ours, data.x, data.edge_index, weight), wanted)
    if not isinstance(ours, nn.GCNConv):
        assert ours.path == "pyg: the adjacency is a Tensor"
    assert ours.path.startswith("pyg: ")


@pytest.mark.parametrize(
    ("cls", "options", "extra", "reason"),
    [
        (nn.SAGEConv, {"aggr": "std"}, {}, "aggr='std' is none of sum, mean, max, min"),
        (nn.SAGEConv, {"flow": "target_to_source"}, {}, "flow='target_to_source'"),
        (nn.GATConv, {"edge_dim": 3}, {"edge_attr": torch.randn(60, 3)}, "edge features"),
        (nn.GATConv, {"negative_slope": -1.0}, {}, "'negative_slope' is below zero"),
        (nn.GATConv, {"aggr": "mean"}, {}, "aggr='mean' is not sum"),
        (nn.GATv2Conv, {"edge_dim": 3}, {"edge_attr": torch.randn(60, 3)}, "edge features"),
        (nn.GATv2Conv, {"dropout": 1.0}, {}, "'dropout' is 1"),
        (nn.GATv2Conv, {"aggr": "max"}, {}, "aggr='max' is not sum"),
        (
            nn.GATv2Conv,
            {"add_self_loops": False},
            {"return_attention_weights": True},
            "'return_attention_weights' is given",
        ),
        (
            nn.GATConv,
            {"add_self_loops": False},
            {"return_attention_weights": True},
            "'return_attention_weights' is given",
        ),
        (
            nn.GCNConv,
            {"normalize": False},
            {"edge_weight": torch.rand(60)},
            "'edge_weight' is given, but an Adjacency has values of its own",
        ),
    ],
)
def test_what_cannot_be_fused_says_why(cls, options, extra, reason):
    adj = make_adjacency(12, 12, 60)
    edge_index, _ = adj.to_edge_index()
    ours = cls(5, 4, **options)
    theirs = getattr(pyg, cls.__name__)(5, 4, **options)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(12, 5)
    if "flow" in options:  # A matrix has one direction, for PyG as well.
        with pytest.raises(ValueError, match='Flow direction "target_to_source" is invalid'):
            ours(x, adj)
    else:
        out, wanted = ours(x, adj, **extra), theirs(x, edge_index, **extra)
        out, wanted = (o[0] if isinstance(o, tuple) else o for o in (out, wanted))
        if cls is nn.GCNConv:  # PyG ignores weights beside a matrix.
            wanted = theirs(x, edge_index)
        assert torch.allclose(out, wanted, atol=1e-5)
    assert reason in ours.path


def hooked(layer):
    layer[0].register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "options", "reason"),
    [
        (mlp(torch.nn.ReLU(), torch.nn.Linear(4, 4)), {}, "'nn' is more than a linear layer"),
        (torch.nn.Sequential(torch.nn.BatchNorm1d(10)), {}, "'nn' is more than a linear layer"),
        (torch.nn.Sequential(), {}, "'nn' is more than a linear layer"),
        (pyg.MLP([10, 4]), {}, "'nn' is more than a linear layer"),
        (mlp(torch.nn.GELU()), {}, "'activation' is GELU"),
        (mlp(torch.nn.LeakyReLU(-0.5)), {}, "expected 'negative_slope' of at least 0"),
        (hooked(mlp(torch.nn.ReLU())), {}, "'nn' has hooks"),
        (mlp(torch.nn.ReLU()), {"aggr": "std"}, "aggr='std' is none of sum, mean, max, min"),
    ],
)
def test_edge_functions_that_cannot_be_fused_say_why(layer, options, reason):
    adj = make_adjacency(12, 12, 60)
    ours, theirs = nn.EdgeConv(layer, **options), pyg.EdgeConv(layer, **options)
    x = torch.randn(12, 10 if len(list(layer.parameters())) == 0 else 5)
    edge_index, _ = adj.to_edge_index()
    assert torch.allclose(ours(x, adj), theirs(x, edge_index), atol=1e-5)
    assert ours.path.startswith("pyg: ")
    assert reason in ours.path


def test_a_lazy_linear_layer_is_fused_once_it_knows_its_size():
    adj, x = make_adjacency(12, 12, 60), torch.randn(12, 5)
    conv = nn.EdgeConv(pyg.Linear(-1, 4))
    first = conv(x, adj)
    assert conv.path == "pyg: 'nn' has hooks"
    assert torch.allclose(conv(x, adj), first, atol=1e-5)
    assert conv.path == "fused"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("first", [True, False])
def test_mixtures_of_many_coordinates_in_either_order(shape, first, monkeypatch):
    rows, cols, entries = SHAPES[shape]
    if rows == 0:
        return
    monkeypatch.setattr(nn.conv_edge, "sums_first", lambda *_: first)
    adj = make_adjacency(rows, cols, entries)
    theirs, ours = (package.GMMConv(5, 4, 3, 2).double() for package in (pyg, nn))
    ours.load_state_dict(theirs.state_dict())
    x, pseudo = torch.randn(cols, 5).double(), torch.rand(entries, 3).double()
    tensors = x.requires_grad_(), pseudo.requires_grad_()
    wanted = theirs((x, x[:rows]), adj.to_edge_index()[0], pseudo)
    found = ours((x, x[:rows]), adj, pseudo)
    assert ours.path == "fused"
    assert torch.allclose(found, wanted, atol=1e-10)
    grads = [
        torch.autograd.grad(out.pow(2).sum(), [*tensors, *conv.parameters()])
        for out, conv in ((found, ours), (wanted, theirs))
    ]
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(*grads, strict=True))


def test_mixtures_that_cannot_be_fused_say_why():
    adj, x, pseudo = make_adjacency(12, 12, 60), torch.randn(12, 5), torch.rand(60, 2)
    for options, reason in (
        ({"separate_gaussians": True}, "pyg: separate_gaussians=True"),
        ({"aggr": "max"}, "pyg: aggr='max' is none of sum, mean"),
    ):
        theirs, ours = (package.GMMConv(5, 4, 2, 3, **options) for package in (pyg, nn))
        ours.load_state_dict(theirs.state_dict())
        wanted = theirs(x, adj.to_edge_index()[0], pseudo)
        assert torch.allclose(ours(x, adj, pseudo), wanted, atol=1e-5)
        assert ours.path == reason


def test_a_mixture_without_coordinates_or_a_root():
    adj, x = make_adjacency(12, 12, 60), torch.randn(12, 5)
    with pytest.raises(ValueError, match=r"'edge_attr' is None, expected .* shape \[60, 2\]"):
        nn.GMMConv(5, 4, 2, 3)(x, adj)
    conv = nn.GMMConv(5, 4, 2, 3, root_weight=False)  # PyG's own fails.
    with_root = nn.GMMConv(5, 4, 2, 3)
    with_root.load_state_dict({**conv.state_dict(), "root.weight": torch.zeros(4, 5)})
    pseudo = torch.rand(60, 2)
    assert torch.equal(conv(x, adj, pseudo), with_root(x, adj, pseudo))


def test_a_lazy_mixture():
    adj, x, pseudo = make_adjacency(12, 12, 60), torch.randn(12, 5), torch.rand(60, 2)
    lazy, conv = nn.GMMConv(-1, 4, 2, 3), nn.GMMConv(5, 4, 2, 3)
    lazy(x, adj, pseudo)
    conv.load_state_dict(lazy.state_dict())
    assert torch.equal(lazy(x, adj, pseudo), conv(x, adj, pseudo))
    assert lazy.path == "fused"


@pytest.mark.parametrize("name", ["EdgeConv", "EdgeConv sum", "GATv2Conv", "GMMConv"])
def test_layers_compile(name):
    adj = make_adjacency(12, 12, 60, weighted=name == "GMMConv")
    _, conv = pair(name)
    x = torch.randn(12, 5, dtype=torch.float64)
    wanted = conv(x, adj)
    assert torch.allclose(torch.compile(conv, backend="aot_eager")(x, adj), wanted)
    assert conv.path == "fused"


@pytest.mark.parametrize("name", CONVS)
def test_nothing_of_the_size_of_the_edges_is_kept_for_backward(name):
    adj = make_adjacency(20, 20, 4000, weighted=name.startswith(WEIGHTED))
    if adj.value is not None:
        adj.value.abs_()
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    _, conv = pair(name)
    x = torch.randn(20, 5, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(conv, x, adj)
    assert conv.path == "fused"
    given = [] if adj.value is None else [adj.value.data_ptr()]
    sizes = [t.numel() for t in kept if t.is_floating_point() and t.data_ptr() not in given]
    assert kept
    assert max(sizes, default=0) < adj.num_entries


def test_subclasses_are_left_to_pyg():
    class Mine(nn.SAGEConv):
        def message(self, x_j):
            return 2 * x_j

        def message_and_aggregate(self, adj_t, x):
            return 2 * super().message_and_aggregate(adj_t, x)

    adj = make_adjacency(12, 12, 60)
    conv, x = Mine(5, 4), torch.randn(12, 5)
    out = conv(x, adj)
    assert "Mine may aggregate in another way" in conv.path
    assert torch.allclose(out, conv(x, adj.to_edge_index()[0]), atol=1e-5)
    assert not torch.allclose(
        out, super(Mine, conv).propagate(adj.to_torch_sparse(), x=(x, x)).sum()
    )


def test_fusing_a_model_of_pyg():
    data = random_graph(directed=False)
    for model in (
        pyg.GCN(5, 8, 3, 4),
        pyg.GAT(5, 8, 3, 4, heads=2),
        pyg.GraphSAGE(5, 8, 3, 4),
        pyg.GIN(5, 8, 3, 4),
        pyg.GAT(5, 8, 3, 4, heads=2, v2=True),
    ):
        model.eval()
        wanted = model(data.x, data.edge_index)
        state = list(model.state_dict())
        assert gas.fuse(model) is model
        assert list(model.state_dict()) == state
        assert torch.allclose(model(data.x, Adjacency.of(data.edge_index, 60)), wanted, atol=1e-5)
        assert {conv.path for conv in model.convs} == {"fused"}
        assert torch.allclose(model(data.x, data.edge_index), wanted, atol=1e-6)


@pytest.mark.parametrize("name", CONVS)
def test_every_layer_is_fused_in_a_model(name):
    theirs, _ = pair(name)
    model = gas.fuse(torch.nn.ModuleList([theirs]))
    assert type(model[0]) is getattr(nn, name.split()[0])


def test_a_normalisation_is_made_once():
    adj = Adjacency.of(random_graph(directed=False).edge_index, 60)
    conv, x = nn.GCNConv(5, 4), torch.randn(60, 5)
    conv(x, adj)
    made = list(adj.kept.values())
    nn.GCNConv(5, 4)(x, adj)
    assert [id(a) for a in adj.kept.values()] == [id(a) for a in made]


@pytest.mark.parametrize("conv", [nn.GCNConv(5, 4), nn.GCN2Conv(5, 0.1, 0.5, 1)], ids=repr)
def test_a_batch_does_not_know_the_degrees_of_its_halo(conv):
    adj = make_adjacency(7, 19, 40)
    x = torch.randn(19, 5)
    with pytest.raises(ValueError, match=r"of shape \[7, 19\] is that of a mini-batch.*GCNNorm"):
        call(conv, x, adj)


def test_the_cheaper_order():
    """Halo rows are spared the dense product; narrow outputs are aggregated narrow."""
    adj = make_adjacency(50, 5000, 1000)
    wide, narrow = torch.randn(5000, 64), torch.randn(5000, 4)
    assert nn.conv.aggregates_first(adj, wide, 64)
    assert nn.conv.aggregates_first(adj, narrow, 64)
    dense = make_adjacency(50, 50, 5000)
    assert not nn.conv.aggregates_first(dense, torch.randn(50, 512), 4)
    for x, conv in ((wide, nn.GCNConv(64, 64, normalize=False)),):
        out = conv(x, adj)
        expected = conv.lin(nn.spmm(adj, x)) + conv.bias
        assert torch.allclose(out, expected, atol=1e-4)
        assert torch.allclose(out, nn.spmm(adj, conv.lin(x)) + conv.bias, atol=1e-4)


def test_the_cheaper_order_of_a_mixture():
    sums_first = nn.conv_edge.sums_first
    few = make_adjacency(50, 5000, 1000)
    assert sums_first(few, torch.randn(5000, 64), 3, 64)  # Halo rows are spared the product.
    dense = make_adjacency(50, 50, 5000)
    assert not sums_first(dense, torch.randn(50, 64, requires_grad=True), 3, 8)
    assert sums_first(dense, torch.randn(50, 8), 3, 64)


def test_the_rows_of_a_batch_are_transformed_once():
    adj = make_adjacency(7, 19, 40)
    conv = nn.GATConv(5, 4, add_self_loops=False)
    calls = []
    conv.lin.register_forward_hook(lambda m, args, out: calls.append(out.size(0)))
    x = torch.randn(19, 5, requires_grad=True)
    together = conv((x, x[:7]), adj)
    assert calls == [19]
    apart = conv((x, x[:7].clone()), adj)
    assert calls == [19, 19, 7]
    assert torch.allclose(together, apart)
    conv((x, x.detach()[:7]), adj)  # Which gets no gradient: not the same rows.
    assert calls[-2:] == [19, 7]


def test_shared_weights_transform_the_rows_of_a_batch_once():
    adj = make_adjacency(7, 19, 40)
    conv = nn.GATv2Conv(5, 4, share_weights=True, add_self_loops=False)
    calls = []
    conv.lin_l.register_forward_hook(lambda m, args, out: calls.append(out.size(0)))
    x = torch.randn(19, 5, requires_grad=True)
    together = conv((x, x[:7]), adj)
    assert calls == [19]
    apart = conv((x, x[:7].clone()), adj)
    assert calls == [19, 19, 7]
    assert torch.allclose(together, apart)


def test_a_compiled_model():
    data = random_graph(directed=False)
    adj = Adjacency.of(data.edge_index, 60)
    model = gas.fuse(pyg.GCN(5, 8, 2, 4)).eval()
    wanted = model(data.x, adj)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(compiled(data.x, adj), wanted, atol=1e-5)
