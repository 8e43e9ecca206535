import gc
import io
import math
import subprocess
import sys
import threading

import pytest
import torch
from conftest import ROOT, clustered_graph
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphSAGE

import gas
from gas.native import cores
from gas.training import share_cores

BUSY_SECONDS = cores.busy_seconds  # As it is outside of tests.


@pytest.fixture
def machine(monkeypatch):
    """Four cores and a clock: how much others compute is told."""
    state = {"now": 100.0, "own": 7.0, "busy": 50.0}
    monkeypatch.setattr(cores.time, "monotonic", lambda: state["now"])
    monkeypatch.setattr(cores.time, "process_time", lambda: state["own"])
    monkeypatch.setattr(cores, "busy_seconds", lambda: state["busy"])
    monkeypatch.setattr(cores, "num_cores", lambda: 4)
    monkeypatch.setattr(cores, "_usage", cores.CoreUsage())

    def passes(seconds, own, others):
        state["now"] += seconds
        state["own"] += own * seconds
        if state["busy"] is not None:
            state["busy"] += (own + others) * seconds

    passes.state = state
    return passes


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield torch.get_num_threads
    gc.collect()  # A loop that was left early ends now, not in a later test.
    torch.set_num_threads(before)


def test_threads_are_the_cores_that_others_leave(machine, threads):
    with share_cores() as follow:
        assert threads() == 4
        for others, left in ((0.1, 4), (0.8, 3), (2.4, 2), (3.0, 1), (4.0, 1), (0.0, 4)):
            machine(0.3, own=1.5, others=others)
            follow()
            assert threads() == left
    assert threads() == 4


def test_cores_that_others_keep_busy_are_not_idle(machine, threads):
    torch.set_num_threads(3)
    assert cores.has_idle_cores()
    with share_cores() as follow:
        machine(0.3, own=3.0, others=2.0)
        follow()
        assert threads() == 2
        assert not cores.has_idle_cores()
    machine(3.0, own=0.0, others=0.0)
    assert cores.has_idle_cores()


def test_what_was_seen_holds_for_the_next_epoch_and_ends_with_it(machine, threads):
    with share_cores():
        machine(0.3, own=1.0, others=2.0)
    assert threads() == 4
    with share_cores():
        assert threads() == 2
    assert threads() == 4
    with pytest.raises(ZeroDivisionError), share_cores():
        print(1 / (threads() - 2))
    assert threads() == 4


def test_what_happened_between_epochs_long_ago_does_not_count(machine, threads):
    with share_cores() as follow:
        machine(0.3, own=1.0, others=2.0)
        follow()
        assert threads() == 2
    machine(3.0, own=0.0, others=4.0)
    with share_cores() as follow:
        assert threads() == 4
        machine(3.0, own=1.0, others=1.0)  # Of a long batch it does.
        follow()
        assert threads() == 3


def test_short_epochs_are_seen_together(machine, threads):
    for _ in range(4):
        with share_cores():
            machine(0.4 * cores.INTERVAL, own=1.0, others=4.0)
    with share_cores():
        assert threads() == 1


def test_it_looks_now_and_then(machine, threads):
    with share_cores() as follow:
        machine(0.6 * cores.INTERVAL, own=1.0, others=4.0)
        follow()
        assert threads() == 4
        machine(0.6 * cores.INTERVAL, own=1.0, others=4.0)
        follow()
        assert threads() == 1


def test_nothing_is_done_unless_it_is_asked_for(machine, threads):
    with share_cores(False) as follow:
        machine(0.3, own=1.0, others=4.0)
        follow()
        assert threads() == 4
    torch.set_num_threads(1)
    with share_cores() as follow:
        machine(0.3, own=0.0, others=0.0)
        follow()
        assert threads() == 1
    assert cores._usage.free == math.inf


def test_a_system_that_does_not_tell(machine, threads):
    machine.state["busy"] = None
    with share_cores() as follow:
        machine(0.3, own=1.0, others=4.0)
        follow()
        assert threads() == 4


def make_loader(**kwargs):
    return gas.SubgraphLoader(*clustered_graph(6), log=False, **kwargs)


