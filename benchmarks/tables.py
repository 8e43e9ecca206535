"""Write the tables of README and docs from the results, so that no number is typed.

    python benchmarks/tables.py            # Rewrites the pages.
    python benchmarks/tables.py --check    # Fails if a page differs from the results.

A table stands between ``<!-- table NAME, by benchmarks/tables.py -->`` and
``<!-- end of table -->``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, load, markdown
from grid import FULL, HISTORIES, RATES, best_rate, is_done
from time_to_accuracy import BELOW, best_of, first_above

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(
    r"(<!-- table (?P<name>\w+), by benchmarks/tables\.py -->\n).*?(<!-- end of table -->)",
    re.DOTALL,
)
NORMS = {"none": "no norm", "batch": "BatchNorm"}
MODELS = {"SAGE": "GraphSAGE"}
GIB, MIB = 2**30, 2**20


def columns_of(
    name: str, names: dict[int, str], number: int = 0, only: tuple[int, str] | None = None
) -> str:
    """Return some columns of a table that a script has printed, with other names.

    Args:
        name: The name of its results.
        names: The new names, by the positions of columns.
        number: The position of the table among those of the script. (default: ``0``)
        only: A column, and what it has in the rows that are shown. (default: all rows)
    """
    text = (RESULTS / f"{name}.md").read_text()
    lines = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)[number].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    shown = [row for row in rows if only is None or row[only[0]] == only[1]]
    return markdown(list(names.values()), [[row[at] for at in names] for row in shown])


def seconds_until(run: dict[str, Any], score: float) -> float | None:
    """Return the seconds of training until the validation score is reached, if it is."""
    epoch = first_above(run, score)
    return None if epoch is None else run["seconds"][epoch]


def median_epoch(way: dict[str, Any]) -> float:
    """Return the median seconds of an epoch of ``out_of_core.py``, if possible after the first."""
    epochs = way["epochs"][1:] or way["epochs"]
    return statistics.median(epoch["seconds"] for epoch in epochs)


def by_seed(*names: str) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each case, of all seeds; those of the first file that has the case."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        grouped: dict[str, list[dict[str, Any]]] = {}
        for case, runs in load(name)["cases"].items():
            grouped.setdefault(case.rsplit(":", 1)[0], []).append(runs)
        found = {**grouped, **found}
    return found


def until_best(runs: dict[str, Any], contender: str) -> float:
    """Return the seconds to the full batch's best less half a point; infinite if not reached."""
    seconds = seconds_until(runs[contender], max(runs[FULL]["val"]) - BELOW)
    return math.inf if seconds is None else seconds


def spread(values: Sequence[float], longest: float = math.inf) -> str:
    """Return the median of some seconds, and their range, if there are several."""
    middle = statistics.median(values)
    text = f"not reached in {longest:.0f} s" if math.isinf(middle) else f"{middle:.1f} s"
    if len(values) == 1 or math.isinf(middle):
        return text
    most = "not reached" if math.isinf(max(values)) else f"{max(values):.1f}"
    return f"{text} ({min(values):.1f} to {most})"


def time_to_accuracy() -> str:
    """Seconds to the accuracy of our own full batch, with histories and without."""
    rows = []
    for case, seeds in by_seed(
        "time_to_accuracy_seeds", "time_to_accuracy_large", "time_to_accuracy"
    ).items():
        if "histories" not in seeds[0]:
            continue
        graph, model, norm, lr = case.rsplit(":", 3)
        ways = FULL, "histories"
        longest = max(runs["histories"]["seconds"][-1] for runs in seeds)
        best = [statistics.median(max(runs[name]["val"]) for runs in seeds) for name in ways]
        rows.append([
            graph, f"{MODELS.get(model, model)}, {NORMS[norm]}, lr {lr.lstrip('0')}", len(seeds),
            *(spread([until_best(runs, name) for runs in seeds], longest) for name in ways),
            f"{100 * best[0]:.1f} %, {100 * best[1]:.1f} %",
        ])  # fmt: skip
    head = "graph|model|seeds|our own full batch|histories, an eighth of the graph per step"
    return markdown([*head.split("|"), "best validation accuracy of both"], rows)


