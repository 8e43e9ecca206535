"""Errors of ``gas.convert``: modules that can't be followed, or aren't exact on mini-batches."""

import random
import threading

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from torch import nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import GCNNorm
from torch_geometric.utils import add_self_loops, degree, dropout_edge, scatter, to_dense_adj

import gas
from refusals import Model, load, ring


def net_of(function, names="x, edge_index", **modules):
    """Return a module whose forward is ``function(self, ...)``."""
    space = {"function": function}
    exec(f"def forward(self, {names}): return function(self, {names})", space)
    net = type("Net", (nn.Module,), {"forward": space["forward"]})()
    net.conv, net.conv2 = pyg.SAGEConv(2, 2), pyg.SAGEConv(2, 2)
    for name, module in modules.items():
        setattr(net, name, module)
    return net


def convert(function, *names, data=None, **modules):
    return gas.to_scalable(net_of(function, *names, **modules), ring() if data is None else data)


def hooked(layer):
    layer.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    return layer


class Doubled(nn.Module):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)

    def forward(self, x, edge_index):
        return x


def with_forward(function):
    net = net_of(lambda net, x, edge_index: net.conv(x, edge_index))
    net.forward = function
    return net


class BothRows(pyg.SAGEConv):
    """Gives rows of nodes and of edges, by its messages."""

    def propagate(self, edge_index, size=None, **kwargs):
        return super().propagate(edge_index, size=size, **kwargs), edge_index[0].view(-1, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=(x, x))


class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = BothRows(2, 2)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)[0]


def without_preparation():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = pyg.GCNConv(2, 2), pyg.SAGEConv(2, 2)

        def forward(self, x, edge_index):
            return self.b(self.a(x, edge_index), edge_index)

    model = gas.to_scalable(Net(), ring())
    model.predict(gas.cluster(ring(), 2, log=False), log=False)


def with_changed_list(items, change):
    net = net_of(lambda net, x, edge_index: net.conv(x, edge_index) * net.items[0])
    net.items = items
    model = gas.to_scalable(net, ring())
    change(items)
    model.predict(gas.cluster(ring(), 2, log=False), log=False)


class Named(nn.Module):
    def forward(self, x):
        return {"x": x}


def make_once(net, x, e):
    if net.made is None:
        net.made = nn.Linear(2, 2)
    return net.conv2(net.made(net.conv(x, e)), e)


class Locked(nn.Module):
    def __deepcopy__(self, memo):
        raise TypeError("a lock")


class Setting(nn.Module):
    """Sets an attribute computed of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(2))

    def forward(self, x):
        self.size = self.weight.square().sum()
        return x @ self.weight


class Anything(nn.Module):
    def forward(self, *args):
        return args[0]


class Table(pyg.MessagePassing):
    """Reads a row of each source itself."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 2))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, edge_index_j):
        return x_j * self.rows[edge_index_j]


def replaced(change, factor=lambda net: net.scale):
    net = net_of(lambda net, x, edge_index: net.conv(x * factor(net), edge_index))
    net.scale = net.scale2 = torch.ones(2)
    model = gas.to_scalable(net, ring())
    change(net)
    model.predict(gas.cluster(ring(), 2, method="random", log=False), log=False)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cluster", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.cluster = x.argmax(dim=1)
        return x


def drop_edges(function=lambda net, x, kept, mask: net.conv(x, kept), **given):
    """Convert a module that drops edges, in training alone unless more is given."""

    def forward(net, x, edge_index):
        kept, mask = dropout_edge(edge_index, p=0.5, **{"training": net.training, **given})
        return function(net, x, kept, mask)

    return convert(forward)


def half_by_half(net, x, edge_index):
    kept, _ = dropout_edge(edge_index, training=net.training)
    is_up = kept[0] < kept[1]
    return net.conv(x, kept[:, is_up]) + net.conv2(x, kept[:, ~is_up])


def both_ways(net, x, edge_index):
    src, dst = edge_index
    out = torch.zeros_like(x).index_add_(0, dst, x[src])
    return out + torch.zeros_like(x).index_add_(0, src, x[dst])


def with_loops_of_the_left(net, x, edge_index):
    kept, _ = dropout_edge(edge_index, training=net.training)
    return net.conv(x, kept) + net.conv2(x, add_self_loops(kept, num_nodes=x.size(0))[0])


def normalised_in_two_ways(net, x, edge_index):
    kept, _ = dropout_edge(edge_index, training=net.training)
    return net.a(x, kept) + net.b(x, kept)


def with_loops_beside_positive(net, x, edge_index, edge_weight):
    more, _ = add_self_loops(edge_index[:, edge_weight > 0], num_nodes=x.size(0))
    return net.conv(x, edge_index) + net.conv2(x, more)


def weighing_by_mask(net, x, edge_index):
    kept, mask = dropout_edge(edge_index, training=net.training)
    return net.weighted(x, kept, mask.float()[mask])


class DropsInPairs(pyg.SAGEConv):
    def forward(self, x, edge_index):
        kept, _ = dropout_edge(edge_index, force_undirected=True, training=self.training)
        return super().forward(x, kept)


def degrees_of_the_left(net, x, edge_index):
    kept, _ = dropout_edge(edge_index, training=net.training)
    return net.weighted(x, kept, degree(kept[1], x.size(0))[kept[1]])


def counting(net, x, edge_index):
    net.calls = getattr(net, "calls", 0) + 1
    return net.conv(x, edge_index) + torch.tensor(float(net.calls))


Foreign = type("Foreign", (type("ScalableGNN", (nn.Module,), {}),), {})


def with_kinds():
    data = ring()
    data.kind = torch.arange(data.num_edges) % 2
    return data


