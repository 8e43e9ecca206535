"""Histories of a model on a CUDA device: the results of the CPU, without waiting for the host."""

import contextlib
import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, clustered_graph, no_sync
from user_models import GAT, SAGE, SquareGAT

import gas
from gas.native import device as kernels
from gas.native import transfer


def test_native_code_never_waits_for_a_device():
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cuh", ".cpp", ".h")]
    assert len(sources) > 10
    for source in sources:
        assert not re.search(r"cuda\w*Synchronize|cudaMemcpy\(", source.read_text()), source


class LoopingGAT(SquareGAT):
    """With PyG's default self-loops, on batches of any shape."""

    apply_conv = GAT.apply_conv


MODELS = {
    "user": (lambda **kwargs: gas.fuse(SAGE(200, 5, 3, **kwargs)), None),
    "user, attention": (lambda **kwargs: gas.fuse(GAT(200, 5, 3, **kwargs)), None),
    "user, self-loops": (lambda **kwargs: gas.fuse(LoopingGAT(200, 5, 3, **kwargs)), None),
    "GCN": (functools.partial(gas.models.GCN, 200, 5, 8, 3, 3), gas.models.GCN.transform),
    "GraphSAGE": (functools.partial(gas.models.GraphSAGE, 200, 5, 8, 3, 3), None),
    "GAT": (functools.partial(gas.models.GAT, 200, 5, 4, 2, 3, 2, 3), gas.models.GAT.transform),
}


@functools.cache
def graph_of(kind):
    """Ten random parts, so that a batch has a large halo; METIS isn't needed."""
    torch.manual_seed(12345)
    data, ptr = clustered_graph(10, "random", num_nodes=200, num_edges=1200)
    transform = MODELS[kind][1]
    return data if transform is None else transform(data), ptr


def make(kind, place, **options):
    """Return a model whose histories hold what they should, and its loader."""
    if place.type == "cpu" and options.get("store") in ("device", "pinned"):  # A rehearsal.
        options["store"] = "host"
    data, _ = graph_of(kind)
    torch.manual_seed(0)
    model = MODELS[kind][0](**options)
    with torch.no_grad():
        weight = {"edge_weight": data.edge_weight} if "edge_weight" in data else {}
        model(data.x, data.edge_index, fill=True, **weight)
    return model.to(place)


def batches_of(kind, layout="fused"):
    return gas.SubgraphLoader(*graph_of(kind), batch_size=3, shuffle=True, layout=layout, log=False)


def train(kind, place, layout="fused", epochs=2, watched=False, **options):
    """Return the losses and histories of some epochs; the last one may be checked for waits."""
    model = make(kind, place, **options)
    batches = gas.PrefetchLoader(batches_of(kind, layout), model)  # Knows what layers ask for.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch in range(epochs):
        with no_sync() if watched and epoch == epochs - 1 else contextlib.nullcontext():
            for batch in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch), batch.y[: batch.batch_size])
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    found = torch.stack(losses).cpu(), [h.emb.cpu().clone() for h in model.histories]
    model.close()
    return found


@functools.cache
def trained_on_the_cpu(kind, layout, epochs, dtype, io, prefetch):
    options = {"dtype": dtype, "io": io, "prefetch": prefetch, "store": "host"}
    return train(kind, torch.device("cpu"), layout, epochs, **options)


def check_equal(found, expected, dtype):
    tolerance = 2e-5 if dtype == "float32" else 5e-3  # Steps hardly amplify rounding.
    assert torch.allclose(found[0], expected[0], rtol=tolerance)
    for mine, other in zip(found[1], expected[1], strict=True):
        assert float((mine.float() - other.float()).norm() / other.float().norm()) < tolerance


