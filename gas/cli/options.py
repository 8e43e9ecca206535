"""Checked options of the command line, and the experiment that they describe."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

import gas
from gas.checkpoint import checkpoints, peek, prune
from gas.cli import hetero
from gas.cli.checkpoints import Checkpoints
from gas.cli.checks import check_options, explain_refusal
from gas.cli.experiment import Experiment
from gas.cli.graphs import PARTS_FOLDER, check_folder_fits
from gas.cli.parser import NAMES, SHOWN, Options, parse
from gas.cli.settings import DENSE, MODELS, NORMALISED, Settings
from gas.datasets import dataset_key, find_feature_names
from gas.graph import is_graph_folder, lock_folder, with_sparse_features
from gas.history import TIERS
from gas.native import resident_bytes
from gas.training import limit_freed_memory

MakeAugmentation = Callable[[Data], gas.augment.Augmentation]


def parse_args(
    arguments: Sequence[str] | None = None, prog: str | None = None, files: str | Path | None = None
) -> Options:
    """Parse and check the options of ``main``; see :func:`check_options`."""
    args, base = parse(arguments, prog, files)
    given = {name for name in NAMES if getattr(args, name) != getattr(base, name)}
    check_options(args, given)
    if args.dtype is None and args.memory is None:
        args = dataclasses.replace(args, dtype="float32")
    if args.device == "auto":
        has_cuda = torch.cuda.is_available()
        args = dataclasses.replace(args, device="cuda" if has_cuda else "cpu")
    return args


@contextlib.contextmanager
def lock_output(args: Options) -> Iterator[None]:
    """Lock ``--out`` against other runs in this context."""
    with lock_folder(args.out):
        refused = explain_refusal(args)
        if refused is not None:
            raise ValueError(refused)
        yield


def remove_checkpoints(args: Options) -> None:
    """Remove the checkpoints of runs that are overwritten."""
    for folder in args.out.glob("checkpoints/run*") if args.overwrite else ():
        prune(folder, 0)


def make_checkpoints(args: Options, number: int) -> Checkpoints | None:
    """Return the schedule of a run's checkpoints; ``None`` if it writes none."""
    folder = args.out / f"checkpoints/run{number}"
    if args.checkpoint_every is None and not args.resume:
        return None
    return Checkpoints(folder, args.checkpoint_every or 1, args.resume, epochs=args.epochs)


def _restore_plan(args: Options) -> tuple[Options, int]:
    """Restore from a checkpoint what ``--memory`` chose: planning again might choose otherwise.

    Returns:
        The options, and the number of micro-batches per step.
    """
    folder = args.out / "checkpoints/run0"
    if not args.resume or args.memory is None or not checkpoints(folder):
        return args, 1
    about = peek(folder, "about")["about"]
    limit_freed_memory()  # Checkpoints don't tell whether the plan needs it.
    chosen = {key: about["settings"][key] for key in ("num_parts", "batch_size")}
    chosen["dtype"], store = about["histories"]["dtype"], about["histories"]["store"]
    if store in TIERS:
        chosen["store"] = store
    return dataclasses.replace(args, memory=None, **chosen), about["micro_batches"]


def _suggest_norm(args: Options, settings: Settings, data: Data) -> None:
    """Recommend batch norm for dense graphs, unless a norm was chosen."""
    degree = data.num_edges / max(data.num_nodes, 1)
    chosen = args.norm is not None or "batch_norm" in settings.architecture
    if degree >= DENSE and not chosen and not args.full_batch and args.model in NORMALISED:
        print(
            f"hint: the graph has {degree:.0f} edges per node; with so many, histories oscillate, "
            "and --norm batch usually gains accuracy (--norm none to train without this hint)",
            file=sys.stderr,
        )


def make_augmentation(args: Options) -> tuple[MakeAugmentation | None, dict]:
    """Return a function that makes the augmentation, if any, and the weights of its loss terms."""
    known = gas.augment.PUBLISHED
    published = known.get(dataset_key(args.dataset), known["cora"])
    given = {"kl": args.kl, "h": args.entropy}
    if args.augment == "mh_aug":
        weights = {key: published.loss[key] if v is None else v for key, v in given.items()}
        chain: dict[str, Any] = {**published.chain, "num_steps": args.num_steps}
        chain |= {"reference_size": args.reference_size, "undirected": args.undirected}
        return partial(gas.MHAug, **chain), weights
    weights = {key: v or 0.0 for key, v in given.items()}
    if args.augment == "drop_edge":
        return partial(gas.augment.DropEdge, p=args.drop, undirected=args.undirected), weights
    return None, weights


