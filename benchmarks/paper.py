"""The tables of the paper: every model on every data set, with histories and in full batch.

    python benchmarks/paper.py --root data                              # all small data sets
    python benchmarks/paper.py --root data --dataset Cora --model gat --runs 20
    python benchmarks/paper.py --root data --suite other --jobs 2

A cell is a file of settings in ``paper_small/``, ``paper_large/`` (both published) or ``other/``
(ours). Run ``k`` starts from seed ``k`` and uses split ``k``. A run's test score is that of the
epoch with the best validation score. Both ways of training take the settings of the cell, and so
the same number of epochs; a full batch is one step per epoch. After every epoch of training with
histories the evaluation refreshes them, as the published experiments do. Features of few non-zeros
are sparse, as ``gas train`` takes them.

Runs that have ended are kept in ``results/SUITE/``, one line of JSON each; a second call goes on
where the first one was stopped. The table is made of these lines. Cells whose data is not on disk
are listed as not run.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, make_parser, markdown, save
from tqdm import tqdm

from gas.cli import MODELS, Experiment, Settings
from gas.cli.report import machine, summary
from gas.datasets import dataset_key, get_data
from gas.graph import with_sparse_features

HERE = Path(__file__).resolve().parent
SUITES = {"small": "paper_small", "large": "paper_large", "other": "other"}
WAYS = ("histories", "full_batch")


@functools.lru_cache(maxsize=1)
def prepare(cell: Path, way: str, root: str) -> Experiment:
    """Return the experiment of a cell, kept for the runs that follow in this process."""
    settings, about = Settings.load(cell)
    data, _, out_channels = get_data(root, about["dataset"], split="all")
    data = with_sparse_features(data, "auto", MODELS[about["model"]].gains_by_sparse, log=False)
    return Experiment(
        data,
        out_channels,
        about["model"],
        settings,
        full_batch=way == "full_batch",
        log=False,
    )


def run(
    cell: Path, way: str, number: int, settings: Settings, root: str, threads: int
) -> dict[str, Any]:
    """Train once; return its record."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    experiment = prepare(cell, way, root)
    if Settings.load(cell)[0] != settings:
        raise ValueError(f"{cell} was changed while it was run: start again")
    result = experiment.run(number, split=number)
    best = result.best_epoch
    where = machine()
    return {
        "run": number,
        "test": result.test_acc[best],
        "val": result.val_acc[best],
        "best_epoch": best + 1,
        "final_loss": result.loss[-1],
        "seconds": time.perf_counter() - start,
        "train_epoch_seconds": result.epoch_seconds,
        "date": datetime.date.today().isoformat(),
        "machine": {key: where[key] for key in ("cpu", "threads", "gpu", "torch")},
        "settings": asdict(settings),
    }


def deaf() -> None:
    """Leave Ctrl-C to the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def file_of(cell: Path, way: str) -> Path:
    return RESULTS / cell.parent.name / f"{cell.stem}_{way}.jsonl"


def finished(cell: Path, way: str) -> dict[int, dict[str, Any]]:
    """Return the runs of a cell that have ended, by number.

    Raises:
        ValueError: If they were made with other settings.
    """
    file = file_of(cell, way)
    runs: dict[int, dict[str, Any]] = {}
    if not file.exists():
        return runs
    settings, _ = Settings.load(cell)
    for line in file.read_text().splitlines():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:  # Cut off while it was written.
            continue
        if Settings(**result["settings"]).replace(runs=1) != settings.replace(runs=1):
            raise ValueError(f"{file} holds runs with other settings than {cell}: remove it")
        runs[result["run"]] = result
    return runs


def keep(file: Path, result: dict[str, Any]) -> None:
    """Append a line, even after a last line that was cut off."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torn = file.exists() and not file.read_text().endswith("\n")
    with file.open("a") as stream:
        stream.write("\n" * torn + json.dumps(result) + "\n")


