"""``gas train --hetero``: from tables with types to scores, and folders of runs."""

import json
import signal

import numpy as np
import pytest
import torch
from conftest import ROOT, run_forked
from prediction_tables import compare, read_parquet

import gas
from gas.cli import Settings, main
from gas.cli.checks import UsageError
from gas.cli.hetero import HeteroExperiment, HeteroSAGE
from gas.cli.options import parse_args
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
    options = ["--hetero", "--undirected", "--dataset", "g", "--out", "o", "--num-parts", "4"]
    done = run_forked(SCRIPT, *options, "--epochs", "12", cwd=tmp_path)
    assert done.code == 0, done.err
    said = json.loads((tmp_path / "o/metrics.json").read_text())
    assert said["node_type"] == "shop"
    assert said["test_acc"]["mean"] > 0.8
    assert len(said["epochs"][0]["loss"]) == 12
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "o/predictions.parquet").to_pydict()
    assert table["node"] == [f"s{i}" for i in range(30)]
    assert set(table["prediction"]) <= {"a", "b"}


def test_a_file_of_options_may_leave_the_model_out(tmp_path):
    (tmp_path / "c.yaml").write_text("hetero: true\nepochs: 1\n")
    args = parse_args(["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")])
    assert args.model == "sage"


@pytest.mark.slow
def test_a_run_that_diverges_writes_nothing(tmp_path):
    write_tables(tmp_path / "g")
    options = ["--hetero", "--undirected", "--dataset", "g", "--out", "o", "--lr", "1e30"]
    done = run_forked(SCRIPT, *options, "--epochs", "3", cwd=tmp_path)
    assert done.code == 1
    assert "training diverged" in done.err
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())


@pytest.mark.parametrize(
    "more", [["--full-batch"], ["--resume"], ["--checkpoint-every", "1"], ["--model", "gat"]]
)
def test_options_without_an_effect_are_refused(more):
    with pytest.raises(UsageError, match=f"argument {more[0]} "):
        parse_args(["--hetero", *more])


@pytest.mark.parametrize(
    "line",
    [
        "augment: drop_edge", "autocast: true", "memory: 1GB", "max_steps: 3", "refresh: none",
        "inductive: true", "full_batch: true", "prefetch: true", "eval: full", "pack: 1MB",
        "layout: csr", "scale_loss: true", "edge_dropout: 0.5", "warm_up: 3",
        "reg_weight_decay: 0.1", "norm: batch",
    ],
)  # fmt: skip
def test_options_of_files_without_an_effect_are_refused(tmp_path, line):
    (tmp_path / "c.yaml").write_text(f"hetero: true\ncorrect_drift: false\n{line}\n")
    option = line.split(":")[0].replace("_", "-")
    with pytest.raises(UsageError, match=f"argument --{option} does nothing with --hetero"):
        parse_args(["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("entry", "shown"), [("batch_norm: true", "--norm"), ("hidden_heads: 4", "hidden_heads")]
)
def test_arguments_of_the_model_without_an_effect_are_refused(tmp_path, entry, shown):
    (tmp_path / "c.yaml").write_text(f"hetero: true\narchitecture:\n  {entry}\n")
    with pytest.raises(UsageError, match=f"argument {shown} does nothing with --hetero"):
        parse_args(["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")])


@pytest.mark.parametrize(
    "more", [["--dropout", "2"], ["--num-layers", "0"], ["--hidden-channels", "0"]]
)
def test_shapes_are_checked_before_the_graph_is_opened(more):
    name = more[0].strip("-").replace("-", "_")
    with pytest.raises(ValueError, match=f"'{name}' is .*, expected"):
        parse_args(["--hetero", *more])


@pytest.mark.requires("matplotlib")
def test_an_interruption_keeps_the_epochs_that_ended(tmp_path, run_script, monkeypatch):
    """The signal comes in the fourth epoch."""
    train, calls = HeteroExperiment._train_epoch, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return train(*args, **options)

    monkeypatch.setattr(HeteroExperiment, "_train_epoch", interrupted)
    monkeypatch.setattr(progress, "EVERY", 0.001)
    write_tables(tmp_path / "g")
    options = ["--hetero", "--undirected", "--dataset", "g", "--epochs", 9, "--out", "out"]
    done = run_script(SCRIPT, *options, "--num-parts", 4)
    assert done.code == 130
    assert "Interrupted: reporting the epochs that ended, 3." in done.err
    assert "Training, epochs: " in done.err
    said = json.loads((tmp_path / "out/metrics.json").read_text())
    assert said["interrupted"]
    assert len(said["epochs"][0]["loss"]) == 3
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


