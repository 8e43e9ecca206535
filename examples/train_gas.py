"""Trains a graph neural network with historical embeddings and reports how it went.

    python examples/train_gas.py                                   # a generated graph, no network
    python examples/train_gas.py --dataset Cora --root data --model gat --runs 10
    python examples/train_gas.py --dataset my_graph --undirected   # nodes.csv and edges.csv
    python examples/train_gas.py --dataset my_graph.npz --num-parts 100 --batch-size 10
    python examples/train_gas.py --dataset Cora --root data --augment mh_aug

Into ``--out`` it writes ``metrics.json`` (scores, of every epoch), ``curve.png``, and the model of
the best epoch by validation: its parameters, ``model.safetensors``, and what it predicts of every
node, ``predictions.parquet``, in the order and by the ids of the graph as it was given. Ctrl-C
keeps what there is; with ``--checkpoint-every 1``, or ``10min``, a run that was killed goes on by
``--resume``, as if it had not been. Settings that are not given are those of ``benchmarks/``, for
the data sets and models it has: the published ones, where there are some.
"""

from __future__ import annotations

import sys

try:
    import argparse
    import contextlib
    import dataclasses
    import importlib
    import signal
    import warnings
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from tqdm import tqdm

    from gas.training import Experiment, Run, results
    from gas.training.options import (
        checkpoints_of,
        in_options,
        make_experiment,
        parse_args,
        remove_checkpoints,
    )
    from gas.training.report import EventWriter, metrics
except KeyboardInterrupt:  # It takes seconds.
    sys.exit(130)

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def main(args: argparse.Namespace, signals: Signals) -> None:
    importlib.import_module("matplotlib")  # For the plot; missing, it is better missed now.
    for file, package in results.missing_packages().items():
        print(f"warning: no {file}, which needs: pip install {package}", file=sys.stderr)
    experiment = make_experiment(args, BENCHMARKS)
    if experiment.plan is not None:
        print(f"{experiment.plan}\n")
    print(experiment.graph.shown)
    if args.verify:
        found = experiment.verify()
        print(found)
        if not found:
            raise ValueError("mini-batches don't give what the graph gives: see above")
    args.out.mkdir(parents=True, exist_ok=True)  # What can fail should fail before training.
    results.check_room(args.out, experiment)
    remove_checkpoints(args)

    runs = train(args, experiment)
    signals.wait = True
    if runs:
        report(args, experiment, runs, bool(signals.came))


def train(args: argparse.Namespace, experiment: Experiment) -> list[Run]:
    """The runs that have ended, or what there is of the first."""
    runs: list[Run] = []
    run, events = Run(), None
    total = args.runs * experiment.settings.epochs
    with tqdm(total=total, unit="epoch", disable=None) as progress:

        def on_epoch(run: Run) -> None:
            best = run.best_epoch
            progress.set_postfix_str(
                f"loss {run.loss[-1]:.3f}, val {100 * run.val_acc[best]:.2f}, "
                f"test {100 * run.test_acc[best]:.2f}"
            )
            progress.update(sum(map(len, runs)) + len(run) - progress.n)
            if events is not None:
                events.write(run)

        try:
            for number in range(args.runs):
                run = Run()
                if args.tensorboard:
                    events = EventWriter(args.out / f"events/run{number}")
                saved = checkpoints_of(args, number)
                if saved is not None and saved.resumes:
                    print(f"Run {number + 1} goes on from {saved.folder}", file=sys.stderr)
                experiment.run(
                    args.seed + number, number, on_epoch, keep=True, run=run, checkpoints=saved
                )
                runs.append(run)
                if events is not None:
                    events.close()
                for other in {*range(len(runs))} - {results.kept(runs)}:
                    runs[other].best = None
        except KeyboardInterrupt:
            if events is not None:
                events.close()
            run.forget_unfinished()
            what = "reporting the runs that ended"
            if not runs and run.best is not None:
                runs, what = [run], f"reporting the epochs that ended, {len(run)}"
            elif not runs:
                what = "no epoch has ended, and nothing is written"
            goes_on = ""
            if args.checkpoint_every or args.resume:
                goes_on = " To go on with the training, run the same with --resume."
            print(f"\nInterrupted: {what}.{goes_on}", file=sys.stderr)
    return runs


