"""Nothing that a mini-batch of a typed graph does on a device makes the host wait for it."""

import contextlib

import pytest
import torch
from conftest import no_sync
from hetero.graphs import SIZES, WIDTHS, Embedded, bibliography, flat, net_of
from pretended_device import DEVICE, Pretended
from torch_geometric.nn import GATConv, HANConv, HeteroConv, Linear, SAGEConv

import gas


class Attention(torch.nn.Module):
    """GAT within papers, with their self-loops, and SAGE or GAT into every type."""

    def __init__(self, data):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: self._conv(kind) for kind in data.edge_types}) for _ in range(2)
        )

    def _conv(self, kind):
        if kind[0] == kind[2]:
            return GATConv(-1, 8)
        if kind[1].startswith("rev_"):
            return SAGEConv((-1, -1), 8)
        return GATConv((-1, -1), 8, add_self_loops=False, dropout=0.3)

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = {kind: x.relu() for kind, x in conv(x_dict, edge_index_dict).items()}
        return x_dict


class Han(torch.nn.Module):
    """Two layers that weigh relations by means over all nodes."""

    def __init__(self, data):
        super().__init__()
        self.convs = torch.nn.ModuleList(
            HANConv(widths, 8, data.metadata(), heads=2) for widths in (WIDTHS, 8)
        )

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return x_dict


def embedded(data):
    sizes = {kind: SIZES[kind] for kind in ("author", "venue")}
    for kind in sizes:
        del data[kind].x
        data[kind].num_nodes = sizes[kind]
    data["paper"].x = Linear(-1, 6)(data["paper"].x).detach()
    module = Embedded(Attention(data), sizes)
    for table in module.tables.values():
        table.sparse = False
    return module


NETS = {
    "attention": Attention,
    "embedded": embedded,
    "HAN": Han,
    "HGT": lambda data: net_of("HGT", data),
    "to_hetero": lambda data: net_of("to_hetero", data),
    "by hand": lambda data: net_of("by hand", data),
}


@pytest.fixture
def device(monkeypatch):
    return Pretended(monkeypatch)


def made(name, perm=True):
    torch.manual_seed(0)
    data = bibliography()
    model = gas.to_scalable(NETS[name](data), data)
    graph = gas.cluster(data, 4, log=False, method="random")
    model.predict(graph)
    for kind in () if perm else SIZES:
        del graph[kind].perm
    return model, gas.SubgraphLoader(graph, batch_size=2, log=False)


def trained(model, loader, device=None, move=None):
    """Train for two epochs; what made the host wait, and everything that was computed."""
    outs = []
    with contextlib.nullcontext() if device is None else device:
        if device is not None:
            device.move(model)
            device.waits.clear()
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
        for batch in (*loader, *loader):
            out = flat(model(batch if move is None else move(batch)))
            optimizer.zero_grad()
            out.pow(2).mean().backward()
            optimizer.step()
            outs.append(out.detach())
        waits = [] if device is None else list(device.waits)
    found = [*outs, *model.state_dict().values(), *(h.emb for h in model.histories)]
    return waits, [getattr(value, "on_host", value) for value in found]


@pytest.mark.slow(fast=2)
@pytest.mark.parametrize("name", NETS)
def test_no_step_waits(device, name):
    model, loader = made(name)
    waits, found = trained(model.eval(), loader, device)
    assert not waits
    assert {entry[2] for entry in device.log if entry[0] == "copy"} == {"pinned"}
    twin, loader = made(name)
    torch.testing.assert_close(found, trained(twin.eval(), loader)[1])


def test_dropout_does_not_wait(device):
    model, loader = made("to_hetero")
    assert not trained(model.train(), loader, device)[0]


def test_ids_that_a_module_looks_up(device):
    """Those of the graph that was cut, where nothing says what they were before."""
    model, loader = made("embedded", perm=False)
    waits, found = trained(model.eval(), loader, device)
    assert not waits
    twin, loader = made("embedded", perm=False)
    torch.testing.assert_close(found, trained(twin.eval(), loader)[1])


def test_a_batch_that_was_moved(device):
    """Its ids have to come back, and the result is the same."""
    model, loader = made("attention")
    waits, found = trained(model.eval(), loader, device, lambda batch: batch.to(DEVICE))
    assert waits
    twin, loader = made("attention")
    torch.testing.assert_close(found, trained(twin.eval(), loader)[1])


def test_where_a_batch_lies_then(device):
    """Labels and masks are on the device, ids stay on the CPU."""
    model, loader = made("attention")
    batch = next(iter(loader))
    with device:
        device.move(model)
        model(batch)
        for kind in SIZES:
            assert batch[kind].x.is_cuda
            assert batch[kind].perm.is_cuda
            assert all(batch[kind][key].is_cpu for key in ("n_id", "offset", "count"))
        assert batch["paper"].y.is_cuda
        assert all(batch[kind].edge_index.is_cuda for kind in batch.edge_types)


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
@pytest.mark.parametrize("name", NETS)
def test_no_step_waits_for_a_real_device(name):
    model, loader = made(name)
    model.cuda().eval()

    def epoch():
        for batch in loader:
            flat(model(batch)).pow(2).mean().backward()

    epoch()  # Libraries allocate.
    with no_sync():
        epoch()
