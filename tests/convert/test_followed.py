"""Tensors that are replaced in a module after its conversion."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from conftest import random_graph
from torch import nn
from torch_geometric.utils import degree

import gas

WIDTH = 8


class Scaling(pyg.MessagePassing):
    """A layer that reads a tensor which is neither a parameter nor a buffer."""

    def __init__(self, in_channels):
        super().__init__(aggr="add")
        self.lin, self.inside = nn.Linear(in_channels, WIDTH), torch.randn(WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x) * self.inside)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.sage = Scaling(5), pyg.SAGEConv(WIDTH, 3)
        self.plain, self.weight = torch.randn(WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("buffer", torch.randn(WIDTH))
        self.unread = torch.randn(3)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index).relu() * self.plain + self.buffer * self.weight
        self.last = x.detach()
        return self.sage(x, edge_index)


REPLACED = {
    "of the module": lambda net, new: setattr(net, "plain", new),
    "of a layer": lambda net, new: setattr(net.conv, "inside", new),
    "a buffer": lambda net, new: setattr(net, "buffer", new),
    "a parameter": lambda net, new: setattr(net, "weight", nn.Parameter(new)),
    "in place": lambda net, new: net.plain.copy_(new),
    "a buffer in place": lambda net, new: net.buffer.copy_(new),
}


def converted():
    net, data = Net().eval(), random_graph()
    model = gas.to_scalable(net, data)
    return net, data, model, gas.cluster(data, 4, model=model, log=False)


@pytest.mark.parametrize("kind", REPLACED)
def test_the_model_takes_what_replaces_a_tensor(kind):
    net, data, model, graph = converted()
    copied, expected = copy.deepcopy(model), net(data.x, data.edge_index)
    for _ in range(2):
        before = net(data.x, data.edge_index)
        REPLACED[kind](net, torch.randn(WIDTH))
        after = net(data.x, data.edge_index)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(model.predict(graph, log=False), after)
        assert gas.verify(model, graph)
    if "in place" not in kind:
        torch.testing.assert_close(copied.predict(graph, log=False), expected)


@pytest.mark.parametrize("kind", ["of the module", "a buffer", "in place", "a buffer in place"])
def test_a_model_that_was_moved_takes_it_too(kind):
    net, data, model, graph = converted()
    model.double()
    graph.x = graph.x.double()
    REPLACED[kind](net, torch.full((WIDTH,), 2.0))
    for each in ("plain", "buffer"):
        setattr(net, each, getattr(net, each).double())
    net.conv.inside = net.conv.inside.double()
    expected = net.double()(data.x.double(), data.edge_index)
    torch.testing.assert_close(model.predict(graph, log=False), expected)


@pytest.mark.parametrize("other", [2.0, None, torch.ones(3), torch.ones(WIDTH, dtype=torch.long)])
def test_what_is_no_such_tensor_is_refused(other):
    net, _, model, graph = converted()
    net.plain = other
    with pytest.raises(ValueError, match="'plain' of the module is .* now, and was floating-point"):
        model.predict(graph, log=False)


COMPUTED = {
    "derived": lambda net, h: h * (net.t * 2).exp(),
    "a number": lambda net, h: h * net.t.sum().item(),
    "a row": lambda net, h: h * net.t[0],
    "a branch": lambda net, h: h.sin() if (net.t > 0).all() else h,
}


def net_of(function):
    class Made(Net):
        def __init__(self):
            super().__init__()
            self.t = torch.rand(WIDTH)

        def forward(self, x, edge_index):
            return self.sage(self.function(self.conv(x, edge_index)), edge_index)

    Made.function = function
    return Made().eval()


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_tensor_that_forward_computes_with_alone_is_refused_when_it_changes(kind):
    data = random_graph()
    for change in (lambda net: setattr(net, "t", -net.t), lambda net: net.t.neg_()):
        net = net_of(COMPUTED[kind])
        model = gas.to_scalable(net, data)
        graph = gas.cluster(data, 4, model=model, log=False)
        model.predict(graph, log=False)
        change(net)
        with pytest.raises(ValueError, match="'t' of the module has changed, and its model has"):
            model.predict(graph, log=False)
        again = gas.to_scalable(net, data)
        torch.testing.assert_close(again.predict(graph, log=False), net(data.x, data.edge_index))


def test_attributes_that_are_one_tensor_and_become_two():
    net, data = net_of(lambda net, h: h * net.t + net.other), random_graph()
    net.other = net.t
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    net.t = net.other = torch.rand(WIDTH)
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x, data.edge_index))
    net.t = torch.rand(WIDTH)
    with pytest.raises(ValueError, match="'t', 'other' of the module were one tensor"):
        model.predict(graph, log=False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: setattr(net, "sage", pyg.SAGEConv(WIDTH, 3)), "'sage' of the module is anoth"),
        (lambda net: setattr(net.conv, "lin", nn.Linear(5, WIDTH)), "'lin' of the module is anoth"),
        (lambda net: delattr(net, "plain"), "'plain' of the module was .*, and was deleted"),
        (lambda net: setattr(net, "plain", nn.Parameter(net.plain)), "or made a parameter"),
    ],
)
def test_parts_that_are_replaced_are_refused(change, text):
    net, _, model, graph = converted()
    model.predict(graph, log=False)
    change(net)
    with pytest.raises(ValueError, match=text):
        model.predict(graph, log=False)


class Optional(nn.Module):
    """A module whose layers have options, and that keeps numbers of its own."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([pyg.GATConv(5, WIDTH), pyg.GATConv(WIDTH, 3)])
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.calls, self.best = 0, 0.5

    def forward(self, x, edge_index):
        self.calls += 1
        x = self.norm(self.convs[0](x, edge_index)).relu()
        return self.convs[1](self.drop(x), edge_index)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: setattr(net.drop, "p", 0.0), "'drop.p' of the module is 0.0, and was 0.5"),
        (lambda net: setattr(net.norm, "eps", 0.1), "'norm.eps' of the module is 0.1, and was 1e-"),
        (lambda net: setattr(net.convs[1], "negative_slope", 0.5), r"'convs.1.negative_slope'"),
    ],
)
def test_options_of_layers_that_are_changed_are_refused(change, text):
    net, data = Optional(), random_graph()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    change(net)
    with pytest.raises(ValueError, match=text):
        model.predict(graph, log=False)
    again = gas.to_scalable(net, data).eval()
    torch.testing.assert_close(again.predict(graph, log=False), net.eval()(data.x, data.edge_index))


