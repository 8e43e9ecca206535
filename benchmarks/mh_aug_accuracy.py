"""Test accuracy with MH-Aug, over several seeds, and with its loss alone, without its chain.

    python benchmarks/mh_aug_accuracy.py --root data --jobs 2

Trains as ``examples/train_mh_aug.py`` does: the published settings of Cora, selection by validation
accuracy. "Vanilla" is cross entropy on the graph alone. "Frozen chain" has the same loss
and the same three forward passes, but the chain never leaves its first state, the graph itself: the
views differ by dropout only. With "milder view as teacher" the divergence between the two views has
no gradient towards the one that is augmented less; otherwise it has one towards both. Histories: 40
parts, 10 per batch, each epoch of 4 steps. Rows of earlier runs that are not run now stay in the
table.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import load, make_parser, markdown, save

from gas.cli import summary
from gas.datasets import get_data

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import train_mh_aug

MODELS = tuple(train_mh_aug.MODELS)
TRAININGS = {"full batch": [], "histories": ["--histories"]}
WAYS = {
    "MH-Aug": [],
    "milder view as teacher": ["--teacher"],
    "frozen chain": ["--num-steps", "0"],
    "vanilla": [],
}
PUBLISHED = {
    "gcn, full batch, MH-Aug": "85.16 ± .35",
    "gcn, full batch, vanilla": "81.54",
    "sage, full batch, MH-Aug": "84.70",
    "sage, full batch, vanilla": "79.78",
    "gat, full batch, MH-Aug": "84.95",
    "gat, full batch, vanilla": "82.23",
}


def run(
    options: Sequence[str], way: str = "MH-Aug", runs: int = 1, threads: int = 1
) -> dict[str, Any]:
    """Train from several seeds by the example, with some options; return means and deviations."""
    torch.set_num_threads(threads)
    given = [*options, *WAYS[way]]
    found = []
    for seed in range(runs):
        args = train_mh_aug.parse_args([*given, "--seed", str(seed)])
        data, _, num_classes = get_data(args.root, args.dataset)
        done, chain = train_mh_aug.train(args, data, num_classes, way != "vanilla")
        best = done.best_epoch
        scores = {"val": done.val_acc[best], "test": done.test_acc[best]}
        found.append({**scores, **chain._asdict()})
    return {key: summary([each[key] for each in found]) for key in found[0]}


def row(name: str, metrics: dict[str, Any]) -> list[str]:
    def accuracy(key: str) -> str:
        return f"{100 * metrics[key]['mean']:.2f} ± {100 * metrics[key]['std']:.2f}"

    def of_chain(key: str, form: str) -> str:
        return form.format(metrics[key]["mean"]) if metrics["steps"]["mean"] else "-"

    return [
        *name.split(", "),
        accuracy("test"),
        PUBLISHED.get(name, ""),
        accuracy("val"),
        of_chain("acceptance_rate", "{:.1%}"),
        of_chain("mean_edge_drop", "{:.3f}"),
        of_chain("mean_node_drop", "{:.3f}"),
        of_chain("distinct_states", "{:.0f}"),
        of_chain("steps", "{:.0f}"),
        str(len(metrics["test"]["values"])),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="rows that run at the same time")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--trainings", nargs="*", default=list(TRAININGS), choices=list(TRAININGS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()

    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    common = ["--dataset", "Cora", "--root", args.root]
    spawn = multiprocessing.get_context("spawn")
    results = load("mh_aug_accuracy").get("results", {})  # Of what is not run now.
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool:
        futures = {
            f"{model}, {training}, {way}": pool.submit(
                run, ["--model", model, *TRAININGS[training], *common], way, args.runs, threads
            )
            for model in args.models
            for training in args.trainings
            for way in args.ways
        }
        results |= {name: future.result() for name, future in futures.items()}
    order = [f"{m}, {training}, {way}" for m in MODELS for training in TRAININGS for way in WAYS]
    header = [
        "model",
        "training",
        "way",
        "test accuracy, %",
        "published",
        "validation",
        "accepted",
        "mean k/m, edges",
        "mean k/n, nodes",
        "distinct states",
        "transitions",
        "seeds",
    ]
    rows = [row(name, results[name]) for name in order if name in results]
    save("mh_aug_accuracy", {"results": results}, markdown(header, rows))


if __name__ == "__main__":
    main()