CASES = {
    "GraphSAGE, BatchNorm, lr .005": "AmazonComputers:SAGE:batch:0.005:seed 0",
    "GCN, BatchNorm, lr .01": "AmazonComputers:GCN:batch:0.01:seed 0",
}
LOADERS = {
    "histories": "histories, 1/8 of the graph per step",
    "1/32 of the graph per step": "histories, 1/32 of the graph per step",
    "with warm-up": "histories, with a warm-up of 40 steps",
    "PyG, GraphSAINT": "GraphSAINT, random walks",
    "PyG, ClusterLoader": "ClusterLoader, the same parts",
    "full batch": "our full batch",
    "PyG, full batch": "PyG's full batch",
    "PyG, NeighborLoader 10, 10, 10": "NeighborLoader, 10 neighbours in each of 3 layers",
    "PyG, NeighborLoader 15, 10, 5": "NeighborLoader, 15, 10 and 5",
}
PARTS = {
    "histories": "`gas.fit`, 512 parts, 64 per batch",
    "64 parts": "64 parts, 8 per batch",
    "no clipping": "`grad_norm=None`",
    "stale rows as they are": "`correct_drift=False`",
    "weights of the last step": "`average_weights=False`",
}
SHARES = {
    "1 (full batch)": "full batch",
    **{f"1/{n}": f"1/{n} of the graph per step" for n in (2, 4)},
    "1/8": "histories",
    **{f"1/{n}": f"1/{n} of the graph per step" for n in (16, 32)},
}


def steps_until(run: dict[str, Any], score: float) -> int | None:
    """Return the steps until the validation score is reached, if it is."""
    epoch = first_above(run, score)
    return None if epoch is None else (epoch + 1) * run["steps"]


def loaders_by_seed() -> str:
    """Best scores and seconds to accuracy of histories and of PyG's loaders, of three seeds."""
    ways = FULL, "histories", "PyG, ClusterLoader", "PyG, GraphSAINT"
    found, rows = by_seed("time_to_accuracy_seeds"), []
    for name in ways:
        row = [LOADERS[name]]
        for seeds in found.values():
            best = [100 * max(runs[name]["val"]) for runs in seeds]
            tests = [100 * runs[name]["test"][best_of(runs[name])] for runs in seeds]
            row += [
                f"{statistics.mean(best):.1f} % ({statistics.mean(tests):.1f})",
                spread([until_best(runs, name) for runs in seeds], seeds[0][name]["seconds"][-1]),
            ]
        rows.append(row)
    models = (MODELS.get(kind, kind) for _, kind, *_ in (case.split(":") for case in found))
    head = [f"{model}: {what}" for model in models for what in ("best (its test)", "to accuracy")]
    return markdown(["", *head], rows)


def loaders() -> str:
    """Seconds to accuracy of histories and of PyG's loaders."""
    return against_loaders("time_to_accuracy_pyg")


def large() -> str:
    """Seconds to accuracy of the same on a generated graph of 20 million edges."""
    return against_loaders("time_to_accuracy_large")


def within_memory() -> str:
    """Seconds to the best score of all less half a point, within a limit of memory."""
    rows = []
    for case, runs in load("time_to_accuracy_memory")["cases"].items():
        model = case.split(":")[2]
        best = max(score for run in runs.values() for score in run["val"])
        for contender, run in runs.items():
            row = [MODELS.get(model, model), LOADERS[contender]]
            if run["val"]:
                seconds = seconds_until(run, best - BELOW)
                step = run["seconds"][-1] / len(run["seconds"]) / run["steps"]
                took = spread([math.inf if seconds is None else seconds], run["seconds"][-1])
                row += [f"{100 * max(run['val']):.1f} %", took, f"{step:.1f} s"]
                row.append(f"{run['peak'] / GIB:.1f} GiB")
            else:
                row += [run["error"], "", "", ""]
            rows.append(row)
    return markdown(["model", "", "best", "to accuracy", "a step", "peak"], rows)