class Numbered(nn.Module):
    """A module whose calls read numbers of its own, in several ways."""

    shift = 0.25  # Of the class.

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([Scaled(5, WIDTH), Scaled(WIDTH, 3)])
        self.alpha, self.depth, self._kind, self.factor, self.seen = 0.5, 1, "relu", None, 0
        self.rate, self.gain = 0.1, 2.0  # The first is of no call.
        self.bend = partial(nn.functional.leaky_relu, negative_slope=0.1)

    @property
    def kind(self):
        return self._kind

    def activate(self, x):
        return x.relu() if self.kind == "relu" else x.tanh()

    def forward(self, x, edge_index):
        self.seen += 1
        x = self.activate(self.convs[0](x, edge_index)) * self.alpha + self.shift
        for _ in range(self.depth):
            x = x + (1 if self.factor is None else self.factor)
        return self.convs[1](self.bend(x * getattr(self, "gain", 1.0)), edge_index)

    def train_for(self):
        return self.rate


class Scaled(pyg.GCNConv):
    """A layer of one's own, of which PyG reads options, too."""

    by = 2.0

    def message(self, x_j, edge_weight):
        return self.scale(super().message(x_j, edge_weight))

    def scale(self, x):
        return (lambda: x * self.by)()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda net: setattr(net, "alpha", 0.75), "'alpha' of the module is 0.75, and was 0.5"),
        (lambda net: setattr(net, "depth", 2), "'depth' of the module is 2, and was 1"),
        (lambda net: setattr(net, "_kind", "tanh"), "'_kind' of the module is 'tanh', and was 'r"),
        (lambda net: setattr(net, "factor", 2.0), "'factor' of the module is 2.0, and was None"),
        (lambda net: setattr(net, "shift", 1.0), "'shift' of the module is 1.0, and was 0.25"),
        (lambda net: setattr(net, "gain", 3.0), "'gain' of the module is 3.0, and was 2.0"),
        (lambda net: setattr(net, "bend", torch.tanh), "'bend' of the module is <built-in method"),
        (lambda net: setattr(net.convs[1], "by", 3.0), "'convs.1.by' of the module is 3.0, and"),
        (lambda net: setattr(net.convs[0], "normalize", False), "'convs.0.normalize' of the mod"),
    ],
)
def test_numbers_that_calls_read_and_that_are_changed_are_refused(change, text):
    net, data = Numbered(), random_graph()
    model = gas.to_scalable(net, data).eval()
    graph = gas.cluster(data, 4, model=model, log=False)
    net.rate, net.seen, net.alpha = 0.2, 9, float("0.5")  # Read by no call, set by it, and equal.
    expected = net.eval()(data.x, data.edge_index)
    torch.testing.assert_close(model.predict(graph, log=False), expected)
    change(net)
    with pytest.raises(ValueError, match=text):
        model.predict(graph, log=False)
    again = gas.to_scalable(net, data).eval()
    graph = gas.cluster(data, 4, model=again, log=False)
    torch.testing.assert_close(again.predict(graph, log=False), net(data.x, data.edge_index))


