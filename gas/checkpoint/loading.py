"""``load``: going on from a checkpoint, which is read without trust."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import gas.checkpoint.generators as generators
from gas.checkpoint import histories as stored
from gas.checkpoint.errors import CheckpointError
from gas.checkpoint.files import MANIFEST, check_files, checkpoints, read_manifest
from gas.checkpoint.saving import MODEL, STATE, bare, finish_quietly, weights_of
from gas.checkpoint.tensors import TensorFile, Written
from gas.checkpoint.values import from_json
from gas.scalable.model import ScalableGNN
from gas.scalable.views import set_banks


def load(
    folder: str | Path,
    model: Module | None = None,
    optimizer: Any = None,
    loader: Any = None,
    *,
    histories: bool = True,
    random_state: bool = True,
    **objects: Any,
) -> dict[str, Any]:
    """Goes on from a checkpoint that :func:`gas.save` has written.

    Everything is read and checked before anything is changed::

        state = gas.load("checkpoints", model, optimizer, loader)
        for epoch in range(state["epoch"] + 1, epochs):
            ...

    A loader whose epoch had begun goes on with its next mini-batch when it is iterated next. With a
    ``prefetch=1`` model, the first one then reads rows that are one step newer than they would have
    been; everything else goes on bit by bit.

    Args:
        folder: The folder of a training's checkpoints, of which the newest complete one is read; or
            one checkpoint.
        model: Gets the weights, and the histories. A plain module gets the weights of the model
            that was made of it by :func:`gas.to_scalable`, and the other way round.
            (default: none)
        optimizer: Made for ``model``, of the same class as before. (default: none)
        loader: Of the same graph, cut in the same way. (default: none)
        histories: Load the histories. (default: ``True``)
        random_state: Set the random numbers of Python, NumPy and PyTorch. (default: ``True``)
        **objects: What was saved by ``state_dict()``, under the same names.

    Returns:
        What else was saved, by its names.

    Raises:
        CheckpointError: A ``ValueError``: if there is no checkpoint, or it is damaged, of something
            else, or of a newer version; it says why, and which one before it is sound.
        ValueError: If it is that of another model, optimizer, graph or partition. Nothing was
            changed in either case.
    """
    folder = Path(folder).absolute()
    finish_quietly(folder)
    model = None if model is None else bare(model)
    paths = [folder] if (folder / MANIFEST).exists() else checkpoints(folder)
    if not paths:
        raise _nothing(folder)
    try:
        found = _Found(paths[-1])
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_advice(paths)}") from error
    return found.load(model, optimizer, loader, histories, random_state, objects)


def peek(folder: str | Path, *names: str) -> dict[str, Any]:
    """What was saved by some names in the newest checkpoint; nothing else is read.

    Raises:
        CheckpointError: If there is none, or it is damaged.
    """
    paths = checkpoints(folder)
    if not paths:
        raise _nothing(Path(folder))
    try:
        state = read_manifest(paths[-1]).get("state")
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_advice(paths)}") from error
    state = state if isinstance(state, dict) else {}
    return {name: from_json(state[name], {}) for name in names if name in state}


def _nothing(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"'folder' is {str(folder)!r}, which has no complete checkpoint: expected a folder that "
        "gas.save has written to"
    )


def _advice(paths: list[Path]) -> str:
    """Which checkpoint can be read instead of the last."""
    for path in reversed(paths[:-1]):
        try:
            _Found(path)
        except CheckpointError:
            continue
        return f". The one before is sound: load {str(path)!r}, or remove what is newer"
    return ""


# What optimizers keep of a parameter that has its shape.
LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


class _Found:
    """A checkpoint whose files are what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.manifest = manifest = read_manifest(path)
            check_files(path, manifest)
            self._check_named(MODEL, STATE)
            self.tensors = {name: TensorFile(path / name) for name in (MODEL, STATE)}
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        for key in ("histories", "state", "objects"):
            if not isinstance(manifest.get(key), dict):
                raise CheckpointError(f"{path / MANIFEST} has no {key!r}: it is damaged")
        state = self.tensors[STATE]
        values = {name: state.read(name) for name in state}
        try:
            self.values = {
                key: from_json(manifest.get(key), values)
                for key in ("optimizer", "loader", "random")
            }
            for key in ("objects", "state"):
                self.values[key] = {k: from_json(v, values) for k, v in manifest[key].items()}
        except CheckpointError as error:
            raise CheckpointError(f"{path / MANIFEST}: {error}: it is damaged") from error

    def _check_named(self, *names: str) -> None:
        """Refuses files whose checksums aren't there."""
        for name in names:
            if name not in self.manifest["files"]:
                raise CheckpointError(f"{self.path / MANIFEST} names no file {name}: it is damaged")

    def load(
        self,
        model: Module | None,
        optimizer: Any,
        loader: Any,
        histories: bool,
        random_state: bool,
        objects: dict[str, Any],
    ) -> dict[str, Any]:
        """See :func:`load`."""
        try:
            weights, readings = self._check(model, optimizer, loader, histories, objects)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} holds what no checkpoint has ({type(error).__name__}: {error}): it "
                "is damaged"
            ) from error
        if random_state:
            self._check_random()

        # Nothing was changed so far.
        saved = self.values["objects"]
        given = {**objects, **({} if optimizer is None else {"optimizer": optimizer})}
        if loader is not None:
            given["loader"] = loader
        _restore_all(given, {**saved, **{k: self.values[k] for k in ("optimizer", "loader")}})
        if model is not None:
            plain = model.plain if isinstance(model, ScalableGNN) else model
            plain.load_state_dict(dict(weights))
        if histories and isinstance(model, ScalableGNN):
            views = {name.split("_")[1] for name in readings if name.startswith("view_")}
            set_banks(model, len(views))
            for name, history in stored.named(model).items():
                about = self.manifest["files"][f"{name}.safetensors"]
                readings[name].restore(history, Written(about["bytes"], about["crc32"]))
        if random_state:
            generators.restore(self.values["random"])
        others = {name: value for name, value in saved.items() if name not in objects}
        return {**self.values["state"], **others}

    def _check(
        self,
        model: Module | None,
        optimizer: Any,
        loader: Any,
        histories: bool,
        objects: dict[str, Any],
    ) -> tuple[Mapping[str, Tensor], Mapping[str, stored.Reading]]:
        """What the model is to get; all that is given fits."""
        weights: Mapping[str, Tensor] = {}
        readings: dict[str, stored.Reading] = {}
        if model is not None:
            weights = self._weights_for(model)
            if histories and isinstance(model, ScalableGNN):
                readings = self._histories_for(model)
        saved = self.values["objects"]
        for name, value in (("optimizer", optimizer), ("loader", loader), *objects.items()):
            given = saved.get(name) if name in objects else self.values[name]
            if value is not None and given is None:
                raise ValueError(f"'{name}' is given, but {self.path} has none: leave it out")
        if optimizer is not None:
            _check_optimizer(optimizer, self.values["optimizer"])
        if loader is not None and hasattr(loader, "check_state"):
            loader.check_state(self.values["loader"])
        return weights, readings

    def _weights_for(self, model: Module) -> Mapping[str, Tensor]:
        """The weights, which fit the model."""
        file, mine = self.tensors[MODEL], weights_of(model)
        for name in [*mine, *file]:
            if name not in file or name not in mine:
                has, lacks = ("'model'", str(self.path)) if name in mine else (self.path, "'model'")
                raise ValueError(
                    f"{has} has the weight {name!r}, and {lacks} has not: make the model as it was "
                    "when the checkpoint was written"
                )
            dtype, shape = file.about(name)
            if shape != tuple(mine[name].shape) or dtype != mine[name].dtype:
                raise ValueError(
                    f"'model' has {name!r} of {mine[name].dtype} and shape "
                    f"{list(mine[name].shape)}, but {self.path} of {dtype} and {list(shape)}: make "
                    "the model as it was when the checkpoint was written"
                )
        return {name: file.read(name) for name in file}

    def _histories_for(self, model: ScalableGNN) -> dict[str, stored.Reading]:
        """The histories, which fit the model."""
        found: dict[str, Any] = self.manifest["histories"]
        each = dict(enumerate(model.histories))
        names = {f"history_{number}": number for number in each}
        for view in range(2):
            if f"view_{view}_history_0" in found:
                names |= {f"view_{view}_history_{number}": number for number in each}
        if found.keys() != names.keys():
            raise ValueError(
                f"'model' has {len(each)} histories, but {self.path} has {len(found)}, those of "
                "views included: make the model as it was, or pass histories=False, which loads "
                "the rest"
            )
        readings = {
            name: stored.Reading(self.path, name, found[name], each[number])
            for name, number in names.items()
        }
        for reading in readings.values():
            self._check_named(*(file.path.name for file in reading.files))
        return readings

    def _check_random(self) -> None:
        try:
            generators.check(self.values["random"])
        except Exception as error:  # Whatever the generators say.
            raise CheckpointError(
                f"{self.path} has no state of random numbers that this Python can take "
                f"({error}): pass random_state=False"
            ) from error


