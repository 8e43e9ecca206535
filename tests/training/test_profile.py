"""``gas.profile``: time of training by phase."""

import json
import threading
import time

import pytest
import torch
from conftest import random_graph

import gas
from gas import native
from gas.history import TransferEngine
from gas.native import Job, JobPolicy, Relabeler
from gas.training import Profile


@pytest.fixture
def made():
    """Return a model, a loader and an optimizer."""
    data = random_graph()
    data.y, data.train_mask = torch.randint(3, (60,)), torch.ones(60, dtype=torch.bool)
    model = gas.models.GraphSAGE(60, 5, 8, 3, 3, dropout=0.5)
    graph = gas.cluster(data, 6, log=False)
    loader = gas.SubgraphLoader(graph, batch_size=2, log=False)
    model.refresh(graph, log=False)
    return model, loader, torch.optim.Adam(model.parameters())


@pytest.mark.requires("native")
def test_phases_of_an_epoch(made, tmp_path):
    model = made[0]
    with gas.profile(model) as found:
        gas.train_epoch(*made)
    assert {"batches", "products", "pushes", "waits for rows", "dense layers"} <= set(found.seconds)
    assert sum(found.seconds.values()) == pytest.approx(found.wall)
    assert found.calls["pushes"] == 6  # Of two histories, in each of three steps.
    assert found.moved_bytes == 2 * 8 * 4 * 60  # Halo rows are read in place, by the products.
    lines = str(found).splitlines()
    assert lines[0].split() == ["phase", "time", "share", "calls", "bytes"]
    assert len(lines) == len(found.seconds) + 4
    assert next(line for line in lines if line.startswith("pushes")).endswith(" 3.75 KiB")
    assert lines[-1].startswith("overlap: ")
    found.export_chrome_trace(tmp_path / "trace.json")
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert {"gas: products", "gas: waits for rows"} <= names


@pytest.mark.requires("native")
def test_bytes_of_each_phase():
    data = random_graph()
    data.y, data.train_mask = torch.randint(3, (60,)), torch.ones(60, dtype=torch.bool)
    model = gas.models.GAT(60, 5, 4, 2, 3, 1, 2)  # Its rows are pulled.
    loader = gas.SubgraphLoader(gas.cluster(data, 6, log=False), batch_size=2, log=False)
    batches = list(loader)
    model.refresh(loader.data, log=False)
    model.train()
    with gas.profile(model) as found:
        for batch in batches:
            model(batch)
    pulled = sum(batch.n_id.numel() - batch.batch_size for batch in batches)
    assert found.bytes["pushes"] == 8 * 4 * 60
    assert found.bytes["waits for rows"] == 8 * 4 * pulled
    assert found.moved_bytes == found.bytes["pushes"] + found.bytes["waits for rows"]
    with gas.profile() as found:
        native.gather_rows(torch.ones(9, 3), torch.arange(4))
        native.gather_dropout(torch.ones(9, 3).double(), torch.arange(4), 0.5, 0)
        table = gas.quantize(torch.ones(9, 3)).store.table
        native.gather_decode_dropout(table, "int8", 3, torch.arange(4), 0.5, 0)
    assert found.bytes == {"features": 4 * 3 * (4 + 8 + 4)}
    assert found.calls["features"] == 3


def test_the_table_of_a_profile():
    found = Profile()
    found.wall, found.seconds = 0.5, {"pushes": 0.05, "products": 0.15, "Python": 0.3}
    found.calls, found.bytes = {"pushes": 6, "products": 4, "Python": 0}, {"pushes": 4096}
    found.moved_bytes, found.busy, found.waited, found.overlap = 2**20, 0.4, 0.1, 0.75
    assert [" ".join(line.split()) for line in str(found).splitlines()] == [
        "phase time share calls bytes",
        "Python 300.0 ms 60.0% - -",
        "products 150.0 ms 30.0% 4 -",
        "pushes 50.0 ms 10.0% 6 4 KiB",
        "all 500.0 ms",
        "rows of histories moved: 1 MiB, 2 MiB/s",
        "overlap: 75.0%, 400.0 ms of transfers, 100.0 ms of waiting",
    ]


@pytest.mark.requires("native")
def test_overlap_is_the_share_of_transfers_that_nobody_waited_for(made):
    engine = made[0]._engine
    lane, ended = engine.new_lane(), threading.Event()

    def move():  # A transfer of a known time.
        time.sleep(0.1)
        ended.set()

    with gas.profile(made[0]) as hidden:
        ticket = engine.submit(lane, Job.from_function(move), JobPolicy.WORKERS)
        ended.wait()  # A computation that takes longer.
        time.sleep(0.1)
        engine.wait(ticket)
    with gas.profile(made[0]) as waited:
        engine.run(lane, Job.from_function(move))
    with gas.profile(made[0]) as unmoved:
        pass
    assert 0.09 < hidden.busy < hidden.wall
    assert hidden.overlap > 0.9
    assert waited.waited >= waited.busy > 0.09
    assert waited.overlap == 0.0
    assert (unmoved.busy, unmoved.overlap) == (0.0, None)
    assert "overlap" not in str(unmoved)


@pytest.mark.requires("native")
def test_waits_of_pushes_are_theirs(made):
    model, x = made[0], torch.ones(60, 8)
    with gas.profile(model) as found:
        model.histories[0].push(x)
    assert found.calls["pushes"] == 1
    assert "waits for rows" not in found.seconds
    assert found.waited > 0.0


def test_overlap_is_not_measured(made, monkeypatch):
    """On a GPU, whose streams move rows, and without workers."""
    monkeypatch.setitem(made[0]._engine.streams, torch.device("cuda"), None)
    with gas.profile(made[0]) as found:
        gas.train_epoch(*made)
    assert (found.busy, found.waited, found.overlap) == (None, None, None)
    assert found.bytes["pushes"] == 2 * 8 * 4 * 60
    made[0]._engine.streams.clear()
    monkeypatch.setattr(made[0]._engine, "has_workers", False)
    with gas.profile(made[0]) as found:
        gas.train_epoch(*made)
    assert found.overlap is None


def test_nothing_is_left_behind(made):
    before = native.extension.C, TransferEngine.wait, Relabeler.__call__
    with pytest.raises(KeyboardInterrupt), gas.profile():
        raise KeyboardInterrupt
    assert (native.extension.C, TransferEngine.wait, Relabeler.__call__) == before


def test_results_are_the_same(made):
    model, loader, _ = made
    batch = next(iter(loader))
    expected = model.eval()(batch, push=False)
    with gas.profile() as found:
        out = model(batch, push=False)
    assert torch.equal(out, expected)
    assert found.moved_bytes is None
