"""Attributes that a module sets when it is called: kept for a look, computed once, or memory."""

import copy
import random
import re
import threading

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from comparisons import check, check_gradients, net_of, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, scatter

import gas
from gas.convert.module.state import keep_attributes


def normalise_once(net, x, edge_index):
    if net.norm is None:
        net.norm = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
    return net.d(net.c(x, *net.norm).relu(), *net.norm)


def set_two_at_once(net, x, edge_index):
    if net.edges is None:
        net.edges, net.weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
    return net.d(net.c(x, net.edges, net.weight).relu(), net.edges, net.weight)


def ask_for_an_attribute(net, x, edge_index):
    src, dst = edge_index
    if not hasattr(net, "scale"):
        net.scale = 1 / degree(dst, x.size(0), dtype=x.dtype).clamp(min=1)
    x = scatter(net.scale[dst][:, None] * x[src], dst, 0, x.size(0))
    return net.b(net.a(x, edge_index).relu(), edge_index)


def keep_in_a_dictionary(net, x, edge_index):
    if "norm" not in net.kept:
        net.kept["norm"] = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
    return net.d(net.c(x, *net.kept["norm"]).relu(), *net.kept["norm"])


def average_features_once(net, x, edge_index):
    if net.rows is None:
        net.rows = x
        for _ in range(2):
            net.rows = scatter(net.rows[edge_index[0]], edge_index[1], 0, x.size(0), reduce="mean")
    return net.lin(net.rows)


def hop_twice_once(net, x, edge_index):
    if net.rows is None:
        net.rows = net.hop(net.hop(x, edge_index), edge_index)
    return net.lin(net.rows)


CACHES = {
    "hops of a layer without parameters": (
        hop_twice_once,
        {"rows": None, "hop": pyg.SimpleConv("mean")},
    ),
    "a tuple": (normalise_once, {"norm": None}),
    "two": (set_two_at_once, {"edges": None, "weight": None}),
    "hasattr": (ask_for_an_attribute, {}),
    "a dictionary": (keep_in_a_dictionary, {"kept": {}}),
    "features": (average_features_once, {"rows": None}),
}


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_what_is_computed_once_of_the_graph(kind, is_filled):
    function, attributes = CACHES[kind]
    net, data = net_of(function, **copy.deepcopy(attributes)).double(), random_graph()
    data.x = data.x.double()
    if is_filled:
        net(data.x, data.edge_index)
    before = copy.deepcopy({key: vars(net).get(key) for key in (*attributes, "scale")})
    gas.to_scalable(net, data)
    now = {key: vars(net).get(key) for key in before}
    assert repr(now) == repr(before)  # The module isn't changed.
    check(net, data, of_x)


def test_gradients_with_what_is_computed_once():
    check_gradients(net_of(normalise_once, norm=None), random_graph(), of_x)


class OnceConv(pyg.MessagePassing):
    """A layer that computes weights of its edges once."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin, self.norm = nn.Linear(in_channels, out_channels), None

    def forward(self, x, edge_index):
        if self.norm is None:
            self.norm = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        edge_index, weight = self.norm
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def message(self, x_j, weight):
        return weight[:, None] * x_j


class TwoOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = OnceConv(5, 8), OnceConv(8, 3)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def test_layers_that_compute_weights_once():
    check(TwoOnce(), random_graph(), of_x)
    check_gradients(TwoOnce(), random_graph(), of_x)


class GrandSum(pyg.MessagePassing):
    """A layer whose name has "rand" in it, and which draws nothing."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


def test_layers_are_not_random_by_their_names():
    def forward(net, x, edge_index):
        if net.degree is None:
            net.degree = net.sum(torch.ones_like(x[:, :1]), edge_index)
        return net.b(net.a(x, edge_index) / (1 + net.degree), edge_index)

    net, data = net_of(forward, sum=GrandSum(), degree=None), random_graph()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    expected = net.eval()(data.x, data.edge_index)
    torch.testing.assert_close(model.eval().predict(graph, log=False), expected)


