"""``examples/graphsaint_mh_aug.py`` as a stranger runs it."""

import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = ROOT / "examples" / "graphsaint_mh_aug.py"


def run(tmp_path, *args, before="pass"):
    code = f"import runpy, sys; {before}; sys.argv = {[str(SCRIPT), *args]}; "
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.requires("torch_sparse")
def test_it_trains(tmp_path):
    done = run(tmp_path, "--dataset", "planted:400", "--epochs", "3", "--num-steps", "2")
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "transitions          6, " in done.stdout


@pytest.mark.slow
def test_without_torch_sparse_it_says_so(tmp_path):
    without = "import torch_geometric.typing as t; t.WITH_TORCH_SPARSE = False"
    done = run(tmp_path, "--dataset", "planted:400", before=without)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(
            "graphsaint_mh_aug.py: error: PyG's GraphSAINT samplers need torch-sparse: pip install"
        )
    )
