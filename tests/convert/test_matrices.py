"""Sparse matrices: those that a module makes of its edges, and a graph's own."""

import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
from comparisons import check, check_gradients, of_x
from conftest import random_graph
from torch import nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import segment

import gas


def normalise(x, edge_index):
    return gcn_norm(edge_index, None, x.size(0), False, dtype=x.dtype)


def by_degree(x, edge_index):
    src, dst = edge_index
    ones = torch.ones(src.numel(), dtype=x.dtype)
    count = torch.zeros(x.size(0), dtype=x.dtype).index_add_(0, dst, ones)
    return torch.stack([dst, src]).flip(0), 1 / count[dst]


def of_ones(x, edge_index):
    return edge_index, torch.ones(edge_index.size(1), dtype=x.dtype)


def flip(edge_index, weight, size):
    return torch.sparse_coo_tensor(edge_index.flip(0), weight, size)


def stack(edge_index, weight, size):
    src, dst = edge_index
    return torch.sparse_coo_tensor(torch.stack([dst, src]), weight, size)


def transpose(edge_index, weight, size):
    return torch.sparse_coo_tensor(edge_index, weight, size).t().coalesce()


PRODUCTS = {
    "@": lambda adj, x: adj @ x,
    "torch.sparse.mm": torch.sparse.mm,
    "torch.matmul": torch.matmul,
    "torch.spmm": torch.spmm,
    "method": lambda adj, x: adj.matmul(x),
}


class OfMatrix(nn.Module):
    """Makes a matrix of its edges, and multiplies by it in each layer."""

    def __init__(self, weigh, make, multiply):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 8), nn.Linear(8, 3)
        self.weigh, self.make, self.multiply = weigh, make, multiply

    def forward(self, x, edge_index):
        n = x.size(0)
        adj = self.make(*self.weigh(x, edge_index), (n, n))
        x = self.multiply(adj, self.lin1(x).relu())
        x = self.multiply(adj, self.lin2(x))
        return x + (adj @ x[:, 0])[:, None]


@pytest.mark.parametrize("make", [flip, stack, transpose])
@pytest.mark.parametrize("weigh", [normalise, by_degree, of_ones])
def test_matrices_of_edges(weigh, make):
    net = OfMatrix(weigh, make, torch.sparse.mm)
    model, graph, _ = check(net, random_graph(), of_x)
    assert str(model).count("[fused]") == 3  # Not messages along single edges.
    assert len(model.histories) == 2
    assert gas.verify(model, graph)


@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product):
    check(OfMatrix(normalise, flip, PRODUCTS[product]), random_graph(), of_x)


def test_gradients_of_products():
    check_gradients(OfMatrix(normalise, stack, torch.sparse.mm), random_graph(), of_x)


class GivesMatrix(nn.Module):
    """Gives the matrix that it makes to layers of PyG."""

    def __init__(self, conv):
        super().__init__()
        self.conv, self.lin = conv, nn.Linear(5, 5)

    def forward(self, x, edge_index):
        edge_index, weight = normalise(x, edge_index)
        adj = torch.sparse_coo_tensor(edge_index.flip(0), weight, (x.size(0),) * 2)
        x = self.lin(x).relu()
        return self.conv(x, x, adj) if isinstance(self.conv, pyg.GCN2Conv) else self.conv(x, adj)


@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR")
@pytest.mark.parametrize(
    "conv", [pyg.GCN2Conv(5, 0.1, normalize=False), pyg.GraphConv(5, 3)], ids=["GCN2", "Graph"]
)
def test_layers_take_a_matrix_that_is_made(conv):
    check(GivesMatrix(conv), random_graph(), of_x)


def test_methods_of_another_layout_are_refused_in_words():
    class Indices(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 3)

        def forward(self, x, adj):
            dst, src = adj._indices()
            return torch.zeros(x.size(0), 3).index_add(0, dst, self.lin(x)[src])

    data = random_graph()
    values = torch.ones(data.num_edges)
    data.adj_t = torch.sparse_coo_tensor(data.edge_index.flip(0), values)
    del data.edge_index
    with pytest.raises(ValueError, match="entries that are there more than once: PyTorch"):
        gas.to_scalable(Indices(), data)
    data.adj_t = data.adj = data.adj_t.coalesce()
    with pytest.raises(ValueError, match="'_indices' of a sparse matrix can't be followed"):
        gas.to_scalable(Indices(), data)