def allocators() -> str:
    """Time and memory of an epoch by the allocator of the process."""
    names = {0: "", 1: "allocator", 2: "epoch", 3: "over glibc's", 4: "the system's", 5: "peak"}
    return columns_of("allocators", names)


def against_loaders(name: str) -> str:
    """Return the contenders of a run of time_to_accuracy.py on one graph."""
    (runs,) = load(name)["cases"].values()
    own, rows = until_best(runs, FULL), []
    for contender, label in LOADERS.items():
        if contender not in runs:
            continue
        run, seconds = runs[contender], until_best(runs, contender)
        took = spread([seconds], run["seconds"][-1])
        ratio = "" if math.isinf(seconds) else f"{seconds / own:.2f}"
        rows.append([label, f"{100 * max(run['val']):.1f} %", took, ratio])
    return markdown(["", "best", "to accuracy", "over our full batch's"], rows)


PAPERS = {
    "full batch": "our full batch",
    "histories": "histories, 1/8 of the graph per step",
    "pyg_autoscale": "pyg_autoscale, the same batches",
    "refreshed every 4 steps": "all histories computed anew every 4 steps",
    "a batch forward alone per step (REST)": "REST: another batch forward alone after each step",
    "age weights (VISAGNN)": "VISAGNN's weights of stale rows by age",
    "momentum .5 (GraphFM-OB)": "GraphFM-OB: stale rows mixed with incomplete new ones",
    "LMC, beta 0": "LMC, beta 0: gradients of the halo from a table",
    "LMC, beta .4": "LMC, beta .4: these, and incomplete new rows",
    "TOP": "TOP: combinations of own rows, no histories",
    "first layer's halo fresh": "the halo's first hidden rows computed anew",
}


def from_papers() -> str:
    """Return best scores, seconds to accuracy and seconds per epoch of contenders from papers."""
    cases, rows = load("time_to_accuracy_papers")["cases"], []
    graphs = "AmazonComputers", "Cornell5"
    for contender, label in PAPERS.items():
        row = [label]
        for graph in graphs:
            runs = cases[f"{graph}:SAGE:batch:0.005:seed 0"]
            run = runs.get(contender)
            if run is None:
                row += ["not measured", "", ""]
                continue
            seconds = seconds_until(run, max(runs["full batch"]["val"]) - BELOW)
            epoch = statistics.median(b - a for a, b in itertools.pairwise(run["seconds"]))
            row += [
                f"{100 * max(run['val']):.1f} %",
                f"not in {run['seconds'][-1]:.0f} s" if seconds is None else f"{seconds:.1f} s",
                f"{epoch:.2f} s",
            ]
        rows.append(row)
    head = (f"{graph}: best|to accuracy|an epoch" for graph in graphs)
    return markdown(["", *"|".join(head).split("|")], rows)


def parts_of_fit() -> str:
    """Steps to accuracy without each part of ``gas.fit``."""
    found = load("time_to_accuracy")["cases"]
    rows = []
    for contender, label in PARTS.items():
        cells = []
        for case in CASES.values():
            run = found[case][contender]
            steps = steps_until(run, max(found[case]["full batch"]["val"]) - BELOW)
            low, high = (100 * f(run["val"][-10:]) for f in (min, max))
            reached = "not reached" if steps is None else f"{steps}"
            best = 100 * max(run["val"])
            cells.append(f"{reached}, {best:.1f}, {low:.1f} to {high:.1f}")
        rows.append([label, *cells])
    return markdown(["", *CASES], rows)


def shares() -> str:
    """Steps and seconds to accuracy by the share of the graph per step."""
    found = load("time_to_accuracy")["cases"]
    rows = []
    for label, case in CASES.items():
        runs = found[case]
        goal = max(runs["full batch"]["val"]) - BELOW
        for unit, count, form in (
            ("steps", steps_until, "{:.0f}"), ("seconds", seconds_until, "{:.1f} s"),
        ):  # fmt: skip
            values = [count(runs[name], goal) for name in SHARES.values()]
            first = values[0]
            rest = ["not reached" if v is None else f"{v / first:.2f}" for v in values[1:]]
            rows.append([f"{label.split(',')[0]}: {unit}", f"1 ({form.format(first)})", *rest])
    return markdown(["share of the graph per step", *SHARES], rows)


