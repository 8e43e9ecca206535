"""Transfers beside the computation: the same results, in less time, whatever goes wrong."""

import copy
import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from conftest import random_graph
from torch.utils.data import DataLoader
from user_models import SAGE

import gas
from gas._engine import By, Engine
from gas._transfer import Job
from gas.history import MemoryStore
from gas.history.batch import BatchPulls


@pytest.fixture
def graph():
    data = random_graph(num_nodes=200, num_edges=1200)
    perm, ptr = gas.metis(data.edge_index, 10, num_nodes=200, log=False)
    return gas.permute(data, perm, log=False), ptr


@pytest.fixture(autouse=True)
def _with_idle_cores(monkeypatch):
    """Workers take part, however many cores there are."""
    monkeypatch.setattr("gas.history.host.has_idle_cores", lambda: True)
    monkeypatch.setattr("gas.prefetch.has_idle_cores", lambda: True)


def make_model(graph, **kwargs):
    torch.manual_seed(0)
    model = SAGE(200, 5, 3, **kwargs)
    with torch.no_grad():
        model(graph[0].x, graph[0].edge_index, fill=True)
    return model


def train(model, loader, epochs=2):
    """The losses of some epochs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        for batch, *args in loader:
            optimizer.zero_grad()
            loss = model(batch.x, batch.adj_t, *args).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


class Slow(MemoryStore):
    """A store whose jobs take a while."""

    seconds = 0.001

    def read(self, index, out):
        time.sleep(self.seconds)
        super().read(index, out)

    def write(self, index, rows):
        time.sleep(self.seconds)
        super().write(index, rows)


@pytest.mark.parametrize("store", ["host", "disk", Slow], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_concurrent_equals_serial(graph, store, dtype):
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    runs = {}
    for io in ("serial", "concurrent"):
        for pool_size in (None, 1):
            model = make_model(graph, store=store, dtype=dtype, io=io, pool_size=pool_size)
            losses = train(model, loader)
            runs[io, pool_size] = losses + [h.emb.clone() for h in model.histories]
            model.close()
    first, *others = runs.values()
    for other in others:
        for mine, its in zip(first, other, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(its))


def test_io_is_a_switch(graph):
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    model = make_model(graph)
    assert model.io == "concurrent"
    before = [h.emb.clone() for h in model.histories]
    with pytest.warns(UserWarning, match="results are wrong, on purpose"):
        model.io = "none"
    train(model, loader, 1)
    assert all(torch.equal(h.emb, b) for h, b in zip(model.histories, before, strict=True))
    model.io = "serial"
    train(model, loader, 1)
    assert not any(torch.equal(h.emb, b) for h, b in zip(model.histories, before, strict=True))
    for bad in ("async", None):
        with pytest.raises(ValueError, match=f"'io' is {bad!r}, expected one of serial, conc"):
            model.io = bad
    with pytest.raises(ValueError, match="'prefetch' is 2, expected 0 or 1"):
        gas.ScalableGNN(10, 8, 2, prefetch=2)


def test_serial_leaves_workers_alone(graph, monkeypatch):
    """Workers are started by the first job that they may run."""
    asked: set[By] = set()
    submit = Engine.submit

    def watch(self, lane, job, by=By.ANYONE, detached=False):
        asked.add(by)
        return submit(self, lane, job, by, detached)

    monkeypatch.setattr(Engine, "submit", watch)
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    for io, store, expected in (
        ("serial", "host", {By.WAITERS}),
        ("serial", Slow, {By.WAITERS}),
        ("concurrent", "host", {By.WAITERS, By.ANYONE}),
        ("concurrent", Slow, {By.WORKERS}),
    ):
        asked.clear()
        model = make_model(graph, io=io, store=store)
        train(model, loader, 1)
        assert asked == expected
        model.close()


def test_an_epoch_takes_the_longer_of_computation_and_transfer():
    """Every job sleeps 50 ms: the epoch takes max(computation, I/O), not their sum."""
    sleep, batches, layers = 0.05, 8, 2  # One history: a pull and a push for every batch.

    class Sleepy(Slow):
        seconds = sleep

    class Model(gas.ScalableGNN):
        compute = 0.0

        def forward(self, x, adj_t, *args):
            time.sleep(self.compute / 2)
            x = self.push_and_pull(self.histories[0], x, *args)
            time.sleep(self.compute / 2)
            return x

    data = random_graph(num_nodes=160, num_edges=600, features=4)
    ptr = torch.arange(0, 161, 20)
    loader = gas.SubgraphLoader(data, ptr, log=False)

    def epoch(compute, io, prefetch=1):
        model = Model(160, 4, layers, store=Sleepy, io=io, prefetch=prefetch)
        model.histories[0].push(data.x)
        model.histories[0].wait()
        model.compute = compute
        start = time.perf_counter()
        for batch, *args in gas.PrefetchLoader(loader, model):
            model(batch.x, batch.adj_t, *args)
        model.histories[0].wait()
        seconds = time.perf_counter() - start
        model.close()
        return seconds

    transfer = batches * 2 * sleep
    for compute in (0.15, 0.1, 0.03):
        longer = max(batches * compute, transfer)
        total = batches * compute + transfer
        # The first pull and the last push have nothing beside them.
        assert longer <= epoch(compute, "concurrent") < longer + 3 * sleep < total + sleep
    assert epoch(0.1, "serial") >= batches * 0.1 + transfer


# Faults -------------------------------------------------------------------------------------------


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
    assert model._call is None
    assert not model._ahead
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


def test_two_models_in_turn_and_in_two_threads(graph):
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)

    def models():
        return [make_model(graph, store=store, prefetch=1) for store in ("host", "disk")]

    expected = [train(model, gas.PrefetchLoader(loader, model)) for model in models()]

    in_turn = [[], []]
    pair = models()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    for _ in range(2):
        loaders = [gas.PrefetchLoader(loader, model) for model in pair]
        for batches in zip(*loaders, strict=True):
            for i, (batch, *args) in enumerate(batches):
                optimizers[i].zero_grad()
                loss = pair[i](batch.x, batch.adj_t, *args).pow(2).mean()
                loss.backward()
                optimizers[i].step()
                in_turn[i].append(float(loss.detach()))
    assert in_turn == expected

    beside = [None, None]

    def run(i, model):
        # A loader of its own: cutting batches uses one scratch per loader.
        own = gas.SubgraphLoader(*graph, batch_size=3, log=False)
        beside[i] = train(model, gas.PrefetchLoader(own, model))

    threads = [threading.Thread(target=run, args=item) for item in enumerate(models())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beside == expected


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
        job = Job.calling(lambda store=store: go.wait(20) and store.write(None, None))
        history._link._submit_push(job)
    go.set()
    with pytest.raises(OSError, match="the disk is full"):
        model.close()
    assert Failing.closed == 2


def test_inference_mode(graph):
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    for store in ("host", "disk", Slow):
        model = make_model(graph, store=store).eval()
        with torch.inference_mode():
            outs = [model(batch.x, batch.adj_t, *args) for batch, *args in loader]
        twin = make_model(graph, store=store).eval()
        with torch.no_grad():
            expected = [twin(batch.x, batch.adj_t, *args) for batch, *args in loader]
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


def test_a_pull_that_was_taken_back(graph):
    model = make_model(graph, store=Slow)
    pull = model.histories[0].start_pull(torch.arange(5))
    pull.cancel()
    with pytest.raises(RuntimeError, match="was taken back"):
        pull.wait()


def test_ids_may_change_after_the_call(graph):
    model = make_model(graph, store=Slow)
    history = model.histories[0]
    expected = history.pull(torch.arange(5))
    n_id = torch.arange(5)
    pull = history.start_pull(n_id)
    n_id.fill_(100)
    assert torch.equal(pull.wait(), expected)
    n_id = torch.arange(5)
    history.push(expected + 1, n_id)
    n_id.fill_(100)
    assert torch.equal(history.pull(torch.arange(5)), expected + 1)


def test_buffers_are_bounded(graph):
    batch, *args = next(iter(gas.SubgraphLoader(*graph, batch_size=3, log=False)))
    halo = args[1].numel() - args[0]
    model = make_model(graph, buffer_size=halo)
    model(batch.x, batch.adj_t, *args)
    small = make_model(graph, buffer_size=halo - 1)
    before = [h.emb.clone() for h in small.histories]
    message = f"'buffer_size' is {halo - 1}, but the batch has {halo} halo nodes: raise it"
    with pytest.raises(ValueError, match=message):
        small(batch.x, batch.adj_t, *args)
    assert all(torch.equal(h.emb, b) for h, b in zip(small.histories, before, strict=True))


def test_pool_size_bounds_the_pulls_under_way(graph, monkeypatch):
    under_way = []
    start = BatchPulls._start

    def watch(self):
        start(self)
        under_way.append(len(self._started))

    monkeypatch.setattr(BatchPulls, "_start", watch)
    for pool_size, most in ((1, 1), (2, 2), (None, 2)):
        model = make_model(graph, store=Slow, pool_size=pool_size)
        under_way.clear()
        train(model, gas.SubgraphLoader(*graph, batch_size=3, log=False), 1)
        assert max(under_way) == most
