"""Kernels are launched on the device of their tensors, whichever is the current one."""

import contextlib
import sys
import threading
import types

import pytest
import torch

from gas import native
from gas.native import device as kernels
from gas.native import matrix
from gas.native.matrix import find_starts


class Devices:
    """Stands for the devices of PyTorch, with a stream each, and for the extension."""

    def __init__(self, monkeypatch):
        self.current, self.changes, self.calls = 0, 0, []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "current_stream", self.stream)
        monkeypatch.setattr(
            native.extension,
            "C",
            types.SimpleNamespace(kernel=self.kernel, Stream=lambda raw, _: raw),
        )

    @contextlib.contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        self.changes += 1
        try:
            yield
        finally:
            self.current = before

    def stream(self):
        return types.SimpleNamespace(cuda_stream=100 + self.current)

    def kernel(self, argument, stream):
        self.calls.append((self.current, argument, stream))
        if argument == "bad":
            raise RuntimeError("the launch failed")


@pytest.mark.parametrize("call", [native.extension.run, native.extension.launch])
def test_on_the_device_of_its_tensors(call, monkeypatch):
    devices = Devices(monkeypatch)
    call("kernel", torch.device("cuda", 0), "a")
    assert devices.changes == 0
    call("kernel", torch.device("cuda", 2), "b")
    with pytest.raises(RuntimeError, match="the launch failed"):
        call("kernel", torch.device("cuda", 1), "bad")
    assert devices.calls == [(0, "a", 100), (2, "b", 102), (1, "bad", 101)]
    assert devices.current == 0
    assert devices.changes == 2


@pytest.mark.requires("cuda")
def test_on_every_device():
    wanted = torch.arange(12.0).view(4, 3)
    for number in range(torch.cuda.device_count()):
        table = wanted.to(f"cuda:{number}")
        index = torch.tensor([3, 0, 0], device=table.device)
        rows = kernels.gather_rows(table, index)
        assert rows.device == table.device
        assert torch.cuda.current_device() == 0
        kernels.scatter_rows(table, index[:2], rows[:2] + 1)
        assert torch.equal(rows.cpu(), wanted[[3, 0, 0]])
        assert torch.equal(table[[3, 0]].cpu(), wanted[[3, 0]] + 1)


@pytest.mark.parametrize(("rows", "entries", "starts"), [(100, 57, 6), (4, 60, 3), (0, 0, 1)])
def test_chunks_are_of_32_rows_and_entries_and_the_end_is_one_more(
    monkeypatch, rows, entries, starts
):
    extension = types.SimpleNamespace(STEP=32, Sparse=lambda *_: None)
    monkeypatch.setattr(matrix.native, "has_kernels", lambda *_: True)
    monkeypatch.setattr(matrix.native, "C", extension)
    monkeypatch.setattr(matrix.native, "launch", lambda *_: None)
    rowptr = torch.empty(rows + 1, dtype=torch.int32, device="meta")
    assert find_starts(rowptr, entries).shape == (starts,)


@pytest.mark.requires("cuda_kernels")
@pytest.mark.requires("cuda")
@pytest.mark.sanitized
@pytest.mark.parametrize("degrees", [[0, 3, 700, 0, 31, 32, 33], [0] * 100, [5], []])
def test_where_chunks_start_on_a_device(degrees, device):
    rowptr = torch.tensor([0, *degrees], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    entries, rows = sum(degrees), len(degrees)
    start = find_starts(rowptr.to(device), entries)
    if device.type == "cpu":
        assert start.numel() == 0
        return
    begins = torch.arange(0, entries + rows + native.C.STEP, native.C.STEP)
    wanted = torch.searchsorted(rowptr[:-1] + torch.arange(rows), begins)
    assert start.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("device", "extension", "computes"),
    [
        ("cpu", None, True),
        ("cuda", None, False),
        ("cuda", types.SimpleNamespace(WITH_CUDA=False), False),
        ("cuda:1", types.SimpleNamespace(WITH_CUDA=True), True),
        ("meta", types.SimpleNamespace(WITH_CUDA=True), False),
    ],
)
def test_where_operators_compute(monkeypatch, device, extension, computes):
    monkeypatch.setattr(native.extension, "C", extension)
    assert native.computes_on(torch.device(device)) is computes


@pytest.mark.requires("cuda_kernels")
def test_launches_let_other_threads_run():
    """Without rows nothing is launched, which needs no device."""
    kernel, matrix = native.C.multiply_float32, native.C.Sparse(0, 0, 0, 0, 0, 0)
    stream = native.C.Stream(0, lambda size: pytest.fail("no scratch is needed"))
    lock, ran = threading.Lock(), threading.Event()
    thread = threading.Thread(target=lambda: (lock.acquire(), ran.set()))
    interval = sys.getswitchinterval()
    lock.acquire()
    thread.start()
    try:
        sys.setswitchinterval(1000)  # No thread gives up the GIL.
        lock.release()
        for _ in range(300_000):
            kernel(matrix, 0, (0, 0, 0, 0, 0), 8, False, 0, stream)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
