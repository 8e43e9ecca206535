import pytest
import torch
from adjacencies import HUBS, SHAPES, WITH_HUBS, make_adjacency
from torch.autograd import gradcheck
from torch_geometric.utils import scatter, softmax

from gas.native import attention as kernels
from gas.nn import Adjacency, gatv2_attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def inputs(adj, heads, width, dtype=torch.float64, grad=True):
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    source, target = (torch.randn(n, heads, width).to(dtype) for n in (adj.size(1), adj.size(0)))
    att = torch.randn(heads, width).to(kind) / width**0.5
    return [tensor.requires_grad_(grad) for tensor in (source, target, att)]


def expected(adj, source, target, att, slope=0.2):
    row, col = adj.coo()
    raw = torch.nn.functional.leaky_relu(source[col] + target[row], slope)
    weight = softmax((raw * att).sum(dim=-1), row, num_nodes=adj.size(0))
    return scatter(source[col] * weight[:, :, None], row, 0, adj.size(0), "sum")


@pytest.mark.parametrize("width", [1, 5, 8, 16, 32, 40])
@pytest.mark.parametrize("heads", [1, 3, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_softmax_and_scatter(shape, heads, width):
    adj = make_adjacency(*SHAPES[shape])
    tensors = inputs(adj, heads, width)
    out, wanted = gatv2_attention(adj, *tensors), expected(adj, *tensors)
    assert torch.allclose(out, wanted, atol=1e-12)
    grads = [torch.autograd.grad(o.pow(2).sum(), tensors) for o in (out, wanted)]
    for mine, other in zip(*grads, strict=True):
        assert torch.allclose(mine, other, atol=1e-10)


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.2, 1.5])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("shape", ["square", "bipartite", "one node"])
def test_gradients(shape, dropout, slope):
    adj = make_adjacency(*SHAPES[shape])

    def f(*tensors):
        torch.manual_seed(3)
        return gatv2_attention(adj, *tensors, negative_slope=slope, dropout=dropout)

    assert gradcheck(f, inputs(adj, 2, 3))


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", WITH_HUBS)
def test_twins(shape, p, dtype):
    adj = make_adjacency(*WITH_HUBS[shape])
    arguments = adj.matrix, *inputs(adj, 4, 19, dtype, grad=False), 0.2, p, torch.tensor(11)
    out, *state = kernels.attention_v2(*arguments)
    wanted = kernels._attention_v2_torch(*arguments)[0]
    tolerance = TOLERANCE[dtype]
    assert out.dtype == dtype
    assert torch.allclose(out, wanted, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(out)
    found = kernels.attention_v2_backward(*arguments, out, *state, grad)
    twin = kernels._attention_v2_backward_torch(*arguments, grad)
    for mine, other in zip(found, twin, strict=True):
        assert mine.dtype == other.dtype
        scale = max(1.0, float(other.abs().max()) if other.numel() else 1.0)
        assert torch.allclose(mine, other, rtol=0, atol=5 * tolerance * scale)


def test_the_derivative_at_zero_is_that_of_pytorch():
    adj = make_adjacency(*SHAPES["square"])
    tensors = [t.detach().mul(0).requires_grad_() for t in inputs(adj, 2, 8)[:2]]
    att = torch.randn(2, 8, dtype=torch.float64)
    weights = torch.randn(12, 2, 8, dtype=torch.float64)
    grads = [
        torch.autograd.grad((f(adj, *tensors, att) * weights).sum(), tensors)
        for f in (gatv2_attention, expected)
    ]
    assert all(torch.allclose(a, b) for a, b in zip(*grads, strict=True))


def test_dropout_keeps_the_mean():
    adj = make_adjacency(400, 400, 20000)
    source = torch.ones(400, 2, 1, dtype=torch.float64)
    out = gatv2_attention(adj, source, source, source[0], dropout=0.5)
    assert 0.97 < float(out[:-1].mean()) < 1.03
    assert float(out[:-1].std()) > 0.05
    assert torch.equal(
        gatv2_attention(adj, source, source, source[0], dropout=0.5, training=False),
        gatv2_attention(adj, source, source, source[0]),
    )


def test_large_scores_do_not_overflow():
    adj = make_adjacency(*SHAPES["square"])
    source, target, att = inputs(adj, 2, 4, torch.float32, grad=False)
    out = gatv2_attention(adj, source, target, att * 1e4)
    assert bool(torch.isfinite(out).all())
    wanted = expected(adj, source.double(), target.double(), (att * 1e4).double())
    assert torch.allclose(out.double(), wanted, atol=1e-2)


def test_scores_that_rise_along_a_hub():
    """Each piece of it has another maximum."""
    size = 10000
    adj = Adjacency(torch.tensor([0, size]), torch.arange(size), num_cols=size)
    rising = torch.linspace(-200, 200, size)
    target, att = torch.zeros(1, 2, 4), torch.ones(2, 4)
    for scores in (rising, -rising):
        scores = torch.stack([scores, scores.roll(size // 2)], dim=1)
        source = scores[:, :, None] / 4 + torch.randn(size, 2, 4) / 9
        out = gatv2_attention(adj, source, target, att)
        wanted = expected(adj, source.double(), target.double(), att.double())
        assert torch.allclose(out.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graph", [(3000, 4000, 60000), *HUBS.values()])
def test_twice_the_same_and_whatever_the_number_of_threads(graph):
    adj = make_adjacency(*graph)
    tensors = inputs(adj, 2, 8, torch.float32)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2, 2, 3):
        torch.set_num_threads(number)
        torch.manual_seed(0)
        out = gatv2_attention(adj, *tensors, dropout=0.3)
        results.append([out.detach(), *torch.autograd.grad(out.pow(2).sum(), tensors)])
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_compiled():
    adj = make_adjacency(*SHAPES["bipartite"])
    tensors = inputs(adj, 2, 8, torch.float32)

    def f(source, target, att):
        return gatv2_attention(adj, source * 2, target, att).relu()

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.allclose(out, f(*tensors))
    grads = [torch.autograd.grad(o.pow(2).sum(), tensors) for o in (out, f(*tensors))]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_the_operator_is_registered_properly():
    adj = make_adjacency(*SHAPES["bipartite"])
    seed = torch.zeros((), dtype=torch.int64)
    arguments = list(adj.matrix), *inputs(adj, 2, 4, torch.float32), 0.2, 0.0, seed
    torch.library.opcheck(torch.ops.gas.gatv2_attention, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": torch.ones(19, 8)}, r"'source' has shape \[19, 8\], expected 3 dimensions"),
        ({"target": torch.ones(7, 2, 3)}, r"'target' is .* \[7, 2, 3\], expected .* \[7, 2, 4\]"),
        ({"target": torch.ones(7, 2, 4).double()}, "'target' is torch.float64 of shape"),
        ({"att": torch.ones(1, 2, 4)}, r"'att' has shape \[1, 2, 4\], expected \[2, 4\]"),
        ({"dropout": 1.0}, r"'dropout' is 1.0, expected a probability in \[0, 1\)"),
    ],
)
def test_bad_input(change, message):
    given = {
        "adj": make_adjacency(*SHAPES["bipartite"]),
        "source": torch.ones(19, 2, 4),
        "target": torch.ones(7, 2, 4),
        "att": torch.ones(2, 4),
    }
    with pytest.raises(ValueError, match=message):
        gatv2_attention(**{**given, **change})
