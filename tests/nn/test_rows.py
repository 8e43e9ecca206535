"""A batch's own rows and its halo's (``Rows``) as input of operators and layers."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from adjacencies import make_adjacency
from torch.autograd import gradcheck, gradgradcheck

import gas
from gas import native, nn
from gas.history.rows import Rows, first_rows, join_own_and_halo
from gas.native import sparse as kernels
from gas.nn import GATConv, GCNConv, SAGEConv, dropout, edge_conv, gaussian_mixture, spmm
from gas.nn.conv import apply_rowwise, is_leading_view

ROWS, COLS = 7, 19
HALO = COLS - ROWS


def with_halo(own, rows, stored=True):
    """Both, the halo's in a history, in rows of which nothing else is known."""
    if not stored:
        return Rows(own, rows)
    place = torch.randperm(30)[: rows.size(0)]
    history = gas.History(30, own.size(1), dtype=own.dtype)
    history.emb.fill_(torch.nan)
    history.push(torch.full((30, own.size(1)), torch.nan))
    history.push(rows, place)
    return Rows(own, history.stored_rows(place, own.dtype))


def unpulled(own, rows):
    """Return the same, of a halo that must not be pulled."""
    x = with_halo(own, rows)
    x.halo.history.start_pull = lambda *_, **__: pytest.fail("the halo was pulled")
    return x


def make_rows(width=5, dtype=torch.float64, make=with_halo):
    """Return a batch's own rows with gradient, both as two parts, and both as a tensor."""
    own = torch.randn(ROWS, width, dtype=dtype, requires_grad=True) * 1
    own.retain_grad()
    rows = torch.randn(HALO, width, dtype=dtype)
    return own, make(own, rows), torch.cat([own, rows])


def gradient(out, *inputs):
    return torch.autograd.grad(out.pow(2).sum(), inputs, retain_graph=True)


# Operators ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
def test_products(reduce, weighted, stored):
    adj = make_adjacency(ROWS, COLS, 40, weighted=weighted and reduce in ("sum", "mean"))
    own, x, plain = make_rows(make=lambda own, rows: with_halo(own, rows, stored))
    out, wanted = spmm(adj, x, reduce=reduce), spmm(adj, plain, reduce=reduce)
    assert torch.equal(out, wanted)
    assert torch.equal(*gradient(out, own), *gradient(wanted, own))
    with torch.no_grad():
        assert torch.equal(spmm(adj, x, reduce=reduce), wanted)
    own = own.detach()
    assert not spmm(adj, with_halo(own, plain[ROWS:].detach(), stored)).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_other_types(dtype):
    adj = make_adjacency(ROWS, COLS, 40, weighted=True)
    own, x, plain = make_rows(37, dtype=dtype, make=unpulled)
    out, wanted = spmm(adj, x), spmm(adj, plain)
    assert torch.equal(out, wanted)
    assert torch.equal(*gradient(out, own), *gradient(wanted, own))


def test_the_twin_of_a_split_product(monkeypatch):
    adj = make_adjacency(ROWS, COLS, 40)
    _, x, plain = make_rows(make=unpulled)
    monkeypatch.setattr(native.extension, "has_kernels", lambda *_: False)
    assert torch.allclose(spmm(adj, x), spmm(adj, plain))
    assert torch.allclose(spmm(adj, x, reduce="mean"), spmm(adj, plain, reduce="mean"))


def test_gradients_of_gradients():
    adj = make_adjacency(ROWS, COLS, 40)
    halo = torch.randn(HALO, 2, dtype=torch.float64)
    own = torch.randn(ROWS, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, dtype=torch.float64, requires_grad=True)

    def f(own, weight):
        return spmm(adj, with_halo(own * 1, halo), weight, reduce="mean").pow(2)

    assert gradcheck(f, (own, weight))
    assert gradgradcheck(f, (own, weight.detach()))


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_no_gradient_is_computed_for_the_halo(monkeypatch, reduce):
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, _ = make_rows()
    rows = []
    name = "multiply" if reduce == "sum" else "extreme_backward"
    function = getattr(kernels, name)

    def watched(*args):
        rows.append(args[-1])
        return function(*args)

    monkeypatch.setattr(kernels, name, watched)
    spmm(adj, dropout(x, 0.5), reduce=reduce).sum().backward()
    assert rows[-1] == ROWS
    assert own.grad.shape == (ROWS, 5)