def test_what_was_computed_of_another_graph_is_refused():
    net, other = net_of(ask_for_an_attribute), random_graph()
    net(other.x, other.edge_index.flip(0))
    with pytest.raises(ValueError, match="'scale' keeps rows of all nodes of a graph"):
        gas.to_scalable(net, other)


def look(net, x, edge_index):
    net.hidden = net.a(x, edge_index)
    net.penalty = net.hidden.square().mean()
    net.calls, net.num_nodes = net.calls + 1, x.size(0)
    net.kept.append(net.hidden.detach())
    return net.b(net.hidden.relu(), edge_index)


def test_what_no_call_reads_does_no_harm():
    net = net_of(look, calls=0, kept=[])
    check(net, random_graph(), of_x)
    check_gradients(net_of(look, calls=0, kept=[]), random_graph(), of_x)


def remember(net, x, edge_index):
    rows = net.a(x, edge_index).relu()
    rows = rows if net.before is None else rows + net.before
    net.before = rows.detach()
    return net.b(rows, edge_index)


def count(net, x, edge_index):
    net.calls += 1
    return net.b(net.a(x, edge_index) / net.calls, edge_index)


def count_in_training(net, x, edge_index):
    net.calls += net.training
    return net.b(net.a(x, edge_index) / (1 + net.calls), edge_index)


def average(net, x, edge_index):
    rows = net.a(x, edge_index)
    if net.training:
        net.mean.mul_(0.9).add_(rows.mean(0).detach(), alpha=0.1)
    return net.b(rows - net.mean, edge_index)


def transform_once(net, x, edge_index):
    if net.before is None:
        net.before = net.lin(x)
    return net.hop(net.before, edge_index)


def drop_once(net, x, edge_index):
    if net.before is None:
        net.before = nn.functional.dropout(x, 0.5, net.training)
    return net.b(net.a(net.before, edge_index), edge_index)


def transform_once_by_flag(net, x, edge_index):
    if not net.done:
        net.before, net.done = net.lin(x).detach(), True
    return net.b(net.a(x, edge_index), edge_index) + net.before


def remember_training(net, x, edge_index):
    h = net.a(x, edge_index)
    net.calls = x.size(0)  # No call reads it.
    if net.training:
        net.mean = 0.9 * net.mean + 0.1 * h.detach().mean(0)
        return net.b(h, edge_index)
    return net.b(h - net.mean, edge_index)


def warm_up(net, x, edge_index):
    net.calls += net.training
    h = net.a(x, edge_index)
    return net.b(h.relu() if net.calls > 10 else h, edge_index)


@pytest.mark.parametrize(
    ("function", "attributes", "reason"),
    [
        (transform_once_by_flag, {"done": False}, "'before' is computed .* of 'lin'"),
        (remember_training, {"mean": torch.zeros(8)}, "keeps 'mean' .*: register it as a buffer"),
        (warm_up, {"calls": 0}, "keeps 'calls' .*: register it as a buffer"),
        (remember, {"before": None}, "keeps 'before' of one call for the next"),
        (count, {"calls": 0}, "keeps 'calls' .*: register it as a buffer"),
        (count_in_training, {"calls": 0}, "keeps 'calls' .*: register it as a buffer"),
        (average, {"mean": torch.zeros(8)}, "keeps 'mean' .*: register it as a buffer"),
        (transform_once, {"before": None}, "'before' is computed .* of 'lin', which training"),
        (drop_once, {"before": None}, "keeps 'before' of one call for the next"),
    ],
)
def test_memory_of_calls_is_refused(function, attributes, reason):
    net = net_of(function, hop=pyg.SimpleConv(), **attributes)
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(net, random_graph())
    assert vars(net).get("before") is None


def scale_by_a_buffer(net, x, edge_index):
    return net.b(net.a(x, edge_index) * net.scale, edge_index)


def test_a_buffer_may_be_changed_in_place_between_calls():
    """It is the cure for numbers that change from call to call."""
    net, data = net_of(scale_by_a_buffer).eval(), random_graph()
    net.register_buffer("scale", torch.ones(()))
    model = gas.to_scalable(net, data).eval()
    graph = gas.cluster(data, 4, model=model, method="random", log=False)
    net.scale.fill_(3.0)
    assert torch.allclose(model.predict(graph), net(data.x, data.edge_index), atol=1e-5)