STORES = ["device", "pinned", "host", "disk"]


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("layout", ["csr", "fused"])
@pytest.mark.parametrize("io", ["serial", "concurrent"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_training_equals_that_on_the_cpu(layout, store, dtype, io, prefetch, device):
    options = {"dtype": dtype, "io": io, "prefetch": prefetch}
    found = train("user", device, layout, store=store, **options)
    check_equal(found, trained_on_the_cpu("user", layout, 2, **options), dtype)


EPOCHS = [
    *itertools.product(["user"], STORES, ["serial", "concurrent"], [0, 1]),
    *itertools.product([*MODELS][1:], ["device", "pinned"], ["concurrent"], [0, 1]),
]


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
@pytest.mark.parametrize(("kind", "store", "io", "prefetch"), EPOCHS)
def test_an_epoch_waits_for_nothing(kind, store, io, prefetch, device):
    """From the loader on: cutting, preparing and moving batches, and every step."""
    watched = store in ("device", "pinned")  # A worker reads and writes the others' rows.
    found = train(kind, device, "fused", 3, watched, store=store, io=io, prefetch=prefetch)
    expected = trained_on_the_cpu(kind, "fused", 3, "float32", io, prefetch)
    check_equal(found, expected, "float32")


@pytest.mark.requires("cuda")
@pytest.mark.sanitized
@pytest.mark.parametrize("width", [1, 3, 4, 16, 100])
def test_int8_equals_that_of_the_cpu(width, device):
    x = torch.randn(50, width) * 10 ** torch.randint(-5, 5, (50, 1))
    x[3, 0], x[4] = torch.nan, 0
    rows = kernels.encode("int8", x.to(device))
    expected = transfer.encode_torch("int8", x)
    others = torch.arange(50) != 3  # A NaN has many forms.
    assert torch.equal(rows.cpu()[others], expected[others])
    out = torch.empty(50, width, device=device)
    kernels.decode("int8", rows, out)
    torch.testing.assert_close(
        out.cpu(), transfer.decode_torch("int8", expected, width), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
@pytest.mark.parametrize("store", ["device", "pinned"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_step_waits_for_the_device(kind, store, device):
    """Of batches that were moved beforehand, with the transposes that their layers need."""
    model = make(kind, device, store=store)
    batches = [batch.to(device) for batch in batches_of(kind)]
    for batch in batches:  # Allocates, compiles and chooses algorithms.
        model(batch).sum().backward()
    with no_sync():
        for batch in batches:
            model(batch).sum().backward()


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("store", STORES)
def test_a_push_stores_the_values_at_the_call(store, device):
    store = "host" if device.type == "cpu" and store in ("device", "pinned") else store
    history = gas.History(20_000, 256, store=store, engine=gas.history.TransferEngine()).to(device)
    for step in range(10):
        x = torch.full((20_000, 256), float(step), device=device)
        history.push(x)
        x.fill_(-1)
        rows = history.start_pull(torch.arange(20_000)).wait()
        history.push(torch.full_like(x, -2.0), None, [0], [20_000])
        assert bool((rows == step).all())


KERNELS = [pytest.param(store, marks=pytest.mark.sanitized) for store in STORES[:2]]


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("store", [*KERNELS, *STORES[2:]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_rows_of_any_size(store, dtype, width, device):
    """By ranges and one by one, to and from a device; what is rounded is so as on the CPU."""
    store = "host" if device.type == "cpu" and store in ("device", "pinned") else store
    here = gas.History(300, width, dtype=dtype, store="host")
    there = gas.History(300, width, dtype=dtype, store=store).to(device)
    x, few, n_id = torch.randn(300, width), torch.randn(70, width), torch.randperm(300)[:70]
    for history, place in ((here, torch.device("cpu")), (there, device)):
        history.push(x.to(place))
        history.push(few.to(place), n_id)
        history.push(few[:5].to(place), None, [290, 3], [2, 3])
    assert torch.equal(there.pull(n_id).cpu(), here.pull(n_id))
    assert torch.equal(there.pull().cpu(), here.pull())
    assert there.pull(n_id[:0]).shape == (0, width)
    there.close()