def test_dropout_spares_the_halo():
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows(make=unpulled)
    torch.manual_seed(1)
    one = dropout(x, 0.4)
    torch.manual_seed(1)
    wanted = torch.cat([dropout(own, 0.4), plain[ROWS:]])
    assert bool((wanted[:ROWS] == 0).any())
    out, other = spmm(adj, one), spmm(adj, wanted)
    assert torch.equal(out, other)
    assert torch.equal(*gradient(out, own), *gradient(other, own))
    assert dropout(x, 0.4, training=False) is x
    layer = gas.nn.Dropout(0.4)
    torch.manual_seed(1)
    assert torch.equal(spmm(adj, layer(x)), other)
    assert layer.eval()(x) is x
    torch.manual_seed(1)
    assert torch.equal(spmm(adj, gas.nn.Dropout(0.4, inplace=True)(x)), other)
    assert torch.equal(spmm(adj, x), spmm(adj, plain))  # It is as it was.


# Layers -------------------------------------------------------------------------------------------


def test_row_by_row():
    own, x, plain = make_rows()
    lin = torch.nn.Linear(5, 3).double()
    out, wanted = apply_rowwise(lin, x), lin(plain)
    assert torch.allclose(out, wanted)
    inputs = (own, *lin.parameters())
    for mine, other in zip(gradient(out, *inputs), gradient(wanted, *inputs), strict=True):
        assert torch.allclose(mine, other)


def same(conv, x, own, plain, adj, *args):
    """Return whether a layer gives the same outputs and gradients for both, by the same path."""
    results, paths = [], []
    for rows in (x, plain):
        torch.manual_seed(0)
        out = conv(*(rows if isinstance(rows, tuple) else (rows,)), *args, adj)
        paths.append(conv.path)
        inputs = (own, *(p for p in conv.parameters()))
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), inputs, allow_unused=True)])
    for mine, other in zip(*results, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.allclose(mine, other, rtol=1e-6)
    return paths[0] if paths[0] == paths[1] else paths


@pytest.mark.parametrize(
    ("conv", "pulls"),
    [
        (lambda: GCNConv(5, 40, normalize=False), False),  # Aggregates first.
        (lambda: GCNConv(5, 1, normalize=False), True),  # Transforms first.
        (lambda: SAGEConv(5, 4), False),
        (lambda: SAGEConv(5, 4, aggr="max"), True),
        (lambda: nn.GINConv(torch.nn.Linear(5, 4)), False),
        (lambda: nn.GraphConv(5, 4), False),
        (lambda: nn.SimpleConv(combine_root="sum"), False),
        (lambda: GATConv(5, 4, heads=2, add_self_loops=False), True),
        (lambda: nn.GATv2Conv(5, 4, heads=2, add_self_loops=False, share_weights=True), True),
        (lambda: nn.EdgeConv(torch.nn.Linear(10, 4)), True),
        # PyG's own way, which takes tensors.
        (lambda: SAGEConv(5, 4, project=True), True),
        (lambda: SAGEConv(5, 4, aggr="median"), True),
        (lambda: GATConv(5, 4, add_self_loops=False, aggr="mean"), True),
        (lambda: nn.GATv2Conv(5, 4, add_self_loops=False, aggr="mean"), True),
        (lambda: nn.EdgeConv(torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in "ab"))), True),
    ],
)
def test_convolutions(conv, pulls):
    torch.manual_seed(0)
    conv = conv().double()
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows(make=with_halo if pulls else unpulled)
    pairs = isinstance(conv, GCNConv)
    path = same(conv, x, own, plain if pairs else ((plain, plain[:ROWS]),), adj)
    assert path == "fused" or path.startswith("pyg: ")
    if not pairs:
        same(conv, ((x, own),), own, ((plain, plain[:ROWS]),), adj)


