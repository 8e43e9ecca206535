"""Lines that many modules have in forward, each alone between two layers."""

import copy
import operator

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from comparisons import check, check_gradients, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.utils import coalesce, is_sparse, is_torch_sparse_tensor

import gas


def net_of(forward, names="x, edge_index", **modules):
    """Return a module whose forward is ``forward(self, ...)``, with two layers."""
    space = {"forward_of": forward}
    exec(f"def forward(self, {names}): return forward_of(self, {names})", space)
    net = type("Net", (nn.Module,), {"forward": space["forward"]})()
    net.a, net.b = pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)
    for name, module in modules.items():
        setattr(net, name, copy.deepcopy(module))
    return net


def between(line):
    """Return a forward that computes something of what the first layer gives."""
    return lambda net, x, edge_index: net.b(line(net, net.a(x, edge_index)), edge_index)


def halves(h):
    return h.view(-1, 2, 4)


def most_and_where(net, h):
    most, where = halves(h).max(dim=1)
    return torch.cat([most, where * most], dim=1)


def without_gradient(net, x, edge_index):
    with torch.no_grad():
        hidden = net.a(x, edge_index).relu()
    return net.b(hidden, edge_index)


def without_gradient_by_name(net, x, edge_index):
    with torch.set_grad_enabled(False):
        hidden = net.a(x, edge_index).relu()
    return net.b(hidden, edge_index)


def asserts(net, x, edge_index):
    assert x.size(0) > 0
    assert x.shape[0] >= 1
    assert not x.size(0) <= 0
    if x.size(0) == 0:
        return x
    hidden = net.a(x, edge_index)
    assert hidden.shape == (x.size(0), 8)
    return net.b(hidden, edge_index)


LINES = {
    "max(dim=1)[0]": between(lambda net, h: halves(h).max(dim=1)[0].repeat(1, 2)),
    "min(dim=1).values": between(lambda net, h: halves(h).min(dim=1).values.repeat(1, 2)),
    "both of a named tuple": between(most_and_where),
    "sort": between(lambda net, h: h.sort(dim=1)[0]),
    "topk": between(lambda net, h: h.topk(4, dim=1).values.repeat(1, 2)),
    "cummax": between(lambda net, h: h.cummax(1)[0]),
    "std_mean": between(lambda net, h: torch.std_mean(h, dim=1)[1][:, None].expand(-1, 8)),
    "torch.is_tensor": lambda net, x, e: net.b(net.a(x if torch.is_tensor(e) else 2 * x, e), e),
    "is_sparse": lambda net, x, e: net.b(net.a(2 * x if is_sparse(e) else x, e), e),
    "is_torch_sparse_tensor": lambda net, x, e: net.b(
        net.a(2 * x if is_torch_sparse_tensor(e) else x, e), e
    ),
    "zeros of all nodes": between(
        lambda net, h: h + torch.zeros(h.size(0), 16, dtype=h.dtype, device=h.device)[:, :8]
    ),
    "(x, None)": lambda net, x, e: net.b((net.a((x, None), e).relu(), None), e),
    "(x, x)": lambda net, x, e: net.b((net.a((x, x), e).relu(),) * 2, e),
    "asserts": asserts,
    "no_grad": without_gradient,
    "set_grad_enabled": without_gradient_by_name,
}


@pytest.mark.parametrize("line", LINES)
def test_lines(line):
    check(net_of(LINES[line]), random_graph(), of_x)
    check_gradients(net_of(LINES[line]), random_graph(), of_x, fewest=3)


@pytest.mark.parametrize(
    ("compare", "number"),
    [
        (operator.gt, 0), (operator.ge, 1), (operator.lt, 1), (operator.le, 0),
        (operator.eq, 0), (operator.ne, 0),
    ],
)  # fmt: skip
def test_only_whether_there_are_nodes_is_known(compare, number):
    """A mini-batch may have a single one."""

    def forward(net, x, edge_index):
        rows = net.a(x, edge_index)
        return net.b(rows.relu() if compare(x.size(0), net.number) else rows.tanh(), edge_index)

    check(net_of(forward, number=number), random_graph(), of_x)
    with pytest.raises(ValueError, match="must not depend on values of tensors"):
        gas.to_scalable(net_of(forward, number=number + 1), random_graph())


