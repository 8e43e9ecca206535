import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from adjacencies import make_adjacency
from torch.autograd import gradcheck, gradgradcheck

import gas
from gas import _operators
from gas.history.batch import join
from gas.nn import GATConv, GCNConv, SAGEConv, dropout, spmm
from gas.nn.halo import first_rows, in_batch, remember, row_by_row
from gas.planted import planted_partition

ROWS, COLS = 7, 19


def make_rows(width=5, dtype=torch.float64):
    """In-batch rows with gradient, and both, as push_and_pull returns them."""
    own = torch.randn(ROWS, width, dtype=dtype, requires_grad=True) * 1
    own.retain_grad()
    return own, with_halo(own, torch.randn(COLS - ROWS, width, dtype=dtype))


def with_halo(own, halo):
    space = torch.empty(own.size(0), own.size(1), dtype=own.dtype)
    return remember(join(own, torch.cat([space, halo])), own)


def plain(x):
    """The same tensor, which remembers nothing."""
    return x.view_as(x)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_products(reduce, weighted):
    adj = make_adjacency(ROWS, COLS, 40, weighted=weighted and reduce in ("sum", "mean"))
    own, x = make_rows()
    assert in_batch(x) is own
    assert in_batch(plain(x)) is None
    out, wanted = spmm(adj, x, reduce=reduce), spmm(adj, plain(x), reduce=reduce)
    assert torch.equal(out, wanted)
    found = torch.autograd.grad(out.pow(2).sum(), own)[0]
    assert torch.equal(found, torch.autograd.grad(wanted.pow(2).sum(), own)[0])
    assert bool((found != 0).any())


def test_gradients_of_gradients():
    adj = make_adjacency(ROWS, COLS, 40)
    halo = torch.randn(COLS - ROWS, 2, dtype=torch.float64)
    own = torch.randn(ROWS, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, dtype=torch.float64, requires_grad=True)

    def f(own, weight):
        return spmm(adj, with_halo(own * 1, halo), weight, reduce="mean").pow(2)

    assert gradcheck(f, (own, weight))
    assert gradgradcheck(f, (own, weight.detach()))


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_no_gradient_is_computed_for_the_halo(monkeypatch, reduce):
    adj = make_adjacency(ROWS, COLS, 40)
    own, x = make_rows()
    rows = []
    name = "multiply" if reduce == "sum" else "extreme_backward"
    function = getattr(_operators, name)

    def watched(*args):
        rows.append(args[-1])
        return function(*args)

    monkeypatch.setattr(_operators, name, watched)
    spmm(adj, dropout(x, 0.5), reduce=reduce).sum().backward()
    assert rows[-1] == ROWS
    assert own.grad.shape == (ROWS, 5)


def test_dropout_drops_both_alike():
    adj = make_adjacency(ROWS, COLS, 40)
    own, x = make_rows()
    torch.manual_seed(1)
    one = dropout(x, 0.4)
    assert in_batch(one) is not None
    assert torch.equal(in_batch(one), one[:ROWS])
    torch.manual_seed(1)
    other = dropout(plain(x), 0.4)
    assert torch.equal(one, other)
    for name, function in (
        ("knows", lambda x: spmm(adj, x).pow(2).sum()),
        ("doesn't know", lambda x: x.tanh().sum()),
        ("both", lambda x: spmm(adj, x).pow(2).sum() + x.tanh().sum()),
    ):
        found, wanted = (
            torch.autograd.grad(function(y), own, retain_graph=True)[0] for y in (one, other)
        )
        assert torch.allclose(found, wanted, rtol=1e-12), name


def test_in_place_changes_are_seen():
    adj = make_adjacency(ROWS, COLS, 40)
    own, x = make_rows()
    x.mul_(3)
    assert in_batch(x) is None
    out = spmm(adj, x)
    assert torch.equal(out, spmm(adj, plain(x)))
    found = torch.autograd.grad(out.sum(), own)[0]
    assert torch.allclose(found, 3 * adj.to_torch_sparse().to_dense().sum(0)[:ROWS, None].double())


def test_nothing_is_remembered_without_a_gradient():
    own, x = make_rows()
    assert in_batch(with_halo(own.detach(), x[ROWS:].detach())) is None
    with torch.no_grad():
        assert in_batch(x) is None


def test_first_rows():
    own, x = make_rows()
    assert first_rows(x, ROWS) is own
    assert torch.equal(first_rows(x, 3), own[:3])
    assert torch.equal(first_rows(x, ROWS + 2), x[: ROWS + 2])


def test_row_by_row():
    own, x = make_rows()
    lin = torch.nn.Linear(5, 3).double()
    out, wanted = row_by_row(lin, x), lin(x)
    assert torch.allclose(out, wanted)
    inputs = (own, *lin.parameters())
    found = torch.autograd.grad(out.pow(2).sum(), inputs)
    for mine, other in zip(found, torch.autograd.grad(wanted.pow(2).sum(), inputs), strict=True):
        assert torch.allclose(mine, other)


@pytest.mark.parametrize(
    ("conv", "pair"),
    [
        (lambda: GCNConv(5, 40, normalize=False), False),  # Aggregates first.
        (lambda: GCNConv(5, 1, normalize=False), False),  # Transforms first.
        (lambda: SAGEConv(5, 4), True),
        (lambda: GATConv(5, 4, heads=2, add_self_loops=False), True),
    ],
)
def test_convolutions(conv, pair):
    torch.manual_seed(0)
    conv = conv().double()
    adj = make_adjacency(ROWS, COLS, 40)
    own, x = make_rows()
    results = []
    for rows in (x, plain(x)):
        out = conv((rows, rows[:ROWS]) if pair else rows, adj)
        assert conv.path == "fused"
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), [own, *conv.parameters()])])
    for mine, other in zip(*results, strict=True):
        assert torch.allclose(mine, other, rtol=1e-10)


class Script(gas.ScalableGNN):
    """A model as a user writes it, which changes what it pulls in several ways."""

    def __init__(self):
        super().__init__(60, 6, 3)
        sizes = [(4, 6), (6, 6), (6, 3)]
        self.convs = torch.nn.ModuleList(pyg.SAGEConv(i, o) for i, o in sizes)

    def forward(self, x, adj_t, batch_size, *args):
        for conv, history in zip(self.convs[:-1], self.histories, strict=True):
            x = conv((x, x[:batch_size]), adj_t).relu()
            x = self.push_and_pull(history, x, batch_size, *args)
        return self.convs[-1]((x, x[:batch_size]), adj_t) + F.elu(x)[:batch_size].sum(1)[:, None]


def test_a_users_model():
    data = planted_partition(60, 5, 3, 4, 20)
    perm, ptr = gas.metis(data.edge_index, 3, num_nodes=60, log=False)
    data = gas.permute(data, perm, log=False)
    torch.manual_seed(0)
    plain_model = Script()
    plain_model.histories[0].push(torch.randn(60, 6))
    plain_model.histories[1].push(torch.randn(60, 6))
    fused_model = gas.fuse(copy.deepcopy(plain_model))
    grads = []
    for model, layout in ((plain_model, "csr"), (fused_model, "fused")):
        loader = gas.SubgraphLoader(data, ptr, layout=layout, log=False)
        for batch, *args in loader:
            model(batch.x, batch.adj_t, *args).pow(2).mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(conv.path == "fused" for conv in fused_model.convs)
    for mine, other in zip(*grads, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-6)
