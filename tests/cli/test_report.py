import json
import platform
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gas.cli import report
from gas.native.memory import PeakMemory, resident_kinds
from gas.training import MetricLogger, Run


def runs():
    first = Run([1.0, 0.5], [0.4, 0.6], [0.3, 0.7], [0.2, 0.65], [1.0, 2.0], [0.2, 0.1], 100)
    second = Run([1.2, 0.4], [0.5, 0.7], [0.6, 0.5], [0.55, 0.9], [1.0, 2.0], [0.4, 0.3], 300)
    return [first, second]


def test_metrics():
    result = report.metrics(runs())
    assert result["test_acc"] == {
        "mean": pytest.approx(0.6), "std": pytest.approx(0.0707107), "values": [0.65, 0.55],
    }  # fmt: skip
    assert result["val_acc"]["values"] == [0.7, 0.6]
    assert result["train_epoch_seconds"]["values"] == pytest.approx([0.15, 0.35])
    assert result["peak_rss_bytes"]["values"] == [100, 300]
    assert result["best_epoch"]["values"] == [2, 1]
    assert result["moved_bytes"]["values"] == [0, 0]
    assert result["chain"] == {}
    assert report.metrics(runs()[:1])["test_acc"]["std"] == 0
    moved, still = runs()
    moved.moved_bytes, moved.chain = [10, 30], {"steps": 7}
    result = report.metrics([moved, still])
    assert result["moved_bytes"]["values"] == [20, 0]
    assert result["chain"]["steps"]["values"] == [7]


def test_diverged_runs():
    run = Run([float("nan")], [0.1], [0.1], [0.1], [1.0], [0.1], 100)
    result = report.metrics([run, run])
    assert result["final_loss"] == {"mean": None, "std": None, "values": [None, None]}
    json.dumps(result, allow_nan=False)


@pytest.mark.requires("matplotlib")
@pytest.mark.parametrize("epochs", [[2, 2], [2, 1], [2]])
def test_plot_curves(tmp_path, monkeypatch, epochs):
    """Curves are means of runs, of which a shorter one goes on as it ended, within their range."""
    from matplotlib.figure import Figure

    drawn, some, save = [], runs()[: len(epochs)], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *a, **kw: (drawn.append(a[0]), save(*a, **kw)))
    for run, length in zip(some, epochs, strict=True):
        for name in ("loss", "train_acc", "val_acc", "test_acc", "age"):
            setattr(run, name, getattr(run, name)[:length])
    report.plot_curves(tmp_path / "curve.png", some, "title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    loss, score, age = drawn[0].axes
    for axis, names, scale in (
        (loss, ["loss"], 1),
        (score, ["train_acc", "val_acc", "test_acc"], 100),
        (age, ["age"], 1),
    ):
        for name, line in zip(names, axis.get_lines(), strict=True):
            each = [[getattr(run, name)[0], getattr(run, name)[-1]] for run in some]
            assert list(line.get_xdata()) == [1, 2]
            assert line.get_ydata() == pytest.approx(scale * np.mean(each, axis=0))
        assert len(axis.collections) == len(names) * (len(some) > 1)
    assert [line.get_label() for line in score.get_lines()] == ["train", "validation", "test"]
    assert score.get_legend() is not None
    assert loss.get_legend() is None
    assert age.get_ylim()[0] == 0 < age.get_ylim()[1]
    assert loss.get_ylim()[0] > 0


@pytest.mark.requires("tensorboard")
def test_events(tmp_path):
    writer = report.open_events(tmp_path / "events")
    MetricLogger(writer).on_epoch_end(runs()[0])
    writer.close()
    (file,) = (tmp_path / "events").iterdir()
    assert b"test_acc" in file.read_bytes()


def test_peak_memory():
    report.reset_peak_rss()
    before = report.peak_rss_bytes()
    block = torch.ones(50_000_000)
    after = report.peak_rss_bytes()
    assert after - before > 0.9 * block.nbytes


@pytest.mark.parametrize(("system", "expected"), [("Linux", 7 * 1024), ("Darwin", 7)])
def test_peak_memory_of_a_system_without_proc(monkeypatch, system, expected):
    """``getrusage`` reports bytes on macOS, and KiB elsewhere."""
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setattr(report, "bytes_in_proc", lambda *_: None)
    monkeypatch.setattr(report, "resource", usage)
    monkeypatch.setattr(platform, "system", lambda: system)
    assert report.peak_rss_bytes() == expected


def test_own_memory_and_mapped_files(tmp_path):
    """A block of the process's own counts while it lives, a file that it has mapped apart."""
    size = 40_000_000
    np.save(tmp_path / "file.npy", np.ones(size // 8))
    with PeakMemory(0.001) as peak:
        own, mapped = resident_kinds()
        block = torch.ones(size // 4)
        time.sleep(0.1)
        del block
    assert 0.9 * size < peak.own - own < 1.5 * size
    assert peak.mapped - mapped < 0.1 * size
    with PeakMemory() as peak:
        own, mapped = resident_kinds()
        file = np.load(tmp_path / "file.npy", mmap_mode="r")
        assert file.sum() == size // 8
    assert peak.own - own < 0.1 * size
    assert peak.mapped - mapped > 0.9 * size
    assert not any(thread.name == "gas-memory" for thread in threading.enumerate())


@pytest.mark.slow
def test_free_memory_counts_the_limit_of_private_memory():
    code = (
        "import resource\n"
        "from gas.native.memory import free_memory\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (10**9, 10**9))\n"
        "assert 0 < free_memory() < 9 * 10**8\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("processor", "expected"), [("", "arm64"), ("POWER9", "POWER9")])
def test_name_of_a_processor_of_a_system_without_proc(tmp_path, monkeypatch, processor, expected):
    monkeypatch.setattr(report, "Path", lambda _: tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: processor)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert report.machine()["cpu"] == expected


def test_machine():
    described = report.machine()
    assert described["torch"] == torch.__version__
    assert 2**28 < described["memory_bytes"] < 2**48
    json.dumps(described)


def test_a_machine_is_described_in_a_line():
    found = {"cpu": "Z80", "threads": 1, "cores": 2, "memory_bytes": 3 << 30, "torch": "2.9.0"}
    without = "Z80, 1 threads on 2 cores, 3 GiB of memory, torch 2.9.0"
    assert report.describe_machine({**found, "gpu": None}) == without
    unknown = report.describe_machine({**found, "memory_bytes": None, "gpu": "B1"})
    assert unknown == "Z80, 1 threads on 2 cores, unknown memory, B1, torch 2.9.0"
