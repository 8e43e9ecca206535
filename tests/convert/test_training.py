"""Conversion of modules that compute something in training alone."""

import copy
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from conftest import random_graph
from test_user_shapes import net_of
from torch import nn

import gas
from gas.convert.module.state import training_mode


def single_batch(model, data):
    """Return the mini-batch of a graph of one part, and its nodes."""
    graph = gas.cluster(data, 1, model=model, log=False)
    (batch,) = gas.SubgraphLoader(graph, log=False)
    return batch, graph.perm[batch.n_id]


def check_both_modes(net, data):
    """Check that a module converts, and returns the same in training and in evaluation."""
    model = gas.to_scalable(net, data)
    batch, nodes = single_batch(model, data)
    for mode in (True, False):
        expected = net.train(mode)(data.x, data.edge_index)[nodes]
        torch.testing.assert_close(model.train(mode)(batch), expected)


class KeepsStatistics(nn.Module):
    """Trains with a batch norm that stays in evaluation."""

    is_frozen = True

    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = (
            pyg.SAGEConv(5, 8),
            nn.BatchNorm1d(8),
            pyg.SAGEConv(8, 3),
        )
        self.norm.running_mean.uniform_()

    def train(self, mode=True):
        super().train(mode)
        self.norm.train(mode and not self.is_frozen)
        return self

    def forward(self, x, edge_index):
        return self.conv2(self.norm(self.conv1(x, edge_index)).relu(), edge_index)


def test_modes_are_those_that_the_module_sets():
    net, data = KeepsStatistics(), random_graph()
    model = gas.to_scalable(net, data)
    batch, nodes = single_batch(model, data)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        before = copy.deepcopy(net.state_dict())
        each.eval().train()
        modes = [each.training, each.net.conv1.training, each.net.norm.training]
        assert modes == [True, True, False]
        torch.testing.assert_close(each(batch), net.train()(data.x, data.edge_index)[nodes])
        assert all(map(torch.equal, before.values(), net.state_dict().values()))
    net.eval()
    net.is_frozen = False  # From now on, with statistics of its own.
    model.train()
    assert [model.net.norm.training, net.norm.training, net.training] == [True, False, False]
    assert not model.eval().net.norm.training


def test_a_norm_that_is_frozen_keeps_its_statistics_in_a_refresh():
    net, data = KeepsStatistics(), random_graph()
    model = gas.to_scalable(net, data).train()
    before = net.norm.running_mean.clone()
    model.refresh(gas.cluster(data, 3, model=model, log=False), log=False)
    assert torch.equal(before, net.norm.running_mean)


class Centred(pyg.SAGEConv):
    def forward(self, x, edge_index):
        return super().forward(x - x.mean(dim=0) if self.training else x, edge_index)


class Mixed(pyg.SAGEConv):
    def forward(self, x, edge_index):
        if self.training:
            x = x + x[torch.randperm(x.size(0))]
        return super().forward(x, edge_index)


class Asserting(pyg.SAGEConv):
    def forward(self, x, edge_index):
        if self.training:
            assert x.size(0) > 60
        return super().forward(x, edge_index)


class MixedAtRandom(pyg.SAGEConv):
    def forward(self, x, edge_index):
        if self.training and torch.rand(1) < 0.5:
            x = x - x.mean(dim=0)
        return super().forward(x, edge_index)


def of_layer(layer):
    return net_of(lambda net, x, edge_index: net.last(net.first(x).relu(), edge_index),
                  first=nn.Linear(5, 8), last=layer(8, 3))  # fmt: skip


@pytest.mark.parametrize("layer", [Centred, Mixed, Asserting, MixedAtRandom])
def test_layers_that_look_at_all_nodes_in_training_are_refused(layer):
    with pytest.raises(ValueError, match=rf"'last' \({layer.__name__}\) isn't exact .* training"):
        gas.to_scalable(of_layer(layer), random_graph())


class Failing(pyg.SAGEConv):
    def forward(self, x, edge_index):
        assert not self.training
        return super().forward(x, edge_index)


