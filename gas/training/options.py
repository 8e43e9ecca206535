"""The command line of ``examples/train_gas.py``: its options, and the experiment they describe."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from gas.augment import PUBLISHED, Augmentation, DropEdge, MHAug, mh_aug_loss
from gas.checkpoint import checkpoints, peek, prune
from gas.datasets import dataset_key, dataset_names, get_data
from gas.graph import LAYOUTS, METHODS
from gas.history import encode
from gas.history.codec import NAMES as CODECS
from gas.history.engine import MODES
from gas.history.tiers import TIERS
from gas.native.memory import bytes_of, resident_bytes
from gas.scalable import BANKS
from gas.training.checkpoints import Checkpoints, seconds_of
from gas.training.choices import EVALUATIONS, MODELS, REFRESHES
from gas.training.experiment import Experiment
from gas.training.freed import keep_little_freed
from gas.training.metrics import METRICS
from gas.training.settings import Settings

# Options that do nothing without another: which, and the value that it needs.
NEEDS = {
    **dict.fromkeys(("num_steps", "reference_size"), ("augment", "mh_aug")),
    "drop": ("augment", "drop_edge"),
    **dict.fromkeys(("kl", "entropy", "bank"), ("augment", None)),
    "path": ("store", ("disk", "auto")),
}
FEATURE_CODECS = tuple(name for name in CODECS if name != "float64")
NOT_FULL_BATCH = (
    "num_parts", "batch_size", "partition", "store", "dtype", "path", "pack", "io", "prefetch",
    "refresh", "memory", "memory_budget", "skip_unlabelled", "scale_loss", "verify",
)  # fmt: skip
DEFAULTS = {"num_steps": 12, "drop": 0.3, "bank": "original", "partition": "metis",
            "dtype": "float32", "io": "concurrent"}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description="Trains a graph neural network with historical embeddings.",
        epilog=f"data sets: {', '.join(dataset_names())}; planted:NUM_NODES; a folder of tables "
        "(nodes.csv, edges.csv, ...; see gas.open_graph); a .pt or .npz file",
    )
    parser.add_argument("--dataset", default="planted:20000", help="name or path (%(default)s)")
    parser.add_argument(
        "--undirected",
        action="store_true",
        help="add the reverse of edges that lack it; augmentation drops both directions together",
    )
    parser.add_argument(
        "--sparse-features",
        action="store_true",
        help="keep features sparse: pays where fewer than one in thirty is not zero",
    )
    parser.add_argument(
        "--feature-dtype", choices=FEATURE_CODECS, help="how features are stored (as they are)"
    )
    parser.add_argument(
        "--feature-store", choices=("host", "disk"), help="where: disk maps a temporary file"
    )
    parser.add_argument(
        "--columns", nargs="+", metavar="ROLE=NAME", help="of tables, such as source=payer"
    )
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
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="what the process may take, such as 6GB: chooses parts, batches and histories, as far "
        "as they aren't given",
    )
    group.add_argument("--autocast", action="store_true", help="compute in bfloat16")

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

    group = parser.add_argument_group("mini-batches and histories")
    group.add_argument("--partition", choices=METHODS, help="(metis)")
    group.add_argument("--layout", choices=LAYOUTS, help="(CPU: fused, else csr)")
    group.add_argument("--store", default=None, choices=TIERS, help="of histories")
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
    group.add_argument("--io", choices=MODES, help="(concurrent)")
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

    group = parser.add_argument_group("augmentation, by views of the graph (see docs)")
    group.add_argument("--augment", choices=("mh_aug", "drop_edge"))
    group.add_argument("--num-steps", type=int, help="mh_aug: transitions per epoch (12)")
    group.add_argument("--reference-size", type=int, help="mh_aug: temper to so many nodes")
    group.add_argument("--drop", type=float, help="drop_edge: the probability (0.3)")
    group.add_argument("--kl", type=float, help="weight of the divergence between both views")
    group.add_argument("--entropy", type=float, help="weight of the entropy of predictions")
    group.add_argument("--bank", choices=BANKS, help="of the views (original)")

    group = parser.add_argument_group("input and output")
    group.add_argument("--no-check", action="store_true", help="accept NaN and infinite features")
    group.add_argument("--tensorboard", action="store_true", help="write events into --out")
    group.add_argument(
        "--memory-report", action="store_true", help="print who holds what of the memory"
    )
    group.add_argument("--out", type=Path, default=Path("runs"), help="folder (%(default)s)")
    group.add_argument("--overwrite", action="store_true", help="the run that --out holds")
    group.add_argument("--debug", action="store_true", help="show where an error comes from")
    return parser


def parse_args() -> argparse.Namespace:
    """What the command line says: options that have an effect, and a folder that can be made."""
    parser = make_parser()
    args = parser.parse_args()
    for name in ("runs", "epochs", "num_layers", "hidden_channels", "num_parts", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"argument {option(name)} is {value}, expected at least 1")
    for name, (needed, value) in NEEDS.items():
        given = getattr(args, needed)
        wanted = (value,) if isinstance(value, str) else value
        if getattr(args, name) is not None and (given is None or (wanted and given not in wanted)):
            expected = f"{option(needed)} {wanted[0]}" if wanted else option(needed)
            parser.error(f"argument {option(name)} does nothing without {expected}: add it")
    for name in NOT_FULL_BATCH if args.full_batch else ():
        if getattr(args, name):
            print(f"warning: {option(name)} does nothing with --full-batch", file=sys.stderr)
    for name, value in DEFAULTS.items():
        is_open = name == "dtype" and args.memory is not None
        if getattr(args, name) is None and not is_open:
            setattr(args, name, value)
    if args.pack is not None and args.store not in ("disk", "auto") and args.memory is None:
        parser.error("argument --pack does nothing without --store disk: add it")
    if args.pack not in (None, "auto", "0"):
        try:
            bytes_of("--pack", args.pack)
        except ValueError as error:
            parser.error(f"argument {error}")
    pairs = [pair.partition("=") for pair in args.columns or ()]
    if not all(name for _, _, name in pairs):
        parser.error("argument --columns expects ROLE=NAME, such as source=payer")
    args.columns = {role: name for role, _, name in pairs}
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device is cuda, but PyTorch sees no CUDA device: use cpu")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out is {args.out}, which is a file: name a folder")
    if args.resume and args.overwrite:
        parser.error("argument --resume goes on with what --overwrite would remove: leave one out")
    try:
        seconds_of(args.checkpoint_every or 1)
    except ValueError as error:
        parser.error(f"argument --checkpoint-every: {error}")
    there = [folder for folder in sorted(args.out.glob("checkpoints/run*")) if checkpoints(folder)]
    if there and not (args.resume or args.overwrite):
        parser.error(
            f"argument --out is {args.out}, which has the checkpoints of a run: add --resume to go "
            "on with it, or --overwrite"
        )
    if (args.out / "metrics.json").exists() and not (args.overwrite or args.resume):
        parser.error(f"argument --out is {args.out}, which holds a run: add --overwrite")
    return args


def remove_checkpoints(args: argparse.Namespace) -> None:
    """Removes those of the runs that are to be overwritten."""
    for folder in args.out.glob("checkpoints/run*") if args.overwrite else ():
        prune(folder, 0)


def checkpoints_of(args: argparse.Namespace, number: int) -> Checkpoints | None:
    """When a run writes checkpoints, if it is to."""
    folder = args.out / f"checkpoints/run{number}"
    if args.checkpoint_every is None and not args.resume:
        return None
    return Checkpoints(folder, args.checkpoint_every or 1, args.resume)


def _as_it_was(args: argparse.Namespace) -> int:
    """Takes what ``--memory`` chose from a checkpoint: now it might choose otherwise.

    Returns:
        The micro-batches of a step.
    """
    folder = args.out / "checkpoints/run0"
    if not args.resume or args.memory is None or not checkpoints(folder):
        return 1
    about = peek(folder, "about")["about"]
    args.memory = None
    args.num_parts, args.batch_size = (about["settings"][k] for k in ("num_parts", "batch_size"))
    args.dtype = about["histories"]["dtype"]
    if about["histories"]["store"] in TIERS:
        args.store = about["histories"]["store"]
    return about["micro_batches"]


def option(name: str) -> str:
    """An option, by the name of its value."""
    return "--" + name.replace("_", "-")


def settings_of(args: argparse.Namespace, files: Path) -> Settings:
    """The settings of a configuration in ``files`` with what the command line says instead."""
    base = None
    if args.config is not None:
        base, about = Settings.load(args.config)
        model = about.get("model", args.model)
        if args.model not in (None, model):
            raise ValueError(f"'--model' is {args.model}, but {args.config} is for {model}")
        args.model = model
    args.model = args.model or "gcn"
    found = list(files.glob(f"*/{dataset_key(args.dataset)}_{args.model}.yaml"))
    if base is None:
        base = Settings.load(found[0])[0] if found else Settings.default(args.model)
    names = [*(f.name for f in dataclasses.fields(Settings)), *("num_layers", "hidden_channels")]
    given = {name: getattr(args, name, None) for name in [*names, "dropout"]}
    return base.but(**given)


def augmentation_of(args: argparse.Namespace) -> tuple[Callable[[Data], Augmentation] | None, dict]:
    """What makes the augmentation, and the weights of its loss."""
    published = PUBLISHED.get(dataset_key(args.dataset), PUBLISHED["cora"])
    given = {"kl": args.kl, "h": args.entropy}
    if args.augment == "mh_aug":
        weights = {key: published.loss[key] if v is None else v for key, v in given.items()}
        chain: dict[str, Any] = {**published.chain, "num_steps": args.num_steps}
        chain |= {"reference_size": args.reference_size, "undirected": args.undirected}
        return partial(MHAug, **chain), weights
    weights = {key: v or 0.0 for key, v in given.items()}
    if args.augment == "drop_edge":
        return partial(DropEdge, p=args.drop, undirected=args.undirected), weights
    return None, weights


def make_experiment(args: argparse.Namespace, files: Path) -> Experiment:
    """The experiment that the command line describes."""
    micro_batches = _as_it_was(args)
    settings = settings_of(args, files)
    libraries = None
    if args.memory_report:
        libraries = resident_bytes()
        keep_little_freed()  # Or holes between blocks, which nobody holds, would be a fifth.
    data, _, out_channels = get_data(
        args.root,
        args.dataset,
        check=not args.no_check,
        undirected=args.undirected,
        columns=args.columns,
        sparse_features=args.sparse_features,
        log=True,
    )
    if args.feature_dtype or args.feature_store:
        data.x = encode(data.x, args.feature_dtype or "float32", args.feature_store)
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
        memory=None if args.full_batch else args.memory,
        micro_batches=micro_batches,
        pack=None if args.full_batch else args.pack,
        augment=augment,
        patience=args.patience,
        keep_edges=False,
        libraries=libraries,
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
    return experiment


def in_options(error: BaseException, args: argparse.Namespace) -> str:
    """An error in words, whose advice is for the command line."""
    text = re.sub(
        r"\b(\w+)='?(\w+)'?",
        lambda found: f"{option(found[1])} {found[2]}" if found[1] in vars(args) else found[0],
        str(error).strip(),
    )
    if isinstance(error, (ValueError, ImportError, OSError, MemoryError)):
        return text
    return f"{text} ({type(error).__name__}; --debug shows where)"
