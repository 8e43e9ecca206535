import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d

from gas.nn import dropout, relu_dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_distribution(dtype, p):
    x = torch.ones(400, 1000, dtype=dtype)
    out = dropout(x, p)
    kept = out != 0
    scale = torch.tensor(1 / (1 - p), dtype=dtype)
    assert torch.allclose(out[kept], scale)
    # The count is binomial: within five standard deviations, over all and in every stripe.
    for part in (kept, kept[:, ::2], kept[:, 1::2], kept[::7], kept[:, :16]):
        sigma = (p * (1 - p) / part.numel()) ** 0.5
        assert abs(float(part.float().mean()) - (1 - p)) < 5 * sigma
    # Neighbours are independent: both kept with probability (1 - p)^2.
    both = (kept[:, 1:] & kept[:, :-1]).float().mean()
    assert abs(float(both) - (1 - p) ** 2) < 5e-3


def test_seeds():
    x = torch.ones(1000)

    def drawn(seed):
        torch.manual_seed(seed)
        return [dropout(x, 0.5), dropout(x, 0.5)]

    first, second = drawn(1)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((first, second), drawn(1), strict=True))
    assert not torch.equal(first, drawn(2)[0])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_result_does_not_depend_on_threads(threads):
    x = torch.randn(700, 333)
    results = []
    for number in (1, threads):
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        torch.manual_seed(0)
        results.append(dropout(x, 0.3))
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_gradient():
    x = torch.randn(6, 7, dtype=torch.double, requires_grad=True)

    def function(x):
        torch.manual_seed(3)
        return dropout(x, 0.4) * x

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))
    out = dropout(x, 0.4)
    grad = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(grad == 0, out == 0)


def test_nothing_to_do():
    x = torch.randn(5)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert (dropout(x, 1.0) == 0).all()
    assert dropout(x[:0], 0.5).shape == (0,)
    assert dropout(x[::2], 0.5).shape == (3,)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_probabilities(p):
    with pytest.raises(ValueError, match="'p' is .*, expected a probability in"):
        dropout(torch.ones(3), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (7, 5), (2, 3, 5), (300, 501)])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.75, 1.0])
def test_dropout_of_relu_in_one_pass(dtype, shape, p):
    """Values, gradients and random numbers of relu().dropout()."""
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    grad = torch.randn(shape, dtype=dtype)
    torch.manual_seed(4)
    relu, out = relu_dropout(x, p)
    after = torch.rand(1)
    torch.manual_seed(4)
    wanted = x.relu()
    dropped = dropout(wanted, p)
    assert torch.equal(relu, wanted)
    assert not relu.requires_grad
    assert torch.equal(out, dropped)
    assert torch.equal(after, torch.rand(1))
    grads = [torch.autograd.grad(o, x, grad)[0] for o in (out, dropped)]
    assert torch.equal(*grads)


def test_gradients_of_relu_and_dropout():
    x = torch.randn(6, 7, dtype=torch.double)
    x = (x + x.sign()).requires_grad_()  # Not where ReLU bends.

    def function(x):
        torch.manual_seed(3)
        return relu_dropout(x, 0.4)[1] * x

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))
    negated = torch._neg_view(x.detach())
    assert torch.equal(relu_dropout(negated, 0.4)[0], (-x).relu())


def test_relu_and_dropout_keep_what_is_no_number():
    x = torch.full((4, 9), float("nan"))
    assert all(out.isnan().all() for out in relu_dropout(x, 0.5))
    assert all(out.isnan().all() for out in relu_dropout(x.view(36)[:5].double(), 0.5))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_probabilities_after_relu(p):
    with pytest.raises(ValueError, match="'p' is .*, expected a probability in"):
        relu_dropout(torch.ones(3), p)
    norm = BatchNorm1d(3)
    with pytest.raises(ValueError, match="'p' is .*, expected a probability in"):
        relu_dropout(torch.randn(4, 3), p, norm)
    assert norm.num_batches_tracked == 0


