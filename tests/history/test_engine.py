"""The transfer engine, with workers and without: order, errors, and every way of ending."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from gas import native
from gas.history import TransferEngine
from gas.native import Job, JobPolicy


@pytest.fixture
def make_native(monkeypatch):
    """Make engines that have workers, and close them."""
    made = []

    def make(threads=1, capacity=256):
        monkeypatch.setattr("gas.history.transfer.MAX_PENDING_JOBS", capacity)
        made.append(TransferEngine(threads=threads))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(params=["twin", pytest.param("native", marks=pytest.mark.requires("native"))])
def make(request, monkeypatch, make_native):
    """Make engines of both kinds, and close them."""
    if request.param == "twin":
        monkeypatch.setattr(native.extension, "C", None)
    return make_native


def call(function, *args):
    return Job.from_function(lambda: function(*args))


def fail(error):
    raise error


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("by", list(JobPolicy))
def test_a_lane_keeps_its_order(make, threads, by):
    engine, seen = make(threads), []
    for i in range(100):
        last = engine.submit(0, call(seen.append, i), by=by)
        engine.submit(1 + i % 2, call(time.sleep, 0), by=by, detached=by is not JobPolicy.WAITERS)
        if by is JobPolicy.WAITERS and i % 50 == 49:
            engine.wait_lane(1)
            engine.wait_lane(2)
    engine.wait(last)
    assert seen == list(range(100))
    engine.wait_lane(1)
    engine.wait_lane(2)


@pytest.mark.requires("native")
def test_lanes_do_not_wait_for_each_other(make_native):
    engine, go = make_native(1), threading.Event()
    blocked = engine.submit(0, call(go.wait, 20), by=JobPolicy.WORKERS)
    engine.run(1, call(time.sleep, 0))
    assert not engine._engine.done(blocked)
    go.set()
    engine.wait(blocked)
    assert engine._engine.done(blocked)


def test_errors_reach_who_waits_once(make):
    engine = make()
    for by in JobPolicy:
        ticket = engine.submit(0, call(fail, OSError(28, "the disk is full")), by=by)
        with pytest.raises(OSError, match="the disk is full"):
            engine.wait(ticket)
        engine.wait(ticket)
    with pytest.raises(KeyError, match="mine"):
        engine.run(0, call(fail, KeyError("mine")))
    engine.run(0, call(time.sleep, 0))


def test_errors_of_detached_jobs_reach_the_next_who_waits(make):
    engine = make()
    for later in (
        lambda: engine.wait_lane(0),
        lambda: engine.run(0, call(time.sleep, 0)),
        lambda: engine.wait(engine.submit(0, call(time.sleep, 0))),
    ):
        engine.submit(0, call(fail, ValueError("lost")), detached=True)
        with pytest.raises(ValueError, match="lost"):
            later()
        assert not engine._submitting
        engine.run(0, call(time.sleep, 0))


@pytest.mark.requires("native")
def test_waiting_helps(make_native):
    engine, where = make_native(), []
    engine.run(0, call(lambda: where.append(threading.get_ident())))
    assert where == [threading.get_ident()]
    engine.run(0, call(lambda: where.append(threading.get_ident())), by=JobPolicy.WORKERS)
    assert where[1] != where[0]


@pytest.mark.requires("native")
def test_cancel(make_native):
    engine, go, seen = make_native(), threading.Event(), []
    first = engine.submit(0, call(go.wait, 20), by=JobPolicy.WORKERS)
    second = engine.submit(0, call(seen.append, "cancelled"))
    third = engine.submit(0, call(seen.append, "kept"))
    time.sleep(0.02)
    threading.Timer(0.05, go.set).start()
    engine.cancel([first, second])
    assert go.is_set()  # What had started was waited for.
    engine.wait(third)
    assert seen == ["kept"]
    engine.cancel([])
    engine.cancel([first, 12345])


@pytest.mark.requires("native")
def test_the_queue_is_bounded(make_native):
    engine, running = make_native(1, capacity=3), []
    for i in range(20):
        engine.submit(i % 2, call(lambda: (time.sleep(0.002), running.append(1))), detached=True)
        assert i + 1 - len(running) <= 4
    engine.wait_lane(0)
    engine.wait_lane(1)
    assert len(running) == 20


@pytest.mark.requires("native")
def test_close(make_native):
    engine, seen = make_native(), []
    engine.submit(0, call(time.sleep, 0.05))
    engine.submit(0, call(seen.append, "pull"))
    engine.submit(0, call(seen.append, "push"), detached=True)
    engine.close()
    assert seen == ["push"]
    with pytest.raises(RuntimeError, match="has been closed"):
        engine.submit(0, call(seen.append, 1))
    engine.close()


@pytest.mark.requires("native")
def test_tensors_live_as_long_as_their_jobs(make_native):
    engine, gone = make_native(), []

    class Kept:
        def __del__(self):
            gone.append(1)

    go = threading.Event()
    kept = dataclasses.replace(call(go.wait, 20), keep=Kept())
    engine.submit(0, kept, JobPolicy.WORKERS)
    del kept
    for _ in range(3):
        engine.run(1, call(time.sleep, 0))
    assert not gone
    go.set()
    engine.wait_lane(0)
    engine.run(1, call(time.sleep, 0))
    engine.run(1, call(time.sleep, 0))
    assert gone


def test_without_the_extension_jobs_run_when_they_are_submitted(make, monkeypatch):
    monkeypatch.setattr(native.extension, "C", None)
    engine, seen = make(), []
    for by in JobPolicy:
        engine.submit(0, call(lambda: seen.append(threading.get_ident())), by=by)
    assert seen == [threading.get_ident()] * 3
    ticket = engine.submit(0, call(fail, OSError("the disk is full")))
    assert engine._engine.done(ticket)
    engine.cancel([ticket])  # Its error goes with it.
    engine.wait(ticket)
    assert not engine.has_workers
    engine.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        engine.submit(0, call(seen.append, 1))


def test_without_the_extension_no_two_jobs_run_at_once(make, monkeypatch):
    monkeypatch.setattr(native.extension, "C", None)
    engine, running, most = make(), [], []

    def work():
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)
        running.pop()

    def submit():
        for _ in range(5):
            engine.run(0, call(work))

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 15


def test_a_fork_starts_anew(make):
    engine = make()
    engine.run(0, call(time.sleep, 0), by=JobPolicy.WORKERS)
    child = os.fork()
    if child == 0:  # The child has no worker and must not wait for one.
        code = 1
        try:
            seen = []
            engine.run(0, call(seen.append, 1), by=JobPolicy.WORKERS)
            engine.close()
            code = 0 if seen == [1] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.run(0, call(time.sleep, 0), by=JobPolicy.WORKERS)


@pytest.mark.requires("native")
def test_ctrl_c_ends_a_wait(make_native):
    engine, go = make_native(), threading.Event()
    ticket = engine.submit(0, call(go.wait, 20), by=JobPolicy.WORKERS)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        engine.wait(ticket)
    assert time.perf_counter() - start < 5
    go.set()
    engine.wait(ticket)


@pytest.mark.slow
@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.requires("native"))]
)
def test_python_ends_while_jobs_run(native):
    program = f"""
