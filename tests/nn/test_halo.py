"""A batch's own rows and its halo's, which are put together only for those who need them whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
from adjacencies import make_adjacency
from torch.autograd import gradcheck, gradgradcheck

import gas
from gas import _operators
from gas.nn import GATConv, GCNConv, SAGEConv, dropout, spmm
from gas.nn.halo import BatchRows, Halo, first_rows, is_front, parts_of, row_by_row

ROWS, COLS = 7, 19
HALO = COLS - ROWS


def behind(own, rows):
    return torch.cat([torch.full_like(own, torch.nan), rows])


def with_halo(own, rows, stored=True):
    """Both, as push_and_pull returns them."""
    own = own if own.requires_grad else own.detach()
    place = torch.randperm(30)[: rows.size(0)]
    table = torch.full((30, own.size(1)), torch.nan, dtype=own.dtype)
    table[place] = rows
    halo = Halo(rows.size(0), lambda: behind(own.detach(), rows))
    if stored:
        halo.stored = table, place
    return BatchRows.of(own, halo)


def unpulled(own, rows):
    """The same, of a halo that nobody may pull."""
    x = with_halo(own, rows)
    x.halo._pull = lambda: pytest.fail("the halo was pulled")
    return x


def make_rows(width=5, dtype=torch.float64, make=with_halo):
    """A batch's own rows with gradient, both as push_and_pull returns them, and an ordinary one."""
    own = torch.randn(ROWS, width, dtype=dtype, requires_grad=True) * 1
    own.retain_grad()
    rows = torch.randn(HALO, width, dtype=dtype)
    return own, make(own, rows), torch.cat([own, rows])


def gradient(out, *inputs):
    return torch.autograd.grad(out.pow(2).sum(), inputs, retain_graph=True)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("weighted", [False, True])
def test_products(reduce, weighted, stored):
    adj = make_adjacency(ROWS, COLS, 40, weighted=weighted and reduce in ("sum", "mean"))
    own, x, plain = make_rows(make=lambda own, rows: with_halo(own, rows, stored))
    out, wanted = spmm(adj, x, reduce=reduce), spmm(adj, plain, reduce=reduce)
    assert parts_of(x) is x
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
    monkeypatch.setattr(_operators, "has_kernels", lambda *_: False)
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


def test_weights_learn_from_the_rows_of_the_forward_pass():
    adj = make_adjacency(ROWS, COLS, 40)
    weight = torch.randn(40, dtype=torch.float64, requires_grad=True)
    _, x, plain = make_rows()
    table, _ = x.halo.stored
    out = spmm(adj, x, weight)
    table.zero_()  # The next batch pushes.
    assert torch.equal(*gradient(out, weight), *gradient(spmm(adj, plain, weight), weight))


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_no_gradient_is_computed_for_the_halo(monkeypatch, reduce):
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, _ = make_rows()
    rows = []
    name = "multiply" if reduce == "sum" else "extreme_backward"
    function = getattr(_operators, name)

    def watched(*args):
        rows.append(args[5] if reduce == "sum" else args[-1])
        return function(*args)

    monkeypatch.setattr(_operators, name, watched)
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


def test_tensors_of_one_halo_have_rows_of_their_own():
    _, x, plain = make_rows(make=lambda own, rows: with_halo(own, rows, stored=False))
    torch.manual_seed(1)
    dropped = dropout(x, 0.4)
    first, second = x * 1, dropped * 1
    assert torch.equal(first, plain)
    assert torch.equal(second[ROWS:], plain[ROWS:])
    assert not torch.equal(second[:ROWS], plain[:ROWS])
    dropped.zero_()
    assert torch.equal(x, plain)
    assert not dropped.any()


# An ordinary tensor to everything else ------------------------------------------------------------


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # The compiler looks at it.
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x.relu(),
        lambda x: F.dropout(x, 0.5) if torch.manual_seed(0) else x,
        lambda x: torch.cat([x, x], dim=1),
        lambda x: x[3:9],
        lambda x: x[:ROWS],
        lambda x: x[: ROWS + 2],
        lambda x: x[torch.arange(COLS) % 3 == 0],
        lambda x: F.linear(x, torch.ones(2, 5, dtype=x.dtype)),
        lambda x: torch.ones(2, COLS, dtype=x.dtype) @ x,
        lambda x: torch.stack(x.unbind(1)),
        lambda x: Twice.apply(x),
        lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False),
        lambda x: torch.compile(torch.nn.Tanh(), backend="aot_eager")(x),
        lambda x: x.mul_(3) * x,
        lambda x: copy.deepcopy(x.detach()) + x,
        lambda x: row_by_row(torch.tanh, x),
        lambda x: first_rows(x, ROWS + 1),
    ],
)
def test_everything_else_sees_an_ordinary_tensor(function):
    own, x, plain = make_rows()
    out, wanted = function(x), function(plain)
    assert type(out) is torch.Tensor
    assert torch.equal(out, wanted)
    assert torch.equal(*gradient(out, own), *gradient(wanted, own))


