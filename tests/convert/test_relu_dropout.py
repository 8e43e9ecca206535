"""ReLU and dropout around a history, which are one pass in training."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_graph
from torch import nn
from torch_geometric.nn import GCN, GraphSAGE, SAGEConv

import gas
from gas.convert.rewriting import rewrite


class Net(nn.Module):
    """Model with what is computed between its layers."""

    def __init__(self, between):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 8), SAGEConv(8, 3)])
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.4)
        self.between = between

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = self.between(self, conv(x, edge_index))
        return self.convs[-1](x, edge_index)


class InSequence(nn.Module):
    """Model with ReLU and dropout in a sequence of modules, after a batch norm."""

    def __init__(self, *between):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 8), SAGEConv(8, 3)])
        self.between = nn.Sequential(nn.BatchNorm1d(8), *between)

    def forward(self, x, edge_index):
        for conv in self.convs[:-1]:
            x = self.between(conv(x, edge_index))
        return self.convs[-1](x, edge_index)


class KeepsRows(Net):
    """Model whose dropout module stays in evaluation."""

    def train(self, mode=True):
        super().train(mode)
        self.drop.eval()
        return self


def drop(net, x):
    return F.dropout(x, 0.4, net.training)


def relu_in_place(net, x):
    x.relu_()
    return drop(net, x)


def dropped_twice(net, x):
    x = x.relu()
    return drop(net, x) + drop(net, x)


def draw_in_between(net, x):
    one, two = x.relu(), (-x).relu()
    two = drop(net, two)
    return drop(net, one) - two


IN_ONE_PASS = {
    "Tensor.relu": lambda: Net(lambda net, x: drop(net, x.relu())),
    "torch.relu": lambda: Net(lambda net, x: drop(net, torch.relu(x))),
    "F.relu": lambda: Net(lambda net, x: drop(net, F.relu(x))),
    "F.relu(inplace)": lambda: Net(lambda net, x: drop(net, F.relu(x, inplace=True))),
    "F.relu(x, True)": lambda: Net(lambda net, x: drop(net, F.relu(x, True))),
    "Tensor.relu_": lambda: Net(lambda net, x: drop(net, x.relu_())),
    "Tensor.relu_ alone": lambda: Net(relu_in_place),
    "F.dropout(inplace)": lambda: Net(
        lambda net, x: F.dropout(x.relu(), 0.4, net.training, inplace=True)
    ),
    "in training": lambda: Net(lambda net, x: drop(net, x.relu()) if net.training else x.relu()),
    "modules": lambda: Net(lambda net, x: net.drop(net.act(x))),
    "in sequence": lambda: InSequence(nn.ReLU(inplace=True), nn.Dropout(0.4)),
    "GraphSAGE": lambda: GraphSAGE(5, 8, 3, 3, dropout=0.4),
    "GCN with batch norm": lambda: GCN(5, 8, 3, 3, dropout=0.4, norm="batch_norm"),
    "jumping knowledge": lambda: GCN(5, 8, 3, 3, dropout=0.4, jk="cat"),
}
JOINS_NORM = ("in sequence", "GCN with batch norm")
APART = {
    "dropout in place": lambda: InSequence(nn.ReLU(), nn.Dropout(0.4, inplace=True)),
    "another dropout": lambda: Net(lambda net, x: torch.dropout(x.relu(), 0.4, net.training)),
    "another activation": lambda: InSequence(nn.ReLU6(), nn.Dropout(0.4)),
    "no dropout": lambda: InSequence(nn.ReLU(), nn.Dropout(0.0)),
    "read after dropout": lambda: Net(lambda net, x: drop(net, x.relu()) + x.relu()),
    "read beside dropout": lambda: Net(lambda net, x: (lambda h: drop(net, h) + h)(x.relu())),
    "dropped twice": lambda: Net(dropped_twice),
    "dropout of the halo": lambda: Net(lambda net, x: drop(net, x.relu()) * 2.0),
    "dropout in evaluation": lambda: KeepsRows(lambda net, x: net.drop(net.act(x))),
    "random numbers in between": lambda: Net(draw_in_between),
}


@pytest.fixture
def calls(monkeypatch):
    """Return a list with an entry for each call of relu_dropout."""
    found = []
    original = rewrite.relu_dropout
    monkeypatch.setattr(rewrite, "relu_dropout", lambda *args: found.append(1) or original(*args))
    return found


def train(model, data, apart=False, whole=False, layout="fused"):
    """Train for some steps; return losses, weights and histories, and the state of the generator.

    Args:
        apart: One function after the other, as for any method of the user.
    """
    if apart:
        model.push_and_pull = lambda *args, **kwargs: gas.ScalableGNN.push_and_pull(
            model, *args, **kwargs
        )
    graph = gas.cluster(data, 4, model=model, log=False)
    model.refresh(graph)
    loader = gas.SubgraphLoader(graph, batch_size=2, layout=layout, log=False)
    batches = gas.training.FullBatch(graph) if whole else loader
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = [gas.train_epoch(model, batches, optimizer, full_batch=whole) for _ in range(2)]
    tensors = [*model.state_dict().values(), *(history.emb for history in model.histories)]
    return [torch.tensor(losses), *tensors, torch.get_rng_state()]


def make(make_net):
    torch.manual_seed(0)
    data = random_graph()
    return gas.to_scalable(make_net(), data), data


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_training_in_one_pass_is_the_same(name, whole, calls):
    found = train(*make(IN_ONE_PASS[name]), whole=whole)
    assert len(calls) == 2 * 2 * (1 if whole else 2)
    expected = train(*make(IN_ONE_PASS[name]), apart=True, whole=whole)
    assert len(calls) == 2 * 2 * (1 if whole else 2)
    tolerance = 1e-5 if name in JOINS_NORM else 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", APART)
def test_what_one_pass_would_change_stays_as_it_is(name, calls):
    found = train(*make(APART[name]))
    expected = train(*make(APART[name]), apart=True)
    assert not calls
    assert all(map(torch.equal, found, expected))


def test_a_layout_whose_halo_is_dropped_too_stays_as_it_is(calls):
    train(*make(IN_ONE_PASS["GraphSAGE"]), layout="edge_index")
    assert not calls


def hook(*args):
    return None


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.act.register_forward_hook(hook),
        lambda net: net.drop.register_forward_pre_hook(hook),
        lambda net: net.act.register_full_backward_hook(hook),
        lambda net: net.register_forward_hook(hook),
        lambda net: setattr(net, "act", nn.ELU()),
        lambda net: setattr(net.drop, "p", 0.0),
        lambda net: setattr(net.drop, "p", 1.0),
    ],
)
def test_layers_that_are_changed_are_called_one_after_the_other(change, calls):
    model, data = make(IN_ONE_PASS["modules"])
    train(model, data)
    assert calls
    calls.clear()
    other = copy.deepcopy(model)
    for each in (model, other):
        change(each.net)
    found, expected = train(model, data), train(other, data, apart=True)
    assert not calls
    assert all(map(torch.equal, found, expected))


def test_the_probability_may_change(calls, monkeypatch):
    made, original = [], rewrite.drop_in_one_pass
    monkeypatch.setattr(
        gas.convert.model, "drop_in_one_pass", lambda *args: made.append(1) or original(*args)
    )
    model, data = make(IN_ONE_PASS["modules"])
    train(model, data)
    assert len(made) == 1  # Not for each mini-batch.
    other = copy.deepcopy(model)
    for each in (model, other):
        each.net.drop.p = 0.8
    calls.clear()
    found, expected = train(model, data), train(other, data, apart=True)
    assert len(calls) == 2 * 2 * 2
    assert len(made) == 2
    assert all(map(torch.equal, found, expected))


def test_one_of_two_layers_may_be_changed(calls):
    model, data = make(IN_ONE_PASS["modules"])
    model.net.act2 = nn.ReLU()
    node = [each for each in model.net.graph.nodes if each.target == "act"][1]
    node.target = "act2"
    model.net.recompile()
    model.net.act2.register_forward_hook(hook)
    train(model, data)
    assert len(calls) == 2 * 2


def test_evaluation_and_copies_after_training(calls):
    model, data = make(IN_ONE_PASS["GCN with batch norm"])
    train(model, data)
    calls.clear()
    other = pickle.loads(pickle.dumps(model))
    graph = gas.cluster(data, 4, model=model, log=False)
    assert torch.equal(model.eval().predict(graph), other.eval().predict(graph))
    gas.verify(model, graph)
    assert not calls
    assert all(map(torch.equal, train(model.train(), data), train(other.train(), data)))
    assert len(calls) == 2 * 2 * 2 * 2


def test_histories_store_the_rows_before_dropout(calls):
    model, data = make(IN_ONE_PASS["modules"])
    graph = gas.cluster(data, 4, model=model, log=False)
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, log=False)))
    model.refresh(graph)
    expected = model.histories[0].emb.clone()
    model.train()(batch)
    assert calls
    torch.testing.assert_close(model.histories[0].emb, expected)


def test_a_rate_of_numpy_and_functions_that_replace_forward():
    data = random_graph()
    net = GraphSAGE(5, 8, 2, 3, dropout=np.float64(0.5))
    model = gas.to_scalable(net, data).train()
    graph = gas.cluster(data, 4, model=model, method="random", log=False)
    model.refresh(graph)
    batch = next(iter(gas.SubgraphLoader(graph, batch_size=2, log=False)))
    model(batch).sum().backward()
    other = gas.to_scalable(Net(lambda net, x: net.drop(net.act(x))), data).train()
    assert rewrite.dropout_rates(other.net, rewrite.find_relu_dropouts(other.net))
    other.net.act.forward = torch.tanh
    assert not rewrite.dropout_rates(other.net, rewrite.find_relu_dropouts(other.net))
