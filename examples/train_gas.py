"""Trains a graph neural network with historical embeddings and reports how it went.

    python examples/train_gas.py                                   # a generated graph, no network
    python examples/train_gas.py --dataset Cora --root data --model gat --runs 10
    python examples/train_gas.py --dataset my_graph.npz --num-parts 100 --batch-size 10
    python examples/train_gas.py --dataset Cora --root data --augment mh_aug

Writes ``metrics.json`` and ``curve.png`` into ``--out``. Settings that are not given are those of
``benchmarks/``, for the data sets and models it has: the published ones, where there are some.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch_geometric.data import Data
from tqdm import tqdm

import gas
from gas.augment import PUBLISHED, Augmentation, DropEdge, mh_aug_loss
from gas.datasets import dataset_key, dataset_names, get_data
from gas.history.codec import NAMES as CODECS
from gas.history.engine import MODES
from gas.history.tiers import TIERS
from gas.training import METRICS, MODELS, Experiment, Run, Settings
from gas.training.experiment import EVALUATIONS, REFRESHES
from gas.training.report import EventWriter, machine, metrics, plot_curves, write_json

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=f"data sets: {', '.join(dataset_names())}; planted:NUM_NODES; a .pt or .npz file",
    )
    parser.add_argument("--dataset", default="planted:20000", help="name or path (%(default)s)")
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument("--model", choices=sorted(MODELS), help="(that of --config, or gcn)")
    parser.add_argument("--config", type=Path, help="a YAML file of settings, as in benchmarks/")

    group = parser.add_argument_group("settings, instead of those of the configuration")
    group.add_argument("--num-layers", type=int)
    group.add_argument("--hidden-channels", type=int)
    group.add_argument("--dropout", type=float)
    group.add_argument("--num-parts", type=int)
    group.add_argument("--batch-size", type=int, help="parts per mini-batch")
    group.add_argument("--epochs", type=int)
    group.add_argument("--lr", type=float)
    group.add_argument("--grad-norm", type=float, help="bound of gradient clipping")
    group.add_argument("--edge-dropout", type=float)
    group.add_argument("--metric", choices=METRICS, help="(what suits the targets)")

    group = parser.add_argument_group("training")
    group.add_argument("--seed", type=int, default=0, help="of the first run (%(default)s)")
    group.add_argument("--runs", type=int, default=1)
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    group.add_argument("--full-batch", action="store_true", help="train without mini-batches")
    group.add_argument(
        "--inductive",
        action="store_true",
        default=None,
        help="train on the graph of the training nodes alone",
    )
    group.add_argument("--patience", type=int, help="stop after epochs without a better validation")
    group.add_argument("--scale-loss", action="store_true", help="weigh batches by their labels")
    group.add_argument(
        "--skip-unlabelled", action="store_true", help="batches without labels don't refresh"
    )
    group.add_argument("--memory-budget", type=float, help="MiB of a micro-batch's tensors")
    group.add_argument("--autocast", action="store_true", help="compute in bfloat16")

    group = parser.add_argument_group("mini-batches and histories")
    group.add_argument("--partition", default="metis", choices=gas.graph.METHODS)
    group.add_argument("--layout", choices=gas.graph.LAYOUTS, help="(CPU: fused, else csr)")
    group.add_argument("--store", default=None, choices=TIERS, help="of histories")
    group.add_argument("--dtype", default="float32", choices=CODECS, help="of stored histories")
    group.add_argument("--path", type=Path, help="folder of --store disk (a temporary one)")
    group.add_argument("--io", default="concurrent", choices=MODES)
    group.add_argument("--prefetch", action="store_true", help="start pulls a batch ahead")
    group.add_argument(
        "--eval",
        choices=EVALUATIONS,
        help="(full batch up to 100,000 nodes, and with --full-batch)",
    )
    group.add_argument(
        "--verify", action="store_true", help="first compare mini-batches with the uncut graph"
    )
    group.add_argument(
        "--refresh", choices=REFRESHES, help="all histories after each epoch (as --eval)"
    )

    group = parser.add_argument_group("augmentation, by views of the graph (see docs)")
    group.add_argument("--augment", choices=("mh_aug", "drop_edge"))
    group.add_argument("--num-steps", type=int, default=12, help="mh_aug: transitions per epoch")
    group.add_argument("--reference-size", type=int, help="mh_aug: temper to so many nodes")
    group.add_argument("--drop", type=float, default=0.3, help="drop_edge: the probability")
    group.add_argument("--undirected", action="store_true", help="drop both directions together")
    group.add_argument("--kl", type=float, help="weight of the divergence between both views")
    group.add_argument("--entropy", type=float, help="weight of the entropy of predictions")
    group.add_argument(
        "--bank", default="original", choices=gas.scalable.BANKS, help="of the views"
    )

    group = parser.add_argument_group("input and output")
    group.add_argument("--no-check", action="store_true", help="accept NaN and infinite features")
    group.add_argument("--tensorboard", action="store_true", help="write events into --out")
    group.add_argument("--out", type=Path, default=Path("runs"), help="folder (%(default)s)")
    group.add_argument("--overwrite", action="store_true", help="the run that --out holds")
    return parser


def parse_args() -> argparse.Namespace:
    """What the command line says, with a device that is there and a folder that can be made."""
    parser = make_parser()
    args = parser.parse_args()
    for name in ("runs", "epochs", "num_layers", "hidden_channels", "num_parts", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            parser.error(f"argument --{option} is {value}, expected at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device is cuda, but PyTorch sees no CUDA device: use cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out is {args.out}, which is a file: name a folder")
    if (args.out / "metrics.json").exists() and not args.overwrite:
        parser.error(f"argument --out is {args.out}, which holds a run: add --overwrite")
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of the configuration with what the command line says instead."""
    base = None
    if args.config is not None:
        base, about = Settings.load(args.config)
        model = about.get("model", args.model)
        if args.model not in (None, model):
            raise ValueError(f"'--model' is {args.model}, but {args.config} is for {model}")
        args.model = model
    args.model = args.model or "gcn"
    files = list(BENCHMARKS.glob(f"*/{dataset_key(args.dataset)}_{args.model}.yaml"))
    if base is None:
        base = Settings.load(files[0])[0] if files else Settings.default(args.model)
    names = [*(f.name for f in dataclasses.fields(Settings)), *("num_layers", "hidden_channels")]
    given = {name: getattr(args, name, None) for name in [*names, "dropout"]}
    return base.but(**given)


