"""Dropout of edges, and what else a module does in training alone."""

import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from comparisons import TutorialConv, check, of_x
from conftest import random_graph
from torch import nn
from torch_geometric import utils
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import dropout_edge

import gas

LAYERS = {
    "SAGE": pyg.SAGEConv,
    "GCN": pyg.GCNConv,
    "GAT": pyg.GATConv,
    "GATv2": pyg.GATv2Conv,
    "an own one": TutorialConv,
}


class Drops(nn.Module):
    """Drops edges once for both layers, or for the first alone."""

    def __init__(self, layer, p=0.5, twice=True, branches=False):
        super().__init__()
        self.conv1, self.conv2 = layer(5, 8), layer(8, 3)
        self.p, self.twice, self.branches = p, twice, branches

    def forward(self, x, edge_index):
        kept = edge_index
        if not self.branches:
            kept, _ = dropout_edge(edge_index, p=self.p, training=self.training)
        elif self.training:
            kept, _ = utils.dropout_edge(edge_index, self.p)
        x = self.conv1(x, kept).relu()
        return self.conv2(x, kept if self.twice else edge_index)


def sorted_graph():
    """Return a graph whose edges are in the order that mini-batches have them in."""
    data = random_graph(dtype=torch.float64)
    src, dst = torch.unique(data.edge_index.flip(0), dim=1).flip(0)
    data.edge_index = torch.stack([src, dst])
    return data


def one_batch(net, data):
    """Return a converted module, and a mini-batch of the whole graph, in the graph's order."""
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 1, model=model, log=False)
    assert graph.perm.equal(torch.arange(60))
    (batch,) = gas.SubgraphLoader(graph, log=False)
    return model, batch


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_drops_nothing(name, twice, branches):
    model, _, _ = check(Drops(LAYERS[name], 0.5, twice, branches), random_graph(), of_x)
    assert "dropout" not in str(model)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", ["SAGE", "GAT"])
def test_training_drops_the_edges_that_the_module_drops(name, twice, branches):
    data = sorted_graph()
    net = Drops(LAYERS[name], 0.3, twice, branches).double()
    model, batch = one_batch(net, data)
    seen = set()
    for seed in range(5):
        torch.manual_seed(seed)
        expected = net(data.x, data.edge_index)
        torch.manual_seed(seed)
        out = model(batch)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        seen.add(out.detach().sum().item())
    assert len(seen) == 5


def test_gradients():
    data = sorted_graph()
    net = Drops(pyg.SAGEConv, 0.3).double()
    model, batch = one_batch(net, data)
    gradients = []
    for call in (lambda: model(batch), lambda: net(data.x, data.edge_index)):
        torch.manual_seed(3)
        net.zero_grad()
        call().square().mean().backward()
        gradients.append([weight.grad.clone() for weight in net.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_weights_of_edges_are_dropped_with_them():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = pyg.GraphConv(5, 8), pyg.GATConv(8, 3, edge_dim=1)

        def forward(self, x, edge_index, edge_weight):
            edge_index, mask = dropout_edge(edge_index, 0.4, training=self.training)
            edge_weight = edge_weight[mask]
            x = self.conv1(x, edge_index, edge_weight).relu()
            return self.conv2(x, edge_index, edge_weight[:, None])

    data = sorted_graph()
    data.edge_weight = torch.rand(data.num_edges, dtype=torch.float64)
    net = Weighted().double()
    model, batch = one_batch(net, data)
    torch.manual_seed(0)
    expected = net(data.x, data.edge_index, data.edge_weight)
    torch.manual_seed(0)
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)
    check(net, data, lambda net, data: net(data.x, data.edge_index, data.edge_weight))


@pytest.mark.filterwarnings("ignore:.*dropout_adj.*is deprecated")
@pytest.mark.parametrize("is_weighted", [False, True])
def test_dropout_adj(is_weighted):
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = pyg.GraphConv(5, 8), pyg.GraphConv(8, 3)

        def forward(self, x, edge_index, edge_weight=None):
            edge_index, edge_weight = utils.dropout_adj(
                edge_index, edge_weight, p=0.4, training=self.training
            )
            x = self.conv1(x, edge_index, edge_weight).relu()
            return self.conv2(x, edge_index, edge_weight)

    data = sorted_graph()
    if is_weighted:
        data.edge_weight = torch.rand(data.num_edges, dtype=torch.float64)
    net = Old().double()
    model, batch = one_batch(net, data)
    torch.manual_seed(0)
    expected = net(data.x, data.edge_index, data.get("edge_weight"))
    torch.manual_seed(0)
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)


