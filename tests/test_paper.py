"""``benchmarks/paper.py``: it resumes, and its table is made of the runs that it kept."""

import importlib
import json
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, started

pytestmark = [pytest.mark.requires("matplotlib"), pytest.mark.slow]  # Programs run as such.
SETTINGS = """
dataset: planted:300
model: {model}
architecture: {{num_layers: 2, hidden_channels: 8, dropout: 0.1}}
num_parts: 4
batch_size: 2
epochs: {epochs}
runs: 2
published: {{mean: 50.0, std: 1.5}}
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A copy of the script with two cells of its own, which is imported from there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("paper", "common"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("paper.py", "common.py"):
        (tmp_path / name).write_text((ROOT / "benchmarks" / name).read_text())
    folder = tmp_path / "paper_small"
    folder.mkdir()
    (folder / "planted_gcn.yaml").write_text(SETTINGS.format(model="gcn", epochs=2))
    missing = SETTINGS.format(model="sage", epochs=2).replace("planted:300", "CiteSeer")
    (folder / "citeseer_sage.yaml").write_text(missing)
    yield tmp_path
    for name in ("paper", "common"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(bench, monkeypatch, capsys):
    """Call its main function; return what it printed."""

    def call(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["paper.py", "--root", "nowhere", *args])
        reason = None
        try:
            importlib.import_module("paper").main()
        except SystemExit as error:
            reason = error.code
        out, err = capsys.readouterr()
        assert (1 if isinstance(reason, str) else reason or 0) == code, err
        return out + err + (reason if isinstance(reason, str) else "")

    return call


def kept(bench, way="histories"):
    file = bench / "results" / "paper_small" / f"planted_gcn_{way}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_running_resuming_and_the_table(bench, run):
    run("--runs", "1", "--model", "gcn")
    first = kept(bench)
    assert [line["run"] for line in first] == [0]
    file = bench / "results" / "paper_small" / "planted_gcn_histories.jsonl"
    with file.open("a") as stream:
        stream.write('{"run": 1, "te')  # As if the power had failed.
    run("--jobs", "2")
    lines = file.read_text().splitlines()
    runs = [json.loads(lines[0]), json.loads(lines[2])]
    assert runs[0] == first[0]
    assert [line["run"] for line in runs] == [0, 1]
    assert len(kept(bench, "full_batch")) == 2

    content = json.loads((bench / "results" / "paper_small.json").read_text())
    cells = {(cell["dataset"], cell["model"]): cell for cell in content["cells"]}
    entry = cells["planted:300", "gcn"]
    assert entry["histories"]["test"]["values"] == [line["test"] for line in runs]
    assert entry["published"] == {"mean": 50.0, "std": 1.5}
    assert "ConnectionError" in cells["CiteSeer", "sage"]["histories"]["not_run"]
    made = (bench / "results" / "paper_small.md").read_text()
    assert f"| {100 * entry['histories']['test']['mean']:.2f} ± " in made
    assert "| CiteSeer | sage | no data | no data | 50.00 ± 1.50 |" in made

    before = file.read_text()
    run("--table-only")
    assert file.read_text() == before  # Nothing was left to run.
    assert "50.00 ± 1.50" in (bench / "results" / "paper_small.md").read_text()


def test_runs_of_other_settings_are_not_mixed(bench, run):
    run("--runs", "1", "--model", "gcn", "--ways", "histories")
    cell = bench / "paper_small" / "planted_gcn.yaml"
    cell.write_text(SETTINGS.format(model="gcn", epochs=3))
    said = run("--model", "gcn", code=1)
    assert "holds runs with other settings than" in said
    assert "Traceback" not in said
    assert len(kept(bench)) == 1


def test_a_cell_that_fails_keeps_no_other_from_running(bench, run):
    broken = SETTINGS.format(model="gat", epochs=2)  # It needs heads.
    (bench / "paper_small" / "planted_gat.yaml").write_text(broken)
    said = run("--model", "gcn", "gat", "--runs", "1", "--ways", "histories")
    assert "planted_gat, histories, run 0: " in said
    assert len(kept(bench)) == 1
    assert "| failed |" in (bench / "results" / "paper_small.md").read_text()


def test_unknown_cells(bench, run):
    said = run("--dataset", "Karate", code=2)
    assert "no settings in paper_small/ fit" in said


def test_ctrl_c_keeps_what_has_ended(bench):
    (bench / "paper_small" / "planted_gcn.yaml").write_text(
        SETTINGS.format(model="gcn", epochs=2).replace("runs: 2", "runs: 10000")
    )
    command = [sys.executable, "-W", "ignore", str(bench / "paper.py"), "--model", "gcn"]
    file = bench / "results" / "paper_small" / "planted_gcn_histories.jsonl"
    with started(command, cwd=bench, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)  # Until the first run has ended.
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Interrupted: the same call goes on" in said
    assert "Traceback" not in said
    assert kept(bench)[0]["run"] == 0
