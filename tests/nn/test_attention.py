import pytest
import torch
from adjacencies import HUBS, SHAPES, WITH_HUBS, make_adjacency
from torch.autograd import gradcheck
from torch_geometric.utils import scatter, softmax

from gas.native import attention as kernels
from gas.nn import Adjacency, gat_attention


def inputs(adj, heads, width, dtype=torch.float64, grad=True):
    x = torch.randn(adj.size(1), heads, width, dtype=dtype)
    source, target = (torch.randn(n, heads, dtype=dtype) for n in (adj.size(1), adj.size(0)))
    return [tensor.requires_grad_(grad) for tensor in (x, source, target)]


def expected(adj, x, source, target, slope=0.2):
    row, col = adj.coo()
    score = torch.nn.functional.leaky_relu(source[col] + target[row], slope)
    weight = softmax(score, row, num_nodes=adj.size(0))
    return scatter(x[col] * weight[:, :, None], row, 0, adj.size(0), "sum")


@pytest.mark.slow(fast=31)
@pytest.mark.parametrize("width", [1, 5, 8, 16, 32, 40])
@pytest.mark.parametrize("heads", [1, 3, 70])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_softmax_and_scatter(shape, heads, width):
    adj = make_adjacency(*SHAPES[shape])
    tensors = inputs(adj, heads, width)
    out, wanted = gat_attention(adj, *tensors), expected(adj, *tensors)
    assert torch.allclose(out, wanted, atol=1e-12)
    found = torch.autograd.grad(out.pow(2).sum(), tensors)
    for mine, other in zip(found, torch.autograd.grad(wanted.pow(2).sum(), tensors), strict=True):
        assert torch.allclose(mine, other, atol=1e-10)
    with torch.no_grad():
        assert torch.allclose(gat_attention(adj, *tensors), out, atol=1e-14)


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0, 1.5])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape, dropout, slope):
    adj = make_adjacency(*SHAPES[shape])
    if adj.num_entries > 100:
        adj = make_adjacency(2, 10, 60)

    def f(*tensors):
        torch.manual_seed(3)
        return gat_attention(adj, *tensors, negative_slope=slope, dropout=dropout)

    assert gradcheck(f, inputs(adj, 2, 3))


@pytest.mark.requires("native")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", WITH_HUBS)
def test_twins(shape, p, dtype, tolerance):
    adj = make_adjacency(*WITH_HUBS[shape])
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    x, source, target = inputs(adj, 4, 8, torch.float64, grad=False)
    x, source, target = x.to(dtype), source.to(kind), target.to(kind)
    arguments = adj.matrix, x, source, target, 0.2, p, torch.tensor(11)
    out, *state = kernels.attention(*arguments, True)
    wanted = kernels._attention_torch(*arguments)[0]
    assert out.dtype == dtype
    assert torch.allclose(out, wanted, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(out)
    found = kernels.attention_backward(*arguments, out, *state, grad)
    twin = kernels._attention_backward_torch(*arguments, grad)
    for mine, other in zip(found, twin, strict=True):
        assert mine.dtype == other.dtype
        assert torch.allclose(mine.double(), other.double(), rtol=tolerance, atol=10 * tolerance)


def test_dropout_keeps_the_mean():
    adj = make_adjacency(400, 400, 20000)
    x = torch.ones(400, 2, 1, dtype=torch.float64)
    scores = torch.zeros(400, 2, dtype=torch.float64)
    out = gat_attention(adj, x, scores, scores, dropout=0.5)
    assert 0.97 < float(out[:-1].mean()) < 1.03
    assert float(out[:-1].std()) > 0.05
    assert torch.equal(
        gat_attention(adj, x, scores, scores, dropout=0.5, training=False),
        gat_attention(adj, x, scores, scores),
    )


def test_large_scores_do_not_overflow():
    adj = make_adjacency(*SHAPES["square"])
    x, source, target = inputs(adj, 2, 4, torch.float32, grad=False)
    out = gat_attention(adj, x, source * 1e4, target * 1e4)
    assert bool(torch.isfinite(out).all())
    wanted = expected(adj, x.double(), (source * 1e4).double(), (target * 1e4).double())
    assert torch.allclose(out.double(), wanted, atol=1e-4)


def test_scores_that_rise_along_a_hub():
    """Each piece of it has another maximum."""
    size = 10000
    adj = Adjacency(torch.tensor([0, size]), torch.arange(size), num_cols=size)
    rising = torch.linspace(-200, 200, size)
    x, target = torch.randn(size, 2, 4), torch.zeros(1, 2)
    for source in (rising, -rising):
        source = torch.stack([source, source.roll(size // 2)], dim=1)
        out = gat_attention(adj, x, source, target)
        wanted = expected(adj, x.double(), source.double(), target.double())
        assert torch.allclose(out.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("graph", [(3000, 4000, 60000), *HUBS.values()])
def test_twice_the_same_and_whatever_the_number_of_threads(graph):
    adj = make_adjacency(*graph)
    tensors = inputs(adj, 2, 8, torch.float32)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2, 2):
        torch.set_num_threads(number)
        torch.manual_seed(0)
        out = gat_attention(adj, *tensors, dropout=0.3)
        results.append([out.detach(), *torch.autograd.grad(out.pow(2).sum(), tensors)])
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.slow
def test_compiled():
    adj = make_adjacency(*SHAPES["bipartite"])
    tensors = inputs(adj, 2, 8, torch.float32)

    def f(x, source, target):
        return gat_attention(adj, x * 2, source, target).relu()

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.allclose(out, f(*tensors))
    grads = [torch.autograd.grad(o.pow(2).sum(), tensors) for o in (out, f(*tensors))]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(19, 8)}, r"'x' has shape \[19, 8\], expected 3 dimensions"),
        ({"source": torch.ones(7, 2)}, r"'source' has shape \[7, 2\], expected \[19, 2\]"),
        ({"target": torch.ones(7, 3)}, r"'target' has shape \[7, 3\], expected \[7, 2\]"),
        ({"negative_slope": -0.1}, "'negative_slope' is -0.1, expected at least 0"),
        ({"dropout": 1.0}, r"'dropout' is 1.0, expected a probability in \[0, 1\)"),
    ],
)
def test_bad_input(change, message):
    given = {
        "adj": make_adjacency(*SHAPES["bipartite"]),
        "x": torch.ones(19, 2, 4),
        "source": torch.ones(19, 2),
        "target": torch.ones(7, 2),
    }
    with pytest.raises(ValueError, match=message):
        gat_attention(**{**given, **change})


@pytest.mark.parametrize("keep_state", [True, False])
def test_the_compiler_is_told_the_shapes(keep_state):
    adj = make_adjacency(*SHAPES["bipartite"])
    matrix, tensors = list(adj.matrix), inputs(adj, 2, 4, torch.float32, grad=False)
    seed = torch.zeros((), dtype=torch.int64)
    real = torch.ops.gas.gat_attention(matrix, *tensors, 0.2, 0.0, seed, keep_state)
    with torch._subclasses.FakeTensorMode() as fake:
        given = [fake.from_tensor(tensor) for tensor in (*matrix, *tensors, seed)]
        count = len(matrix)
        told = torch.ops.gas.gat_attention(
            given[:count], *given[count:-1], 0.2, 0.0, given[-1], keep_state
        )
    assert [tuple(t.shape) for t in told] == [tuple(t.shape) for t in real]