NORMS = {
    "BatchNorm1d": lambda: BatchNorm1d(37),
    "of PyG": lambda: pyg.BatchNorm(37),
    "cumulative": lambda: BatchNorm1d(37, momentum=None),
    "without weights": lambda: BatchNorm1d(37, affine=False),
    "without statistics": lambda: BatchNorm1d(37, track_running_stats=False),
    "frozen weights": lambda: BatchNorm1d(37).requires_grad_(False),
}


def draw_norm(make, dtype):
    norm = make().to(dtype)
    for parameter in norm.parameters():
        parameter.data.uniform_(0.5, 1.5)
    return norm, copy.deepcopy(norm)


@pytest.mark.parametrize("rows", [2, 3, 256, 1000])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_norm_joins_relu_and_dropout(dtype, name, rows):
    norm, other = draw_norm(NORMS[name], dtype)
    x = torch.randn(rows, 37, dtype=dtype).add(2).mul(3).requires_grad_()
    grad = torch.randn(rows, 37, dtype=dtype)
    inputs = [[x, *(p for p in each.parameters() if p.requires_grad)] for each in (norm, other)]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    for seed in range(2):
        torch.manual_seed(seed)
        found = relu_dropout(x, 0.4, norm)
        after = torch.rand(1)
        torch.manual_seed(seed)
        expected = relu_dropout(other(x), 0.4)
        assert found[1].grad_fn.name() == "_NormReluDropoutBackward"
        assert torch.equal(after, torch.rand(1))
        torch.testing.assert_close(found, expected, **tolerance)
    grads = [
        torch.autograd.grad(out[1], of, grad)
        for out, of in zip((found, expected), inputs, strict=True)
    ]
    torch.testing.assert_close(*grads, **tolerance)
    assert all(map(torch.equal, norm.state_dict().values(), other.state_dict().values()))


def test_gradients_of_a_batch_norm_with_relu_and_dropout():
    """Of gradients, too, which PyTorch's batch norm has."""
    x = torch.randn(7, 4, dtype=torch.double, requires_grad=True)
    weight, bias = (torch.rand(2, 4, dtype=torch.double) + 0.5).unbind()

    def function(x, weight, bias):
        torch.manual_seed(3)
        norm = BatchNorm1d(4, track_running_stats=False)
        norm._parameters.update(weight=weight, bias=bias)
        return relu_dropout(x, 0.4, norm)[1] * x

    inputs = x, weight.requires_grad_(), bias.requires_grad_()
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: norm.eval(),
        lambda norm: norm.register_forward_hook(lambda *args: None),
        lambda norm: norm.module.register_forward_pre_hook(lambda *args: None),
        lambda norm: setattr(norm.module, "forward", norm.module.forward),
        lambda norm: setattr(norm, "module", torch.nn.Identity()),
    ],
)
def test_other_norms_are_called(change):
    norm, other = (pyg.BatchNorm(5).double() for _ in range(2))
    x = torch.randn(8, 5, dtype=torch.double, requires_grad=True)
    for each in (norm, other):
        change(each)
    found = relu_dropout(x, 0.4, norm)
    assert found[1].grad_fn.name() == "_ReluDropoutBackward"
    torch.testing.assert_close(found[0], other(x).relu().detach())
    assert all(map(torch.equal, norm.state_dict().values(), other.state_dict().values()))


def test_a_batch_norm_of_one_node_and_other_modules():
    x = torch.randn(1, 5, requires_grad=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        relu_dropout(x, 0.4, BatchNorm1d(5))
    single = pyg.BatchNorm(5, allow_single_element=True)
    assert torch.equal(relu_dropout(x, 0.4, single)[0], x.div((1 + 1e-5) ** 0.5).relu().detach())
    norm = torch.nn.LayerNorm(5)
    assert torch.equal(relu_dropout(x, 0.4, norm)[0], norm(x).relu())


def test_a_batch_norm_of_a_view_that_pytorch_negates():
    stored = torch.randn(20, 5, requires_grad=True)
    x = torch._neg_view(stored)
    found, grads = [], []
    for each in (x, x.resolve_neg()):
        torch.manual_seed(1)
        out = relu_dropout(each, 0.4, BatchNorm1d(5))
        found.append(out)
        grads.append(torch.autograd.grad(out[1].square().sum(), stored)[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(*grads)
