"""The parser of the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from gas.cli.choices import DENSE, EVALUATIONS, MODELS, REFRESHES
from gas.cli.settings import ARCHITECTURES, Settings
from gas.datasets import dataset_names
from gas.graph import LAYOUTS, METHODS
from gas.history import CODEC_NAMES as CODECS
from gas.history import IO_MODES, TIERS
from gas.scalable import BANKS
from gas.training import METRICS

NORMS = ("none", "batch")
FEATURE_CODECS = tuple(name for name in CODECS if name != "float64")


class OptionParser(argparse.ArgumentParser):
    """Parser whose errors are one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with one line."""
        self.exit(2, f"{self.prog}: error: {message} (--help shows all options)\n")


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of all options of ``gas train``."""
    parser = OptionParser(
        prog,
        description="Trains a graph neural network with historical embeddings.",
        epilog=f"data sets: {', '.join(dataset_names())}; planted:NUM_NODES; a folder of tables "
        "(nodes.csv, edges.csv, ...; see gas.open_graph); a .pt or .npz file",
    )
    _add_graph(parser)
    _add_settings(parser)
    _add_training(parser)
    _add_checkpoints(parser)
    _add_batches(parser)
    _add_augmentation(parser)
    _add_output(parser)
    return parser


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="planted:20000", help="name or path (%(default)s)")
    parser.add_argument(
        "--undirected",
        action="store_true",
        help="add the reverse of edges that lack it; augmentation drops both directions together",
    )
    parser.add_argument(
        "--sparse-features",
        action=argparse.BooleanOptionalAction,
        help="keep features sparse (if fewer than one in thirty is not zero, and the model gains)",
    )
    parser.add_argument(
        "--feature-dtype", choices=FEATURE_CODECS, help="how features are stored (as they are)"
    )
    parser.add_argument(
        "--feature-store", choices=("host", "disk"), help="where: disk maps a temporary file (host)"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="ROLE=NAME",
        help="of tables, such as source=payer (those known by their names)",
    )
    parser.add_argument(
        "--hetero",
        action="store_true",
        help="of tables with types: a SAGE layer for each relation (--model sage)",
    )
    parser.add_argument("--root", default="data", help="folder of PyG's data sets (%(default)s)")
    parser.add_argument(
        "--model", choices=sorted(MODELS), help="which one (that of --config, or gcn)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="a YAML file of settings, as in benchmarks/ (the one there for --dataset and --model)",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings, instead of those of the configuration")
    group.add_argument("--num-layers", type=int, help=_describe_defaults("num_layers"))
    group.add_argument("--hidden-channels", type=int, help=_describe_defaults("hidden_channels"))
    group.add_argument("--dropout", type=float, help=_describe_defaults("dropout"))
    group.add_argument(
        "--norm",
        choices=NORMS,
        help="of hidden layers, but for gat and appnp; batch usually gains accuracy in graphs of "
        f"{DENSE} edges per node and more (none)",
    )
    group.add_argument("--num-parts", type=int, help="of the graph (one for every 300 nodes)")
    group.add_argument(
        "--batch-size", type=int, help="parts per mini-batch (an eighth of all parts)"
    )
    group.add_argument("--epochs", type=int, help=f"({Settings.epochs})")
    group.add_argument("--lr", type=float, help=f"({Settings.lr})")
    group.add_argument(
        "--grad-norm", type=float, help="bound of gradient clipping (1; with a configuration, its)"
    )
    group.add_argument(
        "--correct-drift",
        action=argparse.BooleanOptionalAction,
        help="correct stale rows of the histories (yes; with a configuration, what it says)",
    )
    group.add_argument(
        "--average-weights",
        action=argparse.BooleanOptionalAction,
        help="evaluate and keep the average of the last epoch's weights "
        "(yes; with a configuration, what it says)",
    )
    group.add_argument("--edge-dropout", type=float, help=f"({Settings.edge_dropout})")
    group.add_argument("--metric", choices=METRICS, help="(the usual one for the targets)")


