"""Operators on a CUDA device: the results of the CPU, in every run, on any stream and device."""

import pytest
import torch
from adjacencies import SHAPES, make_adjacency
from conftest import no_sync
from torch.autograd import gradcheck

from gas import native
from gas.native import attention, matrix, mixture, sparse
from gas.native import edge_conv as edge_sums
from gas.nn import edge_conv, gat_attention, gatv2_attention, gaussian_mixture, spmm

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
LEAST = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-4}
FULL = (torch.float64, torch.float32)
HUBS = {"hub rows": (5, 300, 20_000), "hub columns": (300, 5, 20_000)}  # Of several pieces.
LARGE = {"large hub": (5, 3000, 20_000), "many rows": (3000, 4000, 60_000)}
SHAPES = {**SHAPES, **HUBS, **LARGE}
WIDTHS = (1, 3, 8, 33, 64, 130, 512)
CASES = [
    *((name, width) for name in SHAPES if name not in (*HUBS, *LARGE) for width in WIDTHS),
    *((name, width) for name in HUBS for width in (3, 64)),
    *((name, width) for name in LARGE for width in (1, 33, 64)),
    ("large hub", 512),
]
SANITIZED = {("hub rows", 3), ("hub columns", 3), ("hub", 33), ("hub", 64), ("no edges", 8)}


def results(adj, tensors, f):
    """Return the output of a function of an adjacency and tensors, and its gradients."""
    torch.manual_seed(3)
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    out = f(adj, *leaves)
    weight = torch.arange(out.numel(), device=out.device) % 17 - 8
    weight = weight.div(8).view(out.shape).to(out)  # Exact in all types.
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def functions(adj, dtype, width):
    """Every operator, with its inputs on the CPU."""
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    x = torch.randn(adj.size(1), width, dtype=torch.float64).to(dtype)
    w = torch.randn(adj.num_entries, dtype=torch.float64).to(dtype)
    heads = torch.randn(adj.size(1), 3, width, dtype=torch.float64).to(dtype)
    targets = torch.randn(adj.size(0), 3, width, dtype=torch.float64).to(dtype)
    att = (torch.randn(3, width, dtype=torch.float64) / width**0.5).to(kind)
    mixture = [torch.rand(n, 2, dtype=torch.float64) + 0.2 for n in (adj.num_entries, 3, 3)]
    ends = [torch.randn(n, width, dtype=torch.float64).to(dtype) for n in adj.size()]
    scores = [torch.randn(n, 3, dtype=torch.float64).to(kind) for n in adj.size()[::-1]]
    for reduce in ("sum", "mean", "max", "min"):
        yield (x,), lambda adj, x, reduce=reduce: spmm(adj, x, reduce=reduce)
    for reduce in ("sum", "mean"):
        yield (x, w), lambda adj, x, w, reduce=reduce: spmm(adj, x, w, reduce)
    for activation in (torch.nn.Tanh(), torch.nn.ELU(1.5)):
        for reduce in ("sum", "mean"):
            yield ends, lambda adj, *t, f=activation, reduce=reduce: edge_conv(adj, *t, f, reduce)
    for features in (x, heads):  # One for all Gaussians, or one for each.
        tensors = features, *(t.to(kind) for t in mixture)
        for reduce in ("sum", "mean"):
            yield tensors, lambda adj, *t, reduce=reduce: gaussian_mixture(adj, *t, reduce)
    for p in (0.0, 0.4):
        yield (heads, *scores), lambda adj, *t, p=p: gat_attention(adj, *t, dropout=p)
        yield (heads, targets, att), lambda adj, *t, p=p: gatv2_attention(adj, *t, dropout=p)


@pytest.mark.requires("cuda_kernels")
def test_kernels_take_what_their_twins_on_the_cpu_take(monkeypatch):
    """Without rows nothing is launched, which needs no device, but arguments are looked at."""
    called = set()

    def run(name, x, *arguments):
        stream = native.C.Stream(0, lambda size: pytest.fail("no scratch is needed"))
        values = native.extension.to_addresses(arguments)
        getattr(native.C, f"{name}_{matrix.TYPES[x.dtype]}")(*values, stream)
        called.add(name)

    for module in (attention, edge_sums, mixture, sparse):
        monkeypatch.setattr(module, "run_typed", run)
    adj = make_adjacency(0, 0, 0)
    for dtype in TOLERANCE:
        for tensors, f in functions(adj, dtype, 8):
            results(adj, tensors, f)
    assert called == {
        "multiply",
        "dot_rows",
        "extreme",
        "extreme_backward",
        "attention",
        "attention_backward",
        "attention_v2",
        "attention_v2_backward",
        "edge_conv",
        "edge_conv_backward",
        "mixture_backward",
        "mixture_collapse",
        "mixture_spread",
    }


