"""Batches on their way to a device: which stream copies them, who waits, whose memory is kept."""

import copy

import pytest
import torch
from conftest import random_graph
from pretended_device import DEVICE, Pretended, There

import gas
from gas.graph import Uses
from gas.graph.layout import layout_of
from gas.loader.batch import tensors_in_memory
from gas.loader.transfer import _dense_tensors, _pin, send_batch
from gas.native.rows import csr_parts, sparse_csr

PTR = torch.arange(0, 201, 20)


@pytest.fixture
def device(monkeypatch):
    return Pretended(monkeypatch)


def loaded(layout="fused", num_edges=1200):
    data = random_graph(200, num_edges)
    data.edge_weight = torch.rand(num_edges)
    return gas.SubgraphLoader(data, PTR, batch_size=3, layout=layout, log=False)


def make_batch(layout="fused"):
    batch = next(iter(loaded(layout)))
    if layout == "fused":
        batch.adj_t.prepare(Uses(True, False, Uses(True, True)))
    batch.data.several = [torch.rand(3), {"inner": torch.rand(2)}]
    assert batch.x.size(1) == 5  # Read, for both.
    batch.data.views = [copy.copy(batch.data)]
    batch.data.text = "no tensor"
    return batch


@pytest.mark.parametrize("layout", ["fused", "edge_index"])
def test_what_streams_do(device, layout):
    batch = make_batch(layout)
    with device:
        sent = send_batch(batch, DEVICE)
        copies, last = device.log[:-1], device.log[-1]
        assert {entry[:3] for entry in copies} == {("copy", "copies", "pinned")}
        assert last == ("record", "copies", sent.event)
        device.log.clear()
        moved = sent.receive(DEVICE)
    assert device.log[0] == ("wait", "computes", sent.event)
    assert all(entry[:2] == ("use", "computes") for entry in device.log[1:])
    used = {id(tensor) for *_, tensor in device.log[1:]}
    assert used == {id(tensor) for *_, tensor in copies}
    assert not device.waits
    there, here = list(tensors_in_memory(moved.data)), list(tensors_in_memory(batch.data))
    assert {id(tensor) for tensor in there} < used  # And those in lists.
    assert len(there) == len(here) > (20 if layout == "fused" else 6)
    for mine, other in zip(there, here, strict=True):
        assert isinstance(mine, There)
        assert torch.equal(mine.on_host, other)
    assert isinstance(moved.data.several[1]["inner"], There)
    assert moved.data.text == "no tensor"
    assert not any(isinstance(tensor, There) for tensor in tensors_in_memory(batch.data))


def test_features_are_read_into_pinned_memory(device):
    batch = next(iter(loaded()))
    with device:
        moved = send_batch(batch, DEVICE).receive(DEVICE)
    assert {entry[2] for entry in device.log if entry[0] == "copy"} == {"pinned"}
    assert len(device.pinned) > 5
    assert not [tensor.shape for tensor in device.pinned if tensor.dim() > 1]
    assert torch.equal(moved.x.on_host, batch.x)


def test_what_is_there_already_is_not_copied(device):
    batch = make_batch()
    with device:
        batch = batch.to(DEVICE)
        device.log.clear()
        sent = send_batch(batch, DEVICE)
        assert sent.receive(DEVICE) is batch
    assert sent.event is None
    assert not device.log


def test_nothing_happens_on_the_host():
    batch = make_batch()
    assert send_batch(batch, torch.device("cpu")).receive(torch.device("cpu")) is batch


def test_what_learns_is_copied_from_where_it_is(device):
    """A gradient would come back the way that the copy has gone."""
    batch = make_batch()
    batch.data.edge_weight = batch.data.edge_weight.clone().requires_grad_()
    with device:
        assert _pin(batch.data.edge_weight) is batch.data.edge_weight
        assert _pin(batch.data.y).is_pretended


def test_elements_that_share_memory(device):
    one = torch.rand(3, 1)
    with device:
        for shared in (one.expand(3, 4), one[0].as_strided((5,), (0,))):
            assert torch.equal(_pin(shared), shared)
        assert _pin(one[:, 0]).is_pretended


def test_sparse_features(device):
    x = torch.rand(4, 6).round().to_sparse_csr()
    with device:
        pinned = _pin(x)
        assert all(part.is_pretended for part in map(_pin, csr_parts(x)))
    assert torch.equal(pinned.to_dense(), x.to_dense())
    assert len(_dense_tensors(pinned)) == 3
    coo = sparse_csr(*csr_parts(x), 6).to_sparse_coo()
    assert len(_dense_tensors(coo)) == 2
    assert _pin(coo) is coo


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_prefetched_batch_is_received_before_it_is_handed_out(device, prefetch):
    model = gas.models.GraphSAGE(200, 5, 8, 3, 2, prefetch=prefetch)
    model.histories[0].push(torch.zeros(200, 8))
    with device:
        device.move(model)
        batches = gas.PrefetchLoader(loaded(), model)
        for batch in batches:
            x = batch.x
            (event,) = [entry[2] for entry in device.log if entry[:2] == ("wait", "computes")][-1:]
            recorded = device.log.index(("record", "copies", event))
            (copied,) = [i for i, e in enumerate(device.log) if e[0] == "copy" and e[3] is x]
            (used,) = [i for i, e in enumerate(device.log) if e[0] == "use" and e[2] is x]
            assert copied < recorded < device.log.index(("wait", "computes", event)) < used
    assert not device.waits


@pytest.mark.requires("cuda")
@pytest.mark.parametrize("layout", ["fused", "csr", "edge_index"])
def test_batches_arrive_whole_and_stay_so(layout):
    """While a slow computation reads a batch, the next ones are copied elsewhere."""
    loader = loaded(layout, num_edges=100_000)
    model = gas.models.GraphSAGE(200, 5, 8, 3, 2).cuda()
    found, expected = [], list(loader)
    for batch in gas.PrefetchLoader(loader, model):
        torch.cuda._sleep(20_000_000)
        adj = batch.data.edge_index if layout == "edge_index" else batch.adj_t
        tensors = [batch.x, batch.y, batch.edge_weight, *layout_of(adj).entries(adj)]
        found.append([tensor.clone() for tensor in tensors])
        del batch, adj, tensors
    for mine, batch in zip(found, expected, strict=True):
        adj = batch.data.edge_index if layout == "edge_index" else batch.adj_t
        others = [batch.x, batch.y, batch.edge_weight, *layout_of(adj).entries(adj)]
        assert all(tensor.is_cuda for tensor in mine)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, others, strict=True))
