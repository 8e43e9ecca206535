"""Regression tests of silently wrong numbers and obscure errors."""

import copy

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from torch import nn
from torch_geometric.data import Data

import gas

N, E, W = 80, 400, 6


def graph(**attributes):
    torch.manual_seed(0)
    return Data(x=torch.randn(N, W), edge_index=torch.randint(N, (2, E))).update(attributes)


def unchanged(net, x):
    return x


class Net(nn.Module):
    """Two layers, and functions of a test in front, between and behind."""

    def __init__(self, start=None, between=None, end=None, width=W, layer=pyg.SAGEConv):
        super().__init__()
        self.functions = start or unchanged, between or unchanged, end or unchanged
        self.a, self.b = layer(width, 8), layer(8, 8)

    def forward(self, x, edge_index):
        start, between, end = self.functions
        x = self.a(start(self, x), edge_index)
        return end(self, self.b(between(self, x), edge_index))


def check(net, data, *args):
    """Return predictions are those of the module."""
    net.eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 4, model=model, log=False)
    expected = net(data.x, *(args or [data.edge_index])).detach()
    for layout in ("fused", "edge_index"):
        found = model.predict(clustered, layout=layout)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max()), layout
    return model


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_features_that_are_no_floating_numbers(dtype):
    """Histories keep what a layer gives, whatever the features are."""
    codes = torch.randint(0, 2, (N,)).to(dtype)
    net = Net(lambda net, x: net.table(x.long()), width=5)
    net.table = nn.Embedding(2, 5)
    check(net, graph(x=codes))
    check(Net(lambda net, x: x.float()), graph(x=torch.randint(0, 2, (N, W)).to(dtype)))


def test_features_of_half_precision():
    check(Net(lambda net, x: x.float()), graph(x=torch.randn(N, W).half()))


def test_codes_in_floating_features():
    net = Net(lambda net, x: net.table(x[:, 0].long()), width=5)
    net.table = nn.Embedding(7, 5)
    check(net, graph(x=torch.randint(0, 7, (N, W)).float()))


@pytest.mark.parametrize("name", ["adj_t", "edge_index"])
def test_weights_in_an_adjacency(name):
    data = T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(
        T.RemoveDuplicatedEdges("edge_weight")(graph(edge_weight=torch.rand(E) + 0.1))
    )

    class Given(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.a, self.b = layer(W, 8), layer(8, 3)

    text = f"def forward(self, x, {name}): return self.b(self.a(x, {name}).relu(), {name})"
    exec(text, space := {})
    Given.forward = space["forward"]
    check(Given(pyg.GraphConv), data, data.adj_t)
    check(Given(pyg.SAGEConv), data, data.adj_t)


def test_features_whose_logarithm_is_taken():
    """Random ones would be NaN, and NaN is equal to everything that is NaN."""

    class Mixed(nn.Module):
        def __init__(self, same):
            super().__init__()
            self.a, self.b = pyg.GCNConv(W, 8), pyg.GCNConv(8, 3) if same else pyg.SAGEConv(8, 3)

        def forward(self, x, edge_index):
            return self.b(self.a(torch.log1p(x), edge_index).relu(), edge_index)

    data = graph(x=torch.randint(0, 9, (N, W)).float())
    check(Mixed(same=True), data)
    check(Mixed(same=False), data)
    with pytest.raises(ValueError, match="NaN or infinite"):
        gas.to_scalable(Net(lambda net, x: (x - 100).log()), data)


class Centred(pyg.SAGEConv):
    """Subtracts the mean of all nodes."""

    def forward(self, x, edge_index):
        return super().forward(x - x.mean(dim=0), edge_index)


def test_features_that_are_alike_hide_no_layer_that_compares_them():
    """Nor where random ones can't stand in for them, because their square roots are taken."""
    net = Net(lambda net, x: x.sqrt())
    net.a = Centred(W, 8)
    with pytest.raises(ValueError, match=r"'a' \(Centred\) isn't exact on mini-batches"):
        gas.to_scalable(net, graph(x=torch.ones(N, W)))


def test_gates_that_are_zero_at_first():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = pyg.GCNConv(W, 8), pyg.SAGEConv(8, 8)
            self.gate = nn.Parameter(torch.zeros(1))

        def forward(self, x, edge_index):
            h = self.a(x, edge_index)
            return h + self.gate * self.b(h, edge_index)

    data, net = graph(), Gate().eval()
    model = check(net, data)
    with torch.no_grad():
        net.gate.fill_(1)
    out = model.predict(gas.cluster(data, 4, model=model, log=False))
    assert torch.allclose(out, net(data.x, data.edge_index), atol=1e-5)


def test_buffers_are_read_when_it_runs():
    net = Net(lambda net, x: (x - net.mean) / net.var.sqrt())
    net.register_buffer("mean", torch.zeros(W))
    net.register_buffer("var", torch.ones(W))
    data = graph()
    model = check(net, data)
    net.load_state_dict({**net.state_dict(), "mean": torch.ones(W), "var": torch.full((W,), 4.0)})
    clustered = gas.cluster(data, 4, model=model, log=False)
    assert torch.allclose(model.predict(clustered), net(data.x, data.edge_index), atol=1e-5)


class Edges(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b = pyg.GINEConv(nn.Linear(W, 8), edge_dim=2), pyg.SAGEConv(8, 3)
        self.function = function

    def forward(self, x, edge_index, edge_attr):
        return self.b(self.a(x, edge_index, self.function(edge_attr)), edge_index)


@pytest.mark.parametrize(
    "function",
    [
        lambda e: e - e.mean(dim=0),
        lambda e: e / e.max(),
        lambda e: e.softmax(dim=0),
        lambda e: e.cumsum(dim=0),
    ],
)
def test_statistics_over_edges_are_refused(function):
    with pytest.raises(ValueError, match="more than one node or edge at a time"):
        gas.to_scalable(Edges(function), graph(edge_attr=torch.rand(E, 2)))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda net, x: x / x.size(0) ** 0.5, "depends on how many nodes"),
        (lambda net, x: x * (1 / x.size(0)), "depends on how many nodes"),
        (lambda net, x: x * (x.size(0) > 62), "depends on how many nodes"),
        (lambda net, x: net.named(x)["h"], "returns a dict"),
    ],
)
def test_what_depends_on_the_number_of_nodes_or_hides_them(end, reason):
    class Named(nn.Module):
        def forward(self, x):
            return {"h": x - x.mean(dim=0)}

    net = Net(end=end)
    net.named = Named()
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(net, graph())


