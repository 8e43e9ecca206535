"""Trains a graph neural network with historical embeddings and reports how it went.

    python examples/train_gas.py                                   # a generated graph, no network
    python examples/train_gas.py --dataset Cora --root data --model gat --runs 10
    python examples/train_gas.py --dataset my_graph --undirected   # nodes.csv and edges.csv
    python examples/train_gas.py --dataset my_graph --hetero       # a column 'type' in them
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

    from gas.cli import Experiment, results
    from gas.cli.hetero import HeteroExperiment
    from gas.cli.options import (
        alone,
        checkpoints_of,
        in_options,
        make_experiment,
        parse_args,
        remove_checkpoints,
    )
    from gas.cli.report import EventWriter, metrics
    from gas.native.progress import report_progress
    from gas.training import Run
except KeyboardInterrupt:  # It takes seconds.
    sys.exit(130)

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def main(args: argparse.Namespace, signals: Signals) -> None:
    importlib.import_module("matplotlib")  # For the plot; missing, it is better missed now.
    for file, package in results.missing_packages().items():
        print(f"warning: no {file}, which needs: pip install {package}", file=sys.stderr)
    experiment = HeteroExperiment(args) if args.hetero else prepare(args)
    remove_checkpoints(args)

    runs, failed = train(args, experiment)
    signals.wait = True
    if runs and isinstance(experiment, HeteroExperiment):
        experiment.write(runs, failed, bool(signals.came))
    elif runs:
        report(args, experiment, runs, failed, bool(signals.came))
    if failed:
        several = f"{len(failed)} of {args.runs} runs failed, such as that from seed "
        name = f"{several}{failed[0]['seed']}: " if args.runs > 1 else ""
        raise FloatingPointError(f"{name}{failed[0]['reason']}")


def prepare(args: argparse.Namespace) -> Experiment:
    """Make the experiment, and have fail before training what can fail."""
    experiment = make_experiment(args, BENCHMARKS)
    if experiment.plan is not None:
        print(f"{experiment.plan}\n")
    print(experiment.graph.shown)
    if args.verify:
        found = experiment.verify()
        print(found)
        if not found:
            raise ValueError("mini-batches don't give what the graph gives: see above")
    results.check_room(args.out, experiment)
    return experiment


def train(
    args: argparse.Namespace, experiment: Experiment | HeteroExperiment
) -> tuple[list[Run], list[dict[str, Any]]]:
    """Train from each seed.

    Returns:
        The runs that have ended, or else what there is of the first that has not; and of those that
        diverged their numbers, seeds and reasons.
    """
    runs: list[Run] = []
    failed: list[dict[str, Any]] = []
    spare: list[Run] = []  # The first that diverged behind an epoch worth keeping.
    run, events = Run(), None
    total = args.runs * experiment.settings.epochs
    piped = not sys.stderr.isatty()  # A bar is for a terminal, lines for a file.
    with (
        tqdm(total=total, unit="epoch", disable=piped) as progress,
        report_progress("Training, epochs", total, log=piped) as lines,
    ):

        def on_epoch(run: Run) -> None:
            best = run.best_epoch
            lines.done = sum(map(len, runs)) + len(run)
            lines.note = (
                f"loss {run.loss[-1]:.3f}, val {100 * run.val_acc[best]:.2f}, "
                f"test {100 * run.test_acc[best]:.2f}"
            )
            progress.set_postfix_str(lines.note)
            progress.update(lines.done - progress.n)
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
                elif args.resume:
                    print(
                        f"Run {number + 1} starts over: {saved.folder} has no checkpoint",
                        file=sys.stderr,
                    )
                seed = args.seed + number
                try:
                    experiment.run(seed, number, on_epoch, keep=True, run=run, checkpoints=saved)
                except FloatingPointError as error:
                    failed.append({"run": number, "seed": seed, "reason": str(error)})
                    if args.runs > 1:
                        print(f"\nRun {number + 1}, from seed {seed}: {error}", file=sys.stderr)
                    if run.best is not None and not spare:
                        spare = [run]
                    run = Run()
                else:
                    runs.append(run)
                    for other in {*range(len(runs))} - {results.kept(runs)}:
                        runs[other].best = None
                if events is not None:
                    events.close()
        except KeyboardInterrupt:
            if events is not None:
                events.close()
            run.forget_unfinished()
            what = "reporting the runs that ended"
            if not runs and run.best is not None:
                runs, what = [run], f"reporting the epochs that ended, {len(run)}"
            elif not runs and not spare:
                what = "no epoch has ended, and nothing is written"
            goes_on = ""
            if args.checkpoint_every or args.resume:
                goes_on = " To go on with the training, run the same with --resume."
            print(f"\nInterrupted: {what}.{goes_on}", file=sys.stderr)
    return runs or spare, failed


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
    args: argparse.Namespace,
    experiment: Experiment,
    runs: list[Run],
    failed: list[dict[str, Any]],
    interrupted: bool,
) -> None:
    """Write the files and print the summary."""
    settings = experiment.settings
    how = "full batch" if args.full_batch else f"{settings.num_parts} parts"
    shape = "x".join(str(settings.architecture[k]) for k in ("num_layers", "hidden_channels"))
    title = f"{args.model} {shape} on {args.dataset}, {how}, {len(runs)} run{'s' * (len(runs) > 1)}"
    if runs[0].split in [each["run"] for each in failed]:
        title += " until it diverged"
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
        "failed": failed,
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
    peak, own, mapped = (  # Not every system tells.
        (result[f"peak_{kind}_bytes"]["mean"] or float("nan")) / 2**20
        for kind in ("rss", "own", "mapped")
    )
    print(
        f"  peak memory          {own:.0f} MiB of its own; {peak:.0f} MiB with pages of mapped "
        f"files, up to {mapped:.0f} MiB, which the system can reclaim"
    )
    before = experiment.peak_before.own / 2**20
    print(f"  ... until training   {before:.0f} MiB of its own, while the graph was prepared")
    if runs[0].memory is not None:
        print(f"\n{runs[0].memory.table(peak * 2**20)}\n")
    print(f"  written              {', '.join(map(str, files))}")


if __name__ == "__main__":
    options = parse_args()
    if not options.debug:  # One line each.
        warnings.showwarning = lambda text, *_, **__: print(
            f"warning: {in_options(text, options)}", file=sys.stderr
        )
    signals = Signals()
    try:
        with signals.heard(), alone(options):
            main(options, signals)
    except Exception as error:
        if options.debug:
            raise
        sys.exit(f"train_gas.py: error: {in_options(error, options)}")
