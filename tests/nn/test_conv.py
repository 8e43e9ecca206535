"""Drop-in convolutions: PyG's weights in, PyG's numbers out, and the way they took."""

import copy
from unittest import mock

import pytest
import torch
import torch_geometric.nn as pyg
from adjacencies import SHAPES, make_adjacency
from conftest import random_graph
from convs import CONVS, WEIGHTED, call, pair

from gas import nn
from gas.history import Rows
from gas.nn import Adjacency

SQUARE_ONLY = ("normalised", "improved")


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
        assert torch.allclose(out, wanted, atol=1e-5)
    assert reason in ours.path


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


def test_a_normalisation_is_made_once():
    adj = Adjacency.of(random_graph(directed=False).edge_index, 60)
    conv, x = nn.GCNConv(5, 4), torch.randn(60, 5)
    conv(x, adj)
    made = adj.tensors()
    nn.GCNConv(5, 4)(x, adj)
    assert [id(tensor) for tensor in adj.tensors()] == [id(tensor) for tensor in made]


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
    assert nn.sum_convs.should_aggregate_first(adj, wide, 64)
    assert nn.sum_convs.should_aggregate_first(adj, narrow, 64)
    for entries in (5000, 100):  # Without a halo, the dense products cost the same.
        square = make_adjacency(50, 50, entries)
        assert not nn.sum_convs.should_aggregate_first(square, torch.randn(50, 512), 4)
    for x, conv in ((wide, nn.GCNConv(64, 64, normalize=False)),):
        out = conv(x, adj)
        expected = conv.lin(nn.spmm(adj, x)) + conv.bias
        assert torch.allclose(out, expected, atol=1e-4)
        assert torch.allclose(out, nn.spmm(adj, conv.lin(x)) + conv.bias, atol=1e-4)
    # A layer that transforms first walks the transpose, even if only the weights learn.
    graph, x = make_adjacency(300, 300, 1500), torch.randn(300, 16)
    assert nn.sum_convs.should_aggregate_first(graph, x, 8)
    assert not nn.sum_convs.should_aggregate_first(graph, x.requires_grad_(), 4)


def test_the_cheaper_order_of_a_batch_with_histories():
    """To transform the halo's rows they have to be read out of the history."""
    adj = make_adjacency(300, 1300, 3000)
    own = torch.randn(300, 64, requires_grad=True)
    assert nn.sum_convs.should_aggregate_first(adj, Rows(own, torch.randn(1000, 64)), 4)
    assert not nn.sum_convs.should_aggregate_first(
        adj, torch.randn(1300, 64, requires_grad=True), 4
    )


def test_bias_is_added_as_if_by_itself():
    adj, x = make_adjacency(50, 500, 1000), torch.randn(500, 64)
    conv, seen = nn.GCNConv(64, 32, normalize=False), []
    torch.nn.init.normal_(conv.bias)
    out = conv(x, adj)
    with torch.autocast("cpu", torch.bfloat16):
        expected = conv.lin(nn.spmm(adj, x)) + conv.bias
        assert torch.equal(conv(x, adj), expected)
        assert expected.dtype == torch.float32
    hook = conv.lin.register_forward_hook(lambda module, args, out: seen.append(out) or 2 * out)
    doubled = conv(x, adj)
    assert torch.equal(doubled, 2 * seen[0] + conv.bias)
    assert torch.allclose(doubled - conv.bias, 2 * (out - conv.bias), atol=1e-4)
    hook.remove()
    conv.lin = torch.nn.Linear(64, 32)  # With a bias of its own, perhaps.
    assert torch.allclose(conv(x, adj), conv.lin(nn.spmm(adj, x)) + conv.bias, atol=1e-5)