class BySources(TutorialConv):
    """Normalises by the number of edges out of a node."""

    def forward(self, x, edge_index):
        edge_index, _ = utils.add_self_loops(edge_index, num_nodes=x.size(0))
        scale = utils.degree(edge_index[0], x.size(0), dtype=x.dtype).pow(-0.5)
        norm = scale[edge_index[0]] * scale[edge_index[1]]
        return self.propagate(edge_index, x=self.lin(x), norm=norm) + self.bias


@pytest.mark.parametrize("layer", [pyg.GCNConv, TutorialConv, BySources])
def test_normalised_weights_keep_their_mean(layer):
    data = sorted_graph()
    model, batch = one_batch(OneLayer(layer).double(), data)
    with torch.no_grad():
        outs = torch.stack([model(batch) for _ in range(4000)])
        error = (outs.mean(0) - model.eval()(batch)).abs()
    spread = outs.std(0) / 4000**0.5
    assert bool((error <= 6 * spread + 1e-12).all())
    assert float(outs.std(0).max()) > 0.1


class OneLayer(nn.Module):
    """A linear model, whose mean over masks is known."""

    def __init__(self, layer):
        super().__init__()
        self.conv = layer(5, 3)

    def forward(self, x, edge_index):
        return self.conv(x, dropout_edge(edge_index, p=0.5, training=self.training)[0])


