import pytest
import torch
from adjacencies import HUBS, SHAPES, WITH_HUBS, make_adjacency
from torch.autograd import gradcheck
from torch_geometric.utils import scatter

from gas import native
from gas.native import mixture as kernels
from gas.nn import gaussian_mixture

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
NAMES = ("x", "pseudo", "mu", "sigma")


def inputs(adj, kernels, dims, width, shared=False, dtype=torch.float64, grad=True):
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    x = torch.randn(adj.size(1), *(() if shared else (kernels,)), width, dtype=torch.float64)
    mixture = (
        torch.rand(adj.num_entries, dims),
        torch.rand(kernels, dims),
        torch.rand(kernels, dims),
    )
    tensors = x.to(dtype), *(tensor.to(kind) + 0.1 for tensor in mixture)
    return [tensor.requires_grad_(grad) for tensor in tensors]


def expected(adj, x, pseudo, mu, sigma, reduce):
    row, col = adj.coo()
    exponent = -0.5 * (pseudo[:, None] - mu) ** 2 / (1e-15 + sigma**2)
    weight = exponent.sum(dim=-1).exp()[:, :, None]
    rows = x[col][:, None] * weight if x.dim() == 2 else (x[col] * weight).sum(dim=1)
    return scatter(rows, row, 0, adj.size(0), reduce)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_gather_and_scatter(shape, reduce, shared):
    adj = make_adjacency(*SHAPES[shape], weighted=True)
    for count, dims, width in ((1, 1, 1), (3, 2, 16), (5, 3, 27), (9, 1, 40)):
        tensors = inputs(adj, count, dims, width, shared)
        out = gaussian_mixture(adj, *tensors, reduce)
        wanted = expected(adj, *tensors, reduce)
        assert torch.allclose(out, wanted, atol=1e-11)
        grads = [torch.autograd.grad(o.pow(2).sum(), tensors) for o in (out, wanted)]
        for mine, other in zip(*grads, strict=True):
            assert torch.allclose(mine, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("alone", ["", *NAMES])
def test_gradients(alone, reduce, shared):
    """Of everything, and of one tensor alone."""
    adj = make_adjacency(*SHAPES["bipartite"])
    tensors = inputs(adj, 2, 3, 3, shared)
    for name, tensor in zip(NAMES, tensors, strict=True):
        tensor.requires_grad_(alone in ("", name))
    assert gradcheck(lambda *tensors: gaussian_mixture(adj, *tensors, reduce), tensors)


@pytest.mark.slow(fast=17)
@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", WITH_HUBS)
def test_twins(shape, transposed, dtype, monkeypatch):
    adj = make_adjacency(*WITH_HUBS[shape])
    sides = adj.shape[::-1] if transposed else adj.shape
    _, *mixture = inputs(adj, 4, 2, 1, False, dtype, grad=False)
    own, one = torch.randn(sides[0], 4, 19).to(dtype), torch.randn(sides[1], 19).to(dtype)
    many = torch.randn(sides[1], 4, 19).to(dtype)

    def results():
        return [
            kernels.spread(adj.matrix, one, *mixture, True, transposed),
            kernels.collapse(adj.matrix, many, *mixture, True, transposed),
            *kernels.backward(adj.matrix, own, one, *mixture, True, True, transposed),
            *kernels.backward(adj.matrix, own, one, *mixture, False, False, transposed),
        ]

    natively = results()
    monkeypatch.setattr(native.extension, "has_kernels", lambda *tensors: False)
    for mine, other in zip(natively, results(), strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        scale = max(1.0, float(other.abs().max()) if other.numel() else 1.0)
        assert torch.allclose(mine, other, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("graph", [(3000, 4000, 60000), *HUBS.values()])
def test_twice_the_same_and_whatever_the_number_of_threads(graph, shared):
    adj = make_adjacency(*graph)
    tensors = inputs(adj, 3, 2, 24, shared, torch.float32)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2, 2, 3):
        torch.set_num_threads(number)
        out = gaussian_mixture(adj, *tensors)
        results.append([out.detach(), *torch.autograd.grad(out.pow(2).sum(), tensors)])
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_sums_over_all_edges_are_precise():
    """Added up in float64, whatever the type: errors do not grow with the number of edges."""
    adj = make_adjacency(500, 500, 200_000)
    tensors = inputs(adj, 2, 2, 4, False, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    outs = gaussian_mixture(adj, *tensors), expected(adj, *exact, "mean")
    found, wanted = map(torch.autograd.grad, (o.sum() for o in outs), (tensors, exact))
    for mine, other in zip(found[2:], wanted[2:], strict=True):
        assert torch.allclose(mine.double(), other, rtol=0, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("shared", [False, True])
def test_compiled(shared):
    adj = make_adjacency(*SHAPES["bipartite"])
    tensors = inputs(adj, 3, 2, 8, shared, torch.float32)

    def f(x, *mixture):
        return gaussian_mixture(adj, x * 2, *mixture).relu()

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.allclose(out, f(*tensors))
    grads = [torch.autograd.grad(o.pow(2).sum(), tensors) for o in (out, f(*tensors))]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_the_operators_are_registered_properly(shared):
    adj = make_adjacency(*SHAPES["bipartite"])
    arguments = list(adj.matrix), *inputs(adj, 3, 2, 4, shared, torch.float32), True, False
    name = "mixture_spread" if shared else "mixture_collapse"
    torch.library.opcheck(getattr(torch.ops.gas, name), arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adj": torch.eye(3)}, "'adj' is a Tensor, expected a gas.nn.Adjacency: use"),
        ({"x": torch.ones(5, 2, 3)}, r"'x' has shape \[5, 2, 3\], expected .* the 19 columns"),
        ({"x": torch.ones(19)}, r"'x' has shape \[19\], expected 3 dimensions"),
        ({"x": torch.ones(19, 4, 3)}, r"'mu' has shape \[2, 3\], expected \[4, dims\]"),
        ({"mu": torch.ones(2)}, r"'mu' has shape \[2\], expected \[2, dims\]"),
        ({"sigma": torch.ones(2, 2)}, r"'sigma' has shape \[2, 2\], expected \[2, 3\]"),
        ({"pseudo": torch.ones(40, 2)}, r"'pseudo' has shape \[40, 2\], expected \[40, 3\]"),
        ({"pseudo": torch.ones(39, 3)}, r"'pseudo' has shape \[39, 3\], expected \[40, 3\]"),
        ({"reduce": "max"}, "'reduce' is 'max', expected one of sum, mean"),
    ],
)
def test_bad_input(change, message):
    given = {
        "adj": make_adjacency(*SHAPES["bipartite"]),
        "x": torch.ones(19, 2, 4),
        "pseudo": torch.ones(40, 3),
        "mu": torch.ones(2, 3),
        "sigma": torch.ones(2, 3),
    }
    with pytest.raises(ValueError, match=message):
        gaussian_mixture(**{**given, **change})
