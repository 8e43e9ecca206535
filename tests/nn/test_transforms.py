"""Unusual inputs of operators: right, or refused."""

import pytest
import torch
from adjacencies import make_adjacency
from torch.autograd import forward_ad, gradgradcheck

from gas.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    SAGEConv,
    dropout,
    edge_conv,
    gat_attention,
    gatv2_attention,
    gaussian_mixture,
    spmm,
)

ADJ = make_adjacency(7, 19, 40)

# The function, and the shapes of what it takes.
RIGHT = {
    "sum": (lambda x, weight: spmm(ADJ, x, weight), [(19, 3), (40,)]),
    "mean": (lambda x, weight: spmm(ADJ, x, weight, "mean"), [(19, 3), (40,)]),
    "max": (lambda x: spmm(ADJ, x**2, reduce="max"), [(19, 3)]),
    "edges, none": (lambda t, s: edge_conv(ADJ, t, s, None, "mean"), [(7, 3), (19, 3)]),
    "edges, largest": (lambda t, s: edge_conv(ADJ, t, s, torch.nn.Tanh()), [(7, 3), (19, 3)]),
    "mixture of x": (
        lambda x: gaussian_mixture(ADJ, x**2, torch.ones(40, 2), torch.eye(2), torch.ones(2, 2)),
        [(19, 2, 3)],
    ),
}
REFUSED = {
    "gas.nn.gat_attention": (
        lambda x, s, t: gat_attention(ADJ, x, s, t),
        [(19, 2, 3), (19, 2), (7, 2)],
    ),
    "gas.nn.gatv2_attention": (
        lambda s, t, a: gatv2_attention(ADJ, s, t, a),
        [(19, 2, 3), (7, 2, 3), (2, 3)],
    ),
    "gas.nn.edge_conv": (
        lambda t, s: edge_conv(ADJ, t, s, torch.nn.Tanh(), "sum"),
        [(7, 3), (19, 3)],
    ),
    "gas.nn.gaussian_mixture": (
        lambda x, p, m, s: gaussian_mixture(ADJ, x, p, m, s),
        [(19, 3), (40, 2), (2, 2), (2, 2)],
    ),
}
ALL = {**RIGHT, **REFUSED}


def inputs(shapes, samples=()):
    # Away from zero, where squares have no largest.
    return tuple(torch.rand(*samples, *shape, dtype=torch.float64) + 0.1 for shape in shapes)


def loss_of(f):
    return lambda *tensors: f(*tensors).pow(2).sum()


def is_close(found, wanted):
    return all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("name", RIGHT)
def test_second_derivatives(name):
    f, shapes = RIGHT[name]
    tensors = inputs(shapes)
    assert gradgradcheck(f, tuple(t.requires_grad_() for t in tensors))
    for i in range(len(tensors)):  # One of them alone, too.
        fixed = [t.detach() for t in tensors]
        assert gradgradcheck(
            lambda t, i=i, fixed=fixed: f(*fixed[:i], t, *fixed[i + 1 :]), tensors[i]
        )