def test_convolutions_with_more_arguments():
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows(make=unpulled)
    conv = nn.GCN2Conv(5, 0.1, 0.5, 1, normalize=False).double()
    first = torch.randn(ROWS, 5).double()
    assert same(conv, x, own, plain, adj, first) == "fused"
    own, x, plain = make_rows()
    edge_attr = torch.rand(40, 2).double()
    for options in ({}, {"separate_gaussians": True}):
        for out_channels in (4, 40):  # Sums first, and transforms first.
            conv = nn.GMMConv(5, out_channels, dim=2, kernel_size=3, **options).double()
            results = [conv(rows, adj, edge_attr) for rows in (x, (plain, plain[:ROWS]))]
            assert torch.allclose(*results)
            assert torch.allclose(*(gradient(out, own)[0] for out in results))


def test_convolutions_on_other_adjacencies():
    """They leave it to PyG, which takes tensors."""
    adj = make_adjacency(ROWS, COLS, 40, weighted=True)
    own, x, plain = make_rows()
    csr = adj.to_torch_sparse()
    for conv in (SAGEConv(5, 4, aggr="sum").double(), GATConv(5, 4, add_self_loops=False).double()):
        assert same(conv, x, own, ((plain, plain[:ROWS]),), csr).startswith("pyg: the adjacency")
    conv = GCNConv(5, 4, normalize=False).double()
    assert same(conv, x, own, plain, csr).startswith("pyg: the adjacency")


# What it is, and what it isn't --------------------------------------------------------------------


def test_what_is_known_without_the_halo():
    own, x, plain = make_rows(make=unpulled)
    assert x.shape == plain.shape
    assert [x.size(0), x.size(-1), x.dim()] == [COLS, 5, 2]
    for name in ("dtype", "device", "requires_grad"):
        assert getattr(x, name) == getattr(plain, name)
    assert repr(x) == "Rows([19, 5], own=7, dtype=torch.float64, halo in place)"
    assert repr(Rows(own, plain[ROWS:])) == "Rows([19, 5], own=7, dtype=torch.float64)"
    assert first_rows(x, ROWS) is own
    assert is_leading_view(x, own)
    assert not is_leading_view(x, own * 1)
    with pytest.raises(AttributeError, match="cannot assign to field 'own'"):
        x.own = own


@pytest.mark.parametrize("stored", [True, False])
def test_a_tensor_of_it_is_the_callers(stored):
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows(make=lambda own, rows: with_halo(own, rows, stored))
    wanted = spmm(adj, plain)
    whole = x.tensor()
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, plain)
    assert torch.equal(*gradient(whole, own), *gradient(plain, own))
    whole.mul_(3)
    assert torch.equal(x.tensor(), plain)
    assert torch.equal(spmm(adj, x), wanted)
    assert torch.equal(first_rows(x, ROWS + 2), plain[: ROWS + 2])
    empty = with_halo(own, plain[:0].detach(), stored)
    assert empty.tensor().relu_() is not own
    assert torch.equal(own, plain[:ROWS])