def depth() -> str:
    """Best validation scores and seconds to accuracy, by the number of layers."""
    rows = []
    for case, runs in load("time_to_accuracy_depth")["cases"].items():
        full = runs["full batch"]
        goal = max(full["val"]) - BELOW
        until = seconds_until(full, goal)
        assert until is not None  # It is the full batch's own score.
        row = [case.split(":")[1].split("-")[1], f"{100 * max(full['val']):.1f} %, {until:.1f} s"]
        for name in ("with warm-up", "PyG, ClusterLoader"):
            seconds, best = seconds_until(runs[name], goal), 100 * max(runs[name]["val"])
            ratio = "not reached" if seconds is None else f"{seconds / until:.2f}"
            row.append(f"{best:.1f} %, {ratio}")
        rows.append(row)
    return markdown(["layers", "our full batch", "histories", "ClusterLoader"], rows)


def tuned_classics() -> str:
    """Scores of models with searched settings, and seconds to accuracy."""
    return columns_of("tuned_classics", {
        0: "graph, model", 1: "published test score", 2: "full batch: best validation (its test)",
        5: "histories", 4: "full batch to accuracy, s", 7: "histories, s",
        8: "over the full batch",
    })  # fmt: skip


def epochs_of(name: str, contenders: dict[str, str] | None = None) -> str:
    """Median time of an epoch, and ratios to gas; of all contenders, unless some are given."""
    cases, rows = load(name)["cases"], []
    others = [each for each in next(iter(cases.values()))["ratio_over_gas"] if each != "gas"]
    contenders = contenders or dict(zip(others, others, strict=True))
    for graph, case in cases.items():
        settings = case["settings"]
        model = f"GCN {settings['num_layers']}x{settings['hidden_channels']}"
        rows.append([
            graph, f"{model}, {settings['num_parts']} / {settings['batch_size']}",
            f"{1e3 * case['seconds']['gas']['median']:.1f} ms",
            *(f"{case['ratio_over_gas'][each]:.2f}x" for each in contenders),
        ])  # fmt: skip
    return markdown(["graph", "model, parts / per batch", "gas", *contenders.values()], rows)


def epoch_time() -> str:
    """Time of an epoch against full batches and ClusterLoader."""
    names = {
        "gas, converted": "converted from PyG", "gas full batch": "gas, full batch",
        "PyG full batch": "PyG, full batch", "ClusterLoader": "ClusterLoader",
    }  # fmt: skip
    return epochs_of("epoch_time_own", names)


def contenders() -> str:
    """Time of an epoch against all contenders, those that need torch-sparse among them."""
    return epochs_of("epoch_time")


def score(found: dict[str, Any], scale: float) -> str:
    """Return a mean and a standard deviation."""
    mean, std = (scale * found[key] for key in ("mean", "std"))
    return f"{mean:.2f} ± {std:.2f}"


def cora() -> str:
    """Test accuracy on Cora, next to the published one."""
    names = {"gcn": "GCN", "gat": "GAT", "appnp": "APPNP", "gcn2": "GCNII, 64 layers"}
    cells = {
        cell["model"]: cell for cell in load("paper_small")["cells"] if cell["dataset"] == "Cora"
    }
    rows = []
    for model, name in names.items():
        cell = cells[model]
        runs = cell["histories"]["runs"]
        own = [score(cell[key]["test"], 100) for key in ("histories", "full_batch")]
        rows.append([f"{name}, {runs} seeds", *own, score(cell["published"], 1)])
    return markdown(["Cora, public split", "histories", "full batch", "published, histories"], rows)


def few_labels() -> str:
    """Test accuracy with 20 labels of each class, by the settings of the paper."""
    names, rows = {"gcn": "GCN", "gat": "GAT", "appnp": "APPNP", "gcn2": "GCNII"}, []
    for cell in load("paper_small")["cells"]:
        if cell["dataset"] == "Cora" or "test" not in cell["histories"]:
            continue
        own = [score(cell[key]["test"], 100) for key in ("histories", "full_batch")]
        runs = cell["histories"]["runs"]
        rows.append([f"{cell['dataset']}, {names[cell['model']]}", str(runs), *own])
    return markdown(["graph, model", "runs", "histories", "full batch"], rows)