def make_experiment(args: Options) -> Experiment:
    """Make the experiment that the command line describes."""
    is_mapped = _is_mapped(args)
    args, micro_batches = _restore_plan(args)
    settings, model = args.settings(), args.model or "gcn"
    same = (
        "full_batch", "refresh", "layout", "partition", "prefetch", "evaluate_every", "patience",
        "check", "device", "store", "dtype", "path", "io",
    )  # fmt: skip
    options = {name: getattr(args, name) for name in same}
    if args.hetero:
        return hetero.HeteroExperiment(hetero.open_types(args), settings, args.seed, **options)
    libraries = None
    if args.memory_report:
        libraries = resident_bytes()
        limit_freed_memory()  # Else up to a fifth would be unused memory between blocks.
    data, _, out_channels = gas.get_data(
        args.root,
        args.dataset,
        check=args.check,
        undirected=args.undirected,
        columns=args.column_names(),
        sparse_features=args.sparse_features is True,
        split=0 if args.inductive else "all",  # It trains on the nodes of one.
        in_place=is_mapped,
        log=True,
    )
    _suggest_norm(args, settings, data)
    if args.feature_dtype or args.feature_store:
        data.x = gas.quantize(data.x, args.feature_dtype or "float32", args.feature_store)
    elif args.sparse_features is None:
        data = with_sparse_features(data, "auto", MODELS[model].gains_by_sparse, log=True)
    augment, weights = make_augmentation(args)
    parts = args.out / PARTS_FOLDER
    if args.overwrite and any(parts.glob("*.json")):  # A graph folder, or an unfinished one.
        shutil.rmtree(parts)
    return Experiment(
        data,
        out_channels,
        model,
        settings,
        **options,
        evaluation=args.eval,
        memory_budget=None if args.memory_budget is None else int(args.memory_budget * 2**20),
        memory=None if args.full_batch else args.memory,
        micro_batches=micro_batches,
        pack=None if args.full_batch or args.pack is None else [*args.pack, "auto"][0],
        augment=augment,
        keep_edges=False,
        folder=parts,
        libraries=libraries,
        training={
            "scale_loss": args.scale_loss,
            "refresh_unlabelled": not args.skip_unlabelled,
            "autocast": torch.bfloat16 if args.autocast else None,
            "view_loss": None if augment is None else partial(gas.augment.mh_aug_loss, **weights),
            "bank": args.bank,
        },
    )


def _is_mapped(args: Options) -> bool:
    """Return whether the features of a graph folder stay there: some options need memory."""
    if not Path(args.dataset).exists() or not is_graph_folder(args.dataset):
        return False
    needs_memory = ("full_batch", "inductive", "augment", "feature_dtype", "feature_store",
                    "sparse_features")  # fmt: skip
    given = next((name for name in needs_memory if getattr(args, name)), None)
    if given is not None:
        check_folder_fits(args.dataset, SHOWN[given])
    return given is None


def describe_graph(args: Options) -> dict[str, Any]:
    """Return the options that the graph was opened with, for a later command to open it again."""
    path = Path(args.dataset)
    return {
        "path": str(path.resolve()) if path.exists() else None,
        "root": str(Path(args.root).resolve()),
        "check": args.check,
        "undirected": args.undirected,
        "columns": args.column_names(),
        "sparse_features": args.sparse_features is True,
        "feature_names": find_feature_names(path, args.column_names()) if path.exists() else None,
    }


def print_warnings_as_lines(shown: Mapping[str, str] = SHOWN) -> None:
    """Print warnings from now on as a line each; see :func:`explain_error`."""
    warnings.showwarning = lambda text, *_, **__: print(
        f"warning: {explain_error(text, shown)}", file=sys.stderr
    )


def explain_error(error: BaseException | str, shown: Mapping[str, str] = SHOWN) -> str:
    """Return the text of an error or a warning, with command line options for arguments.

    Args:
        error: The error or the warning.
        shown: How arguments are typed, by their names. (default: in ``gas train``)
    """

    def rename(found: re.Match[str]) -> str:
        option, value = shown.get(found["given"] or found["name"]), found["value"]
        if option is None or (found["given"] and not option.startswith("--")):
            return found[0]
        if value == "False":
            return option.replace("--", "--no-", 1)
        return option if value in (None, "True") else f"{option} {value}"

    text = str(error).strip("\n").rstrip()
    if isinstance(error, OSError) and error.errno:
        is_plain = error.strerror == os.strerror(error.errno)  # Else it says what to do.
        parts = (error.filename, error.strerror, is_plain and _CURES.get(error.errno))
        text = ": ".join(str(part) for part in parts if part)
    elif "can't allocate memory" in text:  # PyTorch's allocator raises a RuntimeError.
        return f"{text.splitlines()[0]}: {_NOT_ENOUGH_MEMORY}"
    text = re.sub(
        r"columns=\{(.*?)\}",
        lambda found: (
            "--columns " + re.sub(r"'(\w+)': '?(.*?)'?(, |$)", r"\1=\2 ", found[1]).rstrip()
        ),
        text,
    )
    # The option has other values than the argument.
    norms = {"None": "none", "False": "none", "True": "batch"}
    text = re.sub(
        r"'batch_norm' is (\w+), but now it is (\w+)",
        lambda found: "'batch_norm' is {}, but now it is {}".format(
            *map(norms.get, found.groups())
        ),
        text,
    )
    argument = r"(?<![/\\,])\b(?P<given>\w+)='?(?P<value>\w+)'?"  # Not within paths.
    # Quoted values, columns and types of the user stay as they are.
    name = r"(?<!is )(?<!use )(?<!of )(?<!, )(?<!type )(?<!column )(?<!\()'(?P<name>\w+)'"
    text = re.sub(f"{argument}|{name}", rename, text)
    if isinstance(
        error, (str, Warning, ValueError, ArithmeticError, ImportError, OSError, MemoryError)
    ):
        return text
    return f"{text} ({type(error).__name__}; --debug shows where)"


_NOT_ENOUGH_MEMORY = "pass --memory, which plans mini-batches that fit, or more --num-parts"
_NOT_WRITABLE = "name a folder that can be written, by --out, --path or --root"
_CURES = {
    errno.ENOENT: "check the path, or name another",
    errno.EROFS: _NOT_WRITABLE,
    errno.EACCES: _NOT_WRITABLE,
    errno.EPERM: _NOT_WRITABLE,
    errno.ENOMEM: _NOT_ENOUGH_MEMORY,
    errno.ENOSPC: "free some room, or name a folder on another disk",
}