CURE = "gas.nn take Rows, for anything else make a tensor of it by .tensor()"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x * torch.ones(5),
        lambda x: torch.ones(5) * x,
        lambda x: x @ torch.ones(5, 2),
        lambda x: x[3:9],
        lambda x: x[:ROWS],
        lambda x: x == 0,
        lambda x: list(x),
        lambda x: len(x),
        lambda x: bool(x),
        lambda x: -x,
        lambda x: np.asarray(x),
        lambda x: torch.relu(x),
        lambda x: F.dropout(x, 0.5),
        lambda x: F.linear(x, torch.ones(2, 5)),
        lambda x: torch.nn.Linear(5, 2)(x),
        lambda x: torch.nn.Dropout(0.5)(x),
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack([torch.ones(5), x]),
        lambda x: torch.empty_like(x),
        lambda x: torch.ones(19).copy_(x),
        lambda x: pyg.GCNConv(5, 2)(x, torch.zeros(2, 0, dtype=torch.int64)),
        lambda x: edge_conv(make_adjacency(ROWS, COLS, 40), torch.ones(ROWS, 5), x),
        lambda x: gaussian_mixture(make_adjacency(ROWS, COLS, 40), x, *torch.ones(3, 1, 1)),
        lambda x: nn.gat_attention(make_adjacency(ROWS, COLS, 40), x, *torch.ones(2, 1, 1)),
        lambda x: nn.gatv2_attention(make_adjacency(ROWS, COLS, 40), x, *torch.ones(2, 1, 1)),
    ],
)
def test_everything_else_refuses_it_by_name(function):
    for x in (make_rows()[1], make_rows(make=Rows)[1]):
        with pytest.raises(TypeError, match=r"^(\w+\(\) can't take Rows|'\w+' is Rows)") as error:
            function(x)
        assert CURE in str(error.value)
        for name in ("relu", "T", "numpy", "register_hook"):
            with pytest.raises(AttributeError, match=f"Rows has no '{name}'") as error:
                getattr(x, name)
            assert CURE in str(error.value)


def test_it_is_an_object_like_others():
    _, x, plain = make_rows()
    assert x in [x]
    assert {x: 1}[x] == 1
    assert copy.copy(x).own is x.own
    pulled = Rows(plain[:ROWS].detach(), plain[ROWS:].detach())
    for twin in (copy.deepcopy(pulled), pickle.loads(pickle.dumps(pulled))):
        assert torch.equal(twin.tensor(), plain)


def test_join():
    own, _, plain = make_rows()
    rows = torch.cat([torch.full_like(own.detach(), torch.nan), plain[ROWS:].detach()])
    for behind in (rows.clone(), rows.float()):
        whole = join_own_and_halo(own, behind)
        assert type(whole) is torch.Tensor
        assert whole.dtype == own.dtype
        assert torch.allclose(whole, plain)
        assert torch.allclose(*gradient(whole, own), *gradient(plain, own))
        assert torch.equal(*torch.autograd.grad(whole.mul_(2).sum(), own), torch.full_like(own, 2))
    with torch.no_grad():
        assert not join_own_and_halo(own, rows.clone()).requires_grad


# The table changes first --------------------------------------------------------------------------

REFUSED = r"read where a history stores them, and it has changed .* or ask for a tensor"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: spmm(make_adjacency(ROWS, COLS, 40), x),
        lambda x: spmm(make_adjacency(ROWS, COLS, 40), x, reduce="max"),
        lambda x: apply_rowwise(torch.tanh, x),
        lambda x: first_rows(x, COLS),
        lambda x: x.tensor(),
        lambda x: dropout(x, 0.5).tensor(),
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda history, index: history.push(torch.zeros(30, 5)),
        lambda history, index: history.push(torch.zeros(1, 5), index[2:3]),
        lambda history, index: history.push(torch.zeros(1, 5), None, index[2:3], [1]),
        lambda history, index: history.emb.mul_(2),
        lambda history, index: history.reset_parameters(),
        lambda history, index: history.close(),
    ],
)
def test_rows_of_a_table_that_has_changed_are_refused(change, read):
    _, x, _ = make_rows()
    change(x.halo.history, x.halo.index)
    with pytest.raises(RuntimeError, match=REFUSED):
        read(x)


@pytest.mark.filterwarnings("ignore:A history was read")
def test_changes_by_a_tensor_that_was_taken_before():
    history = gas.History(30, 5)
    table = history.emb
    x = Rows(torch.ones(ROWS, 5), history.stored_rows(torch.arange(HALO), torch.float32))
    table[0] = 1
    with pytest.raises(RuntimeError, match=REFUSED):
        x.tensor()


