"""Linear layers before products with the adjacency, which become one layer."""

import copy
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from comparisons import check, check_gradients
from conftest import random_graph
from torch import nn
from torch.nn.utils import prune
from torch_geometric.utils import scatter

import gas

FORMS = {
    "Linear": lambda net, x: net.lin(x),
    "F.linear": lambda net, x: F.linear(x, net.lin.weight, net.lin.bias),
    "F.linear without bias": lambda net, x: F.linear(x, net.lin.weight),
    "@": lambda net, x: x @ net.weight,
    "torch.mm": lambda net, x: torch.mm(x, net.weight),
    "matmul": lambda net, x: x.matmul(net.weight),
}


class Projected(nn.Module):
    """Two sums over neighbours, each of linearly transformed rows."""

    def __init__(self, form, reduce="sum"):
        super().__init__()
        self.first, self.lin = nn.Linear(5, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(8, 3))
        self.form, self.reduce = form, reduce

    def forward(self, x, edge_index, edge_weight):
        x = self.aggregate(self.first(x), edge_index, edge_weight).relu()
        x = F.dropout(x, 0.5, self.training)
        return self.aggregate(FORMS[self.form](self, x), edge_index, edge_weight)

    def aggregate(self, x, edge_index, edge_weight):
        src, dst = edge_index
        rows = x[src] * edge_weight[:, None]
        return scatter(rows, dst, dim=0, dim_size=x.size(0), reduce=self.reduce)


def call(net, data):
    return net(data.x, data.edge_index, data.edge_weight)


def weighted_graph():
    data = random_graph()
    data.edge_weight = torch.randn(data.num_edges)
    return data


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_linear_layers(form):
    data, net = weighted_graph(), Projected(form)
    model, _, _ = check(net, data, call)
    assert str(model).count("ProjectedConv(") == 2
    check_gradients(net, data, call, fewest=3)


def test_the_history_is_that_of_the_rows_before():
    model = gas.to_scalable(Projected("Linear"), weighted_graph())
    assert [history.embedding_dim for history in model.histories] == [8]


class Stack(nn.Module):
    """Layers without an activation between them, and one whose rows go to two sums."""

    def __init__(self):
        super().__init__()
        self.lin1, self.lin2, self.lin3 = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, adj_t):
        x = adj_t @ self.lin2(adj_t @ self.lin1(x))
        x = self.lin3(x)
        return x + adj_t @ x


def test_rows_that_others_read_are_computed_before_the_product():
    data = random_graph()
    data.adj_t = torch.sparse_coo_tensor(
        data.edge_index.flip(0), torch.rand(data.num_edges).double(), (60, 60)
    ).to_sparse_csr()
    del data.edge_index
    model, _, _ = check(Stack(), data, lambda net, data: net(data.x, data.adj_t))
    assert str(model).count("ProjectedConv(") == 2
    assert str(model).count("_product_sum") == 1


def test_hooks_of_the_linear_layer_are_called():
    data, net, seen = weighted_graph(), Projected("Linear").double(), []
    net.lin.register_forward_hook(lambda *_: seen.append(1))
    model, _, _ = check(net, data, call)
    assert seen
    assert str(model).count("ProjectedConv(") == 1


class Hops(nn.Module):
    """Several hops after one linear layer."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x, edge_index, edge_weight):
        src, dst = edge_index
        x = self.lin(x)
        for _ in range(3):
            rows = x[src] * edge_weight[:, None]
            x = scatter(rows, dst, dim=0, dim_size=x.size(0), reduce="sum")
        return x


def test_the_first_of_several_hops():
    model, _, _ = check(Hops(), weighted_graph(), call)
    assert str(model).count("ProjectedConv(") == 1
    assert str(model).count("_product_sum:") == 2


class Doubled(nn.Linear):
    """A linear layer of another class, such as those of adapters."""

    def forward(self, input):
        return 2 * super().forward(input)


def converted():
    """Return a converted model, a clustered graph, and the module and graph they come from."""
    data, net = weighted_graph(), Projected("Linear").double().eval()
    data = data.apply(lambda rows: rows.double() if rows.is_floating_point() else rows)
    model = gas.to_scalable(net, data)
    return model, gas.cluster(data, 4, model=model, log=False), net, data


def test_hooks_that_are_registered_later_are_called():
    model, graph, net, data = converted()
    seen = []
    model.net.lin.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model.predict(graph, log=False), call(net, data))
    assert seen


def test_layers_that_change_later_are_followed():
    model, graph, _, data = converted()

    def check_again():
        net = Projected("Linear")
        net.first, net.lin = model.net.first, model.net.lin
        torch.testing.assert_close(model.predict(graph, log=False), call(net.eval(), data))

    prune.l1_unstructured(model.net.lin, "weight", amount=0.5)
    check_again()
    with torch.no_grad():
        model.net.lin.weight_orig.mul_(3)
    check_again()
    model.net.first = Doubled(5, 8).double()
    check_again()


@pytest.mark.parametrize("copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_linear_layers_of_their_own(copy):
    model, graph, _, _ = converted()
    other = copy(model)
    expected = model.predict(graph, log=False)
    assert torch.equal(other.predict(graph, log=False), expected)
    with torch.no_grad():
        other.net.lin.weight.zero_()
    assert torch.equal(model.predict(graph, log=False), expected)
    assert not torch.equal(other.predict(graph, log=False), expected)


class TwoMatrices(nn.Module):
    """Products with all edges, and with those without self-loops."""

    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, edge_index):
        size = x.size(0), x.size(0)
        row, col = edge_index[:, edge_index[0] != edge_index[1]].flip(0)
        ones = torch.ones(edge_index.size(1), dtype=x.dtype)
        every = torch.sparse_coo_tensor(edge_index.flip(0), ones, size)
        few = torch.sparse_coo_tensor(torch.stack([row, col]), torch.ones_like(row).to(x), size)
        return few @ self.lin2(every @ self.lin1(x)).relu()


def test_a_merged_product_beside_one_with_some_of_the_edges():
    check(TwoMatrices(), random_graph(), lambda net, data: net(data.x, data.edge_index))


@pytest.mark.parametrize("form", ["Linear", "F.linear without bias"])
def test_biases_after_a_sum_are_part_of_the_layer(form):
    class Biased(Projected):
        def __init__(self):
            super().__init__(form)
            self.bias = nn.Parameter(torch.randn(8))
            self.other = nn.Parameter(torch.randn(1))  # One number for all columns stays outside.

        def aggregate(self, x, edge_index, edge_weight):
            out = super().aggregate(x, edge_index, edge_weight)
            return out + self.bias if out.size(1) == 8 else self.other + out

    data, net = weighted_graph(), Biased()
    model, _, _ = check(net, data, call)
    sums = [node for node in model.net.graph.nodes if node.target is operator.add]
    assert len(sums) == 1
    assert "end_bias" in model.net.code
    check_gradients(net, data, call, fewest=5)