def matrix(is_weighted=True):
    data = random_graph()
    data.edge_index = coalesce(data.edge_index)
    if is_weighted:
        data.edge_weight = torch.rand(data.num_edges)
    return T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data)


GRAPHS = {
    "list": random_graph,
    "csr": lambda: matrix(False),
    "weighted csr": matrix,
}
LAYERS = {
    "SAGE": pyg.SAGEConv,
    "GIN": lambda i, o: pyg.GINConv(nn.Linear(i, o)),
    "GAT": pyg.GATConv,
    "GCN": pyg.GCNConv,
}


def of_edges(net, data):
    return net(data.x, data.edge_index if "edge_index" in data else data.adj_t)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_on_an_adjacency_with_weights(kind, graph):
    make, data = LAYERS[kind], GRAPHS[graph]()
    names = "x, edge_index" if "edge_index" in data else "x, adj_t"

    def alone(net, x, edges):
        return net.b(net.a(x, edges).relu(), edges)

    def beside(net, x, edges):
        return net.b(net.gcn(x, edges).relu(), edges) + net.gcn2(net.a(x, edges).relu(), edges)

    check(net_of(alone, names, a=make(5, 8), b=make(8, 3)), data, of_edges)
    net = net_of(
        beside, names, a=make(5, 8), b=make(8, 3), gcn=pyg.GCNConv(5, 8), gcn2=pyg.GCNConv(8, 3)
    )
    check(net, data, of_edges)


@pytest.mark.parametrize("width", [(), (1,)])
def test_attributes_of_edges_as_weights(width):
    def forward(net, x, edge_index, edge_attr):
        x = net.a(x, edge_index, edge_attr.squeeze(-1)).relu()
        return net.b(x, edge_index, edge_weight=edge_attr.view(-1))

    data = random_graph()
    data.edge_attr = torch.rand(data.num_edges, *width)
    net = net_of(forward, "x, edge_index, edge_attr", a=pyg.GCNConv(5, 8), b=pyg.GCNConv(8, 3))
    check(net, data, lambda net, data: net(data.x, data.edge_index, data.edge_attr))


def test_features_of_three_dimensions():
    data = random_graph()
    data.x = torch.randn(60, 4, 5)
    layers = {"a": pyg.SAGEConv(5, 8, node_dim=0), "b": pyg.SAGEConv(8, 3, node_dim=0)}
    check(net_of(between(lambda net, h: h.relu()), **layers), data, of_x)
    time = nn.TransformerEncoderLayer(5, 1, 8, 0.0, batch_first=True)

    def forward(net, x, edge_index):
        return net.b(net.a(net.time(x).mean(1), edge_index).relu(), edge_index)

    check(net_of(forward, time=time), data, of_x)


def test_rows_of_nodes_in_columns():
    def forward(net, x, edge_index):
        columns = x.t()
        rows = net.b(net.a(columns.t(), edge_index).relu(), edge_index)
        return torch.cat([rows.t(), columns]).t()

    check(net_of(forward), random_graph(), of_x)


def test_weights_of_another_precision_are_refused_with_the_cure():
    data = matrix()
    data.adj_t = data.adj_t.double()
    net = net_of(between(lambda net, h: h), "x, adj_t", b=pyg.GraphConv(8, 3))
    with pytest.raises(ValueError, match=r"convert it, data.adj_t = data.adj_t.to\(torch.float32"):
        gas.to_scalable(net, data)


@pytest.mark.parametrize("net", [net_of(between(lambda net, h: h)), pyg.GraphSAGE(5, 8, 2, 3)])
def test_a_module_for_one_type_of_nodes_is_made_one_for_several(net):
    data = HeteroData()
    for kind in "uv":
        data[kind].x = torch.randn(30, 5)
    for ends in ("uv", "vu", "uu"):
        data[ends[0], "to", ends[1]].edge_index = torch.randint(30, (2, 90))
    with pytest.raises(ValueError, match=r"make it one for all of them, .*to_hetero\(net, data.me"):
        gas.to_scalable(net, data)
    if isinstance(net, pyg.GraphSAGE):  # torch.fx traces others, but not those of this file.
        gas.to_scalable(pyg.to_hetero(net, data.metadata()), data)
    with pytest.raises(ValueError, match="take dictionaries by type, x_dict and edge_index_dict"):
        gas.to_scalable(net_of(lambda net, data: net.a(data.x, data.edge_index), "data"), data)