class Pair(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j

    def update(self, inputs, x):
        return inputs, x


def in_autocast(net, x, edge_index):
    with torch.autocast("cpu"):
        x = x * 2
    return net.conv(x, edge_index)


def constraining(net, x, edge_index):
    net.conv.lin_l.weight.data.clamp_(0)
    return net.conv(x, edge_index)


def reading_what_a_layer_sets(net, x, edge_index):
    x = net.part(net.conv(x, edge_index))
    return net.conv2(x, edge_index) / net.part.size


def drawing_by_a_generator(net, x, edge_index):
    return net.conv(x, edge_index) * net.draws[0].random()


def adding_matrices(net, x, edge_index):
    ones, size = x.new_ones(edge_index.size(1)), (x.size(0), x.size(0))
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), ones, size)
    return net.conv((adj_t + adj_t) @ x, edge_index)


def constraining_all(net, x, edge_index):
    for weight in net.conv.parameters():
        weight.data.clamp_(0)
    return net.conv(x, edge_index)


def giving_values(net, x, edge_index):
    net.conv.lin_l.weight.data = net.conv.lin_l.weight.abs()
    return net.conv(x, edge_index)


def giving_all_values(net, x, edge_index):
    for weight in net.conv.parameters():
        weight.data = torch.clone(weight)
    return net.conv(x, edge_index)


def with_kept_rows():
    def call(net, x, edge_index):
        if not net.kept:
            net.kept.append(1 + x.abs().sum(1))
        return net.conv(x / net.kept[0][:, None], edge_index)

    net = net_of(call, kept=[])
    net(ring().x, ring().edge_index)
    return gas.to_scalable(net, ring())


def assigning(net, x, edge_index):
    net.kept.cluster[0] = 1.0
    return net.conv(x * net.kept.cluster[0], edge_index)


def dropped_twice(net, x, edge_index):
    src, dst = edge_index[:, edge_index[0] > 0]
    message = F.dropout(x[src], 0.5, net.training)
    size = {"dim": 0, "dim_size": x.size(0)}
    return net.conv(scatter(message, dst, **size) + scatter(-message, dst, **size), edge_index)


def normalised_twice():
    data = ring(edge_weight=torch.ones(8))
    model = gas.to_scalable(pyg.GCN(2, 2, 2), data)
    made = model.prepare(data)
    return model.prepare(Data(made.x, made.edge_index, edge_weight=made.edge_weight))


def with_loops():
    return convert(
        lambda net, x, edge_index: net.conv(x, add_self_loops(edge_index, num_nodes=x.size(0))[0])
    )


def of_attributes():
    return gas.to_scalable(pyg.GATConv(2, 2, edge_dim=1), ring())


def unprepared_parts():
    model = gas.to_scalable(pyg.GCN(2, 2, 2), ring())
    batch, *args = next(iter(load()))
    model(batch.x, batch.adj_t, *args)


def by_signs(net, x, edge_index, edge_weight):
    dst, size = edge_index[1], {"dim": 0, "dim_size": x.size(0)}
    first = scatter(edge_weight.abs(), dst, **size)
    second = scatter(edge_weight.clamp(min=0), dst, **size)
    return net.conv(x * first[:, None] + x * second[:, None], edge_index)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def branching(net, x, edge_index):
    return net.conv(x, edge_index) if x.sum() > 0 else x


def more_in_training(net, x, edge_index):
    x = net.conv(x, edge_index)
    return (x, x.relu()) if net.training else x


def norm_in_evaluation(net, x, edge_index):
    x = net.conv(x, edge_index)
    return x if net.training else net.norm(x)


def changing_a_part(net, x, edge_index):
    x = net.conv(x, edge_index)
    if net.training:
        x[:, :1].zero_()
    return net.conv2(x, edge_index)


def comparing_twice(net, x, edge_index):
    number = torch.rand(1) if net.training else 1.0
    x = net.conv(x, edge_index) if number < 0.5 else x
    return net.conv2(x, edge_index) if number < 0.5 else x


def skipping_by_two(net, x, edge_index):
    skips = [net.training and bool(torch.rand(1) < 0.5) for _ in range(3)]
    if skips[0] and skips[2]:
        skips = [True] * 3
    x = x if skips[0] else net.conv(x, edge_index)
    x = x if skips[1] else x.tanh()
    return net.conv2(x if skips[2] else x.relu(), edge_index)


def reading_too_early(net, x, edge_index):
    rows = x if net.training and torch.rand(1) < 0.5 else net.conv(x, edge_index)
    sums = x * 2.0
    both = torch.cat([sums, rows], dim=-1)[:, ::2] if net.training else sums
    return net.conv2(both + sums, edge_index)


def skipping_by_a_sum(net, x, edge_index):
    return net.conv(x, edge_index) * (0.5 + torch.rand(1)).floor() if net.training else x


def skipping_by_one_number(net, x, edge_index):
    for _ in range(2):
        if not (net.training and torch.rand(1) < 0.5):
            x = net.conv(x, edge_index)
            if net.training and torch.rand(1) < 0.5:  # Drawn if the layer isn't skipped alone.
                x = net.conv2(x, edge_index)
    return x


def skipping_in_a_sum(net, x, edge_index):
    rows = x
    for conv in (net.conv, net.conv2, net.conv):
        if not (net.training and torch.rand(1) < 0.5):
            rows = conv(x, edge_index) if rows is x else rows + conv(x, edge_index)
    return rows


def with_matrix():
    data = ring()
    return T.ToSparseTensor(layout=torch.sparse_csr)(data)