# Experiments in Python --------------------------------------------------------------------------


def test_gradients_are_clipped(tmp_path):
    """Adam divides by the norm of gradients, unless they are far smaller than its epsilon."""
    data = gas.open_graph(write_tables(tmp_path / "g"), hetero=True, log=False)
    change = {}
    for grad_norm in (1e-12, 1.0):
        settings = Settings.default("sage").replace(
            grad_norm=grad_norm, dropout=0.0, num_parts=4, epochs=5
        )
        loss = HeteroExperiment(data, settings, log=False).run(0).loss
        change[grad_norm] = abs(loss[-1] - loss[0])
    assert change[1e-12] < 0.1 * change[1.0]


def test_the_loss_of_an_epoch_is_the_mean_over_nodes(tmp_path):
    """Without learning it is that of the graph, in however many parts."""
    data = gas.open_graph(write_tables(tmp_path / "g"), hetero=True, log=False)
    settings = Settings.default("sage").replace(lr=0, dropout=0.0, num_parts=4, epochs=1)
    run = HeteroExperiment(data, settings, log=False).run(0, keep=True)
    mask, y = data["shop"].train_mask, data["shop"].y
    expected = torch.nn.functional.cross_entropy(run.best.out[mask], y[mask])
    assert run.loss == pytest.approx([float(expected)])


def test_batches_are_drawn_anew(tmp_path):
    data = gas.open_graph(write_tables(tmp_path / "g"), hetero=True, log=False)
    settings = Settings.default("sage").replace(num_parts=6, batch_size=1)
    loader = HeteroExperiment(data, settings, log=False).graph.loader
    assert len({tuple(next(iter(loader))["shop"].n_id.tolist()) for _ in range(8)}) > 1


def test_an_experiment_of_few_settings(tmp_path):
    """The architecture is that of sage, as far as it isn't given; other options are usual."""
    data = gas.open_graph(write_tables(tmp_path / "g"), hetero=True, log=False)
    usual = {"refresh": "layerwise", "evaluation": "layerwise", "full_batch": False}
    found = HeteroExperiment(data, Settings(epochs=12, num_parts=4), log=False, **usual)
    assert dict(found.settings.architecture) == dict(Settings.default("sage").architecture)
    for name in ("correct_drift", "warm_up", "average_weights"):
        assert not getattr(found.settings, name)  # Which have no effect, and are saved as such.
    run = found.run(0, keep=True)
    assert len(run.loss) == 12
    assert found.phases["steps"] == 1
    assert found.phases["moved_bytes"] > 0
    assert found.phases["seconds"]["dense layers"] > 0


def test_a_type_without_masks_or_with_unknown_classes(tmp_path):
    data = gas.open_graph(write_tables(tmp_path / "g"), hetero=True, log=False)
    shops, settings = data["shop"], Settings.default("sage").replace(num_parts=4, epochs=1)
    node = int(shops.train_mask.nonzero()[0, 0])
    shops.y[node] = -1
    with pytest.raises(ValueError, match="'train_mask' holds 1 nodes with a target that is unkn"):
        HeteroExperiment(data, settings, log=False)
    shops.train_mask[node] = False  # Nodes without a class may be in no split.
    assert len(HeteroExperiment(data, settings, log=False).run(0).loss) == 1
    del shops.val_mask
    with pytest.raises(ValueError, match=r"hetero_data\['shop'\]\" has no 'val_mask', by which"):
        HeteroExperiment(data, settings, log=False)


# Folders of runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folders of tables, and of a run on them."""
    folder = tmp_path_factory.mktemp("runs")
    tables = write_tables(folder / "tables")
    options = ["--hetero", "--undirected", "--epochs", "3", "--num-parts", "4", "--verify"]
    main(["train", str(tables), *options, "--out", str(folder / "run")])
    return tables, folder / "run"


