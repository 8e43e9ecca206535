"""Transfers that overlap with the computation: the same results, in less time."""

import threading
import time

import pytest
import torch
from conftest import clustered_graph, random_graph
from transfers import Slow, make_model, train

import gas
from gas.history import TransferEngine
from gas.history.rows import BatchPulls
from gas.native import JobPolicy

pytestmark = pytest.mark.usefixtures("_idle_cores")


@pytest.fixture
def graph():
    return clustered_graph(10, num_nodes=200, num_edges=1200)


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
    asked: set[JobPolicy] = set()
    submit = TransferEngine.submit

    def watch(self, lane, job, by=JobPolicy.ANYONE, detached=False):
        asked.add(by)
        return submit(self, lane, job, by, detached)

    monkeypatch.setattr(TransferEngine, "submit", watch)
    loader = gas.SubgraphLoader(*graph, batch_size=3, log=False)
    for io, store, expected in (
        ("serial", "host", {JobPolicy.WAITERS}),
        ("serial", Slow, {JobPolicy.WAITERS}),
        ("concurrent", "host", {JobPolicy.WAITERS, JobPolicy.ANYONE}),
        ("concurrent", Slow, {JobPolicy.WORKERS}),
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
        # The first pull and the last push overlap with nothing.
        most = longer + 3 * sleep
        assert most < total + sleep
        for _ in range(20):  # Others may use the cores now and then.
            found = epoch(compute, "concurrent")
            assert longer <= found
            if found < most:
                break
        assert found < most
    assert epoch(0.1, "serial") >= batches * 0.1 + transfer


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
    for pool_size, most in ((1, 1), (3, 3), (None, 2)):
        model = gas.models.GraphSAGE(200, 5, 8, 3, 5, store=Slow, pool_size=pool_size)
        model(graph[0].x, graph[0].edge_index, fill=True)
        under_way.clear()
        train(model, gas.SubgraphLoader(*graph, batch_size=3, log=False), 1)
        assert max(under_way) == most