def test_a_lazy_module_keeps_nothing_of_the_small_graph():
    def shift_once(net, x, edge_index):
        if net.shift is None:
            net.shift = x.mean(0, keepdim=True)
        return net.b(net.a(x - net.shift, edge_index), edge_index)

    net = net_of(shift_once, shift=None, a=pyg.SAGEConv(-1, 8))
    with pytest.raises(ValueError, match=r"'mean' \(mean\) isn't exact"):
        gas.to_scalable(net, random_graph())
    assert net.shift is None


def test_attributes_that_answer_to_every_name_do_no_harm():
    class Options(dict):
        __getattr__ = dict.get

    def forward(net, x, edge_index):
        return net.b(net.a(x, edge_index), edge_index)

    check(net_of(forward, options=Options(hidden=8)), random_graph(), of_x)


def test_statistics_of_all_nodes_are_not_those_of_the_first_graph():
    def scale_once(net, x, edge_index):
        if net.scale is None:
            net.scale = x.std()
        return net.b(net.a(x / net.scale, edge_index), edge_index)

    with pytest.raises(ValueError, match=r"'std' \(std\) isn't exact"):
        gas.to_scalable(net_of(scale_once, scale=None), random_graph())


def test_all_that_is_changed_is_restored():
    net = nn.Sequential(net_of(look, kept=[1, {"a": 2}], calls=0))
    net[0].register_buffer("rows", torch.zeros(3))
    inner, kept = net[0], net[0].kept
    with keep_attributes(net) as changed:
        inner.rows += 1
        inner.calls, inner.new = 3, 4
        kept.append(5)
        kept[1]["a"] = 6
    assert {**vars(inner)}.get("new") is None
    assert inner.kept is kept
    assert (inner.calls, kept) == (0, [1, {"a": 2}])
    assert not inner.rows.any()
    assert changed.keys() == {"0.rows", "0.calls", "0.new", "0.kept"}
    assert changed["0.rows"].sum() == 3


# Parameters ---------------------------------------------------------------------------------------


def clamp(net, x, edge_index):
    net.lin.weight.data.clamp_(0)
    return net.lin(net.hop(x, edge_index))


def scale_in_training(net, x, edge_index):
    if net.training:
        net.lin.weight.data.mul_(0.9)
    return net.lin(net.hop(x, edge_index))


def normalise_by_hand(net, x, edge_index):
    with torch.no_grad():
        net.lin.weight.copy_(net.lin.weight / net.lin.weight.norm())
    return net.lin(net.hop(x, edge_index))


def write_by_out(net, x, edge_index):
    with torch.no_grad():
        torch.renorm(net.lin.weight, 2, 0, 1.0, out=net.lin.weight)
    return net.lin(net.hop(x, edge_index))


def set_a_row(net, x, edge_index):
    net.lin.weight.data[0] = 0.0
    return net.lin(net.hop(x, edge_index))


def give_values(net, x, edge_index):
    net.lin.weight.data = net.lin.weight.data.abs()
    return net.lin(net.hop(x, edge_index))


def clamp_all(net, x, edge_index):
    for weight in net.lin.parameters():
        weight.data.clamp_(-0.1, 0.1)
    return net.lin(net.hop(x, edge_index))


@pytest.mark.parametrize(
    "function",
    [
        clamp,
        scale_in_training,
        normalise_by_hand,
        write_by_out,
        set_a_row,
        give_values,
        clamp_all,
    ],
)
def test_parameters_that_forward_changes_are_refused(function):
    with pytest.raises(ValueError, match=r"in forward changes 'lin.weight' of .* the training"):
        gas.to_scalable(net_of(function, hop=pyg.SimpleConv()), random_graph())


class Constrained(nn.Linear):
    """A layer whose rows have norms of at most 1."""

    def forward(self, x):
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True).clamp(min=1))
        self.penalty = self.weight.square().sum()
        return super().forward(x)


