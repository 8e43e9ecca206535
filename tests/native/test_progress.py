"""Progress is a line every so often, also where standard error is a file."""

import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data

import gas
from gas.graph import partition
from gas.native import progress


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.02)


def test_lines(capsys):
    with progress.report_progress("Counting", 3) as ticker:
        ticker.done, ticker.note = 1, "loss 0.5"
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) >= 2
    assert said[-1] == "Counting: 1 of 3, 0 s, loss 0.5"
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # It has ended.


def test_log_silences_it(capfd):
    with progress.report_progress("Counting", log=False), progress.report_blocking("b", log=False):
        time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_what_takes_no_time_says_nothing(capfd, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 10.0)
    start = time.monotonic()
    with progress.report_progress("Counting"), progress.report_blocking("Cutting"):
        pass
    assert capfd.readouterr().err == ""
    assert time.monotonic() - start < 5  # Nothing waits for the next line.


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=print, flush=print)])
def test_a_stream_without_a_file_is_left_alone(monkeypatch, stream):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with progress.report_blocking("Cutting"):
            pass


def test_metis_which_holds_the_interpreter(capfd, monkeypatch):
    monkeypatch.setattr(partition, "MOST_QUIET_ENTRIES", 0)
    take = partition._PARTITIONERS["metis"]

    def slowly(*args):
        time.sleep(1)
        return take(*args)

    monkeypatch.setitem(partition._PARTITIONERS, "metis", slowly)
    ring = torch.stack([torch.arange(20), (torch.arange(20) + 1) % 20])
    for log in (True, False):
        gas.metis(ring, 4, log=log, cache=False)
        said = capfd.readouterr().err
        assert bool(re.search(r"^metis: \d s$", said, re.MULTILINE)) == log, said


@pytest.mark.parametrize("log", [True, False])
def test_predict(capsys, log):
    ring = torch.stack([torch.arange(20), (torch.arange(20) + 1) % 20])
    data = Data(x=torch.rand(20, 3), edge_index=ring)

    class Slow(gas.models.GraphSAGE):
        def forward_layer(self, *args):
            time.sleep(0.1)
            return super().forward_layer(*args)

    model = Slow(20, 3, 4, 2, num_layers=3)
    graph = gas.cluster(data, 2, model=model, log=False)
    model.predict(graph, log=log)
    said = capsys.readouterr().err
    assert ("Layer-wise inference, layers: 1 of 3, 0 s" in said) == log