@pytest.mark.parametrize("place", ["start", "between", "end", "training"])
@pytest.mark.parametrize(
    "statistic",
    [
        lambda x: x.max(dim=0)[0],
        lambda x: x.min(dim=0, keepdim=True).values,
        lambda x: torch.std_mean(x, 0)[1],
        lambda x: x.median(0)[0],
        lambda x: x.topk(3, dim=0)[0][0],
        lambda x: torch.aminmax(x)[1],
        lambda x: x.max(0)[1],
        lambda x: torch.unique(x.round(), return_counts=True)[1].max(),
    ],
)
def test_statistics_that_come_in_a_tuple_are_refused(statistic, place):
    """A tuple of tensors has no row for each node, just as a tensor of a statistic."""

    def change(net, x):
        return x - statistic(x) if net.training or place != "training" else x

    net = Net(**{"between" if place == "training" else place: change}).eval()
    with pytest.raises(ValueError, match="isn't exact on mini-batches|a size that is neither"):
        gas.to_scalable(net, graph())


@pytest.mark.parametrize(
    ("limit", "is_refused"),
    [
        (lambda x: torch.renorm(x, 2, 1, 1e6), True),
        (lambda x: x.renorm(2, dim=-1, maxnorm=1e6), True),
        (lambda x: torch.renorm(x, 2, 0, 1.0), False),
        (lambda x: x.renorm(p=2, dim=-2, maxnorm=1.0), False),
    ],
)
def test_limits_of_columns_that_small_graphs_do_not_reach_are_refused(limit, is_refused):
    net = Net(between=lambda net, x: limit(x))
    if not is_refused:
        check(net, graph())
        return
    with pytest.raises(ValueError, match="'renorm' .* it looks at more than one node or edge"):
        gas.to_scalable(net, graph())


def test_scripted_norms_convert():
    class Scripted(Net):
        def __init__(self):
            super().__init__(between=lambda net, x: net.norm(x))
            self.norm = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8)))

    check(Scripted(), graph())


def test_functions_of_numpy_do_not_hide_why_a_module_is_refused():
    net = Net(between=lambda net, x: x[:, np.arange(8)[::-1].copy()])
    with pytest.raises(ValueError, match="can't be followed"):
        gas.to_scalable(net, graph())


def test_tuples_of_rows_stay():
    check(Net(between=lambda net, x: x - x.max(dim=1, keepdim=True)[0]), graph())
    check(Net(between=lambda net, x: torch.cat(torch.std_mean(x, 1, keepdim=True) * 4, 1)), graph())


