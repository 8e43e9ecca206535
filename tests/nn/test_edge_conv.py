import pytest
import torch
from adjacencies import HUBS, SHAPES, WITH_HUBS, is_close, make_adjacency
from torch.autograd import gradcheck
from torch_geometric.utils import scatter

from gas.native import edge_conv as kernels
from gas.nn import Adjacency, edge_conv

ACTIVATIONS = {
    "none": None,
    "identity": torch.nn.Identity(),
    "relu": torch.nn.ReLU(),
    "relu in place": torch.nn.ReLU(inplace=True),
    "leaky": torch.nn.LeakyReLU(0.3),
    "elu": torch.nn.ELU(1.5),
    "sigmoid": torch.nn.Sigmoid(),
    "tanh": torch.nn.Tanh(),
}
KERNELS = ("relu", "leaky_relu", "elu", "sigmoid", "tanh")
REDUCES = ("sum", "mean", "max", "min")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(adj, width, dtype=torch.float64, grad=True):
    shapes = (adj.size(0), width), (adj.size(1), width)
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def expected(adj, target, source, activation, reduce):
    row, col = adj.coo()
    rows = target[row] + source[col]
    return scatter(rows if activation is None else activation(rows), row, 0, adj.size(0), reduce)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_gather_and_scatter(shape, activation, reduce):
    adj, activation = make_adjacency(*SHAPES[shape], weighted=True), ACTIVATIONS[activation]
    for width in (1, 7, 16, 40):
        tensors = inputs(adj, width)
        out = edge_conv(adj, *tensors, activation, reduce)
        wanted = expected(adj, *tensors, activation, reduce)
        assert torch.allclose(out, wanted, atol=1e-12)
        grads = [torch.autograd.grad(o.pow(2).sum(), tensors) for o in (out, wanted)]
        for mine, other in zip(*grads, strict=True):
            assert torch.allclose(mine, other, atol=1e-9)
        with torch.no_grad():
            assert torch.equal(edge_conv(adj, *tensors, activation, reduce), out)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("activation", ["none", "leaky", "elu", "sigmoid", "tanh"])
def test_gradients(activation, reduce):
    adj = make_adjacency(*SHAPES["bipartite"])
    target, source = inputs(adj, 3)

    def f(target, source):
        return edge_conv(adj, target, source, ACTIVATIONS[activation], reduce)

    assert gradcheck(f, (target, source))
    assert gradcheck(f, (target.detach(), source))
    assert gradcheck(f, (target, source.detach()))