def rewrite(folder, change):
    """Return a folder whose rows of nodes are changed; ``None`` removes one."""
    path = folder / "nodes.csv"
    rows = [change(*line.split(",")) for line in path.read_text().splitlines()]
    path.write_text("".join(",".join(row) + "\n" for row in rows if row is not None))
    return folder


@pytest.mark.requires("matplotlib", "jinja2")
def test_a_run_is_opened_again_like_any_other(trained, tmp_path, capsys):
    _, folder = trained
    run, expected = gas.load_run(folder), read_parquet(folder / "predictions.parquet")
    assert str(run).startswith("sage on ")
    compare(run.predict(), expected)
    some = run.predict(ids=["s7", "s3"])
    assert list(some["prediction"]) == [expected["prediction"][row] for row in (7, 3)]
    with pytest.raises(ValueError, match="'ids' has 'p1', which is no node of the graph of type"):
        run.predict(ids=["p1"])
    assert run.open_graph().node_types == ["person", "shop"]
    main(["verify", str(folder)])
    assert "exact: relative errors" in capsys.readouterr().out
    page = gas.report(folder, out=tmp_path / "report.html").read_text()
    for text in ("sage on tables", "node_type", "shop", "edges between parts", "mean age of rows"):
        assert text in page
    assert "warm_up</td><td>40" not in page  # --hetero trains without it.


def test_another_graph_is_predicted(trained, tmp_path):
    run, other = gas.load_run(trained[1]), write_tables(tmp_path / "other")
    expected = run.predict(other)
    assert "split" not in expected
    rewrite(other, lambda name, kind, f, label: (kind, f, name))  # Another order; no labels.
    found = run.predict(other)
    assert set(found) == {"node", "prediction", "probability"}
    compare(found, {name: expected[name] for name in found})
    names = {"label": "label", "": "", "a": "b", "b": "c"}
    other = rewrite(write_tables(tmp_path / "more"), lambda *row: (*row[:3], names[row[3]]))
    expected = ["b" if label == "a" else None for label in expected["label"]]
    assert list(run.predict(other)["label"]) == expected


def test_a_graph_of_other_types_is_refused(trained, tmp_path):
    run = gas.load_run(trained[1])
    names = {"type": "type", "person": "person", "shop": "store"}
    other = rewrite(write_tables(tmp_path / "a"), lambda *row: (row[0], names[row[1]], row[2]))
    with pytest.raises(ValueError, match="'graph' has no nodes of type 'shop', which the model"):
        run.predict(other)
    other = write_tables(tmp_path / "b")
    edges = (other / "edges.csv").read_text()
    (other / "edges.csv").write_text(edges.replace("knows", "likes"))
    with pytest.raises(ValueError, match="'graph' has the edge types .*, expected .*knows"):
        run.predict(other)
    gas.cluster(gas.open_graph(trained[0], log=False), 2, out=tmp_path / "graph", log=False)
    with pytest.raises(ValueError, match="is a graph folder, whose graph is of one type"):
        run.predict(tmp_path / "graph")


def test_settings_of_a_run_train_it_again(trained, tmp_path):
    _, folder = trained
    main(["train", "--config", str(folder / "settings.yaml"), "--out", str(tmp_path / "again")])
    compare(
        read_parquet(tmp_path / "again" / "predictions.parquet"),
        read_parquet(folder / "predictions.parquet"),
    )


def test_classes_of_integers_are_real_numbers_for_r2(tmp_path):
    """Targets of a type are converted for the metric, in training and when a run is opened."""
    digit = {"label": "label", "": "", "a": "0", "b": "2"}
    folder = rewrite(write_tables(tmp_path / "g"), lambda *row: (*row[:3], digit[row[3]]))
    options = ["--hetero", "--undirected", "--epochs", "2", "--metric", "r2"]
    main(["train", str(folder), *options, "--out", str(tmp_path / "run")])
    found, expected = (
        gas.load_run(tmp_path / "run").predict(),
        read_parquet(tmp_path / "run" / "predictions.parquet"),
    )
    np.testing.assert_allclose(found["prediction"], expected["prediction"], rtol=1e-5, atol=1e-6)
    assert list(found["label"]) == expected["label"]
