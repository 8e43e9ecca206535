"""The command line of ``examples/train_gas.py``: what it says, and the experiment it describes."""

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
from gas.datasets import dataset_key, get_data
from gas.history import encode
from gas.history.tiers import TIERS
from gas.native.memory import bytes_of, resident_bytes
from gas.training.checkpoints import Checkpoints, seconds_of
from gas.training.experiment import Experiment
from gas.training.freed import keep_little_freed
from gas.training.parser import make_parser
from gas.training.settings import Settings

# Options that do nothing without another: which, and the value that it needs.
NEEDS = {
    **dict.fromkeys(("num_steps", "reference_size"), ("augment", "mh_aug")),
    "drop": ("augment", "drop_edge"),
    **dict.fromkeys(("kl", "entropy", "bank"), ("augment", None)),
    "path": ("store", ("disk", "auto")),
}
NOT_FULL_BATCH = (
    "num_parts", "batch_size", "partition", "store", "dtype", "path", "pack", "io", "prefetch",
    "refresh", "memory", "memory_budget", "skip_unlabelled", "scale_loss", "verify",
)  # fmt: skip
DEFAULTS = {"num_steps": 12, "drop": 0.3, "bank": "original", "partition": "metis",
            "dtype": "float32", "io": "concurrent"}  # fmt: skip


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
