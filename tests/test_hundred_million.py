"""``benchmarks/hundred_million.py``: every step runs, and one that can't is a row."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow  # Programs run as such.


@pytest.fixture
def bench(tmp_path):
    """A copy of the script, which writes its results into its own folder."""
    for name in ("hundred_million.py", "common.py"):
        (tmp_path / name).write_text((ROOT / "benchmarks" / name).read_text())
    return tmp_path


def run(bench, *args):
    command = [sys.executable, "-W", "ignore", str(bench / "hundred_million.py")]
    done = subprocess.run(
        [*command, "--root", str(bench / "graphs"), *args],
        cwd=bench, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = (bench / "results" / "hundred_million.md").read_text()
    return json.loads((bench / "results" / "hundred_million.json").read_text()), table


def test_a_small_graph(bench):
    found, table = run(bench, "--nodes", "9000")
    (result,) = found["results"]
    assert result["edges"] == 180_000
    assert result["parts"] == 3
    assert 0.1 < result["metis"]["cut"] < 0.7
    assert result["train"]["history_bytes"] == 2 * 9000 * 128 * 4
    stages = result["train"]["stages"]
    assert list(stages) == ["permute", "model", "normalise", "loader", "epoch 1", "epoch 2"]
    assert all(stage["peak_bytes"] > 2**20 and stage["seconds"] > 0 for stage in stages.values())
    first, second = result["train"]["losses"]
    assert second < first
    assert "| 0.2M | 9,000 | metis | " in table
    assert "| 0.2M | epoch 2 | " in table


def test_a_step_that_runs_out_of_memory_is_a_row(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = importlib.import_module("hundred_million")
    too_much = bench.alone(2**33, bytearray, 2**35)
    assert too_much == {"not_measured": "MemoryError: "}
    killed = bench.alone(2**33, os._exit, 1)
    assert killed["not_measured"].startswith("BrokenProcessPool: ")
    row = bench.row_of({"nodes": 50, "edges": 1000, "metis": too_much}, "metis")
    assert row == ["0.0M", "50", "metis", "not measured: MemoryError: ", "", "", ""]
