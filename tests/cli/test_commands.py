"""The command ``gas``, and folders of runs that are opened again."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from prediction_tables import compare, read_parquet

import gas
from gas import _startup
from gas.cli import main
from gas.cli.doctor import examine, print_findings
from gas.cli.parser import parse

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.requires("tyro", "pyarrow", "safetensors", "matplotlib")


def write_tables(folder, num_nodes=300, prefix="n", seed=0, labels=True):
    """Write tables of a graph whose nodes are like their neighbours."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(3, size=num_nodes)
    src = rng.integers(num_nodes, size=1200)
    dst = np.array([rng.choice(np.flatnonzero(kinds == kinds[each])) for each in src])
    folder.mkdir()
    with open(folder / "nodes.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "f", "g", *["label"] * labels])
        for node, kind in enumerate(kinds):
            name = [["red", "green", "blue"][kind]] if labels else []
            writer.writerow([f"{prefix}{node}", kind + rng.normal(), rng.normal(), *name])
    with open(folder / "edges.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "target"])
        writer.writerows((f"{prefix}{a}", f"{prefix}{b}") for a, b in zip(src, dst, strict=True))
    return folder


def train(folder, out, *options):
    command = ["train", "--dataset", str(folder), "--undirected", "--epochs", "3"]
    main([*command, "--out", str(out), *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folders of tables, and of a run on them."""
    folder = tmp_path_factory.mktemp("runs")
    tables = write_tables(folder / "tables")
    train(tables, folder / "run", "--model", "sage", "--norm", "batch")
    return tables, folder / "run"


# Folders of runs ----------------------------------------------------------------------------------


def test_a_run_predicts_what_it_has_written(trained):
    _, folder = trained
    run = gas.load_run(folder)
    compare(run.predict(), read_parquet(folder / "predictions.parquet"))
    assert str(run).startswith("sage on ")
    assert run.verify()


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "pna"),
        ("--model", "gcn", "--feature-dtype", "int8", "--runs", "2"),
        ("--model", "gat", "--sparse-features", "--full-batch"),
        ("--model", "sage", "--inductive", "--runs", "2"),
    ],
    ids=["degrees", "int8 features", "sparse features", "inductive"],
)
def test_other_runs_predict_what_they_have_written(tmp_path, options):
    train(write_tables(tmp_path / "tables"), tmp_path / "run", *options)
    expected = read_parquet(tmp_path / "run/predictions.parquet")
    compare(gas.load_run(tmp_path / "run").predict(), expected)


def test_nodes_by_their_ids(trained):
    _, folder = trained
    run = gas.load_run(folder)
    every, some = run.predict(), run.predict(ids=["n7", "n3", "n7"])
    assert list(some["node"]) == ["n7", "n3", "n7"]
    assert list(some["prediction"]) == [every["prediction"][row] for row in (7, 3, 7)]
    with pytest.raises(ValueError, match="'ids' has 'x', which is no node of the graph"):
        run.predict(ids=["n3", "x"])


def test_another_graph_gets_the_classes_of_the_training(trained, tmp_path):
    _, folder = trained
    other = write_tables(tmp_path / "other", 90, "m", seed=1, labels=False)
    found = gas.load_run(folder).predict(other)
    assert set(found) == {"node", "prediction", "probability"}
    assert set(found["prediction"]) <= {"red", "green", "blue"}
    assert len(found["node"]) == 90
    graph = gas.datasets.import_graph(other, tmp_path / "folder", undirected=True, log=False)
    gas.cluster(graph, 3, out=tmp_path / "parts", log=False)
    compare(gas.load_run(folder).predict(tmp_path / "parts"), found)


def test_a_graph_folder_lacks_the_reverses_that_the_training_added(trained, tmp_path):
    other = write_tables(tmp_path / "other", 90, seed=1)
    gas.datasets.import_graph(other, tmp_path / "folder", log=False)
    with pytest.raises(ValueError, match="'graph' is .*/folder', in which .* lack a reverse"):
        gas.load_run(trained[1]).predict(tmp_path / "folder")


def test_a_graph_that_has_moved(trained, tmp_path):
    metrics = json.loads((trained[1] / "metrics.json").read_text())
    metrics["graph"]["path"] = str(tmp_path / "gone")
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    with pytest.raises(ValueError, match="the graph of the training, .*/gone, has moved: move it"):
        gas.load_run(tmp_path).verify()


def test_the_graph_is_found_from_another_folder(tmp_path, monkeypatch):
    write_tables(tmp_path / "tables")
    monkeypatch.chdir(tmp_path)
    train("tables", "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(gas.load_run("../run").predict()["node"]) == 300


def rewrite_nodes(folder, change):
    """Change the rows of a folder's nodes, which are dictionaries."""
    with open(folder / "nodes.csv", newline="") as file:
        rows = [change(row) for row in csv.DictReader(file)]
    with open(folder / "nodes.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_features_are_found_by_the_names_of_their_columns(trained, tmp_path):
    run, other = gas.load_run(trained[1]), write_tables(tmp_path / "other", 90, seed=1)
    expected = run.predict(other)
    rewrite_nodes(other, lambda row: {key: row[key] for key in ("id", "g", "label", "f")})
    compare(run.predict(other), expected)
    rewrite_nodes(other, lambda row: {key: row[key] for key in ("id", "f", "label")})
    with pytest.raises(ValueError, match="'graph' has no column 'g', which is a feature in train"):
        run.predict(other)


def test_labels_of_another_graph_keep_their_names(trained, tmp_path):
    run, other = gas.load_run(trained[1]), write_tables(tmp_path / "other", 90, seed=1)
    before = run.predict(other)
    assert "split" not in before  # That of the training isn't the other graph's.
    names = {"red": "red", "green": "violet", "blue": "red"}
    rewrite_nodes(other, lambda row: {**row, "label": names[row["label"]]})
    after = run.predict(other)
    assert list(after["prediction"]) == list(before["prediction"])
    expected = ["red" if names[label] == "red" else None for label in before["label"]]
    assert list(after["label"]) == expected


def test_a_graph_with_fewer_nodes_than_parts(tmp_path):
    train(write_tables(tmp_path / "tables"), tmp_path / "run", "--num-parts", "100")
    other = write_tables(tmp_path / "other", 40, seed=1)
    assert len(gas.load_run(tmp_path / "run").predict(other)["node"]) == 40


@pytest.mark.parametrize("kind", ["labels", "reals", "reals of integers"])
def test_kinds_of_targets_without_any(tmp_path, kind):
    """Predictions of a graph without targets are of the kind of the training."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(60, 3)).astype(np.float32),
        "edge_index": rng.integers(60, size=(2, 200)),
    }
    y = {
        "labels": rng.integers(2, size=(60, 4)),
        "reals": rng.normal(size=60).astype(np.float32),
        "reals of integers": rng.integers(3, size=60),
    }[kind]
    np.savez(tmp_path / "train.npz", **arrays, y=y)
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other/x.npy", arrays["x"])
    lines = "".join(f"{a},{b}\n" for a, b in arrays["edge_index"].T)
    (tmp_path / "other/edges.csv").write_text(f"source,target\n{lines}")
    options = ["--metric", "r2"] if kind == "reals of integers" else []
    train(tmp_path / "train.npz", tmp_path / "run", *options)
    run, written = gas.load_run(tmp_path / "run"), tmp_path / "run/predictions.parquet"
    expected = read_parquet(written)
    for found in (run.predict(), run.predict(tmp_path / "other")):
        for name in {"prediction", "probability"} & expected.keys():
            np.testing.assert_allclose(np.stack(found[name]), expected[name], rtol=1e-5, atol=1e-6)
    assert set(found) == expected.keys() - {"label", "split"}
    rows = list(zip(range(60), np.tile(["a", "b", "c"], 20), strict=True))
    lines = "".join(f"{node},{label}\n" for node, label in rows)
    (tmp_path / "other/nodes.csv").write_text(f"id,label\n{lines}")  # Of another kind.
    again = run.predict(tmp_path / "other")
    assert set(again) == set(found)
    np.testing.assert_allclose(np.stack(again["prediction"]), np.stack(found["prediction"]))


def test_other_features_are_refused(trained, tmp_path):
    _, folder = trained
    data = gas.get_data("data", "planted:100")[0]
    path = tmp_path / "graph.npz"
    np.savez(path, x=data.x.numpy(), edge_index=data.edge_index.numpy(), y=data.y.numpy())
    with pytest.raises(ValueError, match=f"'graph' has {data.x.size(1)} features, expected 2"):
        gas.load_run(folder).predict(path)


def test_folders_that_are_no_runs(trained, tmp_path):
    with pytest.raises(ValueError, match="which has no metrics.json: give the folder"):
        gas.load_run(tmp_path)
    metrics = json.loads((trained[1] / "metrics.json").read_text())
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    with pytest.raises(ValueError, match=r"which has no model.safetensors"):
        gas.load_run(tmp_path).predict(trained[0])
    (tmp_path / "metrics.json").write_text(json.dumps({**metrics, "model": "sage, typed"}))
    with pytest.raises(ValueError, match="it is of another version of gas, train it"):
        gas.load_run(tmp_path)
    for name in ("graph", "targets", "features", "classes", "kept_split", "settings"):
        older = {key: value for key, value in metrics.items() if key != name}
        (tmp_path / "metrics.json").write_text(json.dumps(older))
        with pytest.raises(ValueError, match="is of another version of gas"):
            gas.load_run(tmp_path)
    graph = {key: value for key, value in metrics["graph"].items() if key != "feature_names"}
    (tmp_path / "metrics.json").write_text(json.dumps({**metrics, "graph": graph}))
    with pytest.raises(ValueError, match="is of another version of gas .'feature_names'"):
        gas.load_run(tmp_path)


def losses(folder):
    return [run["loss"] for run in json.loads((folder / "metrics.json").read_text())["epochs"]]


def test_settings_of_a_run_train_it_again(trained, tmp_path, capsys):
    _, folder = trained
    main(["train", "--config", str(folder / "settings.yaml"), "--out", str(tmp_path / "again")])
    assert losses(tmp_path / "again") == losses(folder)
    first, again = (path / "settings.yaml" for path in (folder, tmp_path / "again"))
    assert again.read_text() == first.read_text()
    changed = ["--config", str(first), "--no-correct-drift", "--epochs", "1", "--norm", "none"]
    main(["train", *changed, "--out", str(tmp_path / "changed")])
    text = (tmp_path / "changed/settings.yaml").read_text()
    assert "correct_drift: false" in text
    assert "batch_norm: false" in text
    assert "epochs: 1" in text


def test_a_folder_is_all_that_resuming_needs(tmp_path, monkeypatch):
    write_tables(tmp_path / "tables")
    monkeypatch.chdir(tmp_path)
    options = ["--model", "sage", "--num-parts", "4", "--feature-dtype", "bfloat16"]
    train("tables", tmp_path / "whole", *options)
    train("tables", tmp_path / "run", *options, "--epochs", "1", "--checkpoint-every", "1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    main(["train", "--out", "../run", "--resume", "--epochs", "3"])
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_more_seeds_may_be_given_when_a_run_goes_on(tmp_path):
    options = ["train", "--dataset", "planted:60", "--epochs", "2", "--num-parts", "2"]
    main([*options, "--runs", "2", "--out", str(tmp_path / "whole")])
    options += ["--out", str(tmp_path / "run")]
    main([*options, "--checkpoint-every", "1"])
    main([*options, "--runs", "2", "--resume"])
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_fewer_epochs_than_were_trained_are_refused(tmp_path, capsys):
    options = ["train", "planted:60", "--num-parts", "2", "--out", str(tmp_path / "run")]
    main([*options, "--epochs", "3", "--checkpoint-every", "1"])
    before = losses(tmp_path / "run")
    with pytest.raises(SystemExit, match="--epochs is 2, but the run in '.*' has 3: choose as"):
        main([*options, "--epochs", "2", "--resume"])
    main([*options, "--epochs", "3", "--resume"])
    assert losses(tmp_path / "run") == before


@pytest.mark.parametrize("given", [{"num_layers": 3}, {"hidden_channels": 16}, {"dropout": 0.1}])
def test_a_file_may_give_a_part_of_the_architecture(given, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"dataset": "planted:60", "epochs": 1, "architecture": given}))
    main(["train", "--config", str(path), "--out", str(tmp_path / "run")])
    found = gas.load_run(tmp_path / "run")
    model = found.make_model(found.open_graph())
    assert len(model.convs) == given.get("num_layers", 2)
    assert model.histories[0].embedding_dim == given.get("hidden_channels", 64)


def test_values_of_files_are_those_of_the_command_line(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("dataset: planted:60\nlr: 5e-4\ncolumns: [a=b]\nsparse_features: false\n")
    found, base = parse(["--config", str(path)], "gas train")
    assert found == dataclasses.replace(base, config=path)
    assert (found.dataset, found.lr, found.columns) == ("planted:60", 5e-4, ("a=b",))
    assert found.sparse_features is False
    assert found.grad_norm is None  # What a file leaves out isn't as without a file.
    assert found.hidden_channels == 64
    path.write_text("io: often\n")
    with pytest.raises(SystemExit):
        parse(["--config", str(path)], "gas train")
    assert "invalid choice 'often' for argument '--io'" in capsys.readouterr().err


def test_the_model_is_gcn_and_for_types_sage_unless_given(tmp_path):
    (tmp_path / "c.yaml").write_text("epochs: 1\n")
    config = ["--config", str(tmp_path / "c.yaml")]
    for given in ([], config):
        model_of = {(): "gcn", ("--hetero",): "sage", ("--model", "pna"): "pna"}
        for options, model in model_of.items():
            assert parse([*given, *options], "gas train")[0].model == model


# The command --------------------------------------------------------------------------------------


def test_help_names_arguments(capsys):
    for command, names in {
        "import": "SOURCE OUT", "partition": "GRAPH [OUT]", "plan": "GRAPH", "bench": "GRAPH",
        "predict": "RUN", "verify": "RUN", "report": "RUN [OTHER]",
    }.items():  # fmt: skip
        with pytest.raises(SystemExit):
            main([command, "--help"])
        usage = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
        assert f" {names}" in usage
        assert not {"STR", "PATH"} & set(usage.split("] ")[-1].split())


@pytest.mark.parametrize("runs", [1, 2])
def test_a_run_prints_its_memory_by_what_holds_it(tmp_path, capsys, runs):
    command = ["train", "--dataset", "planted:60", "--epochs", "1", "--memory-report"]
    main([*command, "--runs", str(runs), "--out", str(tmp_path / "run")])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name in ("features", "parameters and optimizer", "sum", "measured peak"):
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1


def test_predict_of_no_ids_is_refused(trained, capsys):
    with pytest.raises(SystemExit, match="gas predict: error: --ids is empty, expected ids of nod"):
        main(["predict", str(trained[1]), "--ids"])
    assert capsys.readouterr().out == ""
    assert gas.load_run(trained[1]).predict(ids=[])["node"].size == 0


def test_predict_prints_or_writes_a_table(trained, tmp_path, capsys):
    _, folder = trained
    main(["predict", str(folder), "--ids", "n1", "n2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "node,prediction,probability,label,split"
    assert [line.split(",")[0] for line in lines[1:]] == ["n1", "n2"]
    for name in ("all.csv", "all.parquet"):
        main(["predict", str(folder), "--out", str(tmp_path / name)])
    expected = read_parquet(folder / "predictions.parquet")
    compare(read_parquet(tmp_path / "all.parquet"), expected)
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == expected["prediction"]
    with pytest.raises(SystemExit, match=r"gas predict: error: --out is a.txt, expected a file"):
        main(["predict", str(folder), "--out", "a.txt"])


@pytest.mark.parametrize("command", ["predict", "train"])
def test_a_reader_that_ends_first_ends_the_command(command, trained, tmp_path, monkeypatch, capsys):
    arguments = {
        "predict": [str(trained[1]), "--ids", "n1"],
        "train": ["planted:300", "--num-parts", "4", "--epochs", "1", "--out", str(tmp_path)],
    }
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as end:
            main([command, *arguments[command]])
    assert end.value.code == 141
    assert "error" not in capsys.readouterr().err


def test_verify_of_a_run(trained, capsys):
    main(["verify", str(trained[1])])
    assert "exact: relative errors" in capsys.readouterr().out


def test_import_and_partition_make_folders(tmp_path, capsys):
    tables = write_tables(tmp_path / "tables")
    command = ["import", str(tables), str(tmp_path / "graph"), "--undirected", "--memory", "8MB"]
    main([*command, "--columns", "source=source"])
    main(["partition", str(tmp_path / "graph"), str(tmp_path / "parts"), "--num-parts", "4"])
    assert "halo nodes per node" in capsys.readouterr().out
    assert gas.open_graph(tmp_path / "parts", log=False).parts.numel() == 5
    with pytest.raises(SystemExit, match="gas import: error: --columns expects ROLE=NAME"):
        main([*command, "--columns", "label"])


@pytest.mark.filterwarnings("always")
def test_tables_with_other_names(tmp_path, capsys):
    """An import that was refused leaves nothing; errors and warnings name options."""
    tables, out = write_tables(tmp_path / "tables"), tmp_path / "graph"
    rewrite_nodes(tables, lambda row: {**row, "city": "Rome"})
    with open(tables / "edges.csv") as file:
        lines = file.read().replace("source,target", "payer,payee", 1)
    (tables / "edges.csv").write_text(lines)
    names = ["--columns", "source=payer", "target=payee"]
    with pytest.raises(SystemExit, match="gas import: error: .* its columns, --columns source="):
        main(["import", str(tables), str(out)])
    assert not out.exists()
    line = f"warning: {tables}/nodes.csv: the column 'city' (not all numbers) left out: neither"
    assert line in capsys.readouterr().err.splitlines()[0]
    main(["import", str(tables), str(out), *names])
    assert "Reading ids" not in capsys.readouterr().err  # There is a table of nodes.
    main(["partition", str(tables), *names, "--undirected", "--num-parts", "4"])
    assert "halo nodes per node" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="gas partition: error: --num-parts is 999, but"):
        main(["partition", str(tables), *names, "--num-parts", "999"])
    main(["train", str(tables), *names, "--epochs", "1", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="gas predict: error: --graph is 'nowhere', expected one"):
        main(["predict", str(tmp_path / "run"), "--graph", "nowhere"])


def test_a_run_without_checkpoints_is_not_overwritten_by_resuming(trained, capsys):
    before = (trained[1] / "metrics.json").read_bytes()
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--out", str(trained[1]), "--epochs", "1"])
    assert "--resume finds no checkpoints in " in capsys.readouterr().err
    assert (trained[1] / "metrics.json").read_bytes() == before


def test_real_targets_of_some_nodes(tmp_path):
    """Nodes without a target are predicted, and are in no split."""
    tables = write_tables(tmp_path / "tables")
    target = {"red": "0.5", "green": "1.5", "blue": ""}
    rewrite_nodes(tables, lambda row: {**row, "label": target[row["label"]]})
    gas.datasets.import_graph(tables, tmp_path / "graph", undirected=True, log=False)
    for name, options in (("tables", ["--undirected"]), ("graph", [])):
        run = tmp_path / f"run of {name}"
        main(["train", str(tmp_path / name), *options, "--epochs", "2", "--out", str(run)])
        found, expected = gas.load_run(run).predict(), read_parquet(run / "predictions.parquet")
        np.testing.assert_allclose(found["label"], expected["label"])
        missing = np.isnan(found["label"])
        assert 0 < missing.sum() < 300
        assert [split is None for split in found["split"]] == missing.tolist()
        assert np.isfinite(found["prediction"]).all()


@pytest.mark.filterwarnings("always")
def test_edges_are_sampled_in_the_whole_graph(tmp_path, capsys, monkeypatch):
    """The first nodes have edges from the last ones alone; few of many edges are looked for."""
    lines = "".join(f"{node + 500},{node}\n" for node in range(500))
    (tmp_path / "edges.csv").write_text(f"source,target\n{lines}")
    monkeypatch.setattr("gas.cli.graphs.MOST_COUNTED", 64)
    main(["import", str(tmp_path / "edges.csv"), str(tmp_path / "g")])
    assert "warning: 64 of 64 sampled edges lack a reverse" in capsys.readouterr().err


def test_r2_of_numbered_classes_is_of_their_numbers(tmp_path):
    """Years are classes by default; for r2 they are numbers, and nodes without one don't count."""
    tables = write_tables(tmp_path / "tables")
    year = {"red": "1900", "green": "1999", "blue": ""}
    rewrite_nodes(tables, lambda row: {**row, "label": year[row["label"]]})
    train(tables, tmp_path / "run", "--metric", "r2")
    expected = read_parquet(tmp_path / "run/predictions.parquet")
    run = gas.load_run(tmp_path / "run")
    for found in (expected, run.predict(), run.predict(tables)):
        label = np.array(found["label"], float)
        assert set(label[~np.isnan(label)]) == {1900, 1999}
        assert 0 < np.isnan(label).sum() < 300
    assert run.metrics["classes"] is None


def test_r2_of_classes_with_names_is_refused(tmp_path):
    tables = write_tables(tmp_path / "tables")
    text = "--metric is r2, but the targets are classes such as 'blue': choose accuracy or micro_f1"
    with pytest.raises(SystemExit, match=text):
        train(tables, tmp_path / "run", "--metric", "r2")


def test_a_single_class_is_refused_before_training(tmp_path):
    tables = write_tables(tmp_path / "tables")
    rewrite_nodes(tables, lambda row: {**row, "label": "red"})
    with pytest.raises(SystemExit, match="'data.y' holds a single class, expected at least"):
        train(tables, tmp_path / "run")


@pytest.mark.filterwarnings("always")
def test_an_import_counts_edges_without_a_reverse(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    edges = rng.integers(30, size=(200, 2)).tolist()
    lines = "".join(f"{a},{b}\n" for a, b in edges)
    (tmp_path / "edges.csv").write_text(f"source,target\n{lines}")
    found = [(a, b) for a, b in edges if a != b]
    lacks = sum([b, a] not in edges for a, b in found)
    command = ["import", str(tmp_path / "edges.csv")]
    main([*command, str(tmp_path / "one")])
    assert f"warning: {lacks} of {len(found)} edges lack a reverse" in capsys.readouterr().err
    main([*command, str(tmp_path / "both"), "--undirected"])
    assert "lack a reverse" not in capsys.readouterr().err
    monkeypatch.setattr("gas.cli.graphs.MOST_COUNTED", 100)
    main([*command, str(tmp_path / "large")])
    text = capsys.readouterr().err
    assert " sampled edges lack a reverse" in text
    assert "and messages go from source to target alone: --undirected adds the reverses" in text


@pytest.mark.parametrize(
    ("labels", "metric", "text"),
    [
        (
            "abc",
            "roc_auc",
            "--metric is roc_auc, but the targets are 3 classes: choose accuracy or",
        ),
        ("123.5", "accuracy", "--metric is accuracy, but the targets are real numbers: choose r2"),
    ],
)
def test_metrics_of_other_targets_are_refused(tmp_path, labels, metric, text):
    tables = write_tables(tmp_path / "tables", 60)
    names = {"red": labels[0], "green": labels[1], "blue": labels[2:]}
    rewrite_nodes(tables, lambda row: {**row, "label": names[row["label"]]})
    with pytest.raises(SystemExit, match=f"gas train: error: {text}"):
        train(tables, tmp_path / "run", "--metric", metric)


def test_errors_name_what_was_typed(tmp_path, capsys):
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n1,0\n")
    tables = str(tmp_path / "edges.csv")
    for command, text in {
        ("plan", "nowhere"): "gas plan: error: GRAPH is 'nowhere', expected one of ",
        ("partition", tables, "--method", "no"): "gas partition: error: --method is 'no', expected",
        ("import", tables, "g", "--dtype", "int9"): "gas import: error: --dtype is int9, expected",
        ("bench", tables, "--json", str(tmp_path)): f"--json is {tmp_path}, which is a folder",
        ("predict", "no", "--out", f"{tables}/x.csv"): f"error: {tables}/x.csv: Not a directory",
        ("report", "no", "--out", str(tmp_path)): f"--out is {tmp_path}, which is a folder: name a",
        ("import", tables, f"{tables}/g"): f"gas import: error: {tables}/g: OUT is a folder that",
    }.items():
        with pytest.raises(SystemExit, match=text):
            main([*command])


@pytest.mark.parametrize("command", ["import", "partition"])
def test_infinite_features_are_accepted_as_errors_say(tmp_path, command):
    (tmp_path / "g").mkdir()
    np.save(tmp_path / "g/x.npy", np.full((3, 2), np.inf, np.float32))
    np.save(tmp_path / "g/edge_index.npy", np.array([[0, 1, 2, 1, 2, 0], [1, 2, 0, 0, 1, 2]]))
    given = [command, str(tmp_path / "g"), str(tmp_path / "out")]
    given += ["--num-parts", "1"] if command == "partition" else []
    with pytest.raises(SystemExit, match="accept it by --no-check"):
        main(given)
    main([*given, "--no-check"])
    assert gas.open_graph(tmp_path / "out").x.isinf().all()


def test_plan_of_a_graph(capsys):
    main(["plan", "planted:600", "--model", "sage", "--hidden-channels", "8"])
    assert "expected to take" in capsys.readouterr().out


def test_plans_name_options(capsys, monkeypatch):
    monkeypatch.setattr(gas, "plan", lambda *_: "   parts\n*   64\npass num_parts=64 to train")
    main(["plan", "planted:60"])
    assert capsys.readouterr().out == "   parts\n*   64\npass --num-parts 64 to train\n"


def test_doctor_names_versions_and_cures(capsys, monkeypatch):
    found = {each.name: each for each in examine()}
    assert found["torch"].value == torch.__version__
    assert found["gas"].value == gas.__version__
    assert "of the cache" in " ".join(found)
    assert not found["extension"].cure
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("LD_PRELOAD", "")
    assert "tcmalloc is faster" in {each.name: each.value for each in examine()}["allocator"]
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so:/lib/libtcmalloc_minimal.so.4")
    assert {each.name: each.value for each in examine()}["allocator"] == "libtcmalloc_minimal.so.4"
    monkeypatch.setattr("gas.cli.doctor.C", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = {each.name: each.value for each in examine()}
    assert missing["pyyaml"] == "missing, for files of settings: pip install pyyaml"
    assert "pip install --no-build-isolation torch-scatter" in missing["torch-sparse"]
    assert print_findings(examine()) >= 1
    assert "-> everything is slower: pip install ." in capsys.readouterr().out


def test_doctor_fails_where_something_is_missing(monkeypatch):
    monkeypatch.setattr("gas.cli.commands.examine", list)
    main(["doctor"])
    monkeypatch.setattr("gas.cli.commands.print_findings", len)
    monkeypatch.setattr("gas.cli.commands.examine", lambda: ["a problem"])
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1


def test_the_graph_stands_first_in_every_command(tmp_path, capsys):
    tables = write_tables(tmp_path / "tables")
    main(["train", str(tables), "--undirected", "--epochs", "1", "--out", str(tmp_path / "run")])
    assert (tmp_path / "run/metrics.json").exists()
    with open(tables / "edges.csv") as file:
        lines = file.read().replace("source,target", "payer,target", 1)
    (tables / "edges.csv").write_text(lines)
    main(["plan", str(tables), "--undirected", "--columns", "source=payer"])
    capsys.readouterr()
    main(["--version"])
    assert capsys.readouterr().out.strip() == gas.__version__


def test_errors_are_one_line():
    with pytest.raises(SystemExit, match="gas verify: error: RUN is 'nowhere', which has no"):
        main(["verify", "nowhere"])


@pytest.mark.slow
def test_the_module_is_the_command(tmp_path):
    command = [sys.executable, "-m", "gas", "train", "--dataset", "planted:300", "--epochs", "1"]
    environment = {**os.environ, "GAS_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "runs/metrics.json").exists()
    bad = subprocess.run([*command, "--lr", "fast"], cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode == 2
    assert "Error parsing --lr: could not convert string to float: 'fast'" in bad.stderr


def test_without_tyro_the_command_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs the package tyro: pip install 'gas-gnn"):
        main(["doctor"])


@pytest.mark.parametrize("starts", ["script", "module"])
def test_ctrl_c_ends_the_import_of_the_command_quietly(tmp_path, starts):
    """Also where a library that is imported catches every exception."""
    interrupt = "try:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\n"
    (tmp_path / "torch.py").write_text(f"import signal\n{interrupt}")
    (tmp_path / "gas").write_text("import sys\nfrom gas.cli import main\nsys.exit(main())\n")
    command = ["-m", "gas"] if starts == "module" else [tmp_path / "gas"]
    done = subprocess.run(
        [sys.executable, *command, "doctor"], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_other_programs_keep_their_handler_of_ctrl_c(tmp_path):
    script = tmp_path / "gas"
    script.write_text("import gas")
    assert not _startup.is_command([str(script)], ["python", str(script)])
    script.write_text("from gas.cli import main")
    assert _startup.is_command([str(script)], ["python", str(script)])
    of_worker = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]
    assert not _startup.is_command([str(script)], of_worker)
    assert not _startup.is_command(["-m"], ["python", "-m", "pytest", "gas"])
    assert not _startup.is_command([""], ["python"])
    assert signal.getsignal(signal.SIGINT) is not _startup.end_process