# torch-sparse -------------------------------------------------------------------------------------


class OfSparseTensor(nn.Module):
    """Makes a SparseTensor, as models of the heterophily benchmarks do."""

    def __init__(self, weigh, reduce):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 8), nn.Linear(8, 3)
        self.weigh, self.reduce = weigh, reduce

    def forward(self, x, edge_index):
        from torch_sparse import SparseTensor, matmul

        weight = None
        if isinstance(edge_index, torch.Tensor):
            if self.weigh is not None:
                edge_index, weight = self.weigh(x, edge_index)
            src, dst = edge_index
            sizes = (x.size(0), x.size(0))
            adj_t = SparseTensor(row=dst, col=src, value=weight, sparse_sizes=sizes)
        elif isinstance(edge_index, SparseTensor):
            adj_t = edge_index
        assert isinstance(adj_t, SparseTensor)
        x = matmul(adj_t, self.lin1(x).relu(), reduce=self.reduce)
        x = adj_t @ self.lin2(x).relu()
        return adj_t.matmul(x, reduce="add")


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("weigh", [None, normalise])
def test_sparse_tensors_of_edges(weigh, reduce):
    check(OfSparseTensor(weigh, reduce), random_graph(), of_x)


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_products_with_the_graphs_own(is_weighted, reduce):
    from torch_sparse import SparseTensor

    data = random_graph()
    src, dst = data.edge_index
    weight = torch.rand(src.numel(), dtype=torch.float64) if is_weighted else None
    data.adj_t = SparseTensor(row=dst, col=src, value=weight, sparse_sizes=(60, 60))
    data.edge_index = None
    check(OfSparseTensor(None, reduce), data, lambda net, data: net(data.x, data.adj_t))


class TakesMatrix(pyg.MessagePassing):
    """Multiplies by the SparseTensor that it is given, and takes no list of edges."""

    def __init__(self, in_channels, out_channels, refuses):
        super().__init__(aggr="add")
        self.lin, self.refuses = nn.Linear(in_channels, out_channels), refuses

    def forward(self, x, edge_index):
        if isinstance(edge_index, torch.Tensor) and self.refuses:
            raise ValueError("only a SparseTensor")
        return self.propagate(edge_index, x=self.lin(x), share=0.5)

    def message(self, x_j):
        return x_j

    def message_and_aggregate(self, adj_t, x):
        return adj_t.matmul(x, reduce=self.aggr)

    def update(self, out, x, share):
        return share * out + x


class NormalisesMatrix(TakesMatrix):
    """Normalises what it is given in its layout, which differ in what becomes of self-loops."""

    def forward(self, x, edge_index):
        from torch_sparse import SparseTensor

        x, weight = self.lin(x), None
        if isinstance(edge_index, SparseTensor):
            edge_index = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        else:
            edge_index, weight = gcn_norm(edge_index, weight, x.size(0), dtype=x.dtype)
        return self.propagate(edge_index, x=x, share=0.5)


def of_edge_weight(net, data):
    return net(data.x, data.edge_index, data.edge_weight)


class MakesMatrix(nn.Module):
    def __init__(self, layer, refuses):
        super().__init__()
        self.a, self.b = layer(5, 8, refuses), layer(8, 3, refuses)

    def forward(self, x, edge_index, edge_weight):
        from torch_sparse import SparseTensor

        sizes = (x.size(0), x.size(0))
        adj_t = SparseTensor.from_edge_index(edge_index, edge_weight, sparse_sizes=sizes).t()
        return self.b(self.a(x, adj_t).relu(), adj_t)


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize(
    ("layer", "refuses"), [(TakesMatrix, False), (TakesMatrix, True), (NormalisesMatrix, False)]
)
def test_layers_of_ones_own_take_a_sparse_tensor(layer, refuses):
    data = random_graph()
    data.edge_weight = torch.rand(data.num_edges)
    check(MakesMatrix(layer, refuses), data, of_edge_weight)


