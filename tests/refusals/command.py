"""Errors of the command ``gas``, and of folders of runs."""

import contextlib
import io
import json

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from torch_geometric.data import HeteroData

import gas
from gas.cli import Settings, main
from gas.cli.graphs import warn_of_one_way_edges
from gas.cli.hetero import HeteroExperiment
from refusals import ring


def run(t, *arguments):
    """Run the command in an empty folder, and leave out what it prints."""
    t.patch.chdir(t.path)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main([*map(str, arguments)])


def trained(t, **changes):
    """Return the folder of a run, with changes of its ``metrics.json``; ``None`` removes."""
    run(t, "train", "--dataset", "planted:60", "--epochs", 1)
    path = t.path / "runs" / "metrics.json"
    metrics = {**json.loads(path.read_text()), **changes}
    left = {k: v for k, v in metrics.items() if k not in changes or v is not None}
    path.write_text(json.dumps(left))
    return t.path / "runs"


def without_model(t):
    folder = trained(t)
    (folder / "model.safetensors").unlink()
    return folder


def damaged(t):
    folder = trained(t)
    (folder / "model.safetensors").write_bytes(b"cut off")
    return folder


def without_columns(t):
    folder = trained(t, graph={**graph_of_tables(t), "feature_names": ["age"]})
    return gas.load_run(folder).predict(t.path / "tables")


def lists_in_another_order(t):
    """Predict on tables with a column of lists, which come in another order."""
    changes = {**graph_of_tables(t), "feature_names": ["size", "ages"]}
    folder = trained(t, graph=changes)
    (t.path / "tables/nodes.csv").unlink()
    table = {"id": [0, 1], "ages": [[1.0, 2.0], [3.0, 4.0]], "size": [1.0, 2.0]}
    parquet.write_table(pyarrow.table(table), t.path / "tables/nodes.parquet")
    return gas.load_run(folder).predict(t.path / "tables")


def graph_of_tables(t):
    (t.path / "tables").mkdir()
    (t.path / "tables/edges.csv").write_text("source,target\n0,1\n1,0\n")
    (t.path / "tables/nodes.csv").write_text("id,size\n0,1\n1,2\n")
    return {"path": None, "root": "data", "check": True, "undirected": True, "columns": {},
            "sparse_features": False}  # fmt: skip


def without_safetensors(t):
    folder = trained(t)
    t.patch.setattr("importlib.util.find_spec", lambda name: None)
    t.patch.chdir(folder)
    return gas.load_run(".").predict()


def other_features(t):
    path = t.path / "g.npz"
    np.savez(
        path, x=np.ones((4, 2), "float32"), y=np.arange(4) % 2, edge_index=np.ones((2, 2), int)
    )
    return path


def without_jinja2(t):
    t.patch.setattr("importlib.util.find_spec", lambda name: None)
    return gas.report("runs")


def mapped(t, num_parts, **options):
    """Train on a graph folder, in place."""
    data = gas.get_data("data", "planted:60")[0]
    gas.cluster(data, num_parts, out=t.path / "graph", log=False)
    return gas.cli.Experiment(
        gas.get_data("data", str(t.path / "graph"), in_place=True)[0], 16, "sage",
        gas.cli.Settings.default("sage").replace(num_parts=2), log=False, **options,
    )  # fmt: skip


def limited(t, memory):
    """Train on a graph folder within a limit, in a process that has nothing in memory."""
    t.patch.setattr("gas.cli.setup.resident_kinds", lambda: (0.0, 0.0))
    mapped(t, 2, memory=memory)


def without_room(t):
    """Plan for a graph folder that is larger than the memory that is free."""
    gas.cluster(gas.get_data("data", "planted:60")[0], 1, out=t.path / "graph", log=False)
    t.patch.setattr("gas.cli.graphs.free_memory", lambda: 1000)
    run(t, "plan", "graph")


def inductive(t):
    """Train inductively on a graph with several splits."""
    data, _, out_channels = gas.get_data("data", "planted:60", split="all")
    settings = gas.cli.Settings.default("sage")
    gas.cli.Experiment(data, out_channels, "sage", settings, inductive=True, log=False)


def experiment(metric=None, **changes):
    """Make an experiment on a ring of four nodes."""
    settings = gas.cli.Settings.default("sage").replace(metric=metric)
    gas.cli.Experiment(ring(**changes), 2, "sage", settings, log=False)


def one_way(t):
    (t.path / "edges.csv").write_text("source,target\n0,1\n1,0\n2,0\n2,2\n")
    warn_of_one_way_edges(gas.datasets.import_graph(t.path / "edges.csv", t.path / "g", log=False))


def other_types(t, **types):
    """Predict tables of other types with the model of a heterogeneous graph."""
    rows = "".join(f"{node},shop,{node},{'ab'[node % 2]}\n" for node in range(12))
    (t.path / "tables").mkdir()
    (t.path / "tables/nodes.csv").write_text(f"id,type,size,label\n{rows}")
    (t.path / "tables/edges.csv").write_text("source,target,type\n0,1,sells\n1,2,sells\n")
    run(t, "train", "tables", "--hetero", "--epochs", 1)
    for file in ("nodes.csv", "edges.csv"):
        text = (t.path / "tables" / file).read_text()
        for old, new in types.items():
            text = text.replace(old, new)
        (t.path / "tables" / file).write_text(text)
    run(t, "predict", "runs", "--graph", "tables")


