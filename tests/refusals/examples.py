"""Command lines that the scripts of ``examples/`` refuse."""

import contextlib
import io
import runpy
import sys

import torch
from conftest import ROOT


def run(t, script, *options):
    """Return the last line that the script writes."""
    said = io.StringIO()
    t.patch.setattr(sys, "argv", [script, *map(str, options)])
    t.patch.chdir(t.path)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    except SystemExit as end:
        if end.code == 2:  # argparse has said why.
            raise SystemExit(said.getvalue().strip().split("\n")[-1]) from end
        raise


def as_file(t):
    (t.path / "out").touch()
    return t.path / "out"


def tables(t, nodes):
    (t.path / "edges.csv").write_text("source,target,type\n0,1,a\n1,0,b\n")
    (t.path / "nodes.csv").write_text(nodes)
    return t.path


def real_targets(t):
    torch.save({"x": torch.ones(4, 2), "y": torch.rand(4), "edge_index": torch.ones(2, 2).long()},
               t.path / "g.pt")  # fmt: skip
    return t.path / "g.pt"


def config(t, text):
    (t.path / "mine.yaml").write_text(text)
    return t.path / "mine.yaml"


def without_tyro(t):
    t.patch.setattr("importlib.util.find_spec", lambda name: None)
    run(t, "train_gas.py")


def into_another_run(t):
    (t.path / "metrics.json").touch()
    run(t, "train_gas.py", "--out", t.path)


def unforeseen(t):
    def fit(*_, **options):
        raise AssertionError("the sky fell")

    t.patch.setattr("gas.cli.experiment.run_epochs", fit)
    run(t, "train_gas.py", "--dataset", "planted:60")


CASES = {
    "train_gas.py --epochs 0": lambda t: run(t, "train_gas.py", "--epochs", 0),
    "train_gas.py --device cuda, without one": lambda t: run(t, "train_gas.py", "--device", "cuda"),
    "train_gas.py --norm, of a model without": lambda t: run(
        t, "train_gas.py", "--dataset", "planted:60", "--model", "gat", "--norm", "batch"
    ),
    "train_gas.py --out, a file": lambda t: run(t, "train_gas.py", "--out", as_file(t)),
    "train_gas.py --num-steps, without --augment": lambda t: run(
        t, "train_gas.py", "--num-steps", 3
    ),
    "train_gas.py --bank, without --augment": lambda t: run(
        t, "train_gas.py", "--bank", "per_view"
    ),
    "train_gas.py --path, without --store": lambda t: run(t, "train_gas.py", "--path", t.path),
    "train_gas.py --pack, without --store": lambda t: run(t, "train_gas.py", "--pack"),
    "train_gas.py --pack, no size": lambda t: run(
        t, "train_gas.py", "--store", "disk", "--pack", "much"
    ),
    "train_gas.py --columns, no role": lambda t: run(t, "train_gas.py", "--columns", "payer"),
    "train_gas.py --store device, without one": lambda t: run(
        t, "train_gas.py", "--dataset", "planted:60", "--store", "device"
    ),
    "train_gas.py --full-batch --augment": lambda t: run(
        t, "train_gas.py", "--dataset", "planted:60", "--full-batch", "--augment", "drop_edge"
    ),
    "train_gas.py --autocast, a matrix that has no such product": lambda t: run(
        t, "train_gas.py", "--dataset", "planted:60", "--autocast", "--layout", "csr"
    ),
    "train_gas.py --feature-dtype, sparse features": lambda t: run(
        t, "train_gas.py", "--dataset", "planted:60", "--sparse-features", "--feature-dtype", "int8"
    ),
    "train_gas.py --hetero, a name": lambda t: run(t, "train_gas.py", "--hetero"),
    "train_gas.py --hetero --refresh": lambda t: run(
        t, "train_gas.py", "--hetero", "--refresh", "full"
    ),
    "train_gas.py --hetero --model gat": lambda t: run(
        t, "train_gas.py", "--hetero", "--model", "gat"
    ),
    "train_gas.py --hetero, no features": lambda t: run(
        t, "train_gas.py", "--hetero", "--dataset", tables(t, "id,label\n0,a\n1,b\n")
    ),
    "train_gas.py --hetero, no labels": lambda t: run(
        t, "train_gas.py", "--hetero", "--dataset", tables(t, "id,f\n0,1\n1,2\n")
    ),
    "train_gas.py, an error of another kind": unforeseen,
    "train_gas.py --dataset, unknown": lambda t: run(t, "train_gas.py", "--dataset", "coral"),
    "train_gas.py --model, not that of --config": lambda t: run(
        t, "train_gas.py", "--config", config(t, "model: gat"), "--model", "gcn"
    ),
    "train_gas.py --config, no such option": lambda t: run(
        t, "train_gas.py", "--config", config(t, "model: gat\nepoch: 3")
    ),
    "train_gas.py --config, an option in quotes": lambda t: run(
        t, "train_gas.py", "--config", config(t, 'undirected: "no"')
    ),
    "train_gas.py --config, a negative rate": lambda t: run(
        t, "train_gas.py", "--config", config(t, "lr: -1")
    ),
    "train_gas.py --config, no architecture": lambda t: run(
        t, "train_gas.py", "--config", config(t, "architecture: [gcn]")
    ),
    "train_gas.py, without tyro": without_tyro,
    "train_gas.py --out, of a run": into_another_run,
    "train_gas.py --resume --overwrite": lambda t: run(
        t, "train_gas.py", "--resume", "--overwrite"
    ),
    "train_gas.py --checkpoint-every fortnight": lambda t: run(
        t, "train_gas.py", "--checkpoint-every", "fortnight"
    ),
    "train_mh_aug.py --epochs 0": lambda t: run(t, "train_mh_aug.py", "--epochs", 0),
    "train_mh_aug.py --dataset, real targets": lambda t: run(
        t, "train_mh_aug.py", "--dataset", real_targets(t)
    ),
    "graphsaint_mh_aug.py --batches 0": lambda t: run(t, "graphsaint_mh_aug.py", "--batches", 0),
}