@pytest.mark.parametrize("name", REFUSED)
def test_second_derivatives_that_nobody_wrote_down(name):
    f, shapes = REFUSED[name]
    for i in range(1 if "mixture" in name else 0, len(shapes)):
        tensors = inputs(shapes)
        tensors[i].requires_grad_()
        (grad,) = torch.autograd.grad(f(*tensors).pow(2).sum(), tensors[i], create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{name} has no second derivative.*PyG"):
            grad.pow(2).sum().backward()


def test_second_derivatives_where_slopes_do_not_change():
    target, source = inputs([(7, 3), (19, 3)])
    relu = torch.nn.LeakyReLU(0.3)
    assert gradgradcheck(lambda t: edge_conv(ADJ, t, source, relu, "sum"), target.requires_grad_())


@pytest.mark.slow(fast=3)
@pytest.mark.parametrize("name", ALL)
def test_forward_mode_is_refused(name):
    f, shapes = ALL[name]
    tensors, message = inputs(shapes), "has no derivative in forward mode.*use torch.func.vjp"
    if name == "edges, none":
        tensors = (torch.zeros(7, 3, dtype=torch.float64), *tensors[1:])
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(f, tensors, tensors)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            assert torch.equal(f(*tensors), f(*(t.clone() for t in tensors)))
            dual = [forward_ad.make_dual(t, t) for t in tensors]
            with pytest.raises(NotImplementedError, match=message):
                f(*dual)


@pytest.mark.parametrize("name", ALL)
def test_one_sample_after_the_other(name):
    f, shapes = ALL[name]
    loss, places = loss_of(f), tuple(range(len(shapes)))
    samples = inputs(shapes, samples=(2,))
    single = [tuple(t[i] for t in samples) for i in range(2)]
    wanted = torch.stack([f(*tensors) for tensors in single])
    assert torch.equal(torch.vmap(f)(*samples), wanted)

    grads = [torch.func.grad(loss, places)(*tensors) for tensors in single]
    learning = [[t.clone().requires_grad_() for t in tensors] for tensors in single]
    for mine, tensors in zip(grads, learning, strict=True):
        assert is_close(mine, torch.autograd.grad(loss(*tensors), tensors))
    wanted = [torch.stack(both) for both in zip(*grads, strict=True)]
    assert is_close(torch.vmap(torch.func.grad(loss, places))(*samples), wanted)
    every = torch.func.grad(lambda *t: torch.vmap(loss)(*t).sum(), places)
    assert is_close(every(*samples), wanted)  # Which doesn't see that they take a gradient.
    learning = [t.requires_grad_() for t in samples]
    assert is_close(torch.autograd.grad(torch.vmap(loss)(*learning).sum(), learning), wanted)


@pytest.mark.parametrize("name", ALL)
def test_jacobians(name):
    f, shapes = ALL[name]
    tensors = inputs(shapes)
    wanted = torch.autograd.functional.jacobian(f, tensors)
    assert is_close(torch.func.jacrev(f, tuple(range(len(shapes))))(*tensors), wanted)
    with pytest.raises(NotImplementedError, match="no gradients in batches.*use torch.func.jacrev"):
        torch.autograd.functional.jacobian(f, tensors, vectorize=True)


def test_hessians():
    f, shapes = RIGHT["mean"]
    x, weight = inputs(shapes)
    loss = loss_of(lambda x: f(x, weight).tanh())
    wanted = torch.autograd.functional.hessian(loss, x)
    assert torch.allclose(torch.func.jacrev(torch.func.jacrev(loss))(x), wanted)


def test_dropout():
    """Whatever wants more than values and a gradient gets PyTorch's."""
    x = torch.ones(50, 4, dtype=torch.float64)
    (found,) = torch.func.vjp(dropout, x)[1](x)
    assert set(found.unique().tolist()) == {0, 2}
    many = torch.vmap(dropout, randomness="different")(torch.ones(2, 50, 4))
    assert set(many.unique().tolist()) == {0, 2}
    assert not torch.equal(*many)
    out, tangent = torch.func.jvp(dropout, (x,), (3 * x,))
    assert torch.equal(tangent, 3 * out)
    out = torch.compile(dropout, fullgraph=True, backend="aot_eager")(x)
    assert set(out.unique().tolist()) == {0, 2}
    assert gradgradcheck(
        lambda x: dropout(x**2, 0.5 * float(torch.manual_seed(1) is not None)), x.requires_grad_()
    )


@pytest.mark.parametrize("name", ALL)
def test_exported(name):
    f, shapes = ALL[name]

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return f(*tensors)

    tensors = inputs(shapes)
    program = torch.export.export(Model(), tensors)
    assert torch.allclose(program.module()(*tensors), f(*tensors))


@pytest.mark.parametrize("name", [*REFUSED, "sum", "edges, none"])
def test_tensors_that_lie_elsewhere_or_are_of_no_use(name):
    f, shapes = ALL[name]
    for i in range(len(shapes)):
        for change, message in (
            (lambda t: t.to("meta"), "'.*' is on meta, but 'adj' is on cpu: move one"),
            (lambda t: t.to(torch.complex64), "'.*' is torch.complex64 and torch.strided, expect"),
            (lambda t: t.to_sparse(), "'.*' is torch.float64 and torch.sparse_coo, expected real"),
        ):
            tensors = list(inputs(shapes))
            tensors[i] = change(tensors[i])
            with pytest.raises(ValueError, match=message):
                f(*tensors)


@pytest.mark.parametrize("name", ALL)
def test_views_of_any_kind(name):
    """Negated when they are read, strided, expanded: as the same numbers in memory of their own."""
    f, shapes = ALL[name]
    for view in (
        lambda t: torch._neg_view(-t),
        lambda t: torch.stack([t, t + 1], dim=-1)[..., 0],
        lambda t: t[:1].expand_as(t),
        lambda t: t.flip(0).contiguous().flip(0).t().contiguous().t() if t.dim() == 2 else t,
    ):
        views = [view(t) for t in inputs(shapes)]
        plain = [t.clone().resolve_neg().contiguous() for t in views]
        assert torch.equal(f(*views), f(*plain))
        grads = []
        for tensors in (views, plain):
            tensors = [t.detach().requires_grad_() for t in tensors]
            out = f(*tensors)
            grad = torch.arange(out.numel(), dtype=out.dtype).view(out.shape)
            grads.append(torch.autograd.grad(out, tensors, view(grad)))
        for mine, wanted in zip(*grads, strict=True):
            assert torch.equal(mine, wanted)


def test_dropout_of_a_negated_view():
    x = torch.ones(8, 8)
    assert set(dropout(torch._neg_view(x)).unique().tolist()) == {0, -2}
    x.requires_grad_()
    dropout(x).backward(torch._neg_view(torch.ones(8, 8)))
    assert set(x.grad.unique().tolist()) == {0, -2}


LAYERS = {
    "GCNConv": lambda: GCNConv(4, 3),
    "SAGEConv": lambda: SAGEConv(4, 3),
    "GATConv": lambda: GATConv(4, 3, heads=2),
    "GATv2Conv": lambda: GATv2Conv(4, 3),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("samples", [1, 2])
def test_a_transform_comes_first(layer, samples):
    """Edges cached by a layer within a transform can be used after it."""
    conv, adj, x = LAYERS[layer](), make_adjacency(9, 9, 30), torch.randn(samples, 9, 4)

    def loss(x, adj=adj):
        return conv(x, adj).pow(2).sum()

    found = torch.vmap(torch.func.grad(loss))(x)
    after = torch.vmap(torch.func.grad(loss))(x)  # Of what was made then.
    for one, *grads in zip(x, found, after, strict=True):
        leaf = one.clone().requires_grad_()
        wanted = [torch.autograd.grad(loss(leaf, each), leaf)[0] for each in (adj, adj.clone())]
        assert all(torch.allclose(a, b, atol=1e-6) for a in grads for b in wanted)
