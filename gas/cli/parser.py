"""Options of ``gas train``: the command line by tyro, and YAML files."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from gas.cli.settings import (
    ARCHITECTURES,
    EVALUATIONS,
    MODELS,
    REFRESHES,
    Choice,
    Settings,
    read_yaml,
)
from gas.datasets import dataset_key, dataset_names
from gas.graph import LAYOUTS, METHODS
from gas.history import CODEC_NAMES, IO_MODES, TIERS
from gas.native import replace_file
from gas.scalable import BANKS

SETTINGS = "settings.yaml"
AUGMENTATIONS, DEVICES, NORMS = ("mh_aug", "drop_edge"), ("auto", "cpu", "cuda"), ("none", "batch")
FEATURE_CODECS, FEATURE_STORES, MODEL_NAMES = CODEC_NAMES[1:], ("host", "disk"), tuple(MODELS)
MISSING = "the command needs the package tyro: pip install 'gas-gnn[cli]'"


@dataclass(frozen=True)
class GraphOptions:
    """Choose the graph."""

    dataset: str = "planted:20000"
    """A data set by name, planted:NUM_NODES, a folder of tables, a graph folder, or a .pt or .npz
    file."""
    undirected: bool = False
    """Add missing reverse edges; augmentation then drops both directions of an edge together."""
    sparse_features: bool | None = None
    """Keep features sparse. (None: if fewer than one value in thirty is non-zero, and the model
    gains by it)"""
    feature_dtype: Choice[str, FEATURE_CODECS] | None = None
    """The type of stored features. (None: as they are)"""
    feature_store: Choice[str, FEATURE_STORES] | None = None
    """The place of features; disk maps a temporary file. (None: as they are)"""
    columns: tuple[str, ...] = ()  # Names of columns of tables, ROLE=NAME, such as source=payer.
    hetero: bool = False  # Train a SAGE layer for each relation of tables with types.
    root: Path = Path("data")  # The folder of PyG's data sets.
    check: bool = True  # Refuse NaN and infinite features.


@dataclass(frozen=True)
class ModelOptions:
    """Choose the model, and a file of settings."""

    model: Choice[str, MODEL_NAMES] | None = None  # The model. (None: gcn, or sage with --hetero)
    config: Path | None = None
    """A YAML file of settings, such as settings.yaml of a run, for all options that aren't given.
    (None: no file; examples/train_gas.py takes that of benchmarks/ for the data and the model)"""
    num_layers: int | None = None  # The number of layers.
    hidden_channels: int | None = None  # The width of hidden layers.
    dropout: float | None = None  # The probability of dropping an element of an embedding.
    norm: Choice[str, NORMS] | None = None
    """The norm of hidden layers, except for gat and appnp; batch usually improves the accuracy on
    graphs with at least 30 edges per node. (None: none)"""


@dataclass(frozen=True)
class TrainingOptions:
    """Choose how to train."""

    seed: int = 0  # The seed of the first run.
    device: Choice[str, DEVICES] = "auto"  # The device; auto is cuda where there is one.
    full_batch: bool = False  # Train without mini-batches and histories.
    evaluate_every: int = 1  # Evaluate after every so many epochs, and after the last.
    patience: int | None = None
    """Stop after this many epochs without a better validation score. (None: never)"""
    scale_loss: bool = False  # Weigh each batch by its number of labelled nodes.
    skip_unlabelled: bool = False
    """Skip batches without labelled nodes, so that their rows in the histories become stale."""
    memory_budget: float | None = None
    """The memory of a micro-batch's tensors, in MiB. (None: no limit)"""
    memory: str | None = None
    """The memory limit of the process, such as 6GB. Sets the number of parts, the batch size, and
    the place and precision of histories, unless they are given. (None: no limit)"""
    autocast: bool = False  # Compute in bfloat16.
    checkpoint_every: str | None = None
    """Write checkpoints into the subfolder checkpoints of --out: after this many epochs, or after a
    time such as 10min, also within an epoch; and on SIGTERM or Ctrl-C. (None: no checkpoints, or
    every epoch with --resume)"""
    resume: bool = False
    """Continue from the newest checkpoints in --out, if there are any, with its settings.yaml."""


