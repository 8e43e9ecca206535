"""Modules as users of PyG write them, and the changes that refusals name."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from comparisons import Net, check, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_self_loops,
    coalesce,
    degree,
    scatter,
    softmax,
    to_dense_adj,
    to_undirected,
)

import gas


def net_of(function, names="x, edge_index", **modules):
    """Return a module whose forward is ``function(self, ...)``."""
    space = {"function": function}
    exec(f"def forward(self, {names}): return function(self, {names})", space)
    net = type("Shape", (Net,), {"forward": space["forward"]})()
    for name, module in modules.items():
        setattr(net, name, module)
    return net


def both(net, x, *edges):
    return net.conv2(net.conv1(x, *edges).relu(), *edges)


def edited(edit):
    """Return a forward that edits what the first layer gives."""

    def forward(net, x, edge_index):
        hidden = net.conv1(x, edge_index)
        edit(hidden, x)
        return net.conv2(hidden, edge_index)

    return forward


def set_column(hidden, x):
    hidden[:, 0] = hidden[:, 1] * 2
    hidden[:, 2:4] += 1.0


def set_negative(hidden, x):
    hidden[hidden < 0] = 0.0


def set_rows(hidden, x):
    hidden[x[:, 0] > 0] = 1.0


def change_rows(hidden, x):
    mask = x[:, 0] > 0
    hidden[mask] = hidden[mask].relu() * 2


@pytest.mark.parametrize("edit", [set_column, set_negative, set_rows, change_rows])
def test_assignments_to_rows_of_nodes(edit):
    check(net_of(edited(edit)), random_graph(), of_x)


def reuse_labels(net, x, edge_index, y, train_mask):
    labels = torch.zeros(x.size(0), 3, dtype=x.dtype)
    labels[train_mask] = F.one_hot(y[train_mask], 3).to(x.dtype)
    return net.conv3(torch.cat([x, labels], dim=-1), edge_index)


def test_labels_of_a_mask_are_features():
    data = random_graph()
    data.y, data.train_mask = torch.randint(3, (data.num_nodes,)), torch.rand(data.num_nodes) > 0.5
    net = net_of(reuse_labels, "x, edge_index, y, train_mask", conv3=pyg.GCNConv(8, 3))
    check(net, data, lambda net, data: net(data.x, data.edge_index, data.y, data.train_mask))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda hidden, x: hidden[:, :2].__setitem__(slice(None), 0.0), "is changed in place"),
        (lambda hidden, x: hidden.__setitem__(0, 0.0), "isn't exact on mini-batches"),
        (lambda hidden, x: hidden.__setitem__(slice(0, 9), 0.0), "isn't exact on mini-batches"),
    ],
    ids=["a view", "a row", "first rows"],
)
def test_assignments_that_are_refused(edit, reason):
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(net_of(edited(edit)), random_graph())


def change_in_one_mode(change, training):
    def forward(net, x, edge_index):
        x = net.conv1(x, edge_index)
        if net.training == training:
            change(x)
        return net.conv2(x, edge_index)

    return forward


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "change",
    [lambda x: x.__setitem__((slice(None), 0), 0.0), lambda x: x.relu_()],
    ids=["assigned", "in place"],
)
def test_changes_in_one_mode_are_of_that_mode(change, training):
    net = net_of(change_in_one_mode(change, training)).double()
    data = random_graph()
    data.x = data.x.double()
    model = gas.to_scalable(net, data)
    (batch,) = gas.SubgraphLoader(gas.cluster(data, 1, model=model, log=False), log=False)
    for mode in (True, False):
        expected = net.train(mode)(data.x, data.edge_index)
        torch.testing.assert_close(
            model.train(mode)(batch), expected[batch.n_id], rtol=0, atol=1e-10
        )


def twice(net, x, edge_index):
    number = torch.rand(1) if net.training else 1.0
    x = net.conv1(x, edge_index)
    x = x * 2 if number < 0.5 else x
    return net.conv2(x * 3 if number < 0.5 else x, edge_index)


def sized(net, x, edge_index):
    x = net.conv1(x, edge_index)
    keep = torch.rand(size=(8,)) < 0.5 if net.training else 1.0
    return net.conv2(x * keep, edge_index)


def chunked(net, x, edge_index):
    x = net.conv1(x, edge_index)
    if net.training:
        x.chunk(2, -1)[0].zero_()
    return net.conv2(x, edge_index)


def sliced(net, x, edge_index):
    x = net.conv1(x, edge_index)
    if net.training:
        x[:, :2].mul_(2.0)
    return net.conv2(x, edge_index)


@pytest.mark.parametrize("forward", [twice, sized, chunked, sliced])
def test_what_would_be_wrong_in_training_alone_is_refused(forward):
    with pytest.raises(
        ValueError,
        match="random numbers in a way|is changed in place|is a view and is being modified inplace",
    ):
        gas.to_scalable(net_of(forward), random_graph())


def statistics_of_some(net, x, edge_index):
    x = net.conv1(x, edge_index).clone()
    mask = x[:, 0] > 0
    x[mask] = net.norm(x[mask])
    return net.conv2(x, edge_index)


def test_statistics_of_some_rows_are_refused():
    net = net_of(statistics_of_some, norm=nn.BatchNorm1d(8))
    with pytest.raises(ValueError, match="'getitem_1'"):
        gas.to_scalable(net, random_graph())


def with_loops(net, x, edge_index):
    return both(net, x, add_self_loops(edge_index)[0])


def undirected(net, x, edge_index):
    return both(net, x, to_undirected(coalesce(edge_index, num_nodes=x.size(0))))


def normalised(net, x, edge_index):
    edge_index, weight = gcn_norm(edge_index, dtype=x.dtype)
    weight[weight > 0.9] = 0.5
    return net.weighted2(net.weighted1(x, edge_index, weight).relu(), edge_index, weight)


def attentive(net, x, edge_index):
    src, dst = edge_index
    score = softmax(F.leaky_relu(x[src].sum(-1) + x[dst].mean(-1)), dst)  # No number of nodes.
    hidden = scatter(score.view(-1, 1) * x[src], dst, dim=0, dim_size=x.size(0))
    return both(net, hidden, edge_index)


@pytest.mark.parametrize("function", [with_loops, undirected, normalised, attentive])
def test_functions_that_count_nodes_by_themselves(function):
    plain = {"normalize": False}
    layers = {"weighted1": pyg.GCNConv(5, 8, **plain), "weighted2": pyg.GCNConv(8, 3, **plain)}
    check(net_of(function, **layers), random_graph(), of_x)  # Its last nodes are isolated.


def test_degrees_by_a_matrix_of_the_edges():
    def forward(net, x, edge_index):
        size, ones = x.size(0), torch.ones(edge_index.size(1), dtype=x.dtype)
        matrix = torch.sparse_coo_tensor(edge_index.flip(0), ones, (size, size))
        sums = torch.sparse.sum(matrix, 1).to_dense().clamp(min=1)
        return net.conv2((matrix @ net.lin(x)) / sums.view(-1, 1), edge_index)

    check(net_of(forward, lin=nn.Linear(5, 8)), random_graph(), of_x)


def test_weights_that_are_computed_of_attributes():
    def forward(net, x, edge_index, edge_attr):
        hidden = net.conv1(x, edge_index, edge_attr.squeeze(-1)).relu()
        return net.conv2(hidden, edge_index, edge_attr.view(-1))

    data = random_graph()
    data.edge_attr = torch.rand(data.num_edges, 1)
    net = net_of(forward, "x, edge_index, edge_attr")
    check(net, data, lambda net, data: net(data.x, data.edge_index, data.edge_attr))


def test_outputs_of_several_types():
    def forward(net, x, edge_index):
        out = both(net, x, edge_index)
        return {"out": out, "label": out.argmax(dim=-1), "is_sure": out.amax(dim=-1) > 0.5}

    _, _, out = check(net_of(forward), random_graph(), of_x)
    assert [rows.dtype for rows in out.values()] == [torch.float64, torch.int64, torch.bool]
    for end in (torch.argmax, lambda out, dim: out > 0):
        check(net_of(lambda *args, end=end: end(both(*args), dim=-1)), random_graph(), of_x)


@pytest.mark.parametrize(
    "layer",
    [
        pyg.GATConv(5, 3, heads=2, dropout=0.5), pyg.GATv2Conv(5, 3), pyg.TransformerConv(5, 3),
        pyg.APPNP(3, 0.1), pyg.TAGConv(5, 3), pyg.ChebConv(5, 3, K=3),
        pyg.ARMAConv(5, 3, num_stacks=2, num_layers=2), pyg.SuperGATConv(5, 3),
    ],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_a_layer_of_pyg_alone(layer):
    model, _, _ = check(layer, random_graph(), of_x)
    assert repr(model).startswith(type(layer).__name__)


def test_a_layer_alone_is_saved_under_its_own_names(tmp_path):
    net, data = pyg.GATConv(5, 3), random_graph()
    model = gas.to_scalable(net, data)
    gas.save(tmp_path, model)
    other = pyg.GATConv(5, 3)
    gas.load(tmp_path, other)
    assert all(map(torch.equal, net.state_dict().values(), other.state_dict().values()))


# Branches on self.training, and layers that are skipped at random.


class Skipping(nn.Module):
    """Skips layers at random, as stochastic depth does."""

    def __init__(self, end="add"):
        super().__init__()
        self.start, self.end = nn.Linear(5, 8), end
        self.convs = nn.ModuleList(pyg.GCNConv(8, 8) for _ in range(3))
        self.lins = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, edge_index):
        x = out = self.start(x)
        for conv, lin in zip(self.convs, self.lins, strict=True):
            if self.end == "add":
                if self.training and torch.rand(1) < 0.3:
                    continue
                x = x + conv(x, edge_index).relu()
            elif self.end == "sum":
                if self.training and torch.rand(1).item() < 0.3:
                    continue
                x = conv(x, edge_index).relu()
                out = out + x
            elif not self.training or torch.rand(()) > 0.3:
                x = conv(x, edge_index).relu()
            else:
                x = lin(x)
        return out if self.end == "sum" else x


class Masked(Net):
    """Has one mask for several layers, as RevGNN does."""

    def forward(self, x, edge_index):
        mask = None
        if self.training:
            mask = torch.zeros_like(x).bernoulli_(0.5).requires_grad_(False) / 0.5
        hidden = self.conv1(x if mask is None else x * mask, edge_index)
        if self.training:
            hidden = 0.5 * hidden
        return self.conv2(hidden.relu(), edge_index)


@pytest.mark.parametrize("net", [*map(Skipping, ("add", "sum", "else")), Masked()])
def test_training_is_that_of_the_module(net):
    model, _, _ = check(net, random_graph(), of_x)
    assert all("choose" not in line for line in repr(model).splitlines())  # No noise is stored.
    data = random_graph()
    data.x = data.x.double()
    model = gas.to_scalable(net.double(), data)
    graph = gas.cluster(data, 1, model=model, log=False)
    (batch,) = gas.SubgraphLoader(graph, log=False)
    assert torch.equal(graph.perm, torch.arange(data.num_nodes))
    outputs = []
    for seed in range(20):
        rows = []
        for each in (net.train(), model.train()):
            torch.manual_seed(seed)
            rows.append(net(data.x, data.edge_index) if each is net else model(batch))
        torch.testing.assert_close(*rows, rtol=1e-10, atol=1e-10)
        outputs.append(rows[0])
    assert not torch.equal(outputs[0], outputs[-1])


def test_parts_of_one_mode():
    class MLP(Net):
        """Passes messages in evaluation alone, as PMLP does."""

        def forward(self, x, edge_index):
            x = self.conv1.lin(x)
            if not self.training:
                x = self.mean(x, edge_index)
            return self.conv2.lin(x.relu())

    net = MLP()
    net.mean = pyg.SimpleConv(aggr="mean", combine_root="self_loop")
    model, graph, _ = check(net, random_graph(), of_x)
    (batch,) = gas.SubgraphLoader(graph, batch_size=4, log=False)
    x = batch.data.x[: batch.batch_size]
    torch.testing.assert_close(model.train()(batch), net.train()(x, None))


def test_noise_in_training_is_drawn_for_all_rows_of_a_batch():
    def forward(net, x, edge_index):
        hidden = net.conv1(x, edge_index)
        if net.training:
            hidden = hidden + torch.randn_like(hidden)
        return net.conv2(hidden, edge_index)

    model, _, _ = check(net_of(forward), random_graph(), of_x)
    assert "history 0: 'conv1'" in repr(model)


def test_weights_that_appnp_drops():
    data = random_graph()
    net = net_of(lambda net, x, edge_index: net.end(net.lin(x), edge_index), lin=nn.Linear(5, 3))
    net.end = pyg.APPNP(1, 0.0, dropout=0.5)
    model, graph, expected = check(net, data, of_x)
    (batch,) = gas.SubgraphLoader(graph, batch_size=4, log=False)
    model.train()
    with torch.no_grad():
        found = torch.stack([model(batch) for _ in range(3000)])
        torch.manual_seed(0)
        known = torch.stack([net.train()(data.x.double(), data.edge_index) for _ in range(3000)])
    order = graph.perm[batch.n_id[: batch.batch_size]]
    torch.testing.assert_close(found.mean(0), expected[order], rtol=0.1, atol=0.05)
    torch.testing.assert_close(found.std(0), known.std(0)[order], rtol=0.2, atol=0.02)


# Refusals, and what they say to change.


def test_matrices_that_a_module_keeps_become_values_of_edges():
    data = random_graph()
    data.edge_index = coalesce(data.edge_index)
    data.edge_attr = torch.rand(data.num_edges, 2).double()
    size = data.num_nodes
    dense = [
        to_dense_adj(data.edge_index, None, value, size)[0].t()
        for value in data.edge_attr.unbind(1)
    ]

    def kept(net, x):
        return net.dense[-1] @ net.lin(net.dense[0] @ x)

    def given(net, x, edge_index, edge_attr):
        first, second = (
            torch.sparse_coo_tensor(edge_index.flip(0), edge_attr[:, at], (x.size(0), x.size(0)))
            for at in (0, 1)
        )
        return second @ net.lin(first @ x)

    lin = nn.Linear(5, 3).double()
    for matrices, cure in ((dense[:1], "set data.adj_t to it"), (dense, "a column of values")):
        net = net_of(kept, "x", lin=lin, dense=matrices)
        for position, matrix in enumerate(matrices):
            net.register_buffer(f"matrix_{position}", matrix)
        with pytest.raises(ValueError, match=cure):
            gas.to_scalable(net, data)
    expected = kept(net, data.x.double())

    def call(net, data):
        return net(data.x, data.edge_index, data.edge_attr)

    _, _, out = check(net_of(given, "x, edge_index, edge_attr", lin=lin), data, call)
    torch.testing.assert_close(out, expected)
    data.adj_t = dense[0].to_sparse_csr()
    del data.edge_index, data.edge_attr
    with_matrix = net_of(lambda net, x, adj_t: adj_t @ net.lin(adj_t @ x), "x, adj_t", lin=lin)
    model = gas.to_scalable(with_matrix.double(), data.apply(lambda rows: rows.double(), "x"))
    graph = gas.cluster(data, 4, model=model, log=False)
    expected = kept(net_of(kept, "x", lin=lin, dense=dense[:1]), data.x)
    torch.testing.assert_close(model.predict(graph, log=False), expected)


def test_methods_of_a_matrix_are_those_of_edges():
    def transposed(net, x, adj_t):
        return adj_t.t() @ net.lin(adj_t @ x)

    def turned(net, x, edge_index):
        hidden = net.lin(net.sum(x, edge_index)) / degree(edge_index[1], x.size(0)).add(1)[:, None]
        return net.sum(hidden, edge_index.flip(0))

    data = random_graph()
    modules = {"lin": nn.Linear(5, 3), "sum": pyg.SimpleConv()}
    check(net_of(turned, **modules), data, of_x)
    size = data.num_nodes
    edges = torch.unique(data.edge_index, dim=1).flip(0)
    for weights in (torch.ones(edges.size(1)), torch.rand(edges.size(1))):
        data.adj_t = torch.sparse_coo_tensor(edges, weights, (size, size)).to_sparse_csr()
        data.edge_index = None
        net = net_of(transposed, "x, adj_t", lin=nn.Linear(5, 3))
        if bool((weights == 1).all()):
            check(net, data, lambda net, data: net(data.x, data.adj_t))
        else:
            with pytest.raises(ValueError, match="an attribute of the edges beside two lists"):
                gas.to_scalable(net, data)


@pytest.mark.parametrize("norm", [pyg.GraphNorm(8), pyg.PairNorm(), pyg.InstanceNorm(8)])
def test_statistics_of_all_nodes_become_those_of_a_node(norm):
    def forward(net, x, edge_index):
        return net.conv2(net.norm(net.conv1(x, edge_index)).relu(), edge_index)

    with pytest.raises(ValueError, match="such as BatchNorm or LayerNorm"):
        gas.to_scalable(net_of(forward, norm=norm), random_graph())
    for other in (pyg.BatchNorm(8), pyg.LayerNorm(8, mode="node")):
        check(copy.deepcopy(net_of(forward, norm=other)), random_graph(), of_x)


def test_weights_of_another_precision():
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges).double()
    net = net_of(both, "x, edge_index, edge_weight")
    with pytest.raises(
        ValueError, match=r"data.edge_weight = data.edge_weight.to\(torch.float32\)"
    ):
        gas.to_scalable(net, data)  # As PyG's layers do.
    data.edge_weight = data.edge_weight.to(torch.float32)
    check(net, data, lambda net, data: net(data.x, data.edge_index, data.edge_weight))


# Refusals, and what they tell to do instead.


@pytest.mark.parametrize("kind", [pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv])
def test_attention_weights_that_are_not_read_are_left_out(kind):
    def run(net, x, edge_index):
        x, (_, net.kept) = net.first(x, edge_index, return_attention_weights=True)
        out = net.second(x.relu(), edge_index, return_attention_weights=True)
        return out[0]

    check(net_of(run, first=kind(5, 8), second=kind(8, 3)), random_graph(), of_x)


@pytest.mark.parametrize(
    "read",
    [
        lambda out: out, lambda out: out[0] * out[1][1].sum(), lambda out: out[0] + len(out[1]),
        lambda out: torch.cat([out[0], 2 * out[1][1]]), lambda out: torch.relu(out[1][1]),
    ],
)  # fmt: skip
def test_attention_weights_that_are_read_are_refused(read):
    def run(net, x, edge_index):
        return read(net.conv(x, edge_index, return_attention_weights=True))

    net, data = net_of(run, conv=pyg.GATConv(5, 1)), random_graph()
    with pytest.raises(ValueError, match="read the weights of the module itself"):
        gas.to_scalable(net, data)
    cured = net_of(lambda net, x, edge_index: net.conv(x, edge_index), conv=net.conv)
    check(cured, data, of_x)
    data = data.apply(lambda rows: rows.double() if rows.is_floating_point() else rows)
    net.conv(data.x, data.edge_index, return_attention_weights=True)  # After training.


def clamp(net, x, edge_index):
    net.weight.clamp_(0, 0.5)
    return net.conv(x, edge_index) * net.weight


def average(net, x, edge_index):
    x = net.conv(x, edge_index)
    if net.training:
        net.weight.mul_(0.9).add_(0.1 * x.detach().mean(dim=0))
    return x * net.weight


@pytest.mark.parametrize(
    ("run", "text", "cured"),
    [
        (clamp, "in forward changes 'weight' of the module.*compute with a changed copy",
         lambda net, x, e: net.conv(x, e) * net.weight.clone().clamp_(0, 0.5)),
        (average, "register it as a buffer, and change it in place in the training loop",
         lambda net, x, e: net.conv(x, e) * net.weight),
        (lambda net, x, e: torch.vmap(lambda row: row * net.weight)(net.conv(x, e)),
         "torch.func, such as vmap", lambda net, x, e: net.conv(x, e) * net.weight),
        (lambda net, x, e: net.conv(x, e) * float(net.weight[0]), "makes a number of 'weight'",
         lambda net, x, e: net.conv(x, e) * net.weight[0]),
        (lambda net, x, e: net.gcn(x, e), "the hook before 'gcn' .GCNConv.",
         lambda net, x, e: net.gcn(2 * x, e)),
    ],
    ids=["clamp", "average", "vmap", "number", "hook"],
)  # fmt: skip
def test_what_refusals_tell_to_do_instead_converts(run, text, cured):
    def make(function):
        net = net_of(function, conv=pyg.SAGEConv(5, 3), gcn=pyg.GCNConv(5, 3))
        if function is run:
            net.gcn.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
        net.register_buffer("weight", torch.tensor([0.2, 0.7, 0.4]))
        return net

    data = random_graph()
    with pytest.raises(ValueError, match=text):
        gas.to_scalable(make(run), data)
    net = make(cured)
    model, graph, _ = check(net, data, of_x)
    net.weight.mul_(3)  # As the training loop does.
    data.x = data.x.double()
    assert torch.allclose(model.predict(graph, log=False), net(data.x, data.edge_index))


def test_numbers_of_numpy_are_numbers():
    def forward(net, x, edge_index):
        x = np.float64(0.5) * net.w[0] * net.conv1(x, edge_index) - np.float32(2)
        x = np.int64(3) - x / np.sqrt(2.0) + np.float64(x.size(1)) * x
        return np.float64(0.1) * net.conv2(x.relu(), edge_index)

    net = net_of(forward)
    net.w = nn.Parameter(torch.rand(2))
    check(net, random_graph(), of_x)


def test_numbers_of_a_module_without_parameters_are_those_of_the_features():
    class Hops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = pyg.SimpleConv(), pyg.SimpleConv()

        def forward(self, x, edge_index):
            return self.b(self.a(x, edge_index).tanh(), edge_index)

    data, net = random_graph(), Hops()
    data.x = data.x.double()
    model = gas.to_scalable(net, data)
    graph = gas.cluster(data, 4, model=model, log=False)
    expected = net(data.x, data.edge_index)
    assert torch.allclose(model.predict(graph, log=False), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("where", [torch.where, lambda mask: mask.nonzero(as_tuple=True)])
def test_rows_by_where_are_those_of_a_mask(where):
    def forward(net, x, edge_index):
        x = net.conv1(x, edge_index)
        norm = x.norm(dim=1)
        score = (norm - 0.3).clamp(min=0)
        rows = where(norm > 0)
        score[rows] = score[rows] / norm[rows]
        return net.conv2(score.unsqueeze(1) * x, edge_index)

    check(net_of(forward), random_graph(), of_x)


def test_a_layer_is_told_the_number_of_nodes():
    def forward(net, x, edge_index):
        size = (x.size(0), x.size(0))
        x = net.a(x, edge_index, size=size).relu()
        return net.b(x, edge_index, size=size)

    check(net_of(forward, a=pyg.SAGEConv(5, 8), b=pyg.GATConv(8, 3)), random_graph(), of_x)


def test_what_stands_in_for_the_forward_of_a_class_is_refused():
    class Doubled(Net):
        def __call__(self, *args):
            return 2 * super().__call__(*args)

        def forward(self, x, edge_index):
            return both(self, x, edge_index)

    net = net_of(both)
    net.forward = lambda x, edge_index: 2 * both(net, x, edge_index)
    for each in (Doubled(), net):
        with pytest.raises(ValueError, match="what is followed is the forward of its class"):
            gas.to_scalable(each, random_graph())
