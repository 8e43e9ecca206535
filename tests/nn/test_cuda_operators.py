"""Operators on a CUDA device: the results of the CPU, in every run, on any stream and device."""

import pytest
import torch
from adjacencies import SHAPES, make_adjacency
from torch.autograd import gradcheck

from gas import native
from gas.native import attention, attention_v2, matrix, mixture, sparse
from gas.native import edge_conv as edge_sums
from gas.nn import edge_conv, gat_attention, gatv2_attention, gaussian_mixture, spmm

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
SHAPES = {**SHAPES, "large hub": (5, 3000, 20_000), "many rows": (3000, 4000, 60_000)}


def results(adj, tensors, f):
    """What a function of an adjacency and tensors gives, and the gradients."""
    torch.manual_seed(3)
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    out = f(adj, *leaves)
    weight = (torch.arange(out.numel()) % 17 - 8).div(8).view(out.shape).to(out)  # Exact in all.
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
        getattr(native.C, f"{name}_{matrix.TYPES[x.dtype]}")(*arguments, stream)
        called.add(name)

    for module in (attention, attention_v2, edge_sums, mixture, sparse):
        monkeypatch.setattr(module, "run", run)
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


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_cpu_twice(shape, dtype):
    adj = make_adjacency(*SHAPES[shape])
    there = adj.to("cuda")
    for width in (1, 3, 8, 33, 64, 130, 512):
        for tensors, f in functions(adj, dtype, width):
            on_device = [t.cuda() for t in tensors]
            found = results(there, on_device, f)
            again = results(there, on_device, f)
            wanted = results(adj, [t.double() for t in tensors], f)
            for mine, other, same in zip(found, wanted, again, strict=True):
                assert torch.equal(mine, same)
                scale = max(1.0, float(other.abs().max()) if other.numel() else 0.0)
                assert torch.allclose(
                    mine.cpu().double(), other, rtol=0, atol=TOLERANCE[dtype] * scale
                )


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("shape", ["square", "bipartite", "no edges"])
def test_gradients(shape):
    adj = make_adjacency(*SHAPES[shape]).to("cuda")
    for tensors, f in functions(adj, torch.float64, 3):

        def seeded(*leaves, f=f):
            torch.manual_seed(3)
            return f(adj, *leaves)

        assert gradcheck(seeded, [t.cuda().requires_grad_() for t in tensors])


@pytest.mark.requires("cuda")
def test_rows_that_are_not_aligned():
    adj = make_adjacency(*SHAPES["large hub"])
    there = adj.to("cuda")
    table = torch.randn(3000 * 64 + 1)
    x = table[1:].view(3000, 64)
    shifted = table.cuda()[1:].view(3000, 64)
    assert torch.allclose(spmm(there, shifted).cpu(), spmm(adj, x), atol=1e-3)


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
    for device in range(torch.cuda.device_count()):
        torch.manual_seed(0)
        adj = make_adjacency(*SHAPES["large hub"]).to(f"cuda:{device}")
        out = spmm(adj, torch.randn(3000, 16).to(f"cuda:{device}"))
        assert out.device.index == device
        assert torch.cuda.current_device() == 0
        wanted = out.cpu() if wanted is None else wanted
        assert torch.equal(out.cpu(), wanted)


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
def test_never_waits_for_the_device():
    adj = make_adjacency(*SHAPES["large hub"])
    there = adj.to("cuda")
    _ = there.matrix  # Transposing checks columns, and waits.
    cases = [([t.cuda() for t in tensors], f) for tensors, f in functions(adj, torch.float32, 16)]
    for tensors, f in cases:
        results(there, tensors, f)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tensors, f in cases:
            results(there, tensors, f)
    finally:
        torch.cuda.set_sync_debug_mode("default")
