"""The models and settings of an experiment, from a YAML file or by default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gas
from gas.native import check_integer, warn
from gas.training import METRICS

if TYPE_CHECKING:
    from typing import Annotated as Choice
else:

    class Choice:
        """Make a ``Literal`` of names: ``Choice[str, NAMES]``."""

        def __class_getitem__(cls, item: tuple[type, tuple[str, ...]]) -> Any:
            """Return the type."""
            return Literal[item[1]]


MODELS: dict[str, type[gas.models.LayeredGNN]] = {
    "appnp": gas.models.APPNP,
    "gat": gas.models.GAT,
    "gcn": gas.models.GCN,
    "gcn2": gas.models.GCN2,
    "gin": gas.models.GIN,
    "pna": gas.models.PNA,
    "pna_jk": gas.models.PNA_JK,
    "sage": gas.models.GraphSAGE,
}
NORMALISED = tuple(name for name in MODELS if name not in ("appnp", "gat"))
DENSE = 30  # Edges per node from which a hint recommends batch norm.
REFRESHES = ("none", "full", "layerwise")
EVALUATIONS = ("full", "layerwise")
# The default arguments of models.
_TWO_LAYERS = {"num_layers": 2, "hidden_channels": 64, "dropout": 0.5}
_PNA = {"aggregators": ["mean", "max"], "scalers": ["identity", "amplification"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gcn": _TWO_LAYERS,
    "gat": {**_TWO_LAYERS, "hidden_channels": 8, "hidden_heads": 8, "out_heads": 1},
    "appnp": {**_TWO_LAYERS, "num_layers": 10},
    "gcn2": {**_TWO_LAYERS, "num_layers": 8},
    "gin": _TWO_LAYERS,
    "sage": _TWO_LAYERS,
    "pna": {**_TWO_LAYERS, **_PNA},
    "pna_jk": {**_TWO_LAYERS, **_PNA},
}


ABOUT = ("dataset", "model", "published")  # Further entries of a file.


@dataclass(frozen=True)
class Settings:
    """Hold the settings of an experiment."""

    architecture: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model."""
    num_parts: int | None = None
    """The number of parts of the graph. (None: a part for every 300 nodes, at most 256)"""
    batch_size: int | None = None
    """Parts per mini-batch. (None: an eighth of all parts)"""
    lr: float = 0.01
    """The learning rate of Adam."""
    reg_weight_decay: float = 0.0
    """The weight decay of all layers but the last; in models with linear layers at both ends, that
    of the convolutions."""
    nonreg_weight_decay: float = 0.0
    """The weight decay of the other layers."""
    grad_norm: float | None = None
    """Clip the norm of the gradient to this value. In a file of --config, grad_norm: null turns
    clipping off. (None: no clipping)"""
    edge_dropout: float = 0.0
    """The probability of dropping an edge of a batch."""
    max_steps: int | None = None
    """The maximum number of steps per epoch. (None: no limit)"""
    epochs: int = 100
    """The number of epochs."""
    runs: int = 1
    """The number of runs, each with another seed."""
    metric: Choice[str, METRICS] | None = None
    """The score that selects the best epoch. (None: the usual one for the targets)"""
    inductive: bool = False
    """Train on the subgraph of the training nodes, and evaluate on the whole graph."""
    correct_drift: bool = False
    """Correct stale rows of the histories; see gas.train_epoch."""
    average_weights: bool = False
    """Evaluate and keep the average of the last epoch's weights; see gas.fit."""
    warm_up: int | None = 0
    """Raise the learning rate linearly over this many steps. Without a file of settings, the
    default is that of gas.fit; with one, 0."""

    def __post_init__(self) -> None:
        for name in ("num_parts", "batch_size", "max_steps", "epochs", "runs", "warm_up"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, 0 if name == "warm_up" else 1)
        for name in ("lr", "reg_weight_decay", "nonreg_weight_decay", "grad_norm", "edge_dropout"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and (not number or not 0 <= value < math.inf):
                hint = ": write 0.0005 for 5e-4, which YAML takes for text" * isinstance(value, str)
                raise ValueError(
                    f"'{name}' is {value!r}, expected a finite number of at least 0{hint}"
                )
        if self.edge_dropout >= 1:
            raise ValueError(f"'edge_dropout' is {self.edge_dropout}, expected less than 1")
        if self.metric is not None and self.metric not in METRICS:
            raise ValueError(f"'metric' is {self.metric!r}, expected one of {', '.join(METRICS)}")

    @classmethod
    def default(cls, model: str) -> Settings:
        """Return the default settings of a model.

        As in :func:`gas.fit`, gradients are clipped, stale rows are corrected, weights are
        averaged, and the learning rate has a warm-up.

        Args:
            model: The name of the model, such as ``"sage"``.

        Raises:
            ValueError: If there is no such model.
        """
        if model not in ARCHITECTURES:
            raise ValueError(f"'model' is {model!r}, expected one of {', '.join(ARCHITECTURES)}")
        return cls(
            dict(ARCHITECTURES[model]), grad_norm=1.0, correct_drift=True, average_weights=True,
            warm_up=None,
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> tuple[Settings, dict[str, Any]]:
        """Read settings from a YAML file.

        Args:
            path: The file.

        Returns:
            The settings, and the other entries of the file: the data set, the model, the published
            scores.

        Raises:
            ValueError: If a name or a value can't be used, naming the file.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        content = read_yaml(path, names | set(ABOUT))
        others = {key: content.pop(key) for key in ABOUT if key in content}
        try:
            return cls(**content), others
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def replace(self, **changes: Any) -> Settings:
        """Return a copy with other values.

        Args:
            **changes: The new values of settings, or of arguments of the model; those that are
                ``None`` are ignored.
        """
        changes = {key: value for key, value in changes.items() if value is not None}
        names = {f.name for f in dataclasses.fields(self)}
        architecture = {k: changes.pop(k) for k in list(changes) if k not in names}
        changes["architecture"] = {**self.architecture, **architecture}
        return dataclasses.replace(self, **changes)

    def but(self, **changes: Any) -> Settings:
        """Call :meth:`replace`; deprecated."""
        warn("Settings.but is now Settings.replace; the old name works until version 0.3",
             DeprecationWarning)  # fmt: skip
        return self.replace(**changes)

    def for_size(self, num_nodes: int) -> Settings:
        """Return a copy with ``num_parts`` and ``batch_size`` set for a graph of this size.

        Args:
            num_nodes: The number of nodes of the graph.
        """
        num_parts = self.num_parts or max(1, min(num_nodes // 300, 256))
        batch_size = self.batch_size or max(1, num_parts // 8)
        return dataclasses.replace(self, num_parts=num_parts, batch_size=min(batch_size, num_parts))


def check_modes(model: str, evaluation: str, refresh: str, full_batch: bool) -> None:
    """Refuse unknown names of modes, and a full batch with options of mini-batches."""
    for name, value, known in (
        ("model", model, tuple(MODELS)),
        ("evaluation", evaluation, EVALUATIONS),
        ("refresh", refresh, REFRESHES),
    ):
        if value not in known:
            raise ValueError(f"'{name}' is {value!r}, expected one of {', '.join(known)}")
    if full_batch and (refresh != "none" or evaluation != "full"):
        raise ValueError(
            "'full_batch' is True, which has no histories and no mini-batches: leave "
            "'evaluation' and 'refresh' out"
        )


def read_yaml(path: str | Path, names: Collection[str]) -> dict[str, Any]:
    """Read the entries of a YAML file; refuse names other than ``names``."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "files of settings need the package pyyaml: pip install pyyaml"
        ) from error
    try:
        content = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        raise ValueError(
            f"{path}: is no YAML ({problem}), expected lines such as 'lr: 0.01'"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no settings, expected lines such as 'lr: 0.01'")
    unknown = set(map(str, content)) - set(names)
    if unknown:
        raise ValueError(
            f"{path}: {min(unknown)!r} is no setting, expected some of {', '.join(sorted(names))}"
        )
    return content