@dataclass(frozen=True)
class HistoryOptions:
    """Choose mini-batches and histories."""

    partition: Choice[str, METHODS] = "auto"  # The method of partitioning.
    layout: Choice[str, LAYOUTS] | None = None
    """The layout of adjacencies. (None: fused, or csr if gas has no kernels for the device)"""
    store: Choice[str, TIERS] | None = None
    """The place of histories. (None: host; pinned or device with CUDA)"""
    dtype: Choice[str, CODEC_NAMES] | None = None
    """The type of stored histories. (None: float32, or what --memory chooses)"""
    path: Path | None = None  # The folder of --store disk. (None: a temporary one)
    pack: tuple[str, ...] | None = None
    """With --store disk, copy rows in the order in which batches read them, and keep the rows that
    are read most in this much memory, such as 2GB. Without a value: what --memory leaves, or none.
    (None: no packing)"""
    io: Choice[str, IO_MODES] = "concurrent"
    """When rows are moved: serial, when a layer needs them; concurrent, during the computation;
    none, never, which gives wrong results and is for measurements."""
    prefetch: bool = False  # Start the pulls of a batch during the previous one.
    eval: Choice[str, EVALUATIONS] | None = None
    """Evaluate the graph as one batch (full), or layer by layer in mini-batches (layerwise). (None:
    full with --full-batch, and for graphs in memory of at most 20,000 nodes and 3 million edges;
    else layerwise)"""
    verify: bool = False  # Compare mini-batches with the whole graph before training.
    refresh: Choice[str, REFRESHES] | None = None
    """Recompute all histories after each epoch: in one pass over the whole graph (full), layer by
    layer (layerwise), or not at all (none). (None: none with --full-batch, and if weights are
    averaged and --eval is full; else as --eval)"""


@dataclass(frozen=True)
class AugmentationOptions:
    """Choose views of the graph."""

    augment: Choice[str, AUGMENTATIONS] | None = None  # The method. (None: no augmentation)
    num_steps: int = 12  # mh_aug: transitions per epoch.
    reference_size: int | None = None
    """mh_aug: temper the target distribution to that of a graph with this many nodes, so that more
    changes are accepted. (None: no tempering)"""
    drop: float = 0.3  # drop_edge: the probability of dropping an edge.
    kl: float | None = None
    """The weight of the divergence between both views. (None: as published for mh_aug, else 0)"""
    entropy: float | None = None
    """The weight of the entropy of predictions. (None: as published for mh_aug, else 0)"""
    bank: Choice[str, BANKS] = "original"
    """The histories that views read: those of the original graph, or separate ones per view."""


@dataclass(frozen=True)
class OutputOptions:
    """Choose what is written."""

    out: Path = Path("runs")  # The folder of the run.
    overwrite: bool = False  # Overwrite an earlier run in --out.
    tensorboard: bool = False  # Write events for TensorBoard into --out.
    memory_report: bool = False  # Print the memory by component.
    debug: bool = False  # Show the traceback of an error.


GROUPS = {
    "graph": GraphOptions,
    "model": ModelOptions,
    "settings": Settings,
    "training": TrainingOptions,
    "history": HistoryOptions,
    "augmentation": AugmentationOptions,
    "output": OutputOptions,
}
OF_A_CALL = ("config", "out", "overwrite", "resume", "debug")  # Not written into files.
SHAPE = ("num_layers", "hidden_channels", "dropout")


