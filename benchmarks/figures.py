"""Draw the figures of README and docs from the results.

    python benchmarks/figures.py
    python benchmarks/figures.py --only memory scale

``batch``, ``choice`` and ``steps`` are drawings; the others have their numbers from ``results/``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from common import load
from matplotlib.colors import LogNorm
from matplotlib.patches import FancyArrowPatch, Rectangle
from tables import GIB, MIB, NORMS, by_seed, median_epoch

NAMES = {  # Contenders that are drawn, with their colour.
    "full batch": "black",
    "histories": "tab:blue",
    "weights of the last step": "tab:orange",
    "stale rows as they are": "tab:green",
    "64 parts": "tab:red",
}
SEEDED = {
    "full batch": ("black", "full batch"), "histories": ("tab:blue", "histories"),
    "PyG, ClusterLoader": ("tab:red", "ClusterLoader"),
    "PyG, GraphSAINT": ("tab:green", "GraphSAINT"),
}  # fmt: skip
OUT = Path(__file__).resolve().parents[1] / "docs/images"
OWN, HALO, STORED = "tab:blue", "tab:orange", "0.85"


def draw_time_to_accuracy() -> Any:
    """Draw the validation score against seconds of training, one panel for each case.

    Cases of a full batch alone are left out; seconds are without evaluation.
    """
    cases = load("time_to_accuracy")["cases"]
    cases = {case: runs for case, runs in cases.items() if len(runs) > 1}
    columns = min(2, len(cases))
    rows = -(-len(cases) // columns)
    size = (5.5 * columns, 3.2 * rows)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for panel in panels.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, (case, runs) in zip(panels.flat, cases.items(), strict=False):
        name, model, norm, lr, _ = case.split(":")
        best = max(runs["full batch"]["val"])
        end = 1.2 * runs["full batch"]["seconds"][runs["full batch"]["val"].index(best)]
        for contender, colour in NAMES.items():
            if contender in runs:
                run = runs[contender]
                panel.plot(run["seconds"], run["val"], color=colour, label=contender, linewidth=1.2)
        panel.axhline(best - 0.005, color="grey", linewidth=0.8, linestyle=":")
        panel.set(
            title=f"{name}, {model}, {NORMS[norm]}, lr {lr}", xlabel="seconds of training",
            ylabel="validation accuracy", xlim=(0, end), ylim=(best - 0.15, best + 0.02),
        )  # fmt: skip
    panels.flat[0].legend(fontsize="small", loc="lower right")
    return figure


def draw_loaders() -> Any:
    """Draw the validation score against seconds of training, a line for each seed, with loaders."""
    cases = by_seed("time_to_accuracy_seeds")
    size = (5.5 * len(cases), 3.4)
    figure, panels = plt.subplots(1, len(cases), figsize=size, squeeze=False)
    for panel, (case, seeds) in zip(panels.flat, cases.items(), strict=True):
        name, model, norm, lr = case.split(":")
        best = [max(runs["full batch"]["val"]) for runs in seeds]
        ends = [
            runs["full batch"]["seconds"][runs["full batch"]["val"].index(most)]
            for runs, most in zip(seeds, best, strict=True)
        ]
        for contender, (colour, label) in SEEDED.items():
            for position, runs in enumerate(seeds):
                run = runs[contender]
                panel.plot(
                    run["seconds"], run["val"], color=colour, linewidth=0.9,
                    label="" if position else label,
                )  # fmt: skip
        panel.set(
            title=f"{name}, {model}, {NORMS[norm]}, lr {lr}", xlabel="seconds of training",
            ylabel="validation accuracy", xlim=(0, max(ends)),
            ylim=(max(best) - 0.06, max(best) + 0.01),
        )  # fmt: skip
    panels.flat[0].legend(fontsize="small", loc="lower right")
    return figure


def draw_memory() -> Any:
    """Draw the peak memory of a training epoch against the number of layers."""
    found = [
        each for each in load("memory")["by_depth"]
        if each["device"] == "cpu" and each["settings"]["dataset"] == "planted:200000"
    ]  # fmt: skip
    depths = [each["settings"]["num_layers"] for each in found]
    figure, panel = plt.subplots(figsize=(6, 3.6))
    curves = {
        "PyG full batch": ("black", "-", 0), "gas full batch": ("grey", "-", 0),
        "ClusterLoader": ("tab:red", "-", 0), "gas": (OWN, "-", 1),
    }  # fmt: skip
    for name, (color, style, with_histories) in curves.items():
        methods = [each["methods"][name] for each in found]
        held = [m["peak_bytes"] + with_histories * m["history_bytes"] for m in methods]
        used = min(m["edges_used"] for m in methods)
        label = "gas, with its histories" if with_histories else name
        label += "" if used > 0.999 else f" (uses {used:.0%} of the edges)"
        panel.plot(
            depths, [size / MIB for size in held], style, color=color, marker="o", label=label
        )
    panel.set(
        title="generated graph of 200,000 nodes, 4 million edges, width 128", xlabel="layers",
        ylabel="peak memory, MiB", ylim=(0, None), xticks=depths,
    )  # fmt: skip
    panel.legend(fontsize="small")
    return figure


def draw_scale() -> Any:
    """Draw time and memory of an epoch against the number of edges."""
    found = load("hundred_million")["results"]
    edges = [each["edges"] / 1e6 for each in found]
    stages = [each["train"]["stages"] for each in found]
    epochs = [each[max(name for name in each if name.startswith("epoch"))] for each in stages]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4))
    for panel, label, values in (
        (panels[0], "seconds of an epoch", [epoch["seconds"] for epoch in epochs]),
        (panels[1], "peak memory of the process, GiB", [e["peak_bytes"] / GIB for e in epochs]),
    ):
        panel.loglog(edges, values, color=OWN, marker="o")
        for x, y in zip(edges, values, strict=True):
            panel.annotate(f"{y:.3g}", (x, y), (4, -11), textcoords="offset points", fontsize=8)
        panel.margins(0.15)
        panel.set(xlabel="edges, millions", title=label)
        panel.grid(alpha=0.3)
    return figure


def draw_out_of_core() -> Any:
    """Draw the time of an epoch in little memory, relative to that with enough of it."""
    found = load("out_of_core")
    ways = {way["way"]: way for way in found["ways"]}
    names = {
        "memory": "all in memory", "hot": "packed on disk, hot rows in memory",
        "packed": "packed on disk", "mapped": "mapped files",
    }  # fmt: skip
    shown = {label: median_epoch(ways[way]) for way, label in names.items() if way in ways}
    first = shown["all in memory"]
    figure, panel = plt.subplots(figsize=(7, 2.6))
    bars = panel.barh(list(shown), [seconds / first for seconds in shown.values()], color=OWN)
    panel.bar_label(bars, [f" {seconds / first:.1f}x" for seconds in shown.values()], fontsize=9)
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set(
        xlim=(0.8, 100),
        xlabel="time of an epoch over that in memory",
    )
    panel.set_title(
        f"{found['nodes']:,} nodes: {ways['memory']['rss'] / GIB:.1f} GiB in memory, the others in "
        f"{found['limit'] / GIB:.1f} GiB", fontsize=10,
    )  # fmt: skip
    return figure


def draw_operators() -> Any:
    """Draw the time of a forward and backward pass over that of gas: layers, and products."""
    size = ["uniform", 50_000, 20, 64]  # In-degrees, nodes, edges per node, width.
    found: dict[str, dict[str, float]] = {}
    for each in load("operators")["results"]:
        operator, *rest = each["case"]
        if rest == size:
            medians = {name: of["both"]["median"] for name, of in each["contenders"].items()}
            found[operator] = medians
    layers = {name: of for name, of in found.items() if name != "spmm"}
    figure, panels = plt.subplots(
        2, 1, figsize=(7, 5.4), sharex=True, height_ratios=[2 * len(layers) + 1, 3.6]
    )
    colors = iter((HALO, OWN, "tab:green", "tab:red", "tab:purple"))
    for panel, shown in ((panels[0], layers), (panels[1], {"spmm": found["spmm"]})):
        names = [name for name in next(iter(shown.values())) if name != "gas"]
        height = 0.8 / len(names)
        for number, name in enumerate(names):
            values = [of[name] / of["gas"] for of in shown.values()]
            places = [row + height * (number - (len(names) - 1) / 2) for row in range(len(shown))]
            bars = panel.barh(places, values, height, label=name, color=next(colors))
            panel.bar_label(bars, [f" {value:.1f}x" for value in values], fontsize=9)
        labels = [f"{name}, {1e3 * of['gas']:.0f} ms" for name, of in shown.items()]
        panel.set_yticks(range(len(shown)), labels)
        panel.invert_yaxis()
        panel.set_xscale("log")
        panel.axvline(1, color="black", linewidth=0.8)
        panel.legend(fontsize="small", loc="upper right")
    _, nodes, degree, width = size
    panels[0].set_title(f"{nodes:,} nodes, {nodes * degree:,} edges, width {width}", fontsize=10)
    panels[0].set_xlim(0.8, 300)
    panels[1].set_xticks([1, 3, 10, 30, 100], ["1 (gas)", "3", "10", "30", "100"])
    panels[1].set_xlabel("time of forward and backward, over that of gas")
    return figure


def draw_staleness() -> Any:
    """Draw the error of stored rows by layer and epoch, one panel for each norm."""
    runs = {norm: run["errors"] for norm, run in load("staleness")["runs"].items()}
    every = [error for errors in runs.values() for epoch in errors for error in epoch]
    scale = LogNorm(min(every), max(every))
    figure, panels = plt.subplots(len(runs), 1, figsize=(7, 3.4), sharex=True, layout="compressed")
    for panel, (norm, errors) in zip(panels, runs.items(), strict=True):
        rows = list(zip(*errors, strict=True))
        edges = [each + 0.5 for each in range(len(errors) + 1)]
        drawn = panel.pcolormesh(edges, range(len(rows) + 1), rows, norm=scale, cmap="YlOrRd")
        panel.set_yticks([row + 0.5 for row in range(len(rows))], range(1, len(rows) + 1))
        panel.set(title=NORMS[norm], ylabel="layer")
    panels[-1].set_xlabel("epoch")
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 1.0, 2.0) if scale.vmin <= tick <= scale.vmax]
    bar = figure.colorbar(drawn, ax=panels, label="error of stored rows, |h - h*| / |h*|")
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    return figure


def draw_batch() -> Any:
    """Draw a mini-batch, its halo, and the history between two layers."""
    figure, panel = plt.subplots(figsize=(8, 3.6))
    rows = {"own": range(3, 6), "halo": (1, 7, 9)}
    for number, column in enumerate((0.0, 4.6)):
        for row in range(11):
            kind = next((name for name, found in rows.items() if row in found), "")
            color = {"own": OWN, "halo": HALO if number else STORED}.get(kind, "white")
            panel.add_patch(Rectangle((column, -row), 0.9, 0.8, facecolor=color, edgecolor="0.5"))
        panel.text(column + 0.45, 1.4, f"layer {number + 1}", ha="center", fontsize=11)
    for row in range(11):
        kind = next((name for name, found in rows.items() if row in found), "")
        color = {"own": OWN, "halo": HALO}.get(kind, STORED)
        panel.add_patch(Rectangle((2.3, -row), 0.9, 0.8, facecolor=color, edgecolor="0.5"))
    panel.text(2.75, 1.4, "history", ha="center", fontsize=11)
    for row in rows["own"]:
        panel.add_patch(arrow((0.95, 0.4 - row), (2.25, 0.4 - row), OWN))
    for row in rows["halo"]:
        panel.add_patch(arrow((3.25, 0.4 - row), (4.55, 0.4 - row), HALO))
    for row in rows["own"]:
        panel.add_patch(arrow((0.95, 0.4 - row), (4.55, 0.4 - row), OWN, 0.25))
    texts = [
        (OWN, "own nodes of the mini-batch:", "computed, and pushed to the history"),
        (HALO, "halo, their neighbours:", "rows pulled from the history"),
        ("0.6", "all other nodes:", "neither computed nor read"),
    ]
    for number, (color, first, second) in enumerate(texts):
        panel.text(6.1, -1.2 - 3 * number, first, color=color, fontsize=11, weight="bold")
        panel.text(6.1, -2.3 - 3 * number, second, fontsize=10)
    panel.set(xlim=(-0.3, 11.2), ylim=(-10.4, 2.2))
    panel.axis("off")
    return figure


# A graph of nine nodes in three parts, and how high each node is drawn.
EDGES = [
    (0, 1),
    (1, 2),
    (0, 2),
    (2, 3),
    (3, 4),
    (4, 5),
    (3, 5),
    (5, 6),
    (6, 7),
    (7, 8),
    (6, 8),
    (1, 4),
]
HEIGHTS = [0.0, 0.9, 0.1, 0.0, 0.9, 0.1, 0.0, 0.9, 0.1]


def draw_steps() -> Any:
    """Draw how old the rows of a history are while batches of one part are computed in turn."""
    figure, panels = plt.subplots(4, 1, figsize=(5.2, 9.6))
    ages = [0] * 9
    for step, panel in enumerate(panels.flat):
        own = range(3 * step - 3, 3 * step) if step else range(0)
        halo = {a if b in own else b for a, b in EDGES if (a in own) != (b in own)}
        ages = [0 if node in own else age + (step > 0) for node, age in enumerate(ages)]
        title = (
            f"step {step}: the batch is part {step}"
            if step
            else "model.refresh: all rows are exact"
        )
        panel.set_title(title, fontsize=13)
        for a, b in EDGES:
            heights = (1.8 + HEIGHTS[a], 1.8 + HEIGHTS[b])
            read = a in own or b in own
            panel.plot((a, b), heights, color="0.3" if read else "0.8", linewidth=1.2, zorder=1)
        for node, age in enumerate(ages):
            color = OWN if node in own else HALO if node in halo else "white"
            height = 1.8 + HEIGHTS[node]
            panel.scatter(node, height, 190, color=color, edgecolor="0.5", zorder=2)
            row = Rectangle(
                (node - 0.4, -0.4), 0.8, 0.8, facecolor=f"{1 - 0.18 * age}", edgecolor="0.5"
            )
            panel.add_patch(row)
            panel.text(node, 0, f"{age}", ha="center", va="center", fontsize=13)
            if node in own:
                panel.add_patch(arrow((node, height - 0.2), (node, 0.45), OWN))
            elif node in halo:
                panel.add_patch(arrow((node, 0.45), (node, height - 0.2), HALO))
        panel.text(
            -0.7, -0.95, "history: steps since each row was computed", fontsize=11, color="0.4"
        )
        panel.set(xlim=(-0.8, 8.8), ylim=(-1.2, 3.2))
        panel.axis("off")
    return figure


def draw_choice() -> Any:
    """Draw the questions that tell whether histories suit a graph and a model."""
    questions = {
        "Is every batch\nanother graph,\nsuch as a molecule?":
            "no: PyG's DataLoader,\nwithout histories",
        "Does a full batch\nfit in memory, and is\nit fast enough?":
            "rather not: train in\nfull batch, which\ngas.nn makes faster",
        "Must a step take\narbitrary few nodes\nof a huge graph?":
            "rather not: PyG's\nNeighborLoader needs\nno partition",
        "Does a layer need all\nnodes at once, such as\nglobal attention?":
            "no: such layers are\nrefused; use attention\nalong edges",
    }  # fmt: skip
    figure, panel = plt.subplots(figsize=(5.2, 7.6))
    box = {"boxstyle": "round,pad=0.5", "edgecolor": "0.5"}
    for number, (question, advice) in enumerate(questions.items()):
        y = -2.2 * number
        panel.add_patch(arrow((0, y), (2.75, y), HALO))
        panel.add_patch(arrow((0, y), (0, y - 1.55), OWN))
        style: dict[str, Any] = {"va": "center", "fontsize": 13}
        panel.text(0, y, question, ha="center", bbox=box | {"facecolor": STORED}, **style)
        panel.text(3.0, y, advice, ha="left", bbox=box | {"facecolor": "white"}, **style)
        panel.text(2.3, y + 0.25, "yes", ha="center", color=HALO, **style)
        panel.text(0.12, y - 1.15, "no", color=OWN, **style)
    y = -2.2 * len(questions)
    panel.text(
        0, y, "yes: gas", ha="center", va="center", fontsize=15, weight="bold", color="white",
        bbox=box | {"facecolor": OWN},
    )  # fmt: skip
    panel.set(xlim=(-1.7, 5.7), ylim=(y - 0.5, 0.8))
    panel.axis("off")
    return figure


def arrow(start: tuple[float, float], end: tuple[float, float], color: str, bend: float = 0) -> Any:
    """Return an arrow between two points."""
    shape = f"arc3,rad={bend}"
    return FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=9, color=color, linewidth=1.2,
        connectionstyle=shape, alpha=0.35 if bend else 1.0,
    )  # fmt: skip


MAKERS: tuple[Callable[[], Any], ...] = (
    draw_batch, draw_choice, draw_loaders, draw_memory, draw_operators, draw_out_of_core,
    draw_scale, draw_staleness, draw_steps, draw_time_to_accuracy,
)  # fmt: skip
FIGURES = {each.__name__.removeprefix("draw_"): each for each in MAKERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(FIGURES), default=list(FIGURES))
    parser.add_argument("--out", type=Path, default=OUT, help="the folder (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        figure = FIGURES[name]()
        if figure.get_layout_engine() is None:
            figure.tight_layout()
        with plt.rc_context({"svg.hashsalt": "gas"}):
            figure.savefig(args.out / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