def test_a_layer_that_fails_in_training_is_refused():
    with pytest.raises(ValueError, match="can't be run in training .* AssertionError"):
        gas.to_scalable(of_layer(Failing), random_graph())


class Rows(nn.Module):
    """Subtracts the mean of all rows in training."""

    def forward(self, x):
        return x - x.mean(dim=0) if self.training else x


def centring(net, x, edge_index):
    return net.conv2(net.rows(net.conv1(x, edge_index)), edge_index)


def test_functions_that_look_at_all_nodes_in_training_are_refused():
    net = net_of(centring, rows=Rows())
    with pytest.raises(ValueError, match=r"'rows' \(Rows\) isn't exact on mini-batches in train"):
        gas.to_scalable(net, random_graph())


class Noisy(pyg.SAGEConv):
    def forward(self, x, edge_index):
        if self.training:
            x = F.dropout(x + torch.randn_like(x), 0.2)
        return super().forward(x, edge_index)


def normed_mlp(width, out):
    return pyg.GINConv(nn.Sequential(
        nn.Linear(width, 8), nn.BatchNorm1d(8), nn.RReLU(), nn.Dropout(), nn.Linear(8, out)
    ))  # fmt: skip


def attention(width, out):
    return pyg.TransformerConv(width, out, dropout=0.5)


def spectral(width, out):
    return pyg.GINConv(nn.utils.parametrizations.spectral_norm(nn.Linear(width, out)))


class Propagated(pyg.APPNP):
    def __init__(self, width, out):
        super().__init__(2, 0.1, dropout=0.3)


@pytest.mark.parametrize("layer", [Noisy, normed_mlp, attention, spectral, Propagated])
def test_layers_that_draw_for_each_row_are_converted(layer):
    net, data = of_layer(layer), random_graph()
    state = copy.deepcopy(net.state_dict())
    model = gas.to_scalable(net, data)
    batch, _ = single_batch(model, data)
    model.train()(batch).sum().backward()
    assert net.state_dict().keys() == state.keys()


def ends(change):
    """Return a module that returns what is made of its rows, in training or in evaluation."""
    return net_of(lambda net, x, edge_index: change(
        net.conv2(net.conv1(x, edge_index).relu(), edge_index), net.training
    ))  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, training: (rows, rows[:, :2] if training else rows),
        lambda rows, training: (rows.double() if training else rows, rows),
        lambda rows, training: (rows, rows) if training else rows,
        lambda rows, training: [rows, rows] if training else (rows, rows),
        lambda rows, training: {"a": rows} if training else {"b": rows},
    ],
    ids=["width", "type", "number", "list", "names"],
)
def test_outputs_of_another_type_in_training_are_refused(change):
    with pytest.raises(ValueError, match="in training"):
        gas.to_scalable(ends(change), random_graph())


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, training: rows[:, :2] if training else rows.log_softmax(dim=-1),
        lambda rows, training: rows.double() if training else rows,
    ],
    ids=["width", "type"],
)
def test_one_output_may_differ_in_training(change):
    net, data = ends(change), random_graph()
    check_both_modes(net, data)


def skipping(net, x, edge_index):
    x = net.conv1(x, edge_index)
    if not (net.training and torch.rand(1) < 0.5):
        x = x + net.norm(net.lin(x))
    return net.conv2(x, edge_index)


def normed_before(net, x, edge_index):
    x = net.conv1(x, edge_index)
    more = net.norm(net.lin(x))
    return net.conv2(x if net.training and torch.rand(1) < 0.5 else x + more, edge_index)


def test_statistics_of_layers_that_are_skipped_are_refused():
    parts = {"norm": nn.BatchNorm1d(8), "lin": nn.Linear(8, 8)}
    with pytest.raises(ValueError, match=r"'norm' \(BatchNorm1d\) keeps .* random branch"):
        gas.to_scalable(net_of(skipping, **parts), random_graph())
    gas.to_scalable(net_of(skipping, **{**parts, "norm": nn.LayerNorm(8)}), random_graph())
    model = gas.to_scalable(net_of(normed_before, **parts), random_graph())
    batch, _ = single_batch(model, random_graph())
    for _ in range(8):
        model.train()(batch)
    assert int(parts["norm"].num_batches_tracked) == 8  # As the module itself counts.


