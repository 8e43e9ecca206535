"""Training from graph folders, whose features stay on disk."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch_geometric.data import Data

import gas
from gas.cli import main
from gas.cli.checks import UsageError
from gas.cli.graphs import check_folder_fits
from gas.cli.options import make_experiment, parse_args

pytestmark = pytest.mark.requires("tyro", "pyarrow", "safetensors", "matplotlib")


def write_folder(path, num_parts, num_nodes=300, num_features=8):
    """Write a graph folder; ids of nodes are those of the original order."""
    torch.manual_seed(0)
    y = torch.randint(3, (num_nodes,))
    src, dst = torch.randint(num_nodes, (2, 8 * num_nodes))
    same = y[src] == y[dst]
    edges = torch.stack([src[same], dst[same]])
    data = Data(edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=y, num_nodes=num_nodes)
    data.x = torch.randn(num_nodes, num_features)
    data.x[:, 0] += y
    data.node_id = np.array([f"n{node}" for node in range(num_nodes)])
    gas.cluster(data, num_parts, out=path, log=False)
    return data


def read_parquet(path):
    from pyarrow import parquet

    return parquet.read_table(path).to_pydict()


@pytest.mark.parametrize(
    ("num_parts", "options"),
    [(6, []), (6, ["--norm", "batch"]), (1, ["--num-parts", "4"]), (2, ["--model", "gcn"]),
     (1, ["--model", "pna", "--num-parts", "4", "--store", "disk", "--pack", "1kB"])],
)  # fmt: skip
def test_features_are_read_where_they_are(tmp_path, num_parts, options):
    data = write_folder(tmp_path / "g", num_parts)
    command = ["--dataset", str(tmp_path / "g"), "--out", str(tmp_path / "run"), "--epochs", "3"]
    command += ["--model", "sage"] * ("--model" not in options) + options
    experiment = make_experiment(parse_args(command))
    assert experiment.graph.loader.get_mapped_features() is not None
    assert experiment.graph.whole is None
    assert (tmp_path / "run/graph").exists() == (num_parts == 1)
    main(["train", *command, "--overwrite"])
    table = read_parquet(tmp_path / "run/predictions.parquet")
    assert table["node"] == list(data.node_id)  # In the original order.
    assert table["label"] == data.y.tolist()
    masks = gas.get_data("", str(tmp_path / "g"))[0]
    assert [name == "train" for name in table["split"]] == masks.train_mask.tolist()
    run = gas.load_run(tmp_path / "run")
    assert run._open_parts() is not None
    found = run.predict()
    assert list(found["prediction"]) == table["prediction"]
    np.testing.assert_allclose(found["probability"], table["probability"], rtol=1e-5)


def test_a_run_on_a_folder_goes_on(tmp_path):
    write_folder(tmp_path / "g", 1)
    options = ["train", "--dataset", str(tmp_path / "g"), "--model", "sage", "--num-parts", "4"]
    main([*options, "--epochs", "1", "--checkpoint-every", "1", "--out", str(tmp_path / "run")])
    main(["train", "--resume", "--epochs", "2", "--out", str(tmp_path / "run")])
    main([*options, "--epochs", "1", "--overwrite", "--out", str(tmp_path / "run")])


def test_parts_of_another_training_are_not_taken_for_those_of_the_graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, num_nodes in (("g", 200), ("other", 300)):
        write_folder(tmp_path / name, 1, num_nodes)
    options = ["--model", "sage", "--out", "run", "--num-parts"]
    make_experiment(parse_args(["--dataset", "g", *options, "4"]))  # It ends before training.
    given = ["--dataset", "other", *options, "6"]
    with pytest.raises(UsageError, match="holds the parts of another training, graph: add --over"):
        parse_args(given)
    with pytest.raises(ValueError, match="run/graph holds 200 nodes in 4 parts, expected"):
        make_experiment(parse_args([*given, "--resume"]))
    experiment = make_experiment(parse_args([*given, "--overwrite"]))
    assert (experiment.data.num_nodes, len(experiment.graph.loader.ptr)) == (300, 7)


@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_parts_that_were_left_unfinished_are_written_again(tmp_path, option):
    write_folder(tmp_path / "g", 1)
    (tmp_path / "run/graph").mkdir(parents=True)
    mark = {"format": "unfinished gas graph", "by": "gas.cluster", "files": []}
    (tmp_path / "run/graph/unfinished.json").write_text(json.dumps(mark))
    command = ["--dataset", str(tmp_path / "g"), "--model", "sage", "--num-parts", "4"]
    make_experiment(parse_args([*command, "--out", str(tmp_path / "run"), option]))
    assert gas.open_graph(tmp_path / "run/graph", log=False).parts.numel() == 5


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_run_does_not_replace_its_graph(tmp_path, options):
    write_folder(tmp_path / "run/graph", 4)
    graph, out = str(tmp_path / "run/graph"), str(tmp_path / "run")
    with pytest.raises(UsageError, match="holds the graph, .*: name another folder"):
        parse_args(["--dataset", graph, "--out", out, *options])


@pytest.mark.parametrize(
    "options", [["--full-batch"], ["--inductive"], ["--feature-dtype", "int8"]]
)
def test_options_that_need_memory_read_the_folder(tmp_path, options):
    write_folder(tmp_path / "g", 4)
    command = ["--dataset", str(tmp_path / "g"), "--out", str(tmp_path / "run"), *options]
    experiment = make_experiment(parse_args(command))
    assert experiment.graph.loader is None or experiment.graph.loader.get_mapped_features() is None


def test_memory_splits_the_mini_batches_of_a_folder(tmp_path, monkeypatch):
    """Parts of a step are split into mini-batches that fit; the features stay on disk."""
    monkeypatch.setattr("gas.cli.setup.resident_kinds", lambda: (0.0, 0.0))
    write_folder(tmp_path / "g", 8, num_nodes=800, num_features=400)
    command = ["--dataset", str(tmp_path / "g"), "--model", "sage", "--batch-size", "4"]
    command += ["--epochs", "2", "--out", str(tmp_path / "run"), "--memory"]
    found = []
    for memory in ("4MB", "6MB", "1GB"):
        experiment = make_experiment(parse_args([*command, memory]))
        size = experiment.settings.batch_size
        assert size * experiment.micro_batches == 4
        assert len(experiment.graph.inference) == 8 // size
        assert experiment.graph.loader.get_mapped_features() is not None
        found.append((size, experiment.histories["store"]))
    assert found == [(1, "host"), (2, "host"), (4, "host")]
    assert len(make_experiment(parse_args([*command, "4MB"])).run(0)) == 2
    write_folder(tmp_path / "many", 64, num_nodes=800)
    command[1] = str(tmp_path / "many")
    experiment = make_experiment(parse_args([*command, "800kB", "--num-layers", "3"]))
    assert experiment.histories["store"] == "disk"


def test_a_run_on_a_folder_predicts_another_graph(tmp_path, monkeypatch):
    for path, num_nodes in (("g", 300), ("other", 90)):
        write_folder(tmp_path / path, 3, num_nodes)
    options = ["--dataset", str(tmp_path / "g"), "--model", "sage", "--epochs", "1"]
    main(["train", *options, "--out", str(tmp_path / "run")])
    run = gas.load_run(tmp_path / "run")
    assert len(run.predict(tmp_path / "other")["node"]) == 90
    monkeypatch.delattr(type(run), "open_graph")  # It reads features into memory.
    assert len(run.predict()["node"]) == 300


def test_a_run_with_a_limit_of_memory_goes_on_from_a_folder(tmp_path):
    write_folder(tmp_path / "g", 4)
    options = ["train", "--dataset", str(tmp_path / "g"), "--model", "sage", "--memory", "64GB"]
    main([*options, "--epochs", "1", "--checkpoint-every", "1", "--out", str(tmp_path / "run")])
    main(["train", "--resume", "--epochs", "2", "--out", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run/metrics.json").read_text())
    assert found["histories"]["store"] == "host"
    assert len(found["epochs"][0]["loss"]) == 2


@pytest.mark.parametrize(
    ("command", "name"),
    [(["train", "--full-batch", "--dataset"], "--full-batch"), (["plan"], "gas plan"),
     (["bench"], "gas bench")],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_not_read(tmp_path, monkeypatch, command, name):
    write_folder(tmp_path / "g", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gas.cli.graphs.free_memory", lambda: 1000)
    with pytest.raises(SystemExit, match=f"{name} reads the graph folder .*g into memory"):
        main([*command, str(tmp_path / "g")])


def test_a_folder_may_fill_the_free_memory(tmp_path, monkeypatch):
    write_folder(tmp_path / "g", 1)
    size = sum(file.stat().st_size for file in (tmp_path / "g").glob("*.npy"))
    monkeypatch.setattr("gas.cli.graphs.free_memory", lambda: size)
    check_folder_fits(tmp_path / "g", "gas plan")
    monkeypatch.setattr("gas.cli.graphs.free_memory", lambda: size - 1)
    with pytest.raises(ValueError, match="into memory"):
        check_folder_fits(tmp_path / "g", "gas plan")
    check_folder_fits("planted:600", "gas plan")  # No folder.


@pytest.mark.slow  # Processes that train on large features.
@pytest.mark.parametrize("num_parts", [1, 64])
def test_features_take_no_memory(tmp_path, num_parts):
    """From before training to its end, a process has less than the bytes of its features."""
    write_folder(tmp_path / "g", num_parts, num_nodes=20_000, num_features=10_000)  # 800 MB.
    command = [sys.executable, "-m", "gas", "train", "--dataset", str(tmp_path / "g")]
    command += ["--model", "sage", "--num-parts", "64", "--batch-size", "1", "--epochs", "1"]
    command += ["--store", "disk", "--max-steps", "8", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(\d+) MiB of its own", done.stdout)
    assert len(found) == 2
    assert max(map(int, found)) < 500