def _check_optimizer(optimizer: Any, state: Any) -> None:
    """Refuses the state of another optimizer.

    Raises:
        ValueError: Naming what differs.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        raise ValueError("'optimizer' is one of PyTorch's, but what was saved was none")
    sizes = [len(group["params"]) for group in groups]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    names = set(optimizer.defaults) - set(groups[0])
    if sizes != mine or names:
        raise ValueError(
            f"'optimizer' has groups of {mine} parameters"
            f"{f' and {min(names)!r}' if names else ''}; what was saved has groups of {sizes}"
            f"{' without' if names else ''}: make it "
            "as it was when the checkpoint was written"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in state["state"].get(number, {}).items():
            if key in LIKE_PARAMETERS and value.shape != parameter.shape:
                raise ValueError(
                    f"'optimizer' has parameter {number} of shape {list(parameter.shape)}, but "
                    f"{key!r} of {list(value.shape)} was saved: make it as it was"
                )


def _restore_all(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restores objects; if one refuses, the others are put back."""
    before = {name: copy.deepcopy(_state(value)) for name, value in objects.items()}
    done = []
    try:
        for name, value in objects.items():
            done.append(name)
            _set_state(value, states[name])
    except Exception as error:  # Whatever an object says.
        for name in done:
            with contextlib.suppress(Exception):  # It may refuse that, too.
                _set_state(objects[name], before[name])
        raise ValueError(
            f"'{done[-1]}' can't take what was saved ({type(error).__name__}: {error}): make it as "
            "it was when the checkpoint was written"
        ) from error


def _state(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)
