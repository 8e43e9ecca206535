"""Tables in memory of the host that a GPU reads: how it is got, and when it is given back."""

import gc
import mmap
import types

import pytest
import torch

import gas
from gas.history import MemoryStore


class Runtime(types.SimpleNamespace):
    """Stand-in of the CUDA functions for pinned memory; ``pinned`` maps addresses to sizes."""

    WITH_CUDA = True

    def __init__(self):
        super().__init__(pinned={})

    def cuda_pin(self, address, num_bytes):
        assert address % mmap.PAGESIZE == 0
        assert not any(address < at + size and at < address + num_bytes
                       for at, size in self.pinned.items())  # fmt: skip
        self.pinned[address] = num_bytes

    def cuda_unpin(self, address):
        del self.pinned[address]


@pytest.fixture
def runtime(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr("gas.native.extension.C", runtime)
    return runtime


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 3), (100_000, 12)])
def test_pinned_tables_take_no_more_than_their_rows(runtime, shape):
    stores = [MemoryStore(*shape, torch.float32, pin=True) for _ in range(3)]
    size = shape[0] * shape[1] * 4
    assert [*runtime.pinned.values()] == [size] * 3
    assert all(s.tier == "pinned" and not s.table.any() for s in stores)
    stores[0].table.fill_(2)
    stores[0].resize(shape[0] + 1)
    gc.collect()
    assert sorted(runtime.pinned.values()) == [size, size, size + shape[1] * 4]
    twin = stores[0].clone()
    assert torch.equal(twin.table, stores[0].table)
    assert len(runtime.pinned) == 4
    rows = stores[1].table[2]  # Who has a row has the table.
    del stores, twin
    gc.collect()
    assert len(runtime.pinned) == 1
    del rows
    assert not runtime.pinned


def test_no_rows_need_no_memory(runtime):
    assert MemoryStore(0, 4, torch.float32, pin=True).table.shape == (0, 4)
    assert not runtime.pinned


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
@pytest.mark.parametrize("num_rows", [10, 100_000])
def test_pytorch_knows_that_the_memory_is_pinned(num_rows):
    history = gas.History(num_rows, 16, store="pinned").cuda()
    assert history.store.table.is_pinned()
    assert not history._link.is_staged
    x = torch.randn(num_rows, 16, device="cuda")
    history.push(x)
    index = torch.randint(num_rows, (1000,))
    assert torch.equal(history.pull(index), x[index.cuda()])
    assert torch.equal(history.emb, x.cpu())


@pytest.mark.requires("cuda")
@pytest.mark.requires("cuda_kernels")
def test_a_pinned_table_outlives_the_pull_that_reads_it():
    history = gas.History(500_000, 64, store="pinned").cuda()
    history.push(torch.full((500_000, 64), 3.0, device="cuda"))
    pulls = [history.start_pull(torch.arange(500_000)) for _ in range(4)]
    del history
    assert all(bool((pull.wait() == 3).all()) for pull in pulls)