class Decaying(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.999)
        return super().forward(x)


def call_a_layer(net, x, edge_index):
    return net.b(net.part(net.a(x, edge_index)), edge_index)


def test_layers_may_constrain_their_own_parameters():
    check(net_of(call_a_layer, part=Constrained(8, 8)), random_graph(), of_x)
    check_gradients(net_of(call_a_layer, part=Constrained(8, 8)), random_graph(), of_x)
    with pytest.raises(ValueError, match="other values when it is run again"):
        gas.to_scalable(net_of(call_a_layer, part=Decaying(8, 8)), random_graph())


def read_what_a_layer_sets(net, x, edge_index):
    return call_a_layer(net, x, edge_index) * net.part.penalty


def read_a_number(net, x, edge_index):
    return call_a_layer(net, x, edge_index) * net.part.penalty.item()


def read_all_parameters(net, x, edge_index):
    size = sum(weight.square().sum() for weight in net.lin.parameters())
    return call_a_layer(net, x, edge_index) * size


@pytest.mark.parametrize("function", [read_what_a_layer_sets, read_a_number, read_all_parameters])
def test_numbers_of_parameters_that_are_not_followed_are_refused(function):
    with pytest.raises(ValueError, match="after a step of training.* return what it computes"):
        gas.to_scalable(net_of(function, part=Constrained(8, 8)), random_graph())


# Classes and globals ------------------------------------------------------------------------------

KEPT = {}
DEGREES = None


class Shared(nn.Module):
    degrees = None

    def __init__(self):
        super().__init__()
        self.a, self.b = pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)

    def forward(self, x, edge_index):
        return self.b(self.a(x / self.count(x, edge_index)[:, None], edge_index), edge_index)


class InClass(Shared):
    def count(self, x, edge_index):
        if InClass.degrees is None:
            InClass.degrees = 1 + degree(edge_index[1], x.size(0), x.dtype)
        return InClass.degrees


class InDictionary(Shared):
    def count(self, x, edge_index):
        if "degrees" not in KEPT:
            KEPT["degrees"] = 1 + degree(edge_index[1], x.size(0), x.dtype)
        return KEPT["degrees"]


class InGlobal(Shared):
    def count(self, x, edge_index):
        global DEGREES
        if DEGREES is None:
            DEGREES = 1 + degree(edge_index[1], x.size(0), x.dtype)
        return DEGREES


@pytest.mark.parametrize("kind", [InClass, InDictionary, InGlobal])
def test_what_classes_and_globals_keep_of_the_small_graph_is_forgotten(kind):
    def call(net, data):
        with keep_attributes(net):
            return of_x(net, data)

    check(kind(), random_graph(), call)
    assert (InClass.degrees, KEPT, DEGREES) == (None, {}, None)


class InGlobalList(Shared):
    """Keeps edges, which have no row for each node."""

    def forward(self, x, edge_index):
        if "norm" not in KEPT:
            KEPT["norm"] = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        return self.b(self.a(x, KEPT["norm"][0]).relu(), KEPT["norm"][0])


@pytest.mark.parametrize("kind", [InDictionary, InGlobalList])
def test_a_global_that_was_filled_is_refused_with_its_cure(kind):
    net, data = kind(), random_graph(200)
    try:
        net(data.x, data.edge_index)
        cure = "convert the module before its first call, or reset what forward computes"
        with pytest.raises(
            ValueError, match=f"test_caches:KEPT' keeps rows of all nodes .*: {cure}"
        ):
            gas.to_scalable(net, data)
        KEPT.clear()
        gas.to_scalable(net, data)
    finally:
        KEPT.clear()


def test_a_list_that_was_filled_is_refused_with_its_cure():
    def keep_in_a_list(net, x, edge_index):
        if not net.kept:
            net.kept.append(1 + degree(edge_index[1], x.size(0), x.dtype))
        return net.b(net.a(x / net.kept[0][:, None], edge_index), edge_index)

    net, data = net_of(keep_in_a_list, kept=[]), random_graph()
    net(data.x, data.edge_index)
    with pytest.raises(ValueError, match="'kept' keeps rows .* convert the module before"):
        gas.to_scalable(net, data)