class Scatters(nn.Module):
    """Sums up messages by torch-scatter."""

    def __init__(self, how):
        super().__init__()
        self.lin1, self.lin2, self.how = nn.Linear(5, 8), nn.Linear(8, 3), how

    def forward(self, x, edge_index):
        return self.reduce(self.lin2(self.reduce(self.lin1(x).relu(), edge_index)), edge_index)

    def reduce(self, x, edge_index):
        import torch_scatter

        src, dst = edge_index
        if self.how == "softmax":
            score = (x[src] * x[dst]).sum(dim=-1)
            weight = torch_scatter.scatter_softmax(score, dst, dim=0, dim_size=x.size(0))
            return torch_scatter.scatter_add(weight[:, None] * x[src], dst, 0, dim_size=x.size(0))
        function = getattr(torch_scatter, f"scatter_{self.how}")
        out = function(x[src], dst, dim=0, dim_size=x.size(0))
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("how", ["add", "mean", "max", "min", "softmax"])
def test_torch_scatter(how):
    check(Scatters(how), random_graph(), of_x)


class Segments(nn.Module):
    """Reduces messages by where the rows of a SparseTensor begin."""

    def __init__(self, function, reduce, turned):
        super().__init__()
        self.lin1, self.lin2, self.turned = nn.Linear(5, 8), nn.Linear(8, 3), turned
        self.function, self.reduce = function, reduce

    def forward(self, x, adj_t):
        import torch_scatter

        function = segment if self.function == "segment" else torch_scatter.segment_csr
        for lin in (self.lin1, self.lin2):
            ptr, index, value = adj_t.t().csc() if self.turned else adj_t.csr()
            messages = lin(x).relu()[index]
            messages = messages if value is None else value.view(-1, 1) * messages
            x = function(messages, ptr, reduce=self.reduce)
        return x


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("function", "reduce"),
    [("segment", "mean"), ("segment", "max"), ("segment_csr", "sum"), ("segment_csr", "min")],
)
def test_messages_that_are_reduced_by_pointers(function, reduce, turned, is_weighted):
    check(Segments(function, reduce, turned), sparse_graph(is_weighted), of_adj_t)


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize(
    "count",
    [
        lambda adj_t: adj_t.csr()[0][1:] - adj_t.csr()[0][:-1],
        lambda adj_t: adj_t.storage.rowptr().diff(),
        lambda adj_t: torch.diff(adj_t.csr()[0]),
    ],
)
def test_pointers_that_are_read_are_refused(count):
    def run(net, x, adj_t):
        degrees = net.count(adj_t).clamp(min=1).to(x.dtype)
        return (adj_t @ net.lin1(x)) / degrees[:, None]

    class Counts(OfGraph):
        forward = run

    net = Counts(None)
    net.count = count
    with pytest.raises(ValueError, match=r"and adj_t.sum\(dim=1\) for degrees"):
        gas.to_scalable(net, sparse_graph(False))
    net.count = lambda adj_t: adj_t.sum(dim=1)
    check(net, sparse_graph(False), of_adj_t)


# Weights of the graph's own matrix ----------------------------------------------------------------

WEIGHTED = {
    "SAGE": lambda: (pyg.SAGEConv(5, 8), pyg.SAGEConv(8, 3)),
    "SAGE by max and sum": lambda: (pyg.SAGEConv(5, 8, aggr="max"), pyg.SAGEConv(8, 3, aggr="sum")),
    "GIN": lambda: (pyg.GINConv(nn.Linear(5, 8)), pyg.GINConv(nn.Linear(8, 3))),
    "GAT": lambda: (pyg.GATConv(5, 4, heads=2), pyg.GATv2Conv(8, 3)),
    "Graph and SAGE": lambda: (pyg.GraphConv(5, 8), pyg.SAGEConv(8, 3)),
}


class OfLayers(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, adj_t):
        return self.second(self.first(x, adj_t).relu(), adj_t)


@pytest.mark.parametrize("name", WEIGHTED)
def test_layers_without_a_parameter_read_the_weights_of_a_matrix(name):
    data = random_graph()
    data.edge_index = torch.unique(data.edge_index, dim=1)
    data.edge_weight = torch.rand(data.num_edges) + 0.1
    data = T.ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data)
    net = OfLayers(*WEIGHTED[name]())
    check(net, data, lambda net, data: net(data.x, data.adj_t))
    check_gradients(net, data, lambda net, data: net(data.x, data.adj_t))


# What else is computed of a graph's own SparseTensor ----------------------------------------------