def headline() -> str:
    """Four figures for the top of README."""
    scale = load("hundred_million")["results"][-1]
    last = max(name for name in scale["train"]["stages"] if name.startswith("epoch"))
    epoch = scale["train"]["stages"][last]
    seeds = by_seed("time_to_accuracy_seeds")["AmazonComputers:SAGE:batch:0.005"]
    until = [
        statistics.median(until_best(runs, name) for runs in seeds) for name in (FULL, "histories")
    ]
    disk = load("out_of_core")
    ways = {way["way"]: way for way in disk["ways"]}
    medians = [median_epoch(ways[name]) for name in ("memory", "hot")]
    depth = next(
        each for each in load("memory")["by_depth"]
        if each["device"] == "cpu" and each["settings"]["dataset"] == "planted:200000"
        and each["settings"]["num_layers"] == 6
    )["methods"]  # fmt: skip
    held = depth["gas"]["peak_bytes"] + depth["gas"]["history_bytes"]
    same = "the same" if ways["memory"]["outputs"] == ways["hot"]["outputs"] else "other"
    sooner = (
        f"GraphSAGE on AmazonComputers is within half a point of the best accuracy of our own full "
        f"batch after {until[1]:.1f} s of training; the full batch itself after {until[0]:.1f} s "
        f"(medians of {len(seeds)} seeds)"
    )
    large = (
        f"{scale['edges'] / 1e6:.0f} million edges on two cores: an epoch in "
        f"{epoch['seconds']:.0f} s and {epoch['peak_bytes'] / GIB:.1f} GiB"
    )
    within = load("time_to_accuracy_memory")["cases"]["planted:5000000:SAGE:batch:0.01:seed 0"]
    if within[FULL]["error"] == "out of memory":
        best = max(score for run in within.values() for score in run["val"])
        seconds = seconds_until(within["histories"], best - BELOW)
        large += f"; GraphSAGE, whose full batch doesn't fit 20 GiB, to accuracy in {seconds:.0f} s"
    less = (
        f"6 layers, every edge used: {held / MIB:,.0f} MiB, histories among them; "
        f"{depth['PyG full batch']['peak_bytes'] / MIB:,.0f} MiB for PyG's full batch"
    )
    core = (
        f"training that takes {ways['memory']['rss'] / GIB:.1f} GiB, in "
        f"{disk['limit'] / GIB:.1f} GiB: {medians[1] / medians[0]:.1f} times as long, {same} "
        "outputs"
    )
    rows = [
        ["time to accuracy", sooner], ["scale", large], ["memory", less], ["out of core", core],
    ]  # fmt: skip
    return markdown(["", "measured on two CPU cores"], rows)


def grid() -> str:
    """Return the best learning rate of each of both: validation scores, and seconds to accuracy."""
    cases, rows = load("grid")["cases"], []
    for cell in dict.fromkeys(case.rsplit(":", 1)[0] for case in cases):
        if not is_done(cases, cell):
            continue
        graph, model, norm = cell.rsplit(":", 2)
        chosen = {way: best_rate(cases, cell, way) for way in (FULL, HISTORIES)}
        full, ours = (cases[f"{cell}:{rate}"][way] for way, rate in chosen.items())
        until = [seconds_until(run, max(full["val"]) - BELOW) for run in (full, ours)]
        rows.append([
            graph, f"{MODELS.get(model, model)}, {NORMS[norm]}",
            *(f"{100 * max(run['val']):.1f} % (lr {rate.lstrip('0')})"
              for run, rate in zip((full, ours), chosen.values(), strict=True)),
            f"{until[0]:.1f} s",
            f"{until[1]:.1f} s" if until[1] else f"not reached in {ours['seconds'][-1]:.0f} s",
            f"{until[1] / until[0]:.2f}" if until[0] and until[1] else "",
            fastest_ratio(cases, cell, max(full["val"]) - BELOW),
        ])  # fmt: skip
    header = "graph|model|full batch|histories|full batch to accuracy|histories|over the full batch"
    return markdown([*header.split("|"), "each at its fastest rate"], rows)


