"""``examples/train_mh_aug.py`` as a stranger runs it, and the trainings of the benchmark."""

import importlib

import pytest
from conftest import ROOT

SCRIPT = ROOT / "examples" / "train_mh_aug.py"


@pytest.mark.parametrize(
    "options",
    [
        ["--undirected", "--teacher"],
        ["--model", "sage", "--histories", "--num-parts", "6", "--batch-size", "2"],
        ["--model", "gat", "--reference-size", "100"],
        ["--model", "gat", "--histories", "--undirected", "--teacher"],
    ],
    ids=" ".join,
)
def test_the_example(run_script, options):
    done = run_script(SCRIPT, "--dataset", "planted:400", "--epochs", "3", *options)
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    assert f"MH-Aug, {'histories' if '--histories' in options else 'full batch'}" in done.out
    assert "transitions          36, " in done.out
    assert done.out.count("accuracy ") == 2


@pytest.mark.parametrize("way", ["MH-Aug", "milder view as teacher", "frozen chain", "vanilla"])
@pytest.mark.parametrize(
    "options",
    [
        ["--model", "gcn", "--undirected"],
        ["--model", "gat", "--reference-size", "100"],
        ["--model", "sage", "--histories", "--num-parts", "6", "--batch-size", "2"],
        ["--model", "gat", "--histories", "--undirected"],
    ],
    ids=" ".join,
)
def test_the_benchmark(monkeypatch, options, way):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = importlib.import_module("mh_aug_accuracy")
    options = ["--dataset", "planted:400", "--epochs", "3", *options]
    found = bench.run(options, way, runs=2)
    assert len(found["test"]["values"]) == len(found["val"]["values"]) == 2
    assert found["steps"]["mean"] == (0 if way in ("frozen chain", "vanilla") else 36)
    cells = bench.row(f"gcn, full batch, {way}", found)
    assert cells[:4] == ["gcn", "full batch", way, f"{100 * found['test']['mean']:.2f} ± "
                         f"{100 * found['test']['std']:.2f}"]  # fmt: skip
    assert (cells[-2] == "36") == (found["steps"]["mean"] > 0)


def test_errors_are_one_message(run_script):
    done = run_script(SCRIPT, "--dataset", "planted:40", "--epochs", "0")
    assert done.code == 2
    assert "argument --epochs is 0, expected at least 1" in done.err
    done = run_script(SCRIPT, "--dataset", "planted:40", "--num-steps", "-1")
    assert done.code == 1
    assert done.err.strip() == (
        "train_mh_aug.py: error: 'num_steps' is -1, expected an integer of at least 0"
    )