class Doubling(pyg.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cls", [pyg.Linear, Doubling, torch.nn.Linear])
def test_whatever_linear_layer_a_user_puts_in(cls, bias):
    """Alone or with the bias of the convolution in one pass."""
    adj = make_adjacency(50, 500, 1000)
    x = torch.randn(500, 64)
    for own in (True, False):
        conv = nn.GCNConv(64, 32, normalize=False, bias=own)
        conv.lin = cls(64, 32, bias=bias)
        for parameter in conv.parameters():
            torch.nn.init.normal_(parameter)
        expected = conv.lin(nn.spmm(adj, x)) + (conv.bias if own else 0)
        assert torch.allclose(conv(x, adj), expected, rtol=1e-4, atol=1e-3)


AGGREGATIONS = ["sum", "mean", "max", "min", "std", ["sum", "max"]]
MODULES = [pyg.aggr.SoftmaxAggregation, pyg.aggr.MaxAggregation]


@pytest.mark.parametrize("aggr", [*AGGREGATIONS, *MODULES], ids=str)
@pytest.mark.parametrize("name", [n for n in CONVS if " " not in n or n.endswith("normalised")])
def test_every_aggregation_is_that_of_pyg(name, aggr):
    """By name, by module and several at once, or what PyG refuses is refused."""
    args, options = CONVS[name]
    aggr = aggr() if isinstance(aggr, type) else aggr
    theirs = getattr(pyg, name.split()[0])(*args, **{**options, "aggr": aggr}).double()
    ours = nn.fuse(copy.deepcopy(theirs))
    x = torch.randn(12, 5, dtype=torch.float64)
    for weighted in (True, False)[: 1 if name == "GMMConv" else 2]:
        adj = make_adjacency(12, 12, 60, weighted)
        if weighted:
            adj.value.abs_()  # For square roots of degrees.
        edge_index, weight = adj.to_edge_index()
        try:
            wanted = call(theirs, x, edge_index, weight if name.startswith(WEIGHTED) else None)
        except (RuntimeError, ValueError):  # Of widths that don't fit several aggregations.
            with pytest.raises((RuntimeError, ValueError)):
                call(ours, x, adj)
        else:
            assert torch.allclose(call(ours, x, adj), wanted, atol=1e-9)


@pytest.mark.parametrize("name", CONVS)
def test_edges_of_the_other_direction_are_those_of_pyg_or_refused(name):
    args, options = CONVS[name]
    theirs = getattr(pyg, name.split()[0])(*args, **options, flow="target_to_source").double()
    ours = nn.fuse(copy.deepcopy(theirs))
    weighted = name.startswith("GMMConv")
    adj = make_adjacency(12, 12, 60, weighted)
    edge_index, weight = adj.to_edge_index()
    x = torch.randn(12, 5, dtype=torch.float64)
    if name in ("GCNConv normalised", "GCNConv improved") or name.startswith(("GAT", "GMM")):
        wanted = call(theirs, x, edge_index, weight)
        assert torch.allclose(call(ours, x, adj), wanted, atol=1e-9)
    else:
        with pytest.raises(ValueError, match='Flow direction "target_to_source" is invalid'):
            call(ours, x, adj)


@pytest.mark.parametrize("hook", ["propagate", "message", "aggregate"])
@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GCNConv normalised", "EdgeConv"])
def test_hooks_of_message_passing_are_called(name, hook):
    adj = make_adjacency(12, 12, 60)
    theirs, ours = pair(name)
    for conv in (theirs, ours):
        getattr(conv, f"register_{hook}_forward_hook")(lambda module, inputs, out: 3 * out)
    x = torch.randn(12, 5, dtype=torch.float64)
    assert torch.allclose(call(ours, x, adj), call(theirs, x, adj.to_edge_index()[0]), atol=1e-9)
    assert ours.path == "pyg: message passing has hooks"


def test_hooks_of_products_are_called():
    adj, x = make_adjacency(12, 12, 60), torch.randn(12, 5)
    conv = nn.SimpleConv()
    conv.register_message_and_aggregate_forward_hook(lambda module, inputs, out: 3 * out)
    assert torch.allclose(conv(x, adj), 3 * nn.spmm(adj, x), atol=1e-5)


def test_hooks_of_attention_are_called():
    adj = make_adjacency(12, 12, 60)
    theirs, ours = pair("GATConv")
    for conv in (theirs, ours):
        conv.register_edge_update_forward_hook(lambda module, inputs, out: 3 * out)
    x = torch.randn(12, 5, dtype=torch.float64)
    assert torch.allclose(ours(x, adj), theirs(x, adj.to_edge_index()[0]), atol=1e-9)


@pytest.mark.parametrize("name", [n for n in CONVS if n.startswith(("GC", "GraphConv", "Simple"))])
def test_weights_of_a_call_are_values_of_the_adjacency(name):
    adj = make_adjacency(12, 12, 60)
    edge_index, _ = adj.to_edge_index()
    weight = torch.rand(60, dtype=torch.float64, requires_grad=True)
    theirs, ours = pair(name)
    x = torch.randn(12, 5, dtype=torch.float64)
    wanted, out = call(theirs, x, edge_index, weight), call(ours, x, adj, weight)
    assert ours.path == "fused"
    assert torch.allclose(out, wanted, atol=1e-9)
    (found,) = torch.autograd.grad(out.square().sum(), weight)
    assert torch.allclose(found, torch.autograd.grad(wanted.square().sum(), weight)[0], atol=1e-8)
    with pytest.raises(ValueError, match="'edge_weight' is given, but the adjacency has values"):
        call(ours, x, adj.with_value(weight), weight)


@pytest.mark.parametrize("weighted", [False, True])
def test_self_loops_of_a_simple_convolution(weighted):
    adj = make_adjacency(12, 12, 60, weighted)
    x = torch.randn(12, 5, dtype=torch.float64)
    expected = nn.spmm(adj, x) + x
    assert torch.allclose(nn.SimpleConv(combine_root="self_loop")(x, adj), expected, atol=1e-9)
    batch = make_adjacency(7, 12, 40, weighted)
    out = nn.SimpleConv(combine_root="self_loop")(x, batch)
    assert torch.allclose(out, nn.spmm(batch, x) + x[:7], atol=1e-9)


@pytest.mark.parametrize(
    "name", [n for n in CONVS if n.startswith(("SAGE", "GIN", "GraphC", "GM"))]
)
def test_sources_without_destinations(name):
    adj = make_adjacency(7, 19, 40, name.startswith(WEIGHTED))
    edge_index, weight = adj.to_edge_index()
    theirs, ours = pair(name)
    x = torch.randn(19, 5, dtype=torch.float64)
    extra = () if weight is None else (weight[:, None] if "GMM" in name else weight,)
    wanted = theirs((x, None), edge_index, *extra, size=(19, 7))
    assert torch.allclose(ours((x, None), adj), wanted, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in CONVS if n.startswith("GATConv")])
def test_attention_without_destinations(name):
    adj = make_adjacency(7, 19, 40)
    theirs, ours = pair(name)
    x = torch.randn(19, 5, dtype=torch.float64)
    wanted = theirs((x, None), adj.to_edge_index()[0], size=(19, 7))
    assert torch.allclose(ours((x, None), adj), wanted, atol=1e-9)
    assert ours.path == "pyg: no destination features"


def test_threads_share_a_normalising_layer():
    """An option that a call changes is seen by other calls."""
    _, conv = pair("GCN2Conv normalised")
    with mock.patch.object(pyg.GCN2Conv, "propagate", autospec=True) as propagate:
        propagate.side_effect = lambda self, edge_index, x, **_: x.clone().mul_(self.normalize)
        out = call(conv, torch.ones(12, 5).double(), make_adjacency(12, 12, 60))
    assert conv.normalize
    assert out.abs().sum() > 0