@dataclass(frozen=True)
class Options(
    GraphOptions, ModelOptions, Settings, TrainingOptions, HistoryOptions, AugmentationOptions,
    OutputOptions,
):  # fmt: skip
    """Hold all options of ``gas train``."""

    def settings(self) -> Settings:
        """Return the settings, with the arguments of the model that have options of their own."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)}
        norm = None if self.norm is None else self.norm == "batch"
        shape = {name: getattr(self, name) for name in SHAPE}
        return Settings(**own).replace(**shape, batch_norm=norm)

    def column_names(self) -> dict[str, str]:
        """Return the names of columns by their roles."""
        return {role: name for role, _, name in (each.partition("=") for each in self.columns)}

    def write(self, path: Path) -> None:
        """Write a YAML file that ``--config`` reads."""
        import yaml

        left_out = {*OF_A_CALL, *SHAPE, "norm"}
        names = [f.name for cls in GROUPS.values() for f in dataclasses.fields(cls)]
        found = {name: _to_yaml(getattr(self, name)) for name in names if name not in left_out}
        found["architecture"] = dict(self.settings().architecture)
        for name in ("dataset", "root", "path"):  # For calls in another folder.
            if found[name] is not None and Path(found[name]).exists():
                found[name] = str(Path(found[name]).resolve())
        with replace_file(path) as file:
            file.write_text(yaml.safe_dump(found, sort_keys=False))


NAMES = {f.name for f in dataclasses.fields(Options)}
# Options of ``gas train`` by the names of arguments, some of which have another name.
SHOWN = {name: f"--{name.replace('_', '-')}" for name in NAMES} | {
    "evaluation": "--eval",
    "augmented": "--augment",
    "graph": "--dataset",
    "every": "--checkpoint-every",
    "batch_norm": "--norm",
    "budget_bytes": "--memory-budget, in bytes,",
}
HINTS = get_type_hints(Options)
CAN_BE_NONE = {name for name, hint in HINTS.items() if NoneType in get_args(hint)}


def parse(
    arguments: Sequence[str] | None, prog: str | None, files: str | Path | None = None
) -> tuple[Options, Options]:
    """Parse a command line; other options are those of a file, or the defaults of the model.

    Returns:
        The options, and the same without the command line.
    """
    if importlib.util.find_spec("tyro") is None:
        raise ImportError(MISSING)
    first = _call_tyro(Options(), arguments, prog, return_unknown_args=True, add_help=False)
    base = _read_base_options(first, files)
    return _call_tyro(base, arguments, prog), base


def _call_tyro(
    base: Options, arguments: Sequence[str] | None, prog: str | None, **options: Any
) -> Options:
    """Parse a command line; the defaults are the options ``base``."""
    import tyro

    groups = []
    for name, cls in GROUPS.items():
        values = {f.name: getattr(base, f.name) for f in dataclasses.fields(cls)}
        if cls is Settings:
            values["architecture"] = {}  # Its entries would be options.
        # Values are checked below, where errors are ours.
        body = {"__doc__": cls.__doc__, "__post_init__": lambda self: None}
        group = type(cls.__name__, (cls,), body)
        groups.append((name, group, dataclasses.field(default=group(**values))))
    found = tyro.cli(
        dataclasses.make_dataclass("Train", groups),
        args=arguments,
        prog=prog,
        description="Train a graph neural network with historical embeddings.\n\n"
        f"Data sets: {', '.join(dataset_names())}.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.SuppressFixed),
        **options,
    )
    parsed = found[0] if isinstance(found, tuple) else found
    values = {k: v for group in vars(parsed).values() for k, v in vars(group).items()}
    return Options(**{**values, "architecture": base.architecture})


def _read_base_options(given: Options, configs: str | Path | None) -> Options:
    """Return the options that apply unless the command line gives others.

    They are those of the file of ``--config``, of the run to resume, of a published configuration,
    or the defaults of the model.

    Raises:
        ValueError: If ``--model`` contradicts them.
    """
    model, kept = given.model or ("sage" if given.hetero else "gcn"), given.out / SETTINGS
    pattern = f"*/{dataset_key(given.dataset)}_{model}.yaml"
    known = [] if configs is None or given.hetero else sorted(Path(configs).glob(pattern))
    if given.config is not None:
        base = read_options(given.config)
    elif given.resume and kept.exists():
        base = read_options(kept)
    elif known:  # Its dataset has another spelling, and its runs are of a benchmark.
        base = dataclasses.replace(read_options(known[0]), dataset=given.dataset, runs=1)
    else:
        base = Options(**vars(Settings.default(model)))
    if base.hetero and given.model is None:
        model = "sage"
    if given.model is not None and base.model not in (None, given.model):
        path = given.config or kept
        raise ValueError(f"'--model' is {given.model}, but {path} is for {base.model}")
    model = base.model or model
    needed = {name: ARCHITECTURES[model][name] for name in ("num_layers", "hidden_channels")}
    shape = {**needed, **base.architecture} if base.architecture else ARCHITECTURES[model]
    own: dict[str, Any] = {name: shape.get(name) for name in SHAPE if getattr(base, name) is None}
    if "batch_norm" in shape and base.norm is None:
        own["norm"] = "batch" if shape["batch_norm"] else "none"
    return dataclasses.replace(base, model=model, architecture=shape, **own)


def read_options(path: Path) -> Options:
    """Read options from a YAML file, with the checks of the command line."""
    values = read_yaml(path, (NAMES | {"published"}) - {"config"})
    architecture, _ = values.pop("architecture", None), values.pop("published", None)
    if not isinstance(architecture or {}, dict):
        raise ValueError(f"{path}: 'architecture' is {architecture!r}, expected names and values")
    tokens: list[str] = []
    for name, value in values.items():
        if HINTS[name] is bool and not isinstance(value, (bool, NoneType)):
            raise ValueError(f"{path}: {name!r} is {value!r}, expected true or false")
        if isinstance(value, bool):
            tokens.append(f"--{'' if value else 'no-'}{name}")
        elif value is not None:
            tokens += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    try:
        found = _call_tyro(Options(), tokens, f"gas train --config {path}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    off: dict[str, Any] = {
        name: None for name in CAN_BE_NONE.intersection(values) if values[name] is None
    }
    return dataclasses.replace(found, architecture=architecture or {}, **off)


def _to_yaml(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