import time, torch, gas
from gas import native
if not {native}: native.extension.C = None
history = gas.History(100, 4, engine=gas.history.TransferEngine("concurrent"))
lane = history.engine.new_lane()
from gas.native import Job, JobPolicy
for _ in range(3):
    history.engine.submit(lane, Job.from_function(lambda: time.sleep(.2)), by=JobPolicy.WORKERS)
history.push(torch.ones(100, 4))
history.start_pull(torch.arange(100))
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.requires("native")
def test_no_torn_rows():
    """E4: rows of equal numbers are pushed and pulled by several threads at once."""
    rows = torch.zeros(64, 300)
    engine = TransferEngine(threads=2)
    index = torch.randperm(64)
    errors = []

    def write(first):
        for i in range(200):
            x = torch.full((64, 300), float(first + i))
            job = Job.push(rows, x, index if i % 2 else [(32, 32), (0, 32)])
            engine.submit(0, job, detached=True)

    def read():
        for _ in range(200):
            out = torch.empty(64, 300)
            engine.wait(engine.submit(0, Job.pull(rows, index, out)))
            if not (out == out[:, :1]).all():
                errors.append(out)

    threads = [threading.Thread(target=write, args=(1000 * i,)) for i in range(2)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.wait_lane(0)
    engine.close()
    assert not errors
