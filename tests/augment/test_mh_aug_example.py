"""``examples/train_mh_aug.py`` as a stranger runs it, and the trainings of the benchmark."""

import pytest
from conftest import ROOT

SCRIPT = ROOT / "examples" / "train_mh_aug.py"
BENCHMARK = ROOT / "benchmarks" / "mh_aug_train.py"


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


@pytest.mark.parametrize(
    "options",
    [
        ["--runs", "2", "--undirected", "--teacher"],
        ["--model", "sage", "--frozen"],
        ["--model", "gat", "--reference-size", "100"],
        ["--vanilla"],
        ["--histories", "--runs", "2", "--teacher"],
        ["--histories", "--model", "sage", "--frozen", "--num-parts", "6", "--batch-size", "2"],
        ["--histories", "--model", "gat", "--undirected"],
        ["--histories", "--vanilla"],
    ],
    ids=" ".join,
)
def test_the_benchmark(run_script, options):
    done = run_script(BENCHMARK, "--dataset", "planted:400", "--epochs", "3", *options)
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    assert "test accuracy" in done.out
    moves = not {"--vanilla", "--frozen"} & set(options)
    assert ("transitions          36" in done.out) == moves
    assert done.out.count("validation ") == (3 if "--runs" in options else 2)


def test_errors_are_one_message(run_script):
    for script, option in ((SCRIPT, "epochs"), (BENCHMARK, "runs")):
        done = run_script(script, "--dataset", "planted:40", f"--{option}", "0")
        assert done.code == 2
        assert f"argument --{option} is 0, expected at least 1" in done.err
        done = run_script(script, "--dataset", "planted:40", "--num-steps", "-1")
        assert done.code == 1
        assert done.err.strip() == (
            f"{script.name}: error: 'num_steps' is -1, expected an integer of at least 0"
        )