def test_its_shape_is_known_without_the_halo():
    own, x, plain = make_rows(make=unpulled)
    for look in (torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, len):
        assert look(x) == look(plain)
    for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf"):
        assert getattr(x, name) == getattr(plain, name)
    assert isinstance(x, torch.Tensor)
    assert x[:ROWS] is own
    assert is_front(x, own)
    assert not is_front(x, own * 1)


def test_the_gradient_of_a_kept_tensor():
    _, x, plain = make_rows()
    adj = make_adjacency(ROWS, COLS, 40)
    for tensor in (x, plain):
        tensor.retain_grad()
        spmm(adj, tensor).pow(2).sum().backward(retain_graph=True)
    assert torch.equal(x.grad, plain.grad)


def test_it_can_be_printed_and_saved(tmp_path):
    _, x, plain = make_rows()
    assert repr(x.detach()) == repr(plain.detach())
    torch.save(x.detach(), tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), plain)


def test_in_place_changes_are_seen():
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, _ = make_rows()
    x.mul_(3)
    assert parts_of(x) is None
    assert not is_front(x, own)
    found = torch.autograd.grad(spmm(adj, x).sum(), own)[0]
    assert torch.allclose(found, 3 * adj.to_torch_sparse().to_dense().sum(0)[:ROWS, None].double())


@pytest.mark.parametrize("use", [lambda x: x + 1, parts_of])
def test_rows_that_were_changed_before_they_are_used(use):
    own, x, _ = make_rows()
    own.mul_(2)
    with pytest.raises(RuntimeError, match="given to push_and_pull, .* clone"):
        use(x)


def test_without_a_gradient_and_without_a_halo():
    own, x, plain = make_rows()
    with torch.inference_mode():
        inner = with_halo(own * 1, plain[ROWS:])
        assert torch.equal(inner * 1, plain)
    assert not with_halo(own.detach(), plain[ROWS:].detach()).requires_grad
    empty = with_halo(own, plain[:0].detach())
    assert empty.relu_() is not own  # Somebody's tensor, as with a halo.
    with torch.no_grad():
        assert not (x * 1).requires_grad
    assert (x * 1).requires_grad


def test_other_types_than_the_batchs_own():
    adj = make_adjacency(ROWS, COLS, 40)
    own, _, plain = make_rows(dtype=torch.bfloat16)
    rows = plain[ROWS:].detach().float()
    x = BatchRows.of(own, Halo(HALO, lambda: behind(own.detach().float(), rows)))
    assert torch.equal(spmm(adj, x), spmm(adj, plain))
    assert torch.equal(x * 1, plain)


def test_row_by_row():
    own, x, plain = make_rows()
    lin = torch.nn.Linear(5, 3).double()
    out, wanted = row_by_row(lin, x), lin(plain)
    assert parts_of(x) is x
    assert torch.allclose(out, wanted)
    inputs = (own, *lin.parameters())
    for mine, other in zip(gradient(out, *inputs), gradient(wanted, *inputs), strict=True):
        assert torch.allclose(mine, other)


@pytest.mark.parametrize(
    ("conv", "pair", "pulls"),
    [
        (lambda: GCNConv(5, 40, normalize=False), False, False),  # Aggregates first.
        (lambda: GCNConv(5, 1, normalize=False), False, True),  # Transforms first.
        (lambda: SAGEConv(5, 4), True, False),
        (lambda: GATConv(5, 4, heads=2, add_self_loops=False), True, True),
    ],
)
def test_convolutions(conv, pair, pulls):
    torch.manual_seed(0)
    conv = conv().double()
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows(make=with_halo if pulls else unpulled)
    results = []
    for rows in (x, plain):
        out = conv((rows, rows[:ROWS]) if pair else rows, adj)
        assert conv.path == "fused"
        results.append([out, *gradient(out, own, *conv.parameters())])
    assert parts_of(x) is x
    for mine, other in zip(*results, strict=True):
        assert torch.allclose(mine, other, rtol=1e-10)


# What others may do between two uses --------------------------------------------------------------