def test_mini_batches_train():
    data = random_graph()
    model = gas.to_scalable(Drops(pyg.GATConv, 0.2), data)
    graph = gas.cluster(data, 4, model=model, log=False)
    model.refresh(graph)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(60):
        for batch in gas.SubgraphLoader(graph, batch_size=2, shuffle=True, log=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    assert gas.verify(model, graph)


# Other branches in training -----------------------------------------------------------------------


class Branches(nn.Module):
    """Drops features in branches that only training takes."""

    def __init__(self, before, after):
        super().__init__()
        self.conv1, self.conv2 = pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)
        self.before, self.after = before, after

    def forward(self, x, edge_index):
        if self.training:
            x = F.dropout(x, p=self.before)
        x = self.conv1(x, edge_index).relu()
        if self.training:
            x = torch.dropout(F.dropout(x, self.after, True), self.after, True)
        return self.conv2(x, edge_index)


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_dropout_in_training_alone(before, after):
    net = Branches(before, after)
    check(net, random_graph(), of_x)
    data = sorted_graph()
    model, batch = one_batch(net.double().train(), data)
    out = model(batch)  # All rows are dropped, or none.
    torch.testing.assert_close(out, net(data.x, data.edge_index), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(out, model.eval()(batch))


def test_half_of_the_features_are_dropped_in_training():
    data = sorted_graph()
    model, batch = one_batch(Branches(0.5, 0.0).double().train(), data)
    a, b = model(batch), model(batch)
    assert not torch.allclose(a, b)
    assert model.eval()(batch).equal(model(batch))


class DropsWeights(nn.Module):
    """Drops weights that it computes of the edges alone."""

    def __init__(self, p, how):
        super().__init__()
        self.conv1, self.conv2 = pyg.GraphConv(5, 8), pyg.GraphConv(8, 3)
        self.p, self.how = p, how

    def forward(self, x, edge_index):
        if self.how == "gcn_norm":
            edge_index, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        else:
            count = utils.degree(edge_index[1], x.size(0), dtype=x.dtype)
            weight = 1 / count[edge_index[1]]
        if self.how != "in a branch" or self.training:
            given = {} if self.how == "in a branch" else {"training": self.training}
            weight = F.dropout(weight, self.p, **given)
        x = self.conv1(x, edge_index, weight).relu()
        return self.conv2(x, edge_index, weight)


@pytest.mark.parametrize("how", ["gcn_norm", "degree", "in a branch"])
def test_weights_that_follow_from_edges_are_dropped_in_training(how):
    data = sorted_graph()
    check(DropsWeights(0.5, how), random_graph(), of_x)
    net = DropsWeights(1.0, how).double().train()
    model, batch = one_batch(net, data)
    out = model(batch)
    torch.testing.assert_close(out, net(data.x, data.edge_index), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(out, model.eval()(batch))
    model, batch = one_batch(DropsWeights(0.5, how).double().train(), data)
    assert not torch.allclose(model(batch), model(batch))


class DropsOfMatrix(nn.Module):
    """Multiplies by a matrix of the edges that are left, self-loops among them."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x, edge_index):
        kept, _ = dropout_edge(edge_index, p=0.5, training=self.training)
        ones = torch.ones(kept.size(1), dtype=x.dtype)
        adj_t = torch.sparse_coo_tensor(kept.flip(0), ones, (x.size(0), x.size(0)))
        return adj_t @ self.lin(x)


def test_self_loops_are_dropped_unless_they_are_added_afterwards():
    data = sorted_graph()
    loops = torch.arange(60).expand(2, -1)
    src, dst = torch.unique(torch.cat([data.edge_index, loops], 1).flip(0), dim=1).flip(0)
    data.edge_index = torch.stack([src, dst])
    net = DropsOfMatrix().double().train()
    model, batch = one_batch(net, data)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = net(data.x, data.edge_index)
        torch.manual_seed(seed)
        torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)


def test_dropout_that_is_switched_off():
    class Off(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.SAGEConv(5, 3)

        def forward(self, x, edge_index):
            edge_index, _ = dropout_edge(edge_index, training=False)
            if self.training:
                x = F.dropout(x, 0.5, training=False)
            return self.conv(x, edge_index)

    model, batch = one_batch(Off().double().train(), sorted_graph())
    assert model(batch).equal(model.eval()(batch))


@pytest.mark.parametrize(
    "source",
    [
        random.random, lambda: float(torch.rand(())), lambda: float(torch.normal(3.0, 1.0, (1,))),
        random.Random(0), np.random.default_rng(0), np.random.RandomState(0),
    ],
)  # fmt: skip
def test_layers_that_are_skipped_at_random_are_refused(source):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = pyg.SAGEConv(5, 5), pyg.SAGEConv(5, 3)
            self.source = source

        def forward(self, x, edge_index):
            draw = getattr(self.source, "random", self.source)
            if not (self.training and draw() < 1e-9):  # Not skipped while it is converted.
                x = x + self.conv1(x, edge_index)
            return self.conv2(x, edge_index)

    with pytest.raises(ValueError, match="it draws random numbers in a way"):
        gas.to_scalable(Skips(), random_graph())
    for draw in (lambda: np.random.rand(), lambda: random.random()):  # These are followed.
        net = Skips()
        net.source = draw
        assert len(gas.to_scalable(net, random_graph()).histories) == 1


class DropsInPairs(pyg.SAGEConv):
    """A layer that drops edges by itself."""

    def forward(self, x, edge_index):
        kept, _ = dropout_edge(edge_index, force_undirected=True, training=self.training)
        return super().forward(x, kept)


def test_layers_that_drop_both_directions_are_refused():
    net = pyg.Sequential("x, edge_index", [(DropsInPairs(5, 3), "x, edge_index -> x")])
    with pytest.raises(ValueError, match="leave out 'force_undirected'"):
        gas.to_scalable(net, random_graph())
    assert dropout_edge(torch.zeros(2, 9, dtype=torch.long), 0.0)[0].size(1) == 9


def test_threads_convert_at_once():
    """Functions of PyTorch and PyG are replaced while a module is traced."""
    before = (isinstance, torch.zeros, torch.sparse_coo_tensor, dropout_edge.__code__)
    data, errors = random_graph(), []

    def convert():
        try:
            for _ in range(3):
                torch.rand(3)
                gas.to_scalable(Drops(pyg.SAGEConv), data)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=convert) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    after = (isinstance, torch.zeros, torch.sparse_coo_tensor, dropout_edge.__code__)
    assert all(a is b for a, b in zip(before, after, strict=True))


# Findings of a review -----------------------------------------------------------------------------

WEIGHTS = {
    "of the ends": lambda all, left, mask, n, w: (left[0] % 3).to(w.dtype) + w[mask],
    "of self-loops": lambda all, left, mask, n, w: (left[0] == left[1]).to(w.dtype) + 0.5,
    "of all degrees": lambda all, left, mask, n, w: (1 / utils.degree(all[1], n, w.dtype))[left[1]],
    "of the attribute": lambda all, left, mask, n, w: torch.exp(-w[mask]),
}


class WeighsLeft(nn.Module):
    def __init__(self, weigh):
        super().__init__()
        self.conv1, self.conv2, self.weigh = pyg.GraphConv(5, 8), pyg.SAGEConv(8, 3), weigh

    def forward(self, x, edge_index, edge_weight):
        left, mask = dropout_edge(edge_index, p=0.5, training=self.training)
        weight = self.weigh(edge_index, left, mask, x.size(0), edge_weight)
        return self.conv2(self.conv1(x, left, weight).relu(), left)


def weighted_graph():
    data = sorted_graph()
    data.edge_weight = torch.rand(data.num_edges, dtype=torch.float64)
    return data


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_single_edges_are_not_scaled(name):
    data = weighted_graph()
    net = WeighsLeft(WEIGHTS[name]).double()
    model, batch = one_batch(net, data)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = net(data.x, data.edge_index, data.edge_weight)
        torch.manual_seed(seed)
        torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "weigh",
    [
        lambda all, left, mask, n, w: utils.degree(left[0], n, w.dtype).log1p()[left[0]],
        lambda all, left, mask, n, w: utils.degree(left[1], n, w.dtype)[left[1]],
    ],
)
def test_other_sums_of_the_edges_that_are_left_are_refused(weigh):
    with pytest.raises(ValueError, match="compute it of all edges, before dropout_edge"):
        gas.to_scalable(WeighsLeft(weigh).double(), weighted_graph())


class TakesAllEdges(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.GraphConv(5, 3)

    def forward(self, x, edge_index):
        left, _ = dropout_edge(edge_index, training=self.training)
        count = utils.degree(left[1], x.size(0), x.dtype).clamp(min=1)
        return self.conv(x, edge_index, (1 / count)[edge_index[1]])


def test_layers_of_all_edges_and_of_those_left_are_refused():
    with pytest.raises(ValueError, match="give it one or the other"):
        gas.to_scalable(TakesAllEdges(), random_graph())


class DropsItself(pyg.GCNConv):
    """A layer that normalises, and drops edges before it does."""

    def forward(self, x, edge_index, edge_weight=None):
        edge_index, mask = dropout_edge(edge_index, 0.5, training=self.training)
        if edge_weight is not None:
            edge_weight = edge_weight[mask]
        return super().forward(x, edge_index, edge_weight)


def test_layers_that_drop_and_normalise_keep_their_mean():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = DropsItself(5, 3)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    model, batch = one_batch(One().double(), sorted_graph())
    with torch.no_grad():
        outs = torch.stack([model(batch) for _ in range(3000)])
        error = (outs.mean(0) - model.eval()(batch)).abs()
    assert bool((error <= 6 * outs.std(0) / 3000**0.5 + 1e-12).all())
    assert float(outs.std(0).max()) > 0.05


class Switches(nn.Module):
    """Calls modules and functions in one mode with other arguments than in the other."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.drop = pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3), nn.Dropout(1.0)

    def forward(self, x, edge_index):
        if self.training:
            left, _ = dropout_edge(edge_index, 0.5)
            x = self.drop(x)
        else:
            left, _ = dropout_edge(edge_index, 0.5, training=False)
        x = self.conv1(x, left).relu()
        return self.conv2(F.dropout(torch.ones_like(x), 0.0, self.training) * x, left)


def test_modes_that_call_the_same_functions_with_other_arguments():
    data = sorted_graph()
    net = Switches().double()
    check(net, random_graph(), of_x)
    model, batch = one_batch(net.train(), data)
    torch.manual_seed(0)
    expected = net(data.x, data.edge_index)
    torch.manual_seed(0)
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)


def test_rows_of_ones_may_be_dropped():
    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.GraphConv(5, 3)

        def forward(self, x, edge_index):
            ones = torch.ones(edge_index.size(1), dtype=x.dtype)
            return self.conv(x, edge_index, F.dropout(ones, 1.0, self.training))

    data = sorted_graph()
    net = Ones().double()
    check(net, random_graph(), of_x)
    model, batch = one_batch(net.train(), data)
    torch.testing.assert_close(model(batch), net(data.x, data.edge_index), rtol=1e-10, atol=1e-10)


def test_attributes_of_edges_under_any_name_are_dropped_with_them():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.GraphConv(5, 3)

        def forward(self, x, edge_index, rel):
            edge_index, mask = dropout_edge(edge_index, 0.5, training=self.training)
            return self.conv(x, edge_index, rel[mask])

    data = weighted_graph()
    data.rel, data.edge_weight = data.edge_weight, None
    net = Named().double()
    model, batch = one_batch(net, data)
    torch.manual_seed(0)
    expected = net(data.x, data.edge_index, data.rel)
    torch.manual_seed(0)
    torch.testing.assert_close(model(batch), expected, rtol=1e-10, atol=1e-10)


def test_calls_of_another_thread_are_not_the_models():
    data, stop = random_graph(), threading.Event()

    def drop():
        while not stop.is_set():
            dropout_edge(data.edge_index, force_undirected=True)

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for _ in range(3):
            gas.to_scalable(pyg.GraphSAGE(data.num_features, 4, 2, 3), data)
    finally:
        stop.set()
        thread.join()