def bounds(found, wanted, dtype, width):
    """Return the tolerances against float64, in proportion to the largest number.

    Terms of a sum can cancel, though, such as those of a product of rows of some width, in all
    numbers of a result even. What the CPU makes of them in the same type tells how much is lost.
    """
    for mine, exact in zip(found, wanted, strict=True):
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        lost = float((mine.double() - exact).abs().max()) if exact.numel() else 0.0
        least = (TOLERANCE if largest < 1e-9 else LEAST)[dtype] * width**0.5
        yield max(TOLERANCE[dtype] * largest, 8 * lost, least)


def sanitized():
    """Shapes and widths; marked are those that are small, and have pieces, joins and tails."""
    for case in CASES:
        yield pytest.param(*case, marks=[pytest.mark.sanitized] if case in SANITIZED else [])


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("dtypes", [FULL, (torch.bfloat16,)], ids=["full", "bfloat16"])
@pytest.mark.parametrize(("shape", "width"), list(sanitized()))
def test_equals_the_cpu_twice(shape, width, dtypes, device):
    adj = make_adjacency(*SHAPES[shape])
    there = adj.to(device)
    for tensors, f in functions(adj, dtypes[-1], width):
        wanted = results(adj, [t.double() for t in tensors], f)
        for dtype in dtypes:
            inputs = [t.to(dtype) for t in tensors] if dtypes is FULL else tensors
            bound = bounds(results(adj, inputs, f), wanted, dtype, width)
            on_device = [t.to(device) for t in inputs]
            found = results(there, on_device, f)
            again = results(there, on_device, f)
            for mine, other, most, same in zip(found, wanted, bound, again, strict=True):
                assert torch.equal(mine, same)
                error = (mine.cpu().double() - other).abs()
                assert bool((error <= most).all())  # No NaN either.


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("shape", ["square", "bipartite", "no edges"])
def test_gradients(shape, device):
    adj = make_adjacency(*SHAPES[shape]).to(device)
    for tensors, f in functions(adj, torch.float64, 3):

        def seeded(*leaves, f=f):
            torch.manual_seed(3)
            return f(adj, *leaves)

        assert gradcheck(seeded, [t.to(device).requires_grad_() for t in tensors])


@pytest.mark.requires("cuda")
def test_rows_that_are_not_aligned(device):
    adj = make_adjacency(*SHAPES["large hub"])
    there = adj.to(device)
    table = torch.randn(3000 * 64 + 1)
    x = table[1:].view(3000, 64)
    shifted = table.to(device)[1:].view(3000, 64)
    assert torch.allclose(spmm(there, shifted).cpu().double(), spmm(adj, x.double()), atol=1e-3)


@pytest.mark.requires("cuda")
def test_runs_on_the_current_stream():
    adj = make_adjacency(*SHAPES["many rows"]).to("cuda")
    x = torch.randn(4000, 256, device="cuda")
    wanted = spmm(adj, x)
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # What runs on another stream reads zeros.
        late.copy_(x)
        out = spmm(adj, late)
    stream.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.requires("cuda")
def test_runs_where_its_tensors_are():
    wanted = None
    for index in range(torch.cuda.device_count()):
        torch.manual_seed(0)
        adj = make_adjacency(*SHAPES["large hub"]).to(f"cuda:{index}")
        out = spmm(adj, torch.randn(3000, 16).to(f"cuda:{index}"))
        assert out.device.index == index
        assert torch.cuda.current_device() == 0
        wanted = out.cpu() if wanted is None else wanted
        assert torch.equal(out.cpu(), wanted)


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
def test_never_waits_for_the_device(device):
    adj = make_adjacency(*SHAPES["large hub"])
    _ = adj.matrix
    there = adj.to(device)  # With the transpose, as batches bring it.
    cases = [
        ([t.to(device) for t in tensors], f) for tensors, f in functions(adj, torch.float32, 16)
    ]
    for tensors, f in cases:
        results(there, tensors, f)
    with no_sync():
        for tensors, f in cases:
            results(there, tensors, f)