def transposing(net, x, adj_t):
    return adj_t.t() @ net.conv.lin_l(adj_t @ x)


def branching_on_a_matrix(net, x, adj_t):
    return adj_t @ x if adj_t.is_signed() else adj_t @ (adj_t @ x)


def counting_in_training(net, x, edge_index):
    if not net.training:
        return net.conv(x, edge_index)
    net.calls = getattr(net, "calls", 0) + 1
    return net.conv(x * net.calls, edge_index)


def drawing_in_training(net, x, edge_index):
    if net.training:
        edge_index = edge_index[:, torch.randperm(edge_index.size(1))[: edge_index.size(1) // 2]]
    return net.conv(x, edge_index)


def keeping_first_of_parameters(net, x, edge_index):
    if not hasattr(net, "first"):
        net.first = net.conv(x, edge_index)
    return net.conv2(net.first, edge_index)


def counting_in_a_buffer():
    def forward(net, x, edge_index):
        net.count = net.count + 1
        return net.conv(x, edge_index)

    net = net_of(forward)
    net.register_buffer("count", torch.zeros(()))
    return gas.to_scalable(net, ring())


def registering_a_hook(net, x, edge_index):
    rows = net.conv(x, edge_index)
    if net.training:
        rows.register_hook(torch.neg)
    return net.conv2(rows, edge_index)


def going_backward(net, x, edge_index):
    rows = net.conv(x, edge_index)
    if net.training:
        rows.square().sum().backward(retain_graph=True)
    return net.conv2(rows, edge_index)


def remembering_training(net, x, edge_index):
    rows = net.conv(x, edge_index)
    if net.training:
        net.mean = rows.detach().mean(0)
        return rows
    return rows - getattr(net, "mean", 0.0)


def asking_for_gradients(net, x, edge_index):
    rows = net.conv(x, edge_index)
    return net.conv2(rows * 2 if rows.requires_grad else rows, edge_index)


def differentiating(net, x, edge_index):
    rows = net.conv(x, edge_index)
    if net.training:
        (gradient,) = torch.autograd.grad(rows.sum(), net.conv.lin_l.weight, create_graph=True)
        net.penalty = gradient.square().sum()
    return net.conv2(rows, edge_index)


def failing_in_training(net, x, edge_index):
    assert not net.training
    return net.conv(x, edge_index)


def wider_in_training(net, x, edge_index):
    x = net.conv(x, edge_index)
    return x, x[:, :1] if net.training else x


def skipping_statistics(net, x, edge_index):
    skips = net.training and torch.rand(1) < 0.5
    return net.conv2(x if skips else net.norm(net.conv(x, edge_index)), edge_index)


def assigning_a_row(net, x, edge_index):
    rows = net.conv(x, edge_index)
    rows[0] = 1.0
    return net.conv2(rows, edge_index)


class CentredInTraining(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x - x.mean(dim=0) if self.training else x)


def drawing(net, x, edge_index):
    return net.conv(x + torch.rand(1), edge_index)


def in_place(net, x, edge_index):
    x = net.conv(x, edge_index)
    return net.conv2(x, edge_index) + x.relu_()


def by_edges(net, x, edge_index):
    return net.conv(x, edge_index) + x[edge_index[0]].sum()


def products(net, x, edge_index):
    return net.conv(x, edge_index) + (x @ x.t()).flatten().sum()


def matrix_of(data):
    ones = torch.ones(data.num_edges)
    data.adj_t = torch.sparse_coo_tensor(data.edge_index.flip(0), ones, (4, 4)).to_sparse_csr()
    del data.edge_index
    return data


def without_batch():
    data = ring(edge_attr=torch.ones(8, 2))
    net = net_of(
        lambda net, x, edge_index, edge_attr: net.a(x, edge_index, edge_attr),
        "x, edge_index, edge_attr",
        a=pyg.GINEConv(nn.Linear(2, 2), edge_dim=2),
    )
    model, (batch, *args) = gas.to_scalable(net, data), next(iter(load(data)))
    return model(batch.x, batch.adj_t, *args)


def weights_alone():
    model = gas.to_scalable(pyg.GCN(2, 2, 1), ring())
    return model(next(iter(load())))


class Hooked(nn.Module):
    """Holds a layer, and has a hook."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.SAGEConv(2, 2)
        self.register_forward_hook(lambda *_: None)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class Carried(nn.Module):
    """Adds what it has given before."""

    def __init__(self):
        super().__init__()
        self.conv, self.state = pyg.SAGEConv(2, 2), None

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        self.state = h if self.state is None else h + self.state.detach()
        return self.state


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.SAGEConv(2, 2)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) if x.sum() > 0 else x


class TwoHops(pyg.MessagePassing):
    def forward(self, x, edge_index):
        x = self.propagate(edge_index, x=x)
        return self.propagate(edge_index, x=x - x.mean(dim=0))


class Scaled(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x / x.max().clamp(min=100))


def large_values():
    data = Data(
        x=torch.tensor([1.0] * 7 + [500]).view(8, 1), edge_index=torch.arange(8).repeat(2, 1)
    )
    model = convert(lambda net, x, edge_index: net.part(x, edge_index), data=data, part=Scaled())
    gas.cluster(data, 2, model=model, method="random", log=False)


def several_entries():
    """Return GATConv adds up the entries of a pair of nodes in a matrix."""
    rowptr, col = torch.tensor([0, 3, 4, 5, 6]), torch.tensor([1, 1, 2, 0, 3, 2])
    adj_t = torch.sparse_csr_tensor(rowptr, col, torch.ones(6), (4, 4), check_invariants=False)
    data = Data(x=torch.eye(4, 2), adj_t=adj_t)
    given = with_matrix()
    model = convert(lambda net, x, adj_t: net.gat(x, adj_t), "x, adj_t", data=given, gat=gat())
    gas.cluster(data, 2, model=model, method="random", log=False)


def gat():
    return pyg.GATConv(2, 2)


CASES = {
    "a tuple of rows of nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(x - x.split(2)[0].sum(), edge_index)
    ),
    "cluster, a layer that looks at all values if one is large": lambda t: large_values(),
    "cluster, a matrix with several entries of a pair": lambda t: several_entries(),
    "attention to all nodes": lambda t: convert(
        lambda net, x, edge_index: net.part(net.conv(x, edge_index), edge_index),
        part=pyg.GPSConv(2, pyg.SAGEConv(2, 2)),
    ),
    "a memory from call to call": lambda t: convert(
        lambda net, x, edge_index: net.part(net.conv(x, edge_index), edge_index), part=Carried()
    ),
    "a branch by values, inside": lambda t: convert(
        lambda net, x, edge_index: net.part(net.conv(x, edge_index), edge_index), part=Branching()
    ),
    "a layer of one's own, inside of which nodes are centred": lambda t: convert(
        lambda net, x, edge_index: net.part(net.conv(x, edge_index), edge_index), part=TwoHops()
    ),
    "a module with hooks": lambda t: gas.to_scalable(Hooked(), ring()),
    "a part with hooks, which is taken apart": lambda t: convert(
        lambda net, x, edge_index: net.part(net.conv(x, edge_index), edge_index), part=Hooked()
    ),
    "a ScalableGNN": lambda t: gas.to_scalable(Model(), ring()),
    "no data": lambda t: gas.to_scalable(pyg.GCN(2, 2, 2)),
    "num_nodes, and no width": lambda t: gas.to_scalable(pyg.GCN(-1, 2, 2), num_nodes=4),
    "no adjacency": lambda t: convert(lambda net, x, rate: net.conv.lin_l(x) * rate, "x, rate"),
    "an attribute that the graph lacks": lambda t: convert(
        lambda net, x, edge_index, pos: net.conv(x + pos, edge_index), "x, edge_index, pos"
    ),
    "an attribute that a call lacks": lambda t: without_batch(),
    "a word of many graphs": lambda t: gas.to_scalable(
        pyg.AttentiveFP(2, 2, 2, 2, 1, 1), ring(edge_attr=torch.ones(8, 2), batch=torch.zeros(4))
    ),
    "a class": lambda t: gas.to_scalable(pyg.GCN, ring()),
    "a module that does more than forward": lambda t: gas.to_scalable(Doubled(), ring()),
    "a forward that is set on the object": lambda t: gas.to_scalable(
        with_forward(lambda x, edge_index: x), ring()
    ),
    "edges, and the matrix of edges": lambda t: convert(
        lambda net, x, edge_index, adj_t: adj_t @ net.conv(x, edge_index),
        "x, edge_index, adj_t",
        data=ring(adj_t=torch.eye(4).to_sparse_csr()),
    ),
    "outputs of the nodes of a mask": lambda t: convert(
        lambda net, x, edge_index, train_mask: net.conv(x, edge_index)[train_mask],
        "x, edge_index, train_mask",
        data=ring(train_mask=torch.arange(4) > 1),
    ),
    "layers in a list": lambda t: convert(
        lambda net, x, edge_index: net.layers[0](x, edge_index), layers=[pyg.SAGEConv(2, 2)]
    ),
    "a layer that gives its edges, too": lambda t: gas.to_scalable(Paired(), ring()),
    "a graph without what its model needs": lambda t: without_preparation(),
    "features of other nodes": lambda t: gas.to_scalable(pyg.GCN(2, 2, 2), ring(num_nodes=5)),
    "features of NumPy": lambda t: gas.to_scalable(
        pyg.GCN(2, 2, 2), ring(x=torch.ones(4, 2).numpy())
    ),
    "a compiled module": lambda t: gas.to_scalable(torch.compile(pyg.GCN(2, 2, 2)), ring()),
    "a scripted module": lambda t: gas.to_scalable(torch.jit.script(nn.Linear(2, 2)), ring()),
    "weights under another name": lambda t: convert(
        lambda net, x, e, edge_weight: x,
        "x, edge_index, edge_weight=None",
        data=ring(edge_attr=torch.rand(8)),
    ),
    "a dictionary of other tensors": lambda t: convert(
        lambda net, data: net.conv(data.graph["x"], data.edge_index),
        "data",
        data=ring(graph={"x": torch.ones(4, 2)}),
    ),
    "sums at sources, and at destinations": lambda t: convert(both_ways, "x, edge_index"),
    "edges that aren't the graph's": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, torch.tensor([[0], [1]])) + net.conv(x, edge_index)
    ),
    "a dense layer of a matrix that it makes": lambda t: convert(
        lambda net, x, e: net.lin(torch.sparse_coo_tensor(e, x[e[0], 0], (x.size(0), 2**20))),
        "x, edge_index",
        lin=nn.Linear(2**20, 2),
    ),
    "a sum over a matrix that it makes": lambda t: convert(
        lambda net, x, e: x * torch.sparse_coo_tensor(e, x[e[0], 0], x.shape[:1] * 2).sum(),
        "x, edge_index",
    ),
    "a weighted matrix for a layer without weights": lambda t: convert(
        lambda net, x, e: net.conv(
            x, torch.sparse_coo_tensor(e.flip(0), x[e[0], 0], x.shape[:1] * 2)
        ),
        "x, edge_index",
    ),
    "edges that are dropped in evaluation": lambda t: drop_edges(training=True),
    "edges that are dropped in pairs": lambda t: drop_edges(force_undirected=True),
    "edges that are dropped as often as features say": lambda t: convert(
        lambda net, x, e: net.conv(x, dropout_edge(e, p=x.sum() / 9, training=net.training)[0]),
        "x, edge_index",
    ),
    "all edges, and what is left of them": lambda t: convert(
        lambda net, x, e: net.weighted(
            x, e, 1 / (1 + degree(dropout_edge(e, training=net.training)[0][1], x.size(0)))[e[1]]
        ),
        "x, edge_index",
        weighted=pyg.GraphConv(2, 2),
    ),
    "degrees of the edges that are left": lambda t: convert(
        degrees_of_the_left, "x, edge_index", weighted=pyg.GraphConv(2, 2)
    ),
    "a layer that drops edges in pairs": lambda t: convert(
        lambda net, x, e: net.drops(x, e), "x, edge_index", drops=DropsInPairs(2, 2)
    ),
    "edges that are dropped twice": lambda t: drop_edges(
        lambda net, x, kept, mask: net.conv(x, dropout_edge(kept, p=0.2, training=net.training)[0])
    ),
    "messages of edges that are dropped": lambda t: drop_edges(
        lambda net, x, kept, mask: scatter(x[kept[0]], kept[1], 0, x.size(0))
    ),
    "the mask of edges that are dropped": lambda t: convert(
        weighing_by_mask, "x, edge_index", weighted=pyg.GraphConv(2, 2)
    ),
    "a pair of edges that are dropped": lambda t: convert(
        lambda net, x, e: net.conv(x, dropout_edge(e, training=net.training)[-2]), "x, edge_index"
    ),
    "some of the edges that are dropped": lambda t: convert(half_by_half),
    "a tensor of a count of calls": lambda t: convert(counting),
    "weights of another type": lambda t: gas.to_scalable(
        pyg.GCN(2, 2, 2), ring(edge_weight=torch.ones(8).double())
    ),
    "features of another width": lambda t: gas.to_scalable(pyg.GCN(3, 2, 2), ring()),
    "a branch by values": lambda t: convert(branching),
    "other numbers in each call in training": lambda t: convert(counting_in_training),
    "an order that is drawn in training": lambda t: convert(drawing_in_training),
    "what a module computes of parameters, and keeps": lambda t: convert(
        keeping_first_of_parameters
    ),
    "a buffer that counts calls": lambda t: counting_in_a_buffer(),
    "a hook on a tensor": lambda t: convert(registering_a_hook),
    "a backward pass in forward": lambda t: convert(going_backward),
    "what training keeps for evaluation": lambda t: convert(remembering_training),
    "a question about gradients": lambda t: convert(asking_for_gradients),
    "a gradient in forward": lambda t: convert(differentiating),
    "a module that fails in training": lambda t: convert(failing_in_training),
    "an output of another width in training": lambda t: convert(wider_in_training),
    "statistics of a layer that is skipped at random": lambda t: convert(
        skipping_statistics, norm=nn.BatchNorm1d(2)
    ),
    "an assignment to a row": lambda t: convert(assigning_a_row),
    "a layer that centres nodes in training": lambda t: convert(
        lambda net, x, edge_index: net.part(net.conv(x, edge_index), edge_index),
        part=CentredInTraining(),
    ),
    "something else in training": lambda t: convert(more_in_training),
    "statistics in evaluation alone": lambda t: convert(norm_in_evaluation, norm=nn.BatchNorm1d(2)),
    "a part that is changed, and read": lambda t: convert(changing_a_part),
    "skips by two numbers": lambda t: convert(skipping_by_two),
    "a skip that is read too early": lambda t: convert(reading_too_early),
    "a number that is compared twice": lambda t: convert(comparing_twice),
    "a number that is added to": lambda t: convert(skipping_by_a_sum),
    "random branches that depend on others": lambda t: convert(skipping_by_one_number),
    "random branches of a sum": lambda t: convert(skipping_in_a_sum),
    "a random number": lambda t: convert(drawing),
    "random numbers": lambda t: convert(
        lambda net, x, edge_index: net.conv(x + torch.rand(2), edge_index)
    ),
    "in place, and read later": lambda t: convert(in_place),
    "outputs beside a loss": lambda t: convert(
        lambda net, x, e: (net.conv(x, e), net.conv.lin_l.weight.sum()), "x, edge_index"
    ),
    "outputs beside sizes": lambda t: convert(
        lambda net, x, e: (net.conv(x, e), x.shape), "x, edge_index"
    ),
    "outputs beside a number": lambda t: convert(
        lambda net, x, e: (net.conv(x, e), x.size(1)), "x, edge_index"
    ),
    "no outputs": lambda t: convert(lambda net, x, e: (net.conv(x, e), None)[1:], "x, edge_index"),
    "a graph as the output": lambda t: convert(
        lambda net, data: data.update({"x": net.conv(data.x, data.edge_index)}), "data"
    ),
    "a graph without an attribute": lambda t: convert(
        lambda net, data: net.conv(data.pos, data.edge_index), "data"
    ),
    "a graph without rows": lambda t: convert(
        lambda net, data: net.conv(torch.ones(data.num_nodes, 2), data.edge_index),
        "data",
        data=Data(edge_index=ring().edge_index, num_nodes=4),
    ),
    "rows of a parameter": lambda t: convert(
        lambda net, edge_index: net.conv(net.table.weight, edge_index),
        "edge_index",
        table=nn.Embedding(4, 2, max_norm=1.0),
    ),
    "rows of parameters that the graph has already": lambda t: gas.cluster(
        Data(
            edge_index=ring().edge_index, num_nodes=4, prepared_node_id=torch.tensor([1, 0, 2, 3])
        ),
        2,
        model=convert(
            lambda net, edge_index: net.conv(net.table.weight, edge_index),
            "edge_index",
            table=nn.Embedding(4, 2),
        ),
        log=False,
    ),
    "a graph of another size than the parameters are for": lambda t: gas.cluster(
        Data(edge_index=ring().edge_index, num_nodes=6),
        2,
        model=convert(
            lambda net, edge_index: net.conv(net.table.weight, edge_index),
            "edge_index",
            table=nn.Embedding(4, 2),
        ),
        log=False,
    ),
    "a matrix that the graph lacks": lambda t: convert(
        lambda net, x, adj_t: adj_t @ x, "x, adj_t", data=ring()
    ),
    "a loop over nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(torch.stack([2 * row for row in x]), edge_index)
    ),
    "a length of nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index) / len(x)
    ),
    "a range of nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index) * len(range(x.size(0)))
    ),
    "an assignment": lambda t: convert(assigning, kept=Kept()),
    "a parameter that forward changes": lambda t: convert(constraining),
    "what a layer sets and another reads": lambda t: convert(
        reading_what_a_layer_sets, part=Setting()
    ),
    "numbers of a generator of its own": lambda t: convert(
        drawing_by_a_generator, draws=[random.Random(0)]
    ),
    "a sum of matrices": lambda t: convert(adding_matrices),
    "parameters that forward changes": lambda t: convert(constraining_all),
    "values that forward gives a parameter": lambda t: convert(giving_values),
    "values that forward gives parameters": lambda t: convert(giving_all_values),
    "rows in a list of a module that was called": lambda t: with_kept_rows(),
    "a lock": lambda t: convert(lambda net, x, edge_index: x, lock=threading.Lock()),
    "what is left of the edges, and others": lambda t: convert(with_loops_of_the_left),
    "what is left of the edges, normalised in two ways": lambda t: convert(
        normalised_in_two_ways, a=pyg.GCNConv(2, 2), b=pyg.GCNConv(2, 2, add_self_loops=False)
    ),
    "edges that others are among on small graphs alone": lambda t: convert(
        with_loops_beside_positive,
        "x, edge_index, edge_weight",
        data=ring(edge_weight=torch.ones(8)),
    ).prepare(ring(edge_weight=-torch.ones(8))),
    "a number of the edges": lambda t: convert(
        lambda net, x, edge_index: net.conv(
            x * degree(edge_index[1], x.size(0), x.dtype).max(), edge_index
        )
    ),
    "a dropped message of some edges in two sums": lambda t: convert(dropped_twice),
    "an average of some edges": lambda t: convert(
        lambda net, x, edge_index, kind: net.conv(x, edge_index) * (kind[kind > 0] * 1.0).mean(),
        "x, edge_index, kind",
        data=with_kinds(),
    ),
    "a dense matrix": lambda t: convert(
        lambda net, x, edge_index: to_dense_adj(edge_index, max_num_nodes=x.size(0))[0] @ x
    ),
    "a matrix with entries that are there twice": lambda t: convert(
        lambda net, x, adj_t: adj_t @ x,
        "x, adj_t",
        data=Data(
            x=torch.ones(3, 2),
            adj_t=torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], torch.ones(3), (3, 3)),
        ),
    ),
    "a matrix's entries": lambda t: convert(
        lambda net, x, adj_t: x[adj_t._indices()[0]], "x, adj_t", data=with_matrix()
    ),
    "a matrix that is asked": lambda t: convert(
        branching_on_a_matrix, "x, adj_t", data=with_matrix()
    ),
    "a matrix that is kept": lambda t: convert(
        lambda net, x: net.matrix @ net.conv.lin_l(x), "x", matrix=nn.Buffer(torch.eye(4))
    ),
    "edges that are kept": lambda t: convert(
        lambda net, x: net.conv(x, net.edges),
        "x",
        edges=nn.Buffer(torch.tensor([[0, 99], [99, 0]])),
    ),
    "two matrices that are kept": lambda t: convert(
        lambda net, x: net.one @ (net.two @ x),
        "x",
        one=nn.Buffer(torch.eye(4)),
        two=nn.Buffer(torch.ones(4, 4)),
    ),
    "edges of two kinds": lambda t: convert(
        lambda net, x, a, b: net.conv(x, a) + net.conv(x, b), "x, pos_edge_index, neg_edge_index"
    ),
    "a list of no edges": lambda t: convert(
        lambda net, x, a, b: net.conv(x, a) + net.conv2(x, b),
        "x, edge_index, edge_index2",
        data=ring(edge_index2=torch.zeros(2, 0, dtype=torch.long)),
    ),
    "a graph without one of two lists": lambda t: convert(
        lambda net, x, a, b: net.conv(x, a) + net.conv2(x, b),
        "x, edge_index, edge_index2",
        data=ring(edge_index2=torch.tensor([[0], [1]])),
    ).prepare(ring()),
    "a table that a message reads": lambda t: convert(
        lambda net, x, edge_index: net.conv(net.table(x, edge_index), edge_index), table=Table()
    ),
    "a tensor that is replaced by a number": lambda t: replaced(
        lambda net: vars(net).update(scale=2.0)
    ),
    "a tensor that is deleted": lambda t: replaced(lambda net: delattr(net, "scale")),
    "one of two names of a tensor that is replaced": lambda t: replaced(
        lambda net: setattr(net, "scale", torch.zeros(2))
    ),
    "a tensor that is replaced, and was computed with": lambda t: replaced(
        lambda net: net.scale.zero_(), lambda net: net.scale.exp()
    ),
    "an argument of a lazy module that the graph lacks": lambda t: convert(
        lambda net, x, e: net.lazy(x * e, e), "x, e", lazy=pyg.SAGEConv((-1, -1), 2)
    ),
    "an option of a layer that is changed": lambda t: replaced(
        lambda net: setattr(net.conv, "normalize", "maybe")
    ),
    "a layer that is replaced": lambda t: replaced(
        lambda net: setattr(net, "conv", pyg.SAGEConv(2, 2))
    ),
    "rows of another number than the edges of their list": lambda t: gas.to_scalable(
        net_of(
            lambda net, x, a, b, w: net.conv(x, a) + net.weighted(x, b, w),
            "x, edge_index, edge_index2, edge_weight2",
            weighted=pyg.GraphConv(2, 2),
        ),
        ring(edge_index2=torch.tensor([[0], [1]]), edge_weight2=torch.ones(1)),
    ).prepare(ring(edge_index2=torch.tensor([[0, 1], [1, 2]]), edge_weight2=torch.ones(1))),
    "a graph without the weights that are normalised": lambda t: gas.to_scalable(
        net_of(
            lambda net, x, a, w: net.first(x, a, w) + net.second(x, a.flip(0), w),
            "x, edge_index, edge_weight",
            first=pyg.GCNConv(2, 2),
            second=pyg.GCNConv(2, 2),
        ),
        ring(edge_weight=torch.ones(ring().num_edges)),
    ).prepare(ring()),
    "rows of a call that are kept": lambda t: convert(
        lambda net, x, edge_index: net.conv(net.kept(x), edge_index), kept=Kept()
    ),
    "a model of another library": lambda t: gas.to_scalable(Foreign(), ring()),
    "a graph that isn't prepared": lambda t: with_loops().predict(
        gas.cluster(ring(), 2, method="random", log=False), log=False
    ),
    "a graph that is prepared for another model": lambda t: gas.to_scalable(
        pyg.GraphSAGE(2, 2, 2), ring()
    ).predict(gas.cluster(with_loops().prepare(ring()), 2, method="random", log=False), log=False),
    "a graph with attributes of edges that the model was converted without": lambda t: gas.cluster(
        ring(x=torch.arange(8.0).view(4, 2), edge_attr=torch.arange(8.0)[:, None]),
        2,
        model=of_attributes(),
        log=False,
    ),
    "attributes that the model was converted without, in a batch": lambda t: of_attributes()(
        next(iter(load(ring(edge_attr=torch.arange(8.0)[:, None]))))
    ),
    "a graph with weights that the model was converted without": lambda t: gas.cluster(
        ring(edge_weight=torch.arange(8.0)), 2, model=gas.to_scalable(pyg.GCN(2, 2, 2), ring())
    ),
    "weights that the model was converted without, in a batch": lambda t: gas.to_scalable(
        pyg.GraphConv(2, 2), ring()
    )(next(iter(load(ring(edge_weight=torch.arange(8.0)))))),
    "a call with the parts of a batch that isn't prepared": lambda t: unprepared_parts(),
    "a keyword that no forward takes": lambda t: with_loops()(
        next(iter(load(with_loops().prepare(ring())))), scale=2.0
    ),
    "weights that small graphs don't have": lambda t: convert(
        by_signs, "x, edge_index, edge_weight", data=ring(edge_weight=-torch.ones(8))
    ).prepare(ring(edge_weight=-torch.ones(8))),
    "weights that are normalised twice": lambda t: normalised_twice(),
    "a dropout in place, of a view": lambda t: convert(
        lambda net, x, edge_index: net.conv(
            F.dropout(x.view(-1, 2), 0.5, net.training, inplace=True), edge_index
        )
    ),
    "attention weights that are read": lambda t: convert(
        lambda net, x, edge_index: net.gat(x, edge_index, return_attention_weights=True),
        gat=pyg.GATConv(2, 2),
    ),
    "torch.vmap": lambda t: convert(
        lambda net, x, edge_index: torch.vmap(lambda row: 2 * row)(net.conv(x, edge_index))
    ),
    "a number of a parameter": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index) * float(net.scale.exp()),
        scale=nn.Parameter(torch.tensor(0.5)),
    ),
    "a tensor in a list that was changed": lambda t: with_changed_list(
        [torch.ones(2)], lambda items: items[0].zero_()
    ),
    "a number in a list that was changed": lambda t: with_changed_list([2.0], list.clear),
    "a buffer that is clamped": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index) * net.weight.clamp_(0, 1),
        weight=nn.Buffer(torch.ones(2)),
    ),
    "a hook before a layer": lambda t: convert(
        lambda net, x, edge_index: net.gcn(x, edge_index), gcn=hooked(pyg.GCNConv(2, 2))
    ),
    "an output of the graph": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index).mean(dim=0)
    ),
    "a mean over nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(x - x.mean(dim=0), edge_index)
    ),
    "a softmax over nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(x.softmax(dim=0), edge_index)
    ),
    "a running sum over nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(x.cumsum(dim=0), edge_index)
    ),
    "numbers of nodes": lambda t: convert(
        lambda net, x, edge_index: net.conv(x + torch.arange(x.size(0)).view(-1, 1), edge_index)
    ),
    "dropout in evaluation": lambda t: convert(
        lambda net, x, edge_index: net.conv(F.dropout(x, 0.5), edge_index)
    ),
    "a layer that is random": lambda t: convert(
        lambda net, x, edge_index: net.conv(net.noise(x), edge_index), noise=Noise()
    ),
    "no node": lambda t: gas.to_scalable(pyg.GCN(2, 2, 2), num_nodes=0),
    "an unknown option": lambda t: gas.to_scalable(pyg.GCN(2, 2, 2), ring(), stor="host"),
    "num_nodes of typed data": lambda t: gas.to_scalable(
        pyg.GCN(2, 2, 2), HeteroData(), num_nodes=4
    ),
    "a product of two sparse matrices": lambda t: convert(
        lambda net, x, e: (m := torch.sparse_coo_tensor(e, x[e[0], 0], x.shape[:1] * 2)) @ m @ x
    ),
    "typed data without types": lambda t: gas.to_scalable(pyg.GCN(2, 2, 2), HeteroData()),
    "edges in place of data": lambda t: gas.to_scalable(pyg.GCN(2, 2, 2), torch.zeros(2, 0)),
    "a number of nodes in a product": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index) / x.size(0) ** 0.5
    ),
    "a dictionary": lambda t: convert(
        lambda net, x, edge_index: net.conv(net.named(x)["x"], edge_index), named=Named()
    ),
    "pairs of nodes to predict": lambda t: gas.to_scalable(
        net_of(lambda net, x, e, p: net.conv(x, e)[p[0]], "x, edge_index, edge_label_index"),
        ring(edge_label_index=torch.tensor([[0], [2]])),
    ),
    "a word of mini-batches": lambda t: convert(
        lambda net, x, edge_index, n_id: net.conv(x, edge_index),
        "x, edge_index, n_id",
        data=ring(n_id=torch.arange(4)),
    ),
    "a module that can't be copied": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index), lock=Locked()
    ),
    "a layer that returns two": lambda t: convert(
        lambda net, x, edge_index: net.pair(x, edge_index)[0], pair=Pair()
    ),
    "no names of parameters": lambda t: gas.to_scalable(Anything(), ring()),
    "autocast in forward": lambda t: convert(in_autocast),
    "a layer made in the first call": lambda t: convert(make_once, made=None),
    "a layer made in every call": lambda t: convert(
        lambda net, x, e: net.conv2(nn.Linear(2, 2)(net.conv(x, e)), e)
    ),
    "pairs of nodes": lambda t: convert(products),
    "rows of edges outside of layers": lambda t: convert(by_edges),
    "the number of edges": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index) * edge_index.size(1)
    ),
    "edges outside of layers": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index) * edge_index.size(0)
    ),
    "classes of which a batch may lack some": lambda t: convert(
        lambda net, x, edge_index: (
            net.conv(x, edge_index) + F.one_hot((99 * x[:, 0]).abs().long()).sum(1, True)
        )
    ),
    "numbers of all rows": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index)[torch.arange(x.size(0)), x.argmax(1)]
    ),
    "the device of edges": lambda t: convert(
        lambda net, x, edge_index: net.conv(x, edge_index).to(edge_index.device)
    ),
    "a norm of the whole graph": lambda t: convert(
        lambda net, x, edge_index: net.norm(net.conv(x, edge_index)), norm=pyg.PairNorm()
    ),
    "rows of whole numbers": lambda t: convert(
        lambda net, x, edge_index: net.hop(net.conv(x, edge_index).long(), edge_index),
        hop=pyg.SimpleConv(),
    ),
    "an attribute of edges beside two lists of them": lambda t: convert(
        lambda net, x, edge_index, edge_attr: net.b(
            net.a(x, edge_index, edge_attr), edge_index.flip(0), edge_attr
        ),
        "x, edge_index, edge_attr",
        data=ring(edge_attr=torch.linspace(0, 1, 8)[:, None]),
        a=pyg.GATConv(2, 2, edge_dim=1),
        b=pyg.GATConv(2, 2, edge_dim=1),
    ),
    "a matrix as edge_index": lambda t: gas.to_scalable(
        pyg.GCN(2, 2, 2), ring(edge_index="a matrix")
    ),
    "weights that the model computes, normalised": lambda t: convert(
        lambda net, x, edge_index, edge_attr: net.a(
            x, edge_index, net.b(edge_attr).sigmoid().flatten()
        ),
        "x, edge_index, edge_attr",
        data=ring(edge_attr=torch.ones(8, 2)),
        a=pyg.GCNConv(2, 2),
        b=nn.Linear(2, 1),
    ),
    "cluster without model, GCNConv": lambda t: weights_alone(),
    "cluster without model, a matrix to normalise": lambda t: convert(
        lambda net, x, adj_t: net.gcn(x, adj_t),
        "x, adj_t",
        data=with_matrix(),
        gcn=pyg.GCNConv(2, 2),
    ).predict(gas.cluster(with_matrix(), 2, method="random", log=False)),
    "cluster, weights with a gradient": lambda t: gas.cluster(
        ring(edge_weight=torch.rand(8, requires_grad=True)),
        2,
        model=gas.to_scalable(pyg.GCN(2, 2, 1), ring(edge_weight=torch.rand(8))),
    ),
    "cluster without model, weights to normalise": lambda t: gas.to_scalable(
        pyg.GCN(2, 2, 1), ring(edge_weight=torch.rand(8))
    ).predict(gas.cluster(ring(edge_weight=torch.rand(8)), 2, method="random", log=False)),
    "prepare, no edges to normalise": lambda t: gas.to_scalable(pyg.GCN(2, 2, 1), ring()).prepare(
        ring(edge_index=None)
    ),
    "cluster, an adj_t to normalise": lambda t: gas.cluster(
        GCNNorm()(ring(edge_index=None, adj_t=torch.eye(4).to_sparse_csr())),
        2,
        model=gas.to_scalable(pyg.GCN(2, 2, 1), ring()),
    ),
}
