import math

import pytest
import torch

from gas.history import cores
from gas.training import share_cores


@pytest.fixture
def machine(monkeypatch):
    """Four cores and a clock: how much others compute is told."""
    state = {"now": 100.0, "own": 7.0, "busy": 50.0}
    monkeypatch.setattr(cores.time, "monotonic", lambda: state["now"])
    monkeypatch.setattr(cores.time, "process_time", lambda: state["own"])
    monkeypatch.setattr(cores, "busy_seconds", lambda: state["busy"])
    monkeypatch.setattr(cores, "num_cores", lambda: 4)
    monkeypatch.setattr(cores, "_cores", cores.Cores())

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
    assert cores._cores.free == math.inf


def test_a_system_that_does_not_tell(machine, threads):
    machine.state["busy"] = None
    with share_cores() as follow:
        machine(0.3, own=1.0, others=4.0)
        follow()
        assert threads() == 4


def test_busy_seconds_grow_with_work():
    before = cores.busy_seconds()
    if before is None:
        return  # Not on Linux.
    assert cores.busy_seconds() >= before > 0