def typed(change):
    """Make an experiment on a heterogeneous graph, whose shops are changed."""
    data, rows = HeteroData(), torch.arange(8)
    data["shop"].x, data["shop"].y = rows[:, None].float(), rows % 2
    data["shop", "near", "shop"].edge_index = torch.stack([rows, rows.roll(1)])
    for number, name in enumerate(("train_mask", "val_mask", "test_mask")):
        data["shop"][name] = rows % 3 == number
    change(data["shop"])
    HeteroExperiment(data, Settings.default("sage"), log=False)


def fewer_epochs(t):
    for more in (("--epochs", 2, "--checkpoint-every", 1), ("--epochs", 1, "--resume")):
        run(t, "train", "planted:60", "--num-parts", 2, *more)


def other_parts(t):
    """Resume in a folder with the parts of another training."""
    for name, num_parts in (("graph", 1), ("runs/graph", 2)):
        data = gas.get_data("data", "planted:60")[0]
        gas.cluster(data, num_parts, out=t.path / name, log=False)
    run(t, "train", "graph", "--resume", "--num-parts", 3)


def one_way_folder(t):
    """Predict a folder without the reverses that the training added."""
    graph = {**graph_of_tables(t), "feature_names": ["size"]}
    (t.path / "tables/edges.csv").write_text("source,target\n0,1\n")
    gas.datasets.import_graph(t.path / "tables", t.path / "g", log=False)
    gas.load_run(trained(t, graph=graph)).predict(t.path / "g")


def moved(t):
    graph = {**graph_of_tables(t), "feature_names": None, "path": str(t.path / "gone")}
    gas.load_run(trained(t, graph=graph)).predict()


CASES = {
    "gas train, fewer epochs than before": fewer_epochs,
    "a graph folder of one direction": one_way_folder,
    "a graph that has moved": moved,
    "gas train, the parts of another training": other_parts,
    "gas train --drop, a certain one": lambda t: run(
        t, "train", "--augment", "drop_edge", "--drop", 1
    ),
    "gas train --memory-budget, below 0": lambda t: run(t, "train", "--memory-budget", -5),
    "HeteroExperiment, a type without masks": lambda t: typed(lambda shops: shops.pop("val_mask")),
    "HeteroExperiment, an unknown class": lambda t: typed(lambda shops: shops.y.fill_(-1)),
    "gas import, edges of one direction": lambda t: one_way(t),
    "gas predict --ids, none": lambda t: run(t, "predict", "runs", "--ids"),
    "gas train --metric, of other targets": lambda t: run(
        t, "train", "--dataset", "planted:60", "--metric", "roc_auc"
    ),
    "Experiment, r2 of classes with names": lambda t: experiment(classes=["a", "b"], metric="r2"),
    "Experiment, a single class": lambda t: experiment(y=torch.zeros(4, dtype=torch.long)),
    "Experiment, inductive with several splits": inductive,
    "Experiment, a mapped graph in too little memory": lambda t: limited(t, 1000),
    "Experiment, mini-batches in too little memory": lambda t: limited(t, 250_000),
    "gas plan, a graph folder larger than memory": without_room,
    "Experiment, a mapped graph in full batch": lambda t: mapped(t, 2, full_batch=True),
    "Experiment, a mapped graph of other parts": lambda t: mapped(t, 3),
    "Experiment, a mapped graph of one part": lambda t: mapped(t, 1),
    "Experiment, a mapped graph to partition otherwise": lambda t: mapped(t, 2, partition="random"),
    "a report, without jinja2": without_jinja2,
    "a report of a number": lambda t: gas.report(3),
    "a report next to a number": lambda t: gas.report(trained(t), 3),
    "a report to a number": lambda t: gas.report(trained(t), out=3),
    "a run of a number": lambda t: gas.load_run(3),
    "a report of no epoch": lambda t: gas.report(gas.training.Run()),
    "a folder without a run": lambda t: run(t, "verify", "nowhere"),
    "a run of an unknown model": lambda t: gas.load_run(trained(t, model="sage, typed")),
    "a graph without the type of nodes": lambda t: other_types(t, shop="person"),
    "a graph with other types of edges": lambda t: other_types(t, sells="buys"),
    "a run of an older version": lambda t: gas.load_run(trained(t, graph=None)),
    "a run without a model, damaged": lambda t: gas.load_run(damaged(t)).predict(),
    "a run without a model": lambda t: gas.load_run(without_model(t)).predict(),
    "a run, without safetensors": without_safetensors,
    "a graph with other features": lambda t: gas.load_run(trained(t)).predict(other_features(t)),
    "a graph without a column": without_columns,
    "a graph with lists in another order": lists_in_another_order,
    "an id of no node": lambda t: gas.load_run(trained(t)).predict(ids=["anna"]),
    "gas predict --out, no table": lambda t: run(t, "predict", "runs", "--out", "out.txt"),
    "gas bench --json, a folder": lambda t: run(t, "bench", "planted:60", "--json", "."),
    "gas predict --out, in a file": lambda t: run(t, "predict", "runs", "--out", "/dev/null/x.csv"),
    "gas import --columns, no role": lambda t: run(t, "import", "a", "b", "--columns", "payer"),
}