def test_numbers_of_the_module_itself_and_modes_may_change():
    net, data = Optional(), random_graph()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    net.best, net.drop.p = 0.9, float("0.5")  # An equal number.
    net.eval()(data.x, data.edge_index)
    expected = net(data.x, data.edge_index)
    torch.testing.assert_close(model.eval().predict(graph, log=False), expected)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "argument"])
def test_a_value_may_have_the_name_of_a_method_of_tensors(kind):
    class Named(pyg.GraphSAGE):
        def forward(self, x, edge_index, t=None):
            return super().forward(x, edge_index) * (self.t if t is None else t)

    net, data = Named(5, 8, 2).eval(), random_graph()
    value = torch.rand(8)
    if kind == "buffer":
        net.register_buffer("t", value)
    elif kind == "parameter":
        net.t = nn.Parameter(value)
    else:
        data.t = torch.rand(60, 1)
    model = gas.to_scalable(net, data)
    found = model.predict(gas.cluster(data, 4, model=model, log=False), log=False)
    torch.testing.assert_close(found, net(data.x, data.edge_index, data.get("t")))


class Weighting(pyg.MessagePassing):
    """A layer whose messages read a buffer, and a tensor, of ones."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin, self.plain = nn.Linear(in_channels, out_channels), torch.ones(out_channels)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x, edge_index):
        weight = 1 / degree(edge_index[1], x.size(0)).clamp(min=1)[edge_index[1]]
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j * self.scale * self.plain


@pytest.mark.parametrize("name", ["scale", "plain"])
def test_a_tensor_of_ones_inside_of_messages_is_read(name):
    data = random_graph()
    net = nn_of(Weighting(5, WIDTH), Weighting(WIDTH, 3))
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    getattr(net.a, name).fill_(0.3)
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x, data.edge_index))


def nn_of(first, second):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = first, second

        def forward(self, x, edge_index):
            return self.b(self.a(x, edge_index).relu(), edge_index)

    return Two().eval()


def test_a_buffer_of_zeros_hides_nothing():
    net = net_of(lambda net, h: h + net.mix * h.mean(0, keepdim=True))
    net.register_buffer("mix", torch.zeros(1))
    with pytest.raises(ValueError, match="'mean' .* isn't exact on mini-batches"):
        gas.to_scalable(net, random_graph())


def test_what_is_computed_of_a_buffer_alone_is_that_of_the_module():
    net, data = net_of(lambda net, h: h * next(net.buffers()).exp()), random_graph()
    net.register_buffer("buffer", torch.rand(WIDTH))
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    assert gas.verify(model, graph)
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x, data.edge_index))
    net.buffer.neg_()
    with pytest.raises(ValueError, match="'buffer' of the module has changed"):
        model.predict(graph, log=False)


def test_a_tensor_of_two_names_is_that_of_the_module_after_verify():
    net, data = net_of(lambda net, h: h * net.t.exp() * net.same), random_graph()
    net.same = net.t
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    assert gas.verify(model, graph)
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x, data.edge_index))


ITEMS = {
    "a list": ([0.5, 2.0], lambda s: s[0], lambda net: net.s.__setitem__(0, 3.0)),
    "another list": ([0.5], lambda s: s[0], lambda net: setattr(net, "s", [3.0])),
    "a dictionary": ({"k": 0.5}, lambda s: s["k"], lambda net: net.s.update(k=3.0)),
    "a namespace": (SimpleNamespace(k=0.5), lambda s: s.k, lambda net: setattr(net.s, "k", 3.0)),
    "a tuple": ((0.5,), lambda s: s[0], lambda net: setattr(net, "s", (3.0,))),
    "a number of NumPy": (np.float64(0.5), float, lambda net: setattr(net, "s", np.float64(3.0))),
    "an array": (np.full(WIDTH, 0.5, "f"), torch.from_numpy, lambda net: net.s.fill(3)),
    "of the class": (..., lambda s: s, lambda net: setattr(type(net), "s", 3.0)),
    "in the class": (..., lambda s: s[0], lambda net: net.s.__setitem__(0, 3.0)),
    "a function": (torch.relu, lambda s: s(torch.ones(1)), lambda net: setattr(net, "s", abs)),
    "tensors": ([torch.full((WIDTH,), 0.5)], lambda s: s[0], lambda net: net.s[0].fill_(3.0)),
    "deep": ({"k": [{"m": 0.5}]}, lambda s: s["k"][0]["m"], lambda net: net.s.update(k=[3.0])),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_what_is_inside_of_an_attribute_is_followed(kind):
    value, read, change = ITEMS[kind]
    net, data = net_of(lambda net, h: h * read(net.s)), random_graph()
    if value is ...:
        type(net).s = 0.5 if kind == "of the class" else [0.5]
    else:
        net.s = value
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x, data.edge_index))
    change(net)
    with pytest.raises(ValueError, match="s.* of the module .* convert the module again"):
        model.predict(graph, log=False)


def test_what_a_call_does_not_read_may_change():
    net, data = net_of(lambda net, h: h * net.args.scale), random_graph()
    net.args, net.log = SimpleNamespace(scale=2.0, lr=0.1), []
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    net.args.lr = 0.01
    net.log.append(1)
    torch.testing.assert_close(model.predict(graph, log=False), net(data.x, data.edge_index))


def test_a_forward_that_is_set_on_a_part_is_refused():
    net, _, model, graph = converted()
    net.sage.forward = net.conv.forward
    with pytest.raises(ValueError, match="'sage.forward' of the module is .* and was None"):
        model.predict(graph, log=False)


class Parts(nn.Module):
    """A part that is called as a whole only by the module itself."""

    def __init__(self):
        super().__init__()
        self.inner = Net()

    def forward(self, x, edge_index):
        return self.inner(x, edge_index)


@pytest.mark.parametrize("part", ["", "inner"])
def test_hooks_that_the_model_would_not_call_are_refused(part):
    net, data = Parts().eval(), random_graph()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    before = model.predict(graph, log=False)
    handle = net.get_submodule(part).register_forward_hook(lambda *_: None)
    if not part:  # The hooks of parts are those of the model's parts, too.
        with pytest.raises(ValueError, match="has hooks, which the model wouldn't call"):
            model.predict(graph, log=False)
    with pytest.raises(ValueError, match="has hooks, which the model wouldn't call"):
        gas.to_scalable(net, data)
    handle.remove()
    seen = []
    for part in model.modules():
        part.register_forward_hook(lambda *_: None)
    net.inner.sage.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model.predict(graph, log=False), before)
    assert seen
