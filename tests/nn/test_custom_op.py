"""Operators that the compiler sees, and others call without PyTorch's registry in between."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from adjacencies import make_adjacency
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gas.native.custom_op import custom_op
from gas.nn import spmm

_NUMBERS = itertools.count()


def make_op(with_gradient=True):
    """``factor * x``, and a list of whether the kernel saw tensors with values."""
    calls = []

    @custom_op(f"gas_test::scale_{next(_NUMBERS)}")
    def scale(others: Sequence[Tensor], x: Tensor, factor: float) -> Tensor:
        calls.append(x.detach().clone())
        return x * factor

    @scale.register_fake
    def _(others: Sequence[Tensor], x: Tensor, factor: float) -> Tensor:
        return torch.empty_like(x)

    def setup(ctx, inputs, output):
        ctx.others, _, ctx.factor = inputs

    def backward(ctx, grad):
        return [None] * len(ctx.others), scale(ctx.others, grad, ctx.factor), None

    if with_gradient:
        scale.register_autograd(backward, setup_context=setup)
    return scale, calls


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_values_and_gradients():
    scale, calls = make_op()
    others = [torch.ones(2), torch.ones(3)]
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(scale(others, x, 3.0), 3 * x)
    assert torch.equal(
        torch.autograd.grad(scale(others, x, 3.0).sum(), x)[0], torch.full((3,), 3.0)
    )
    assert torch.autograd.gradcheck(lambda x: scale(others, x, 3.0), (x,))
    assert torch.autograd.gradgradcheck(lambda x: scale(others, x, 3.0) ** 2, (x,))
    with torch.no_grad():
        assert not scale(others, x, 3.0).requires_grad
    assert not scale(others, x.detach(), 3.0).requires_grad
    assert calls


def test_the_registry_is_not_in_the_way(monkeypatch):
    scale, _ = make_op()
    monkeypatch.setattr(scale, "_op", lambda *_: pytest.fail("the registry was asked"))
    x = torch.ones(3, requires_grad=True)
    scale([], x, 2.0).sum().backward()
    scale([], torch.nn.Parameter(torch.ones(3)), 2.0).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_modes_see_the_operator():
    scale, _ = make_op()
    x = torch.ones(3, requires_grad=True)
    with Watch() as watch:
        scale([], x, 2.0).sum().backward()
    assert sum("scale" in name for name in watch.seen) == 2  # Forward and backward.
    adj = make_adjacency(7, 19, 40)
    with Watch() as watch:
        spmm(adj, torch.randn(19, 3))
    assert any("gas.multiply" in name for name in watch.seen)


def test_tensors_without_values():
    scale, calls = make_op()
    with FakeTensorMode() as mode:
        x = torch.empty(3)
        assert scale([], x, 2.0).shape == (3,)
    assert scale([], x, 2.0).fake_mode is mode  # Outside it, too.
    assert not calls


def test_the_compiler_sees_the_operator():
    scale, _ = make_op()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.ones(3)
    out = torch.compile(lambda x: scale([], x, 2.0) + 1, fullgraph=True, backend=backend)(x)
    assert out.tolist() == [3, 3, 3]
    assert any("scale" in str(node.target) for node in graphs[0].graph.nodes)


def test_tracing_follows_its_input():
    scale, _ = make_op()
    traced = torch.jit.trace(lambda x: scale([], x, 2.0), torch.ones(3))
    assert traced(torch.full((3,), 5.0)).tolist() == [10, 10, 10]


def test_function_transforms():
    scale, _ = make_op()
    found = torch.func.grad(lambda x: scale([], x, 2.0).sum())(torch.ones(3))
    assert found.tolist() == [2, 2, 2]
    _, vjp = torch.func.vjp(lambda x: scale([], x, 2.0) ** 2, torch.ones(3))
    with torch.no_grad():
        assert vjp(torch.ones(3))[0].tolist() == [8, 8, 8]
    many = torch.vmap(lambda x: scale([], x, 2.0), in_dims=1, out_dims=1)(torch.ones(3, 2))
    assert many.tolist() == [[2, 2]] * 3


def test_without_a_gradient_of_its_own():
    scale, _ = make_op(with_gradient=False)
    x = torch.ones(3, requires_grad=True)
    assert scale([], x.detach(), 2.0).tolist() == [2, 2, 2]
    with pytest.raises(NotImplementedError, match="gas_test::scale_.* has no second derivative"):
        scale([], x, 2.0).sum().backward()
