"""Relations of one source multiplied at once: bit by bit the sums of each, gradients of PyG's."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch_geometric.nn import GINConv, GraphConv, HeteroConv, SAGEConv, SimpleConv

import gas
from gas.nn import Adjacency, hetero, relations, spmm
from gas.nn.hetero import _Multiply, share_products

SIZES = {"a": 17, "b": 40, "c": 1, "nobody": 3}
WIDTHS = {"a": 5, "b": 8, "c": 3, "nobody": 2}
KINDS = {  # And their numbers of edges.
    ("a", "to", "b"): 90,
    ("a", "to", "a"): 60,
    ("b", "to", "a"): 70,
    ("b", "empties", "a"): 0,
    ("b", "to", "c"): 30,
    ("b", "to", "nobody"): 0,
    ("c", "to", "b"): 12,
}
LAYERS = {
    "SAGE": lambda: SAGEConv((-1, -1), 6),
    "SAGE, sums": lambda: SAGEConv((-1, -1), 6, aggr="sum"),
    "SAGE, projected": lambda: SAGEConv((4, 4), 6, project=True),
    "SAGE, maxima": lambda: SAGEConv((-1, -1), 6, aggr="max"),
    "Graph": lambda: GraphConv((-1, -1), 6),
    "GIN": lambda: GINConv(nn.Sequential(nn.ReLU(inplace=True), nn.LazyLinear(6)), eps=0.5),
}


def graph(dtype=torch.double):
    torch.manual_seed(0)
    x_dict = {
        kind: torch.randn(size, WIDTHS[kind] if dtype is not None else 8, dtype=dtype)
        for kind, size in SIZES.items()
    }
    edges = {
        kind: torch.stack([torch.randint(SIZES[end], (size,)) for end in (kind[0], kind[2])])
        for kind, size in KINDS.items()
    }
    return x_dict, edges


def grads_of(net, x_dict, edges):
    x_dict = {kind: x.clone().requires_grad_() for kind, x in x_dict.items()}
    net.zero_grad()
    out = net(x_dict, edges)
    sum(rows.square().sum() for rows in out.values()).backward()
    grads = [x.grad for x in x_dict.values()] + [p.grad for p in net.parameters()]
    return out, [None if g is None else g.clone() for g in grads]


def check_close(mine, true):
    assert [g is None for g in mine] == [g is None for g in true]
    for g, h in zip(mine, true, strict=True):
        if g is not None:
            torch.testing.assert_close(g, h)


@pytest.mark.parametrize("name", LAYERS)
def test_equals_pyg_and_each_relation_alone(name):
    x_dict, edges = graph()
    if name in ("GIN", "SAGE, projected"):  # Rows of all types are as wide.
        x_dict = {kind: torch.randn(len(x), 4, dtype=x.dtype) for kind, x in x_dict.items()}
    theirs = HeteroConv({kind: LAYERS[name]() for kind in edges})
    theirs.double()(x_dict, edges)  # Lazy weights.
    ours = gas.fuse(copy.deepcopy(theirs))
    together = relations(edges, SIZES)
    assert list(together) == list(edges)
    alone = {kind: adj.remove_values().with_value(None) for kind, adj in together.items()}
    assert all(adj.sums_of is None for adj in alone.values())
    expected, true = grads_of(theirs, x_dict, edges)
    out, mine = grads_of(ours, x_dict, together)
    one_by_one, same = grads_of(ours, x_dict, alone)
    assert all(conv.path == "fused" for conv in ours.convs.values())
    for kind, rows in expected.items():
        torch.testing.assert_close(out[kind], rows)
        assert torch.equal(out[kind], one_by_one[kind])
    check_close(mine, true)
    check_close(mine, same)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.bfloat16])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_are_the_same_bit_by_bit(reduce, dtype, threads):
    torch.manual_seed(0)
    sizes = (300, 1, 0, 50)
    adjs = []
    for size in sizes:  # One row of more entries than a thread takes at once.
        degree = torch.randint(30, (size,))
        degree[:1] = 20_000
        rowptr = nn.functional.pad(degree.cumsum(0), (1, 0))
        adjs.append(Adjacency(rowptr, torch.randint(90, (int(rowptr[-1]),)), None, 90))
    x = torch.randn(90, 33).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for mine, adj in zip(share_products(adjs), adjs, strict=True):
            assert torch.equal(mine.sums_of(x, reduce), spmm(adj, x, reduce=reduce))
    finally:
        torch.set_num_threads(before)


def counted(monkeypatch):
    """Count the products of several relations."""
    calls = []
    forward = _Multiply.forward

    def count(*args):
        calls.append(args[2].num_rows)
        return forward(*args)

    monkeypatch.setattr(_Multiply, "forward", staticmethod(count))
    return calls


def test_there_is_one_product_for_each_source(monkeypatch):
    x_dict, edges = graph()
    net = gas.fuse(HeteroConv({kind: SAGEConv((-1, -1), 6) for kind in edges}).double())
    together = relations(edges, SIZES)
    net(x_dict, together)
    calls = counted(monkeypatch)
    for _ in range(2):
        net(x_dict, together)
    assert calls == [SIZES["a"] + SIZES["b"], 2 * SIZES["a"] + SIZES["c"] + SIZES["nobody"]] * 2
    assert together["c", "to", "b"].sums_of is None


def pair():
    _, edges = graph()
    kinds = [("a", "to", "b"), ("a", "to", "a")]
    made = relations({kind: edges[kind] for kind in kinds}, SIZES)
    return [made[kind] for kind in kinds]


def test_rows_that_have_changed_are_summed_anew():
    one, other = pair()
    x = torch.randn(SIZES["a"], 4)
    one.sums_of(x, "sum")
    x.mul_(2)
    assert torch.equal(other.sums_of(x, "sum"), spmm(other, x))
    one.sums_of(x, "sum")
    assert torch.equal(other.sums_of(x, "mean"), spmm(other, x, reduce="mean"))
    one.sums_of(x, "sum")
    assert torch.equal(other.sums_of(x.clone() + 1, "sum"), spmm(other, x + 1))
    with torch.no_grad():
        one.sums_of(x.requires_grad_(), "sum")
    assert other.sums_of(x, "sum").requires_grad
    with torch.inference_mode():
        y = torch.randn(SIZES["a"], 4)
        one.sums_of(y, "sum")
        y.mul_(2)
        assert torch.equal(other.sums_of(y, "sum"), spmm(other, y))


def test_sums_may_be_changed_in_place_and_asked_for_again():
    one, other = pair()
    x = torch.randn(SIZES["a"], 4, requires_grad=True)
    expected = spmm(one, x)
    one.sums_of(x, "sum").relu_().sum().backward()
    mine, x.grad = x.grad, None
    expected.relu().sum().backward()
    assert torch.equal(mine, x.grad)
    assert torch.equal(one.sums_of(x, "sum"), spmm(one, x))
    assert torch.equal(other.sums_of(x, "sum"), spmm(other, x))


def test_a_gradient_of_one_relation_alone_and_of_each_in_turn():
    one, other = pair()
    x = torch.randn(SIZES["a"], 4, requires_grad=True)
    for reduce in ("sum", "mean"):
        sums = [adj.sums_of(x, reduce) for adj in (one, other)]
        for adj, mine in zip((one, other), sums, strict=True):
            (true,) = torch.autograd.grad(spmm(adj, x, reduce=reduce).square().sum(), x)
            (found,) = torch.autograd.grad(mine.square().sum(), x)
            torch.testing.assert_close(found, true)


def test_derivatives():
    one, other = pair()
    x = torch.randn(SIZES["a"], 2, dtype=torch.double, requires_grad=True)
    for reduce in ("sum", "mean"):

        def both(x, reduce=reduce):
            return one.sums_of(x, reduce), other.sums_of(x, reduce)

        torch.autograd.gradcheck(both, x)
        torch.autograd.gradgradcheck(both, x)
    _ = one.matrix  # Both have one transpose, which no transform can make.
    found = torch.func.grad(lambda x: one.sums_of(x, "sum").square().sum())(x.detach())
    (true,) = torch.autograd.grad(spmm(one, x).square().sum(), x)
    torch.testing.assert_close(found, true)


def test_a_copy_is_multiplied_alone():
    one, _ = pair()
    x = torch.randn(SIZES["a"], 4)
    for twin in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), one.clone()):
        assert twin.sums_of is None
        assert torch.equal(spmm(twin, x), one.sums_of(x, "sum"))


def test_a_layer_that_returns_sums_as_they_are():
    x_dict, edges = graph(None)
    conv = HeteroConv({kind: SimpleConv(aggr="sum") for kind in edges}, aggr="sum")
    expected = conv(x_dict, edges)
    out = gas.fuse(conv)(x_dict, relations(edges, SIZES))
    for kind, rows in expected.items():
        torch.testing.assert_close(out[kind], rows)


def test_threads_with_features_of_their_own():
    adjs = pair()
    interval = sys.getswitchinterval()

    def compute(seed):
        x = torch.randn(SIZES["a"], 4, generator=torch.Generator().manual_seed(seed))
        wanted = [spmm(adj, x) for adj in adjs]
        found = [[adj.sums_of(x, "sum") for adj in adjs] for _ in range(300)]
        return all(all(map(torch.equal, sums, wanted)) for sums in found)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(compute, range(4)))
    finally:
        sys.setswitchinterval(interval)


def test_relations_of_too_many_edges_are_multiplied_apart(monkeypatch):
    adjs = [Adjacency(torch.arange(4), torch.arange(3)) for _ in range(2)]
    monkeypatch.setattr(hetero, "MOST_INT32", 6)
    assert all(adj.sums_of is not None for adj in share_products(adjs))
    monkeypatch.setattr(hetero, "MOST_INT32", 5)
    assert all(adj.sums_of is None for adj in share_products(adjs))