def with_numbers(net, x, edge_index, number):
    rows = net.conv2(net.conv1(x, edge_index).relu(), edge_index)
    return rows, number, rows > 0, number.int()


def test_large_integers_beside_floats():
    data, limit = random_graph(), 2**63
    data.number = torch.randint(-(2**62), 2**62, (data.num_nodes, 2))
    edges = [limit - 1, -limit, -1, 0, 2**31, 2**31 - 1, -(2**31), 2**53 + 1]
    data.number[:4] = torch.tensor(edges).view(4, 2)
    net = net_of(with_numbers, "x, edge_index, number").eval()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 3, model=model, log=False)
    expected = net(data.x, data.edge_index, data.number)
    found = model.predict(graph, log=False)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[1], data.number)


def test_types_of_outputs_follow_those_of_the_model():
    data = random_graph()
    data.number = torch.arange(data.num_nodes)
    model = gas.to_scalable(net_of(with_numbers, "x, edge_index, number"), data).double()
    data.x = data.x.double()
    batch, _ = single_batch(model, data)
    types = [rows.dtype for rows in model(batch)]
    assert types == [torch.float64, torch.int64, torch.bool, torch.int32]
    data.x = data.x.float()
    assert model.float()(single_batch(model, data)[0])[0].dtype == torch.float32


def of_constants(net, x, edge_index):
    x = net.conv1(x, edge_index)
    if net.training:
        x = x * torch.tensor(0.5)
    return net.conv2(x + torch.tensor(2.0 if net.training else 3.0), edge_index)


def inverted(net, x, edge_index):
    rows, mask = net.conv1(x, edge_index).clone(), x[:, 0] > 0
    rows[~mask] = torch.tanh(rows[~mask])
    rows[rows[:, 1] > 0.5] = net.lin(rows[rows[:, 1] > 0.5])
    return net.conv2(rows, edge_index)


def weighted(net, x, edge_index):
    rows = net.conv1(x, edge_index)
    shares, out = net.lin(rows).softmax(-1), torch.zeros_like(rows)
    for column in range(3):  # Of a mixture of experts, the first that applies.
        mask = shares[:, :3].argmax(-1) == column
        out[mask] = torch.tanh(rows[mask]) * shares[mask, column, None]
    return net.conv2(out, edge_index)


@pytest.mark.parametrize("forward", [of_constants, inverted, weighted])
def test_constants_of_a_mode_and_masks_that_are_written_twice(forward):
    net, data = net_of(forward, lin=nn.Linear(8, 8)), random_graph()
    check_both_modes(net, data)


def other_mask(net, x, edge_index):
    rows = net.conv1(x, edge_index).clone()
    rows[x[:, 0] > 0] = rows[x[:, 0] <= 0][: int((x[:, 0] > 0).sum())]
    return net.conv2(rows, edge_index)


def test_rows_of_another_mask_are_refused():
    with pytest.raises(ValueError, match="can't be"):
        gas.to_scalable(net_of(other_mask), random_graph())


def keeping(net, x, edge_index):
    rows = net.conv1(x, edge_index)
    is_kept = not net.training or torch.rand(1) < 0.8  # In evaluation, always.
    rows = rows + net.lin(rows).relu() if is_kept else rows.tanh()
    return net.conv2(rows, edge_index)


def test_branches_that_evaluation_takes_always():
    net, data = net_of(keeping, lin=nn.Linear(8, 8)), random_graph()
    model = gas.to_scalable(net, data)
    batch, nodes = single_batch(model, data)
    expected = net.eval()(data.x, data.edge_index)[nodes]
    torch.testing.assert_close(model.eval()(batch), expected)
    found = {round(float(model.train()(batch).detach().square().sum()), 2) for _ in range(40)}
    expected = {
        round(float(net.train()(data.x, data.edge_index).detach().square().sum()), 2)
        for _ in range(40)
    }
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(sorted(found), sorted(expected), strict=True):
        assert abs(mine - theirs) < 0.1


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_evaluation_is_unlike_both_branches(p):
    def forward(net, x, edge_index):
        rows = net.conv1(x, edge_index)
        if not net.training:
            rows = rows.sigmoid()
        elif torch.rand(1) < p:
            rows = rows.relu()
        else:
            rows = rows.tanh()
        return net.conv2(rows, edge_index)

    check_both_modes(net_of(forward), random_graph())