def augmentation_of(args: argparse.Namespace) -> tuple[Callable[[Data], Augmentation] | None, dict]:
    """What makes the augmentation, and the weights of its loss."""
    published = PUBLISHED.get(dataset_key(args.dataset), PUBLISHED["cora"])
    given = {"kl": args.kl, "h": args.entropy}
    if args.augment == "mh_aug":
        weights = {key: published.loss[key] if v is None else v for key, v in given.items()}
        make = partial(
            gas.MHAug,
            **published.chain,
            num_steps=args.num_steps,
            reference_size=args.reference_size,
            undirected=args.undirected,
        )
        return make, weights
    weights = {key: v or 0.0 for key, v in given.items()}
    if args.augment == "drop_edge":
        return partial(DropEdge, p=args.drop, undirected=args.undirected), weights
    return None, weights


def make_experiment(args: argparse.Namespace) -> Experiment:
    settings = settings_of(args)
    data, _, out_channels = get_data(args.root, args.dataset, check=not args.no_check)
    augment, weights = augmentation_of(args)
    experiment = Experiment(
        data,
        out_channels,
        args.model,
        settings,
        full_batch=args.full_batch,
        inductive=args.inductive,
        evaluation=args.eval,
        refresh=args.refresh,
        layout=args.layout,
        partition=args.partition,
        prefetch=args.prefetch,
        memory_budget=None if args.memory_budget is None else int(args.memory_budget * 2**20),
        augment=augment,
        patience=args.patience,
        device=args.device,
        training={
            "scale_loss": args.scale_loss,
            "refresh_unlabelled": not args.skip_unlabelled,
            "autocast": torch.bfloat16 if args.autocast else None,
            "view_loss": partial(mh_aug_loss, **weights),
            "bank": args.bank,
        },
        store=args.store,
        dtype=args.dtype,
        path=args.path,
        io=args.io,
    )
    print(experiment.graph.data)
    return experiment


def main() -> None:
    args = parse_args()
    importlib.import_module("matplotlib")  # For the plot; missing, it is better missed now.
    experiment = make_experiment(args)
    if args.verify:
        found = experiment.verify()
        print(found)
        if not found:
            raise ValueError("mini-batches don't give what the graph gives: see above")
    args.out.mkdir(parents=True, exist_ok=True)  # What can fail should fail before training.

    runs: list[Run] = []
    epochs = experiment.settings.epochs
    with tqdm(total=args.runs * epochs, unit="epoch", disable=None) as progress:
        try:
            for number in range(args.runs):
                folder = args.out / f"events/run{number}"
                events = EventWriter(folder) if args.tensorboard else None

                def on_epoch(run: Run, events: EventWriter | None = events) -> None:
                    best = run.best_epoch
                    progress.set_postfix_str(
                        f"loss {run.loss[-1]:.3f}, val {100 * run.val_acc[best]:.2f}, "
                        f"test {100 * run.test_acc[best]:.2f}"
                    )
                    progress.update()
                    if events is not None:
                        events.write(run)

                runs.append(experiment.run(args.seed + number, number, on_epoch))
                if events is not None:
                    events.close()
        except KeyboardInterrupt:
            print("\nInterrupted: reporting the runs that ended.", file=sys.stderr)
    if runs:
        report(args, experiment, runs)
    if len(runs) < args.runs:
        sys.exit(130)


def report(args: argparse.Namespace, experiment: Experiment, runs: list[Run]) -> None:
    """Writes the files and prints the summary."""
    result, constant = metrics(runs), experiment.baseline()
    settings = experiment.settings
    how = "full batch" if args.full_batch else f"{settings.num_parts} parts"
    shape = "x".join(str(settings.architecture[k]) for k in ("num_layers", "hidden_channels"))
    title = f"{args.model} {shape} on {args.dataset}, {how}, {len(runs)} run{'s' * (len(runs) > 1)}"
    write_json(
        args.out / "metrics.json",
        {
            **result,
            "baseline": constant,
            "metric": experiment.metric,
            "dataset": args.dataset,
            "model": args.model,
            "histories": {"store": args.store, "dtype": args.dtype, "io": args.io},
            "augment": args.augment,
            "training": "full_batch" if args.full_batch else "histories",
            "settings": dataclasses.asdict(settings),
            "seed": args.seed,
            "device": args.device,
            "machine": machine(),
        },
    )
    label = SCORES[experiment.metric]
    scale, unit = (1, "") if experiment.metric == "r2" else (100, " %")

    plot_curves(args.out / "curve.png", runs, title, label + (unit and ", %"))

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
    print(f"  written              {args.out}/metrics.json, {args.out}/curve.png")


SCORES = {"accuracy": "accuracy", "micro_f1": "micro-F1", "roc_auc": "ROC-AUC", "r2": "R²"}


if __name__ == "__main__":
    try:
        main()
    except (ValueError, ImportError, OSError, MemoryError) as error:
        sys.exit(f"train_gas.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