def test_a_filled_attribute_beside_a_lock_is_refused_as_such():
    net, data = net_of(ask_for_an_attribute, lock=threading.Lock()), random_graph()
    net(data.x, data.edge_index)
    with pytest.raises(ValueError, match="can't be copied, .*'lock' raises TypeError: cannot"):
        gas.to_scalable(net, data)


def test_generators_are_left_as_they_were():
    def draw(net, x, edge_index):
        order = (np.random.permutation(8) if net.training else np.arange(8)).tolist()
        scale = random.uniform(1, 2) if net.training else 1.0
        return net.b(net.a(x, edge_index)[:, order] * scale, edge_index)

    def states():
        return random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()

    before = repr(states())
    with pytest.raises(ValueError, match="draws random numbers in a way"):
        gas.to_scalable(net_of(draw), random_graph())
    assert repr(states()) == before


# Gradients ----------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_functions_with_gradients_of_their_own():
    def forward(net, x, edge_index):
        return net.b(Round.apply(Reverse.apply(net.a(x, edge_index), 0.5)), edge_index)

    check(net_of(forward), random_graph(), of_x)
    check_gradients(net_of(forward), random_graph(), of_x)


def test_a_forward_that_needs_gradients_in_training():
    def forward(net, x, edge_index):
        assert not net.training or torch.is_grad_enabled()
        net.hidden = net.a(x, edge_index)
        if net.training:
            net.hidden.retain_grad()
        return net.b(net.hidden, edge_index)

    check(net_of(forward), random_graph(), of_x)


# Random numbers -----------------------------------------------------------------------------------


def choose_in_training(net, x, edge_index):
    rows = net.a(x, edge_index)
    rows = nn.functional.gumbel_softmax(rows, hard=True) if net.training else rows.softmax(-1)
    return net.b(rows, edge_index)


def test_noise_that_is_drawn_by_row_in_training():
    check(net_of(choose_in_training), random_graph(), of_x)


def drop_half(net, x, edge_index):
    order = torch.randperm(edge_index.size(1))
    edge_index = edge_index[:, order[: edge_index.size(1) // 2]]
    return net.b(net.a(x, edge_index), edge_index)


def drop_half_in_training(net, x, edge_index):
    return (
        drop_half(net, x, edge_index) if net.training else net.b(net.a(x, edge_index), edge_index)
    )


def drop_by_mask(net, x, edge_index):
    if net.training:
        edge_index = edge_index[:, torch.rand(edge_index.size(1)) > 0.5]
    return net.b(net.a(x, edge_index), edge_index)


def mix_rows(net, x, edge_index):
    rows = net.a(x, edge_index)
    return net.b(rows + rows[torch.randperm(x.size(0))] if net.training else rows, edge_index)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (drop_half, r"draws random numbers in evaluation, by randperm: .* if self.training"),
        (drop_half_in_training, r"it draws by randperm, .* drop edges by dropout_edge\("),
        (drop_by_mask, r"as it is random, drop edges by dropout_edge\("),
        (mix_rows, r"draws an order of all rows: .* a number for each"),
    ],
)
def test_random_orders_are_refused_for_what_they_are(function, reason):
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(net_of(function), random_graph())


def test_a_refusal_shows_the_line_that_fails():
    def forward(net, x, edge_index):
        scale = {60: 1}[x.size(0)]
        return net.b(net.a(x, edge_index) * scale, edge_index)

    text = re.escape("'scale = {60: 1}[x.size(0)]' raises KeyError: 61; forward must run on graphs")
    with pytest.raises(ValueError, match=text):
        gas.to_scalable(net_of(forward), random_graph())


def test_random_numbers_are_not_taken_for_memory():
    def forward(net, x, edge_index):
        net.norm = rows = net.a(x, edge_index)
        return net.b(rows[torch.randperm(x.size(0))], edge_index)

    with pytest.raises(ValueError, match="draws random numbers in evaluation, by randperm"):
        gas.to_scalable(net_of(forward, norm=None), random_graph())