def test_other_rows_may_change():
    """Such as the batch's own, which are pushed after a first forward pass."""
    adj = make_adjacency(ROWS, COLS, 40)
    _, x, plain = make_rows()
    history, index = x.halo.history, x.halo.index
    others = torch.ones(30, dtype=torch.bool)
    others[index] = False
    history.push(torch.zeros(18, 5), others.nonzero().view(-1))
    assert bool(history.emb.isfinite().all())  # Nor does a look change anything.
    assert torch.equal(spmm(adj, x), spmm(adj, plain))
    assert torch.equal(x.tensor(), plain)


def test_rows_that_were_pulled_stay():
    _, x, plain = make_rows(make=lambda own, rows: with_halo(own, rows))
    assert torch.equal(x.halo_tensor(), plain[ROWS:])
    x.halo.history.push(torch.zeros(30, 5))
    assert torch.equal(x.tensor(), plain)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("learns", [False, True])
def test_no_backward_pass_reads_the_table(reduce, learns):
    adj = make_adjacency(ROWS, COLS, 40)
    weight = torch.randn(40, dtype=torch.float64, requires_grad=True)
    weight = weight if learns and reduce != "max" else None
    own, x, plain = make_rows()
    inputs = [own] if weight is None else [own, weight]
    out, wanted = spmm(adj, x, weight, reduce), spmm(adj, plain, weight, reduce)
    x.halo.history.push(torch.zeros(30, 5))  # The next batch, before this one's backward pass.
    for mine, other in zip(gradient(out, *inputs), gradient(wanted, *inputs), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "conv",
    [
        GCNConv(5, 40, normalize=False),
        GCNConv(5, 1, normalize=False),
        SAGEConv(5, 4),
        GATConv(5, 4, add_self_loops=False),
        nn.EdgeConv(torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.ELU()), aggr="sum"),
    ],
)
def test_nor_does_that_of_a_layer(conv):
    adj = make_adjacency(ROWS, COLS, 40)
    conv = copy.deepcopy(conv).double()
    own, x, plain = make_rows()
    outs = [conv(x, adj), conv(plain if isinstance(conv, GCNConv) else (plain, own), adj)]
    x.halo.history.push(torch.zeros(30, 5))
    inputs = (own, *conv.parameters())
    for mine, other in zip(*(gradient(out, *inputs) for out in outs), strict=True):
        assert torch.allclose(mine, other)


def test_checkpoints_that_read_again():
    """A block that is computed again in the backward pass reads the table again."""
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows()

    def block(x):
        return torch.utils.checkpoint.checkpoint(
            lambda rows: spmm(adj, rows).tanh(), x, use_reentrant=False
        )

    out, wanted = block(x), spmm(adj, plain).tanh()
    assert torch.equal(*gradient(out, own), *gradient(wanted, own))
    out = block(x)
    x.halo.history.push(torch.zeros(30, 5))
    with pytest.raises(RuntimeError, match=REFUSED):
        gradient(out, own)


def test_inference_mode():
    adj = make_adjacency(ROWS, COLS, 40)
    _, x, plain = make_rows()
    with torch.inference_mode():
        assert torch.equal(x.tensor(), plain)
        assert torch.equal(spmm(adj, x), spmm(adj, plain))
        history = gas.History(30, 5)
        history.push(torch.randn(30, 5))
        stored = history.stored_rows(torch.arange(HALO), torch.float32)
        assert torch.equal(stored.pull(), history.emb[:HALO])
    assert x.tensor().requires_grad


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # The compiler looks at it.
def test_compiled():
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows()
    for conv in (SAGEConv(5, 4).double(), GCNConv(5, 1, normalize=False).double()):
        rows = plain if isinstance(conv, GCNConv) else (plain, own)
        compiled = torch.compile(conv, backend="aot_eager")
        results = [compiled(x, adj), conv(rows, adj)]
        assert torch.allclose(*results)
        assert torch.allclose(*(gradient(out, own)[0] for out in results))


def test_first_rows_of_sparse_features_end_as_those_of_a_dense_matrix_do():
    dense = torch.eye(5)
    for size in (0, 3, 5, 7):
        assert torch.equal(first_rows(dense.to_sparse_csr(), size).to_dense(), dense[:size])