def test_modes_of_autograd_in_forward():
    def frozen(net, x):
        with torch.no_grad():
            return x * 2

    def low_precision(net, x):
        with torch.autocast("cpu"):
            return x * 2

    check(Net(between=frozen), graph())
    with pytest.raises(ValueError, match="take autocast around the model"):
        gas.to_scalable(Net(between=low_precision), graph())
    check(Net(between=lambda net, x: x.detach() * 2), graph())


def test_buffers_of_the_module_stay_as_they_are():
    def counted(net, x):
        net.steps += 1
        return x

    net = Net(between=counted)
    net.register_buffer("steps", torch.zeros(()))
    with pytest.raises(ValueError, match=r"."):
        gas.to_scalable(net, graph())
    assert net.steps == 0


@pytest.mark.parametrize("name", ["n_id", "count", "offset", "push", "fill", "scope", "training"])
def test_words_of_a_call_are_refused_as_attributes(name):
    space: dict = {}
    exec(f"def forward(self, x, edge_index, {name}): return self.a(x, edge_index)", space)
    cls = type("Own", (Net,), {"forward": space["forward"]})
    with pytest.raises(ValueError, match=f"takes '{name}', a word"):
        gas.to_scalable(cls(), graph(**{name: torch.arange(N)}))


def test_dropout_inside_of_a_sequential():
    net = Net(between=lambda net, x: net.middle(x))
    net.middle = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.9))
    model = gas.to_scalable(net, graph())
    clustered = gas.cluster(graph(), 1, model=model, log=False)
    model(next(iter(gas.SubgraphLoader(clustered, log=False))))
    assert float((model.histories[0].emb == 0).float().mean()) < 0.8  # ReLU's half alone.


def test_parametrised_layers():
    net = Net(between=lambda net, x: net.linear(x))
    net.linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    check(net, graph())
    net.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    check(net, graph())


def test_sizes_before_and_after_a_layer():
    class Sized(Net):
        def forward(self, x, edge_index):
            n = x.size(0)
            x = torch.cat([x, x.new_ones(n, 1)], dim=-1)
            h = self.a(x, edge_index).view(n, 4, 2).mean(dim=1)
            return self.b(h.repeat(1, 4), edge_index).view(h.shape[0], -1)

    check(Sized(width=W + 1), graph())


def test_other_errors_in_words():
    class Pair(pyg.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

        def update(self, inputs, x):
            return inputs, x

    class Tuples(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = Pair()

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)[0]

    class Anything(nn.Module):
        def forward(self, *args):
            return args[0]

    with pytest.raises(ValueError, match="returns a tuple, expected one tensor"):
        gas.to_scalable(Tuples(), graph())
    with pytest.raises(ValueError, match=r"names no parameters, by which"):
        gas.to_scalable(Anything(), graph())


script_data = graph()


class ReadsGlobal(Net):
    """Model of a script, whose forward takes nothing."""

    def forward(self):
        return super().forward(script_data.x, script_data.edge_index)


def test_a_graph_that_is_a_global_variable(monkeypatch):
    data, net = graph(), ReadsGlobal().eval()
    model = gas.to_scalable(net, data)
    clustered = gas.cluster(data, 4, model=model, log=False)
    assert script_data is globals()["script_data"] is not data
    with torch.no_grad():
        expected = Net.forward(net, data.x, data.edge_index)
        torch.testing.assert_close(model.eval().predict(clustered, log=False), expected)
        data.x = data.x + 1
        assert torch.equal(net(), Net.forward(net, script_data.x, script_data.edge_index))
    monkeypatch.setitem(globals(), "script_data", None)
    with pytest.raises(ValueError, match="names no parameters, by which"):
        gas.to_scalable(net, data)


def test_copies_have_the_same_state():
    model = gas.to_scalable(Net(lambda net, x: x * torch.tensor(2.0)), graph())
    other = copy.deepcopy(model)
    assert list(other.state_dict()) == list(model.state_dict())
    other.load_state_dict(model.state_dict())


def test_integer_weights_of_edges():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = pyg.GraphConv(W, 3)

        def forward(self, x, edge_index, edge_weight):
            return self.a(x, edge_index, edge_weight.float())

    data = graph(edge_weight=torch.randint(1, 4, (E,)))
    net = Weights().eval()
    model = gas.to_scalable(net, data)
    out = model.predict(gas.cluster(data, 4, model=model, log=False))
    expected = net(data.x, data.edge_index, data.edge_weight)
    assert torch.allclose(out, expected, atol=1e-4)