def test_noise_of_a_mean_and_a_deviation():
    def forward(net, x, edge_index):
        rows = net.conv1(x, edge_index)
        if net.training:
            rows = rows + torch.normal(4.0, 0.5, rows.size())
        return net.conv2(rows, edge_index)

    net, data = net_of(forward), random_graph()
    model = gas.to_scalable(net, data)
    batch, nodes = single_batch(model, data)
    torch.manual_seed(0)
    expected = net.train()(data.x, data.edge_index)
    torch.manual_seed(0)
    assert nodes.tolist() == list(range(60))  # The order of the noise.
    torch.testing.assert_close(model.train()(batch), expected)
    expected = net.eval()(data.x, data.edge_index)
    torch.testing.assert_close(model.eval()(batch), expected)


class Scripted(nn.Module):
    def forward(self, x):
        return x.relu() + 1


class Counter(nn.Module):
    """Counts its calls in training, or forgets that it has a buffer."""

    def __init__(self, forgets):
        super().__init__()
        self.forgets = forgets
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.step = None if self.forgets else self.step + 1
        return x * 2


@pytest.mark.parametrize("kind", ["scripted", "counting", "forgetting"])
def test_modules_whose_buffers_are_unusual(kind):
    if kind == "scripted":
        lin = torch.jit.script(Scripted())
    else:
        lin = Counter(forgets=kind == "forgetting")
    net = net_of(
        lambda net, x, edge_index: net.conv2(net.lin(net.conv1(x, edge_index)), edge_index)
    )
    net.lin = lin
    data = random_graph()
    model = gas.to_scalable(net, data)
    batch, nodes = single_batch(model, data)
    assert kind == "scripted" or net.lin.step is not None
    expected = net.eval()(data.x, data.edge_index)[nodes]
    torch.testing.assert_close(model.eval()(batch), expected)


def of_tuple(net, x, edge_index):
    rows = net.conv1(x, edge_index)
    if net.training and np.random.random((1,)) < 0.5:
        rows = rows.relu()
    return net.conv2(rows, edge_index)


def test_numbers_of_numpy_by_a_tuple():
    gas.to_scalable(net_of(of_tuple), random_graph())


def test_arrays_of_numpy_that_are_drawn_are_refused():
    def forward(net, x, edge_index):
        rows = net.conv1(x, edge_index)
        if net.training:
            rows = rows * torch.from_numpy(np.random.rand(8)).float()
        return net.conv2(rows, edge_index)

    with pytest.raises(ValueError, match="it draws random numbers in a way that isn't known"):
        gas.to_scalable(net_of(forward), random_graph())


def test_other_threads_draw_as_before():
    drawn = []
    with training_mode(nn.Linear(1, 1), 0.999):
        thread = threading.Thread(target=lambda: drawn.append(random.random()))
        thread.start()
        thread.join()
        assert random.random() == 0.999
    assert drawn != [0.999]


class CentredInTraining(pyg.MessagePassing):
    """Looks at all nodes in training, behind a random activation."""

    def forward(self, x, edge_index):
        if self.training:
            x = F.rrelu(x - x.mean(dim=0), training=True)
        return self.propagate(edge_index, x=x)


def test_layers_behind_random_activations_are_checked_in_training():
    net = net_of(
        lambda net, x, edge_index: net.conv2(
            net.own(net.conv1(x, edge_index), edge_index), edge_index
        )
    )
    net.own = CentredInTraining()
    with pytest.raises(ValueError, match="in training"):
        gas.to_scalable(net, random_graph())