def fastest_ratio(cases: dict[str, Any], cell: str, score: float) -> str:
    """Return the time of histories over the full batch's, at the rates that reach a score first."""
    first = []
    for way in (FULL, HISTORIES):
        times = (seconds_until(cases[f"{cell}:{rate}"][way], score) for rate in RATES)
        first.append(min((each for each in times if each is not None), default=None))
    full, ours = first
    return f"{ours / full:.2f}" if full and ours else ""


def precompute() -> str:
    """Return epochs with and without sums of features that are computed once."""
    rows = []
    for case, found in load("precompute")["cases"].items():
        graph, model, parts, batch, width = case.rsplit(":", 4)
        old, new = (found[way]["median"] for way in ("without", "with"))
        rows.append([
            graph if width == "0" else f"{graph}, {width} features",
            MODELS.get(model, model),
            "full batch" if parts == "1" else f"{parts} / {batch}",
            f"{1e3 * old:.0f} ms", f"{1e3 * new:.0f} ms", f"{new / old:.2f}",
            f"{found['bytes'] / MIB:.0f} MiB",
        ])  # fmt: skip
    header = "graph|model|parts / per batch|without|with|with / without|memory of the sums"
    return markdown(header.split("|"), rows)


def baselines() -> str:
    """Test accuracy without edges, without features, and of GraphSAGE with both."""
    cases, rows = load("time_to_accuracy")["cases"], []
    for graph, found in load("baselines")["graphs"].items():
        runs = cases.get(f"{graph}:SAGE:batch:0.005:seed 0", {})
        best = [
            f"{100 * run['test'][best_of(run)]:.1f}"
            if (run := runs.get(contender)) else "not measured"
            for contender in ("full batch", "histories")
        ]  # fmt: skip
        mlp = statistics.mean(test for _, test in found["mlp"])
        rows.append([graph, f"{100 * mlp:.1f}", f"{100 * found['propagation'][1]:.1f}", *best])
    head = ["test accuracy, %", "MLP", "label propagation", "GraphSAGE, full batch", "histories"]
    return markdown(head, rows)


FIRST_SOURCES = (
    "PyG models", "PyG", "OGB", "tunedGNN", "GPRGNN", "GCNII", "Non-Homophily", "NodeFormer",
    "GraphGym", "GreatX", "Deep_GCN_Benchmarking", "SGCN",
)  # fmt: skip


def published() -> str:
    """Return how many published classes, and modes of them, convert, by source."""
    results = load("published_models")["results"]
    further = {each["source"] for each in results}.difference(FIRST_SOURCES)
    by_row: dict[str, list[dict[str, Any]]] = {name: [] for name in FIRST_SOURCES}
    for result in results:
        name = result["source"]
        row = f"{len(further)} further collections" if name in further else name
        by_row.setdefault(row, []).append(result)
    rows = []
    for name, found in {**by_row, "**all**": results}.items():
        classes = {(each["source"], each["file"], each["name"]) for each in found}
        good = [each for each in found if each["result"] == "converted"]
        converted = {(each["source"], each["file"], each["name"]) for each in good}
        rows.append([name, f"{len(converted)} of {len(classes)}", f"{len(good)} of {len(found)}"])
    return markdown(["source", "classes", "cases"], rows)


def memory() -> str:
    """Peak memory of an epoch on the CPU, and the share of edges that it uses."""
    names = {
        0: "graph", 2: "layers", 3: "PyG full batch", 4: "gas full batch", 6: "ClusterLoader",
        7: "gas", 8: "gas, with histories", 9: "over gas full batch",
    }  # fmt: skip
    return columns_of("memory", names, 0, (1, "cpu"))


def memory_by_size() -> str:
    """Peak memory of an epoch, as graphs grow and parts don't."""
    names = {
        0: "graph", 1: "nodes", 3: "gas", 4: "over the smallest",
        5: "nodes of a batch and its halo", 6: "histories, not counted",
    }  # fmt: skip
    return columns_of("memory", names, 1, (2, "cpu"))


