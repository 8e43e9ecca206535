"""Graphs of the field, by the line that opens them; warnings are errors."""

import numpy as np
import pytest
from conftest import ROOT

import gas

pytestmark = pytest.mark.requires("shared")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Cora", (2708, 10556, 1433, 7)),
        ("FacebookPagePage", (22470, 341825, 128, 4)),
        ("minesweeper", (10000, 78804, 7, 2)),
        ("AmazonComputers", (13752, 491722, 767, 10)),
        ("CoauthorPhysics", (34493, 495924, 8415, 5)),
    ],
)
def test_by_name(data_root, name, sizes):
    data, in_channels, out_channels = gas.get_data(str(data_root), name, log=False)
    assert (data.num_nodes, data.num_edges, in_channels, out_channels) == sizes
    for mask in (data.train_mask, data.val_mask, data.test_mask):
        assert bool(mask.view(data.num_nodes, -1).any(dim=0).all())


def test_friendships(data_root):
    """There is nothing to warn of: edges have both directions. Labels of -1 are in no split."""
    data = gas.open_graph(data_root / "Cornell5")
    y = np.load(data_root / "Cornell5" / "y.npy")
    assert (data.num_nodes, data.num_edges) == (18660, 1581554)
    assert not (data.train_mask | data.val_mask | data.test_mask)[data.y < 0].any()
    assert int((data.y < 0).sum()) == int((y < 0).sum()) == 1838


@pytest.mark.slow
def test_on_the_command_line(data_root, run_script):
    done = run_script(
        ROOT / "examples" / "train_gas.py", "--dataset", "AmazonComputers", "--root", data_root,
        "--epochs", 1, "--norm", "batch", "--hidden-channels", 8,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "hint" not in done.err
