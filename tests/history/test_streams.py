"""Whatever a device does first, pulls and pushes have the results of doing them in turn."""

import gc
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
from streams import Machine, staged
from torch.utils._python_dispatch import _disable_current_modes as aside

import gas
from gas.history import MemoryStore, TableStore, TransferEngine
from gas.history.codec import Codec
from gas.history.cuda import CudaLink
from gas.history.rows import BatchPulls
from gas.native import device
from gas.scalable.call import get_pulls

CPU = torch.device("cpu")
ROWS, WIDTH = 12, 4


def make_link(machine, way, dtype="float32", engine=None):
    engine = engine or TransferEngine()
    codec = Codec.of(dtype)
    shape = ROWS, codec.columns(WIDTH)
    if way == "here":
        store = TableStore(torch.zeros(shape, dtype=codec.dtype))
    else:
        store = (staged(machine) if way == "staged" else MemoryStore)(*shape, codec.dtype)
    link = CudaLink(store, codec, WIDTH, engine, CPU)
    if way == "bus":  # The table is on "the device", which is the CPU.
        link.on_device = False
    return link


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr("gas.history.cuda.CHUNK_BYTES", 3 * WIDTH * 4)  # Three rows.
    scatter = device.scatter_rows

    def checked(table, index, rows):
        assert rows.is_contiguous()  # Kernels are given addresses.
        assert rows.dtype == table.dtype
        scatter(table, index, rows)

    monkeypatch.setattr(device, "scatter_rows", checked)
    return Machine(monkeypatch)


class Program:
    """Pulls and pushes of some histories in a random order, with the expected results."""

    def __init__(self, machine, way, dtype, seed, pool_size):
        self.machine, self.random = machine, random.Random(seed)
        # Without workers jobs run when they are waited for.
        self.engine = TransferEngine(pool_size=pool_size, threads=0)
        with machine.on(machine.current if way == "here" else machine.host):  # Who clears tables.
            self.links = [make_link(machine, way, dtype, self.engine) for _ in range(3)]
        with aside():
            self.tables = [torch.zeros(ROWS, WIDTH) for _ in self.links]
        self.streams = [machine.current, machine.stream()]
        self.copies, self.pulls = {}, []
        with machine.on(machine.host):
            self.index = torch.tensor([3, 0, 7, 7, 11, 5, 1])

    def step(self):
        self.machine.current = self.random.choice(self.streams)
        self.number = self.random.randrange(len(self.links))
        self.link = self.links[self.number]
        actions = [self.pull, self.pull, self.push, self.push_rows, self.wait, self.change]
        self.random.choice([*actions, self.read_in_place])()

    def pull(self):
        space = self.random.randrange(3)
        pull = self.link.pull(self.index, space, torch.float32, copies=self.copies)
        with aside():
            self.pulls.append((pull, space, self.tables[self.number][self.index]))

    def push(self):
        x = torch.randint(-127, 128, (5, WIDTH)).float()
        x[:, 0] = 127  # The scale of int8 is one.
        self.link.push(x, [(0, 2), (6, 3)])
        with aside():
            self.tables[self.number][[0, 1, 6, 7, 8]] = x
        x.fill_(-1)

    def push_rows(self):
        x = torch.full((8, WIDTH), 127.0)
        with self.machine.on(self.machine.host):
            index = torch.tensor([9, 3, 0, 4])
        self.link.push(x[::2].t().contiguous().t(), index)
        with aside():
            self.tables[self.number][[9, 3, 0, 4]] = 127.0
            index.zero_()
        x.zero_()

    def wait(self):
        if self.pulls:
            pull, space, expected = self.pulls.pop(self.random.randrange(len(self.pulls)))
            rows = pull.wait()
            rows[:space] = rows.sum()
            with aside():
                assert torch.equal(rows[space:].float(), expected)

    def change(self):
        self.link.wait()
        self.link.note_changes()
        if not self.link.is_staged:
            self.link.store.table.zero_()
            if (
                not self.link.on_device
            ):  # The next transfer waits for the stream that is current then.
                for stream in self.streams:
                    stream.wait_stream(self.machine.current)
            with aside():
                self.tables[self.number].zero_()

    def read_in_place(self):
        found = self.link.table_and_index(self.index, torch.float32, self.copies)
        if found is not None:
            table, index = found
            rows = table[index]
            with aside():
                assert torch.equal(rows, self.tables[self.number][self.index])


