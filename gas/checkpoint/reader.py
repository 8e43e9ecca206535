"""``CheckpointReader``: checks a checkpoint, then restores from it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from gas.checkpoint import histories as stored
from gas.checkpoint.files import MANIFEST, check_files, read_manifest
from gas.checkpoint.target import LoadTarget
from gas.checkpoint.tensors import CheckpointError, Checksum, TensorFile
from gas.checkpoint.values import check_rng_states, from_json, restore_rng_states
from gas.checkpoint.writer import MODEL, STATE, classes_of_torch, state_of, weights_of
from gas.scalable import HeteroModel, ScalableGNN, set_banks

if TYPE_CHECKING:
    from gas.history import History

Readings = Mapping[str, stored.StoredHistory]  # The stored histories, by their names.
# Entries of optimizers with the shape of the parameter.
LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


class CheckpointReader:
    """Open one checkpoint and check its files against the manifest."""

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
                for key in ("optimizer", "loader", "random", "ranks")
            }
            for key in ("objects", "state"):
                self.values[key] = {k: from_json(v, values) for k, v in manifest[key].items()}
            order = manifest.get("node_order")  # Older checkpoints have none.
            kinds = [type(each) for each in order] if isinstance(order, list) else order
            if kinds not in (None, [int, int]):
                raise CheckpointError(f"'node_order' is {order!r}, expected two integers")
            self.node_order = None if order is None else (order[0], order[1])
        except CheckpointError as error:
            raise CheckpointError(f"{path / MANIFEST}: {error}: it is damaged") from error

    def _check_named(self, *names: str) -> None:
        """Check that the manifest has checksums of these files."""
        for name in names:
            if name not in self.manifest["files"]:
                raise CheckpointError(f"{self.path / MANIFEST} names no file {name}: it is damaged")

    @property
    def about(self) -> dict[str, Any]:
        """Description of the rank that saved it and of its graph; see :func:`save_on_ranks`."""
        if isinstance(self.values["ranks"], dict):
            return self.values["ranks"]
        state = self.values["loader"]  # The checkpoint is of a single process.
        return {"cut": None, "perm": state.get("perm") if isinstance(state, dict) else None}

    def prepare(self, into: LoadTarget) -> Callable[[], dict[str, Any]]:
        """Check everything; return a function that restores the target; see :func:`load`."""
        try:
            weights, readings = self._check(into)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} holds what no checkpoint has ({type(error).__name__}: {error}): it "
                "is damaged"
            ) from error
        if into.random_state:
            self._check_random_states()
        model, saved = into.model, self.values["objects"]

        def load() -> dict[str, Any]:
            states = {**saved, **{key: self.values[key] for key in ("optimizer", "loader")}}
            _restore_all(into.given, states)
            if model is not None:
                plain = model._checkpoint_module if isinstance(model, stored.MODELS) else model
                plain.load_state_dict(dict(weights))
            if into.histories and isinstance(model, stored.MODELS):
                views = {name.split("_")[1] for name in readings if name.startswith("view_")}
                if isinstance(model, ScalableGNN):
                    set_banks(model, len(views))
                model._calls.order = self.node_order
                for name, history in stored.name_histories(model).items():
                    file = self.manifest["files"][f"{name}.safetensors"]
                    readings[name].restore(history, Checksum(file["bytes"], file["crc32"]))
            if into.random_state:
                restore_rng_states(self.values["random"])
            others = {name: value for name, value in saved.items() if name not in into.given}
            return {**self.values["state"], **others}

        return load

    def _check(self, into: LoadTarget) -> tuple[Mapping[str, Tensor], Readings]:
        """Check the target against the checkpoint; return the state of the model."""
        weights: Mapping[str, Tensor] = {}
        readings: Readings = {}
        if into.model is not None:
            weights = self._weights_for(into.model)
            if into.histories and isinstance(into.model, stored.MODELS):
                readings = self._read_histories(into.model, into.num_rows)
        saved = self.values["objects"]
        for name in into.given:
            state = saved.get(name) if name in into.objects else self.values[name]
            if state is None:
                raise ValueError(f"'{name}' is given, but {self.path} has none: leave it out")
            if isinstance(into.given[name], torch.optim.Optimizer):
                _check_optimizer(name, into.given[name], state)
        # Former versions have that of the optimizer alone.
        classes = self.manifest.get("classes", {"optimizer": self.manifest.get("optimizer_class")})
        for name, given in classes_of_torch(into.given).items():
            before = classes.get(name) if isinstance(classes, dict) else None
            if before not in (None, given):
                raise ValueError(
                    f"'{name}' is of the class {given}, but that of {self.path} was of {before}: "
                    "make it as it was when the checkpoint was written"
                )
        if hasattr(into.loader, "check_state"):
            into.loader.check_state(self.values["loader"])
        return weights, readings

    def _weights_for(self, model: Module) -> Mapping[str, Tensor]:
        """Read the weights, and check that they fit the model."""
        file, mine = self.tensors[MODEL], weights_of(model)
        for name in [*mine, *file]:
            if name not in file or name not in mine:
                has, lacks = ("'model'", str(self.path)) if name in mine else (self.path, "'model'")
                raise ValueError(
                    f"{has} has the weight {name!r}, and {lacks} has not: make the model as it was "
                    "when the checkpoint was written"
                )
            dtype, shape = file.dtype_and_shape(name)
            if shape != tuple(mine[name].shape) or dtype != mine[name].dtype:
                raise ValueError(
                    f"'model' has {name!r} of {mine[name].dtype} and shape "
                    f"{list(mine[name].shape)}, but {self.path} of {dtype} and {list(shape)}: make "
                    "the model as it was when the checkpoint was written"
                )
        return {name: file.read(name) for name in file}

    def _read_histories(self, model: ScalableGNN | HeteroModel, num_rows: int | None) -> Readings:
        """Open the stored histories, by their names, and check that they fit the model."""
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
        return {n: self.read_history(n, each[number], num_rows) for n, number in names.items()}

    def read_history(self, name: str, like: History, num_rows: int | None) -> stored.StoredHistory:
        """Open and check a stored history."""
        reading = stored.StoredHistory(
            self.path, name, self.manifest["histories"][name], like, num_rows
        )
        self._check_named(*(file.path.name for file in reading.files))
        return reading

    def _check_random_states(self) -> None:
        """Raise ``CheckpointError`` if the saved random states can't be restored."""
        try:
            check_rng_states(self.values["random"])
        except Exception as error:  # The generators may raise any error.
            raise CheckpointError(
                f"{self.path} has no state of random numbers that this Python can take "
                f"({error}): pass random_state=False"
            ) from error


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Refuse the state of another optimizer."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        raise ValueError(
            f"'{name}' is an optimizer, but what was saved by this name was none: give an object "
            "like that one, or leave it out"
        )
    sizes = [len(group["params"]) for group in groups]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    names = set(optimizer.defaults) - set(groups[0])
    if sizes != mine or names:
        raise ValueError(
            f"'{name}' has groups of {mine} parameters"
            f"{f' and {min(names)!r}' if names else ''}; what was saved has groups of {sizes}"
            f"{' without' if names else ''}: make it "
            "as it was when the checkpoint was written"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in state["state"].get(number, {}).items():
            if key in LIKE_PARAMETERS and value.shape != parameter.shape:
                raise ValueError(
                    f"'{name}' has parameter {number} of shape {list(parameter.shape)}, but "
                    f"{key!r} of {list(value.shape)} was saved: make it as it was"
                )


def _restore_all(objects: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restore objects; if one raises an error, restore their previous states."""
    before = {name: copy.deepcopy(state_of(name, value)) for name, value in objects.items()}
    done = []
    try:
        for name, value in objects.items():
            done.append(name)
            _set_state(value, states[name])
    except Exception as error:  # Objects of the user may raise any error.
        for name in done:
            with contextlib.suppress(Exception):  # This may fail, too.
                _set_state(objects[name], before[name])
        raise ValueError(
            f"'{done[-1]}' can't take what was saved ({type(error).__name__}: {error}): make it as "
            "it was when the checkpoint was written"
        ) from error


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)