def sparse_graph(is_weighted):
    from torch_sparse import SparseTensor

    data = random_graph()
    src, dst = data.edge_index = torch.unique(data.edge_index, dim=1)
    weight = torch.rand(src.numel(), dtype=torch.float64) + 0.1 if is_weighted else None
    data.adj_t = SparseTensor(row=dst, col=src, value=weight, sparse_sizes=(60, 60))
    data.edge_index = None
    return data


def of_gcn_norm(net, x, adj_t):
    return gcn_norm(adj_t, None, x.size(0), dtype=x.dtype)


def of_gcn_norm_once(net, x, adj_t):
    if net.adj_t is None:
        net.adj_t = gcn_norm(adj_t, None, x.size(0), dtype=x.dtype)
    return net.adj_t


def of_methods(net, x, adj_t):
    adj_t = adj_t.fill_value(1.0, dtype=x.dtype).remove_diag().set_diag()
    scale = adj_t.sum(dim=1).pow(-0.5)
    return scale.view(-1, 1) * adj_t * scale.view(1, -1)


def of_functions(net, x, adj_t):
    import torch_sparse

    adj_t = torch_sparse.fill_diag(adj_t if adj_t.has_value() else adj_t.fill_value(0.5), 2.0)
    scale = torch_sparse.sum(adj_t, dim=0).clamp(min=0.1)
    return torch_sparse.mul(adj_t, (1 / scale).view(1, -1)).to(x.dtype)


def of_both_directions(net, x, adj_t):
    return adj_t.to_symmetric()


def of_transposed(net, x, adj_t):
    return adj_t.t()


def of_counts(net, x, adj_t):
    count = adj_t.storage.rowcount().to(x.dtype).clamp(min=1)
    return adj_t.set_value(None).mul((1 / count).view(-1, 1))


def of_pairs(net, x, adj_t):
    return adj_t.coalesce()


OF_GRAPH = (
    of_gcn_norm, of_gcn_norm_once, of_methods, of_functions, of_both_directions, of_transposed,
    of_counts, of_pairs,
)  # fmt: skip


class OfGraph(nn.Module):
    """Multiplies by a matrix that is computed of the graph's own."""

    def __init__(self, compute):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 8), nn.Linear(8, 3)
        self.compute, self.adj_t = compute, None

    def forward(self, x, adj_t):
        adj_t = self.compute(self, x, adj_t)
        return adj_t @ self.lin2((adj_t @ self.lin1(x)).relu())


def of_adj_t(net, data):
    return net(data.x, data.adj_t)


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("compute", OF_GRAPH)
def test_what_is_computed_of_the_graphs_own_matrix(compute, is_weighted):
    model, _, _ = check(OfGraph(compute), sparse_graph(is_weighted), of_adj_t)
    assert str(model).count("[fused]") == 2
    check_gradients(OfGraph(compute), sparse_graph(is_weighted), of_adj_t)


class OfData(OfGraph):
    """Takes the matrix from the graph, and gives it to layers of PyG, too."""

    def __init__(self, compute):
        super().__init__(compute)
        self.conv = pyg.GCNConv(3, 3)

    def forward(self, data):
        degrees = data.adj_t.sum(dim=1).to(data.x.dtype)
        rows = super().forward(data.x, data.adj_t) / degrees.clamp(min=1)[:, None]
        return self.conv(rows, data.adj_t)


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize("is_weighted", [False, True])
def test_layers_beside_what_is_computed_of_the_matrix(is_weighted):
    """GCN replaces self-loops of a SparseTensor, and keeps those of a list."""
    check(OfData(of_gcn_norm), sparse_graph(is_weighted), lambda net, data: net(data))


@pytest.mark.requires("torch_sparse")
@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda net, x, adj_t: adj_t @ adj_t, "the product of two sparse .* A @ \\(A @ x\\)$"),
        (lambda net, x, adj_t: adj_t.to_dense(), "'to_dense' of a sparse matrix can't be followed"),
        (lambda net, x, adj_t: adj_t + adj_t, r"'\+, - or \[...\]' of a sparse matrix"),
        (lambda net, x, adj_t: adj_t[:, :], r"'\+, - or \[...\]' of a sparse matrix"),
        (lambda net, x, adj_t: adj_t.set_diag(k=1), "'remove_diag of another diagonal'"),
    ],
)
def test_other_methods_of_a_matrix_are_refused_by_name(compute, reason):
    data = sparse_graph(False)
    with pytest.raises(ValueError, match=reason):
        gas.to_scalable(OfGraph(compute), data)