def memory_of_process() -> str:
    """Peak memory of a process that trains a deep GCN, libraries included, and its epochs."""
    names = {0: "graph", 1: "training", 2: "whole process", 3: "over gas full batch",
             4: "epoch", 5: "over that of gas full batch"}  # fmt: skip
    return columns_of("memory", names, 2)


OPERATORS = {
    "GCNConv, 64 wide": ("GCNConv", 64), "SAGEConv, 64 wide": ("SAGEConv", 64),
    "GATConv, 8 heads of 8": ("GATConv", 64), "GATConv, 8 heads of 32": ("GATConv", 256),
    "GATv2Conv, 8 heads of 8": ("GATv2Conv", 64), "EdgeConv, 64 wide": ("EdgeConv", 64),
    "GMMConv, 3 kernels, 64 wide": ("GMMConv", 64),
}  # fmt: skip


def operators() -> str:
    """Time and memory of layers, forward and backward, with 20 edges a node."""
    rows = []
    for label, (name, width) in OPERATORS.items():
        found = next(
            each["contenders"] for each in load("operators")["results"]
            if each["case"] == [name, "uniform", 50_000, 20, width]
        )  # fmt: skip
        own, pyg = found["gas"], found["PyG, edge_index"]
        rows.append([
            label, f"{1e3 * own['both']['median']:.3g} ms",
            f"{pyg['both']['median'] / own['both']['median']:.1f}x",
            f"{pyg['peak_bytes'] / own['peak_bytes']:.1f}x",
        ])  # fmt: skip
    return markdown(["layer", "gas", "PyG, time", "PyG, memory"], rows)


def out_of_core() -> str:
    """Epochs in a third of the memory that they would take, and what the disk moves."""
    names = {
        0: "", 1: "epoch", 2: "ratio", 3: "read", 4: "written", 7: "rows found in memory",
        8: "test accuracy",
    }  # fmt: skip
    return columns_of("out_of_core", names)


def own_settings() -> str:
    """Test scores on two graphs with our settings, by model."""
    models = {"gcn": "GCN", "sage": "GraphSAGE", "gin": "GIN", "gat": "GAT", "gcn2": "GCNII"}
    cells = {(each["dataset"], each["model"]): each for each in load("other")["cells"]}
    rows = [
        [f"{graph}, {way.replace('_', ' ')}",
         *(f"{100 * cells[graph, model][way]['test']['mean']:.2f}" for model in models)]
        for graph in ("FacebookPagePage", "Minesweeper") for way in ("histories", "full_batch")
    ]  # fmt: skip
    return markdown(["", *models.values()], rows)


def chosen_parts() -> str:
    """Epochs of the parts with labels, and of all parts."""
    some, rows = "by labels, others every 10", []
    for found in load("chosen_parts")["found"]:
        where, parts, batch = found["case"]
        accuracy = {
            way: statistics.median(run[way]["accuracy"] for run in found["runs"])
            for way in (some, "all parts")
        }
        ratio = statistics.median(
            run[some]["epoch_seconds"] / run["all parts"]["epoch_seconds"] for run in found["runs"]
        )
        scores = (f"{100 * score:.1f} %" for score in accuracy.values())
        rows.append([where, f"{parts} / {batch}", f"{ratio:.2f}x", *scores])
    head = (
        "labelled nodes|parts / per batch|time of an epoch, over all parts'|accuracy|of all parts"
    )
    return markdown(head.split("|"), rows)


def balance() -> str:
    """Shares of edges that are cut, and how unequal labels are among parts."""
    rows = []
    for found in load("balance")["found"]:
        graph, parts, labelled = found["case"]
        cells = []
        for runs in found["runs"].values():
            cut, most, of_class = (
                statistics.median(run[key] for run in runs) for key in ("cut", "labelled", "class")
            )
            cells.append(f"{100 * cut:.1f} % ({most:.1f}, {of_class:.1f})")
        share = "140 nodes" if labelled is None else f"{100 * labelled:.0f} %"
        rows.append([f"{graph}, {parts}", share, *cells])
    head = 'graph, parts|labelled|METIS|`balance=data.train_mask`|`balance="train_mask"`'
    return markdown(head.split("|"), rows)


