"""``examples/train_gas.py`` as a stranger runs it."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, run_forked, started

import gas
from gas.cli import experiment, results
from gas.cli.parser import NAMES
from gas.native import progress

SCRIPT = ROOT / "examples" / "train_gas.py"
pytestmark = pytest.mark.requires("matplotlib", "tyro")


def run(tmp_path, *args, code=0):
    done = run_forked(SCRIPT, "--out", tmp_path / "out", *args, cwd=tmp_path)
    assert done.code == code, done.err
    return done


def check_metrics(path, runs):
    metrics = json.loads(path.read_text())
    for key in ("test_acc", "val_acc", "train_epoch_seconds", "peak_rss_bytes"):
        entry = metrics[key]
        assert len(entry["values"]) == runs
        assert entry["mean"] == pytest.approx(np.mean(entry["values"]))
        assert entry["std"] == pytest.approx(np.std(entry["values"], ddof=1) if runs > 1 else 0)
    assert all(0 <= value <= 1 for value in metrics["test_acc"]["values"])
    assert metrics["peak_rss_bytes"]["mean"] > 10**8
    return metrics


@pytest.mark.slow(fast=1)
@pytest.mark.parametrize(
    "options",
    [
        ["--runs", 2, "--seed", 5],
        ["--full-batch"],
        ["--eval", "layerwise"],
        ["--store", "disk", "--dtype", "int8", "--prefetch"],
        ["--feature-dtype", "int8", "--feature-store", "disk", "--memory-report"],
        ["--feature-dtype", "bfloat16", "--full-batch"],
        ["--io", "serial", "--store", "auto"],
        ["--refresh", "none", "--eval", "layerwise"],
        ["--refresh", "layerwise", "--eval", "full", "--patience", 1],
        ["--model", "gat", "--scale-loss", "--edge-dropout", 0.2, "--layout", "edge_index"],
        ["--model", "appnp", "--autocast", "--layout", "edge_index"],
        ["--model", "gcn2", "--skip-unlabelled", "--grad-norm", 1],
        ["--model", "gin", "--memory-budget", 0.5],
        ["--model", "pna", "--norm", "batch"],
        ["--model", "pna_jk", "--metric", "accuracy"],
        ["--model", "sage", "--dtype", "bfloat16"],
        ["--partition", "random", "--num-layers", 3, "--dropout", 0.1],
        ["--augment", "mh_aug", "--reference-size", 60, "--runs", 2, "--num-steps", 5],
        ["--augment", "mh_aug", "--model", "gat", "--bank", "per_view", "--undirected"],
        ["--augment", "drop_edge", "--model", "sage", "--drop", 0.4, "--prefetch"],
        pytest.param(["--layout", "sparse_tensor"], marks=pytest.mark.requires("torch_sparse")),
        pytest.param(["--tensorboard"], marks=pytest.mark.requires("tensorboard")),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_options(tmp_path, run_script, options):
    done = run_script(
        SCRIPT, "--dataset", "planted:600", "--epochs", 3, "--num-parts", 6, "--batch-size", 2,
        "--hidden-channels", 8, "--out", "out", *options,
    )  # fmt: skip
    assert done.code == 0, done.err
    runs = 2 if "--runs" in options else 1
    metrics = check_metrics(tmp_path / "out" / "metrics.json", runs)
    assert metrics["settings"]["num_parts"] == 6
    assert metrics["training"] == ("full_batch" if "--full-batch" in options else "histories")
    assert (tmp_path / "out" / "curve.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "events").exists() == ("--tensorboard" in options)
    assert ("transitions accepted" in done.out) == ("mh_aug" in options)
    assert bool(metrics["chain"]) == ("mh_aug" in options)
    for line in ("test accuracy", "training epoch", "histories", "peak memory", "metrics.json"):
        assert line in done.out
    if "--full-batch" not in options:
        assert "edges between parts" in done.out
    assert "Warning" not in done.err


@pytest.mark.slow  # Programs run as such.
def test_runs_repeat(tmp_path):
    results = []
    for _ in range(2):
        run(tmp_path, "--dataset", "planted:600", "--epochs", 4, "--seed", 3, "--overwrite")
        results.append(json.loads((tmp_path / "out" / "metrics.json").read_text()))
    for key in ("test_acc", "val_acc", "final_loss"):
        assert results[0][key] == results[1][key]


@pytest.mark.slow
def test_own_graph(tmp_path):
    y = np.arange(60) % 2
    edges = np.array([[i, j] for i in range(60) for j in range(60) if i % 2 == j % 2 and i < j]).T
    x = np.random.default_rng(0).normal(size=(60, 4)) + 2 * y[:, None]
    np.savez(tmp_path / "mine.npz", x=x.astype(np.float32), y=y, edge_index=edges)
    run(tmp_path, "--dataset", "mine.npz", "--epochs", 20, "--num-parts", 4)
    metrics = check_metrics(tmp_path / "out" / "metrics.json", 1)
    assert metrics["test_acc"]["mean"] > 0.8


def test_a_run_is_not_overwritten_unless_asked_to(tmp_path, run_script):
    short = [SCRIPT, "--dataset", "planted:600", "--epochs", 1, "--out", "out"]
    assert run_script(*short).code == 0
    before = (tmp_path / "out" / "metrics.json").read_bytes()
    done = run_script(*short)
    assert done.code == 2
    assert "argument --out is out, which holds a run: add --overwrite" in done.err
    assert (tmp_path / "out" / "metrics.json").read_bytes() == before


def test_verify(tmp_path, run_script):
    """Before training, of every epoch of which there are the values."""
    options = ["--dataset", "planted:600", "--epochs", 3, "--verify", "--out", "out"]
    done = run_script(SCRIPT, *options)
    assert "exact: relative errors are at most 1e-05" in done.out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    (epochs,) = metrics["epochs"]
    assert all(len(values) == 3 for values in epochs.values())
    assert epochs["test_acc"][int(metrics["best_epoch"]["mean"]) - 1] == metrics["test_acc"]["mean"]
    assert f"most frequent class  {100 * metrics['baseline']:.2f} %" in done.out
    assert 0 < metrics["baseline"] < 0.3  # Of 16 classes.


def test_r2_is_no_percentage(tmp_path, run_script):
    rng = np.random.default_rng(0)
    x, edges = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(60, size=(2, 200))
    np.savez(tmp_path / "mine.npz", x=x, y=x.sum(axis=1), edge_index=edges)
    done = run_script(
        SCRIPT, "--dataset", "mine.npz", "--epochs", 2, "--num-parts", 2, "--undirected"
    )
    lines = [line for line in done.out.splitlines() if "R²" in line or "same" in line]
    assert len(lines) == 3
    assert not any("%" in line for line in lines)


@pytest.mark.slow
@pytest.mark.requires("shared")
def test_cora(tmp_path, data_root):
    """Published settings; ten seeds are a benchmark."""
    run(tmp_path, "--dataset", "Cora", "--root", data_root)
    metrics = check_metrics(tmp_path / "out" / "metrics.json", 1)
    assert metrics["settings"]["num_parts"] == 40
    assert metrics["test_acc"]["mean"] > 0.80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "Coro"], "error: --dataset is 'Coro', expected one of Cora, "),
        (
            ["--dataset", "absent.npz"],
            "error: --dataset is 'absent.npz', but there is no such file",
        ),
        (
            ["--dataset", "planted:40", "--num-parts", "41"],
            "error: --num-parts is 41, but the graph",
        ),
        (["--dataset", "Questions", "--root", "nowhere"], "nowhere/questions/raw/questions.npz"),
        (["--batch-size", "0"], "error: --batch-size is 0, expected an integer of at least 1"),
        (["--epochs", "0"], "error: --epochs is 0, expected an integer of at least 1"),
        (["--model", "transformer"], "invalid choice 'transformer' for argument '--model'"),
        (["--model", "gat", "--norm", "batch"], "error: --norm is batch, which gat doesn't have"),
    ],
)
def test_errors_are_one_message(tmp_path, run_script, options, message):
    done = run_script(SCRIPT, *options)  # An error of another kind would come through.
    assert done.code in (1, 2)
    assert message in done.err
    assert "usage:" not in done.err
    assert not (tmp_path / "runs").exists()


def test_help_shows_the_defaults_of_the_model_and_the_graph(run_script):
    for options, layers, rate in (
        (["--model", "appnp"], 10, 0.01),
        (["--model", "gat", "--dataset", "Cora"], 2, 0.005),
    ):
        said = re.sub(r"[\s│]+", " ", run_script(SCRIPT, *options, "--help").out)
        assert f"--num-layers INT The number of layers. (default: {layers})" in said
        assert f"--lr FLOAT The learning rate of Adam. (default: {rate})" in said
        assert said.count("(default: ") == len(NAMES) - 1  # But for the architecture.


@pytest.mark.slow
@pytest.mark.parametrize(("options", "is_hinted"), [([], True), (["--norm", "none"], False)])
def test_a_dense_graph_hints_at_norm(tmp_path, run_script, options, is_hinted):
    every = torch.cartesian_prod(torch.arange(40), torch.arange(40)).t().numpy()
    np.savez(tmp_path / "dense.npz", x=np.eye(40), y=np.arange(40) % 2, edge_index=every)
    short = [SCRIPT, "--dataset", "dense.npz", "--epochs", 1, "--num-parts", 4]
    done = run_script(*short, *options)
    assert done.code == 0, done.err
    assert ("hint: the graph has 40 edges per node" in done.err) == is_hinted


def test_progress_where_output_is_piped(tmp_path, run_script, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.001)
    done = run_script(SCRIPT, "--dataset", "planted:600", "--epochs", 3)
    assert re.search(r"Training, epochs: \d of 3, \d+ s", done.err)


@pytest.mark.slow
def test_an_error_of_a_program_is_one_message(tmp_path):
    done = run_forked(SCRIPT, "--dataset", "absent.npz", cwd=tmp_path)
    assert done.code == 1
    assert done.err == (
        "train_gas.py: error: --dataset is 'absent.npz', but there is no such file\n"
    )


@pytest.mark.slow
def test_interruption_reports_the_runs_that_ended(tmp_path):
    command = [
        sys.executable, str(SCRIPT), "--dataset", "planted:600", "--epochs", "20",
        "--runs", "10000", "--out", str(tmp_path / "out"), "--tensorboard",
    ]  # fmt: skip
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(tmp_path / "out" / "events" / "run2")  # Until the third run has begun.
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted: reporting the runs that ended." in err
    assert "Traceback" not in err
    assert "test accuracy" in out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert len(metrics["test_acc"]["values"]) >= 2
    assert metrics["interrupted"] is True


def wait_for(path, seconds=120):
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.requires("pyarrow")
@pytest.mark.requires("safetensors")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_the_epochs_that_ended(tmp_path, run_script, monkeypatch, number):
    """The signal comes in the fourth epoch."""
    train, calls = experiment.train_epoch, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            signal.raise_signal(number)
        return train(*args, **kwargs)

    monkeypatch.setattr(experiment, "train_epoch", interrupted)
    done = run_script(
        SCRIPT, "--dataset", "planted:600", "--epochs", 10, "--out", "out",
        "--store", "disk", "--path", "histories",
    )  # fmt: skip
    assert done.code == 128 + number
    assert "Interrupted: reporting the epochs that ended, 3." in done.err
    assert "resuming with the rows" not in done.err  # They are made once, for training.
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    (epochs,) = metrics["epochs"]
    assert {len(values) for values in epochs.values()} == {3}
    assert 1 <= metrics["best_epoch"]["mean"] <= 3
    assert metrics["interrupted"] is True
    for file in FILES:
        assert (tmp_path / "out" / file).stat().st_size > 500
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)


@pytest.mark.slow
@pytest.mark.requires("pyarrow")
@pytest.mark.requires("safetensors")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_files_are_written_waits(tmp_path, run_script, monkeypatch, number):
    """No mixture of two runs; and the exit status says that it came."""
    write = results.predictions

    def interrupted(*args):
        signal.raise_signal(number)
        return write(*args)

    monkeypatch.setattr(results, "predictions", interrupted)
    done = run_script(SCRIPT, "--dataset", "planted:600", "--epochs", 1, "--out", "out")
    assert done.code == 128 + number
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.requires("pyarrow")
def test_files_that_could_not_be_written_are_no_run(tmp_path, run_script, monkeypatch):
    short = [SCRIPT, "--dataset", "planted:600", "--epochs", 1, "--out", "out"]
    assert run_script(*short).code == 0

    def fails(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(results, "predictions", fails)
    done = run_script(*short, "--overwrite")
    assert done.code == 1
    assert done.err.endswith("train_gas.py: error: the disk is gone\n")
    assert not (tmp_path / "out" / "metrics.json").exists()


@pytest.mark.slow
def test_two_runs_into_a_folder_at_once(tmp_path, run_script):
    options = [SCRIPT, "--dataset", "planted:600", "--epochs", 1, "--out", "out"]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from pathlib import Path; from gas.graph import lock_folder\n"
    code += "with lock_folder(Path('out')): print('there', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": tmp_path}
    with started([sys.executable, "-c", code], **pipes) as first, first.stdin, first.stdout:
        assert first.stdout.readline() == "there\n"
        done = run_script(*options, "--overwrite")
        assert done.code == 1
        assert "--out is 'out', which another process is writing: wait for it, or" in done.err
        assert list((tmp_path / "out").iterdir()) == []
        first.kill()
        first.wait()
    assert run_script(*options).code == 0
    assert run_script(*options).code == 2


@pytest.mark.slow
@pytest.mark.requires("pyarrow")
def test_inductive_training_on_tables(tmp_path, run_script):
    lines = [f"n{i},{i},{'ab'[i % 2]},{('train', 'val', 'test')[i % 3]}" for i in range(30)]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,f,label,split", *lines]))
    edges = [f"n{i},n{(i + 2) % 30}" for i in range(30)]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]))
    done = run_script(
        SCRIPT,
        "--dataset",
        tmp_path,
        "--inductive",
        "--undirected",
        "--epochs",
        2,
        "--num-parts",
        2,
    )
    assert done.code == 0, done.err
    _, table, *_ = outputs(tmp_path / "runs")
    assert table["node"] == [f"n{i}" for i in range(30)]


FILES = ("metrics.json", "curve.png", "model.safetensors", "predictions.parquet", "settings.yaml")


@pytest.mark.slow
@pytest.mark.requires("pyarrow")
@pytest.mark.requires("safetensors")
@pytest.mark.parametrize("options", [[], ["--full-batch"], ["--eval", "layerwise"]])
def test_the_model_and_its_predictions(tmp_path, run_script, options):
    """Of the best epoch of the best run, in the order of the graph as it was given."""
    done = run_script(
        SCRIPT, "--dataset", "planted:600", "--epochs", 4, "--runs", 3, "--model", "sage",
        "--out", "out", *options,
    )  # fmt: skip
    assert done.code == 0, done.err
    metrics, table, model, about = outputs(tmp_path / "out")
    assert metrics["val_acc"]["values"][metrics["kept_run"]] == max(metrics["val_acc"]["values"])
    data, in_channels, out_channels = gas.get_data("data", "planted:600", split="all")
    assert metrics["split"] == data.split
    net = gas.models.GraphSAGE(
        num_nodes=600, in_channels=in_channels, out_channels=out_channels,
        hidden_channels=json.loads(about["hidden_channels"]),
        num_layers=json.loads(about["num_layers"]),
    ).eval()  # fmt: skip
    net.load_state_dict(model)
    whole = gas.cluster(data, 1, log=False)
    out = net.predict(whole)
    assert table["node"] == list(range(600))
    assert table["prediction"] == out.argmax(dim=1).tolist()
    assert table["probability"] == pytest.approx(out.softmax(dim=1).amax(dim=1).tolist(), rel=1e-4)
    assert table["label"] == data.y.tolist()
    for part in ("train", "val", "test"):
        mask = data[f"{part}_mask"][:, metrics["kept_run"]]
        assert mask.tolist() == [name == part for name in table["split"]]
    test = data.test_mask[:, metrics["kept_run"]]
    right = (out.argmax(dim=1) == data.y)[test].float().mean()
    assert float(right) == pytest.approx(metrics["test_acc"]["values"][metrics["kept_run"]])


def outputs(folder):
    from pyarrow import parquet
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(folder / "model.safetensors", "pt") as file:
        about = file.metadata()
    table = parquet.read_table(folder / "predictions.parquet").to_pydict()
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics, table, load_file(folder / "model.safetensors"), about


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
@pytest.mark.requires("pyarrow")
@pytest.mark.requires("safetensors")
def test_tables_in_and_out(tmp_path, run_script):
    """Own ids and names of classes; a split that is given; edges of one direction."""
    rng = np.random.default_rng(0)
    lines = ["id,split,kind,a,b"]
    for i in range(90):
        kind = "" if i == 5 else ("cat", "dog")[i % 2]
        split = "" if i == 5 else ("train", "val", "test")[i % 3]
        lines.append(f"n{i},{split},{kind},{rng.normal() + 3 * (i % 2)},{i}e-3")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "nodes.csv").write_text("\n".join(lines))
    edges = [f"n{i},n{(i + 2) % 90}" for i in range(90)]
    (tmp_path / "mine" / "edges.csv").write_text("\n".join(["payer,payee", *edges]))
    run_ = [SCRIPT, "--dataset", "mine", "--epochs", 30, "--num-parts", 3, "--out", "out"]
    columns = ["--columns", "source=payer", "target=payee", "label=kind"]
    done = run_script(*run_, *columns)
    assert "warning: no edge has a reverse" in done.err
    done = run_script(*run_, *columns, "--undirected", "--overwrite")
    assert done.code == 0, done.err
    assert "warning" not in done.err
    assert "nodes for training, validation, test: 30, 30, 29" in done.err
    metrics, table, *_ = outputs(tmp_path / "out")
    assert metrics["split"] == "given"
    assert metrics["test_acc"]["mean"] > 0.8
    assert table["node"] == [f"n{i}" for i in range(90)]
    assert table["split"][:6] == ["train", "val", "test", "train", "val", None]
    assert table["label"][:6] == ["cat", "dog", "cat", "dog", "cat", None]
    wrong = sum(a != b for a, b in zip(table["label"], table["prediction"], strict=True))
    assert wrong < 20


@pytest.mark.slow
@pytest.mark.requires("pyarrow")
@pytest.mark.parametrize("several", [False, True])
def test_predictions_of_numbers_and_of_several_labels(tmp_path, run_script, several):
    rng = np.random.default_rng(0)
    x, edges = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(60, size=(2, 200))
    y = (x[:, :3] > 0).astype(np.int64) if several else x.sum(axis=1)
    np.savez(tmp_path / "mine.npz", x=x, y=y, edge_index=edges)
    done = run_script(
        SCRIPT, "--dataset", "mine.npz", "--epochs", 2, "--num-parts", 2, "--undirected"
    )
    assert done.code == 0, done.err
    _, table, *_ = outputs(tmp_path / "runs")
    assert table["label"] == pytest.approx(y) if not several else table["label"] == y.tolist()
    assert np.shape(table["prediction"]) == ((60, 3) if several else (60,))
    assert ("probability" in table) == several


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pyarrow", "safetensors"])
def test_without_a_package_the_rest_is_written(tmp_path, run_script, monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    done = run_script(SCRIPT, "--dataset", "planted:600", "--epochs", 1)
    assert done.code == 0
    assert f"which needs: pip install {package}" in done.err
    left = {path.name for path in (tmp_path / "runs").iterdir()}
    assert len(set(FILES) - left) == 1


def test_options_that_do_nothing_are_named(tmp_path, run_script):
    done = run_script(
        SCRIPT, "--dataset", "planted:600", "--epochs", 1, "--full-batch", "--num-parts", 4
    )
    assert done.code == 0
    assert "warning: --num-parts does nothing with --full-batch" in done.err
    assert "--correct-drift" not in done.err  # It is on by default, and was not given.


@pytest.mark.slow
def test_resume_names_what_differs_and_says_when_it_starts_over(tmp_path, run_script):
    short = [SCRIPT, "--dataset", "planted:600", "--epochs", 1, "--out", "out", "--resume"]
    done = run_script(*short)
    assert "Run 1 starts over: out/checkpoints/run0 has no checkpoint" in done.err
    done = run_script(*short, "--num-layers", 3)
    assert "where --num-layers is 2, but now it is 3" in done.err
    done = run_script(*short, "--norm", "batch")
    assert "where --norm is none, but now it is batch" in done.err
    assert run_script(*short, "--norm", "none").code == 0


@pytest.mark.filterwarnings("always")
def test_warnings_name_flags(tmp_path, run_script):
    x, y = np.eye(40, dtype=np.float32), np.arange(40) % 2
    np.savez(tmp_path / "way.npz", x=x, y=y, edge_index=np.stack([np.arange(39), np.arange(1, 40)]))
    done = run_script(SCRIPT, "--dataset", "way.npz", "--epochs", 1, "--num-parts", 2)
    assert "warning: no edge has a reverse" in done.err
    assert "--undirected adds the reverses, without which" in done.err
    done = run_script(SCRIPT, "--config", "absent.yaml", "--out", "other")
    assert "error: absent.yaml: No such file or directory: check the path" in done.err


@pytest.mark.slow
def test_debug_shows_where(tmp_path):
    done = run_forked(SCRIPT, "--dataset", "absent.npz", "--debug", cwd=tmp_path)
    assert done.code == 1
    assert "Traceback" in done.err


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses_of(folder):
    return [run["loss"] for run in json.loads((folder / "metrics.json").read_text())["epochs"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--runs", 2],
        ["--augment", "mh_aug", "--reference-size", 60],
        ["--store", "disk", "--path", "files"],
        ["--memory", "2GB"],
        ["--full-batch"],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_a_run_goes_on(tmp_path, run_script, one_thread, options):
    command = [
        SCRIPT, "--dataset", "planted:600", "--epochs", 4, "--hidden-channels", 8, *options,
    ]  # fmt: skip
    if "--memory" not in options:
        command += ["--num-parts", 6, "--batch-size", 2]
        whole = [option for option in command if option not in ("--path", "files")]
        done = run_script(*whole, "--out", "whole")
        assert done.code == 0, done.err
    first = list(command)
    first[first.index("--epochs") + 1] = 2
    done = run_script(*first, "--out", "out", "--checkpoint-every", 1)
    assert done.code == 0, done.err
    for again in (["--out", "out"], ["--out", "out", "--checkpoint-every", 1]):
        done = run_script(*command, *again)
        assert done.code == 2
        assert "has the checkpoints of a run: add --resume" in done.err
    before = losses_of(tmp_path / "out")
    done = run_script(*command, "--out", "out", "--resume")
    assert done.code == 0, done.err
    assert "Run 1 goes on from out/checkpoints/run0" in done.err
    after = losses_of(tmp_path / "out")
    assert [run[:2] for run in after] == before
    if "--memory" not in options:
        assert after == losses_of(tmp_path / "whole")
    done = run_script(*command, "--out", "out", "--resume", "--model", "sage")
    assert done.code != 0
    assert "'--model' is sage, but out/settings.yaml is for gcn" in done.err
    done = run_script(*command, "--out", "out", "--overwrite")
    assert done.code == 0, done.err
    assert not list((tmp_path / "out").glob("checkpoints/run0/checkpoint_*"))