def test_a_gradient_that_comes_in_place():
    adj = make_adjacency(ROWS, COLS, 40)
    factor = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    for reduce in ("sum", "max"):
        found = []
        own, rows = torch.randn(ROWS, 2).double(), torch.randn(HALO, 2).double()
        for x in (with_halo(own, rows), torch.cat([own, rows])):
            x.mul_(factor)
            assert x.requires_grad
            found += gradient(spmm(adj, x, reduce=reduce), factor)
        assert torch.allclose(*found)
        assert bool(found[0] != 0)


@pytest.mark.parametrize("stored", [True, False])
def test_uses_of_a_part_and_of_the_whole(stored):
    adj = make_adjacency(ROWS, COLS, 40)
    torch.manual_seed(0)
    convs = [
        GATConv(5, 4, heads=2, add_self_loops=False).double(),
        GCNConv(5, 1, normalize=False).double(),
    ]
    for conv in convs:
        own, x, plain = make_rows(make=lambda own, rows: with_halo(own, rows, stored))
        results = []
        for each in (x, plain):
            first = conv((each, each[:ROWS]), adj) if conv is convs[0] else conv(each, adj)
            out = first.sum() + F.elu(each)[:ROWS].sum() + spmm(adj, each, reduce="max").sum()
            out = out + row_by_row(conv.lin, each).sum() + spmm(adj, each).sum()
            results.append([out, *gradient(out, own, *conv.parameters())])
        for mine, other in zip(*results, strict=True):
            assert torch.allclose(mine, other)


@pytest.mark.parametrize("first", ["dropout", "whole"])
def test_in_place_changes_stay_with_the_tensor(first):
    own, x, plain = make_rows(make=lambda own, rows: with_halo(own, rows, stored=False))
    if first == "whole":
        assert torch.equal(x * 1, plain)
    dropped = dropout(x, 0.4)
    x.mul_(3)
    assert torch.equal(dropped[ROWS:], plain[ROWS:])
    assert torch.equal(x, 3 * plain)
    assert not x.halo.rows().requires_grad
    assert own.requires_grad


def test_looking_at_it_changes_nothing():
    adj = make_adjacency(ROWS, COLS, 40)
    _, x, plain = make_rows()
    assert bool(x.isfinite().all())
    assert parts_of(x) is x
    torch.manual_seed(0)
    dropped = dropout(x, 0.5)
    assert torch.equal(dropped[ROWS:], plain[ROWS:])
    assert torch.equal(spmm(adj, x), spmm(adj, plain))
    x.register_hook(lambda grad: grad)  # Its gradient has to come as a whole now.
    assert parts_of(x) is None


def test_given_rows_that_are_changed_after_a_look():
    """It was put together by then: it keeps what it had."""
    adj = make_adjacency(ROWS, COLS, 40)
    own, x, plain = make_rows()
    wanted = spmm(adj, plain)
    assert bool(x.isfinite().all())
    with torch.no_grad():
        own.mul_(2)
    assert torch.equal(spmm(adj, x), wanted)
    assert torch.equal(x[:ROWS], plain[:ROWS])
    assert torch.equal(first_rows(dropout(x, 0.0), ROWS), plain[:ROWS])


def test_its_first_rows_and_then_itself_changed():
    _, x, _ = make_rows()
    assert x[:ROWS] is x.own
    with pytest.raises(RuntimeError, match="or the first rows of that were changed in place"):
        x.relu_()
    with torch.inference_mode():
        own, rows = torch.randn(ROWS, 2), torch.randn(HALO, 2)
        wanted = torch.cat([own, rows])
        x = with_halo(own, rows)
        own.zero_()
        assert torch.equal(x, wanted)


class TwiceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_autograd_functions_that_work_in_place():
    _, x, _ = make_rows()
    with pytest.raises((RuntimeError, SystemError)) as error:  # PyTorch wraps it at times.
        TwiceInPlace.apply(x).sum()
    reason = str(error.value.__cause__ or error.value)
    assert "an autograd function that works in place: give it a clone()" in reason


def test_a_look_in_inference_mode():
    _, x, plain = make_rows()
    with torch.inference_mode():
        assert torch.equal(x, plain)
    assert (x * 1).requires_grad


def test_without_gradient_it_stays_without():
    own, _, plain = make_rows()
    adj = make_adjacency(ROWS, COLS, 40)
    with torch.no_grad():
        x = with_halo(own, plain[ROWS:].detach())
    for out in (x * 1, spmm(adj, x), x[:ROWS]):
        assert not out.requires_grad