def is_here(dataset: str, root: str) -> str:
    """Return the reason why a data set can't be loaded; empty if it can."""
    try:
        get_data(root, dataset)
    except (ConnectionError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(args: argparse.Namespace, cells: list[Path]) -> dict[Path, str]:
    """Run the missing cells; return those that can't be run, and the reasons."""
    missing: dict[Path, str] = {}
    tasks = []
    reasons: dict[str, str] = {}
    for cell in cells:
        settings, about = Settings.load(cell)
        name = about["dataset"]
        if name not in reasons:
            reasons[name] = "" if args.table_only else is_here(name, args.root)
        if reasons[name]:
            missing[cell] = reasons[name]
            continue
        for way in args.ways:
            done = finished(cell, way)
            wanted = range(args.runs or settings.runs)
            tasks += [(cell, way, number, settings) for number in wanted if number not in done]
    if args.table_only or not tasks:
        return missing
    threads = args.threads or max(1, (os.cpu_count() or 1) // args.jobs)
    start = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
    with (
        ProcessPoolExecutor(args.jobs, start, deaf) as pool,
        tqdm(total=len(tasks), unit="run", disable=None) as progress,
    ):
        try:
            futures = {pool.submit(run, *task, args.root, threads): task for task in tasks}
            for future in as_completed(futures):
                cell, way, number, _ = futures[future]
                progress.update()
                error = future.exception()
                if error is None:
                    keep(file_of(cell, way), future.result())
                else:  # The others go on.
                    print(f"{cell.stem}, {way}, run {number}: {error}", file=sys.stderr)
                    missing[cell] = f"failed: {error}"
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    return missing


def table(cells: list[Path], missing: dict[Path, str]) -> tuple[list[dict[str, Any]], str]:
    content, rows = [], []
    for cell in cells:
        settings, about = Settings.load(cell)
        entry: dict[str, Any] = {"dataset": about["dataset"], "model": about["model"]}
        row = [about["dataset"], about["model"]]
        for way in WAYS:
            runs = [result for _, result in sorted(finished(cell, way).items())]
            if not runs:
                reason = missing.get(cell, "")
                entry[way] = {"not_run": reason or "not asked for"}
                row += ["failed" if "failed" in reason else "no data" if reason else "not run"]
                continue
            test = summary([r["test"] for r in runs])
            entry[way] = {
                "test": test,
                "val": summary([r["val"] for r in runs]),
                "runs": len(runs),
                "seconds": sum(r["seconds"] for r in runs),
                "train_epoch_seconds": statistics.median(r["train_epoch_seconds"] for r in runs),
                "machines": sorted({json.dumps(r["machine"], sort_keys=True) for r in runs}),
            }
            row += [f"{100 * test['mean']:.2f} ± {100 * test['std']:.2f} ({len(runs)})"]
        published = about.get("published")
        entry["published"] = published
        spread = published.get("std") if published else None
        row += [
            ""
            if published is None
            else f"{published['mean']:.2f}" + (f" ± {spread:.2f}" if spread else "")
        ]
        both = all("test" in entry[way] for way in WAYS)
        means = [100 * entry[way]["test"]["mean"] if both else 0.0 for way in WAYS]
        row += [f"{means[0] - means[1]:+.2f}" if both else ""]
        times = [entry[way].get("train_epoch_seconds") for way in WAYS]
        row += [" / ".join("-" if t is None else f"{1000 * t:.0f}" for t in times)]
        row += [settings.metric or "accuracy"]
        content.append(entry)
        rows.append(row)
    header = ["graph", "model", "histories, % (runs)", "full batch, % (runs)", "published"]
    header += ["histories - full batch", "training epoch, ms", "score"]
    return content, markdown(header, rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--suite", default="small", choices=sorted(SUITES))
    parser.add_argument("--dataset", nargs="*", help="some of the data sets (all)")
    parser.add_argument("--model", nargs="*", help="some of the models (all)")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--runs", type=int, help="runs of each cell (those of its settings)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run at the same time")
    parser.add_argument("--threads", type=int, help="of each process (all cores shared out)")
    parser.add_argument("--table-only", action="store_true", help="make the table of what is there")
    args = parser.parse_args()

    folder = HERE / SUITES[args.suite]
    # A generated graph has no name until its size is given: those settings are no cell.
    every = sorted(
        cell for cell in folder.glob("*.yaml") if Settings.load(cell)[1]["dataset"] != "planted"
    )
    chosen = []
    for cell in every:
        _, about = Settings.load(cell)
        keys = [dataset_key(name) for name in args.dataset or [about["dataset"]]]
        if dataset_key(about["dataset"]) in keys and about["model"] in (
            args.model or [about["model"]]
        ):
            chosen.append(cell)
    if not chosen:
        parser.error(f"no settings in {folder.name}/ fit: there are {[c.stem for c in every]}")
    try:
        missing = work(args, chosen)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted: the same call goes on with the runs that are missing.")
    except ValueError as error:
        sys.exit(f"paper.py: error: {error}")
    content, made = table(every, missing)
    save(SUITES[args.suite], {"cells": content}, made)


if __name__ == "__main__":
    main()
