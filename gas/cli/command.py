"""The command line program: train from each seed, then write and print the results."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from gas.cli import results
from gas.cli.checks import UsageError
from gas.cli.experiment import Experiment
from gas.cli.options import (
    describe_graph,
    explain_error,
    lock_output,
    make_checkpoints,
    make_experiment,
    parse_args,
    print_warnings_as_lines,
    remove_checkpoints,
)
from gas.cli.parser import SETTINGS, Options
from gas.cli.report import metrics, open_events
from gas.native import report_progress
from gas.training import MetricLogger, Run


def main(
    files: str | Path | None = None, arguments: Sequence[str] | None = None, prog: str | None = None
) -> None:
    """Run ``gas train``, and exit if it fails.

    Args:
        files: The folder of configurations; see ``--config``. (default: none)
        arguments: The arguments. (default: those of the process)
        prog: The name of the program, for texts. (default: that of the process)
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    prog, signals = prog or Path(sys.argv[0]).name, Signals()
    is_debugged = "--debug" in arguments
    if not is_debugged:  # One line each.
        print_warnings_as_lines()
    try:
        args = parse_args(arguments, prog, files)
        with signals.handle(), lock_output(args):
            run(args, signals)
            sys.stdout.flush()
    except BrokenPipeError:
        end_without_reader()
    except UsageError as error:
        print(f"{prog}: error: {error} (--help shows all options)", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if is_debugged:
            raise
        sys.exit(f"{prog}: error: {explain_error(error)}")


def end_without_reader() -> NoReturn:
    """Exit as the signal SIGPIPE does, after another program has stopped to read the output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For the flush at the end.
    sys.exit(141)


def run(args: Options, signals: Signals) -> None:
    """Train as the command line says, and write the results.

    Raises:
        FloatingPointError: If a run diverged, after the results of the others were written.
    """
    importlib.import_module("matplotlib")  # For the plot: fail before training if it is missing.
    for file, package in results.find_missing_packages().items():
        print(f"warning: no {file}, which needs: pip install {package}", file=sys.stderr)
    experiment = prepare(args)
    remove_checkpoints(args)
    kept = args.out / SETTINGS
    is_refusable = args.resume and kept.exists()  # By a checkpoint of other options.
    if (args.checkpoint_every is not None or args.resume) and not is_refusable:
        args.write(kept)

    training = Training(args, experiment, signals)
    runs = training.run()
    signals.wait = True
    failed = training.failed
    if runs:
        args.write(kept)
        report(args, experiment, runs, failed, bool(signals.received))
    if failed:
        several = f"{len(failed)} of {args.runs} runs failed, such as that from seed "
        name = f"{several}{failed[0]['seed']}: " if args.runs > 1 else ""
        raise FloatingPointError(f"{name}{failed[0]['reason']}")


def prepare(args: Options) -> Experiment:
    """Make the experiment, and check before training what could fail after it."""
    experiment = make_experiment(args)
    if experiment.plan is not None:
        print(f"{explain_error(str(experiment.plan))}\n")
    print(experiment.graph.shown)
    if args.verify:
        found = experiment.verify()
        print(found)
        if not found:
            raise ValueError(
                "mini-batches differ from the full batch: the table above names the first layer"
            )
    results.check_disk_space(args.out, experiment)
    return experiment


class Training:
    """Training from each seed, with a progress bar or progress lines.

    ``failed`` lists the runs that diverged: their numbers, seeds and reasons.
    """

    def __init__(self, args: Options, experiment: Experiment, signals: Signals) -> None:
        self.args, self.experiment, self.signals = args, experiment, signals
        self.failed: list[dict[str, Any]] = []
        self._runs: list[Run] = []
        self._spare: list[Run] = []  # The first that diverged behind an epoch worth keeping.
        self._run = Run()
        self._events: Any = None

    def run(self) -> list[Run]:
        """Train, and return the finished runs, or else the first with a finished epoch."""
        args = self.args
        total = args.runs * self.experiment.settings.epochs
        is_piped = not sys.stderr.isatty()  # A bar is for a terminal, lines for a file.
        with (
            tqdm(total=total, unit="epoch", disable=is_piped) as bar,
            report_progress("Training, epochs", total, log=is_piped) as lines,
        ):

            def on_epoch(run: Run) -> None:
                best = run.best_epoch
                self.signals.check()
                lines.done = sum(map(len, self._runs)) + len(run)
                lines.note = (
                    f"loss {run.loss[-1]:.3f}, val {100 * run.val_acc[best]:.2f}, "
                    f"test {100 * run.test_acc[best]:.2f}"
                )
                bar.set_postfix_str(lines.note)
                bar.update(lines.done - bar.n)
                if self._events is not None:
                    MetricLogger(self._events).on_epoch_end(run)

            try:
                for number in range(args.runs):
                    self._train(number, on_epoch)
            except KeyboardInterrupt:
                self._interrupt()
        return self._runs or self._spare

    def _train(self, number: int, on_epoch: Any) -> None:
        """Train from one seed."""
        args, run = self.args, Run()
        self._run = run
        if args.tensorboard:
            self._events = open_events(args.out / f"events/run{number}")
        saved = make_checkpoints(args, number)
        if saved is not None and saved.resumes:
            print(f"Run {number + 1} goes on from {saved.folder}", file=sys.stderr)
        elif saved is not None and args.resume:
            print(
                f"Run {number + 1} starts over: {saved.folder} has no checkpoint", file=sys.stderr
            )
        seed = args.seed + number
        try:
            self.experiment.run(seed, number, on_epoch, keep=True, run=run, checkpoints=saved)
        except FloatingPointError as error:
            self.failed.append({"run": number, "seed": seed, "reason": str(error)})
            if args.runs > 1:
                print(f"\nRun {number + 1}, from seed {seed}: {error}", file=sys.stderr)
            if run.best is not None and not self._spare:
                self._spare = [run]
            self._run = Run()
        else:
            self._runs.append(run)
            for other in {*range(len(self._runs))} - {results.best_run_index(self._runs)}:
                self._runs[other].best = None
        if self._events is not None:
            self._events.close()

    def _interrupt(self) -> None:
        """Keep what there is after Ctrl-C, and say what is kept."""
        args, run = self.args, self._run
        if self._events is not None:
            self._events.close()
        run.forget_unfinished()
        what = "reporting the runs that ended"
        if not self._runs and run.best is not None:
            self._runs, what = [run], f"reporting the epochs that ended, {len(run)}"
        elif not self._runs and not self._spare:
            what = "no epoch has ended, so there are no results"
        goes_on = ""
        if args.checkpoint_every or args.resume:
            goes_on = " To go on with the training, run the same with --resume."
        print(f"\nInterrupted: {what}.{goes_on}", file=sys.stderr)


class Signals:
    """Handler of SIGTERM and Ctrl-C: interrupt training; let files be written to the end."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.wait = False

    def __call__(self, number: int, _: Any) -> None:
        """Handle a signal."""
        self.received.append(number)
        if not self.wait:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Interrupt again: Python drops what a handler raises in a callback of a weak reference."""
        if self.received:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def handle(self) -> Iterator[None]:
        """Handle signals in this context, and end the program afterwards if there was one."""
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except KeyboardInterrupt:
            if not self.received:
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.received:
            sys.exit(128 + self.received[0])


def report(
    args: Options,
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
        "node_type": experiment.node_type,
        "histories": {
            **{key: experiment.histories.get(key) for key in ("store", "dtype", "io")},
            "micro_batches": experiment.micro_batches,
        },
        "features": {"store": args.feature_store, "dtype": args.feature_dtype},
        "graph": describe_graph(args),
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
    print(f"\n{title}")
    print_summary(experiment, runs)
    print(f"  written              {', '.join(map(str, files))}")


def print_summary(experiment: Experiment, runs: list[Run]) -> None:
    """Print scores, times and memory of the runs."""
    result, constant = metrics(runs), experiment.baseline()
    label, _, unit = results.score_name(experiment.metric).partition(", ")
    scale, unit = (100, " %") if unit else (1, "")

    def scores(key: str) -> str:
        return f"{scale * result[key]['mean']:.2f} ± {scale * result[key]['std']:.2f}{unit}"

    print(f"  {'test ' + label:<21}{scores('test_acc')}")
    same = "most frequent class" if experiment.metric == "accuracy" else "same for all nodes"
    print(f"  {same:<21}{scale * constant:.2f}{unit}")
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
    peak, own, mapped = (  # NaN where the system doesn't report it.
        (result[f"peak_{kind}_bytes"]["mean"] or float("nan")) / 2**20
        for kind in ("rss", "own", "mapped")
    )
    print(
        f"  peak memory          {own:.0f} MiB of its own; {peak:.0f} MiB with pages of mapped "
        f"files, up to {mapped:.0f} MiB, which the system can reclaim"
    )
    before = experiment.peak_before.own / 2**20
    print(f"  peak before training {before:.0f} MiB of its own, while the graph was prepared")
    if runs[0].memory is not None:
        print(f"\n{runs[0].memory.table(peak * 2**20)}\n")
