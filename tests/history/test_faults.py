"""Faults, interrupts, forks and ends while transfers are under way: nothing hangs or mixes up."""

import copy
import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from conftest import clustered_graph
from torch.utils.data import DataLoader
from transfers import Slow, make_model, train
from user_models import SAGE

import gas
from gas.native.transfer import Job

pytestmark = pytest.mark.usefixtures("_idle_cores")


@pytest.fixture
def graph():
    return clustered_graph(10, num_nodes=200, num_edges=1200)


def test_an_index_out_of_range(graph):
    model = make_model(graph)
    before = [h.emb.clone() for h in model.histories]
    batch, batch_size, n_id, offset, count = next(iter(gas.SubgraphLoader(*graph, log=False)))
    wrong = n_id.clone()
    wrong[-1] = -1
    with pytest.raises(IndexError, match="-1"):
        model(batch.x, batch.adj_t, batch_size, wrong, offset, count)
    assert all(torch.equal(h.emb, b) for h, b in zip(model.histories, before, strict=True))
    model(batch.x, batch.adj_t, batch_size, n_id, offset, count)


def _errors(function):
    try:
        function()
    except OSError:
        return True
    return False


@pytest.mark.parametrize("failing", ["read", "write"])
def test_a_store_that_fails(graph, failing):
    class Failing(Slow):
        broken = False

        def read(self, index, out):
            if failing == "read" and Failing.broken:
                raise OSError(5, "the cable is loose")
            super().read(index, out)

        def write(self, index, rows):
            if failing == "write" and Failing.broken:
                raise OSError(5, "the cable is loose")
            super().write(index, rows)

    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    model = make_model(graph, store=Failing)
    Failing.broken = True
    with pytest.raises(OSError, match="the cable is loose"):
        train(model, loader)
    Failing.broken = False
    if failing == "write":  # Errors of the pushes that followed are left.
        while any(_errors(history.wait) for history in model.histories):
            pass
    train(model, loader)
    model.close()


class Stumbling(SAGE):
    """Raises between a pull and a push."""

    stumble: BaseException | None = None

    def push_and_pull(self, history, x, *args):
        x = super().push_and_pull(history, x, *args)
        if self.stumble is not None:
            error, self.stumble = self.stumble, None
            raise error
        return x


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_forward_raises_between_pull_and_push(graph, error, prefetch):
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    torch.manual_seed(0)
    model = Stumbling(200, 5, 3, store=Slow, prefetch=prefetch)
    model(graph[0].x, graph[0].edge_index, fill=True)
    model.stumble = error
    with pytest.raises(type(error)):
        train(model, gas.PrefetchLoader(loader, model))
    gc.collect()  # Ends the loop's iterator.
    assert model._calls.running.call is None
    assert not model._started_pulls
    # The next batch reads its own rows: as in a model that took up where this one stumbled.
    twin = make_model(graph, io="serial")
    twin.load_state_dict(model.state_dict())
    for mine, other in zip(model.histories, twin.histories, strict=True):
        other.push(mine.emb)
    assert train(model, loader, 1) == train(twin, loader, 1)


def test_ctrl_c_in_the_middle_of_an_epoch(graph):
    class Sleepy(Slow):
        seconds = 0.05

    loader = gas.SubgraphLoader(*graph, batch_size=1, log=False)
    model = make_model(graph, store=Sleepy, prefetch=1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        train(model, gas.PrefetchLoader(loader, model), 20)
    assert time.perf_counter() - start < 5
    Sleepy.seconds = 0
    losses = train(model, gas.PrefetchLoader(loader, model), 1)
    assert len(losses) == 10
    model.close()


def test_workers_forked_after_the_engine_exists(graph):
    """Data-loading workers are forks of a process whose engine has threads."""
    model = make_model(graph, store=Slow)
    train(model, gas.SubgraphLoader(*graph, batch_size=3, log=False), 1)
    forked = gas.SubgraphLoader(*graph, batch_size=3, log=False, num_workers=2)
    assert isinstance(forked, DataLoader)
    assert len(train(model, forked, 1)) == 4
    child = os.fork()
    if child == 0:
        code = 1
        try:
            history = model.histories[0]
            rows = history.pull(torch.arange(5))
            history.push(rows + 1, torch.arange(5))
            code = 0 if torch.equal(history.pull(torch.arange(5)), rows + 1) else 2
            model.close()
            del model
            gc.collect()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(model, forked, 1)
    model.close()


def test_a_copy_of_a_model_is_independent(graph):
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    for store in ("host", "disk"):
        model = make_model(graph, store=store)
        train(model, loader, 1)
        twin = copy.deepcopy(model)
        expected = train(model, loader, 1)
        assert train(twin, loader, 1) == expected
        twin.close()
        train(model, loader, 1)


def test_a_dropped_model_ends_its_workers(graph):
    gone = []

    class Watched(Slow):
        def __del__(self):
            gone.append(1)

    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    model = make_model(graph, store=Watched)
    train(model, loader, 1)
    engine = weakref.ref(model._engine)
    ended = model._engine._finalizer
    del model
    gc.collect()
    deadline = time.perf_counter() + 5  # The last push may be under way.
    while (engine() is not None or len(gone) < 2) and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert len(gone) == 2
    assert engine() is None
    assert not ended.alive  # It has closed the engine, which ends the workers.


def test_closing_after_a_failed_push_closes_everything(graph):
    class Failing(Slow):
        closed = 0

        def write(self, index, rows):
            raise OSError(28, "the disk is full")

        def close(self):
            Failing.closed += 1

    go = threading.Event()  # Else the first error would be told when the second push is queued.
    model = gas.ScalableGNN(200, 4, 3, store=Failing)
    for history in model.histories:
        store = history.store
        job = Job.from_function(lambda store=store: go.wait(20) and store.write(None, None))
        history._link._submit_push(job)
    go.set()
    with pytest.raises(OSError, match="the disk is full"):
        model.close()
    assert Failing.closed == 2


def test_a_pull_that_was_taken_back(graph):
    model = make_model(graph, store=Slow)
    pull = model.histories[0].start_pull(torch.arange(5))
    pull.cancel()
    with pytest.raises(RuntimeError, match="was cancelled"):
        pull.wait()
