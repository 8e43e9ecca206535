"""``examples/bayesian_last_layer.py``: a layer that is right about how sure it is."""

import re
import runpy

import pytest
import torch
from conftest import ROOT

SCRIPT = ROOT / "examples" / "bayesian_last_layer.py"
pytestmark = [pytest.mark.requires("pyro"), pytest.mark.requires("matplotlib"), pytest.mark.slow]


def rows_of(text):
    """Return accuracy, confidence, NLL and calibration error of each layer."""
    found = re.findall(r"^(.{22}) +([\d.]+) % +([\d.]+) % +([\d.]+) +([\d.]+) %$", text, re.M)
    return {name.strip(): tuple(map(float, values)) for name, *values in found}


def test_the_example(run_script, tmp_path):
    done = run_script(SCRIPT)
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    rows = rows_of(done.out)
    trained, likely, bayesian = rows.values()
    for other in (trained, likely):
        assert bayesian[2] < other[2]
        assert bayesian[3] < other[3] / 2
    assert bayesian[3] < 10
    assert bayesian[0] > likely[0]
    assert (tmp_path / "reliability.png").stat().st_size > 20_000


def test_training_nodes_make_it_surer_than_it_may_be(run_script):
    short = ["--epochs", 30, "--steps", 300, "--prior", 0.3]
    errors = {}
    for nodes in ("val", "train"):
        done = run_script(SCRIPT, *short, "--fit", nodes)
        assert "prior          N(0, 0.30²)" in done.out
        errors[nodes] = rows_of(done.out)["refitted, Bayesian"]
    assert errors["train"][1] > errors["val"][1]
    assert errors["train"][3] > errors["val"][3]


@pytest.mark.requires("shared")
def test_cora(run_script, data_root):
    done = run_script(SCRIPT, "--dataset", "Cora", "--root", data_root, "--prior", 1)
    trained, likely, bayesian = rows_of(done.out).values()
    for other in (trained, likely):
        assert bayesian[2] < other[2]
        assert bayesian[3] < other[3]


def test_calibration_error_is_that_of_counting():
    error = runpy.run_path(str(SCRIPT))["calibration_error"]
    prob, y = torch.randn(500, 4).mul(2).softmax(dim=1), torch.randint(4, (500,))
    expected = 0.0
    for begin in range(10):
        inside = [
            (float(row.max()), int(row.argmax()) == label)
            for row, label in zip(prob, y.tolist(), strict=True)
            if begin <= 10 * float(row.max()) < begin + 1
        ]
        if inside:
            gap = sum(sure for sure, _ in inside) - sum(right for _, right in inside)
            expected += abs(gap) / 500
    assert error(prob, y) == pytest.approx(expected, abs=1e-5)
    certain = torch.eye(4)[y]
    assert error(certain, y) == 0
    assert error(certain, (y + 1) % 4) == 1