class Signals:
    """SIGTERM does what Ctrl-C does; while files are written, both wait until they are."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.wait = False

    def __call__(self, number: int, _: Any) -> None:
        self.came.append(number)
        if not self.wait:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """In this context; ends the program afterwards, if any came."""
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except KeyboardInterrupt:
            if not self.came:
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.came:
            sys.exit(128 + self.came[0])


def report(
    args: argparse.Namespace, experiment: Experiment, runs: list[Run], interrupted: bool
) -> None:
    """Writes the files and prints the summary."""
    settings = experiment.settings
    how = "full batch" if args.full_batch else f"{settings.num_parts} parts"
    shape = "x".join(str(settings.architecture[k]) for k in ("num_layers", "hidden_channels"))
    title = f"{args.model} {shape} on {args.dataset}, {how}, {len(runs)} run{'s' * (len(runs) > 1)}"
    about = {
        "dataset": args.dataset,
        "model": args.model,
        "histories": {
            **{key: experiment.histories.get(key) for key in ("store", "dtype", "io")},
            "micro_batches": experiment.micro_batches,
        },
        "features": {"store": args.feature_store, "dtype": args.feature_dtype},
        "plan": None if experiment.plan is None else experiment.plan.summary(),
        "augment": args.augment,
        "training": "full_batch" if args.full_batch else "histories",
        "interrupted": interrupted,
        "settings": dataclasses.asdict(settings),
        "seed": args.seed,
        "device": args.device,
    }
    files = results.write_results(args.out, experiment, runs, title, about)
    result, constant = metrics(runs), experiment.baseline()
    label, _, unit = results.score_name(experiment.metric).partition(", ")
    scale, unit = (100, " %") if unit else (1, "")

    def scores(key: str) -> str:
        return f"{scale * result[key]['mean']:.2f} ± {scale * result[key]['std']:.2f}{unit}"

    print(f"\n{title}")
    if result["final_loss"]["mean"] is None:
        print("  the loss is not finite: training diverged; try a smaller --lr")
    print(f"  {'test ' + label:<21}{scores('test_acc')}")
    print(f"  {'same for all nodes':<21}{scale * constant:.2f}{unit}")
    print(f"  {'validation ' + label:<21}{scores('val_acc')}")
    print(f"  training epoch       {1000 * result['train_epoch_seconds']['mean']:.1f} ms")
    stored, moved = result["history_bytes"]["mean"], result["moved_bytes"]["mean"]
    print(
        f"  histories            {stored / 2**20:.1f} MiB, {moved / 2**20:.1f} MiB moved per epoch"
    )
    if result["chain"]:
        chain = {key: value["mean"] for key, value in result["chain"].items()}
        print(
            f"  MH-Aug               {100 * chain['acceptance_rate']:.1f} % of "
            f"{chain['steps']:.0f} transitions accepted, {chain['mean_edge_drop']:.3f} of edges "
            f"and {chain['mean_node_drop']:.3f} of nodes dropped, "
            f"{chain['distinct_states']:.0f} states"
        )
    peak = result["peak_rss_bytes"]["mean"] or float("nan")  # Not every system tells.
    print(f"  peak memory          {peak / 2**20:.0f} MiB resident")
    if runs[0].memory is not None:
        before = experiment.peak_before / 2**20
        print(f"  ... until training   {before:.0f} MiB, while the graph was prepared")
        print(f"\n{runs[0].memory.table(peak)}\n")
    print(f"  written              {', '.join(map(str, files))}")


if __name__ == "__main__":
    options = parse_args()
    if not options.debug:  # One line each.
        warnings.showwarning = lambda text, *_, **__: print(f"warning: {text}", file=sys.stderr)
    signals = Signals()
    try:
        with signals.heard():
            main(options, signals)
    except Exception as error:
        if options.debug:
            raise
        sys.exit(f"train_gas.py: error: {in_options(error, options)}")