@pytest.mark.slow(fast=5)
@pytest.mark.parametrize("way", ["here", "bus", "staged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("pool_size", [None, 1])
def test_every_order_that_events_allow_gives_the_same(machine, way, dtype, pool_size):
    for seed in range(6):
        with machine:
            program = Program(machine, way, dtype, seed, pool_size)
            for _ in range(60):
                program.step()
            while program.pulls:
                program.wait()
        for link in program.links:
            link.wait()
    machine.check_allocator()


def test_histories_share_two_streams_and_the_ids_of_a_batch(machine):
    engine = TransferEngine()
    histories = [gas.History(ROWS, WIDTH, engine=engine) for _ in range(63)]
    for history in histories:
        history.push(torch.ones(ROWS, WIDTH))
        history._link = make_link(machine, "bus", engine=engine)
        history._device = torch.device("meta")
    before = len(machine.streams)
    pulls = BatchPulls(histories, 2, torch.arange(7))
    for history in histories:
        pulls.tensor(history, torch.ones(2, WIDTH))
    assert before == len(machine.streams) == 3  # And the computation's.
    assert machine.id_copies == 1


def test_layers_share_the_ids_even_where_no_pull_is_started():
    engine = SimpleNamespace(io="serial")
    model = SimpleNamespace(_started_pulls=[], _engine=engine, device=torch.device("meta"))
    assert get_pulls(model, 2, torch.arange(7)) is not None
    model.device = CPU
    assert get_pulls(model, 2, torch.arange(7)) is None  # Nothing is copied there.


def test_a_table_on_the_device_is_read_in_place(machine):
    history = gas.History(ROWS, WIDTH)
    history.push(torch.ones(ROWS, WIDTH))
    history._link = make_link(machine, "here")
    assert not history.supports_overlap  # No pull of it is started before it is needed.
    rows = BatchPulls([], 2, torch.arange(7)).rows(history, torch.ones(2, WIDTH))
    assert rows.halo.table is history._link.store.table
    assert len(machine.streams) == 3


def test_one_chunk_of_a_push_is_written_while_the_next_is_copied(machine, monkeypatch):
    """Every write but the last comes after the copy of the chunk behind it."""
    order = []
    link = make_link(machine, "staged")
    write, buffer = link.store.write, link._acquire_buffer
    monkeypatch.setattr(link, "_acquire_buffer", lambda: order.append("copy") or buffer())
    monkeypatch.setattr(link.store, "write", lambda *a: order.append("write") or write(*a))
    link.push(torch.ones(ROWS, WIDTH), [(0, ROWS)])
    link.wait()
    assert order == ["copy", "copy", "write", "copy", "write", "copy", "write", "write"]
    assert torch.equal(link.store.table, torch.ones(ROWS, WIDTH))


def test_staged_pulls_read_packed_copies_where_they_are_planned(machine):
    link = make_link(machine, "staged")
    index, copies = torch.tensor([3, 0, 7, 7, 11]), torch.rand(3, WIDTH)
    plans = {True: SimpleNamespace(places=torch.tensor([2, 0, 1, 1, 2])), False: None}
    for is_planned, plan in plans.items():
        link.store.packed = SimpleNamespace(
            plan=lambda index, own, plan=plan: plan, read_staged=lambda plan: copies
        )
        found = link.pull(index, 0, torch.float32).wait()
        expected = copies[plan.places] if is_planned else torch.zeros(5, WIDTH)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("pool_size", [None, 1])
def test_a_push_that_failed_leaves_its_buffers(machine, monkeypatch, pool_size):
    engine = TransferEngine(pool_size=pool_size)
    link = make_link(machine, "staged", engine=engine)
    write = link.store.write

    def fail(index, rows):
        raise OSError("the disk is gone")

    for _ in range(3):
        monkeypatch.setattr(link.store, "write", fail)
        link.push(torch.ones(ROWS, WIDTH), [(0, ROWS)])
        with pytest.raises(OSError, match="the disk is gone"):
            link.wait()
        monkeypatch.setattr(link.store, "write", write)
        link.push(torch.ones(ROWS, WIDTH), [(0, ROWS)])
        link.wait()
    assert torch.equal(link.store.table, torch.ones(ROWS, WIDTH))
    assert len(link._buffers) == link._num_buffers == (pool_size or 2)


def test_memory_outlives_the_transfers_that_use_it(machine, monkeypatch):
    """Its last owner waits for them, and refers to it until then."""
    waited = []

    class Event:
        def synchronize(self):
            waited.append(table() is not None)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_pinned", lambda self: True)
        patch.setattr(device, "reads_host_memory", lambda: True)
        link = make_link(machine, "bus")
    machine.memory.clear()  # Which keeps tensors alive.
    table = weakref.ref(link.store.table)
    link._last |= {"pull": Event(), "push": Event()}
    link.wait()
    assert waited == [True] * 2
    del link
    gc.collect()
    assert waited == [True] * 4
    assert table() is None
