"""Histories of a model on a CUDA device: the results of the CPU, without waiting for the host."""

import re

import pytest
import torch
from conftest import ROOT, clustered_graph
from user_models import SAGE

import gas
from gas.native import device, transfer


def test_native_code_never_waits_for_a_device():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cuh", ".cpp", ".h")]
    assert len(sources) > 10
    for source in sources:
        assert not re.search(r"cuda\w*Synchronize|cudaMemcpy\(", source.read_text()), source


@pytest.fixture(scope="module")
def graph():
    return clustered_graph(10, num_nodes=200, num_edges=1200)


def train(graph, device, **kwargs):
    """The losses and histories of two epochs."""
    torch.manual_seed(0)
    data, _ = graph
    model = SAGE(200, 5, 3, **kwargs)
    with torch.no_grad():
        model(data.x, data.edge_index, fill=True)
    model = model.to(device)
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for batch, *args in gas.PrefetchLoader(loader, model):
            optimizer.zero_grad()
            loss = model(batch.x, batch.adj_t, *args).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
    return torch.stack(losses), [h.emb.cpu() for h in model.histories]


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("store", ["device", "pinned", "host", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("io", ["serial", "concurrent"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_training_equals_that_on_the_cpu(graph, store, dtype, io, prefetch):
    options = {"dtype": dtype, "io": io, "prefetch": prefetch}
    losses, tables = train(graph, "cuda", store=store, **options)
    expected, expected_tables = train(graph, "cpu", store="host", **options)
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    assert torch.allclose(losses, expected, rtol=tolerance)
    for mine, other in zip(tables, expected_tables, strict=True):
        assert float((mine.float() - other.float()).norm() / other.float().norm()) < tolerance


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("width", [1, 3, 4, 16, 100])
def test_int8_equals_that_of_the_cpu(width):
    x = torch.randn(50, width) * 10 ** torch.randint(-5, 5, (50, 1))
    x[3, 0], x[4] = torch.nan, 0
    rows = device.encode("int8", x.cuda())
    expected = transfer.encode_torch("int8", x)
    others = torch.arange(50) != 3  # A NaN has many forms.
    assert torch.equal(rows.cpu()[others], expected[others])
    out = torch.empty(50, width, device="cuda")
    device.decode("int8", rows, out)
    torch.testing.assert_close(
        out.cpu(), transfer.decode_torch("int8", expected, width), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.requires("cuda")
@pytest.mark.requires("native")
@pytest.mark.parametrize("store", ["device", "pinned"])
def test_no_step_waits_for_the_device(graph, store):
    data, _ = graph
    model = SAGE(200, 5, 3, store=store)
    model(data.x, data.edge_index, fill=True)
    model.cuda()
    batches = [b.to("cuda") for b in gas.SubgraphLoader(*graph, batch_size=3, log=False)]
    for batch, *args in batches:  # Allocates, compiles and chooses algorithms.
        model(batch.x, batch.adj_t, *args).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch, *args in batches:
            model(batch.x, batch.adj_t, *args).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("store", ["device", "pinned", "host", "disk"])
def test_a_push_stores_the_values_at_the_call(store):
    history = gas.History(20_000, 256, store=store, engine=gas.history.TransferEngine()).cuda()
    for step in range(10):
        x = torch.full((20_000, 256), float(step), device="cuda")
        history.push(x)
        x.fill_(-1)
        rows = history.start_pull(torch.arange(20_000)).wait()
        history.push(torch.full_like(x, -2.0), None, [0], [20_000])
        assert bool((rows == step).all())
