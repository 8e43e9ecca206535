"""Checks of the options of ``gas train`` before anything is loaded or written."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import torch

from gas.checkpoint import checkpoints
from gas.cli import hetero
from gas.cli.checkpoints import parse_interval
from gas.cli.graphs import PARTS_FOLDER
from gas.cli.parser import SHOWN, Options
from gas.cli.settings import NORMALISED, Settings
from gas.graph import is_graph_folder
from gas.native import bytes_of, check_integer, check_number, check_probability

# Options that need another option, with the values that it must have.
NEEDS = {
    **dict.fromkeys(("num_steps", "reference_size"), ("augment", ("mh_aug",))),
    "drop": ("augment", ("drop_edge",)),
    **dict.fromkeys(("kl", "entropy", "bank"), ("augment", ())),
    "path": ("store", ("disk", "auto")),
}
NOT_FULL_BATCH = (
    "num_parts", "batch_size", "partition", "store", "dtype", "path", "pack", "io", "prefetch",
    "memory", "memory_budget", "skip_unlabelled", "scale_loss", "verify",
    "correct_drift", "average_weights", "warm_up",
)  # fmt: skip
AT_LEAST_ONE = (
    "num_layers", "hidden_channels", "evaluate_every", "patience", "num_steps", "reference_size",
)  # fmt: skip


class UsageError(ValueError):
    """Report a command line whose options don't go together."""


def check_options(args: Options, given: set[str]) -> None:
    """Refuse options without effect, unusable values and an unusable output folder.

    ``given`` are the names of options that the command line changes.
    """
    if args.hetero:
        _check_hetero(args)
    _check_values(args)
    _check_needs(args)
    for name in NOT_FULL_BATCH if args.full_batch else ():
        if name in given and getattr(args, name):
            print(f"warning: {SHOWN[name]} does nothing with --full-batch", file=sys.stderr)
    if not all(args.column_names().values()):
        raise UsageError("argument --columns expects ROLE=NAME, such as source=payer")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("argument --device is cuda, but PyTorch sees no CUDA device: use cpu")
    if args.out.exists() and not args.out.is_dir():
        raise UsageError(f"argument --out is {args.out}, which is a file: name a folder")
    if args.resume and args.overwrite:
        raise UsageError(
            "argument --resume goes on with what --overwrite would remove: leave one out"
        )
    try:
        parse_interval(args.checkpoint_every or 1)
    except ValueError as error:
        raise UsageError(f"argument --checkpoint-every: {error}") from error
    refused = explain_refusal(args)
    if refused is not None:
        raise UsageError(refused)


def _check_values(args: Options) -> None:
    """Refuse values that would fail later, after the graph was loaded and partitioned."""
    for name in AT_LEAST_ONE:
        if getattr(args, name) is not None:
            check_integer(name, getattr(args, name), 1)
    check_integer("seed", args.seed, -(2**63), 2**63 - args.runs)  # As torch.manual_seed.
    if args.dropout is not None:
        check_probability("dropout", args.dropout, below_one=True)
    check_probability("drop", args.drop, below_one=True)
    if args.norm == "batch" and args.model not in NORMALISED:
        raise ValueError(
            f"'norm' is {args.norm}, which {args.model} doesn't have: leave it out, or choose "
            f"a model of {', '.join(NORMALISED)}"
        )
    budget = args.memory_budget
    if budget is not None:
        expected = "a finite number above 0, in MiB"
        check_number("memory_budget", budget, lambda size: 0 < size < math.inf, expected)


def _check_needs(args: Options) -> None:
    """Refuse options that have no effect without another one."""
    unset = Options()
    for name, (needed, wanted) in NEEDS.items():
        found = getattr(args, needed)
        is_met = found is not None and (not wanted or found in wanted)
        if getattr(args, name) != getattr(unset, name) and not is_met:
            expected = " ".join([SHOWN[needed], *wanted[:1]])
            raise UsageError(f"argument {SHOWN[name]} does nothing without {expected}: add it")
    if args.pack is not None and args.store not in ("disk", "auto") and args.memory is None:
        raise UsageError("argument --pack does nothing without --store disk: add it")
    if args.pack not in (None, (), ("auto",), ("0",)):
        try:
            bytes_of("--pack", args.pack[0])
        except ValueError as error:
            raise UsageError(f"argument {error}") from error


def explain_refusal(args: Options) -> str | None:
    """Return the error if ``--out`` holds what must not be overwritten, else ``None``."""
    parts, graph = args.out / PARTS_FOLDER, Path(args.dataset)
    reads_folder = graph.exists() and is_graph_folder(graph)
    if reads_folder and not args.resume and graph.resolve().is_relative_to(parts.resolve()):
        return (
            f"argument --out is {args.out}, whose folder {parts.name} is for the parts of the run, "
            f"but it holds the graph, {args.dataset}: name another folder"
        )
    there = [folder for folder in sorted(args.out.glob("checkpoints/run*")) if checkpoints(folder)]
    if there and not (args.resume or args.overwrite):
        return (
            f"argument --out is {args.out}, which has the checkpoints of a run: add --resume to go "
            "on with it, or --overwrite"
        )
    if (args.out / "metrics.json").exists() and not (args.overwrite or there):
        if args.resume:
            return (
                f"argument --resume finds no checkpoints in {args.out}, which holds a run: pass "
                "--overwrite instead, or name another folder"
            )
        return (
            f"argument --out is {args.out}, which holds a run: add --overwrite, or name another "
            "folder"
        )
    if reads_folder and parts.exists() and not (args.resume or args.overwrite):
        return (
            f"argument --out is {args.out}, which holds the parts of another training, "
            f"{parts.name}: add --overwrite, or name another folder"
        )
    return None


def _check_hetero(args: Options) -> None:
    """Refuse options that have no effect with ``--hetero``, of the command line or of a file."""
    if args.model != "sage":
        raise UsageError(
            f"argument --model is {args.model}, but --hetero trains sage: leave it out"
        )
    usual = dataclasses.replace(Options(), **vars(Settings.default("sage")))
    known = {*hetero.OPTIONS, "architecture", "batch_norm"}  # The last is --norm.
    for name, value in sorted({**args.architecture, **vars(args)}.items()):
        if name not in known and value not in (None, False, getattr(usual, name, None)):
            shown = SHOWN.get(name, name)
            raise UsageError(f"argument {shown} does nothing with --hetero: leave it out")
