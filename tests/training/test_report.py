import json

import pytest
import torch

from gas.training import Run, report


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


def test_write_json_is_whole_or_nothing(tmp_path):
    file = tmp_path / "below" / "metrics.json"
    report.write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        report.write_json(file, {"a": object()})
    assert file.read_text() == '{\n  "a": 1\n}\n'
    assert file.stat().st_mode & 0o777 == 0o644  # Others may read it.


@pytest.mark.requires("matplotlib")
def test_plot_curves(tmp_path):
    for some in (runs(), runs()[:1]):
        file = tmp_path / "curve.png"
        report.plot_curves(file, some, "title")
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.requires("tensorboard")
def test_events(tmp_path):
    writer = report.EventWriter(tmp_path / "events")
    writer.write(runs()[0])
    writer.close()
    (file,) = (tmp_path / "events").iterdir()
    assert b"test_acc" in file.read_bytes()


def test_peak_memory():
    report.reset_peak_rss()
    before = report.peak_rss_bytes()
    block = torch.ones(50_000_000)
    after = report.peak_rss_bytes()
    assert after - before > 0.9 * block.nbytes


def test_machine():
    described = report.machine()
    assert described["torch"] == torch.__version__
    assert 2**28 < described["memory_bytes"] < 2**48
    json.dumps(described)