def _describe_defaults(key: str) -> str:
    """Describe the default of a setting, and that of models that have another."""
    by_model = {name: settings[key] for name, settings in ARCHITECTURES.items()}
    usual = by_model["gcn"]
    others = [f"{name} {value}" for name, value in by_model.items() if value != usual]
    return f"({'; '.join([str(usual), *others])})"


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--seed", type=int, default=0, help="of the first run (%(default)s)")
    group.add_argument("--runs", type=int, default=1, help="from so many seeds (%(default)s)")
    group.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="(%(default)s: cuda where there is one)",
    )
    group.add_argument("--full-batch", action="store_true", help="train without mini-batches")
    group.add_argument(
        "--inductive",
        action="store_true",
        default=None,
        help="train on the graph of the training nodes alone",
    )
    group.add_argument(
        "--patience", type=int, help="stop after so many epochs without a better validation (never)"
    )
    group.add_argument("--scale-loss", action="store_true", help="weigh batches by their labels")
    group.add_argument(
        "--skip-unlabelled", action="store_true", help="batches without labels don't refresh"
    )
    group.add_argument(
        "--memory-budget", type=float, help="MiB of a micro-batch's tensors (no limit)"
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="what the process may take, such as 6GB: chooses parts, batches and histories, as far "
        "as they aren't given (no limit)",
    )
    group.add_argument("--autocast", action="store_true", help="compute in bfloat16")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints, in the folder checkpoints of --out")
    group.add_argument(
        "--checkpoint-every",
        metavar="N",
        help="epochs, or a time such as 10min, in the middle of an epoch if need be; and one when "
        "SIGTERM or Ctrl-C comes (none; 1 with --resume)",
    )
    group.add_argument(
        "--resume", action="store_true", help="go on from the newest ones, if there are any"
    )


def _add_batches(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mini-batches and histories")
    group.add_argument("--partition", choices=METHODS, help="(metis)")
    group.add_argument("--layout", choices=LAYOUTS, help="(fused, or csr where gas has no kernels)")
    group.add_argument(
        "--store",
        default=None,
        choices=TIERS,
        help="of histories (host; pinned or device with CUDA)",
    )
    group.add_argument("--dtype", choices=CODECS, help="of stored histories (float32)")
    group.add_argument("--path", type=Path, help="folder of --store disk (a temporary one)")
    group.add_argument(
        "--pack",
        nargs="?",
        const="auto",
        metavar="SIZE",
        help="arrange what --store disk holds by what batches read, with so much of it in memory, "
        "such as 2GB (what --memory leaves, or none)",
    )
    group.add_argument("--io", choices=IO_MODES, help="how rows move (concurrent)")
    group.add_argument("--prefetch", action="store_true", help="start pulls a batch ahead")
    group.add_argument(
        "--eval",
        choices=EVALUATIONS,
        help="(full batch up to 20,000 nodes, and with --full-batch)",
    )
    group.add_argument(
        "--verify", action="store_true", help="first compare mini-batches with the uncut graph"
    )
    group.add_argument(
        "--refresh", choices=REFRESHES, help="all histories after each epoch (as --eval)"
    )


def _add_augmentation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("augmentation, by views of the graph (see docs)")
    group.add_argument("--augment", choices=("mh_aug", "drop_edge"), help="how (not at all)")
    group.add_argument("--num-steps", type=int, help="mh_aug: transitions per epoch (12)")
    group.add_argument("--reference-size", type=int, help="mh_aug: temper to so many nodes (none)")
    group.add_argument("--drop", type=float, help="drop_edge: the probability (0.3)")
    group.add_argument(
        "--kl",
        type=float,
        help="weight of the divergence between both views (mh_aug: as published; 0)",
    )
    group.add_argument(
        "--entropy",
        type=float,
        help="weight of the entropy of predictions (mh_aug: as published; 0)",
    )
    group.add_argument("--bank", choices=BANKS, help="of the views (original)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument("--no-check", action="store_true", help="accept NaN and infinite features")
    group.add_argument("--tensorboard", action="store_true", help="write events into --out")
    group.add_argument(
        "--memory-report", action="store_true", help="print who holds what of the memory"
    )
    group.add_argument("--out", type=Path, default=Path("runs"), help="folder (%(default)s)")
    group.add_argument("--overwrite", action="store_true", help="the run that --out holds")
    group.add_argument("--debug", action="store_true", help="show where an error comes from")
