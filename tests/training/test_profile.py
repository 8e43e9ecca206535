"""``gas.profile``: time of training by phase."""

import json

import pytest
import torch
from conftest import random_graph

import gas
from gas import native
from gas.history import TransferEngine
from gas.native import Relabeler


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
    assert lines[0].split() == ["phase", "time", "share", "calls"]
    assert len(lines) == len(found.seconds) + 3
    found.export_chrome_trace(tmp_path / "trace.json")
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert {"gas: products", "gas: waits for rows"} <= names


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
