"""``train_gas.py --hetero``: from tables with types to scores and predictions."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT

import gas
from gas.cli import hetero
from gas.cli.hetero import HeteroSAGE
from gas.cli.options import UsageError, parse_args
from gas.native import progress

SCRIPT = ROOT / "examples" / "train_gas.py"
pytestmark = pytest.mark.requires("pyarrow", "safetensors")


def write_tables(folder):
    """Shops that people visit; a shop's class is that of its visitors' feature."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(2, size=90)
    rows = [f"p{i},person,{2 * k - 1 + rng.normal() / 2:.3f}," for i, k in enumerate(kinds[:60])]
    rows += [f"s{i},shop,0,{'ab'[k]}" for i, k in enumerate(kinds[60:])]
    edges = []
    for shop, kind in enumerate(kinds[60:]):
        edges += [f"p{i},s{shop},visits" for i in rng.choice(np.flatnonzero(kinds[:60] == kind), 5)]
    edges += [f"p{a},p{b},knows" for a, b in rng.integers(60, size=(80, 2))]
    folder.mkdir()
    (folder / "nodes.csv").write_text("id,type,f,label\n" + "\n".join(rows) + "\n")
    (folder / "edges.csv").write_text("source,target,type\n" + "\n".join(edges) + "\n")
    return folder


def test_the_module_is_exact_on_mini_batches(tmp_path):
    data = gas.open_graph(write_tables(tmp_path / "g"), undirected=True, hetero=True, log=False)
    for kind in data.node_types:
        data[kind].x = data[kind].x.double()
    net = HeteroSAGE(data, "shop", 8, 2, num_layers=2, dropout=0.5).double()
    model = gas.to_scalable(net, data, dtype=torch.double)
    assert gas.verify(model, gas.cluster(data, 4, log=False))


@pytest.mark.slow
def test_the_command_line(tmp_path):
    write_tables(tmp_path / "g")
    command = [sys.executable, str(ROOT / "examples/train_gas.py"), "--hetero", "--undirected"]
    command += ["--dataset", str(tmp_path / "g"), "--epochs", "12", "--out", str(tmp_path / "o")]
    run = subprocess.run([*command, "--num-parts", "4"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = json.loads((tmp_path / "o/metrics.json").read_text())
    assert said["node_type"] == "shop"
    assert said["test_score"] > 0.8
    assert len(said["epochs"]) == 12
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "o/predictions.parquet").to_pydict()
    assert table["node"] == [f"s{i}" for i in range(30)]
    assert set(table["prediction"]) <= {"a", "b"}


@pytest.mark.slow
def test_a_run_that_diverges_writes_nothing(tmp_path):
    write_tables(tmp_path / "g")
    command = [sys.executable, str(ROOT / "examples/train_gas.py"), "--hetero", "--undirected"]
    command += ["--dataset", str(tmp_path / "g"), "--out", str(tmp_path / "o"), "--lr", "1e30"]
    run = subprocess.run([*command, "--epochs", "3"], capture_output=True, text=True)
    assert run.returncode == 1
    assert "training diverged" in run.stderr
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


@pytest.mark.parametrize(
    "more", [["--full-batch"], ["--resume"], ["--checkpoint-every", "1"], ["--model", "gat"]]
)
def test_options_without_an_effect_are_refused(more):
    with pytest.raises(UsageError, match=f"argument {more[0]} "):
        parse_args(["--hetero", *more])


@pytest.mark.requires("matplotlib")
def test_an_interruption_keeps_the_epochs_that_ended(tmp_path, run_script, monkeypatch):
    """The signal comes in the fourth epoch."""
    train, calls = hetero._train_epoch, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return train(*args)

    monkeypatch.setattr(hetero, "_train_epoch", interrupted)
    monkeypatch.setattr(progress, "EVERY", 0.001)
    write_tables(tmp_path / "g")
    options = ["--hetero", "--undirected", "--dataset", "g", "--epochs", 9, "--out", "out"]
    done = run_script(SCRIPT, *options, "--num-parts", 4)
    assert done.code == 130
    assert "Interrupted: reporting the epochs that ended, 3." in done.err
    assert "Training, epochs: " in done.err
    said = json.loads((tmp_path / "out/metrics.json").read_text())
    assert said["interrupted"]
    assert len(said["epochs"]) == 3
    for file in ("curve.png", "model.safetensors", "predictions.parquet"):
        assert (tmp_path / "out" / file).stat().st_size > 1000
    data = gas.open_graph(tmp_path / "g", undirected=True, hetero=True, log=False)
    from safetensors.torch import load_file

    HeteroSAGE(data, "shop", 64, 2, num_layers=2).load_state_dict(
        load_file(tmp_path / "out/model.safetensors")
    )


@pytest.mark.requires("matplotlib")
def test_labels_of_some_nodes_and_several_splits_and_runs(tmp_path, run_script):
    """The second run takes the second split; persons have NaN for labels, and some shops."""
    folder = write_tables(tmp_path / "g")
    rows = (folder / "nodes.csv").read_text().splitlines()
    lines = [",".join(row.split(",")[:3]) for row in rows]
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    y = np.random.default_rng(0).integers(2, size=(90, 3)).astype(np.float32)
    y[:60] = y[85:] = np.nan
    np.save(folder / "y.npy", y)
    options = ["--hetero", "--undirected", "--dataset", "g", "--epochs", 2, "--num-parts", 4]
    done = run_script(SCRIPT, *options, "--out", "out")
    assert done.code == 0, done.err
    groups = np.random.default_rng(1).integers(3, size=(90, 2))
    groups[:60] = groups[85:] = -1
    for number, part in enumerate(("train", "val", "test")):
        np.save(folder / f"{part}_mask.npy", groups == number)
    done = run_script(SCRIPT, *options, "--out", "both", "--runs", 2)
    assert done.code == 0, done.err
    said = json.loads((tmp_path / "both/metrics.json").read_text())
    assert len(said["test_acc"]["values"]) == 2
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "both/predictions.parquet").to_pydict()
    names = ["train", "val", "test", None]
    assert table["split"] == [names[i] for i in groups[60:, said["kept_run"]]]
    assert table["label"][-1] is None