@pytest.mark.requires("native")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", KERNELS)
@pytest.mark.parametrize("shape", WITH_HUBS)
def test_twins(shape, activation, dtype):
    adj = make_adjacency(*WITH_HUBS[shape])
    target, source = inputs(adj, 19, dtype, grad=False)
    grad = torch.randn_like(target)
    how = activation, 0.3
    for mean in (False, True):
        found = kernels.edge_conv(adj.matrix, target, source, *how, mean, True)
        twin = kernels._edge_conv_torch(adj.matrix, target, source, *how, mean)
        exact = kernels._edge_conv_torch(adj.matrix, target.double(), source.double(), *how, mean)
        for mine, other, wanted in zip(found, twin, exact, strict=True):
            assert mine.dtype == other.dtype == dtype
            assert is_close(mine, wanted, TOLERANCE[dtype])
            assert is_close(other, wanted, 3 * TOLERANCE[dtype])  # One term after the other.
    tensors = target.double(), source.double(), *how, grad.double()
    exact = kernels._edge_conv_backward_torch(adj.matrix, *tensors)
    for function in (kernels.edge_conv_backward, kernels._edge_conv_backward_torch):
        found = function(adj.matrix, target, source, *how, grad)
        assert found.dtype == dtype
        assert is_close(found, exact, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("activation", "derivative"),
    [
        ("elu", lambda x: torch.where(x > 0, 1, 1.5 * x.clamp(max=0).exp())),
        ("sigmoid", lambda x: x.sigmoid() * (-x).sigmoid()),
        ("tanh", lambda x: 4 * (2 * x).sigmoid() * (-2 * x).sigmoid()),
    ],
)
def test_precise_near_zero_and_far_from_it(activation, derivative):
    """To some units in the last place, of one edge; infinities as in PyTorch."""
    x = torch.cat([torch.logspace(-30, 4, 500), torch.tensor([0.0, torch.inf])])
    x = torch.cat([x, -x])[:, None].requires_grad_()
    adj = Adjacency(torch.arange(len(x) + 1), torch.zeros(len(x), dtype=torch.long), num_cols=1)
    out = edge_conv(adj, x, torch.zeros(1, 1), ACTIVATIONS[activation], "sum")
    (grad,) = torch.autograd.grad(out.sum(), x)
    exact = x.detach().double()
    wanted = ACTIVATIONS[activation](exact)
    assert torch.allclose(out.double(), wanted, rtol=1e-6, atol=1e-36)
    assert torch.allclose(grad.double(), derivative(exact), rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("activation", ["relu", "leaky", "elu", "sigmoid", "tanh"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_what_is_not_a_number_stays_so(activation, reduce):
    adj = make_adjacency(*SHAPES["one node"])
    x = torch.full((1, 20), torch.nan)
    assert edge_conv(adj, x, x * 0, ACTIVATIONS[activation], reduce).isnan().all()


@pytest.mark.parametrize("graph", [(3000, 4000, 60000), *HUBS.values()])
def test_twice_the_same_and_whatever_the_number_of_threads(graph):
    adj = make_adjacency(*graph)
    tensors = inputs(adj, 24, torch.float32)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2, 2):
        torch.set_num_threads(number)
        results.append([])
        for reduce in ("max", "mean"):
            out = edge_conv(adj, *tensors, torch.nn.ELU(), reduce)
            results[-1] += [out.detach(), *torch.autograd.grad(out.pow(2).sum(), tensors)]
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_compiled(reduce):
    adj = make_adjacency(*SHAPES["bipartite"])
    tensors = inputs(adj, 8, torch.float32)

    def f(target, source):
        return edge_conv(adj, target * 2, source, ACTIVATIONS["tanh"], reduce).relu()

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.allclose(out, f(*tensors))
    grads = [torch.autograd.grad(o.pow(2).sum(), tensors) for o in (out, f(*tensors))]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))


def test_the_operator_is_registered_properly():
    adj = make_adjacency(*SHAPES["bipartite"])
    arguments = list(adj.matrix), *inputs(adj, 4, torch.float32), "elu", 1.0, True, True
    torch.library.opcheck(torch.ops.gas.edge_conv, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adj": torch.eye(3)}, "'adj' is a Tensor, expected a gas.nn.Adjacency: use"),
        ({"source": torch.ones(5, 3)}, r"'source' has shape \[5, 3\], expected .* the 19 columns"),
        ({"target": torch.ones(7, 2)}, r"'target' is .* \[7, 2\], expected .* shape \[7, 3\]"),
        ({"target": torch.ones(7, 3).double()}, "'target' is torch.float64 of shape"),
        ({"reduce": "std"}, "'reduce' is 'std', expected one of sum, mean, max, min"),
        ({"activation": torch.nn.GELU()}, "'activation' is GELU.*, expected None or a torch.nn"),
        ({"activation": "relu"}, "'activation' is 'relu', expected None or a torch.nn module of"),
        (
            {"activation": torch.nn.LeakyReLU(-1.0)},
            "'activation' is LeakyReLU.*, expected 'negative_slope' of at least 0",
        ),
    ],
)
def test_bad_input(change, message):
    given = {
        "adj": make_adjacency(*SHAPES["bipartite"]),
        "target": torch.ones(7, 3),
        "source": torch.ones(19, 3),
    }
    with pytest.raises(ValueError, match=message):
        edge_conv(**{**given, **change})
