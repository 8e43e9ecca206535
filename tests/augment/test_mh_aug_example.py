"""``examples/train_mh_aug.py`` as a stranger runs it."""

import pytest
from conftest import ROOT

SCRIPT = ROOT / "examples" / "train_mh_aug.py"


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
def test_options(run_script, options):
    done = run_script(SCRIPT, "--dataset", "planted:400", "--epochs", "3", *options)
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    assert "test accuracy" in done.out
    moves = not {"--vanilla", "--frozen"} & set(options)
    assert ("transitions          36" in done.out) == moves
    assert done.out.count("validation ") == (3 if "--runs" in options else 2)


def test_errors_are_one_message(run_script):
    done = run_script(SCRIPT, "--dataset", "planted:40", "--runs", "0")
    assert done.code == 2
    assert "argument --runs is 0, expected at least 1" in done.err
    done = run_script(SCRIPT, "--dataset", "planted:40", "--num-steps", "-1")
    assert done.code == 1
    assert done.err.strip() == (
        "train_mh_aug.py: error: 'num_steps' is -1, expected an integer of at least 0"
    )
