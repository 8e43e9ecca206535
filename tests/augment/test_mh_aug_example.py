"""``examples/train_mh_aug.py`` as a stranger runs it."""

import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = ROOT / "examples" / "train_mh_aug.py"


def run(tmp_path, *args):
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


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
def test_options(tmp_path, options):
    done = run(tmp_path, "--dataset", "planted:400", "--epochs", "3", *options)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "test accuracy" in done.stdout
    moves = not {"--vanilla", "--frozen"} & set(options)
    assert ("transitions          36" in done.stdout) == moves
    assert done.stdout.count("validation ") == (3 if "--runs" in options else 2)


def test_errors_are_one_message(tmp_path):
    done = run(tmp_path, "--dataset", "planted:40", "--runs", "0")
    assert done.returncode == 2
    assert "argument --runs is 0, expected at least 1" in done.stderr
    done = run(tmp_path, "--dataset", "planted:40", "--num-steps", "-1")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "train_mh_aug.py: error: 'num_steps' is -1, expected an integer of at least 0"
    )