def sparse_features() -> str:
    """Compare epochs with dense and with sparse features, on two threads."""
    rows = []
    for case in load("sparse_features")["cases"]:
        if case["threads"] != 2:
            continue
        ratios = (
            case["seconds"][f"{way}, dense"]["median"] / case["seconds"][f"{way}, sparse"]["median"]
            for way in ("histories", "full batch")
        )
        graph, features, share = case["graph"].rsplit(", ", 2)
        rows.append([f"{graph}, {features}", share, *(f"{ratio:.2f} times" for ratio in ratios)])
    return markdown(["features", "not zero", "with histories", "full batch"], rows)


def dynamic() -> str:
    """Time to add nodes to a graph, and to recompute what follows."""
    return columns_of("dynamic", {0: "new nodes", 1: "`update`", 2: "`update_histories`"})


def ranks_validation() -> str:
    """Predictions of the simulator beside what local processes took."""
    names = {
        0: "nodes", 1: "processes", 2: "CPU time, predicted", 3: "measured", 4: "",
        7: "bytes sent, predicted", 8: "measured",
    }  # fmt: skip
    return columns_of("ranks", names, -1)


CORE, FASTER = "1 core, measured", "100 times as fast, assumed"
RANKS_COLUMNS = {
    "one core, 10 Gbit/s": (CORE, "10 Gbit/s"), "accelerator, 10 Gbit/s": (FASTER, "10 Gbit/s"),
    "accelerator, 100 Gbit/s": (FASTER, "100 Gbit/s"),
}  # fmt: skip


def ranks_simulated() -> str:
    """Extrapolated epochs of several ranks on a graph of 1.6 billion edges."""
    found = {
        (each["kind"], each["machines"], each["processor"], each["link"]): each
        for each in load("ranks")["simulated"] if each["graph"] == "papers100M"
    }  # fmt: skip
    rows = []
    for kind in ("planted", "R-MAT", "R-MAT, weighed"):
        for count in (1, 4, 16, 64) if kind == "planted" else (4, 16, 64):
            cells = [found[(kind, count, *column)] for column in RANKS_COLUMNS.values()]
            rows.append([
                kind, str(count),
                *(f"{each['epoch_seconds']:,.1f} s, {each['speed_up']:.1f} times"
                  for each in cells),
                f"{cells[0]['replicas_per_node']:.1f}", f"{cells[0]['sent_bytes'] / GIB:.0f} GiB",
                f"{cells[0]['memory_bytes'] / GIB:.0f} GiB",
            ])  # fmt: skip
    head = [*RANKS_COLUMNS, "replicas per node", "sent by a rank", "memory of a rank"]
    return markdown(["111 million nodes, 1.6 billion edges", "ranks", *head], rows)


MAKERS: tuple[Callable[[], str], ...] = (
    allocators, within_memory, large, memory_by_size, memory_of_process, ranks_simulated,
    balance, chosen_parts, contenders, dynamic, memory, operators, out_of_core, own_settings,
    ranks_validation, sparse_features, headline, loaders, loaders_by_seed, from_papers,
    parts_of_fit, shares, depth, few_labels, grid, baselines, precompute, published,
    time_to_accuracy, epoch_time, cora, tuned_classics,
)  # fmt: skip
TABLES = {each.__name__: each for each in MAKERS}


def rewrite(text: str) -> str:
    """Return a page with its tables written anew."""
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found['name']]()}\n\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail if a page differs"
    )
    args = parser.parse_args()
    differ = []
    for page in PAGES:
        text = page.read_text()
        new = rewrite(text)
        if new != text:
            differ.append(page.name)
            if not args.check:
                page.write_text(new)
    if args.check and differ:
        sys.exit(f"{', '.join(differ)} differ from the results: run python benchmarks/tables.py")


if __name__ == "__main__":
    main()