def typed_loader(**kwargs):
    data = HeteroData()
    data["user"].x, data["item"].x = torch.rand(20, 3), torch.rand(10, 3)
    data["user", "buys", "item"].edge_index = torch.stack([torch.arange(20), torch.arange(20) // 2])
    graph = gas.cluster(data, num_parts=6, log=False)
    return gas.SubgraphLoader(graph, log=False, **kwargs)


@pytest.mark.parametrize("make", [make_loader, typed_loader])
def test_a_loop_over_a_loader_leaves_cores(machine, threads, make):
    def seen(loader):
        found = []
        for _ in loader:
            found.append(threads())
            machine(0.3, own=1.0, others=3.0)
        return found

    assert seen(make()) == [4, 1, 1, 1, 1, 1]
    assert threads() == 4
    for number, _ in enumerate(make()):
        assert threads() == 1  # As the loop before has seen.
        if number == 2:
            break
    assert threads() == 4
    assert seen(make(leave_cores=False)) == [4] * 6


def test_an_epoch_that_keeps_its_threads_keeps_them_in_its_loader(machine, threads):
    for outer, inner in ((False, True), (True, False), (True, True)):
        with share_cores(outer) as follow:
            for _ in make_loader(leave_cores=inner):
                machine(0.3, own=1.0, others=3.0)
                follow()
                assert threads() == (1 if outer and inner else 4)
        assert threads() == 4


def test_loops_may_end_in_any_order(machine, threads):
    first, second = iter(make_loader()), iter(make_loader())
    next(first)
    machine(0.3, own=1.0, others=3.0)
    next(first), next(second)
    assert threads() == 1
    first.close()
    machine(0.3, own=1.0, others=2.0)
    next(second)
    assert threads() == 2
    del second  # As a loop does that ends by an error.
    gc.collect()
    assert threads() == 4


def test_the_caller_may_set_the_number_meanwhile(machine, threads):
    loop = iter(make_loader())
    next(loop)
    torch.set_num_threads(2)
    machine(0.3, own=1.0, others=0.0)
    next(loop)
    assert threads() == 2
    loop.close()
    assert threads() == 2


def test_the_caller_may_set_the_very_number_that_was_set_here(machine, threads):
    with share_cores() as follow:
        machine(0.3, own=1.0, others=2.0)
        follow()
        assert threads() == 2
        torch.set_num_threads(2)
        machine(0.3, own=1.0, others=3.0)
        follow()
        assert threads() == 1
        machine(0.3, own=1.0, others=0.0)
        follow()
        assert threads() == 2
    assert threads() == 2
    with share_cores():  # And again, at the end of the last context.
        assert threads() == 2
    torch.set_num_threads(4)
    with share_cores() as follow:
        machine(0.3, own=1.0, others=2.0)
        follow()
        torch.set_num_threads(2)
    assert threads() == 2


def test_new_threads_get_the_callers_number(machine, threads):
    found = []
    with share_cores() as follow:
        machine(0.3, own=1.0, others=2.0)
        follow()
        thread = threading.Thread(target=lambda: found.append(threads()))
        thread.start()
        thread.join()
    assert found == [4]


def test_a_loop_that_was_left_ends_with_the_next(machine, threads):
    left = iter(make_loader())
    next(left)
    machine(0.3, own=1.0, others=3.0)
    next(left)
    assert threads() == 1
    for _ in make_loader():
        assert threads() == 1
    assert threads() == 4
    next(left)  # It goes on nevertheless.
    assert threads() == 1
    left.close()
    assert threads() == 4


LEFT = """
import torch
from gas.native import cores
torch.set_num_threads(3)
cores._usage.update = cores._usage.start = lambda: None
cores._usage.free = 1
def loop():
    with cores.share_cores():
        yield torch.get_num_threads()
left = loop()
print(next(left))
"""


@pytest.mark.slow
def test_a_loop_that_was_left_does_not_keep_python_from_ending():
    done = subprocess.run(
        [sys.executable, "-c", LEFT], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.stdout.strip() == "1"
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_a_loop_that_ends_in_another_thread_is_made_up_for(machine, threads):
    loop = iter(make_loader())
    next(loop)
    machine(0.3, own=1.0, others=3.0)
    next(loop)
    thread = threading.Thread(target=loop.close)
    thread.start()
    thread.join()
    with share_cores(False):
        assert threads() == 4
    assert threads() == 4


@pytest.mark.parametrize("beside", [False, True])
def test_batches_made_ahead_leave_cores(machine, threads, beside, monkeypatch):
    monkeypatch.setattr("gas.scalable.prefetch.has_idle_cores", lambda: beside)
    loader = make_loader()
    model = gas.to_scalable(GraphSAGE(5, 4, 2, 3), num_nodes=loader.num_nodes)
    for leave in (0, 3):  # Or all are taken.
        for number, _ in enumerate(gas.PrefetchLoader(loader, model)):
            machine(0.3, own=1.0, others=3.0)
            assert threads() == (4 if number == 0 else 1)
            if number == leave > 0:
                break
        assert threads() == 4
        machine(3.0, own=0.0, others=0.0)


def test_inference_leaves_cores(machine, threads):
    graph = gas.cluster(clustered_graph(6)[0], num_parts=6, log=False)
    net = GraphSAGE(graph.num_features, 4, 2, 3)
    model = gas.to_scalable(net, graph)
    seen = []

    def look(*_):
        seen.append(threads())
        machine(0.3, own=1.0, others=3.0)

    next(layer for layer in model.modules() if hasattr(layer, "propagate")).register_forward_hook(
        look
    )
    for run in (
        lambda **kwargs: model.predict(graph, **kwargs),
        lambda **kwargs: gas.verify(model, graph, **kwargs),
    ):
        run()
        assert min(seen) == seen[-1] == 1
        assert threads() == 4
        seen.clear()
        run(leave_cores=False)
        assert set(seen) == {4}
        seen.clear()
    model.predict(graph)
    seen.clear()
    model.predict(graph, nodes=torch.tensor([3]))
    assert seen == [1]


def test_busy_seconds_grow_with_work():
    before = BUSY_SECONDS()
    if before is None:
        return  # Not on Linux.
    assert BUSY_SECONDS() >= before > 0


STAT = """cpu  900 900 900 900 900 900 900 0 0 0
cpu0 1 20 300 7000 7000 4000 50000 7000 7000 7000
cpu1 900 900 900 900 900 900 900 0 0 0
cpu3 2 0 0 7000 7000 0 0 0 0 0
intr 5
"""


def test_busy_seconds_are_those_of_work_on_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    monkeypatch.setattr(cores.os, "sysconf", lambda _: 100, raising=False)
    monkeypatch.setattr(cores, "open", lambda _: io.StringIO(STAT), raising=False)
    assert BUSY_SECONDS() == 543.23
